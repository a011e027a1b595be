"""What a check says before any weight is read, and that it reads none. Cases by their numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import AddedToken
from torch import Tensor

from contract.tiny import MODELS
from model.test_undeclared import UNKNOWN, changed, llama, unknown
from rewriting.test_vocabulary import COMMON
from rewriting.test_vocabulary import model as with_tokenizer
from symfuse.cli import main
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymfuseError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.merging.stream import PIECE
from symfuse.recipes import Recipe, parse_recipe
from symfuse.recipes.check import Report, Target, check_all
from symfuse.recipes.check.relation import BYTES, TENSORS, _ranges, _spread
from symfuse.recipes.stage import open_models, plan, prepare

WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")


class Unread(Mapping[str, Tensor]):
    """Tensors that nobody may read, but for the type checks of these tests, which look at one of every mapping."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos

    def __getitem__(self, name: str) -> Tensor:
        frame: FrameType = sys._getframe()
        while (outer := frame.f_back) is not None:
            # A wrapper that checks types runs its function, of the same name, or else is checking.
            if "beartype" in outer.f_code.co_filename and outer.f_code.co_name != frame.f_code.co_name:
                return torch.zeros(self.infos[name].shape)
            frame = outer
        raise AssertionError(f"{name} was read")

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def unread(checkpoint: Checkpoint) -> Checkpoint:
    infos = {name: checkpoint.info(name) for name in checkpoint}
    return checkpoint.replace(tensors=Unread(infos), infos=infos)


def recipe_of(known: Mapping[str, Checkpoint], method: str = "linear", base: str | None = None, **more: Any) -> Recipe:
    listed = [name for name in known if name != base or method == "linear"]
    fields = {"merge_method": method, "models": [{"model": name} for name in listed], "base_model": base, **more}
    return parse_recipe({key: value for key, value in fields.items() if value is not None})


def check(recipe: Recipe, known: Mapping[str, Checkpoint] | None = None, **more: Any) -> Report:
    """The check of one recipe."""
    return check_all([recipe], known, **more)[0]


def checked(known: Mapping[str, Checkpoint], *args: Any, sample: bool = True, **more: Any) -> Report:
    return check(recipe_of(known, *args, **more), known, sample=sample)


def texts(report: Report) -> list[str]:
    return [problem.text for problem in report.problems]


def like_merge(known: Mapping[str, Checkpoint], report: Report, recipe: Recipe) -> None:
    """The first problem is the error of the merge."""
    with pytest.raises(SymfuseError) as caught:
        plan(prepare(recipe, open_models(recipe, known)))
    assert (str(caught.value), caught.value.exit_code) == (report.problems[0].text, report.exit_code)


def tuned(checkpoint: Checkpoint, seed: int, share: float) -> Checkpoint:
    """A fine-tune: every tensor moved by noise of that share of its norm."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in checkpoint:
        noise = torch.randn(checkpoint[name].shape, generator=rng, dtype=checkpoint[name].dtype)
        tensors[name] = checkpoint[name] + noise * (share * checkpoint[name].norm() / noise.norm())
    return changed(checkpoint, tensors)


def test_what_each_model_is() -> None:
    a, b = changed(llama(), tie_word_embeddings=True, dtype="float32"), llama(1)
    a = changed(a, {"lm_head.weight": None})
    known = {"a": a, "b": b}
    report = checked(known)
    assert report.possible
    assert report.exit_code == 0
    one, two = report.models
    assert (one.name, one.family, one.declared, one.layers, one.vocabulary) == ("a", "llama", True, 2, 64)
    assert "ffn" in one.alignment
    (strange, _) = checked({"a": unknown(), "b": unknown(1)}, sample=False).models
    assert (strange.family, strange.declared, strange.alignment) == (UNKNOWN, False, "none: by names and shapes")
    assert one.parameters == sum(t.numel() for t in a.values())
    assert one.bytes == 4 * one.parameters
    assert one.dtypes == {"float32": 20}
    assert (one.tied, two.tied, one.tokenizer, one.adapter, one.buffers) == (True, False, False, None, [])
    assert (one.gives, two.gives) == (["config", "names", "dtypes"], [])
    assert (report.base, report.why_base) == ("a", "the first model, as no base_model is given")
    assert report.summary()[0] == (
        "linear of 2 llama models; config, names, dtypes of a (the first model, as no base_model is given); "
        "no tokenizer"
    )
    mixed = replace(report, models=[replace(one, family="llava"), two])
    assert mixed.summary()[0].startswith("linear of 2 models (llava, llama); config")
    assert any("the tie of lm_head.weight" in note for note in report.notes)
    based = checked(known, "linear", "b")
    assert [model.gives for model in based.models] == [["config", "names", "dtypes"], []]
    assert based.summary()[0].endswith("config, names, dtypes of b (the base model); no tokenizer")


def test_declared_families_can_be_aligned() -> None:
    known = {"a": MODELS["bert-mlm"](0), "b": MODELS["bert-mlm"](1)}
    report = checked(known, align={"axes": "all", "anchor": 1})
    assert report.possible
    assert [model.alignment for model in report.models] == ["qk, v, ffn, h, residual, pool, lm"] * 2
    assert not report.warnings  # that they are unrelated is what alignment is for
    (warning,) = checked(known).warnings
    assert warning.startswith("b and a have no relation in this basis (cosine ")
    assert texts(checked(known, align={"layers": "7", "anchor": 1}))[0].startswith("layers '7': the model has layers 0")


def test_align_of_an_unknown_family_is_a_problem() -> None:
    report = checked({"a": unknown(), "b": unknown(1)}, align={"axes": "all"})
    assert [(p.kind, p.exit_code) for p in report.problems] == [("UnknownArchitectureError", 4)]


def test_every_reason_at_once() -> None:
    wide = llama(2, num_hidden_layers=3, vocab_size=66, hidden_size=48, head_dim=12)
    known = {"a": llama(), "b": changed(llama(1), rms_norm_eps=1e-2, hidden_act="gelu"), "c": wide}
    report = checked(known, "dare_linear", "a", sample=False, parameters={"density": 1.5})
    found = "\n".join(texts(report))
    for words in (
        "b and c: the numbers of layers differ: 2 and 3",
        "b and c: the vocabulary sizes differ: 64 and 66; set `tokenizer: {source: union}`",
        "b and c: the hidden sizes (residual stream) differ: 32 and 48",
        "b and c: config.json differs in",
        "b and a: config.json differs in",
        "density of b is 1.5",
    ):
        assert words in found
    assert "only" not in found  # which tensors differ follows from the sizes
    assert len(set(texts(report))) == len(report.problems)
    assert report.exit_code == 5
    assert report.cost is None
    assert (
        report.summary()[0]
        == f"cannot merge: dare_linear of 3 llama models (and {len(texts(report)) - 1} more reasons)"
    )
    like_merge(known, report, recipe_of(known, "dare_linear", "a", parameters={"density": 1.5}))


def test_a_model_that_cannot_be_opened_does_not_hide_another(tmp_path: Path) -> None:
    recipe = parse_recipe({"merge_method": "linear", "models": [{"model": str(tmp_path / n)} for n in ("no", "nor")]})
    report = check(recipe)
    assert [p.kind for p in report.problems] == ["CheckpointError"] * 2
    assert report.exit_code == CheckpointError.exit_code
    assert report.models == []


def test_missing_and_foreign_tensors() -> None:
    gone, more = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.extra.weight"
    known = {"a": llama(), "b": changed(llama(1), {gone: None, more: torch.ones(3)})}
    report = checked(known)
    assert gone in texts(report)[0]
    assert more in texts(report)[0]
    like_merge(known, report, recipe_of(known))
    bert = {"a": MODELS["bert-mlm"](0), "b": MODELS["bert-mlm"](1)}
    bert["b"] = changed(bert["b"], {name: None for name in bert["b"] if "layer.1.output.dense" in name})
    report = checked(bert)
    assert (report.problems[0].kind, report.exit_code) == ("SpecError", 4)
    assert "missing: " in texts(report)[0]


def test_heads_that_differ_and_families() -> None:
    known = {"a": MODELS["bert-mlm"](0), "b": MODELS["bert-token"](0)}
    report = checked(known)
    assert texts(report)[0].startswith("the task heads of a and b differ")
    assert checked(known, heads="drop").possible
    report = checked({"a": MODELS["bert-mlm"](0), "b": MODELS["gpt2-lm"](0)})
    assert texts(report)[0].startswith("a and b: one is a bert, the other a gpt2")


def test_dtypes_that_contradict_the_config() -> None:
    half = {name: tensor.half() for name, tensor in llama(1).items()}
    known = {"a": changed(llama(), dtype="float32"), "b": changed(llama(1), half, dtype="bfloat16")}
    report = checked(known, sample=False)
    assert report.possible
    (warning,) = report.warnings
    assert warning.startswith("b: config.json has dtype bfloat16, but the tensors are stored as 100% float16")


def test_c59_rotary_bases() -> None:
    a = changed(llama(), rope_parameters=None, rope_theta=1e4)
    other = changed(llama(1), rope_parameters=None, rope_theta=1e6)
    report = checked({"a": a, "b": other})
    assert [(f.field, f.ours, f.theirs, f.matters) for f in report.config] == [
        ("rope_parameters.rope_theta", 1e4, 1e6, True)
    ]
    assert "rope_parameters.rope_theta: 10000.0 and 1000000.0" in texts(report)[0]
    same = changed(llama(1), rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=None)
    report = checked({"a": a, "b": same})
    assert report.possible
    assert report.config == []


def test_fields_that_are_only_noted() -> None:
    b = changed(llama(1), attention_dropout=0.1, eos_token_id=5)
    report = checked({"a": llama(), "b": b}, sample=False)
    assert report.possible
    assert {f.field: f.matters for f in report.config} == {"attention_dropout": False, "eos_token_id": False}


def test_c61_layers() -> None:
    known = {"a": llama(), "b": llama(1, num_hidden_layers=3)}
    assert texts(checked(known)) == [
        "a and b: the numbers of layers differ: 2 and 3; a recipe can take as many of each (`slices`, `layer_range`)"
    ]

    def slices(stop: int) -> Report:
        sources = [{"model": "a", "layer_range": [0, 2]}, {"model": "b", "layer_range": [stop - 2, stop]}]
        recipe = parse_recipe({"merge_method": "linear", "slices": [{"sources": sources}]})
        return check(recipe, known, sample=False)

    report = slices(3)
    assert report.possible
    assert report.layers == ["a: layer_range [0, 2] = layers 0 to 1", "b: layer_range [1, 3] = layers 1 to 2"]
    assert report.cost is not None
    assert report.cost.layers == 2
    (text,) = texts(slices(4))
    assert text.startswith("layer_range [2, 4] of b, which has 3 layers (0 to 2;")


def test_c64_task_vectors_from_the_wrong_base() -> None:
    x, y = llama(), llama(1)
    known = {"x": x, "y": y, "one": tuned(x, 2, 0.1), "two": tuned(x, 3, 0.2)}
    right = checked({k: known[k] for k in ("x", "one", "two")}, "task_arithmetic", "x")
    assert right.warnings == []
    assert right.deltas is not None
    assert right.deltas.models == ["one", "two"]
    assert right.deltas.norms == pytest.approx([0.1, 0.2], rel=1e-4)
    assert right.deltas.correlations[0][1] == pytest.approx(0, abs=0.05)
    assert right.deltas.correlations[0][0] == pytest.approx(1)
    wrong = checked({k: known[k] for k in ("y", "one", "two")}, "task_arithmetic", "y")
    assert wrong.possible
    assert [w.partition(" has ")[0] for w in wrong.warnings] == ["the task vector of one", "the task vector of two"]
    assert "points away from it (cosine -0.7" in wrong.warnings[0]
    assert "Is y the model that one was trained from, and was neither of them transformed" in wrong.warnings[0]
    assert wrong.deltas is not None
    assert wrong.deltas.correlations[0][1] == pytest.approx(0.98, abs=0.015)
    assert all(cosine is not None and cosine < -0.6 for cosine in wrong.deltas.with_base)


def test_relations_are_exact_where_all_is_sampled() -> None:
    a = llama()
    b = tuned(a, 1, 0.1)
    embed = b["model.embed_tokens.weight"].clone()
    embed[:16] = a["model.embed_tokens.weight"][:16]
    b = changed(b, {"model.embed_tokens.weight": embed})
    report = checked({"a": a, "b": b})
    names = [name for name in a if a[name].ndim > 1]
    x, y = (torch.cat([c[name].double().flatten() for name in names]) for c in (a, b))
    (r,) = report.relations
    assert r.distance == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-9)
    assert r.cosine == pytest.approx(float(x @ y / x.norm() / y.norm()), rel=1e-9)
    assert r.equal_entries == pytest.approx(16 * 32 / x.numel())
    assert r.equal_rows == pytest.approx(16 / sum(len(a[name]) for name in names))
    assert report.sample is not None
    assert sorted(report.sample.tensors) == sorted(names)
    assert (report.sample.entries, report.sample.bytes) == (x.numel(), 2 * 4 * x.numel())
    (same,) = checked({"a": a, "b": a}).relations
    assert (same.distance, same.cosine, same.equal_entries, same.equal_rows) == (0, pytest.approx(1), 1, 1)


def test_the_sample_is_bounded_and_spread() -> None:
    names = [f"{layer:03}.{kind}" for layer in range(70) for kind in "abcdefg"]
    chosen = _spread(names)
    assert len(set(chosen)) == TENSORS
    assert {name[-1] for name in chosen} == set("abcdefg")
    assert chosen[0] < "003"
    assert chosen[-1] > "066"
    shape, entries = (1000, 7), 7 * 40
    ranges = list(_ranges(shape, entries))
    assert ranges == [(0, 70), (2310, 2380), (4620, 4690), (6930, 7000)]
    assert list(_ranges(shape, BYTES)) == [(0, 7000)]
    assert list(_ranges(shape, 1)) == [(0, 7)]


def test_nan_in_the_sample() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    bad = llama(1)[name].clone()
    bad[0, 0] = float("nan")
    report = checked({"a": llama(), "b": changed(llama(1), {name: bad})})
    assert [p.kind for p in report.problems] == ["CheckpointError"]
    assert f"'{name}' of b" in texts(report)[0]
    assert "1 NaN" in texts(report)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_no_sample_reads_nothing(tied: bool) -> None:
    """Not even a stored alias, which the merge compares with its embedding."""
    tensors = {"lm_head.weight": llama()["model.embed_tokens.weight"].clone()} if tied else {}
    known = {str(i): unread(changed(llama(), tensors, tie_word_embeddings=tied)) for i in range(2)}
    known |= {"2": unread(changed(llama(2), {"model.layers.0.mlp.up_proj.weight": None}))}
    assert checked({k: known[k] for k in "01"}, sample=False).possible
    assert not checked(known, sample=False).possible
    with pytest.raises(AssertionError, match="was read"):
        checked({k: known[k] for k in "01"})


def test_an_alias_that_differs_is_found_in_the_sample() -> None:
    head = llama()["model.embed_tokens.weight"].clone()
    head[0, 0] += 1
    known = {"a": llama(), "b": llama(1)}
    known["a"] = Checkpoint(
        {**dict(known["a"]), "lm_head.weight": head}, {**known["a"].config, "tie_word_embeddings": True}, name="a"
    )
    report = checked(known)
    assert report.problems[0].kind == "SpecError"
    assert "lm_head.weight is tied to model.embed_tokens.weight by config.json" in texts(report)[0]


def test_vocabularies_token_by_token(tmp_path: Path) -> None:
    a = with_tokenizer(tmp_path / "a", 56, [*COMMON, "x"])
    b = with_tokenizer(tmp_path / "b", 56, [*COMMON[:3], *reversed(COMMON[3:])], [AddedToken("y")])
    known = {"a": a, "b": b}
    report = checked(known)
    assert [model.tokenizer for model in report.models] == [True, True]
    assert report.models[0].gives == ["config", "names", "dtypes", "tokenizer"]
    (tokens,) = report.tokenizers
    assert (tokens.models, tokens.only_first, tokens.only_second) == (["a", "b"], 1, 1)
    assert tokens.same + tokens.moved == len(COMMON)
    assert tokens.moved
    assert any("set `tokenizer_source: union`" in warning for warning in report.warnings)
    union = checked(known, tokenizer_source="union")
    assert union.possible
    assert not any("tokenizer_source" in warning for warning in union.warnings)
    assert "vocabulary: " in "\n".join(union.notes)


def test_c07_tokens_without_rows_are_a_warning(tmp_path: Path) -> None:
    known = {name: with_tokenizer(tmp_path / name, 45, COMMON) for name in "ab"}
    report = checked(known, sample=False)
    assert report.possible
    found = [warning for warning in report.warnings if "ids up to 52, but its embedding has 45 rows" in warning]
    assert [warning.split(" has ")[0] for warning in found] == ["the tokenizer of a", "the tokenizer of b"]
    shared = checked(known, tokenizer_source="shared-rows", sample=False)
    assert [problem.exit_code for problem in shared.problems] == [3]
    assert "no row for 't42' (45)" in texts(shared)[0]
    like_merge(known, shared, recipe_of(known, tokenizer_source="shared-rows"))


def test_a_tokenizer_that_cannot_be_read_does_not_hide_others(tmp_path: Path) -> None:
    known = {name: with_tokenizer(tmp_path / name, 54, [*COMMON, name]) for name in "abc"}
    (tmp_path / "a" / "tokenizer_config.json").write_text("{")
    report = checked(known, sample=False)
    assert report.possible
    assert any("the tokenizer files of a cannot be read" in warning for warning in report.warnings)
    assert [tokens.models for tokens in report.tokenizers] == [["b", "c"]]


def test_sizes_of_vocabularies_are_no_problem_if_the_recipe_says_how() -> None:
    known = {"a": llama(), "b": llama(1, vocab_size=66)}
    assert "vocabulary sizes differ: 64 and 66" in texts(checked(known))[0]
    report = checked(known, tokenizer_source="shared-rows")
    assert report.possible
    other = {**known, "b": changed(known["b"], hidden_act="gelu")}
    report = checked(other, tokenizer_source="shared-rows")
    assert len(report.problems) == 1
    assert "hidden_act" in texts(report)[0]
    assert "vocab" not in texts(report)[0]


def test_weights_and_parameters() -> None:
    models = [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 3}}]
    known = {"a": llama(), "b": llama(1)}
    recipe = parse_recipe({"merge_method": "linear", "models": models})
    report = check(recipe, known, sample=False)
    assert report.weights == {"a": [0.25, 0.25], "b": [0.75, 0.75]}
    first, middle, last = report.resolved
    assert (first.tensor, last.tensor) == WEIGHTS
    assert middle.models == ["a", "b"]
    assert middle.weights == [0.25, 0.75]
    assert middle.parameters == {"weight": [1.0, 3.0], "normalize": True}
    models[0]["parameters"] = {"weight": [1, 3]}
    report = check(parse_recipe({"merge_method": "linear", "models": models}), known, sample=False)
    assert report.weights == {"a": [0.25, 0.5], "b": [0.5, 0.75]}


def test_what_it_takes() -> None:
    known = {"a": llama(), "b": llama(1)}
    recipe = recipe_of(known, dtype="bfloat16")
    report = check(recipe, known, target=Target(max_shard_size="20KB", threads=1), sample=False)
    cost = report.cost
    assert cost is not None
    count = report.models[0].parameters
    assert (cost.tensors, cost.bytes, cost.written, cost.dtypes) == (21, 2 * count, 2 * count, {"bfloat16": 21})
    assert cost.read == 2 * 4 * count
    assert cost.seconds == pytest.approx(10 * count / 500e6)
    assert "assumed" in cost.speed
    assert cost.files == 2
    assert cost.disk_needed == 2 * count + 2 * count // 100
    assert cost.disk_free is None
    # The largest tensor is one block of 64 · 32 values, in float64 as the inputs are float32: 3 · (2 + 2) of it.
    assert cost.memory == 250_000_000 + 2**23 + 12 * 64 * 32 * 8
    assert cost.threads == 1
    assert PIECE > 64 * 32


def test_memory_of_methods() -> None:
    known = {name: llama(i) for i, name in enumerate("abc")}

    def memory(method: str) -> int:
        report = check(recipe_of(known, method, "a"), known, target=Target(threads=1), sample=False)
        assert report.cost is not None, texts(report)
        return report.cost.memory - 250_000_000 - 2**23

    block = 64 * 32 * 8
    assert memory("tsv") == 3 * 6 * block
    assert memory("task_arithmetic") == 3 * 5 * block
    assert memory("model_stock") == 9 * 5 * block


def test_c95_c100_the_target(tmp_path: Path) -> None:
    known = {"a": llama(), "b": llama(1)}

    def at(folder: Path, **how: Any) -> Report:
        return check(recipe_of(known), known, target=Target(folder, **how), sample=False)

    report = at(tmp_path / "out")
    assert report.possible
    assert report.cost is not None
    assert report.cost.disk_free
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    assert [(p.kind, p.exit_code) for p in at(tmp_path / "file").problems] == [("OutputError", 8)]
    assert "is a file" in texts(at(tmp_path / "file"))[0]
    (tmp_path / "old").mkdir()
    assert "exists" in texts(at(tmp_path / "old"))[0]
    assert at(tmp_path / "old", overwrite=True).possible


def test_targets_that_are_none(tmp_path: Path) -> None:
    known = {"a": llama(), "b": llama(1)}
    for target in (Path("/"), tmp_path / ("n" * 300), tmp_path / ("q/" * 2500), tmp_path / "new" / ("n" * 300)):
        report = check(recipe_of(known), known, target=Target(target), sample=False)
        assert [problem.exit_code for problem in report.problems] == [8]
        assert report.cost is not None
        assert report.cost.disk_free is None


def test_c95_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
    known = {"a": llama(), "b": llama(1)}
    report = check(recipe_of(known), known, target=Target(tmp_path / "out"), sample=False)
    assert report.problems[0].kind == "OutputError"
    assert "MB free" in texts(report)[0]


def test_several_recipes_and_json(tmp_path: Path) -> None:
    for i, name in enumerate("abc"):
        llama(i).save(tmp_path / name)
    first = {"name": "ab", "merge_method": "linear", "models": [{"model": str(tmp_path / n)} for n in "ab"]}
    second = {"merge_method": "linear", "models": [{"model": "ab"}, {"model": str(tmp_path / "c")}]}
    reports = check_all([parse_recipe(first), parse_recipe(second)])
    assert [report.possible for report in reports] == [True, True]
    assert reports[1].models[0].name == "ab"
    for report in reports:
        data = report.to_dict()
        assert json.loads(json.dumps(data)) == data
        assert data["cost"]["tensors"] == 21
        assert data["summary"] == report.summary()
        assert len(report.summary()) == 3
    broken = {**first, "models": [{"model": str(tmp_path / "a")}, {"model": str(tmp_path / "none")}]}
    (report,) = check_all([parse_recipe(broken), parse_recipe(second)])
    assert report.exit_code == 3


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama(0).save("a")
    llama(1).save("b")
    llama(2, num_hidden_layers=3).save("c")
    run = CliRunner().invoke(main, ["check", "a", "b", "--weights", "1,3", "-o", "out"])
    assert run.exit_code == 0, run.output
    assert "can be merged: linear of 2 llama models" in run.output
    assert "weights in effect: a 0.25, b 0.75" in run.output
    assert not Path("out").exists()
    data = json.loads(CliRunner().invoke(main, ["check", "a", "b", "--json", "--no-sample"]).output)
    (report,) = data["recipes"]
    assert report["possible"]
    assert report["sample"] is None
    Path("recipe.yml").write_text("merge_method: linear\nmodels: [{model: a}, {model: c}]\n")
    run = CliRunner().invoke(main, ["check", "recipe.yml"])
    assert run.exit_code == IncompatibleError.exit_code
    assert "cannot be merged, for 1 reason:" in run.output
    assert "the numbers of layers differ: 2 and 3" in run.output
    run = CliRunner().invoke(main, ["check", "a", "b", "--method", "mean"])
    assert run.exit_code == OptionError.exit_code

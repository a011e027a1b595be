"""Adapters merged into one, in float64: what peft computes with the result is what the merge of the full models is,
each made by peft alone; the merges in shared bases against the papers' formulas."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import symfuse
from command import data, everything, run
from reference import adapters as reference
from symfuse.api import MergedAdapter
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymfuseError
from transporting.trained import base_folder, load, moved, outputs, train, with_adapter

peft = pytest.importorskip("peft", reason="peft is not installed")
WEIGHTS = (0.3, 0.7)
NEAR: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
Options = dict[str, Any]


def of(modules: str, **more: Any) -> Options:
    return {"r": 3, "lora_alpha": 5, "target_modules": modules.split()} | more


# Of two adapters; what peft's own merges do with them: "cat" and "svd", which do not look at factors alone. "wrong":
# another result, without a word.
CASES: dict[str, tuple[str, Options, Options, str]] = {
    "alphas": ("llama", of("q_proj"), of("q_proj", lora_alpha=9), "right"),
    "ranks": ("llama", of("q_proj"), of("q_proj", r=5), "right"),
    "targets": ("llama", of("q_proj"), of("q_proj up_proj"), "right"),
    "patterns": (
        "llama",
        of("q_proj v_proj", rank_pattern={"q_proj": 2}, alpha_pattern={r".*\.1\..*v_proj": 20}),
        of("q_proj v_proj", rank_pattern={"v_proj": 5}),
        "right",
    ),
    "rank-stabilised second": ("llama", of("q_proj"), of("q_proj", use_rslora=True), "right"),
    "rank-stabilised first": ("llama", of("q_proj", use_rslora=True), of("q_proj"), "wrong"),
    "transposed": ("gpt2", of("c_attn c_fc", fan_in_fan_out=True), of("c_attn", fan_in_fan_out=True), "right"),
    "embedding": ("llama", of("embed_tokens q_proj"), of("embed_tokens", lora_alpha=9), "right"),
    "convolution": ("vit", of("projection"), of("projection", r=2), "right"),
    "biases of factors": ("llama-bias", of("q_proj", lora_bias=True), of("q_proj", r=2, lora_bias=True), "wrong"),
    "biases": ("bert", of("query", bias="all"), of("query dense", bias="lora_only"), "refused"),
    "heads": (
        "bert", of("query", modules_to_save=["classifier"]), of("query", modules_to_save=["classifier"]), "refused"
    ),
    "one head": ("bert", of("query", modules_to_save=["classifier"]), of("query"), "wrong"),
    "DoRA": ("llama", of("q_proj", use_dora=True), of("q_proj", r=2, use_dora=True), "wrong"),
    "DoRA and LoRA": ("llama", of("q_proj", use_dora=True), of("q_proj up_proj"), "wrong"),
    "DoRA, transposed": ("gpt2", of("c_attn", use_dora=True, fan_in_fan_out=True), of("c_fc", fan_in_fan_out=True),
                         "wrong"),
}  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path, list[Path]]]:
    """By case, the kind of the base, its folder, and those of two adapters; each made once."""
    folder = tmp_path_factory.mktemp("adapters")

    @cache
    def base(kind: str) -> Path:
        return base_folder(kind, folder / kind)

    @cache
    def make(case: str) -> tuple[str, Path, list[Path]]:
        kind, *options, _ = CASES[case]
        places = [folder / case / str(number) for number in (1, 2)]
        for seed, (one, place) in enumerate(zip(options, places, strict=True), 2):
            train(kind, one, base(kind), place, seed)
        return kind, base(kind), places

    return make


def merged_by_peft(kind: str, base: Path, adapter: Path) -> dict[str, Tensor]:
    """The whole model with an adapter."""
    with warnings.catch_warnings(action="ignore"):
        model = peft.PeftModel.from_pretrained(load(kind, base), adapter).double()
        return dict(model.merge_and_unload().state_dict())


def expected(kind: str, base: Path, places: list[Path], weights: tuple[float, ...] = WEIGHTS) -> dict[str, Tensor]:
    """W + Σ wᵢ (Wᵢ − W) of the whole models."""
    start = load(kind, base).state_dict()
    models = [merged_by_peft(kind, base, place) for place in places]
    return {n: start[n] + sum(w * (m[n] - start[n]) for w, m in zip(weights, models, strict=True)) for n in models[0]}


def same(one: dict[str, Tensor], other: dict[str, Tensor], **near: Any) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **(near or NEAR), msg=lambda text, n=name: f"{n}: {text}")


def merge(places: list[Path], **options: Any) -> MergedAdapter:
    result = symfuse.merge(places, **options)
    assert isinstance(result, MergedAdapter)
    return result


@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_that_of_the_whole_models(case: str, made: Any, tmp_path: Path) -> None:
    kind, base, places = made(case)
    result = merge(places, weights=WEIGHTS)
    assert result.error < 1e-13
    same(merged_by_peft(kind, base, result.save(tmp_path / "out")), wanted := expected(kind, base, places))
    model = load(kind, base)
    model.load_state_dict(wanted)
    torch.testing.assert_close(with_adapter(kind, base, tmp_path / "out"), outputs(kind, model), rtol=1e-5, atol=1e-5)
    off = merge(places, weights=(0.31, 0.69)).save(tmp_path / "off")
    with pytest.raises(AssertionError):
        same(merged_by_peft(kind, base, off), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", ["cat", "svd"])
@pytest.mark.parametrize("case", CASES)
def test_where_peft_merges_otherwise(case: str, way: str, made: Any) -> None:
    kind, base, places = made(case)
    with warnings.catch_warnings(action="ignore"):
        model = peft.PeftModel.from_pretrained(load(kind, base), places[0], adapter_name="a").double()

        def merged() -> dict[str, Tensor]:
            model.load_adapter(places[1], adapter_name="b")
            model.double().add_weighted_adapter(
                ["a", "b"], list(WEIGHTS), "c", combination_type=way, svd_rank=8 if way == "svd" else None
            )
            model.set_adapter("c")
            return dict(model.double().merge_and_unload(adapter_names=["c"]).state_dict())

        if CASES[case][-1] == "refused":
            with pytest.raises(ValueError, match=r"modules_to_save|with bias"):
                merged()
            return
        theirs = merged()
    if CASES[case][-1] == "right":
        same(theirs, expected(kind, base, places), rtol=0, atol=1e-6)
    else:
        with pytest.raises(AssertionError):
            same(theirs, expected(kind, base, places), rtol=0, atol=0.1)


def pairs(places: list[Path], module: str) -> list[reference.Factors]:
    """Of plain LoRA with one rank."""
    out = []
    for place in places:
        tensors, config = (
            load_file(place / "adapter_model.safetensors"),
            json.loads((place / "adapter_config.json").read_text()),
        )
        a, b = (tensors[f"base_model.model.{module}.lora_{f}.weight"].double() for f in "AB")
        out.append((a, b, config["lora_alpha"] / config["r"]))
    return out


def update(result: MergedAdapter, module: str) -> Tensor:
    (a, b, _), found = pairs_of(result, module), result.factors[module]
    return result.config["lora_alpha"] / found.rank * b @ a


def pairs_of(result: MergedAdapter, module: str) -> reference.Factors:
    a, b = (result.tensors[f"base_model.model.{module}.lora_{f}.weight"].double() for f in "AB")
    return a, b, 1.0


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("space", ["core", "knots", "full"])
def test_ties_in_a_basis_is_the_papers(space: str, made: Any) -> None:
    _, _, places = made("ranks")
    given = pairs(places, Q)
    exact = getattr(reference, space)(given, partial(reference.ties, density=0.4))
    result = merge(places, method="ties", space=space, parameters={"density": 0.4})
    assert (result.error < 1e-13) == (space != "full")  # a basis of as many directions as there are ranks loses nothing
    near = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(update(result, Q), reference.nearest(exact, 8), **near)
    lost = (exact - reference.nearest(exact, 8)).norm() / exact.norm()
    torch.testing.assert_close(result.factors[Q].error, lost.item(), **near)
    for other in {"core", "knots", "full"} - {space}:
        wrong = getattr(reference, other)(given, partial(reference.ties, density=0.4))
        assert (update(result, Q) - reference.nearest(wrong, 8)).norm() > 0.05 * exact.norm()


@pytest.mark.parametrize("method", ["dare_ties", "dare_linear"])
def test_dare_in_a_basis_drops_entries_there(method: str, made: Any) -> None:
    _, _, places = made("ranks")
    options: dict[str, Any] = {"method": method, "parameters": {"density": 0.5}}
    first, again = (merge(places, space="knots", seed=1, **options) for _ in range(2))
    assert torch.equal(update(first, Q), update(again, Q))
    others = [merge(places, space="knots", seed=2, **options), merge(places, space="core", seed=1, **options)]
    assert all((update(first, Q) - update(other, Q)).norm() > 0.1 * update(first, Q).norm() for other in others)
    u = torch.linalg.svd(torch.cat([s * b @ a for a, b, s in pairs(places, Q)], 1)).U[:, :8]
    torch.testing.assert_close(u @ u.T @ update(first, Q), update(first, Q), **NEAR)  # in the span of both


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_rank_is_the_nearest_and_its_error_is_said(rank: int, made: Any) -> None:
    _, _, places = made("ranks")
    exact = sum(w * s * b @ a for w, (a, b, s) in zip(WEIGHTS, pairs(places, Q), strict=True))
    assert isinstance(exact, Tensor)
    for space in ("core", "knots", "full"):
        result = merge(places, weights=WEIGHTS, rank=rank, space=space)
        torch.testing.assert_close(update(result, Q), reference.nearest(exact, rank), **NEAR)
        error = (exact - reference.nearest(exact, rank)).norm() / exact.norm()
        torch.testing.assert_close(result.factors[Q].error, error.item(), **NEAR)
    assert result.run["errors"][Q] == result.factors[Q].error
    assert result.error == result.run["error"]
    assert max(result.run["errors"].values()) == result.run["errors"][result.run["worst"]] >= result.error


def test_averaged_factors_are_those_of_peft_and_their_error_is_large(made: Any) -> None:
    _, _, places = made("alphas")
    result = merge(places, weights=WEIGHTS, space="factors")
    given = pairs(places, Q)
    torch.testing.assert_close(update(result, Q), reference.factors(given, WEIGHTS), **NEAR)
    exact = sum(w * s * b @ a for w, (a, b, s) in zip(WEIGHTS, given, strict=True))
    assert isinstance(exact, Tensor)
    assert result.config["r"] == 3
    torch.testing.assert_close(result.factors[Q].error, ((update(result, Q) - exact).norm() / exact.norm()).item())
    assert result.error > 0.5 > merge(places, weights=WEIGHTS, rank=3).error


def test_cut_dora_keeps_its_rows(made: Any, tmp_path: Path) -> None:
    """The error of the cut is that of the low-rank part alone: diag(e) W is kept."""
    kind, base, places = made("DoRA")
    result = merge(places, weights=WEIGHTS, rank=4)
    got = merged_by_peft(kind, base, result.save(tmp_path / "out"))
    wanted = expected(kind, base, places)
    lost = torch.cat([(got[name] - wanted[name]).flatten() for name in wanted]).norm()
    whole = math_hypot(found.residual for found in result.factors.values())
    torch.testing.assert_close(lost.item(), whole, rtol=1e-9, atol=0)
    assert 0.02 < result.error < 0.6


def math_hypot(values: Any) -> float:
    return float(torch.tensor(list(values), dtype=torch.float64).norm())


def test_a_method_of_task_vectors_starts_from_the_base(made: Any, tmp_path: Path) -> None:
    """Heads and biases too: as of the whole models, base + 0.5·(both differences)."""
    kind, base, places = made("biases")
    result = merge(places, method="task_arithmetic", parameters={"lambda": 0.5, "normalize": False})
    got = merged_by_peft(kind, base, result.save(tmp_path / "out"))
    same(got, expected(kind, base, places, (0.5, 0.5)))
    with pytest.raises(AssertionError):
        same(got, expected(kind, base, places, (0.4, 0.6)))


def test_parameters_by_layer_and_name(made: Any) -> None:
    """Weights along the layers, as of models."""
    _, _, places = made("alphas")
    recipe = {
        "merge_method": "linear",
        "models": [
            {"adapter": str(places[0]), "parameters": {"weight": [1, 0]}},
            {"adapter": str(places[1]), "parameters": {"weight": [0, 1]}},
        ],
    }
    result = symfuse.merge_recipe(recipe)
    assert isinstance(result, MergedAdapter)
    for layer in (0, 1):
        module = Q.replace("1", str(layer))
        a, b, s = pairs(places, module)[layer]
        torch.testing.assert_close(update(result, module), s * b @ a, **NEAR)


def test_adapters_of_aligned_bases_are_moved_first(made: Any, tmp_path: Path) -> None:
    kind, base, places = made("ranks")
    alignment = moved(base, tmp_path / "moved")
    there = tmp_path / "b"
    symfuse.transport(places[1], alignment, base=base, new_base=str(tmp_path / "moved")).save(there)
    with pytest.raises(IncompatibleError, match=r"of other bases.*symfuse rebase"):
        symfuse.merge([places[0], there])
    back = symfuse.rebase(there, tmp_path / "moved", base, alignment=alignment.inverse()).save(tmp_path / "back")
    result = merge([places[0], back], weights=WEIGHTS).save(tmp_path / "out")
    wanted = expected(kind, base, places)
    same(merged_by_peft(kind, base, result), wanted, rtol=0, atol=1e-6)
    renamed = changed(there, tmp_path / "renamed", base_model_name_or_path=str(base))  # but not moved
    wrong = merge([places[0], renamed], weights=WEIGHTS).save(tmp_path / "wrong")
    with pytest.raises(AssertionError):
        same(merged_by_peft(kind, base, wrong), wanted, rtol=0, atol=0.1)


# -- command line and recipe -----------------------------------------------------------------------


def test_the_command_the_recipe_and_python_write_the_same(made: Any, tmp_path: Path) -> None:
    _, _, places = made("targets")
    before = [everything(place) for place in places]
    ours = merge(places, weights=WEIGHTS, rank=2).save(tmp_path / "python")
    said = data("merge", *map(str, places), "-o", str(tmp_path / "command"), "--weights", "0.3,0.7", "--rank", "2")
    assert said["error"] == said["errors"][said["worst"]] or said["error"] < said["errors"][said["worst"]]
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "merge_method: linear\nrank: 2\nmodels:\n"
        + "".join(f"- adapter: {p}\n  parameters: {{weight: {w}}}\n" for p, w in zip(places, WEIGHTS, strict=True))
    )
    text = run("merge", str(recipe), str(tmp_path / "recipe"))
    assert text.exit_code == 0, text.output
    assert "cut off: 0." in text.output
    for name in ("command", "recipe"):
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (ours / file).read_bytes() == (tmp_path / name / file).read_bytes()
    assert json.loads((ours / "symfuse.json").read_text())["errors"] == said["errors"]
    again = run("merge", str(tmp_path / "again.yml"), str(tmp_path / "again"))
    assert again.exit_code != 0
    (tmp_path / "again.yml").write_text(said["recipe"])  # the recipe that is recorded is one
    data("merge", str(tmp_path / "again.yml"), str(tmp_path / "again"))
    assert (tmp_path / "again/adapter_model.safetensors").read_bytes() == (
        ours / "adapter_model.safetensors"
    ).read_bytes()
    assert before == [everything(place) for place in places]


def test_a_base_that_is_not_local_is_not_needed_for_what_is_of_low_rank(made: Any, tmp_path: Path) -> None:
    for case in ("targets", "heads"):
        _, _, places = made(case)
        far = [changed(p, tmp_path / case / p.name, base_model_name_or_path="who/what") for p in places]
        here, there = (merge(list(each), weights=WEIGHTS) for each in (places, far))
        same(dict(here.tensors), dict(there.tensors), rtol=0, atol=1e-6)
    _, base, places = made("one head")
    far = [changed(p, tmp_path / p.name, base_model_name_or_path="who/what") for p in places]
    with pytest.raises(OptionError, match=r"classifier.bias is held as a whole.*'who/what'.*--base"):
        symfuse.merge(far)
    data("merge", *map(str, far), "--base", str(base), "-o", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


# -- bad input -------------------------------------------------------------------------------------


def changed(place: Path, copy: Path, **config: Any) -> Path:
    """A copy of an adapter with other values in its config."""
    shutil.copytree(place, copy)
    values = json.loads((copy / "adapter_config.json").read_text()) | config
    (copy / "adapter_config.json").write_text(json.dumps(values))
    return copy


def retensored(place: Path, copy: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    shutil.copytree(place, copy)
    file = copy / "adapter_model.safetensors"
    new = {k: v.contiguous() for name, tensor in load_file(file).items() for k, v in change(name, tensor).items()}
    save_file(new, file)
    return copy


BAD: dict[str, tuple[Callable[[Path, Path], Path], type[SymfuseError], str]] = {
    "prefix tuning": (lambda a, to: changed(a, to, peft_type="PREFIX_TUNING"), CheckpointError, "type PREFIX_TUNING"),
    "IA3": (lambda a, to: changed(a, to, peft_type="IA3"), CheckpointError, "type IA3"),
    "other base": (
        lambda a, to: changed(a, to, base_model_name_or_path="who/what"), IncompatibleError, "of other bases.*who/what"
    ),
    "no factors": (
        lambda a, to: retensored(a, to, lambda n, t: {} if "lora_B" in n else {n: t}), CheckpointError, "both factors"
    ),
    "other width": (
        lambda a, to: retensored(a, to, lambda n, t: {n: t[:, :5] if "lora_A" in n else t}),
        IncompatibleError, r"A and B are \[3, 24\].*only the rank may differ",
    ),
    "unknown target": (
        lambda a, to: retensored(a, to, lambda n, t: {n.replace("q_proj", "w_proj"): t}), CheckpointError, "w_proj"
    ),
    "other class": (
        lambda a, to: retensored(a, to, lambda n, t: {n.replace("model.model.", "model."): t}),
        IncompatibleError, "under the name of another class",
    ),
    "rank of the config": (lambda a, to: changed(a, to, r=2), CheckpointError, "expected a rank of 2"),
    "NaN": (lambda a, to: retensored(a, to, lambda n, t: {n: t * torch.nan}), CheckpointError, "NaN"),
    "integers": (lambda a, to: retensored(a, to, lambda n, t: {n: t.int()}), CheckpointError, "floating-point"),
    "no weights": (
        lambda a, to: retensored(a, to, lambda n, t: {n: t}), CheckpointError, "neither adapter_model.safetensors"
    ),
    "magnitudes of plain LoRA": (
        lambda a, to: retensored(a, to, lambda n, t: {n: t, n[:-13] + "lora_magnitude_vector": t[0].clone()}),
        CheckpointError, "not a part of plain LoRA",
    ),
    "DoRA without magnitudes": (lambda a, to: changed(a, to, use_dora=True), CheckpointError, "has no magnitude"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_adapters_are_one_clear_error(bad: str, made: Any, tmp_path: Path) -> None:
    _, _, places = made("alphas")
    make, error, text = BAD[bad]
    wrong = make(places[0], tmp_path / "wrong")
    if bad == "no weights":
        (wrong / "adapter_model.safetensors").unlink()
    with pytest.raises(error, match=text):
        symfuse.merge([places[1], wrong])
    result = run("merge", str(places[1]), str(wrong), "-o", str(tmp_path / "out"))
    assert result.exit_code not in (0, None)
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": ({"rank": 0}, "rank: 0 is below 1"),
    "rank too large": ({"rank": 7}, "rank 7: the ranks of these adapters add up to 6 at most"),
    "space": ({"space": "cores"}, "core"),
    "method": ({"method": "fisher"}, "fisher runs models on data"),
    "factors": ({"method": "ties", "space": "factors"}, "factors does not go with merge method ties"),
    "base": ({"base": 0}, "base: not for a merge of adapters"),
    "heads": ({"heads": "drop"}, "heads: not for a merge of adapters"),
    "weights": ({"weights": [1]}, "1 weight for 2 models"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_bad_options_are_one_clear_error(option: str, made: Any) -> None:
    _, _, places = made("alphas")
    options, text = OPTIONS[option]
    with pytest.raises(OptionError, match=text):
        symfuse.merge(places, **options)


def test_factors_of_other_ranks_or_dora_are_not_averaged(made: Any) -> None:
    for case, text in (("ranks", "ranks that differ"), ("DoRA", "DoRA")):
        with pytest.raises(OptionError, match=f"factors does not go with {text}"):
            symfuse.merge(made(case)[2], space="factors")


def test_adapters_beside_models_say_the_way_out(made: Any, tmp_path: Path) -> None:
    _, base, places = made("alphas")
    mixed = {"merge_method": "linear", "models": [{"adapter": str(places[0])}, {"model": str(base)}]}
    with pytest.raises(OptionError, match=r"models\[1\].*beside adapters.*BASE\+ADAPTER"):
        symfuse.merge_recipe(mixed)
    adapters = [{"adapter": str(place)} for place in places]
    with pytest.raises(OptionError, match=r"align is not for a merge of adapters"):
        symfuse.merge_recipe({"merge_method": "linear", "models": adapters, "align": {"axes": "all"}})
    with pytest.raises(OptionError, match=r"rank is for a merge of adapters"):
        symfuse.merge_recipe({"merge_method": "linear", "models": [{"model": str(base)}], "rank": 2})
    with pytest.raises(OptionError, match="rank and space are for folders of adapters"):
        symfuse.merge([base, base], rank=2)
    with pytest.raises(OptionError, match="a recipe of adapters"):
        symfuse.check({"merge_method": "linear", "models": adapters})
    with pytest.raises(CheckpointError, match="is not the folder of an adapter: it holds a model"):
        symfuse.merge_recipe({"merge_method": "linear", "models": [*adapters, {"adapter": str(base)}]})
    with pytest.raises(CheckpointError, match="no such folder"):
        symfuse.merge_recipe({"merge_method": "linear", "models": [*adapters, {"adapter": str(tmp_path / "none")}]})
    result = run("merge", *map(str, places), "-o", str(places[0]))
    assert result.exit_code not in (0, None)
    assert "choose another output" in result.output

"""Fusion by optimal transport: hard maps are the permutations that are exact, soft ones are as written out, and are
called inexact everywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import symfuse
from command import done, run
from contract.tiny import MODELS, case, real
from recovery.planted import kept, squared
from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymmetryError, VerificationError
from symfuse.groups import Coupling, Moments, Permutation, Sinkhorn
from symfuse.io import Checkpoint
from symfuse.matching import match_by_activations, match_models, ot_alignment
from symfuse.matching.transport import POLICIES, _skip
from symfuse.model import Model
from symfuse.reports.correspondence import correspondence
from symfuse.spec import Instance

slow = pytest.mark.slow
ALL = "attention,ffn,heads,residual"
SOFT = {"attention": "sinkhorn", "ffn": "sinkhorn", "residual": "sinkhorn"}


@cache
def pair(label: str = "bert-mlm") -> tuple[Checkpoint, Checkpoint]:
    return MODELS[label](seed=7), case(label).checkpoint


def models(label: str = "bert-mlm") -> tuple[Model, Model]:
    source, anchor = pair(label)
    return Model.of(source), Model.of(anchor)


def match(source: Checkpoint, anchor: Checkpoint, axes: str = ALL, **options: object) -> Alignment:
    return match_models(Model.of(source), Model.of(anchor), axes=axes, threads=1, **options)  # type: ignore[arg-type]


def permuted(label: str, axes: tuple[str, ...]) -> Checkpoint:
    """The tiny model with the units of these axes in random orders."""
    spec = case(label).spec
    rng = torch.Generator().manual_seed(4)
    instances = [i for i in spec.movable if i.axis in axes]
    moving = {i: Permutation().random(spec.axes[i.axis].size, spec.batch(i.axis), rng) for i in instances}
    return kept(Alignment(spec, moving)(case(label).checkpoint))


def batches() -> list[Mapping[str, Tensor]]:
    found = []
    for seed in range(4):
        ids = torch.randint(5, 61, (6, 12), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[0, 9:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


# -- hard maps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["bert-mlm", pytest.param("gpt2-lm", marks=slow)])
def test_without_entropy_it_is_the_exact_alignment_by_permutations(label: str) -> None:
    source, anchor = pair(label)
    found = match(source, anchor, groups=dict.fromkeys(SOFT, "emd"))
    exact = match(source, anchor, groups=dict.fromkeys(SOFT, "permutation"))
    assert found.elements.keys() == exact.elements.keys() != set()
    for instance, element in found.elements.items():
        assert torch.equal(element.to_dense(), exact.elements[instance].to_dense())
    assert found.variants == found.frame == ()
    assert symfuse.prove(source, found).exact.worst < 1e-12  # in float64


@pytest.mark.parametrize("axes", ["ffn", "attention", ALL])
def test_with_hardly_any_entropy_it_is_nearly_that(axes: str) -> None:
    """Softened last, all others in place: axes that meet do not blur each other."""
    source, anchor = pair()
    groups = {word: f"{name}:1e-6" for word, name in SOFT.items() if word in axes}
    found = match(source, anchor, axes, groups=groups, biases=False)
    exact = match(source, anchor, axes, groups=dict.fromkeys(groups, "permutation"), biases=False)
    before = squared(source, anchor)
    assert squared(exact(source), anchor) < before
    torch.testing.assert_close(squared(found(source), anchor), squared(exact(source), anchor), rtol=0.02, atol=0)


@pytest.mark.parametrize("axes", [("ffn",), ("h", "qk", "v", "ffn", "residual")])
@pytest.mark.parametrize("label", ["bert-mlm", pytest.param("gpt2-lm", marks=slow)])
def test_planted_orders_are_found(label: str, axes: tuple[str, ...]) -> None:
    moved, anchor = permuted(label, axes), case(label).checkpoint
    words = "ffn" if axes == ("ffn",) else ALL
    found = match(moved, anchor, words, groups={w: "sinkhorn:0.001" for w in SOFT if w in words})
    assert squared(moved, anchor) > 1
    assert squared(found(moved), anchor) < 1e-8 * squared(moved, anchor)
    assert symfuse.verify(moved, found(moved), found).worst < 1e-4


def test_equal_models_give_the_identity() -> None:
    anchor = case("bert-mlm").checkpoint
    assert not match(anchor, anchor, groups=dict.fromkeys(SOFT, "emd")).elements
    soft = match(anchor, anchor, groups=dict.fromkeys(SOFT, "sinkhorn:0.001"))
    assert squared(soft(anchor), anchor) < 1e-12


# -- soft maps -------------------------------------------------------------------------------------


def test_a_feed_forward_as_written_out() -> None:
    """Singh & Jaggi 2020, Algorithm 1: align the rows by the plan, and the columns that read them; then average."""
    a, b = ({n: c.read(n).double() for n in c} for c in pair("bert-mlm"))
    layer = "bert.encoder.layer.1."
    rows, bias, columns = (
        layer + n for n in ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    )
    x, y = (torch.cat([m[rows], m[bias][:, None], m[columns].T], 1) for m in (b, a))
    cost = torch.cdist(x, y).square()
    n, epsilon = len(cost), 0.1 * float(cost.mean())
    f, g = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(2000):
        f = -epsilon * torch.logsumexp((g - cost) / epsilon, 1)
        g = -epsilon * torch.logsumexp((f[:, None] - cost) / epsilon, 0)
    t = ((f[:, None] + g - cost) / epsilon).exp() / n  # anchor units × source units, marginals 1/n
    torch.testing.assert_close(t.sum(0), torch.full((n,), 1 / n, dtype=torch.float64), rtol=1e-4, atol=0)
    expected = {rows: n * t @ a[rows], bias: n * t @ a[bias], columns: a[columns] @ (n * t).T}

    source, anchor = (c.to(torch.float64) for c in pair("bert-mlm"))
    found = match(source, anchor, "ffn", groups={"ffn": "sinkhorn:0.1"})
    merged = symfuse.merge([found(source), anchor], method="linear")
    for name, moved in expected.items():
        torch.testing.assert_close(found(source).read(name), moved, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(merged.read(name), (moved + b[name]) / 2, rtol=1e-3, atol=1e-3)
        assert float((moved - a[name]).norm() / a[name].norm()) > 0.1  # it is another


def test_everything_that_touches_an_axis_moves_by_one_map() -> None:
    source, anchor = (c.to(torch.float64) for c in pair("bert-mlm"))
    found = match(source, anchor, groups=SOFT, biases=False)
    moved, m = found(source), found.elements[Instance("residual")].to_dense()
    name = "bert.embeddings.LayerNorm.weight"
    torch.testing.assert_close(moved.read(name), m @ source.read(name))
    name = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(moved.read(name), source.read(name) @ m.T)
    heads, inside, values = (found.elements[Instance(axis, (0,))] for axis in ("h", "qk", "v"))
    assert not isinstance(heads, Coupling)  # one to one
    size, n = inside.batch[0], inside.size
    name = "bert.encoder.layer.0.attention.self.{}.weight"
    for word, by in (("query", inside), ("key", inside), ("value", values)):  # one map for query and key
        w = source.read(name.format(word)) @ m.T
        expected = heads.act(by.to_dense() @ w.reshape(size, n, -1), 0).reshape(size * n, -1)
        torch.testing.assert_close(moved.read(name.format(word)), expected)
    w = source.read("bert.encoder.layer.0.attention.output.dense.weight")
    expected = (m @ w).reshape(len(m), size, n).transpose(0, 1) @ values.to_dense().mT
    expected = heads.act(expected, 0).transpose(0, 1).reshape(len(m), -1)
    torch.testing.assert_close(moved.read("bert.encoder.layer.0.attention.output.dense.weight"), expected)


@pytest.mark.parametrize(
    "label", ["bert-mlm", "llama-lm", *(pytest.param(name, marks=slow) for name in ("gpt2-lm", "vit-classification"))]
)
def test_the_function_changes_and_that_is_said(label: str, tmp_path: Path) -> None:
    source, anchor = pair(label)
    found = match(source, anchor, "all", variants=("transport",))
    assert list(found.variants) == found.provenance["options"]["variants"] == ["transport"]
    assert found.frame == ()  # gains of norms are averaged as they are, not folded
    assert symfuse.verify(source, found(source), found).worst > 0.01
    with pytest.raises(VerificationError, match="differs by"):
        symfuse.prove(source, found)
    assert repr(found).endswith("inexact: transport)")
    loaded = Alignment.load(found.save(tmp_path / "soft.safetensors"))
    assert loaded.variants == ("transport",)
    for name in anchor:
        assert torch.equal(loaded(source)[name], found(source)[name])
    with pytest.raises(SymmetryError, match="averages units"):
        found.inverse()


def test_a_group_named_for_one_axis_makes_that_axis_soft_alone() -> None:
    source, anchor = pair()
    found = match(source, anchor, "attention", groups={"ffn": "sinkhorn", "v": "emd"})
    kinds = {i.axis: type(g) for i, g in found.elements.items()}
    assert [axis for axis, kind in kinds.items() if kind is Coupling] == ["ffn"]
    assert found.variants == ("transport",)
    labels = {step["instance"]: step["group"] for step in found.provenance["steps"]}
    assert labels["ffn[0]"] == "transport (Sinkhorn, 0.05)"
    assert labels["v[0]"] == "permutation"
    assert found.provenance["options"]["groups"] == {"ffn": "sinkhorn", "v": "emd"}


def test_more_entropy_takes_it_further_away() -> None:
    source, anchor = pair()
    spread = [
        float(found.elements[Instance("ffn", (0,))].to_dense().amax(1).mean())
        for found in (match(source, anchor, "ffn", groups={"ffn": f"sinkhorn:{r}"}) for r in (0.01, 0.1, 10))
    ]
    assert spread == sorted(spread, reverse=True)
    torch.testing.assert_close(spread[-1], 1 / case("bert-mlm").spec.axes["ffn"].size, rtol=0.2, atol=0)


# -- what cannot be --------------------------------------------------------------------------------


def test_planes_that_positions_turn_stay_exact() -> None:
    source, anchor = pair("llama-lm")
    with pytest.raises(OptionError, match="'sinkhorn' does not fit axis 'c': units are averaged only where"):
        match(source, anchor, groups={"c": "sinkhorn"})
    with pytest.raises(OptionError, match="'sinkhorn' does not fit axis 'kv'"):
        match(source, anchor, groups={"kv": "sinkhorn"})
    found = match(source, anchor, "all", variants=("transport",))
    soft = {i.axis for i, g in found.elements.items() if isinstance(g, Coupling)}
    assert soft == {"ffn", "v", "residual"}


def test_names_that_are_wrong() -> None:
    with pytest.raises(OptionError, match="did you mean 'sinkhorn'"):
        match(*pair(), groups={"ffn": "sinkhron"})
    with pytest.raises(OptionError, match="at least 1e-09"):
        match(*pair(), groups={"ffn": "sinkhorn:none"})
    with pytest.raises(OptionError, match="did you mean 'transport'"):
        match(*pair(), variants=("transprot",))


def test_a_coupling_in_a_file_that_does_not_say_inexact(tmp_path: Path) -> None:
    file = match(*pair(), "ffn", groups={"ffn": "sinkhorn"}).save(tmp_path / "soft.safetensors")
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        meta = {key: value for key, value in opened.metadata().items() if key != "sha256"}
    save_file(tensors, file, {key: value for key, value in meta.items() if key != "variants"})
    with pytest.raises(CheckpointError, match="not an element of the group of that axis"):
        Alignment.load(file)
    save_file({key: 2 * t for key, t in tensors.items()}, file, meta)
    with pytest.raises(CheckpointError, match="not an element of the group of that axis"):
        Alignment.load(file)


def test_nothing_rides_along_and_nothing_follows(tmp_path: Path) -> None:
    source, anchor = pair()
    found = match(source, anchor, "ffn", groups={"ffn": "sinkhorn"})
    exact = match(source, anchor, "ffn")
    with pytest.raises(SymmetryError, match="their axes are not the same"):
        exact @ found
    with pytest.raises(SymmetryError, match="averages units"):
        found @ found
    save_file({"v": torch.zeros(case("bert-mlm").spec.axes["ffn"].size)}, tmp_path / "v.safetensors")
    with pytest.raises((SymmetryError, IncompatibleError), match=r"inexact \(transport\)"):
        symfuse.transport(str(tmp_path / "v.safetensors"), found, kind="vector", axis="ffn[0]")


# -- from activations ------------------------------------------------------------------------------


def activations(label: str, paths: dict[str, tuple[str, str]]) -> dict[str, list[Tensor]]:
    """By name what a module of source and anchor reads ("in") or puts out, [units, positions], without padding."""
    found: dict[str, list[Tensor]] = {name: [] for name in paths}
    for checkpoint in pair(label):
        module = real(checkpoint).float()
        heard: dict[str, list[Tensor]] = {name: [] for name in paths}
        for name, (path, side) in paths.items():

            def hook(
                _: object, args: tuple[Tensor, ...], out: Tensor, to: list[Tensor] = heard[name], side: str = side
            ) -> None:
                to.append(args[0] if side == "in" else out)

            module.get_submodule(path).register_forward_hook(hook)
        with torch.inference_mode():
            for batch in batches():
                module(**batch)
        for name, parts in heard.items():
            kept = [p[b["attention_mask"].bool()] for p, b in zip(parts, batches(), strict=True)]
            found[name].append(torch.cat(kept).T.double())
    return found


def plan(source: Tensor, anchor: Tensor, regularisation: float) -> Tensor:
    x, y = ((t - t.mean(1, keepdim=True)) / t.std(1, correction=0, keepdim=True) for t in (anchor, source))
    return Sinkhorn(regularisation).best({"primal": Moments(x @ y.T, x.square().sum(1), y.square().sum(1))}).matrix


BERT, GPT2 = "bert.encoder.layer.{}.", "transformer.h.{}."
# Of each sublayer: what its weights read, what the stream goes round it from, and what it adds.
STREAMS = {
    "bert-mlm-untied": [
        (BERT + "attention.self.query", BERT + "attention.self.query", BERT + "attention.output.dense"),
        (BERT + "intermediate.dense", BERT + "intermediate.dense", BERT + "output.dense"),
    ],
    "gpt2-lm-untied": [
        (GPT2 + "attn.c_attn", GPT2 + "ln_1", GPT2 + "attn.c_proj"),
        (GPT2 + "mlp.c_fc", GPT2 + "ln_2", GPT2 + "mlp.c_proj"),
    ],
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("label", ["bert-mlm-untied", pytest.param("gpt2-lm-untied", marks=slow)])
def test_the_residual_policies_as_written_out(label: str, policy: str) -> None:
    """Imfeld et al. 2024: the map goes round each sublayer and through it, and what comes out is weighed."""
    points = [[path.format(layer) for path in sublayer] for layer in (0, 1) for sublayer in STREAMS[label]]
    paths = {"first": (points[0][0], "in")}
    paths |= {f"skip {i}": (skip, "in") for i, (_, skip, _) in enumerate(points)}
    paths |= {f"branch {i}": (branch, "out") for i, (_, _, branch) in enumerate(points)}
    heard = activations(label, paths)
    expected = [plan(*heard["first"], 0.2)]
    for i in range(len(points)):
        branch = plan(*heard[f"branch {i}"], 0.2)
        skip, own = (heard[f"{name} {i}"][1].abs().mean(1) for name in ("skip", "branch"))  # of the anchor
        if policy == "branch":
            expected.append(branch)
        elif policy == "mean":
            expected.append((expected[-1] + branch) / 2)
        elif policy == "weighted-scalar":
            share = skip.mean() / (skip.mean() + own.mean())
            assert 0.1 < float(share) < 0.95
            expected.append(share * expected[-1] + (1 - share) * branch)
        else:
            expected.append(torch.diag(skip / (skip + own)) @ expected[-1] + torch.diag(own / (skip + own)) @ branch)
    found = ot_alignment(*models(label), axes="residual", regularisation=0.2, batches=batches(), residual=policy)
    assert found.variants == ("separate-residual", "transport")
    for i, matrix in enumerate(expected):
        element = found.elements[Instance(f"residual_{i}" if i else "residual")].to_dense()
        torch.testing.assert_close(element, matrix, rtol=0, atol=2e-3)
    ones = torch.ones(len(expected[0]), dtype=torch.float64)
    torch.testing.assert_close(found.elements[Instance("residual_4")].to_dense().sum(1), ones)


def test_before_a_norm_the_stream_itself_is_weighed() -> None:
    spec, module = case("gpt2-lm").spec, real(pair("gpt2-lm")[1])
    point = Instance("residual")
    assert str(_skip(spec, module, point)) == "h.0.ln_1.in"
    assert str(_skip(case("bert-mlm").spec, real(pair()[1]), point)) == "encoder.layer.0.attention.self.query.in"


def test_neurons_from_activations_as_written_out() -> None:
    heard = activations("bert-mlm", {"ffn": ("bert.encoder.layer.1.output.dense", "in")})
    found = ot_alignment(*models(), axes="ffn", regularisation=0.2, batches=batches())
    element = found.elements[Instance("ffn", (1,))].to_dense()
    torch.testing.assert_close(element, plan(*heard["ffn"], 0.2), rtol=0, atol=2e-3)


@pytest.mark.parametrize("residual", ["all", *(pytest.param(where, marks=slow) for where in ("first", "last"))])
def test_hard_maps_from_activations_are_those_of_permutations(residual: str) -> None:
    given = dict(zip(("source", "anchor"), models(), strict=True))
    found = ot_alignment(**given, axes=ALL, solver="emd", batches=batches(), residual=residual)
    groups = dict.fromkeys(SOFT, "permutation")
    exact = match_by_activations(**given, batches=batches(), axes=ALL, groups=groups, residual=residual)
    assert found.elements.keys() == exact.elements.keys() != set()
    for instance, element in found.elements.items():
        assert torch.equal(element.to_dense(), exact.elements[instance].to_dense())
    assert symfuse.prove(pair()[0], found).exact.equal


def test_a_map_for_each_point() -> None:
    for data in (None, batches()):
        found = ot_alignment(*models(), axes="residual", batches=data, residual="separate")
        assert {i.axis for i in found.elements} == {"residual", *(f"residual_{k}" for k in range(1, 5))}
        assert found.variants == ("separate-residual", "transport")


def test_ot_alignment_refuses() -> None:
    for options, words in (
        ({"solver": "auction"}, "solver is 'auction'"),
        ({"solver": "emd", "regularisation": 0.1}, "regularisation is of sinkhorn"),
        ({"regularisation": -1.0}, "a positive number"),
        ({"residual": "mean"}, "expected all, separate from weights"),
        ({"residual": "none", "batches": batches()}, "expected first, last, all, separate, branch"),
        ({"residual": "mean", "axes": "ffn", "batches": batches()}, "the residual stream is not matched"),
    ):
        with pytest.raises(OptionError, match=words):
            ot_alignment(*models(), **options)  # type: ignore[arg-type]


# -- from the command line and recipes -------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, checkpoint in zip("ab", pair(), strict=True):
        checkpoint.save(name)
    return tmp_path


def test_the_command_line_says_inexact(folders: Path) -> None:
    text = done("align", "a", "--to", "b", "--inexact", "transport", "--axes", "ffn", "-o", "out").output
    assert "inexact: transport: the result computes another function" in text
    assert "outputs changed by" in text
    assert "proved" not in text
    said = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert said["inexact"] == ["transport"]
    assert "inexact: transport" in Path("out/README.md").read_text("utf-8")
    assert "inexact: transport" in done("inspect", "out").output
    by_group = done("align", "a", "--to", "b", "--axes", "ffn", "--group", "ffn=sinkhorn", "-o", "same").output
    assert "inexact: transport" in by_group
    first, second = symfuse.open("out"), symfuse.open("same")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert run("align", "a", "--to", "b", "--group", "ffn=sinkhorn:0", "-o", "no").exit_code != 0


def test_a_recipe_merges_under_transport(folders: Path) -> None:
    text = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"
    text += "align: {anchor: 2, axes: ffn, groups: {ffn: 'sinkhorn:0.1'}}\n"
    Path("r.yml").write_text(text, "utf-8")
    out = done("merge", "r.yml", "out").output
    assert "inexact: transport" in out
    assert "proved" not in out
    card = Path("out/README.md").read_text("utf-8")
    assert "That is inexact (transport)" in card
    assert "no output is proved" not in card
    a, b = pair()
    expected = symfuse.merge([match(a, b, "ffn", groups={"ffn": "sinkhorn:0.1"})(a), b], weights=[0.5, 0.5])
    merged = symfuse.open("out")
    for name in expected:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-5, atol=1e-6)


def test_the_report_of_a_soft_alignment_names_no_units() -> None:
    found = correspondence(match(*pair(), "all", groups={"ffn": "sinkhorn", "residual": "sinkhorn"}))
    assert {*found.reorderings, *found.turns} == {"h", "qk", "v", "pool", "mask"} & {*found.reorderings, *found.turns}
    assert "h" in found.reorderings
    assert found.variants == ("transport",)

"""Relations of tiny models: what each statistic says of what was made to have it, and the verdict of known cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import symfuse
from command import data, done, run
from contract.tiny import MODELS, TEXT, of
from symfuse.alignment.alignment import random_alignment
from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.relations import Evidence, Units, decide, evidence_of, mixture
from symfuse.relations.fitting import chosen, fitted
from symfuse.relations.gathering import log10_bound, on_grid, spectrum
from symfuse.relations.moving import frame_of
from symfuse.relations.verdict import (
    APART,
    CUT,
    FINE_TUNE,
    OTHER,
    PRUNED,
    QUANTISED,
    SAME_FUNCTION,
    SAME_WEIGHTS,
    UNRELATED,
    WIDTH,
)
from symfuse.rewriting import canonical
from symfuse.spec import layer_of

FAMILIES = ("bert", "gpt2-lm", "llama-lm", "vit")


def moved(source: Checkpoint, seed: int = 3) -> Checkpoint:
    """By a random element of all that may act, in the frame where most may."""
    model = Model.of(source)
    model = canonical(model, frame_of([model]))
    return model.checkpoint.replace(tensors=dict(random_alignment(model.spec, seed, largest=True).on(model).items()))


def changed(source: Checkpoint, change: object, *, layers: tuple[int, ...] | None = None) -> Checkpoint:
    """With each matrix (of some layers) as a function makes it."""
    spec, tensors = Model.of(source).spec, dict(source.items())
    for name, declared in spec.tensors.items():
        file, inside = spec.file_name(name), layers is None or layer_of(declared.index) in layers
        if file in tensors and tensors[file].ndim == 2 and inside:
            tensors[file] = change(tensors[file])  # type: ignore[operator]
    return source.replace(tensors=tensors)


def noisy(tensor: Tensor) -> Tensor:
    """The first few singular directions changed, as training does."""
    rng = torch.Generator().manual_seed(5)
    u, v = (torch.randn(n, 6, generator=rng, dtype=tensor.dtype) for n in tensor.shape)
    return tensor + 0.05 * tensor.norm() * (u @ v.T) / (u @ v.T).norm()


def low_rank(tensor: Tensor) -> Tensor:
    rng = torch.Generator().manual_seed(6)
    u, v = (torch.randn(n, 1, generator=rng, dtype=tensor.dtype) for n in tensor.shape)
    return tensor + 0.2 * tensor.norm() * (u @ v.T) / (u @ v.T).norm()


def rounded(tensor: Tensor) -> Tensor:
    step = tensor.abs().amax(-1, keepdim=True) / 127
    return (tensor / step).round() * step


def pruned(tensor: Tensor) -> Tensor:
    return tensor * (tensor.abs() > tensor.abs().median())


CASES = {
    "copy": (lambda tensor: tensor, SAME_WEIGHTS, SAME_FUNCTION),
    "tuned": (noisy, FINE_TUNE, FINE_TUNE),
    "rounded": (rounded, QUANTISED, QUANTISED),
    "pruned": (pruned, PRUNED, PRUNED),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_made_of_a_model_is_known_in_place_and_moved(family: str, case: str) -> None:
    base = MODELS[family](0)
    change, in_place, after = CASES[case]
    new = changed(base, change)
    found = symfuse.relate(new, base).verdict
    assert (found.kind, found.moved) == (in_place, False)
    found = symfuse.relate(moved(new), base).verdict
    assert (found.kind, found.moved) == (after, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_were_made_apart_are_not_related(family: str) -> None:
    a, b = MODELS[family](0), MODELS[family](1)
    for one in (a, moved(a)):
        found = symfuse.relate(one, b)
        assert found.kind in (APART, UNRELATED)
        assert not found.verdict.related
        assert found.evidence is not None
        assert found.evidence.log10_p > -3


def test_a_change_of_one_bias_is_not_the_same_function() -> None:
    base = MODELS["gpt2-lm"](0)
    name = next(name for name in base if name.endswith("mlp.c_fc.bias"))
    other = base.replace(tensors={**dict(base.items()), name: base[name] + 0.5})
    for one in (other, moved(other)):
        assert symfuse.relate(one, base).kind == FINE_TUNE
    shifted = moved(base)  # keys' biases may have any value
    assert symfuse.relate(shifted, base).kind == SAME_FUNCTION


def test_models_of_zeros_are_the_same_and_of_no_other() -> None:
    model = MODELS["llama-lm"]()
    zero = model.replace(tensors={name: torch.zeros_like(tensor) for name, tensor in model.items()}, name="zero")
    assert symfuse.relate(zero, zero).kind == SAME_WEIGHTS
    found = symfuse.relate(model, zero)
    assert found.kind == UNRELATED  # "trained apart" would say that their matchings agree


@pytest.mark.parametrize("ndim", [1, 2])
def test_what_is_zero_in_one_model_alone_differs(ndim: int) -> None:
    """A matrix that was set to zero; biases that were trained from zero, and nothing else."""
    model = MODELS["bert"]()
    names = {1: [name for name in model if name.endswith("bias")], 2: ["encoder.layer.1.output.dense.weight"]}[ndim]
    zero = model.replace(tensors={**dict(model.items()), **{name: torch.zeros_like(model[name]) for name in names}})
    for one, other in ((model, zero), (zero, model)):
        found = symfuse.relate(one, other)
        assert found.kind not in (SAME_WEIGHTS, SAME_FUNCTION)
        assert found.verdict.related
        changes = {one.tensor for one in found.evidence.changes if one.relative > 0.1}  # type: ignore[union-attr]
        assert len(changes) == ndim - 1


def test_a_fine_tune_is_low_rank_or_partial_only_where_it_is() -> None:
    base = MODELS["llama-lm"](0)
    (words,) = [symfuse.relate(changed(base, low_rank), base).verdict.details]
    assert any("low-rank: at most 1 of" in word for word in words)
    part = changed(base, noisy, layers=(1,))
    for one in (part, moved(part)):
        words = symfuse.relate(one, base).verdict.details
        assert any("only layers 1 changed" in word for word in words), words
    words = symfuse.relate(changed(base, lambda t: t + 0.1 * torch.randn_like(t) * t.std()), base).verdict.details
    assert not any("low-rank" in word or "only" in word for word in words)


def without_layer(base: Checkpoint, layer: int) -> Checkpoint:
    spec, tensors = Model.of(base).spec, {}
    for name, declared in spec.tensors.items():
        file, at = spec.file_name(name), layer_of(declared.index)
        if at != layer and file in base:
            tensors[file.replace(f".{at}.", f".{at - 1}.", 1) if at is not None and at > layer else file] = base[file]
    return base.replace(tensors=tensors, config={**base.config, "num_hidden_layers": spec.depth - 1})


@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_without_a_layer_is_a_cut_copy(layer: int) -> None:
    base = MODELS["llama-lm"](0)
    small = without_layer(base, layer)
    for one in (small, moved(small)):
        found = symfuse.relate(one, base)
        assert found.kind == CUT
        assert f"layers {1 - layer} of 2 of the anchor" in found.verdict.details
        assert not found.one_shape
    assert symfuse.relate(without_layer(MODELS["llama-lm"](1), layer), base).kind in (APART, UNRELATED)


def test_a_model_of_fewer_neurons_is_of_another_width() -> None:
    base = MODELS["gpt2-lm"](0)
    kept = torch.tensor([*range(3, 20), 27, 25])
    tensors = dict(base.items())
    for name in base:
        if "mlp.c_fc" in name:
            tensors[name] = base[name][..., kept]
        elif name.endswith("mlp.c_proj.weight"):
            tensors[name] = base[name][kept]
    small = base.replace(tensors=tensors, config={**base.config, "n_inner": len(kept)})
    for one in (small, moved(small)):
        found = symfuse.relate(one, base).verdict
        assert found.kind == WIDTH
        assert found.details[1].startswith(("otherwise same weights", "otherwise same function", "otherwise fine-tune"))
    other = symfuse.relate(small, MODELS["gpt2-lm"](1)).verdict
    assert not other.related


def test_models_of_other_families_are_not_guessed_at() -> None:
    found = symfuse.relate(MODELS["bert"](0), MODELS["gpt2-lm"](0))
    assert found.kind == OTHER
    assert "bert" in found.verdict.details[0]
    assert found.evidence is None
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"]["similarity"] is None
    with pytest.raises(IncompatibleError, match="only models of one family"):
        print(found.distance)


def test_quick_says_the_same() -> None:
    base = MODELS["bert"](0)
    for one in (changed(base, noisy), moved(base), MODELS["bert"](1)):
        assert symfuse.relate(one, base, quick=True).verdict.related == symfuse.relate(one, base).verdict.related


# ---- statistics


def test_the_spectrum_of_a_product_and_of_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    u, v = (torch.randn(n, 3, generator=rng, dtype=torch.float64) for n in (40, 60))
    assert spectrum(u @ v.T)[0] == 3
    noise = torch.randn(200, 100, generator=rng, dtype=torch.float64)
    rank, edge = spectrum(noise)
    assert rank > 80
    assert edge == pytest.approx(float(torch.linalg.svdvals(noise)[0] ** 2) / float(noise.square().mean()) / (
        math.sqrt(200) + math.sqrt(100)) ** 2)  # fmt: skip
    assert edge == pytest.approx(1, abs=0.1)
    assert spectrum(torch.zeros(3, 4, dtype=torch.float64)) == (0, 1.0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [None, 32])
def test_a_grid_is_found_and_no_other(bits: int, block: int | None) -> None:
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    groups = matrix.reshape(-1, block or 64)
    step = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert on_grid(((groups / step).round() * step).reshape(16, 64)) == bits
    assert on_grid(matrix) is None


def test_the_bound_of_fixed_points_holds() -> None:
    rng = torch.Generator().manual_seed(2)
    counts = torch.zeros(8)
    for _ in range(4000):
        fixed = sum(int((torch.randperm(12, generator=rng) == torch.arange(12)).sum()) for _ in range(2))
        counts[: fixed + 1] += 1
    for k in range(3, 7):
        assert float(counts[k]) / 4000 <= 10 ** log10_bound(k, 2) * 1.3 + 0.01
    assert log10_bound(2, 2) == 0.0
    assert log10_bound(5, 1) == pytest.approx(-math.log10(120))


def test_layers_are_chosen_as_by_trying_all() -> None:
    from itertools import combinations

    unlike = torch.rand(3, 6, generator=torch.Generator().manual_seed(3))
    best = min(combinations(range(6), 3), key=lambda c: float(sum(unlike[i, j] for i, j in enumerate(c))))
    assert chosen(unlike) == best


def test_a_verdict_needs_only_its_evidence() -> None:
    def of(cosine: float, agreement: float) -> Evidence:
        return Evidence("matched", (Units("ffn", 0, "neurons", 9, (cosine,) * 3, None, agreement),), (), 0.0)

    assert decide(of(0.3, 0.2)).kind == APART
    assert decide(of(0.3, 0.0)).kind == UNRELATED
    assert decide(of(math.nan, 0.0)).kind == UNRELATED
    assert decide(of(0.95, 1.0)).related


# ---- several


def test_a_merge_is_taken_apart() -> None:
    base = MODELS["bert"](0)
    one, other = changed(base, noisy), changed(base, low_rank)
    mean = base.replace(tensors={name: 0.3 * one[name] + 0.7 * other[name] for name in base})
    _, weights, left = mixture(Model.of(mean), [Model.of(one), Model.of(other)], moved=False)
    assert weights == pytest.approx((0.3, 0.7), abs=1e-6)
    assert left < 1e-6
    _, weights, left = mixture(Model.of(mean), [Model.of(moved(one)), Model.of(other)], moved=True)
    assert weights == pytest.approx((0.3, 0.7), abs=0.05)
    found = symfuse.relate(mean.replace(name="mean"), [one.replace(name="one"), other.replace(name="other")])
    assert [merge.model for merge in found.merges] == ["mean"]
    assert mixture(Model.of(one), [Model.of(other), Model.of(base)], moved=False)[2] > 0.5


def test_a_merge_is_found_beside_its_base_and_copies() -> None:
    """The base has no part in it, and of a part that is there twice one is named."""
    base = MODELS["bert"](0)
    models = {"base": base, "one": changed(base, noisy), "other": changed(base, low_rank)}
    models["again"] = models["one"]
    models["mean"] = base.replace(tensors={n: 0.3 * models["one"][n] + 0.7 * models["other"][n] for n in base})
    first, *rest = (model.replace(name=name) for name, model in models.items())
    (found,) = symfuse.relate(first, rest, quick=True).merges
    assert (found.model, found.parts) == ("mean", ("one", "other"))
    assert found.weights == pytest.approx((0.3, 0.7), abs=1e-3)


def test_many_models_make_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = MODELS["gpt2-lm"](0)
    base.save("all/a")
    moved(base).save("all/b")
    MODELS["gpt2-lm"](1).save("all/c")
    document = data("relate", "all")
    assert document["kind"] == "relations"
    assert document["duplicates"] == [["all/a", "all/b"]]
    assert document["matrix"][0][1] > 0.99 > 0.7 > document["matrix"][0][2]
    assert document["tree"].index("'all/a'") < document["tree"].index("'all/b'") < document["tree"].rindex(")")
    assert "duplicates: all/a, all/b" in done("relate", "all").stdout
    assert "of two models" in run("relate", "all", "-o", "run").output
    assert run("relate", "all/a").exit_code == 2


def test_the_command_says_what_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = MODELS["bert"](0)
    base.save("base")
    changed(base, noisy).save("tuned")
    document = data("relate", "tuned", "base")
    relation = symfuse.relate("tuned", "base")
    assert document["relation"]["verdict"]["kind"] == relation.kind == FINE_TUNE
    assert document["before"] == pytest.approx(relation.distance.euclidean)
    said = done("relate", "tuned", "base").stdout
    assert "fine-tune" in said
    assert "squared distance" in said
    assert "squared distance" not in done("relate", "tuned", "base", "--quick").stdout
    assert repr(relation).startswith("Relation(")
    assert "fine-tune" in relation._repr_html_()


def test_fitted_refuses_other_sizes() -> None:
    pair = fitted(*(Model.of(MODELS["bert"](seed)) for seed in (0, 1)))
    assert (pair.layers, pair.widths) == (None, ())
    assert evidence_of(pair.source, pair.anchor).cosine < 0.7
    with pytest.raises(IncompatibleError, match="different families"):
        fitted(Model.of(MODELS["bert"](0)), Model.of(MODELS["vit"](0)))
    other = of("BertModel", "BertConfig", TEXT, num_hidden_layers=1, hidden_size=12)()
    with pytest.raises(IncompatibleError, match=r"differ in size \(.*residual 20 and 12.*all other sizes are equal"):
        fitted(Model.of(MODELS["bert"](0)), Model.of(other))

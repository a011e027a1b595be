"""Methods on task vectors: against their formulas on whole tensors, by full sorts, and against mergekit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.merging.stream import Source, Stream
from symfuse.methods import lookup
from symfuse.methods.breadcrumbs import breadcrumbs
from symfuse.methods.dare import STEPS, dare_linear
from symfuse.methods.della import ascending, della_linear
from symfuse.methods.parts import task_vectors
from symfuse.methods.parts.sparsify import Cut, Largest, kth_largest
from symfuse.methods.ram import ram
from symfuse.methods.sce import sce
from symfuse.methods.ties import ties

SHAPES = [(7, 13), (5,), (), (3, 4, 5), (6, 1), (1, 40)]
DTYPES = [torch.float32, torch.float64]
TRIMMED = ["ties", "breadcrumbs", "breadcrumbs_ties"]
RANDOM = ["dare_linear", "dare_ties", "della", "della_linear"]
VOTING = ["ties", "dare_ties", "della", "breadcrumbs_ties"]
LINEAR = ["task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"]
NORMALIZED = {"ties": True, "della": True}  # the defaults
IMPORTED = (breadcrumbs, dare_linear, della_linear, ram, sce, ties)


def models(shape: Sequence[int], dtype: torch.dtype, count: int = 3, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A base, and models whose deltas have equal magnitudes, zeros and exact cancellations among them."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(tuple(shape), generator=g, dtype=torch.float64).mul(64).round().div(64)
    deltas = [torch.randn(tuple(shape), generator=g, dtype=torch.float64).mul(8).round().div(64) for _ in range(count)]
    return base.to(dtype), [(base + delta).to(dtype) for delta in deltas]


def run(
    name: str,
    base: Tensor,
    tensors: Sequence[Tensor],
    *,
    block: int = 2**21,
    seed: int = 0,
    names: Sequence[str] = ("a", "b", "c", "d", "e"),
    **parameters: Any,
) -> Tensor:
    sources = [Source.of(tensor, label) for tensor, label in zip(tensors, names, strict=False)]
    stream = Stream("w", tuple(base.shape), sources, Source.of(base), dtype=base.dtype, seed=seed, block=block)
    before = [t.clone() for t in (base, *tensors)]
    out = torch.cat([part.reshape(-1).clone() for part in lookup(name)(stream, parameters)]).reshape(base.shape)
    assert all(torch.equal(x, y) for x, y in zip(before, (base, *tensors), strict=True))
    assert out.dtype == base.dtype
    return out


# ---- the formulas


def trimmed(delta: Tensor, dropped: int, kept: int) -> Tensor:
    """By a full sort: the `kept` entries after the `dropped` largest, the first of equal ones before the others."""
    flat = delta.reshape(-1)
    order = sorted(range(flat.numel()), key=lambda i: (-abs(float(flat[i])), i))[dropped : dropped + kept]
    out = torch.zeros_like(flat)
    out[order] = flat[order]
    return out.reshape(delta.shape)


def expected(
    base: Tensor, deltas: Sequence[Tensor], weights: Sequence[float], *, vote: bool, normalize: bool, scale: float
) -> Tensor:
    """Entry by entry, in Python's numbers."""
    out = []
    for b, *column in zip(base.flatten().tolist(), *(d.flatten().tolist() for d in deltas), strict=True):
        weighed = [w * d for w, d in zip(weights, column, strict=True)]
        chosen = list(range(len(weighed)))
        if vote:
            sign = 1 if sum(weighed) >= 0 else -1
            chosen = [i for i in chosen if weighed[i] * sign > 0]
        total = sum(weights[i] for i in chosen)
        out.append(b + scale * sum(weighed[i] for i in chosen) / (total if normalize and total else 1))
    return torch.tensor(out, dtype=base.dtype).reshape(base.shape)


def dense(name: str, base: Tensor, tensors: Sequence[Tensor], **given_: Any) -> Tensor:
    deltas = [tensor - base for tensor in tensors]
    n = base.numel()
    densities = given_.get("density", [1.0] * len(deltas))
    for i, density in enumerate(densities):
        if name not in TRIMMED or density >= 1:
            continue
        kept = 0 if density == 0 else max(1, int(density * n)) if name == "ties" else int(density * n)
        dropped = 0 if name == "ties" else min(int(given_.get("gamma", [0.01] * 9)[i] * n), n - kept)
        sparse = trimmed(deltas[i], dropped, kept)
        after = float(sparse.abs().double().sum())
        if given_.get("rescale") and after:
            sparse = sparse * (float(deltas[i].abs().double().sum()) / after)
        deltas[i] = sparse
    return expected(
        base,
        deltas,
        given_.get("weight", [1.0] * len(deltas)),
        vote=name in VOTING,
        normalize=given_.get("normalize", NORMALIZED.get(name, False)),
        scale=given_.get("lambda", 1.0),
    )


PARAMETERS: list[dict[str, Any]] = [
    {"weight": [0.5, 1.0, 2.0]},
    {"weight": [0.5, 1.0, 2.0], "normalize": True},
    {"weight": [0.5, -1.0, 0.5], "normalize": True},
    {"weight": [1.0, 0.0, 1.0], "density": [0.5, 0.5, 1.0], "lambda": 0.5},
    {"weight": [1.0, 1.0, 1.0], "density": [0.0, 0.3, 0.9], "normalize": False},
    {"weight": [0.25, 1.0, 0.5], "density": [0.7, 0.3, 0.2], "rescale": True, "normalize": True},
    {"weight": [0.0, 0.0, 0.0], "density": [0.5, 0.5, 0.5], "normalize": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["task_arithmetic", *TRIMMED])
def test_formula(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    base, tensors = models(shape, dtype)
    for parameters in PARAMETERS:
        wanted = dense(name, base, tensors, **parameters)
        for block in (2**21, 13, 1):
            out = run(name, base, tensors, block=block, **parameters)
            torch.testing.assert_close(out, wanted, msg=lambda text: f"{parameters}, {block}: {text}")  # noqa: B023


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.4, 0.99])
@pytest.mark.parametrize("name", ["breadcrumbs", "breadcrumbs_ties"])
def test_outliers_are_dropped_as_far_as_enough_is_left(name: str, gamma: float) -> None:
    base, tensors = models((7, 13), torch.float64)
    parameters = {"gamma": [gamma] * 3, "density": [0.5, 0.02, 0.001], "weight": [1.0, 0.5, 2.0]}
    torch.testing.assert_close(run(name, base, tensors, **parameters), dense(name, base, tensors, **parameters))


def compare(name: str) -> None:
    base, tensors = models((7, 13), torch.float64)
    torch.testing.assert_close(
        run(name, base, tensors, weight=[0.5, 1.0, 2.0]), dense(name, base, tensors, weight=[0.5, 1.0, 2.0])
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda votes: torch.sign(sum(torch.sign(v) for v in votes) + 0.5),  # by count
        lambda votes: torch.sign(sum(votes) - 1e-9),  # zero counts as negative
        lambda votes: torch.sign(votes[0] + 1e-9),  # the first decides
        lambda votes: torch.sign(1e-9 - sum(votes)),  # the minority
    ],
)
@pytest.mark.parametrize("name", ["ties", "breadcrumbs_ties"])
def test_a_wrong_sign_rule_is_noticed(
    name: str, wrong: Callable[[Sequence[Tensor]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_vectors, "majority", wrong)
    with pytest.raises(AssertionError, match="not close"):
        compare(name)


# ---- selection


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=60),
    share=st.floats(0, 1),
    step=st.integers(1, 20),
    wide=st.booleans(),
)
def test_the_k_largest_are_exactly_k_and_none_dropped_is_larger(
    values: list[float], share: float, step: int, wide: bool
) -> None:
    values = values + values[: len(values) // 2]  # some twice
    tensor = torch.tensor(values, dtype=torch.float64 if wide else torch.float32)
    k = max(1, int(share * len(values)))
    parts = tensor.split(step)
    ((cut,),) = kth_largest(lambda: iter([[part] for part in parts]), [[k]], tensor.dtype)
    signed = tensor.clone()
    signed[1::2] *= -1
    wanted = torch.zeros_like(signed)
    top = sorted(range(len(values)), key=lambda i: (-tensor[i].item(), i))[:k]
    wanted[top] = signed[top]
    largest = Largest(cut)
    assert torch.equal(torch.cat([largest(part) for part in signed.split(step)]), wanted)


@pytest.mark.parametrize("equal", [1, 2, 4])
def test_one_equal_entry_more_or_less_is_noticed(equal: int) -> None:
    """The three largest of these are the five and the first two ones."""
    values = torch.tensor([1.0, 0.5, -1.0, 5.0, 1.0, -1.0])
    largest = Largest(Cut(1.0, equal))
    out = torch.cat([largest(part) for part in values.split(2)])
    assert torch.equal(out, torch.tensor([1.0, 0.0, -1.0, 5.0, 0.0, 0.0])) == (equal == 2)


@pytest.mark.parametrize("name", [*LINEAR, *VOTING, "linear", "sce", "ram"])
def test_how_much_is_seen_at_once_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even which entries are dropped at random: that goes by what is read at once."""
    base, tensors = models((40, 7), torch.float32)
    given_: dict[str, Any] = {"density": [0.5, 0.7, 0.3]} if "density" in lookup(name).parameters else {}
    given_ |= {"weight": [0.3, 0.3, 0.4]} if "weight" in lookup(name).parameters else {}
    wanted = run(name, base, tensors, block=70, **given_)
    other = run(name, base, tensors, block=70, seed=1, **given_)
    for seen in (7, 21, 64):
        monkeypatch.setattr("symfuse.merging.stream.PIECE", seen)
        assert torch.equal(run(name, base, tensors, block=70, **given_), wanted)
    assert torch.equal(other, wanted) == (name not in RANDOM)


def test_several_ranks_of_several_quantities() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        tensors = [torch.rand(1000, generator=g, dtype=dtype) * 10.0 ** torch.randint(-40, 30, (1000,), generator=g)]
        tensors.append(tensors[0].flip(0).square())
        ranks = [[1, 2, 500, 1000], [7]]
        cuts = kth_largest(lambda t=tensors: iter([t]), ranks, dtype)  # type: ignore[misc]
        for tensor, ks, found in zip(tensors, ranks, cuts, strict=True):
            assert [cut.value for cut in found] == [tensor.sort(descending=True).values[k - 1].item() for k in ks]


@pytest.mark.parametrize("block", [2**21, 1000])
def test_c71_a_large_half_precision_tensor_of_ones(block: int) -> None:
    base = torch.zeros(400, 400)
    ones = torch.ones(400, 400, dtype=torch.float16)
    out = run("ties", base, [ones], density=[0.5], rescale=True, block=block)
    assert torch.equal(out.flatten(), torch.tensor([2.0] * 80000 + [0.0] * 80000))


def test_c73_weights_act_before_the_vote_and_the_base_has_no_vote() -> None:
    base = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    a = torch.tensor([[4.0, -4.0, 0.0], [1.0, 2.0, 5.0]], dtype=torch.float64)
    b = torch.tensor([[-1.0, 2.0, -3.0], [1.0, 0.0, -1.0]], dtype=torch.float64)
    # Weighed by 0.2 and 1: [.8, -.8, 0; .2, .4, 1] and [-1, 2, -3; 1, 0, -1]; the last entries cancel, so + wins.
    wanted = base + torch.tensor([[-1.0, 2.0, -3.0], [1.0, 2.0, 5.0]], dtype=torch.float64)
    for weight, extra in (([0.2, 1.0], []), ([0.2, 1.0, 3.0], [base])):
        out = run("ties", base, [base + a, base + b, *extra], weight=weight)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-15)


# ---- SCE and RAM


def dense_sce(base: Tensor, tensors: Sequence[Tensor], share: float) -> Tensor:
    deltas = torch.stack([t - base for t in tensors]).reshape(len(tensors), -1)
    if share < 1:
        var = ((deltas - deltas.mean(0)) ** 2).mean(0)
        var[(deltas == deltas[0]).all(0)] = 0
        k = int(share * int((var > 0).sum()))
        order = sorted(range(var.numel()), key=lambda i: (-var[i].item(), i))[:k]
        mask = torch.zeros_like(var)
        mask[order] = 1
        deltas = deltas * mask
    energy = (deltas**2).mean(1)
    weights = energy / energy.sum() if energy.sum() else torch.full_like(energy, 1 / len(energy))
    sign = torch.where(deltas.sum(0) >= 0, 1.0, -1.0)
    agrees = deltas.sign() == sign
    divisor = (weights[:, None] * agrees).sum(0)
    mixed = (weights[:, None] * deltas * agrees).sum(0) / torch.where(divisor == 0, 1.0, divisor)
    return base + mixed.reshape(base.shape)


def distinct(
    shape: Sequence[int], dtype: torch.dtype, count: int = 3, size: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """Without near ties of variances, which rounding could order either way."""
    g = torch.Generator().manual_seed(1)
    base = torch.randn(tuple(shape), generator=g, dtype=dtype)
    return base, [base + size * torch.randn(tuple(shape), generator=g, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_sce(share: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    base, tensors = distinct(shape, dtype)
    for block in (2**21, 13, 1):
        torch.testing.assert_close(
            run("sce", base, tensors, select_topk=share, block=block), dense_sce(base, tensors, share)
        )


def test_sce_weighs_small_vectors_too_and_takes_no_entry_on_which_all_agree() -> None:
    base = torch.zeros(4, dtype=torch.float64)
    a = torch.tensor([1e-5, 0.0, 1e-6, 2e-5], dtype=torch.float64)
    b = torch.tensor([2e-5, 0.0, 1e-6, 4e-5], dtype=torch.float64)
    share = float(a.square().sum() / (a.square().sum() + b.square().sum()))
    torch.testing.assert_close(run("sce", base, [a, b]), share * a + (1 - share) * b, rtol=1e-12, atol=0)
    half = torch.tensor([0.0, 0.0, 0.0, 0.2 * 2e-5 + 0.8 * 4e-5], dtype=torch.float64)
    torch.testing.assert_close(run("sce", base, [a, b], select_topk=0.5), half, rtol=1e-12, atol=0)


def dense_ram(base: Tensor, tensors: Sequence[Tensor], factors: Sequence[float], epsilon: float) -> Tensor:
    out = base.clone().reshape(-1)
    deltas = [(t - base).reshape(-1) for t in tensors]
    for j in range(out.numel()):
        changed = [i for i, delta in enumerate(deltas) if abs(delta[j]) > epsilon]
        if len(changed) == 1:
            out[j] += deltas[changed[0]][j] * factors[changed[0]]
        elif changed:
            out[j] += sum(deltas[i][j] for i in changed) / len(changed)
    return out.reshape(base.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ram(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    base, tensors = models(shape, dtype)
    epsilon = 0.1
    changes = torch.stack([(t - base).abs() > epsilon for t in tensors]).reshape(len(tensors), -1)
    alone = changes & (changes.sum(0) == 1)
    shared = changes & (changes.sum(0) > 1)
    ratios = [int(s.sum()) / max(int(u.sum()), 1e-9) for s, u in zip(shared, alone, strict=True)]
    factors = [1 + 0.5 * min(0.7, ratio) for ratio in ratios]
    for block in (2**21, 13, 1):
        out = run("ram", base, tensors, epsilon=epsilon, block=block)
        torch.testing.assert_close(out, dense_ram(base, tensors, [1.0] * 3, epsilon))
        plus = run("ramplus_tl", base, tensors, r=0.5, alpha=0.7, epsilon=epsilon, block=block)
        torch.testing.assert_close(plus, dense_ram(base, tensors, factors, epsilon))


# ---- against mergekit


MERGEKIT: list[tuple[str, dict[str, Any]]] = [
    ("task_arithmetic", {"weight": [0.3, 1.0, 0.6]}),
    ("task_arithmetic", {"weight": [0.3, 1.0, 0.6], "normalize": True, "lambda": 0.7}),
    ("ties", {"weight": [0.3, 1.0, 0.6]}),
    ("ties", {"weight": [0.3, 1.0, 0.6], "density": [0.5, 0.3, 1.0]}),
    ("ties", {"weight": [0.3, 1.0, 0.6], "density": [0.5, 0.3, 0.9], "normalize": False, "lambda": 0.7}),
    ("ties", {"weight": [0.3, -1.0, 0.6], "density": [0.5, 0.3, 0.9], "rescale": True, "int8_mask": True}),
    ("ties", {"weight": [0.3, 1.0, 0.6], "density": [0.001, 0.0, 0.9]}),
    ("breadcrumbs", {"weight": [0.3, 1.0, 0.6], "density": [0.5, 0.3, 0.9]}),
    ("breadcrumbs", {"weight": [0.3, 1.0, 0.6], "density": [0.5, 0.95, 0.0], "gamma": [0.2, 0.2, 0.2]}),
    ("breadcrumbs", {"weight": [0.3, 1.0, 0.6], "density": [0.5, 0.95, 0.1], "gamma": [0.2] * 3, "rescale": True}),
    ("breadcrumbs_ties", {"weight": [0.3, 1.0, 0.6], "density": [0.5, 0.95, 0.1], "gamma": [0.2, 0.2, 0.2]}),
    ("dare_linear", {"weight": [0.3, 1.0, 0.6]}),
    ("dare_ties", {"weight": [0.3, 1.0, 0.6], "normalize": True}),
    ("dare_ties", {"weight": [0.3, 1.0, 0.6], "density": [0.0, 1.0, 1.0]}),
    ("della", {"weight": [0.3, 1.0, 0.6]}),
    ("della_linear", {"weight": [0.3, 1.0, 0.6]}),
    ("sce", {}),
    ("sce", {"select_topk": 0.3}),
    ("sce", {"select_topk": 0.0}),
    ("ram", {"epsilon": 0.5}),
    ("ramplus_tl", {"epsilon": 0.5}),
    ("ramplus_tl", {"epsilon": 1.0, "r": 0.5, "alpha": 2.0}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(9, 31), (40,)])
@pytest.mark.parametrize(("name", "parameters"), MERGEKIT)
def test_mergekit(name: str, parameters: dict[str, Any], shape: tuple[int, ...]) -> None:
    api = pytest.importorskip("mergekit.merge_methods.api", reason="mergekit is not installed")
    base, tensors = distinct(shape, torch.float32)
    wanted = api.merge_tensors([base, *tensors], name, parameters=parameters, base_index=0)
    torch.testing.assert_close(run(name, base, tensors, **parameters), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_mergekit_has_the_same_keywords_and_defaults() -> None:
    registry = pytest.importorskip("mergekit.merge_methods", reason="mergekit is not installed")
    for name in ["task_arithmetic", *TRIMMED, *RANDOM, "sce", "ram", "ramplus_tl"]:
        theirs = {p.name: (p.value_type, getattr(p, "default", None)) for p in registry.get(name).spec.parameters}
        ours = {p.name: (p.kind, p.default) for p in lookup(name).parameters.values()}
        assert theirs.pop("weight", None) is None or ours.pop("weight") == (float, 1.0)
        assert ours == theirs, name


# ---- random masks


def deltas_of(name: str, delta: Tensor, seed: int = 0, **parameters: Any) -> Tensor:
    return run(name, torch.zeros_like(delta), [delta], seed=seed, **parameters)


@pytest.mark.parametrize("name", RANDOM)
def test_the_mean_over_seeds_is_the_delta(name: str) -> None:
    base, (tensor,) = distinct((4, 6), torch.float64, 1)
    delta = tensor - base
    parameters: dict[str, Any] = {"density": [0.4], "normalize": False}
    if name.startswith("della"):
        parameters["epsilon"] = [0.3]
    count = 1000
    total = torch.zeros_like(delta)
    for seed in range(count):
        total += deltas_of(name, delta, seed, **parameters)
    lowest = 0.1 if name.startswith("della") else 0.4
    error = delta.abs() * ((1 - lowest) / lowest / count) ** 0.5
    assert bool(((total / count - delta).abs() < 5 * error).all())


@pytest.mark.parametrize("density", [0.3, 1e-6, 0.9])
def test_how_much_is_kept_and_by_what_it_is_divided(density: float) -> None:
    delta = torch.ones(1000, 300, dtype=torch.float64)
    p = max(1, round(density * STEPS)) / STEPS
    out = deltas_of("dare_linear", delta, density=[density], block=30000)
    kept = int((out != 0).sum())
    assert abs(kept - p * delta.numel()) <= 5 * (p * (1 - p) * delta.numel()) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full((kept,), 1 / p, dtype=torch.float64))
    bare = deltas_of("dare_linear", delta, density=[density], block=30000, rescale=False)
    assert torch.equal(bare, (out != 0).double())


def test_della_keeps_by_rank_in_each_row() -> None:
    g = torch.Generator().manual_seed(0)
    delta = torch.rand(40000, 5, generator=g, dtype=torch.float64) + 0.5
    out = deltas_of("della_linear", delta, density=[0.5], epsilon=[0.2], rescale=False)
    order = delta.argsort(dim=1)
    rates = (out != 0).double().gather(1, order).mean(0)
    wanted = torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7], dtype=torch.float64)
    torch.testing.assert_close(rates, wanted, rtol=0, atol=5 * 0.5 / 200)
    scaled = deltas_of("della_linear", delta, density=[0.5], epsilon=[0.2])
    steps = (wanted * STEPS).round()
    torch.testing.assert_close(scaled.gather(1, order), (out.gather(1, order)) * (STEPS / steps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randint(0, 9, (40, 300), generator=g).to(dtype) * 1e-3
    rows = [sorted(range(300), key=lambda i, row=row: (row[i], i)) for row in values.tolist()]
    assert torch.equal(ascending(values), torch.tensor(rows))


def test_the_only_entry_of_a_row_is_kept_with_the_density() -> None:
    out = deltas_of("della_linear", torch.ones(40000, 1), density=[0.5], epsilon=[0.4], rescale=False)
    assert abs(float(out.mean()) - 0.5) < 5 * 0.5 / 200


@pytest.mark.parametrize("name", RANDOM)
def test_c74_masks_depend_on_seed_and_names_only(name: str) -> None:
    base, tensors = distinct((20, 30), torch.float32, 2)
    parameters: dict[str, Any] = {"weight": [1.0, 1.0], "density": [0.3, 0.7]}
    first = run(name, base, tensors, **parameters)
    assert torch.equal(first, run(name, base, tensors, **parameters))
    assert not torch.equal(first, run(name, base, tensors, seed=1, **parameters))
    assert not torch.equal(first, run(name, base, tensors, names="xy", **parameters))
    turned = run(name, base, tensors[::-1], names="ba", weight=[1.0, 1.0], density=[0.7, 0.3])
    assert torch.equal(first, turned)


@pytest.mark.parametrize("name", RANDOM)
def test_c74_masks_of_blocks_and_models_differ(name: str) -> None:
    ones = torch.ones(8, 64)
    out = deltas_of(name, ones, density=[0.5], block=64)
    assert len({tuple(row.tolist()) for row in out}) == 8
    twice = [
        run(name, torch.zeros(8, 64), [ones, ones], density=[0.5, 0.5], weight=w) for w in ([1.0, 0.0], [0.0, 1.0])
    ]
    assert not torch.equal(*twice)


@pytest.mark.parametrize("name", RANDOM)
def test_masks_of_two_models_of_one_name_differ(name: str) -> None:
    """They are told apart by their places: else all that one keeps is what the other keeps."""
    ones = torch.ones(8, 64)
    names, zeros = ("checkpoint", "checkpoint"), torch.zeros(8, 64)
    kept = [
        run(name, zeros, [ones, ones], names=names, density=[0.5, 0.5], weight=weight)
        for weight in ([1.0, 0.0], [0.0, 1.0])
    ]
    assert not torch.equal(*kept)


# ---- limits

PLAIN = ["task_arithmetic", *TRIMMED, *RANDOM]


@pytest.mark.parametrize("name", PLAIN)
def test_density_zero_is_the_base_and_one_the_model(name: str) -> None:
    base, (tensor,) = distinct((5, 7), torch.float32, 1)
    assert torch.equal(run(name, base, [tensor], density=[1.0]), tensor)
    if name != "task_arithmetic":  # which has no density, but accepts it
        assert torch.equal(run(name, base, [tensor], density=[0.0]), base)
    assert torch.equal(run(name, base, [tensor], weight=[0.0]), base)


@pytest.mark.parametrize("name", [*PLAIN, "sce"])
def test_equal_models_give_the_model(name: str) -> None:
    base, (tensor,) = distinct((5, 7), torch.float32, 1, size=1e-3)
    base *= 1e6  # so that base + (tensor - base) is not the tensor
    tensors = [tensor] * 3
    parameters = {} if name == "sce" else {"weight": [0.1, 0.2, 0.4], "normalize": True}
    assert torch.equal(run(name, base, tensors, **parameters), tensor)
    assert torch.equal(run(name, base, [tensor], **({} if name == "sce" else {"normalize": True})), tensor)


@pytest.mark.parametrize("name", [*PLAIN, "sce", "ram", "ramplus_tl"])
def test_models_equal_to_the_base_give_the_base(name: str) -> None:
    base, _ = distinct((5, 7), torch.float32)
    parameters = {"density": [0.5, 0.5]} if name in PLAIN else {"select_topk": 0.5} if name == "sce" else {}
    assert torch.equal(run(name, base, [base, base], **parameters), base)


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_of_weight_zero_has_no_influence(name: str) -> None:
    base, tensors = models((5, 7), torch.float64)
    huge = base + 1e300
    parameters = {"density": [0.5] * 3, "normalize": True}
    with_it = run(name, base, [*tensors[:2], huge], weight=[1.0, 0.5, 0.0], **parameters)
    without = run(name, base, tensors[:2], weight=[1.0, 0.5], density=[0.5] * 2, normalize=True)
    assert torch.equal(with_it, without)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("weights", [[1.0, -1.0, 0.0], [0.1, 0.2, -0.3], [-1.0, -2.0, -3.0], [1e-30, 1.0, 1.0]])
def test_weights_of_any_sign_give_finite_results(name: str, weights: list[float]) -> None:
    for dtype, normalize in itertools.product(DTYPES, (False, True)):
        base, tensors = models((7, 13), dtype)
        out = run(name, base, tensors, weight=weights, density=[0.5, 0.6, 0.7], normalize=normalize)
        assert float((out - base).abs().max()) < 20


@pytest.mark.parametrize("name", [*PLAIN, "sce", "ram", "ramplus_tl"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_a_tensor_without_entries(name: str, shape: tuple[int, ...]) -> None:
    parameters = {"density": [0.5, 0.5]} if name in PLAIN else {"select_topk": 0.5} if name == "sce" else {}
    empty = torch.zeros(shape)
    assert run(name, empty, [empty, empty], **parameters).shape == shape


@pytest.mark.parametrize(
    ("name", "wrong", "word"),
    [
        *((name, {"density": [0.5, value]}, "density") for name in PLAIN[1:] for value in (-0.1, 1.1, float("nan"))),
        *((name, {"weight": [0.5, float("inf")]}, "weight") for name in PLAIN),
        *((name, {"weight": [0.5, 1.0, 2.0]}, "weight") for name in PLAIN),
        *((name, {"lambda": float("nan")}, "lambda") for name in PLAIN),
        *((name, {"gamma": [value]}, "gamma") for name in TRIMMED[1:] for value in (-0.1, 1.0, 1.5)),
        *((name, {"density": [0.2], "epsilon": [0.2]}, "epsilon") for name in RANDOM[2:]),
        *((name, {"density": [0.9], "epsilon": [0.1]}, "epsilon") for name in RANDOM[2:]),
        *((name, {"density": [0.5], "epsilon": [-0.1]}, "epsilon") for name in RANDOM[2:]),
        ("sce", {"select_topk": 1.5}, "select_topk"),
        ("ram", {"epsilon": -1.0}, "epsilon"),
        ("ramplus_tl", {"alpha": -1.0}, "alpha"),
    ],
)
def test_values_that_make_no_sense_are_refused_before_anything_is_read(
    name: str, wrong: dict[str, Any], word: str
) -> None:
    def read(start: int, stop: int) -> Tensor:
        raise AssertionError("read")

    stream = Stream("w", (3, 4), [Source(read, "a"), Source(read, "b")], Source(read))
    with pytest.raises(OptionError, match=word):
        next(lookup(name)(stream, wrong))

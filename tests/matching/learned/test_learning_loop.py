"""Learned matchings of tiny models: planted pairs, bounds that always hold, and what is left as it was."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import symfuse
from contract.tiny import real
from matching.learned.learning_cases import history, identity, learning, model, near, planted, same, task, tensors
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.evaluation import Batch
from symfuse.evaluation.task import Totals
from symfuse.evaluation.tasks.sequence_classification import SequenceClassification
from symfuse.groups import Coupling, Monomial
from symfuse.io import Checkpoint
from symfuse.matching.learned import Learning, Progress, learn, match_learned
from symfuse.matching.learned.loop import _batches, _draw, _schedule, _split
from symfuse.matching.learned.path import inner_points, mixed
from symfuse.model import Model
from symfuse.verification import compare, random_inputs, run


def barrier(label: str, source: Checkpoint, anchor: Checkpoint, points: int = 3) -> float:
    """The most that the loss of evenly spaced points lies above the line between the ends' losses, on all batches of
    the task, by merging and running the real class."""
    data, losses = task(label), []
    for i in range(points + 2):
        share = i / (points + 1)
        ends = [source, anchor]
        point = ends[0] if i == 0 else ends[1] if share == 1 else api.merge(
            ends, method="linear", weights=[1 - share, share]
        )  # fmt: skip
        losses.append(data(real(point)).loss)
    line = [losses[0] + (losses[-1] - losses[0]) * i / (points + 1) for i in range(points + 2)]
    return max(a - b for a, b in zip(losses[1:-1], line[1:-1], strict=True))


@pytest.mark.parametrize("label", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_planted_turn_is_undone(label: str) -> None:
    """B is A with heads turned: from the identity the barrier goes down to nearly nothing."""
    source, anchor = planted(label), model(label)
    g = match_learned(
        Model.of(source), Model.of(anchor), learning(label, steps=40, every=20, rate=0.03),
        start=identity(label), axes=("attention",),
    )  # fmt: skip
    before, after = barrier(label, source, anchor), barrier(label, g(source), anchor)
    assert before > 0.05
    assert after < before / 5
    assert min(history(g)) < history(g)[0] / 5
    assert api.prove(source, g).exact.worst < 1e-5


@pytest.mark.slow
def test_what_is_measured_is_the_barrier() -> None:
    """The record's first number against the barrier of the pair as it is, and its least against that of the result."""
    source, anchor = planted("llama"), model("llama")
    own = learning("llama", validation=task("llama"), rate=0.02)
    g = match_learned(Model.of(source), Model.of(anchor), own, start=identity("llama"), axes=("attention",))
    assert history(g)[0] == pytest.approx(barrier("llama", source, anchor), abs=1e-4)
    assert min(history(g)) == pytest.approx(barrier("llama", g(source), anchor), abs=1e-4)
    ends = g.provenance["learning"]["ends"]
    assert ends == pytest.approx([task("llama")(real(one)).loss for one in (source, anchor)], abs=1e-4)
    assert [one["step"] for one in g.provenance["learning"]["history"]] == [0, 5, 10]
    assert g.provenance["learning"]["stopped_at"] == 10
    assert g.provenance["from"] == "learned"


@pytest.mark.parametrize("rate", [*(pytest.param(rate, marks=pytest.mark.slow) for rate in (1e-9, 0.02)), 2.0])
def test_it_is_never_worse_than_the_start(rate: float) -> None:
    source, anchor = Model.of(planted("llama", axes=("c",))), Model.of(model("llama"))
    seen: list[Progress] = []
    own = learning("llama", rate=rate, progress=seen.append)
    options: dict[str, Any] = {"start": identity("llama"), "axes": "all", "groups": {"v": "none"}}
    g = match_learned(source, anchor, own, **options)
    assert [one.step for one in seen] == [0, 5, 10]
    assert all(one.steps == 10 and one.start == seen[0].barrier for one in seen)
    assert [one.best for one in seen] == [min(one.barrier for one in seen[: i + 1]) for i in range(3)]
    assert math.isnan(seen[0].loss)
    assert all(math.isfinite(one.loss) for one in seen[1:])
    if rate > 1:
        assert seen[-1].barrier > seen[0].barrier
        assert dict(g.elements) == {}  # the start is kept: it is the identity
    elif rate > 1e-6:
        assert g.elements


def test_inputs_and_anchor_stay_as_they_are(tmp_path: Path) -> None:
    """Bitwise, in memory and in folders; the anchor of `align` as well."""
    folders = [planted("bert").save(tmp_path / "a"), model("bert").save(tmp_path / "b")]
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for folder in folders for path in folder.iterdir()}
    numbers = torch.get_rng_state()
    aligned = api.align(folders, anchor=1, axes=("attention", "ffn"), learn=learning("bert", rate=0.02))
    assert aligned.alignments[1] is None
    assert aligned.alignments[0] is not None
    anchor, before = tensors(aligned.checkpoints[1]), tensors(symfuse.open(folders[1]))
    assert anchor.keys() == before.keys()
    assert all(torch.equal(anchor[name], before[name]) for name in before)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for folder in folders for p in folder.iterdir()} == files
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.slow
def test_the_same_seed_gives_the_same() -> None:
    source, anchor = planted("bert"), model("bert")

    def found(seed: int) -> Alignment:
        return api.match(source, anchor, axes="attention", learn=learning("bert", rate=0.02, seed=seed))

    one = found(0)
    assert same(one, found(0))
    assert not same(one, found(1))


@pytest.mark.slow
def test_two_models_towards_each_other() -> None:
    source, anchor = planted("gpt2"), model("gpt2")
    aligned = api.align([source, anchor], anchor="universe", axes="attention", learn=learning("gpt2", rate=0.02))
    assert aligned.anchor is None
    for before, after, g in zip([source, anchor], aligned.checkpoints, aligned.alignments, strict=True):
        assert g is not None
        assert g.elements
        assert api.verify(before, after).worst < 1e-5
        assert "learning" in g.provenance
    records = [g.provenance["learning"] for g in aligned.alignments if g is not None]
    assert records[0] == records[1]


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["universe", 1])
def test_three_models(anchor: Any) -> None:
    models = [planted("llama"), model("llama"), planted("llama", seed=2)]
    own = learning("llama", rate=0.02, steps=5)
    aligned = api.align(models, anchor=anchor, axes="attention", learn=own)
    moved = [g is not None for g in aligned.alignments]
    assert moved == ([True] * 3 if anchor == "universe" else [True, False, True])
    found = [g for g in aligned.alignments if g is not None]
    assert len(found[0].provenance["learning"]["ends"]) == 3
    if anchor == 1:  # each says whom it was moved towards
        assert [g.provenance["anchor"]["name"] for g in found] == ["llama-0", "llama-0"]
        assert all(torch.equal(aligned.checkpoints[1][n], models[1][n]) for n in models[1])
    for before, after in zip(models, aligned.checkpoints, strict=True):
        assert api.verify(before, after, tolerance=1.0).worst < 2e-5


@pytest.mark.parametrize("permutations", ["straight-through", pytest.param("annealed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("label", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_learned_permutations_are_exact(label: str, permutations: Any, tmp_path: Path) -> None:
    """Elements of the groups, saved, loaded and proved; a rate at which some units do change places."""
    source = Model.of(model(label, 1))
    own = learning(label, permutations=permutations, rate=0.5, spread=1.0)
    frame = random_alignment(source.spec, 4) if label == "bert" else Alignment(source.spec, {})
    g = match_learned(source, Model.of(model(label)), own, start=frame, axes="all")
    assert g.variants == ()
    loaded = Alignment.load(g.save(tmp_path / "g.safetensors"))
    assert same(loaded, g)
    assert loaded.elements.keys() == g.elements.keys()
    proof = api.prove(model(label, 1), loaded)
    assert proof.exact.worst < 1e-10


@pytest.mark.slow
def test_permutations_are_learned() -> None:
    """Two neurons that changed places change back, straight through."""
    anchor = model("relu")
    spec = Model.of(anchor).spec
    instance = next(i for i in sorted(spec.movable) if i.axis == "ffn")
    order = torch.arange(29)
    order[:8] = order[:8].roll(1)
    source = Alignment(spec, {instance: Monomial(order)})(anchor)
    own = learning("relu", permutations="straight-through", rate=0.1, steps=40)
    start = Alignment(spec, {})
    g = match_learned(Model.of(source), Model.of(anchor), own, start=start, axes="ffn", groups={"ffn": "permutation"})
    assert min(history(g)) < history(g)[0]
    assert any(not torch.equal(e.index, torch.arange(29)) for e in g.elements.values() if isinstance(e, Monomial))
    assert api.prove(source, g).exact.worst < 1e-10


def test_soft_permutations_are_labelled(tmp_path: Path) -> None:
    source, anchor = model("bert", 1), model("bert")
    own = learning("bert", permutations="soft", rate=0.1)
    g = api.match(source, anchor, axes="ffn", learn=own)
    assert g.variants == ("transport",)
    assert all(isinstance(element, Coupling) for element in g.elements.values())
    assert g.elements
    loaded = Alignment.load(g.save(tmp_path / "g.safetensors"))
    assert loaded.variants == ("transport",)
    assert same(loaded, g)
    inputs = random_inputs(real(source), source.config)
    assert max(compare(run(real(source), inputs), run(real(g(source)), inputs)).values()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("frame", [None, ()], ids=["rotated", "native"])
def test_a_tied_decoder_in_both_frames(frame: Any) -> None:
    source, anchor = model("gpt2", 1), model("gpt2")
    g = api.match(source, anchor, axes="all", frame=frame, learn=learning("gpt2"))
    names = g.provenance["options"]["groups"]
    assert names["residual"] == ("permutation" if frame == () else "centred")
    assert (g.frame == ()) == (frame == ())
    assert api.prove(source, g).exact.worst < 1e-10


@pytest.mark.slow
def test_the_start_is_found_from_activations_too() -> None:
    source, anchor = planted("bert"), model("bert")
    g = api.match(source, anchor, axes="attention,ffn", data=task("bert"), learn=learning("bert", rate=1e-9))
    started = api.match(source, anchor, axes="attention,ffn", data=task("bert"))
    assert g.provenance["start"]["from"] == started.provenance["from"] == "activations"
    for instance, element in started.elements.items():
        torch.testing.assert_close(g.elements[instance].to_dense(), element.to_dense(), rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_a_task_alone_is_enough() -> None:
    """learn= takes a task, learned with the usual options: here stopped by patience before it costs seconds."""
    own = Learning(task("llama"), steps=2000, every=1, patience=2, rate=1e-12)
    g = api.match(model("llama", 1), model("llama"), axes="attention", learn=own)
    assert g.provenance["learning"]["stopped_at"] <= 30
    record = g.provenance["learning"]
    last = [one["barrier"] for one in record["history"]]
    assert min(last[-2:]) >= min(last)


@pytest.mark.slow
def test_only_those_layers_and_groups() -> None:
    source, anchor = model("gpt2", 1), model("gpt2")
    g = api.match(source, anchor, axes="attention", layers=0, learn=learning("gpt2"))
    assert {str(i) for i in g.elements} == {"qk[0]", "v[0]"}
    assert all(type(e).__name__ == "Linear" for e in g.elements.values())  # the largest groups
    named = api.match(source, anchor, axes="attention", groups={"qk": "orthogonal"}, learn=learning("gpt2"))
    assert named.provenance["options"]["groups"] == {"qk": "orthogonal", "v": "invertible"}
    unscaled = api.match(source, anchor, axes="attention", scaling=False, learn=learning("gpt2"))
    assert set(unscaled.provenance["options"]["groups"].values()) == {"orthogonal"}


class Diverging(SequenceClassification):
    """Not a number from the second batch that is learned on."""

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        found = super().totals(module, batch)
        return Totals(found.loss * math.nan, found.count) if torch.is_grad_enabled() else found


def test_a_loss_that_is_not_finite() -> None:
    own = learning("bert", task=Diverging(task("bert").batches))
    with pytest.raises(CheckpointError, match=r"failed after 0 steps .the loss is nan, .*rate than 0\.01"):
        api.match(model("bert", 1), model("bert"), axes="attention", learn=own)


@pytest.mark.slow
def test_a_rate_at_which_numbers_overflow() -> None:
    with pytest.raises(CheckpointError, match=r"failed after .* steps .*; take a smaller rate than 10,"):
        api.match(model("bert", 1), model("bert"), axes="attention", learn=learning("bert", rate=10.0))


@pytest.mark.slow
def test_a_model_is_moved_by_learn_itself() -> None:
    """The function that the others call: starts of None stay."""
    models = [Model.of(model("bert", 1)), Model.of(model("bert"))]
    found = learn(models, [identity("bert"), None], learning("bert", rate=0.02), axes="attention")
    assert found[0].elements
    assert not found[1].elements
    assert found[0].spec.family == "bert"


@given(
    count=st.integers(2, 5), shape=st.lists(st.integers(1, 3), min_size=1, max_size=2), seed=st.integers(0, 99),
    zero=st.booleans(),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_points_are_weighted_sums(count: int, shape: list[int], seed: int, zero: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(count)]
    weights = torch.rand(count, generator=rng, dtype=torch.float64) + 0.01
    weights[0] = 0.0 if zero else weights[0]
    weights = weights / weights.sum()
    expected = sum(float(w) * t for w, t in zip(weights, parts, strict=True))
    torch.testing.assert_close(mixed(parts, weights.tolist()), expected, rtol=1e-12, atol=1e-12)
    same_ones = [parts[0]] * count
    assert torch.equal(mixed(same_ones, weights.tolist()), parts[0])  # equal tensors stay as they are
    corner = [float(i == 1) for i in range(count)]
    assert mixed(parts, corner) is parts[1]


@given(count=st.integers(2, 7), points=st.integers(1, 9))
def test_inner_points_are_inside(count: int, points: int) -> None:
    found = inner_points(count, points)
    assert len(set(found)) == len(found)
    for weights in found:
        assert len(weights) == count
        assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
        assert min(weights) >= 0
        assert max(weights) < 1
    if count == 2:
        assert len(found) == points
        steps = [b[1] - a[1] for a, b in itertools.pairwise(found)]
        assert steps == pytest.approx([1 / (points + 1)] * (points - 1))
    for i in range(count):  # all models have a part
        assert any(weights[i] > 0 for weights in found)


def test_inner_points_written_out() -> None:
    assert inner_points(2, 1) == [(0.5, 0.5)]
    assert len(inner_points(3, 5)) == 12  # of 15 multiples of a quarter three are corners
    assert (0.25, 0.25, 0.5) in inner_points(3, 5)
    assert len(inner_points(5, 5)) == 11
    assert inner_points(5, 5)[-1] == (0.2,) * 5


@given(count=st.integers(2, 5), spread=st.floats(0, 1), seed=st.integers(0, 999))
def test_drawn_weights_lie_on_the_simplex_within_the_spread(count: int, spread: float, seed: int) -> None:
    weights = _draw(count, spread, random.Random(seed))
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    low = (1 - spread) / count
    assert all(low - 1e-12 <= w <= low + spread + 1e-12 for w in weights)
    if count == 2:
        assert all(0.5 - spread / 2 - 1e-12 <= w <= 0.5 + spread / 2 + 1e-12 for w in weights)


def test_drawn_weights_of_two_are_uniform() -> None:
    rng = random.Random(0)
    found = torch.tensor([_draw(2, 0.8, rng)[0] for _ in range(4000)])
    quarters = torch.histc(found, 4, 0.1, 0.9)
    assert quarters.sum() == 4000
    assert ((quarters - 1000).abs() < 120).all()  # four standard deviations


def test_the_rate_rises_and_falls() -> None:
    rates = [_schedule(i / 1000) for i in range(1001)]
    assert 0 < rates[0] < 0.03
    assert max(rates) > 0.98
    assert rates[1000] == pytest.approx(0, abs=1e-12)
    assert all(a > b for a, b in itertools.pairwise(rates[50:]))


@pytest.mark.parametrize("count", range(2, 12))
def test_what_is_held_out(count: int) -> None:
    data = task("bert", 12).part(task("bert", 12).batches[:count])
    learned, held = _split(Learning(data))
    assert len(learned.batches) + len(held.batches) == count
    assert learned.batches
    assert held.batches
    assert len(held.batches) == max(1, -(-count // max(2, min(5, count))))
    assert all(one is not other for one in learned.batches for other in held.batches)
    own = Learning(data, validation=task("bert"))
    assert _split(own) == (data, own.validation)


def test_batches_come_in_random_order_each_as_often() -> None:
    data = task("bert")
    drawn = _batches(data, random.Random(0))
    rounds = [[next(drawn) for _ in data.batches] for _ in range(6)]
    for one in rounds:
        assert {id(batch) for batch in one} == {id(batch) for batch in data.batches}
    assert len({tuple(id(batch) for batch in one) for one in rounds}) > 1


def test_what_is_planted_is_off() -> None:
    """The cases above have something to find."""
    spec = Model.of(model("gpt2")).spec
    assert len(near(spec, 0.4, 1, ("qk", "v")).elements) == 4
    assert any(not torch.equal(planted("gpt2")[n], model("gpt2")[n]) for n in model("gpt2"))
    with pytest.raises(IncompatibleError):
        match_learned(Model.of(model("gpt2")), Model.of(model("bert")), learning("bert"))

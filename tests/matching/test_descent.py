"""Descent over axes that meet: what it promises whatever the models, and which axes, layers and starts it takes."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import pytest
import torch

from contract.tiny import MODELS, TEXT, case, of
from recovery.planted import EVERYTHING, noisy, planted, squared
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import OptionError
from symfuse.groups import Group, Monomial, Permutation
from symfuse.io import Checkpoint
from symfuse.matching import match_models
from symfuse.matching.descent import Descent, Sweeper, descend
from symfuse.matching.problem import ROTATABLE, problem_of
from symfuse.matching.workspace import Workspace
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Axis, Instance, Spec, expand
from symfuse.verification import prove

# label → frame: post-norm, with square maps and a tied head; pre-norm, permuted or rotated.
PAIRS: dict[str, tuple[str, ...]] = {
    "torch-relu-post": (), "bert-mlm": (), "deberta-mlm": (), "gpt2-lm": ROTATABLE, "vit-classification": ROTATABLE,
    "gpt2-lm-untied": (),
}  # fmt: skip
slow = pytest.mark.slow
every_pair = pytest.mark.parametrize("label", PAIRS)
some_pairs = pytest.mark.parametrize(
    "label", [pytest.param(label, marks=[] if label in ("bert-mlm", "gpt2-lm") else slow) for label in PAIRS]
)


@cache
def unrelated(label: str) -> tuple[Model, Model]:
    return Model.of(MODELS[label](seed=0)), Model.of(MODELS[label](seed=5))


def match(
    source: Model, anchor: Model, frame: tuple[str, ...] = (), axes: str = EVERYTHING, **options: object
) -> Alignment:
    return match_models(source, anchor, axes=axes, frame=frame, threads=1, **options)  # type: ignore[arg-type]


@cache
def little() -> tuple[Model, Model]:
    """Of one layer: where it is only asked which starts there are."""
    one, other = (of("BertForMaskedLM", "BertConfig", TEXT, num_hidden_layers=1)(seed) for seed in (0, 5))
    return Model.of(one), Model.of(other)


@cache
def started(starts: int) -> Alignment:
    return match(*little(), starts=starts)


def curves(alignment: Alignment) -> dict[str, list[float]]:
    found: dict[str, list[float]] = dict(alignment.provenance["descents"])
    return found


def in_frame(model: Model, frame: tuple[str, ...]) -> Checkpoint:
    return canonical(model, frame).checkpoint


def falls(found: dict[str, list[float]], rtol: float = 1e-12) -> bool:
    """Whether no curve rises."""
    return all(after <= before + rtol * curve[0] for curve in found.values() for before, after in pairwise(curve))


def same(a: Alignment, b: Alignment) -> bool:
    """Bit for bit."""
    parts = [{(i, key): t for i, g in x.elements.items() for key, t in g.tensors().items()} for x in (a, b)]
    shifts = [dict(x.shifts) for x in (a, b)]
    return all(x.keys() == y.keys() and all(torch.equal(t, y[key]) for key, t in x.items()) for x, y in (parts, shifts))


@some_pairs
def test_no_sweep_raises_the_distance_and_none_ends_above_the_identity(label: str) -> None:
    source, anchor = unrelated(label)
    alignment = match(source, anchor, PAIRS[label], biases=False)
    target = in_frame(anchor, PAIRS[label])
    start, end = squared(in_frame(source, PAIRS[label]), target), squared(alignment(source.checkpoint), target)
    assert {"identity", "embeddings"} <= curves(alignment).keys()
    assert falls(curves(alignment))
    # The curve is the distance: nothing is left out of it, and nothing is counted twice.
    assert curves(alignment)["identity"][0] == pytest.approx(start)
    assert end <= min(curve[-1] for curve in curves(alignment).values()) * (1 + 1e-9)
    assert end < start
    assert prove(source.checkpoint, alignment).exact.equal


@some_pairs
def test_biases_that_may_be_translated_come_on_top(label: str) -> None:
    source, anchor = unrelated(label)
    target = in_frame(anchor, PAIRS[label])
    alignment = match(source, anchor, PAIRS[label], starts=1)
    assert falls(curves(alignment))
    assert squared(alignment(source.checkpoint), target) < squared(in_frame(source, PAIRS[label]), target)
    assert prove(source.checkpoint, alignment).exact.equal


@every_pair
def test_a_model_is_at_home_already(label: str) -> None:
    anchor = unrelated(label)[1]
    alignment = match(anchor, anchor, PAIRS[label])
    assert not alignment.elements
    assert not alignment.shifts
    assert all(step["moved"] == 0 for step in alignment.provenance["steps"])


@pytest.mark.parametrize("label", ["bert-mlm", "torch-relu-post"])
def test_a_fine_tune_is_not_permuted(label: str) -> None:
    """With a little noise the identity is the best permutation: no start may end elsewhere."""
    anchor = unrelated(label)[1]
    source = Model.of(noisy(anchor.checkpoint, 1e-2))
    alignment = match(source, anchor, starts=3)
    assert not {"residual", "h"} & {instance.axis for instance in alignment.elements}


@pytest.mark.parametrize(("starts", "names"), [
    (1, ["identity"]), (2, ["identity", "embeddings"]), (4, ["identity", "embeddings", "random 0", "random 1"]),
])  # fmt: skip
def test_starts(starts: int, names: list[str]) -> None:
    alignment = started(starts)
    assert {name for name in curves(alignment) if "round" not in name} == set(names)
    assert alignment.provenance["options"]["starts"] == starts
    ends = {name: curve[-1] for name, curve in curves(alignment).items() if "round" not in name}
    first = curves(alignment)["identity, round 2"][0]
    assert first <= min(ends.values()) * (1 + 1e-9)  # it went on from the best


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm"])
def test_a_curve_begins_where_its_start_is(label: str) -> None:
    """Of a planted pair the embeddings alone say all of the residual stream; a random element is worse than none."""
    plant = planted(label, axes=frozenset({"residual"}), frame=())
    alignment = plant.match("residual", starts=3)
    found = curves(alignment)
    assert found["identity"][0] == pytest.approx(squared(plant.moved, plant.home.checkpoint))
    assert found["embeddings"][0] < 1e-12 * found["identity"][0]
    assert found["random 0"][0] != found["identity"][0]
    assert plant.left(alignment) == 0  # found by a start whose curve does not fall


def test_no_start_at_all_is_refused() -> None:
    with pytest.raises(OptionError, match="starts 0: at least one"):
        match(*unrelated("bert-mlm"), starts=0)


def test_more_starts_are_never_worse() -> None:
    ends = [min(curve[-1] for curve in curves(started(n)).values()) for n in (1, 3)]
    assert ends[1] <= ends[0] * (1 + SETTLED)


# What a last round may still differ by.
SETTLED = 1e-2


def test_a_seed_gives_one_result_and_another_another() -> None:
    source, anchor = little()
    first = started(3)
    assert same(first, match(source, anchor, starts=3, seed=0))
    assert same(first, match_models(source, anchor, axes=EVERYTHING, starts=3, seed=0, threads=3))
    other = match(source, anchor, starts=3, seed=1)
    assert curves(first)["random 0"][1:] != curves(other)["random 0"][1:]


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "torch-relu-post"])
def test_heads_alone(label: str) -> None:
    """Rotations inside heads stay as they are: only whole heads change places."""
    plant = planted(label, axes=frozenset({"h"}), frame=())
    alignment = plant.match("heads")
    assert {instance.axis for instance in alignment.elements} == {"h"}
    assert plant.left(alignment) == 0  # entries are moved about only
    assert prove(plant.moved, alignment).exact.equal


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "torch-relu-post"])
def test_heads_with_what_is_inside_of_them(label: str) -> None:
    """Heads that were rotated, rescaled and exchanged: by index no head has its match."""
    plant = planted(label, axes=frozenset({"h", "qk", "v"}), frame=())
    both, inside = plant.match("heads,attention"), plant.match("attention")
    assert {instance.axis for instance in both.elements} == {"h", "qk", "v"}
    assert plant.left(both) < 1e-10 * plant.left(inside)


@pytest.mark.parametrize("axes", ["heads", "heads,v"])
def test_key_biases_count_where_nothing_translates_them(axes: str) -> None:
    """All but the key biases would have heads exchanged; these are large, and no query and key is matched."""
    anchor = MODELS["bert-mlm"](seed=0)
    name = "bert.encoder.layer.0.attention.self.key.bias"
    large = anchor[name] * 1e3
    plant = random_alignment(Model.of(anchor).spec, 3, axes=("h",))(anchor)
    pair = [c.replace(tensors=dict(c) | {name: large}) for c in (plant, anchor)]
    alignment = match(*map(Model.of, pair), axes=axes)
    assert squared(alignment(pair[0]), pair[1]) <= squared(*pair)
    assert Instance("h", (0,)) not in alignment.elements
    assert Instance("h", (1,)) in alignment.elements
    with_keys = match(*map(Model.of, pair), axes="heads,attention")
    assert Instance("h", (0,)) in with_keys.elements  # then they are the anchor's, whatever they were


def test_heads_with_values_only() -> None:
    plant = planted("bert-mlm", axes=frozenset({"h", "v"}), frame=())
    alignment = plant.match("heads,v")
    assert plant.left(alignment) < 1e-20 * squared(plant.moved, plant.home.checkpoint)


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "vit", "deberta-mlm"])
def test_the_residual_stream_alone(label: str) -> None:
    """Tied embeddings and maps of the stream to itself (residual residual*) included."""
    plant = planted(label, axes=frozenset({"residual"}), frame=())
    alignment = plant.match("residual")
    assert list(alignment.elements) == [Instance("residual")]
    assert plant.left(alignment) == 0


@pytest.mark.parametrize("label", ["gpt2-lm", "vit-classification"])
def test_the_residual_stream_alone_rotated(label: str) -> None:
    plant = planted(label, axes=frozenset({"residual"}))
    alignment = plant.match("residual")
    assert list(alignment.elements) == [Instance("residual")]
    assert plant.left(alignment) < 1e-24 * squared(plant.moved, plant.home.checkpoint)


def test_the_frame_is_chosen_where_a_pre_norm_stream_is_matched() -> None:
    source, anchor = unrelated("gpt2-lm")
    with_stream = match_models(source, anchor, axes="residual", threads=1)
    without = match_models(source, anchor, axes="attention,heads", threads=1)
    post = match_models(*unrelated("bert-mlm"), axes="residual", threads=1)
    assert (with_stream.frame, without.frame, post.frame) == (ROTATABLE, (), ())


def test_a_pooler_alone() -> None:
    plant = planted("bert-pretraining", axes=frozenset({"pool"}))
    alignment = plant.match("pooler")
    assert list(alignment.elements) == [Instance("pool")]
    assert plant.left(alignment) == 0


def test_watch_is_told_of_every_sweep() -> None:
    seen: list[tuple[str, float]] = []
    alignment = match(*little(), starts=3, watch=lambda start, value: seen.append((start, value)))
    told = [(name.partition(",")[0], value) for name, curve in curves(alignment).items() for value in curve[1:]]
    assert sorted(seen) == sorted(told)
    assert {start for start, _ in seen} == {"identity", "embeddings", "random 0"}


def test_watch_is_not_called_where_nothing_meets() -> None:
    seen: list[float] = []
    alignment = match(*unrelated("bert-mlm"), axes="attention,ffn", watch=lambda _, value: seen.append(value))
    assert not seen
    assert "descents" not in alignment.provenance
    assert "starts" not in alignment.provenance["options"]


@pytest.mark.parametrize(("label", "frame"), [("bert-mlm", ()), ("gpt2-lm", ROTATABLE)])
def test_some_layers_and_the_stream(label: str, frame: tuple[str, ...]) -> None:
    source, anchor = unrelated(label)
    alignment = match(source, anchor, frame, layers=1, starts=1)
    assert {instance.index for instance in alignment.elements} == {(), (1,)}
    assert falls(curves(alignment))
    assert prove(source.checkpoint, alignment).exact.equal
    layer = {name: spec.index for name, spec in source.spec.tensors.items()}
    assert all(layer[name].get("l") == 1 for name in alignment.shifts)


def test_some_layers_planted() -> None:
    """What is moved in the other layer stays moved."""
    plant = planted("bert-mlm", frame=())
    alignment = plant.match(layers=0)
    everything = plant.match()
    kept = {i: g for i, g in everything.elements.items() if i.index != (1,)}
    assert set(alignment.elements) == kept.keys()
    assert 0 < plant.left(alignment) < squared(plant.moved, plant.home.checkpoint)


@pytest.mark.parametrize(("one", "other"), [
    ("bert-mlm-untied", "bert-token"),
    ("bert", "bert-pretraining"),
    ("gpt2-lm", "gpt2-sequence"),
    pytest.param("bert-sequence", "bert", marks=slow),
    pytest.param("gpt2-sequence", "gpt2-token", marks=slow),
    pytest.param("electra-discriminator", "electra-generator-untied", marks=slow),
    pytest.param("distilbert-sequence", "distilbert-mlm", marks=slow),
])  # fmt: skip
def test_a_head_that_one_of_them_has_not(one: str, other: str) -> None:
    """Only what both have counts; the head moves along, and the model of each class computes what it did."""
    frame = ROTATABLE if one.startswith("gpt2") else ()
    source, anchor = Model.of(MODELS[one](seed=3)), Model.of(MODELS[other](seed=4))
    alignment = match(source, anchor, frame, starts=1)
    assert falls(curves(alignment))
    assert prove(source.checkpoint, alignment).exact.equal
    own = {i.axis for i in alignment.elements} - {i.axis for i in anchor.spec.movable}
    assert not own  # nothing says where they belong


def test_planted_under_another_head() -> None:
    plant = planted("bert-pretraining")
    body = plant.case.checkpoint.replace(
        tensors={n: t for n, t in plant.case.checkpoint.items() if n.startswith("bert.")},
        config=dict(plant.case.checkpoint.config) | {"architectures": ["BertModel"]},
    )
    alignment = match_models(Model.of(plant.moved), Model.of(body), axes=EVERYTHING, threads=1)
    kept = alignment(plant.moved)
    assert squared(kept, body) < 1e-20 * squared(plant.moved, body)
    assert prove(plant.moved, alignment).exact.equal


def test_tied_models_stay_tied() -> None:
    plant = planted("bert-mlm")
    back = plant.match()(plant.moved)
    assert "cls.predictions.decoder.weight" not in back
    assert back.config["tie_word_embeddings"]


def test_a_tied_model_is_untied_where_its_stream_is_rotated() -> None:
    plant = planted("gpt2-lm")
    source = Model.of(MODELS["gpt2-lm"](seed=7))
    back = match(source, Model.of(plant.case.checkpoint), ROTATABLE, axes="residual")(source.checkpoint)
    assert back.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in back


def sweeper(label: str, pool: ThreadPoolExecutor) -> tuple[Sweeper, Workspace]:
    problem = problem_of(*unrelated(label), EVERYTHING, None, scaling=True, frame=PAIRS[label])
    spec = problem.spec
    names = [name for name in spec.tensors if spec.shares(name, problem.anchor.spec)]
    theirs, ours = ({name: model.read(name) for name in names} for model in (problem.anchor, problem.source))
    return Sweeper(spec, theirs.__getitem__, list(problem.groups), problem.groups, pool, ()), Workspace(spec, ours)


@some_pairs
def test_what_a_sweep_leaves_out_would_have_gained_nothing(label: str) -> None:
    """Every sweep gains what one does that knows nothing of those before, and solves every block."""
    with ThreadPoolExecutor(2) as pool:
        sweeps, moved = sweeper(label, pool)
        size = sweeps.distance(moved)
        for number in range(6):
            afresh = Workspace(moved.spec, dict(moved.tensors))
            gain = sweeps.sweep(afresh, random.Random(number))
            assert sweeps.sweep(moved, random.Random(number)) == pytest.approx(gain, abs=1e-12 * size)
            assert sweeps.distance(moved) == pytest.approx(sweeps.distance(afresh), abs=1e-12 * size)


def test_what_nothing_has_moved_since_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        sweeps, moved = sweeper("bert-mlm", pool)
        while sweeps.sweep(moved, random.Random(0)) > 0:
            pass
        calls = Counter[str]()
        for name in ("weight_moments", "match_outer"):
            monkeypatch.setattr(f"symfuse.matching.descent.{name}", lambda *_, name=name: calls.update([name]))
        assert sweeps.sweep(moved, random.Random(0)) == 0
        assert not calls


# Toys: a space that one tensor maps to itself, of which moments say the truth to first order only.


def toy(size: int) -> tuple[Spec, Instance]:
    axes = {"n": Axis(size, Permutation()), "k": Axis(3)}
    return Spec("toy", axes, expand({"square": "n n*", "reads": "k n*"}, axes)), Instance("n")


def descended(
    spec: Spec,
    anchor: dict[str, torch.Tensor],
    source: dict[str, torch.Tensor],
    groups: dict[Instance, Group],
    **options: int,
) -> list[Descent]:
    with ThreadPoolExecutor(1) as pool:
        return descend(
            spec, anchor.__getitem__, source.__getitem__, list(groups), groups, pool, names=list(anchor), **options
        )


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[name] - b[name]).square().sum()) for name in a)


@pytest.mark.parametrize("seed", range(6))
def test_an_axis_twice_in_one_tensor(seed: int) -> None:
    """The curve is the true distance, after every sweep, also where the first-order step would raise it."""
    spec, instance = toy(9)
    rng = torch.Generator().manual_seed(seed)
    draw = [
        {"square": torch.randn(9, 9, generator=rng).double(), "reads": 0.3 * torch.randn(3, 9, generator=rng).double()}
        for _ in range(2)
    ]
    found = descended(spec, draw[0], draw[1], {instance: Permutation()}, starts=4, seed=seed)
    assert [d.curve[-1] for d in found] == sorted(d.curve[-1] for d in found)
    for one in found:
        moved = {name: one.alignment.move(name, t) for name, t in draw[1].items()}
        assert one.curve[-1] == pytest.approx(apart(draw[0], moved))
        assert falls({one.start: list(one.curve)})
        assert one.unaligned == pytest.approx(apart(*draw))
    assert found[0].curve[-1] <= apart(*draw)
    assert draw[1]["square"].shape == (9, 9)


def test_an_axis_twice_is_solved_again_after_its_own_step() -> None:
    """Its moments are linear to first order only: one step is not the end of it."""
    spec, instance = toy(9)
    rng = torch.Generator().manual_seed(2)
    anchor, source = (
        {"square": torch.randn(9, 9, generator=rng).double(), "reads": 0.3 * torch.randn(3, 9, generator=rng).double()}
        for _ in range(2)
    )
    with ThreadPoolExecutor(1) as pool:
        sweeps = Sweeper(spec, anchor.__getitem__, [instance], {instance: Permutation()}, pool, ())
        moved = Workspace(spec, source)
        gains = [sweeps.sweep(moved, random.Random(0)) for _ in range(3)]
    assert gains[0] > gains[1] > gains[2] == 0


def test_an_axis_twice_is_found_from_what_reads_it() -> None:
    spec, instance = toy(9)
    rng = torch.Generator().manual_seed(0)
    anchor = {"square": torch.randn(9, 9, generator=rng).double(), "reads": torch.randn(3, 9, generator=rng).double()}
    plant = random_alignment(spec, 1)
    source = {name: plant.move(name, t) for name, t in anchor.items()}
    found = descended(spec, anchor, source, {instance: Permutation()})
    assert found[0].curve[-1] == 0
    element = found[0].alignment.elements[instance]
    assert isinstance(element, Monomial)
    assert torch.equal(element.index, plant.inverse().elements[instance].tensors()["index"])


def test_descents_leave_their_inputs_as_they_are() -> None:
    spec, instance = toy(5)
    anchor = {"square": torch.eye(5).double(), "reads": torch.arange(15.0).reshape(3, 5).double()}
    source = {name: random_alignment(spec, 2).move(name, t) for name, t in anchor.items()}
    before = {name: t.clone() for name, t in source.items()}
    descended(spec, anchor, source, {instance: Permutation()}, starts=3)
    assert all(torch.equal(t, before[name]) for name, t in source.items())


def test_models_are_read_once_whatever_the_number_of_starts() -> None:
    spec, instance = toy(5)
    tensors = {"square": torch.eye(5).double(), "reads": torch.arange(15.0).reshape(3, 5).double()}
    reads = Counter[str]()

    def read(name: str) -> torch.Tensor:
        reads[name] += 1
        return tensors[name]

    with ThreadPoolExecutor(1) as pool:
        found = descend(spec, read, read, [instance], {instance: Permutation()}, pool, names=list(tensors), starts=4)
    assert len(found) == 4
    assert reads == Counter({"square": 2, "reads": 2})


def test_unknown_axes_and_threads_are_refused() -> None:
    source, anchor = unrelated("bert-mlm")
    with pytest.raises(OptionError, match="did you mean 'residual'"):
        match_models(source, anchor, axes="residuals")
    with pytest.raises(OptionError, match="threads 0"):
        match_models(source, anchor, axes="residual", threads=0)
    with pytest.raises(OptionError, match="no rewrite is called 'fold'"):
        match_models(source, anchor, axes="residual", frame=("fold",))


def test_float32_models_keep_their_dtype() -> None:
    source, anchor = (Model.of(of("BertForMaskedLM", "BertConfig", TEXT)(seed).to(torch.float32)) for seed in (0, 1))
    alignment = match(source, anchor)
    back = alignment(source.checkpoint)
    assert {back.info(name).dtype for name in back} == {torch.float32}
    assert falls(curves(alignment), 1e-6)
    assert case("bert-mlm").spec.axes == alignment.spec.axes


def test_classifiers_that_read_different_spaces_are_not_one_tensor() -> None:
    token, sequence = (Model.of(MODELS[label]()).spec for label in ("bert-token", "bert-sequence"))
    assert token.tensors["classifier.weight"].layout.shape(token.sizes) == sequence.tensors[
        "classifier.weight"
    ].layout.shape(sequence.sizes)
    assert not token.shares("classifier.weight", sequence)
    assert token.shares("embeddings.word_embeddings.weight", sequence)

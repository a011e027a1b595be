"""Parameters of elements, on the real classes: whatever their values, the moved model computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path as Folder

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS, real
from matching.learned.learning_cases import groups_of, model, task
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.evaluation import open_space
from symfuse.groups import Coupling, Group, Invertible, Monomial, Permutation, SignedMonomial
from symfuse.io import Checkpoint
from symfuse.matching.learned.latents import COLD, SCORES, TEPID, WARM, Latents, _soft, reorders
from symfuse.matching.learned.path import Path
from symfuse.matching.learned.settings import Permutations
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance
from symfuse.verification import compare, random_inputs, run

# label → whether it is brought into the frame in which the residual stream can be rotated.
FAMILIES = {
    "bert-sequence": False,
    "gpt2-lm": True,
    "vit-classification": True,
    "llama-lm": False,
    "t5-lm": False,
    "torch-relu-post": False,
    "qwen3-lm": False,
}
FAST = {"bert-sequence", "gpt2-lm"}
QUICK = {("bert", "straight-through"), ("llama", "straight-through")}
every_family = pytest.mark.parametrize(
    "label", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in FAMILIES]
)


@cache
def case(label: str) -> Model:
    """In its frame."""
    found = Model.of(MODELS[label]())
    return canonical(found, rotatable(found.spec)) if FAMILIES[label] else found


def latents(
    of: Model, permutations: Permutations = "straight-through", dtype: torch.dtype = torch.float64, seed: int = 3
) -> Latents:
    """Of the largest groups of every axis, with random values."""
    found = Latents.of(of.spec, groups_of(of.spec), permutations, dtype, "cpu")
    rng = torch.Generator().manual_seed(seed)
    for name, leaf in sorted(found.leaves.items()):
        size = 1.0 if SCORES in name else 0.3
        leaf.data.copy_(size * torch.randn(leaf.shape, generator=rng, dtype=torch.float64))
    return found


def alignment(found: Latents) -> Alignment:
    shifts, gauges = ({n: t.detach().double() for n, t in of.items()} for of in (found.shifts(), found.gauges))
    return Alignment(found.spec, found.elements(), shifts, gauges=gauges)


def error(one: Checkpoint, other: Checkpoint, by: Alignment | None = None) -> float:
    """The largest difference of the outputs of the real class, over the largest output; what lives in a moved space is
    moved along."""
    found = api.verify(one, other, by, tolerance=1.0)
    return found.worst


@every_family
@pytest.mark.parametrize("permutations", ["kept", "straight-through"])
def test_its_elements_keep_the_function(label: str, permutations: Permutations) -> None:
    of = case(label)
    found = latents(of, permutations)
    g = alignment(found)
    assert g.elements.keys() == {i for stack in found.stacks for i in stack.instances}
    assert not any(element.is_identity() for element in g.elements.values() if element.size > 3)
    for instance, element in g.elements.items():
        group = of.spec.axes[instance.axis].group
        assert group is not None
        assert group.contains(element, 1e-9)
        reordered = isinstance(element, Monomial) and not torch.equal(
            element.index, torch.arange(element.size).expand(element.index.shape)
        )
        if element.size > 3:  # of few units a random order may be the one that they have
            assert reordered == (permutations != "kept" and reorders(group, element.size))
    moved = g.on(of)
    assert error(of.checkpoint, moved, g) < 1e-10
    plain = replace(g, elements={}, shifts={}, gauges={}).on(of)
    assert any(not torch.equal(moved[name], plain[name]) for name in plain)


@every_family
def test_after_another_alignment_too(label: str) -> None:
    """Composed by the wreath law: the elements of heads that are reordered before are re-indexed."""
    of = case(label)
    start = random_alignment(of.spec, 5)
    total = alignment(latents(of)) @ start
    assert error(of.checkpoint, total.on(of), total) < 1e-10
    one = alignment(latents(of)).on(Model(start.on(of), of.spec))
    other = total.on(of)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9)


class Outside(Group):
    """Any matrix, for heads whose group is the invertible maps: the dual does not undo it."""

    def near(self, at: Mapping[str, Tensor]) -> object:
        g = Invertible().near(at)
        return replace(g, inverse_matrix=g.matrix)

    def tangent(self, n: int) -> dict[str, tuple[int, ...]]:
        return Invertible().tangent(n)

    random = identity = contains = best = None  # type: ignore[assignment]


Outside.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("axis", "group"),
    [("qk", Outside()), ("v", Outside()), ("ffn", SignedMonomial()), ("residual", SignedMonomial())],
    ids=["qk", "v", "ffn", "residual"],
)
def test_what_is_from_outside_of_the_group_changes_it(axis: str, group: Group) -> None:
    """The comparison above can fail."""
    of = case("bert-sequence")
    instances = [i for i in of.spec.movable if i.axis == axis]
    found = Latents.of(of.spec, dict.fromkeys(instances, group), "kept", torch.float64, "cpu")
    for name, leaf in found.leaves.items():
        if "translation" not in name:
            leaf.data.copy_(0.3 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1)))
    g = Alignment(of.spec, found.elements())
    changed = {of.spec.file_name(n): g.move(n, of.read(n)) for n in of.spec.tensors}
    broken = of.checkpoint.replace(tensors={n: changed.get(n, of.checkpoint[n]) for n in of.checkpoint})
    assert error(of.checkpoint, broken) > 1e-3


def test_they_begin_as_the_identity_exactly() -> None:
    for label in ("bert-sequence", "gpt2-lm", "llama-lm"):
        of = case(label)
        for permutations in ("kept", "straight-through", "annealed"):
            found = Latents.of(of.spec, groups_of(of.spec), permutations, torch.float32, "cpu")
            assert all(element.is_identity() for element in found.elements().values())
            assert all(not t.any() for t in found.shifts().values())
            assert all(leaf.requires_grad and leaf.dtype == torch.float32 for leaf in found.leaves.values())


def test_which_parameters_there_are() -> None:
    of = case("bert-sequence")
    kept = Latents.of(of.spec, groups_of(of.spec), "kept", torch.float32, "cpu")
    assert {i.axis for stack in kept.stacks for i in stack.instances} == {"qk", "v"}
    assert {name.partition(".")[2] or name for name in kept.leaves} >= {"log"}
    assert sum(name.startswith("translation") for name in kept.leaves) == 2  # of the biases of values, in both layers
    hard = Latents.of(of.spec, groups_of(of.spec), "straight-through", torch.float32, "cpu")
    assert {i.axis for stack in hard.stacks for i in stack.instances} == {"qk", "v", "ffn", "h", "residual", "pool"}
    scores = [stack.leaves[SCORES] for stack in hard.stacks if SCORES in stack.leaves]
    assert sorted(tuple(s.shape) for s in scores) == [(1, 20, 20), (1, 20, 20), (2, 4, 4), (2, 29, 29)]
    assert {name for name in kept.leaves if name.startswith("gauge")} == {f"gauge {name}" for name in of.spec.gauges}
    ffn = {Instance("ffn", (1,)): Permutation()}
    some = Latents.of(of.spec, ffn, "kept", torch.float32, "cpu").leaves
    assert list(some) == ["gauge encoder.layer.1.intermediate.dense.weight"]  # what the neurons read
    pool = {Instance("pool", ()): Permutation()}
    assert Latents.of(of.spec, pool, "kept", torch.float32, "cpu").stacks == ()
    only = Latents.of(of.spec, {Instance("qk", (0,)): Invertible()}, "kept", torch.float32, "cpu")
    queries = "encoder.layer.0.attention.self."
    assert set(only.leaves) == {"0.log", f"gauge {queries}query.weight", f"gauge {queries}key.weight"}  # no values


def test_which_groups_reorder() -> None:
    from symfuse.groups import GROUPS

    assert {name for name, group in GROUPS.items() if reorders(group, group.size or 5)} == {
        "permutation", "signed", "monomial", "signed-monomial"
    }  # fmt: skip


@pytest.mark.parametrize("label", ["bert", "gpt2"])
def test_translations_keep_the_function(label: str) -> None:
    of = Model.of(model(label))
    found = latents(of, "kept")
    assert len(found.translations) == 2
    shifts = {n: t.detach() for n, t in found.shifts().items()}
    assert all(t.any() for t in shifts.values())
    assert error(of.checkpoint, Alignment(of.spec, {}, shifts)(of.checkpoint)) < 1e-10
    alone = {of.spec.file_name(n): of.read(n) + t for n, t in shifts.items()}
    assert alone.keys() <= set(of.checkpoint)
    broken = of.checkpoint.replace(tensors={**of.checkpoint, **alone})  # without the bias that takes them back
    assert error(of.checkpoint, broken) > 1e-3


def test_gauges_keep_the_function() -> None:
    """Of post-norm models: along 1/γ what reads a norm with gains γ reads a constant, which its bias takes back."""
    of = Model.of(model("bert"))
    found = latents(of, "kept")
    gauges = {n: v.detach() for n, v in found.gauges.items()}
    assert set(gauges) == set(of.spec.gauges)
    assert len(gauges) > 2
    moved = Alignment(of.spec, {}, gauges=gauges)(of.checkpoint)
    assert error(of.checkpoint, moved) < 1e-10
    reader = next(iter(gauges))
    change = moved[of.spec.file_name(reader)] - of.read(reader)
    along = 1 / of.read(of.spec.gauges[reader])
    torch.testing.assert_close(change, torch.outer(gauges[reader], along / along.norm()), rtol=1e-9, atol=1e-12)
    alone = {of.spec.file_name(n): moved[of.spec.file_name(n)] for n in gauges}
    broken = of.checkpoint.replace(tensors={**of.checkpoint, **alone})  # without the biases that take them back
    assert error(of.checkpoint, broken) > 1e-3


def test_what_has_no_biases_is_not_translated() -> None:
    assert latents(Model.of(model("llama"))).translations == {}


def opened(
    of: Model, sources: list[Checkpoint], folder: Folder, label: str, dtype: torch.dtype, *moved: Latents | None
) -> Path:
    space = open_space(sources, [s.name for s in sources], task(label), folder, dtype=dtype)
    return Path(space, [Model(s, of.spec) for s in sources], moved, "cpu")


@pytest.mark.parametrize(
    ("label", "permutations"),
    [
        pytest.param(label, how, marks=[] if (label, how) in QUICK else [pytest.mark.slow])
        for label in ("bert", "gpt2", "llama", "relu")
        for how in ("kept", "straight-through")
    ],
)
def test_the_path_is_that_of_the_moved_models(label: str, permutations: Permutations, tmp_path: Folder) -> None:
    """At the corners each moved checkpoint, between them the straight line, by the weights of the merge and by the
    outputs of the real class; float64, but for what its norms cast to float32."""
    of = Model.of(model(label))
    sources = [of.checkpoint, model(label, 1)]
    moves = [latents(of, permutations, seed=seed) for seed in (3, 4)]
    path = opened(of, sources, tmp_path, label, torch.float64, *moves)
    ends = [alignment(one)(source) for one, source in zip(moves, sources, strict=True)]
    data = task(label)
    batch = data.batches[0]
    with torch.no_grad():
        points = path.aligned()
        for end, found in zip(ends, points, strict=True):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, end[of.spec.file_name(name)], rtol=1e-10, atol=1e-10)
        for weights, point in [
            ((1.0, 0.0), ends[0]),
            ((0.0, 1.0), ends[1]),
            ((0.3, 0.7), api.merge(ends, method="linear", weights=[0.3, 0.7])),
        ]:
            loss = path.at(points, weights, data.totals, batch)
            expected = data.totals(real(point), batch)
            torch.testing.assert_close(loss.loss, expected.loss, rtol=2e-5 if label == "llama" else 1e-10, atol=0.0)
            assert loss.metrics == expected.metrics
    assert ends[0].keys() == ends[1].keys()


def test_a_model_that_stays(tmp_path: Folder) -> None:
    of = Model.of(model("bert"))
    path = opened(of, [of.checkpoint, model("bert", 1)], tmp_path, "bert", torch.float64, latents(of), None)
    stays = path.aligned()[1]
    for name, tensor in stays.items():
        assert torch.equal(tensor, model("bert", 1)[of.spec.file_name(name)])
    assert all(not tensor.requires_grad for tensor in stays.values())
    assert any(tensor.requires_grad for tensor in path.aligned()[0].values())


def test_the_gradient_of_the_loss_is_that_of_finite_differences(tmp_path: Folder) -> None:
    """In some latents of each kind but scores, which have none of their own; float64."""
    of = Model.of(model("bert"))
    moves = [latents(of, "kept", seed=3), latents(of, "kept", seed=4)]
    path = opened(of, [of.checkpoint, model("bert", 1)], tmp_path, "bert", torch.float64, *moves)
    data = task("bert")

    def loss() -> Tensor:
        return path.at(path.aligned(), (0.4, 0.6), data.totals, data.batches[0]).loss

    leaves = [(f"{i} {name}", leaf) for i, one in enumerate(moves) for name, leaf in one.leaves.items()]
    gradients = torch.autograd.grad(loss(), [leaf for _, leaf in leaves])
    step, looked_at = 1e-6, 0
    for (name, leaf), gradient in zip(leaves, gradients, strict=True):
        at = int(gradient.abs().argmax())
        assert gradient.flatten()[at] != 0, name
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                leaf.view(-1)[at] += sign * step
                ends.append(loss().item())
                leaf.view(-1)[at] -= sign * step
        difference = torch.tensor((ends[0] - ends[1]) / (2 * step), dtype=torch.float64)
        torch.testing.assert_close(gradient.flatten()[at], difference, rtol=1e-5, atol=1e-7)
        looked_at += 1
    assert looked_at == 2 * len(moves[0].leaves)


def test_scores_get_the_gradient_of_the_matrix(tmp_path: Folder) -> None:
    """Of a loss in which the neurons of one layer are moved by a dense matrix in the permutation's place."""
    of = Model.of(model("bert"))
    instance = Instance("ffn", (0,))
    one = Latents.of(of.spec, {instance: Permutation()}, "straight-through", torch.float64, "cpu")
    path = opened(of, [of.checkpoint, model("bert", 1)], tmp_path, "bert", torch.float64, one, None)
    data = task("bert")
    path.at(path.aligned(), (0.4, 0.6), data.totals, data.batches[0]).loss.backward()
    found = one.leaves[f"0.{SCORES}"].grad
    assert found is not None
    matrix = torch.eye(29, dtype=torch.float64).requires_grad_()
    moved, other = path.aligned()
    dense = {name: tensor.detach() for name, tensor in moved.items()}
    layer = "bert.encoder.layer.0." if any(n.startswith("bert.") for n in dense) else "encoder.layer.0."
    up, down = f"{layer}intermediate.dense.", f"{layer}output.dense.weight"
    dense |= {f"{up}weight": matrix @ dense[f"{up}weight"], f"{up}bias": matrix @ dense[f"{up}bias"]}
    dense[down] = dense[down] @ matrix.T
    path.at([dense, other], (0.4, 0.6), data.totals, data.batches[0]).loss.backward()
    assert matrix.grad is not None
    torch.testing.assert_close(found[0], matrix.grad, rtol=1e-10, atol=1e-12)
    assert matrix.grad.any()


def test_soft_elements_are_couplings() -> None:
    of = case("bert-sequence")
    groups = {i: Permutation() for i in groups_of(of.spec) if i.axis == "ffn"}
    found = Latents.of(of.spec, groups, "soft", torch.float64, "cpu")
    for leaf in found.leaves.values():
        leaf.data += 0.3 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(2), dtype=leaf.dtype)
    elements = found.elements()
    assert all(isinstance(element, Coupling) for element in elements.values())
    for element in elements.values():
        torch.testing.assert_close(element.to_dense().sum(-1), torch.ones(29, dtype=torch.float64))
    changed = Alignment(of.spec, elements, variants=("transport",))(of.checkpoint)
    assert error(of.checkpoint, changed) > 1e-6


def test_one_module_runs_for_all(tmp_path: Folder) -> None:
    """Outputs of the module that the path swaps weights into are those of the class itself: nothing is left behind."""
    of = Model.of(model("gpt2"))
    path = opened(of, [of.checkpoint, model("gpt2", 1)], tmp_path, "gpt2", torch.float64, latents(of), None)
    inputs = random_inputs(path.module, of.checkpoint.config)
    before = run(path.module, inputs)
    data = task("gpt2")
    path.at(path.aligned(), (0.5, 0.5), data.totals, data.batches[0]).loss.backward()
    assert compare(before, run(path.module, inputs)) == dict.fromkeys(before, 0.0)
    assert compare(before, run(real(model("gpt2", 1)), inputs)) == dict.fromkeys(before, 0.0)
    assert all(not p.requires_grad and p.grad is None for p in path.module.parameters())


@pytest.mark.parametrize("n", [2, 11, 30])
def test_soft_permutations_start_as_soft_as_they_are_said_to_be(n: int) -> None:
    """A unit weighs so many times more than all others together, whatever their number."""
    for odds in (WARM, TEPID, COLD):
        matrix = _soft(torch.eye(n, dtype=torch.float64), odds).scores
        own = matrix.diagonal()
        torch.testing.assert_close(own / (1 - own), torch.full_like(own, odds + 1 / (n - 1)), rtol=1e-6, atol=0.0)

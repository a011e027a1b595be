"""From activations: a model that was moved by random elements of all its axes at once is found again in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS, TEXT, case, of, real
from recovery.planted import EVERYTHING, Planted, kept, planted, size, squared
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import OptionError
from symfuse.groups import GROUPS, Conformal, Element, Group, Monomial, PositiveMonomial
from symfuse.io import Checkpoint
from symfuse.matching import match_by_activations
from symfuse.matching.activations import match_activations
from symfuse.model import Model
from symfuse.spec import Instance
from symfuse.stats.activations import record
from symfuse.stats.taps import taps
from symfuse.verification import prove

LABELS = [
    "bert-sequence", "bert", "deberta-mlm", "gpt2-lm", "gpt2", "vit", "vit-classification", "torch-relu-post",
]  # fmt: skip
# What a torch encoder reads is in its stream: on the same inputs only the other axes do the same.
INSIDE = frozenset({"h", "qk", "v", "ffn"})


def of_all(label: str, noise: float = 0.0) -> Planted:
    return planted(label, noise, axes=INSIDE if label.startswith("torch") else None)


@cache
def batches(label: str) -> tuple[Mapping[str, Tensor], ...]:
    """More positions than there are units, some of them padding; token types and all else at random."""
    found = []
    like = case(label).inputs
    for seed in range(6):
        rng = torch.Generator().manual_seed(seed)
        if "input_ids" in like:
            ids = torch.randint(5, min(61, case(label).spec.sizes.get("vocab", 19)), (6, 10), generator=rng)
            mask = torch.ones_like(ids)
            mask[2, 6:] = 0
            found.append({"input_ids": ids, "attention_mask": mask})
        else:
            ((name, one),) = like.items()
            found.append({name: torch.randn(6, *one.shape[1:], generator=rng, dtype=one.dtype)})
    return tuple(found)


def matched(plant: Planted, label: str, axes: set[str] | None = None, **options: Any) -> dict[Instance, Element]:
    spec = plant.home.spec
    groups = {i: g for i in spec.movable if (g := spec.axes[i.axis].group) and (axes is None or i.axis in axes)}
    modules = real(plant.home.checkpoint), real(plant.moved)
    return match_activations(spec, *modules, batches(label), list(groups), groups, **options)


def undone(plant: Planted, elements: Mapping[Instance, Element]) -> Alignment:
    return Alignment(plant.home.spec, elements)


def scales(alignment: Alignment) -> Tensor:
    found = [g.tensors()["scale"].flatten() for g in alignment.elements.values() if "scale" in g.tensors()]
    return torch.cat(found)


def unbiased(plant: Planted, alignment: Alignment) -> float:
    """The squared distance over all but what translations of biases change."""
    back = alignment.on(Model(plant.moved, plant.home.spec))
    changed = {plant.home.spec.file_name(n) for n in random_alignment(plant.home.spec, 3).shifts}
    changed |= {plant.home.spec.file_name(rule.into) for rule in plant.home.spec.shifts if rule.into}
    names = [name for name in back if name not in changed]
    return sum(float((back[name] - plant.home.checkpoint[name]).square().sum()) for name in names)


@pytest.mark.parametrize("label", LABELS)
def test_all_axes_at_once(label: str) -> None:
    plant = of_all(label)
    elements = matched(plant, label, None if plant.axes is None else set(plant.axes))
    alignment = undone(plant, elements)
    assert {i.axis for i in elements} == (plant.axes or {i.axis for i in plant.home.spec.movable})
    assert unbiased(plant, Alignment(plant.home.spec, {})) > 0.1 * size(plant.home.checkpoint)
    assert unbiased(plant, alignment) < 1e-16 * size(plant.home.checkpoint)


@pytest.mark.parametrize(("label", "axis"), [("sceptr", "ffn[1]"), ("distilbert-sequence", "pre")])
def test_units_that_never_fire_are_not_told_apart(label: str, axis: str) -> None:
    """All others are found, with their scales; those that do not fire are left to each other."""
    plant = planted(label)
    instance = Instance.parse(axis)
    found = matched(plant, label)[instance].tensors()
    wanted = random_alignment(plant.home.spec, 3).inverse().elements[instance].tensors()
    spec, *modules = plant.home.spec, real(plant.home.checkpoint), real(plant.moved)
    ((_, heard),) = record(spec, *modules, batches(label), taps(spec, modules[0], [instance])[instance]).items()
    fires = heard.xx > 1e-12
    assert 0 < int((~fires).sum()) < 6
    assert torch.equal(found["index"][fires], wanted["index"][fires])
    torch.testing.assert_close(found["scale"][fires], wanted["scale"][fires])
    assert torch.equal(found["scale"][~fires], torch.ones(int((~fires).sum()), dtype=torch.float64))


@pytest.mark.parametrize("kind", ["pearson", "covariance"])
@pytest.mark.parametrize("residual", ["first", "last", "all"])
def test_every_kind_and_place_finds_the_stream(kind: str, residual: str) -> None:
    plant = planted("bert-mlm", axes=frozenset({"residual", "ffn"}))
    elements = matched(plant, "bert-mlm", {"residual", "ffn"}, kind=kind, residual=residual)
    assert unbiased(plant, undone(plant, elements)) == 0


@pytest.mark.parametrize(
    "axes", [{"h"}, {"h", "v"}, {"h", "qk"}, {"qk", "v"}, {"v"}, {"qk"}], ids=lambda a: "+".join(sorted(a))
)
@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "torch-relu-post"])
def test_parts_of_attention(label: str, axes: set[str]) -> None:
    plant = planted(label, axes=frozenset(axes), frame=())
    elements = matched(plant, label, axes)
    assert {i.axis for i in elements} == axes
    assert unbiased(plant, undone(plant, elements)) < 1e-18 * size(plant.home.checkpoint)


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm"])
def test_a_model_is_at_home_already(label: str) -> None:
    plant = planted(label)
    spec, module = plant.home.spec, real(plant.home.checkpoint)
    groups = {i: g for i in spec.movable if (g := spec.axes[i.axis].group)}
    elements = match_activations(spec, module, module, batches(label), list(groups), groups)
    same = undone(plant, elements).on(plant.home)
    assert squared(same, plant.home.checkpoint) < 1e-18 * size(plant.home.checkpoint)
    assert not {"residual", "h", "ffn"} & {i.axis for i in elements} or label == "gpt2-lm"


@pytest.mark.parametrize("label", ["bert-sequence", "gpt2-lm", "vit-classification", "torch-relu-post"])
def test_with_noise_permutations_are_exact_and_rotations_near(label: str) -> None:
    plant = of_all(label, noise=1e-3)
    alignment = undone(plant, matched(plant, label, None if plant.axes is None else set(plant.axes)))
    assert unbiased(plant, alignment) < 4 * plant.own


def build(checkpoint: Any) -> torch.nn.Module:
    return real(checkpoint)


@pytest.mark.parametrize("label", ["bert-sequence", "gpt2-lm", "vit-classification", "torch-relu-post"])
def test_from_checkpoints(label: str) -> None:
    plant = of_all(label)
    alignment = match_by_activations(
        Model.of(plant.moved), Model.of(plant.case.checkpoint), batches(label), frame=plant.frame, build=build,
        axes=EVERYTHING if plant.axes is None else tuple(plant.axes), scaling=True,
    )  # fmt: skip
    assert alignment.frame == plant.frame
    assert unbiased(plant, alignment) < 1e-16 * size(plant.home.checkpoint)
    assert alignment.provenance["from"] == "activations"
    assert prove(plant.moved, alignment).exact.equal


@pytest.mark.parametrize("kind", ["pearson", "covariance"])
def test_neurons_of_unrelated_models_are_rescaled_within_reason(kind: str) -> None:
    """Activations do not see the weights on the other side, which a scale near nothing would blow up."""
    source, anchor = (Model.of(MODELS["torch-relu-post"](seed=s)) for s in (3, 4))
    alignment = match_by_activations(
        source, anchor, batches("torch-relu-post"), axes="ffn", kind=kind, scaling=True, build=build
    )
    found = scales(alignment)
    assert float(found.min()) > 0.01
    assert float(found.max()) < 100
    assert prove(source.checkpoint, alignment).exact.equal


def test_scales_are_no_smaller_for_models_that_are_only_alike() -> None:
    """As the slopes of least squares would be, in both directions: swapping the models inverts them."""
    spec = case("torch-relu-post").spec
    modules = [build(MODELS["torch-relu-post"](seed=s)) for s in (3, 4)]
    instances = [i for i in spec.movable if i.axis in {"qk", "v", "ffn"}]
    groups: dict[Instance, Group] = {i: PositiveMonomial() if i.axis == "ffn" else Conformal() for i in instances}
    there, back = (
        match_activations(spec, *both, batches("torch-relu-post"), instances, groups)
        for both in (modules, modules[::-1])
    )
    for instance in instances:
        one, inverse = there[instance].tensors(), back[instance].inverse().tensors()
        for key in one:
            torch.testing.assert_close(one[key], inverse[key])
        assert float((one["scale"].log().abs()).max()) > 0.02


# What is planted: a scale of each unit, or of each head.


@cache
def rectified() -> Model:
    return Model.of(of("BertForMaskedLM", "BertConfig", TEXT, hidden_act="relu")())


def rescaled(home: Model, axis: str, group: str, heads: bool = True) -> Checkpoint:
    """A model moved by random elements of a group of one axis, and of heads."""
    spec = home.spec
    narrow = replace(spec, axes={**spec.axes, axis: replace(spec.axes[axis], group=GROUPS[group])})
    drawn = random_alignment(narrow, 3, {axis, "h"} if heads else {axis}, largest=True)
    return kept(Alignment(spec, drawn.elements).on(home))


def found_again(home: Model, moved: Checkpoint, axis: str, group: str, heads: bool = True) -> float:
    """The share of the squared norm that is left between them."""
    found = match_by_activations(
        Model.of(moved), home, batches("bert-mlm"), axes=f"{axis},heads" if heads else axis, groups={axis: group},
        scaling=True, build=build,
    )  # fmt: skip
    return squared(found(moved), home.checkpoint) / size(home.checkpoint)


@pytest.mark.parametrize("heads", [False, True], ids=["", "heads"])
@pytest.mark.parametrize(
    ("axis", "group"),
    [("ffn", "scaling"), ("ffn", "monomial")]
    + [(axis, group) for axis in ("qk", "v") for group in ("scaling", "monomial", "conformal", "invertible")],
)
def test_planted_scales(axis: str, group: str, heads: bool) -> None:
    home = rectified()
    moved = rescaled(home, axis, group, heads)
    assert squared(moved, home.checkpoint) > 0.02 * size(home.checkpoint)
    assert found_again(home, moved, axis, group, heads) < 1e-24


@pytest.mark.parametrize("group", ["monomial", "conformal"])
def test_scales_of_heads_that_differ_much_in_norm(group: str) -> None:
    """The large heads of one model are small in the other."""
    spec, sizes = rectified().spec, torch.tensor([1 / 16, 1 / 4, 4, 16], dtype=torch.float64)[:, None].expand(4, 5)
    larger = Alignment(spec, {Instance("v", (k,)): Monomial(torch.arange(5).expand(4, 5), sizes) for k in (0, 1)})
    home = Model(kept(larger.on(rectified())), spec)
    small = Model(kept(larger.inverse().on(rectified())), spec)
    assert found_again(home, rescaled(small, "v", group), "v", group) < 1e-24


@pytest.mark.parametrize("group", ["monomial", "conformal", "scaling"])
def test_a_part_that_never_changes_says_nothing_of_scales(group: str) -> None:
    """Queries that are a bias alone: the scale is that of the keys, not its mean with 1."""
    tensors = dict(rectified().checkpoint)
    tensors |= {name: torch.zeros_like(t) for name, t in tensors.items() if name.endswith("query.weight")}
    home = Model.of(rectified().checkpoint.replace(tensors=tensors))
    spec, moved = home.spec, rescaled(home, "qk", group, heads=False)
    groups = {Instance("qk", (k,)): GROUPS[group] for k in (0, 1)}
    found = match_activations(spec, real(home.checkpoint), real(moved), batches("bert-mlm"), list(groups), groups)
    back = Alignment(spec, found).on(Model(moved, spec))
    for layer in (0, 1):
        name = f"bert.encoder.layer.{layer}.attention.self.key.weight"
        torch.testing.assert_close(back[name], home.checkpoint[name])


@pytest.mark.parametrize("kind", ["pearson", "covariance"])
def test_units_inside_heads_are_compared_as_asked(kind: str) -> None:
    """As if the heads of the source had been put in order before."""
    anchor, source = (Model.of(MODELS["bert-mlm"](seed=s)) for s in (4, 5))
    spec, target, given = anchor.spec, real(anchor.checkpoint), batches("bert-mlm")
    groups = {i: GROUPS["permutation"] for i in spec.movable if i.axis in {"h", "qk", "v"}}
    heads = [i for i in groups if i.axis == "h"]
    inner = [i for i in groups if i.axis != "h"]
    together = match_activations(spec, target, real(source.checkpoint), given, list(groups), groups, kind=kind)
    ordered = Alignment(spec, {i: together[i] for i in heads}).on(source)
    alone = match_activations(spec, target, real(ordered), given, inner, groups, kind=kind)
    for i in inner:
        order = together[Instance("h", i.index)].tensors()["index"]
        assert torch.equal(together[i].tensors()["index"][order], alone[i].tensors()["index"])


def test_no_scales_by_default() -> None:
    plant = of_all("torch-relu-post")
    found = [
        match_by_activations(
            Model.of(plant.moved),
            Model.of(plant.case.checkpoint),
            batches("torch-relu-post"),
            axes="attention,ffn",
            build=build,
            **options,
        )
        for options in ({}, {"scaling": True})
    ]
    assert [alignment.provenance["options"]["scaling"] for alignment in found] == [False, True]
    scaled = [["scale" in g.tensors() and not bool((g.tensors()["scale"] == 1).all()) for g in a.elements.values()]
              for a in found]  # fmt: skip
    assert not any(scaled[0])
    assert all(scaled[1])


def test_frame_by_default() -> None:
    given = [batches("gpt2-lm")[0]]
    source, anchor = (Model.of(MODELS["gpt2-lm"](seed=s)) for s in (3, 4))
    assert "fold_norms" in match_by_activations(source, anchor, given, axes="residual", build=build).frame
    assert match_by_activations(source, anchor, given, axes="heads", build=build).frame == ()


@pytest.mark.parametrize(
    ("one", "other"), [("bert-sequence", "bert"), ("bert", "bert-pretraining"), ("gpt2-lm", "gpt2")]
)
def test_a_head_that_one_of_them_has_not(one: str, other: str) -> None:
    source, anchor = Model.of(MODELS[one](seed=3)), Model.of(MODELS[other](seed=4))
    alignment = match_by_activations(source, anchor, batches(one), axes=EVERYTHING, frame=(), build=build)
    assert prove(source.checkpoint, alignment).exact.equal


def test_tokens_that_do_not_count() -> None:
    """Of what is said with them there is nothing left: another token in their tap gives the same."""
    plant = planted("bert-mlm", axes=frozenset({"ffn"}))
    source, anchor = Model.of(plant.moved), Model.of(MODELS["bert-mlm"](seed=9))
    options: dict[str, Any] = {"axes": "ffn", "build": build}
    found = [
        match_by_activations(source, anchor, batches("bert-mlm"), without=without, **options)
        for without in ((), (7, 11))
    ]
    assert found[1].provenance["options"]["without"] == [7, 11]
    index = [[g.tensors()["index"].tolist() for g in alignment.elements.values()] for alignment in found]
    assert index[0] != index[1]  # they did count
    everything = tuple(range(61))
    with pytest.raises(OptionError, match="positions"):
        match_by_activations(source, anchor, batches("bert-mlm"), without=everything, **options)


class Reader(torch.nn.TransformerEncoder):
    """A torch encoder that reads tokens, and is told of padding as torch does."""

    def forward(self, input_ids: Tensor, src_key_padding_mask: Tensor) -> Tensor:  # type: ignore[override]
        table = torch.randn(61, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return super().forward(table[input_ids], src_key_padding_mask=src_key_padding_mask)


def test_padding_does_not_count_beside_tokens_that_do_not() -> None:
    def reader(checkpoint: Checkpoint) -> torch.nn.Module:
        module = real(checkpoint)
        module.__class__ = Reader
        return module

    source, anchor = (Model.of(MODELS["torch-relu-post"](seed=s)) for s in (3, 4))
    rng = torch.Generator().manual_seed(2)
    ids, more = torch.randint(5, 61, (2, 8, 12), generator=rng)
    padding = torch.arange(12).expand(8, 12) >= 4
    found = [
        match_by_activations(
            source, anchor, [{"input_ids": given, "src_key_padding_mask": padding}], axes="ffn", without=(1,),
            build=reader,
        )
        for given in (ids, ids.where(~padding, more))
    ]  # fmt: skip
    one, other = ([g.tensors()["index"].tolist() for g in alignment.elements.values()] for alignment in found)
    assert one == other


def test_images_have_no_tokens() -> None:
    source = Model.of(MODELS["vit"](seed=1))
    with pytest.raises(OptionError, match="input_ids"):
        match_by_activations(source, source, batches("vit"), axes="ffn", without=(1,), build=build)


def test_no_batches() -> None:
    source = Model.of(MODELS["bert-mlm"](seed=1))
    with pytest.raises(OptionError, match="no batches"):
        match_by_activations(source, source, [], axes="ffn", build=build)


def test_signs_and_scales_of_gated_neurons_come_back() -> None:
    anchor = MODELS["llama-lm"](seed=0)
    moved = random_alignment(case("llama-lm").spec, 3, ("ffn",))(anchor)
    alignment = match_by_activations(
        Model.of(moved), Model.of(anchor), batches("llama-lm"), axes=("ffn",), scaling=True, build=build
    )
    found = scales(alignment)
    assert bool((found < 0).any() and (found > 0).any())
    back = alignment(moved)
    torch.testing.assert_close(dict(back), {name: anchor[name] for name in back}, rtol=1e-10, atol=1e-12)


# Heads whose queries and keys positions turn, and query heads that share a key.

FIRST = ("llama-lm", "qwen3-lm", "neox-lm", "falcon-grouped")
MORE = (
    *("mistral-lm", "smollm3-lm", "gemma3-lm", "phi3-partly", "olmo2-lm", "stablelm-normed", "starcoder2-lm"),
    *("cohere-lm", "cohere-normed", "gptj-lm", "falcon-lm", "falcon-by-head", "opt-lm", "bloom-lm", "mpt-lm-clipped"),
)
decoders = pytest.mark.parametrize("label", [*FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])


@decoders
def test_all_axes_of_decoders_at_once(label: str) -> None:
    """Planes and query heads are found in the heads where they are; of norms in float32 no more than its rounding is
    left."""
    plant = planted(label)
    elements = matched(plant, label)
    wanted = random_alignment(plant.home.spec, 3).elements
    assert elements.keys() == {i for i, g in wanted.items() if not g.is_identity()}
    before = unbiased(plant, Alignment(plant.home.spec, {}))
    assert before > size(plant.home.checkpoint)
    assert unbiased(plant, undone(plant, elements)) < 1e-12 * before


@pytest.mark.parametrize("label", FIRST)
@pytest.mark.parametrize("axes", [{"kv", "h"}, {"q"}, {"c", "p"}, {"q", "c"}, {"kv", "h", "q"}, {"kv", "q", "v"}],
                         ids=lambda a: "+".join(sorted(a)))  # fmt: skip
def test_parts_of_attention_of_decoders(label: str, axes: set[str]) -> None:
    axes = axes & case(label).spec.axes.keys()
    plant = planted(label, axes=frozenset(axes), frame=())
    elements = matched(plant, label, axes)
    assert unbiased(plant, undone(plant, elements)) < 1e-18 * size(plant.home.checkpoint)


@pytest.mark.parametrize("label", FIRST)
def test_orders_of_decoders_are_exact_with_noise(label: str) -> None:
    axes = case(label).spec.axes.keys() - {"residual"}
    plant = planted(label, 1e-3, axes=frozenset(axes), frame=())
    elements = matched(plant, label, {*axes})
    assert unbiased(plant, undone(plant, elements)) < 4 * plant.own


def test_a_decoder_from_checkpoints() -> None:
    plant = planted("llama-lm", axes=frozenset({"kv", "q", "c", "v", "ffn"}), frame=())
    source, anchor = Model.of(plant.moved), Model.of(plant.case.checkpoint)
    alignment = match_by_activations(
        source, anchor, batches("llama-lm"), axes="attention,ffn,heads", scaling=True, build=build
    )
    assert {i.axis for i in alignment.elements} == plant.axes
    assert squared(alignment(plant.moved), anchor.checkpoint) < 1e-18 * size(anchor.checkpoint)
    assert prove(plant.moved, alignment).exact.equal

"""Symmetries of neurons and of the residual stream, and what only looks like one. Named after the cases; each move is
exact on the real class, and beside it stands what breaks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.activations import ACT2FN

from cases.moved import BROKEN, EXACT, case_of, left_behind
from contract.tiny import TEXT, VISION, Case, case, of
from recovery.planted import EVERYTHING
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import (
    CheckpointError,
    IncompatibleError,
    LayoutError,
    SpecError,
    SymmetryError,
)
from symfuse.groups import (
    Group,
    Monomial,
    Orthogonal,
    PositiveMonomial,
    Scaling,
    Signed,
)
from symfuse.io import Checkpoint
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance

# ---- C45: rescaling neurons


def acting(this: Case, group: Group, seed: int = 0) -> float:
    """The error that random elements of any group on the neurons make, whether it is theirs or not."""
    rng = torch.Generator().manual_seed(seed)
    instances = [i for i in this.spec.movable if i.axis == "ffn"]
    g = Alignment(this.spec, {i: group.random(29, this.spec.batch("ffn"), rng) for i in instances})
    return this.error(g(this.checkpoint), g)


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_c45_each_activation_has_its_own_group_or_none(name: str) -> None:
    """Of all that `transformers` has: what is declared is exact, what is not would change the function."""
    if name in {"prelu", "sqrtsoftplus", "hardswish"}:
        with pytest.raises(SpecError, match=f"activation '{name}' is not known"):
            api.declare(
                of("BertModel", "BertConfig", TEXT)().replace(config={"model_type": "bert", **TEXT, "hidden_act": name})
            )
        return
    if name == "xielu":  # which has parameters of its own, declared only in Apertus
        with pytest.raises(SpecError, match=r"not declared: .*intermediate_act_fn\.alpha_p"):
            case_of(of("BertModel", "BertConfig", TEXT, hidden_act=name)())
        return
    this = case_of(of("BertModel", "BertConfig", TEXT, hidden_act=name)())
    group = this.spec.axes["ffn"].group
    assert group is not None
    assert acting(this, group) < EXACT
    homogeneous, odd = isinstance(group, PositiveMonomial), isinstance(group, Signed)
    assert homogeneous == (name in {"relu", "leaky_relu"})
    assert odd == (name in {"tanh", "linear"})
    assert (acting(this, Scaling()) < EXACT) == (homogeneous or name == "linear")
    assert (acting(this, Signed()) < EXACT) == odd


@pytest.mark.parametrize("data", [False, True], ids=["weights", "activations"])
@pytest.mark.parametrize("act", ["relu", "gelu", "silu"])
def test_c45_neurons_are_rescaled_by_what_is_positive_and_only_where_it_is_exact(act: str, data: bool) -> None:
    a, b = (of("BertForMaskedLM", "BertConfig", TEXT, hidden_act=act)(seed) for seed in (0, 1))
    ids = torch.randint(5, 61, (4, 16), generator=torch.Generator().manual_seed(2))
    options = {"data": [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]} if data else {}
    alignment = api.match(a, b, axes="ffn", scaling=True, **options)
    assert len(alignment.elements) == 2
    for element in alignment.elements.values():
        assert isinstance(element, Monomial)
        scale = element.tensors().get("scale")
        assert (scale is not None) == (act == "relu") != element.reorders_only
        assert scale is None or float(scale.min()) > 0
    assert api.prove(a, alignment).exact.equal


def test_c45_a_flipped_relu_neuron_is_not_flipped_back() -> None:
    a = of("BertForMaskedLM", "BertConfig", TEXT, hidden_act="relu")()
    rng = torch.Generator().manual_seed(4)
    ffn = [i for i in api.declare(a).movable if i.axis == "ffn"]
    flipped = Alignment(api.declare(a), {i: Signed().random(29, (), rng) for i in ffn})(a)
    alignment = api.match(flipped, a, axes="ffn")
    assert all(float(g.tensors()["scale"].min()) > 0 for g in alignment.elements.values())
    assert api.prove(flipped, alignment).exact.equal


# ---- C47: the activation is in the config alone


@pytest.mark.parametrize(("ours", "theirs"), [("silu", "gelu"), ("relu", "gelu"), ("gelu", "gelu_new")])
def test_c47_models_of_other_activations_are_not_aligned(ours: str, theirs: str) -> None:
    a = of("BertForMaskedLM", "BertConfig", TEXT, hidden_act=ours)()
    b = a.replace(config=a.config | {"hidden_act": theirs})
    for verb in (api.match, lambda x, y: api.relate(x, y).distance, lambda x, y: api.align([x, y])):
        with pytest.raises(IncompatibleError, match=r"hidden_act|activation"):
            verb(a, b)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("silu", "swish"), ("gelu", "gelu_python"), ("gelu_new", "gelu_pytorch_tanh"), ("gelu_fast", "gelu_accurate")],
)
def test_c47_two_names_of_one_activation_are_one(ours: str, theirs: str) -> None:
    """The same tensors compute the same under both names, so they are matched: nothing has to move."""
    a = of("BertForMaskedLM", "BertConfig", TEXT, hidden_act=ours)()
    b = a.replace(config=a.config | {"hidden_act": theirs})
    assert api.verify(a, b).equal
    assert not api.match(a, b).elements


# ---- C49: rotations and the mean that LayerNorm subtracts


@pytest.mark.parametrize("label", ["gpt2-lm-untied", "vit-classification"])
def test_c49_a_folded_stream_is_turned_about_the_ones_and_not_otherwise(label: str, tmp_path: Path) -> None:
    this = case(label)
    spec = canonical(Model.of(this.checkpoint), ROTATABLE).spec
    about = replace(random_alignment(spec, 3, {"residual"}), frame=ROTATABLE)
    assert api.prove(this.checkpoint, about).exact.worst < EXACT
    generic = Orthogonal().random(20, (), torch.Generator().manual_seed(0))
    g = Alignment(spec, {Instance("residual", ()): generic}, frame=ROTATABLE)
    assert api.verify(this.checkpoint, g(this.checkpoint), g).worst > BROKEN
    with pytest.raises(CheckpointError, match="residual: not an element of the group"):
        Alignment.load(g.save(tmp_path / "generic.safetensors"))
    as_it_is = Alignment(this.spec, {Instance("residual", ()): about.elements[Instance("residual", ())]})
    with pytest.raises(SymmetryError, match="no permutation part"):
        dict(as_it_is(this.checkpoint))


@pytest.mark.parametrize("label", ["bert-mlm", "deberta-mlm", "torch-relu-post", "gpt2-lm-untied"])
def test_c49_a_stream_whose_gains_are_in_place_is_permuted(label: str) -> None:
    """Post-norm models at all times, pre-norm ones where no frame is wanted."""
    a, b = case(label).checkpoint, random_alignment(case(label).spec, 4)(case(label).checkpoint)
    found = api.match(b, a, axes=EVERYTHING, frame=()).elements[Instance("residual", ())]
    assert isinstance(found, Monomial)
    assert found.reorders_only
    if label != "gpt2-lm-untied":
        with pytest.raises(SymmetryError, match="only permutations act on it"):
            api.match(b, a, axes="residual", frame=ROTATABLE)


# ---- C56: tokens and positions of images


def vision(size: int, seed: int = 0) -> Checkpoint:
    return of("ViTForImageClassification", "ViTConfig", VISION | {"image_size": size, "patch_size": 8})(seed)


def test_c56_other_numbers_of_positions_are_refused() -> None:
    pair = [vision(16), vision(24, seed=1)]
    for verb in (api.match, lambda a, b: api.relate(a, b).distance, lambda a, b: api.merge([a, b])):
        with pytest.raises(IncompatibleError, match="numbers of positions differ: 5 and 10"):
            verb(*pair)


def test_c56_the_number_of_tokens_is_not_guessed_from_squares() -> None:
    """10 positions are 9 patches and a class token for 24 pixels, and nothing else; a register has a name."""
    a = vision(16)
    with pytest.raises(LayoutError, match=r"position_embeddings.*(\n.*)*expected \(1, 10, 20\)"):
        api.declare(a.replace(config=a.config | {"image_size": 24}))
    positions = "vit.embeddings.position_embeddings"
    more = torch.cat([a[positions], a[positions][:, :1]], 1)
    with pytest.raises(LayoutError, match=r"expected \(1, 5, 20\)"):
        api.declare(a.replace(tensors={**a, positions: more}))
    register = "vit.embeddings.register_tokens"
    with pytest.raises(SpecError, match=r"not declared: vit\.embeddings\.register_tokens"):
        api.declare(a.replace(tensors={**a, register: torch.zeros(1, 1, 20, dtype=torch.float64)}))
    with pytest.raises(IncompatibleError, match="one is a vit, the other a deit"):
        api.match(a, of("DeiTForImageClassification", "DeiTConfig", VISION | {"image_size": 16, "patch_size": 8})(1))


@pytest.mark.parametrize("label", ["vit-masked", "deit-masked"])
def test_c56_a_residual_move_covers_every_token_and_the_patches(label: str) -> None:
    this = case(label)
    g = random_alignment(this.spec, 5, {"residual"})
    assert this.error(g(this.checkpoint), g) < EXACT
    names = [name for name in this.checkpoint if ".embeddings." in name]
    tokens = {name.rpartition("embeddings.")[2] for name in names}
    assert tokens >= {"cls_token", "mask_token", "position_embeddings"}
    assert ("distillation_token" in tokens) == (label == "deit-masked")
    assert len(names) == len(tokens) == (6 if label == "deit-masked" else 5)
    for name in names:
        assert left_behind(this, g, [name]) > BROKEN, name

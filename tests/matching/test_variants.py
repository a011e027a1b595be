"""Inexact variants: what is planted under one is found under it, what is exact is a special case, and all of it says
that it is inexact."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import symfuse
from command import done, run
from contract.tiny import MODELS, case
from recovery.planted import EVERYTHING, kept, size, squared
from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures import resolve
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SpecError, SymmetryError, VerificationError
from symfuse.groups import Permutation
from symfuse.io import Checkpoint
from symfuse.matching import match_models, match_universe
from symfuse.model import VARIANTS, Model, vary
from symfuse.spec import Instance

FAMILIES = [
    "bert-mlm", "roberta-sequence", "distilbert-sequence", "electra-discriminator", "gpt2-lm", "vit-classification",
]  # fmt: skip
EACH = [(name,) for name in VARIANTS]
ALL = tuple(VARIANTS)


def under(variants: Sequence[tuple[str, ...]], labels: Sequence[str]) -> pytest.MarkDecorator:
    """Each label under each of the variants; but for the first label only the last of them is fast."""
    return pytest.mark.parametrize(
        ("label", "variants"),
        [
            pytest.param(label, one, id=f"{label}-{'+'.join(one)}",
                         marks=() if label == labels[0] or one == variants[-1] else pytest.mark.slow)
            for label in labels for one in variants
        ],
    )  # fmt: skip


@cache
def planted(label: str, variants: tuple[str, ...], seed: int = 3) -> tuple[Checkpoint, Alignment]:
    """The tiny model moved by random elements of all that may act under the variants, and what moved it."""
    spec = vary(case(label).spec, variants)
    moving = replace(random_alignment(spec, seed), variants=variants)
    return kept(moving(case(label).checkpoint)), moving


def match(
    source: Checkpoint, label: str, variants: tuple[str, ...], axes: str = EVERYTHING, **options: object
) -> Alignment:
    anchor = Model.of(case(label).checkpoint)
    options = {"frame": (), "threads": 1, **options}
    return match_models(Model.of(source), anchor, axes=axes, variants=variants, **options)  # type: ignore[arg-type]


@cache
def by_permutations(label: str) -> Checkpoint:
    """The tiny model moved exactly: heads, what is inside of them, neurons and the residual stream, all permuted."""
    spec = case(label).spec
    rng = torch.Generator().manual_seed(4)
    elements = {
        i: Permutation().random(spec.axes[i.axis].size, spec.batch(i.axis), rng)
        for i in spec.movable
        if i.axis in ("h", "qk", "v", "ffn", "residual")
    }
    exact = Alignment(spec, elements)
    moved = kept(exact(case(label).checkpoint))
    assert case(label).error(moved, exact) < 1e-11
    return moved


# The declarations.


LAYER = "encoder.layer.1."
LAYOUTS = {
    ("bert", "heads-ignored"): {
        LAYER + "attention.self.query.weight": "qk residual*",
        LAYER + "attention.self.key.bias": "qk*",
        LAYER + "attention.output.dense.weight": "residual v*",
    },
    ("bert", "separate-qk"): {
        LAYER + "attention.self.query.bias": "(h qk)",
        LAYER + "attention.self.key.weight": "(h k) residual*",
    },
    ("bert", "separate-residual"): {  # post-norm: a norm is of the point that its sublayer has written
        "embeddings.LayerNorm.bias": "residual",
        "encoder.layer.0.attention.self.key.weight": "(h qk*) residual*",
        LAYER + "attention.self.value.weight": "(h v) residual_2*",
        LAYER + "attention.output.dense.weight": "residual_3 (h v*)",
        LAYER + "attention.output.dense.bias": "residual_3",
        LAYER + "attention.output.LayerNorm.weight": "|residual_3|",
        LAYER + "intermediate.dense.weight": "ffn residual_3*",
        LAYER + "output.dense.weight": "residual_4 ffn*",
        LAYER + "output.LayerNorm.bias": "residual_4",
        "pooler.dense.weight": "pool residual_4*",
    },
    ("bert-mlm", "separate-residual"): {  # the decoder is the embedding, and what it reads is in its space
        "cls.predictions.transform.dense.weight": "residual residual_4*",
        "cls.predictions.transform.LayerNorm.weight": "|residual|",
    },
    ("llama-biased", "separate-residual"): {  # rotary positions, shared keys, gated neurons
        "layers.1.input_layernorm.weight": "|residual_2|",
        "layers.1.self_attn.q_proj.weight": "(kv q c f) residual_2*",
        "layers.1.self_attn.k_proj.weight": "(kv c* f) residual_2*",
        "layers.1.self_attn.o_proj.bias": "residual_3",
        "layers.1.post_attention_layernorm.weight": "|residual_3|",
        "layers.1.mlp.gate_proj.weight": "|ffn| residual_3*",
        "layers.1.mlp.down_proj.weight": "residual_4 ffn*",
        "lm_head.weight": "vocab residual_4*",
    },
    ("smollm3-lm", "separate-residual"): {"layers.0.self_attn.k_proj.weight": "(kv p*) residual*"},
    ("gpt2-lm-untied", "heads-ignored"): {"h.0.attn.c_attn.weight": "residual* (qk + qk* + v)"},
    ("gpt2-lm-untied", "separate-qk"): {"h.0.attn.c_attn.bias": "(h qk + h k + h v)"},
    ("gpt2-lm-untied", "separate-residual"): {  # pre-norm: a norm is of the point that is read through it
        "h.1.ln_1.weight": "|residual_2|",
        "h.1.attn.c_attn.weight": "residual_2* (h qk + h qk* + h v)",
        "h.1.attn.c_proj.bias": "residual_3",
        "h.1.ln_2.bias": "residual_3",
        "h.1.mlp.c_proj.weight": "ffn* residual_4",
        "ln_f.weight": "|residual_4|",
        "lm_head.weight": "vocab residual_4*",
    },
}  # fmt: skip


@pytest.mark.parametrize(("label", "variant"), LAYOUTS, ids=str)
def test_layouts(label: str, variant: str) -> None:
    expected = LAYOUTS[label, variant]
    spec = vary(case(label).spec, [variant])
    assert {name: str(spec.tensors[name].layout) for name in expected} == expected


@pytest.mark.parametrize(
    ("label", "alias"), [("bert-mlm", "cls.predictions.decoder.weight"), ("gpt2-lm", "lm_head.weight")]
)
def test_a_tied_decoder_that_a_file_holds_goes_with_the_embedding(label: str, alias: str) -> None:
    checkpoint = case(label).checkpoint
    spec = resolve(checkpoint.config, [*checkpoint, alias])
    assert str(vary(spec, ["separate-residual"]).tensors[alias].layout) == "vocab residual*"


def test_axes() -> None:
    spec = vary(case("bert").spec, ["separate-qk", "heads-ignored"])
    assert "h" not in spec.axes
    for axis in ("qk", "k", "v"):
        found = spec.axes[axis]
        assert (found.size, found.group, found.per) == (20, Permutation(), ("l",))
    points = vary(case("bert").spec, ["separate-residual"])
    assert [str(i) for i in points.movable if i.axis.startswith("residual")] == [
        "residual", "residual_2", "residual_1", "residual_3", "residual_4",
    ]  # fmt: skip
    assert {name: str(layout) for name, layout in points.outputs.items()} == {
        "last_hidden_state": "residual_4", "pooler_output": "pool",
    }  # fmt: skip


@pytest.mark.parametrize("label", FAMILIES)
def test_shapes_and_sides_stay(label: str) -> None:
    """Every tensor has the shape that it had, and every part of it is read or written as it was."""
    before, after = case(label).spec, vary(case(label).spec, ALL)
    for name, declared in after.tensors.items():
        old = before.tensors[name].layout
        assert declared.layout.shape(after.sizes) == old.shape(before.sizes)
    assert list(after.tensors) == list(before.tensors)


@pytest.mark.parametrize(
    ("label", "variant", "why"),
    [
        ("deberta-mlm", "separate-residual", "it is not declared at which point of the stream"),
        (
            "deberta",
            "separate-residual",
            "it is not declared at which point of the stream encoder.rel_embeddings.weight is",
        ),
        ("torch-relu-post", "separate-residual", "it is not declared at which point of the stream output, src are"),
        ("gptj-lm", "separate-residual", "attention and feed-forward read the same norm h.0.ln_1.weight in parallel"),
        ("gemma2-lm", "separate-residual", "it is not declared at which point of the stream norm.weight is"),
        ("llama-lm", "separate-qk", "it has rotary positions"),
        ("llama-lm", "heads-ignored", "several queries share one head of keys and values"),
        (
            "bloom-lm",
            "heads-ignored",
            "the heads of h.0.self_attention.query_key_value.weight, .* are not one space inside",
        ),
    ],
)
def test_a_family_that_a_variant_does_not_fit(label: str, variant: str, why: str) -> None:
    with pytest.raises(SpecError, match=f"{variant} does not fit the layouts of {case(label).spec.family}: {why}"):
        vary(case(label).spec, [variant])


@pytest.mark.parametrize(("variant", "why"), [("heads-ignored", "no heads"), ("separate-qk", "no tensor has keys")])
def test_twice_is_once_too_often(variant: str, why: str) -> None:
    spec = vary(case("bert").spec, [variant])
    with pytest.raises(SpecError, match=why):
        vary(spec, [variant])


def test_an_unknown_variant() -> None:
    with pytest.raises(OptionError, match=r"'heads-ignorred' \(did you mean 'heads-ignored'\?\)"):
        match(case("bert").checkpoint, "bert", ("heads-ignorred",))


@pytest.mark.parametrize("group", ["permutation", "none"])
def test_a_group_of_an_axis_that_the_variant_leaves_out(group: str) -> None:
    anchor = case("bert").checkpoint
    with pytest.raises(OptionError, match="groups: h: no such axis under heads-ignored"):
        match(anchor, "bert", ("heads-ignored",), "attention", groups={"heads": group})


# Recovery.


@under([*EACH, ALL], FAMILIES)
def test_planted_under_the_variant(label: str, variants: tuple[str, ...]) -> None:
    moved, moving = planted(label, variants)
    anchor = case(label).checkpoint
    assert squared(moved, anchor) > 0.5 * size(anchor)
    found = match(moved, label, variants)
    assert found.variants == variants
    assert squared(found(moved), anchor) < 1e-12 * size(anchor)
    there_and_back = (found @ moving).elements  # each element, and not only what they come to
    assert all(g.is_identity() for i, g in there_and_back.items() if i.axis == "ffn" or i.axis.startswith("residual"))


@under([*EACH, ALL], ["bert-sequence", "gpt2-lm", "vit-classification"])
@pytest.mark.parametrize("origin", ["weights", "activations"])
def test_the_exact_one_is_a_special_case(origin: str, label: str, variants: tuple[str, ...]) -> None:
    moved, anchor = by_permutations(label), case(label).checkpoint
    axes, groups = "attention,ffn,heads,residual", {"attention": "permutation"}
    groups = {} if "heads-ignored" in variants else groups
    data = batches(label) if origin == "activations" else None
    options = {} if data else {"threads": 1}
    found = symfuse.match(moved, anchor, axes=axes, groups=groups, variants=variants, frame=(), data=data, **options)
    assert squared(found(moved), anchor) < 1e-12 * size(anchor)
    assert case(label).error(found(moved)) < 1e-6


@cache
def batches(label: str) -> list[Mapping[str, Tensor]]:
    found = []
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        if "input_ids" in case(label).inputs:
            ids = torch.randint(5, 61, (6, 12), generator=rng)
            found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        else:
            found.append({"pixel_values": torch.randn(8, 3, 12, 20, generator=rng)})
    return found


EXACT = {
    "heads-ignored": ("attention,heads", {"attention": "permutation"}),
    "separate-qk": ("qk", {"qk": "orthogonal"}),
    "separate-residual": ("residual", {}),
}


@pytest.mark.parametrize(("variant", "label"), list(itertools.product(VARIANTS, ["bert", "gpt2-lm"])))
def test_models_that_have_nothing_in_common_come_nearer(variant: str, label: str) -> None:
    source, anchor = MODELS[label](seed=7), case(label).checkpoint
    axes, groups = EXACT[variant]
    exact = match(source, label, (), axes, groups=groups, biases=False)
    found = match(source, label, (variant,), axes, groups={} if variant == "heads-ignored" else groups, biases=False)
    assert squared(found(source), anchor) < squared(exact(source), anchor) < squared(source, anchor)


def test_groups_of_queries_are_those_of_their_keys() -> None:
    moved, _ = planted("bert", ("separate-qk",))
    found = match(moved, "bert", ("separate-qk",), "qk", groups={"qk": "permutation"})
    by_axis = {step["instance"]: step["group"] for step in found.provenance["steps"]}
    assert by_axis == {"qk[0]": "permutation", "qk[1]": "permutation", "k[0]": "permutation", "k[1]": "permutation"}


def test_a_rotated_stream_with_an_element_for_each_point() -> None:
    """Of a pre-norm model, in the frame in which its stream may be rotated."""
    label, variants = "gpt2-lm-untied", ("separate-residual",)
    source, anchor = MODELS[label](seed=7), case(label).checkpoint
    exact, found = (
        symfuse.match(source, anchor, axes="residual", variants=names, threads=1) for names in ((), variants)
    )
    assert found.frame == exact.frame != ()
    left = [squared(g(source), g.in_frame(anchor)) for g in (found, exact)]
    assert left[0] < left[1]
    assert not symfuse.verify(source, found(source), found).equal


# It says what it is.


@under(EACH, FAMILIES)
def test_the_function_changes_and_that_is_said(label: str, variants: tuple[str, ...]) -> None:
    moved, moving = planted(label, variants)
    checked = symfuse.verify(case(label).checkpoint, moved, moving)
    assert not checked.equal
    assert checked.worst > 0.1
    with pytest.raises(VerificationError, match="differs by"):
        symfuse.prove(case(label).checkpoint, moving)
    assert repr(moving).endswith(f"inexact: {variants[0]})")


def test_without_variants_nothing_is_said(tmp_path: Path) -> None:
    exact = match(by_permutations("bert"), "bert", ())
    assert exact.variants == ()
    assert "inexact" not in repr(exact)
    assert "variants" not in exact.provenance["options"]
    with safe_open(exact.save(tmp_path / "exact.safetensors"), framework="pt") as file:
        assert file.metadata().keys() == {"format", "symfuse", "spec", "provenance", "frame", "sha256"}
    assert Alignment.load(tmp_path / "exact.safetensors").variants == ()


@pytest.mark.parametrize("variants", [*EACH, ALL], ids="+".join)
def test_to_a_file_and_back(variants: tuple[str, ...], tmp_path: Path) -> None:
    source = MODELS["bert"](seed=7)
    found = match(source, "bert", variants)
    loaded = Alignment.load(found.save(tmp_path / "alignment.safetensors"))
    assert loaded.variants == variants
    assert loaded.provenance["options"]["variants"] == list(variants)
    assert loaded.to_bytes() == found.to_bytes()
    one, other = found(source), loaded(source)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_with_a_variant_that_there_is_not(tmp_path: Path) -> None:
    _, moving = planted("bert", ("heads-ignored",))
    file = moving.save(tmp_path / "alignment.safetensors")
    with safe_open(file, framework="pt") as opened:
        meta, tensors = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    meta = {key: text for key, text in meta.items() if key != "sha256"}
    save_file(tensors, file, meta | {"variants": '["heads-forgotten"]'})
    with pytest.raises(CheckpointError, match="heads-forgotten: no variants that this version knows"):
        Alignment.load(file)
    save_file(tensors, file, {key: value for key, value in meta.items() if key != "variants"})
    with pytest.raises(IncompatibleError, match=r"axis '(h|qk|v)'"):  # it is not passed off as exact
        Alignment.load(file)(case("bert").checkpoint)


@pytest.mark.parametrize("variants", [*EACH, ALL], ids="+".join)
def test_inverse_and_composition(variants: tuple[str, ...]) -> None:
    anchor = case("bert").checkpoint
    (moved, one), (_, other) = planted("bert", variants, seed=3), planted("bert", variants, seed=5)
    assert one.inverse().variants == (other @ one).variants == variants
    torch.testing.assert_close(dict(one.inverse()(moved)), dict(anchor))
    torch.testing.assert_close(dict((other @ one)(anchor)), dict(other(moved)))


def test_exact_and_inexact_are_not_composed() -> None:
    _, inexact = planted("bert", ("heads-ignored",))
    exact = random_alignment(case("bert").spec, 1)
    with pytest.raises(SymmetryError, match="under no variants cannot follow one under heads-ignored"):
        exact @ inexact
    with pytest.raises(SymmetryError, match="under heads-ignored cannot follow one under none"):
        inexact @ exact


def test_many_models() -> None:
    models = [Model.of(MODELS["bert"](seed=seed)) for seed in (0, 7, 8)]
    found = match_universe(models, axes="ffn,attention", variants=("heads-ignored",), rounds=1, threads=1)
    assert {g.variants for g in found.alignments} == {("heads-ignored",)}
    assert found.curve[-1] < found.curve[0]
    assert any(Instance("qk", (0,)) in g.elements for g in found.alignments)


def test_on_the_command_line(tmp_path: Path) -> None:
    a, b, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    MODELS["bert"](seed=7).save(a)
    case("bert").checkpoint.save(b)
    said = done("align", a, "--to", b, "--inexact", "heads-ignored", "--inexact", "separate-qk", "-o", out).output
    assert "inexact: separate-qk, heads-ignored: the result computes another function" in said
    assert "outputs changed by" in said
    assert "proved" not in said
    data = json.loads(Path(out, "symfuse.json").read_text())
    assert data["inexact"] == data["options"]["variants"] == ["separate-qk", "heads-ignored"]
    assert data["verified"]["equal"] is False
    card = Path(out, "README.md").read_text()
    assert "\ninexact: separate-qk, heads-ignored. " in card
    assert "That changed the outputs by" in card
    assert "symmetries" not in card
    assert "proved" not in card
    assert "note: inexact: separate-qk, heads-ignored: " in done("inspect", out).output
    assert "inexact" not in done("inspect", a).output
    assert run("verify", a, out).exit_code == 7


def test_on_the_command_line_without_a_look(tmp_path: Path) -> None:
    a, b, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    MODELS["bert"](seed=7).save(a)
    case("bert").checkpoint.save(b)
    options = ["--inexact", "separate-residual", "--axes", "residual", "--no-verify"]
    assert "inexact: separate-residual: the result computes" in done("align", a, "--to", b, *options, "-o", out).output
    card = Path(out, "README.md").read_text()
    assert "\ninexact: separate-residual. " in card
    assert "differ" not in card
    failed = run("align", a, "--to", b, "--inexact", "heads", "-o", str(tmp_path / "other"))
    assert failed.exit_code != 0
    assert "no variant is called 'heads'" in failed.output

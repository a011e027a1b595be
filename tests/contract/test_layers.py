"""Of every family: layers that are cut, repeated and in another order compute what they compute in that order in the
real module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import nn

from contract import tiny
from symfuse import api
from symfuse.architectures import ARCHITECTURES
from symfuse.architectures.base import LAYERS
from symfuse.errors import IncompatibleError, LayoutError, OptionError, SpecError
from symfuse.io import Checkpoint
from symfuse.verification import compare, run

PARTS = ("encoder", "decoder", "text_model", "vision_model", "vit")
# Of models of images and words the layers of the text decoder: their other parts stay as they are.
WORDS = ("language_model.layers", "text_model.layers")
OTHERS = {"idefics3": ("vision_model", "connector"), "smolvlm": ("vision_model", "connector")}
OTHER_PARTS = ("vision_tower", "multi_modal_projector")
# Of these models the first layer is of another kind, which no field can say of another one, or of one behind others.
REFUSED = dict.fromkeys(("modernbert", "modernbert-decoder"), ("interleaved", "cut"))
REFUSED |= dict.fromkeys(
    ("dots1", "deepseek_v2", "deepseek_v3", "sarvam_mla", "mistral4", "lfm2_moe", "afmoe"), ("interleaved",)
)
# Lists in modules of other things: convolutions before the layers, maps of the streams of AltUp.
NO_LAYERS = ("conv_layers", "altup_projections", "altup_unembed_projections")
# Which has no class that can be built from a config; and networks without a list of layers.
WITHOUT = ("sceptr", "torchvision_resnet", "torch_sequential")
LABELS = [label for label in tiny.MODELS if tiny.family(label) not in WITHOUT]

# Several layers share weights, and the config does not say which; a tensor has a part for each layer; what layers write
# is scaled by how many they are, or by their place.
IN_PLACE = {
    "albert": r"layer \d of the output would not compute as layer \d",
    "jamba": r"layer \d of the output would not compute as layer \d",  # attention is in each so many layers
    **dict.fromkeys(("esm", "gemma3n-lm", "gemma4-lm"), "has a part for each layer"),
    "wavlm-frames": "layer_weights: the stored shape",
    **dict.fromkeys(("minicpm3", "diffllama"), r"layer \d of the output would not compute as layer \d"),
    "resnet": "the tensors are not those of resnet",
    "mae-pretraining": "config.json has no field for its number of layers",  # of the encoder beside the decoder
    "swin": r"layer \d of the output would not compute as layer \d",
}

Orders = Mapping[str, Sequence[int]]


def stacks(module: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of layers by their names, but for those inside others."""
    found: dict[str, nn.ModuleList] = {}
    for name, part in module.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(part, nn.ModuleList) and len(part) > 1 and not inner and not name.endswith(NO_LAYERS):
            found[name] = part
    return found


def part_of(name: str) -> str:
    return next(part for part in name.split(".") if part in PARTS)


def recipe_of(orders: Orders, others: Sequence[str] = ()) -> dict[str, Any]:
    def slices(order: Sequence[int]) -> list[dict[str, Any]]:
        return [{"sources": [{"model": "model", "layer_range": [at, at + 1]}]} for at in order]

    if others:
        words: dict[str, Any] = {"text_decoder": {"slices": slices(*orders.values())}}
        parts = words | {other: {"models": [{"model": "model"}]} for other in others}
        return {"merge_method": "passthrough", "modules": parts}
    if len(orders) == 1:
        return {"merge_method": "passthrough", "slices": slices(*orders.values())}
    parts = {part_of(name): {"slices": slices(order)} for name, order in orders.items()}
    return {"merge_method": "passthrough", "modules": parts}


def reordered(module: nn.Module, orders: Orders) -> nn.Module:
    """The module with the layers of these orders in their lists; each keeps what it is."""
    for name, order in orders.items():
        owner_name, _, key = name.rpartition(".")
        owner: Any = module.get_submodule(owner_name)
        layers = [copy.deepcopy(getattr(owner, key)[at]) for at in order]
        hold_table(getattr(owner, key), layers)
        setattr(owner, key, nn.ModuleList(layers))
        for config in {id(c): c for part in module.modules() if (c := getattr(part, "config", None))}.values():
            if isinstance(config, Mapping):
                continue
            config.use_cache = False
            if config is not getattr(owner, "config", config):
                continue
            if len(orders) == 1:
                setattr(config, next((n for n in LAYERS if n in vars(config)), "num_hidden_layers"), len(order))
            if numbers := getattr(config, "attn_layer_indices", None):
                config.attn_layer_indices = [new for new, at in enumerate(order) if at in numbers]
            for field in ("layer_types", "layer_rope_theta"):
                follows = getattr(type(config), getattr(config, "attribute_map", {}).get(field, field), None)
                if getattr(follows, "fset", True) and getattr(config, field, None):
                    setattr(config, field, [getattr(config, field)[at] for at in order])
    return module


def hold_table(before: nn.ModuleList, layers: Sequence[nn.Module]) -> None:
    """The first layer of a T5, or of a WavLM, holds the table of all of them."""
    if table := getattr(getattr(before[0], "attention", None), "rel_attn_embed", None):
        for at, layer in enumerate(layers):
            setattr(layer.attention, "rel_attn_embed", table) if at == 0 else None
        return
    held = next((p for p in before[0].modules() if getattr(p, "has_relative_attention_bias", False)), None)
    if held is None or "UMT5" in type(held).__name__:
        return
    for at, layer in enumerate(layers):
        attention: Any = next(p for p in layer.modules() if hasattr(p, "has_relative_attention_bias"))
        attention.has_relative_attention_bias = at == 0
        if at == 0:
            attention.relative_attention_bias = held.relative_attention_bias


def others_of(family: str) -> Sequence[str]:
    return OTHERS.get(family, OTHER_PARTS) if ARCHITECTURES[family].parts else ()


def orders_of(module: nn.Module, kind: str, seeing: bool = False) -> dict[str, list[int]]:
    found = {}
    for name, layers in stacks(module).items():
        if seeing and not name.endswith(WORDS):
            continue
        last = len(layers) - 1
        found[name] = {"interleaved": [last, 0, last], "repeated": [0, last, last], "cut": [last]}[kind]
    return found


def merged(checkpoint: Checkpoint, orders: Orders) -> Checkpoint:
    recipe = recipe_of(orders, others_of(str(checkpoint.config["model_type"])))
    return api.merge_recipe(recipe, {"model": checkpoint})


def kinds() -> list[Any]:
    """Of each family one model in the order that is cut, repeated and interleaved at once; the rest are slow."""
    seen: set[str] = set()
    out = []
    for label in LABELS:
        family = label.partition("-")[0]
        for kind in ("interleaved", "repeated", "cut"):
            fast = kind == "interleaved" and (family not in seen or label in ALSO)
            out.append(pytest.param(label, kind, marks=() if fast else pytest.mark.slow, id=f"{label}-{kind}"))
        seen.add(family)
    return out


# Whose layers are of several kinds, beside the first of each family.
ALSO = {
    "gemma2-lm", "gemma3-lm", "gemma4-mixture-lm", "smollm3-question", "qwen2-mixture-dense", "qwen3-mixture-lm",
    "t5-lm", "beit-shared",
}  # fmt: skip


@pytest.mark.parametrize(("label", "kind"), kinds())
def test_layers_compute_what_they_did(label: str, kind: str) -> None:
    case = tiny.case(label)
    module = tiny.real(case.checkpoint)
    orders = orders_of(module, kind, bool(others_of(case.spec.family)))
    if refusal := IN_PLACE.get(label, IN_PLACE.get(case.spec.family)):
        with pytest.raises((IncompatibleError, LayoutError, OptionError, SpecError), match=refusal):
            merged(case.checkpoint, orders)
        return
    if kind in REFUSED.get(case.spec.family, ()):
        with pytest.raises(IncompatibleError, match="layer 0 of the output would not compute as layer 1"):
            merged(case.checkpoint, orders)
        return
    expected = run(reordered(module, orders), case.inputs)
    assert max(compare(case.outputs, expected).values()) > 1e-3  # the order matters
    found = run(tiny.real(merged(case.checkpoint, orders)), case.inputs)
    assert max(compare(expected, found).values()) <= case.exact


def test_numbers_of_layers_counted_from_one_are_written() -> None:
    """Published files of Kimi Linear have no list of types, but these numbers."""
    checkpoint = tiny.case("kimi-linear-lm").checkpoint
    config = {key: value for key, value in checkpoint.config.items() if not key.endswith("layer_types")}
    found = merged(checkpoint.replace(config=config), {"model.layers": [1, 0, 1]}).config
    assert found["layer_types"] == ["full_attention", "linear_attention", "full_attention"]
    assert found["linear_attn_config"] == config["linear_attn_config"] | {"full_attn_layers": [1, 3], "kda_layers": [2]}

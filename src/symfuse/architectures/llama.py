"""Llama and what has its form: Mistral, SmolLM, Yi, Granite, SmolLM3, Qwen2 and Qwen3."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import ROTARY, placed
from symfuse.errors import SpecError
from symfuse.groups import Group, Invertible, Sign
from symfuse.spec import Axis, Shift

# Queries and keys of a layer without positions.
UNTURNED = {"c f": "p", "c* f": "p*"}


def _family(c: Config, plane: Group = ROTARY, question: str = "transformer.", size: int | None = None) -> Family:
    """question: the prefix of the base model under a head for question answering. size: as of `decoder.axes`."""
    axes = decoder.axes(c, plane=plane, size=size) | decoder.gated(c)
    family = decoder.family(c, axes, decoder.PROJECTIONS | decoder.GATED | decoder.NORMS)
    return replace(family, prefix=question) if c.class_name.endswith("ForQuestionAnswering") else family


@architecture("llama", "granite", tied=False)
def llama(c: Config) -> Family:
    """What Granite multiplies by numbers commutes with all of it."""
    family = decoder.biased(_family(c), c.get("attention_bias", False))
    return family.plus(tensors=decoder.MLP_BIASES) if c.get("mlp_bias", False) else family


@architecture("smollm3")
def smollm3(c: Config) -> Family:
    """In some layers positions turn nothing: queries and keys may move by any invertible map there, and a key's bias is
    free."""
    family, layers = llama(c), _without_positions(c)
    if not layers:
        return family
    turned = {name: layout for name, layout in family.tensors.items() if layout.startswith(("(kv q c f)", "(kv c* f)"))}
    free = placed(turned, UNTURNED).items()
    exceptions = {name.format(l=layer): layout for layer in layers for name, layout in free}
    keys = [name for name in exceptions if name.endswith("k_proj.bias")]
    free_axis = {"p": Axis(2 * family.axes["f"].size, Invertible(), ("l", "kv"))}
    shifts = (*family.shifts, *(Shift(name, "p*") for name in keys))
    return replace(family.plus(tensors=exceptions, axes=free_axis), shifts=shifts)


def _without_positions(c: Config) -> list[int]:
    """The layers with a 0 in a list of all, or each of so many; SpecError for a list of another length."""
    layers, every = c.num_hidden_layers, c.size("no_rope_layer_interval", 4)
    turned = c.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(layers)])
    if len(turned) != layers:
        raise SpecError(f"config.json: no_rope_layers has {len(turned)} entries, expected one for each layer, {layers}")
    return [layer for layer in range(layers) if not turned[layer]]


@architecture("mistral", tied=False)
def mistral(c: Config) -> Family:
    return _family(c, question="model.")


@architecture("qwen2", tied=False)
def qwen2(c: Config) -> Family:
    return _family(c).plus(tensors=decoder.BIASES)


@architecture("qwen3", tied=False)
def qwen3(c: Config) -> Family:
    family = _family(c, Sign(), size=128).plus(tensors=decoder.NORMS_OF_HEADS)
    return decoder.biased(family, c.get("attention_bias", False))

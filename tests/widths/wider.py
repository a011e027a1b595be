"""Shapes wider than the tiny models', as models of which only the config is looked at; and what the real class says of
a model that has been brought into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from contract.tiny import Case, case, real
from symfuse.architectures import resolve
from symfuse.groups import Part
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance, Layout
from symfuse.verification import compare, run
from symfuse.widths import Widening

Sizes = Callable[[str, int], int]

STREAM = {
    "hidden_size", "n_embd", "dim", "d_model", "embed_dim", "out_hidden_size", "projection_size", "pooler_output_size",
    "pooler_hidden_size",
}  # fmt: skip
NEURONS = {
    "intermediate_size", "n_inner", "hidden_dim", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
    "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
}  # fmt: skip
HEADS = {
    "num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_kv_heads",
}  # fmt: skip
OTHERS = {"embedding_size", "word_embed_proj_dim", "projection_dim"}


def double(key: str, size: int) -> int:
    """All twice as wide."""
    return 2 * size if key in STREAM | NEURONS | HEADS | OTHERS else size


def neurons(key: str, size: int) -> int:
    """More neurons, no multiple of what there are."""
    return size + 12 if key in NEURONS else size


def inside(key: str, size: int) -> int:
    """As many heads, and each of them wider."""
    return 2 * size + 1 if key == "d_kv" else double(key, size) if key not in HEADS else size


def queries(key: str, size: int) -> int:
    """More query heads for each key."""
    return size * 5 // 3 if key == "num_attention_heads" else size


def half(key: str, size: int) -> int:
    """Streams and heads half as wide again (or 7/5), some more neurons."""
    if key in HEADS | STREAM:
        return size // 2 * 3 if size % 2 == 0 else size // 5 * 7
    return size + 5 if key in NEURONS else size


def like(model: Model, sizes: Sizes) -> Model:
    """A model with those sizes, of which there is no more than the config."""
    config = _resized(model.checkpoint.config, sizes)
    checkpoint = model.checkpoint.replace(config=config, name="the wide one")
    return Model(checkpoint, resolve(config, [*checkpoint]))


def _resized(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            out[key] = _resized(value, sizes)
        else:
            out[key] = sizes(key, value) if type(value) is int else value
    return out


def narrow(label: str) -> Model:
    return Model.of(case(label).checkpoint)


def framed(label: str) -> Model:
    """In the frame in which its stream may be rotated."""
    model = narrow(label)
    return canonical(model, rotatable(model.spec)) if model.spec.reads else model


def error(found: Case, wide: Model, maps: Mapping[Instance, Widening]) -> float:
    """The largest relative difference of what the real class computes with a wider model; what lives in a wider space
    goes there by the map of its axis, and normalised again if it was."""
    fields = [dict(found.inputs), dict(found.outputs)]
    for name, layout in found.spec.outputs.items():
        at, axis, part = _features(layout)
        widening = maps.get(found.spec.instance(axis, {}))
        for values in fields if widening is not None else []:
            if name in values:
                units = values[name].movedim(at, -1).unflatten(-1, (-1, found.spec.sizes[axis]))
                values[name] = _wider(widening, units, part).flatten(-2).movedim(-1, at)
    return max(compare(fields[1], run(real(wide.checkpoint), fields[0])).values())


def _features(layout: Layout) -> tuple[int, str, Part]:
    """The dimension of the features, from the end, their axis and its variance: (blocks residual), residual 1 1."""
    wide = [(at, atoms) for at, node in enumerate(layout.dims) if (atoms := Layout((node,)).atoms)[0].name != "1"]
    ((at, atoms),) = wide
    return at - len(layout.dims), atoms[-1].name, atoms[-1].variance.value


def _wider(widening: Widening, values: Tensor, part: Part) -> Tensor:
    out = widening.act(values.movedim(-1, 0), 0, part).movedim(0, -1)
    norm = values.norm(dim=-1, keepdim=True)
    if torch.allclose(norm, torch.ones_like(norm)):
        return out / out.norm(dim=-1, keepdim=True)
    return out

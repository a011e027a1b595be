"""LED: BART with Longformer's attention in its encoder."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import bart
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import attention, key_shift, projections
from symfuse.architectures.seq2seq import ENCODER_SELF
from symfuse.spec import Axis

AT = ENCODER_SELF[0]
NAMES = projections(AT, *(f"longformer_self_attn.{name}" for name in ("query", "key", "value")), "output")
# Values of both kinds are read by one output, so that they move alike.
GLOBAL = {letter: f"{name}_global" for letter, name in NAMES.items()}


@architecture("led")
def led(c: Config) -> Family:
    """A value's bias is not free in the encoder, as in Longformer."""
    family = bart.bart_like(c, 1, before=False, embedding_norm=True)
    stream = "residual" if c.tied else "encoder_residual"
    maps = attention(GLOBAL, "encoder", stream, stream, bias="qkv")
    maps = {n: text.replace("_qk", "_global_qk") for n, text in maps.items() if "output" not in n}
    kept = {name: text for name, text in family.tensors.items() if not name.startswith(AT)}
    places = {part: f"{part}_positions" for part in ("encoder", "decoder")}
    tables = {f"{part}.embed_positions.weight": family.tensors[f"{part}.embed_positions.weight"] for part in places}
    tables = {name: f"{places[name[:7]]} {text.partition(' ')[2]}" for name, text in tables.items()}
    shifts = (key_shift(NAMES["k"], "encoder_qk"), key_shift(GLOBAL["k"], "encoder_global_qk"))
    return replace(
        family.plus(
            axes={"encoder_global_qk": family.axes["encoder_qk"]}
            | {axis: Axis(c.get(f"max_{part}_position_embeddings", 1024)) for part, axis in places.items()}
        ),
        prefix="led.",
        tensors={**kept, **attention(NAMES, "encoder", stream, stream), **maps, **tables},
        shifts=(*(shift for shift in family.shifts if not shift.bias.startswith(AT)), *shifts),
    )

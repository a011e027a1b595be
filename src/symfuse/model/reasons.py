"""Why an axis moves as it does, and no further: in the declaration's own words (`Axis.why`), or by what the axis is
and which group acts on it."""

from __future__ import annotations

from symfuse.spec import Axis
from symfuse.spec.spec import anatomy

MEANING = {
    "residual": "the residual stream", "h": "heads", "kv": "key/value heads", "q": "query heads that share a key",
    "qk": "queries and keys inside a head", "c": "a rotary plane of queries and keys",
    "p": "what positions do not turn of queries and keys", "v": "values inside a head", "ffn": "neurons",
    "f": "rotary planes of a head", "pool": "units of the pooler", "embedding": "units of an embedding",
    "lm": "units of the language model's head", "e": "experts", "vocab": "tokens", "positions": "places",
    "types": "segments", "labels": "classes", "stem": "channels between two convolutions", "buckets": "distances",
    "mels": "pitches", "times": "moments",
    "blocks": "blocks of the stream", "l": "layers", "projector": "units before the classes", "books": "books of codes",
    "entries": "codes of a book", "code": "units of a code", "projected": "the space in which codes are compared",
}  # fmt: skip

# By the name of the group, for any axis.
BY_GROUP = {
    "permutation": "elementwise or equal treatment: may be reordered",
    "signed": "odd non-linearity, or RMSNorm: may be reordered and flipped",
    "monomial": "homogeneous non-linearity: may be reordered and rescaled",
    "invertible": "linear on both sides: a map and its inverse cancel; usually matched by rotation and scale",
    "sign": "queries and keys are normalised: of a rotary plane the sign is free",
    "phase": "commutes with the turns of rotary positions",
    "rotary": "commutes with the turns of rotary positions",
    "signed-monomial": "gated, so linear in one factor: may be reordered, flipped and rescaled",
    "orthogonal": "nothing acts on single units: may be rotated",
    "centred": "LayerNorm without gains: may be rotated if the mean stays",
}
# By axis and name of the group (none: not moved), where more can be said.
BY_AXIS = {
    ("residual", "permutation"): "LayerNorm has a gain for each unit, and a mean: reordered only",
    ("residual", "signed"): "RMSNorm has a gain for each unit: reordered and flipped only",
    ("ffn", "permutation"): "a non-linearity that acts on each neuron: reordered only",
    ("f", None): "each plane turns at a speed of its own",
    ("vocab", None): "rows belong to tokens: carried; the tokenizer says which is which",
    ("positions", None): "rows belong to places: carried",
    ("types", None): "rows belong to kinds of segments: carried",
    ("labels", None): "rows belong to classes: carried",
}
CARRIED = "its order has a meaning: never moved"
ONCE_FOLDED = {"layer": "centred", "rms": "orthogonal", "rms+1": "orthogonal"}


def reason(name: str, axis: Axis) -> str:
    """Why no larger group than its own acts on an axis; for one that none acts on, why it stays."""
    group = axis.group.name if axis.group is not None else None
    return axis.why or BY_AXIS.get((anatomy(name), group)) or (CARRIED if group is None else BY_GROUP.get(group, ""))

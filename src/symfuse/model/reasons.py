"""Why no larger group may act on an axis: as its declaration says (`Axis.why`), or by the meaning of the axis and the
group that acts on it."""

from __future__ import annotations

from symfuse.spec import Axis
from symfuse.spec.spec import anatomy

MEANING = {
    "residual": "the residual stream", "h": "heads", "kv": "key/value heads", "q": "query heads that share a key",
    "qk": "queries and keys inside a head", "c": "a rotary plane of queries and keys",
    "p": "the part of queries and keys without rotary positions", "v": "values inside a head", "ffn": "neurons",
    "f": "rotary planes of a head", "pool": "units of the pooler", "embedding": "units of an embedding",
    "n": "units of queries and keys without rotary positions, normalised", "s": "signs of these",
    "m": "blocks of heads", "g": "groups of experts", "narrow": "units of a space between the stream and experts",
    "scanned": "channels of a state space", "states": "states of a state space", "rank": "units before the step sizes",
    "conv": "channels of a short convolution", "lambda": "units of what gives the weight of the heads subtracted",
    "latent": "units of a latent of queries, or of keys and values", "inner": "channels inside a block",
    "group": "groups of these",
    "lm": "units of the language model's head", "e": "experts", "vocab": "tokens", "positions": "input positions",
    "types": "segments", "labels": "classes", "stem": "channels between two convolutions", "inputs": "inputs",
    "outputs": "outputs",
    "channels": "channels of an image", "buckets": "distances",
    "mels": "mel frequencies", "times": "time steps",
    "merged": "units of patches that are merged", "patches": "patches that are merged",
    "blocks": "blocks of the stream", "l": "layers", "projector": "units before the classes", "books": "books of codes",
    "entries": "codes of a book", "code": "units of a code", "projected": "the space in which codes are compared",
}  # fmt: skip

# By the name of the group, for any axis.
BY_GROUP = {
    "permutation": "all units are treated alike, one by one: may be reordered",
    "signed": "odd non-linearity, or RMSNorm: may be reordered and flipped",
    "monomial": "homogeneous non-linearity: may be reordered and rescaled",
    "invertible": "linear on both sides, so that a map and its inverse cancel; usually matched by rotation and scale",
    "sign": "queries and keys are normalised: each rotary plane may only change sign",
    "phase": "commutes with the rotations of rotary positions",
    "rotary": "commutes with the rotations of rotary positions",
    "signed-monomial": "gated, so linear in one factor: may be reordered, flipped and rescaled",
    "orthogonal": "no operation acts on single units: may be rotated",
    "centred": "LayerNorm without gains: may be rotated while the mean is kept",
}
# By axis and name of the group (None: no group acts), where there is a more specific reason.
BY_AXIS = {
    ("residual", "permutation"): "LayerNorm has a gain for each unit, and subtracts the mean: reordered only",
    ("residual", "signed"): "RMSNorm has a gain for each unit: reordered and flipped only",
    ("c", "phase"): "normalised without gains behind their positions: each rotary plane may be turned, not rescaled",
    ("p", "signed"): "normalised with gains for each unit: reordered and flipped only",
    ("rank", "signed"): "normalised with gains for each unit: reordered and flipped only",
    ("rank", "orthogonal"): "normalised without gains: may be rotated",
    ("states", "signed"): "what writes and what reads states is normalised: reordered and flipped only",
    ("ffn", "permutation"): "a non-linearity that acts on each neuron: reordered only",
    ("f", None): "each plane rotates at its own frequency",
    ("vocab", None): "one row per token, in the tokenizer's order: fixed",
    ("positions", None): "one row per position: fixed",
    ("types", None): "one row per segment type: fixed",
    ("labels", None): "one row per class: fixed",
}
FIXED = "the order of its units has a meaning: fixed"
ONCE_FOLDED = {"layer": "centred", "layer+1": "centred", "rms": "orthogonal", "rms+1": "orthogonal"}


def reason(name: str, axis: Axis) -> str:
    """Why no larger group than its own may act on an axis; if none may, why the axis is fixed."""
    group = axis.group.name if axis.group is not None else None
    return axis.why or BY_AXIS.get((anatomy(name), group)) or (FIXED if group is None else BY_GROUP.get(group, ""))

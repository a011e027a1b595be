"""What blocks of attention and feed-forward have in common, whatever their names: axes, free translations."""

from __future__ import annotations

from collections.abc import Mapping

from symfuse.architectures.feed_forward import neurons
from symfuse.errors import SpecError
from symfuse.groups import Invertible, Permutation
from symfuse.spec import Axis, Shift


def block_axes(
    layers: int, hidden: int, heads: int, ffn: int, activation: str, head: int | None = None
) -> dict[str, Axis]:
    """The axes of a stack of such blocks. head: the size of one head, default hidden / heads.

    residual: a LayerNorm whose gain is kept allows no more than permutations, before or after the block. SpecError
    if heads of that size do not exist.
    """
    if head is None and hidden % heads:
        raise SpecError(f"config.json: the hidden size {hidden} is not a multiple of the number of heads, {heads}")
    head = hidden // heads if head is None else head
    return {
        "l": Axis(layers),
        "residual": Axis(hidden, Permutation()),
        "h": Axis(heads, Permutation(), per=("l",)),
        "qk": Axis(head, Invertible(), per=("l", "h")),
        "v": Axis(head, Invertible(), per=("l", "h")),
        "ffn": Axis(ffn, neurons(activation), per=("l",)),
    }


def key_shift(key: str) -> Shift:
    """A key bias is free: it adds the same number to every score of a query, which the softmax ignores."""
    return Shift(key + ".bias", "qk*")


def value_shift(value: str, output: str) -> Shift:
    """A value bias may move through the output projection into its bias: softmax rows sum to one."""
    return Shift(value + ".bias", "v", output + ".weight", output + ".bias")


def renamed(tensors: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The same layouts under other names: each old piece of a name is replaced, in the order of `names`."""
    out = {}
    for name, layout in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        out[name] = layout
    return out

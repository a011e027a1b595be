"""Differential attention: each head of the second half of heads is subtracted from one of the first half. Both have the
values of two key/value heads, one of each half, side by side, which a norm without gains follows."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.errors import SpecError
from symfuse.groups import Invertible, Orthogonal
from symfuse.spec import Axis

AT = decoder.ATTENTION
HALVES = {"kv q c f": "m kv q c f", "kv c* f": "m kv c* f", "(kv v)": "(m kv v)", "kv q v*": "kv q m v*"}
LAMBDAS = {"1": "first_lambda", "2": "second_lambda"}
SUBTRACTED = "the heads of the second half are subtracted from those of the first: fixed"
PAIR = "pairs of key/value heads, one of each half: may be reordered"
NORMED = "behind a norm without gains over the values of two heads: each may be rotated"
PRODUCT = "read by one inner product: a map and its inverse cancel"


@architecture("diffllama", tied=False)
def diffllama(c: Config) -> Family:
    axes = decoder.axes(c)
    groups, size = axes["kv"].size, axes["v"].size
    if groups % 2:
        raise SpecError(f"config.json: num_key_value_heads, {groups}, is odd; one half of heads is subtracted")
    halves = ("l", "m", "kv")
    axes |= {
        "m": Axis(2, None, (), SUBTRACTED),
        "kv": Axis(groups // 2, axes["kv"].group, ("l",), PAIR),
        "c": Axis(2, axes["c"].group, (*halves, "f")),
        "v": Axis(size, Orthogonal(), halves, NORMED),
        **{axis: Axis(size, Invertible(), ("l",), PRODUCT) for axis in LAMBDAS.values()},
    }
    lambdas = {f"{AT}lambda_{at}{one}": axis + "*" * (at == "k") for at in "qk" for one, axis in LAMBDAS.items()}
    tensors = decoder.PROJECTIONS | decoder.GATED | decoder.NORMS | lambdas
    family = decoder.family(c, axes | decoder.gated(c), tensors)
    if c.get("attention_bias", False):
        family = family.plus(tensors=decoder.BIASES | decoder.OUTPUT_BIAS)
    return decoder.rearranged(family, HALVES)

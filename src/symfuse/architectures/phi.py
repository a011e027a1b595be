"""Phi 1 and 2, with both blocks side by side behind one norm, and Persimmon, with one fused projection: LayerNorms,
biases everywhere, a part of each head turned, no gates. Queries and keys may be normalised, the same in all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import (
    block_axes,
    feed_forward,
    linear,
    norm,
    norms,
    turned,
    value_shift,
    with_names,
)
from symfuse.groups import Permutation, Sign
from symfuse.spec import Axis, Shift

PHI = {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"}
VALUE = decoder.ATTENTION + "v_proj"
QKV, DENSE = decoder.ATTENTION + "query_key_value", decoder.ATTENTION + "dense"
KEY_NORM = Shift(decoder.ATTENTION + "k_layernorm.bias", "n")  # added to keys where no position turns them: free
UP, DOWN = decoder.MLP + "dense_h_to_4h", decoder.MLP + "dense_4h_to_h"
BEFORE, BETWEEN = decoder.LAYER + "input_layernorm", decoder.LAYER + "post_attention_layernorm"
LAST = "final_layernorm"
SAME = "a LayerNorm of queries and keys with gains and biases that all heads share: one order for all, and one sign"


def _normed(axes: Mapping[str, Axis]) -> tuple[dict[str, Axis], dict[str, str], dict[str, str]]:
    """Where queries and keys are normalised: the axes, the places in a head, and the gains and biases."""
    turned, rest = 2 * axes["f"].size, axes["p"].size if "p" in axes else 0
    new = {"s": Axis(1, Sign(), ("l",), SAME)} | ({"n": Axis(rest, Permutation(), ("l",), SAME)} if rest else {})
    units = f"({turned} + n)" if rest else f"{turned}"
    places = dict.fromkeys(("(c f + p)", "(c* f + p*)") if rest else ("c f", "c* f"), f"s {units}")
    norms = {decoder.ATTENTION + f"{one}_layernorm.weight": units for one in "qk"}
    norms |= {decoder.ATTENTION + f"{one}_layernorm.bias": f"(s {units})" for one in "qk"}
    return {name: axis for name, axis in axes.items() if name not in ("c", "f", "p")} | new, places, norms


@architecture("phi", tied=False)
def phi(c: Config) -> Family:
    axes = decoder.axes(c, residual=Permutation(), share=0.5) | decoder.ungated(c, c.get("hidden_act", "gelu_new"))
    tensors = decoder.PROJECTIONS | decoder.PLAIN | decoder.PLAIN_BIASES | norm(BEFORE) | norm(LAST)
    up, last = decoder.MLP + "up_proj.weight", decoder.READS["norm.weight"]
    reads = {BEFORE + ".weight": (*decoder.READS[decoder.BEFORE_ATTENTION], up), LAST + ".weight": last}
    family = decoder.biased(decoder.family(c, axes, tensors, reads, "layer"), True)
    family = with_names(decoder.with_head_bias(decoder.partly(family)), PHI)
    if not c.get("qk_layernorm", False):
        return family
    axes, places, norms = _normed(family.axes)
    shifts = (value_shift(VALUE, DENSE), *([KEY_NORM] if "n" in axes else []))
    return replace(decoder.rearranged(family, places), axes=axes, shifts=shifts).plus(tensors=norms)


@architecture("persimmon", tied=False)
def persimmon(c: Config) -> Family:
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, c.get("hidden_act", "relu2")
    )
    axes = turned(axes, int(axes["qk"].size * c.rotary_share(0.5)))
    axes |= {"vocab": Axis(c.vocab_size), "labels": Axis(c.labels)} | decoder.ungated(c, c.get("hidden_act", "relu2"))
    query, key = ("(c f + p)", "(c* f + p*)") if "p" in axes else ("c f", "c* f")
    shifts: tuple[Shift, ...] = (value_shift(QKV, DENSE),)
    of_heads: dict[str, str] = {}
    if c.get("qk_layernorm", True):
        axes, places, of_heads = _normed(axes)
        query = key = f"({places[query]})"
        shifts = (*shifts, *([KEY_NORM] if "n" in axes else []))
    elif "p" in axes:
        shifts = (Shift(QKV + ".bias", "p*"), *shifts)
    tensors = {
        **linear(QKV, f"(h ({query} + {key} + v))"),
        **linear(DENSE, "residual", "(h v*)"),
        **feed_forward(UP, DOWN),
        **norms(BEFORE, BETWEEN, LAST),
        **of_heads,
    }
    reads: dict[str, tuple[str, ...]] = {BEFORE + ".weight": (QKV + ".weight",), BETWEEN + ".weight": (UP + ".weight",)}
    reads[LAST + ".weight"] = decoder.READS["norm.weight"]
    return replace(decoder.family(c, axes, tensors, reads, "layer"), shifts=shifts)

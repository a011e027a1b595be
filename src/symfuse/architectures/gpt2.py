"""GPT-2: a pre-norm decoder with learned positions; projections stored transposed ([in, out]) and fused. StarCoder 1
(`gpt_bigcode`): the same, in most models with one key and value for all heads. GPT-Neo: projections apart, without
biases but for that of the output, and windows in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import (
    HEADS,
    OUTPUTS,
    READERS,
    block_axes,
    feed_forward,
    linear,
    norm,
    projections,
    value_shift,
)
from symfuse.groups import Invertible, Permutation
from symfuse.spec import Axis, Shift

LAYER = "h.{l}."
ATTENTION, OUT = LAYER + "attn.c_attn", LAYER + "attn.c_proj"
UP, DOWN = LAYER + "mlp.c_fc", LAYER + "mlp.c_proj"
SHIFTS = (Shift(ATTENTION + ".bias", "qk*"), value_shift(ATTENTION, OUT))
NAMES = projections(LAYER + "attn.attention.", "q_proj", "k_proj", "v_proj", "out_proj")  # of GPT-Neo


def transposed(name: str, out: str, read: str) -> dict[str, str]:
    """A linear map that is stored [in, out]."""
    return {name + ".weight": f"{read} {out}", name + ".bias": out}


def _axes(c: Config, activation: str) -> dict[str, Axis]:
    """activation: where a config has none."""
    ffn, act = c.get("n_inner", 4 * c.n_embd), c.get("activation_function", activation)
    return block_axes(c.n_layer, c.n_embd, c.n_head, ffn, act)


def _family(
    c: Config, axes: Mapping[str, Axis], positions: int, heads: Mapping[str, str], ffn: Mapping[str, str], at: str
) -> Family:
    """heads, ffn: the tensors of attention and feed-forward. at: what the names of buffers begin with."""
    return Family(
        axes={**axes, "vocab": Axis(c.vocab_size), "positions": Axis(positions), "labels": Axis(c.labels)},
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            "wpe.weight": "positions residual",
            **norm(LAYER + "ln_1"),
            **heads,
            **norm(LAYER + "ln_2"),
            **ffn,
            **norm("ln_f"),
        },
        heads=HEADS,
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        buffers=(f"*.{at}.bias", f"*.{at}.masked_bias"),
        outputs=OUTPUTS,
        reads={
            LAYER + "ln_1.weight": tuple(name for name, layout in heads.items() if "residual*" in layout),
            LAYER + "ln_2.weight": (UP + ".weight",),
            "ln_f.weight": READERS,
        },
    )


@architecture("gpt2")
def gpt2(c: Config) -> Family:
    heads = transposed(ATTENTION, "(h qk + h qk* + h v)", "residual*") | transposed(OUT, "residual", "(h v*)")
    ffn = transposed(UP, "ffn", "residual*") | transposed(DOWN, "residual", "ffn*")
    family = _family(c, _axes(c, "gelu_new"), c.n_positions, heads, ffn, "attn")
    language = Head(("LMHeadModel",), HEADS["causal LM"].tensors)
    return replace(family.plus(heads={"causal LM": language}), shifts=SHIFTS)


@architecture("gpt_bigcode")
def gpt_bigcode(c: Config) -> Family:
    c.refuse("add_cross_attention", "its layers attend to an encoder too")
    axes, fused, out = _axes(c, "gelu_pytorch_tanh"), "(h (qk + qk* + v))", "(h v*)"
    heads = {name: head for name, head in HEADS.items() if name != "question"}
    shared = c.get("multi_query", True)
    if shared:
        axes |= {name: Axis(axes[name].size, Invertible(), ("l",)) for name in ("qk", "v")}
        fused, out = "(q qk + qk* + v)", "(q v*)"
    attention = linear(ATTENTION, fused) | linear(OUT, "residual", out)
    family = _family(c, axes, c.n_positions, attention, feed_forward(UP, DOWN), "attn")
    if shared:
        rest = {name: axis for name, axis in family.axes.items() if name != "h"}
        family = replace(family, axes=rest | {"q": replace(axes["h"], group=Permutation())})
    return replace(family, heads=heads, shifts=SHIFTS, buffers=(*family.buffers, "bias"))


@architecture("gpt_neo")
def gpt_neo(c: Config) -> Family:
    ffn, act = c.get("intermediate_size", 4 * c.hidden_size), c.get("activation_function", "gelu_new")
    axes = block_axes(c.num_layers, c.hidden_size, c.num_heads, ffn, act)
    maps = feed_forward(UP, DOWN)
    return _family(c, axes, c.max_position_embeddings, NAMES.tensors(bias="o"), maps, "attention")

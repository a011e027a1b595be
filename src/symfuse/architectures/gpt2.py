"""GPT-2: pre-norm decoder; projections stored transposed ([in, out]) and fused."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import HEADS, OUTPUTS, READERS, block_axes, norm, value_shift
from symfuse.spec import Axis, Shift

LAYER = "h.{l}."
ATTENTION, OUT = LAYER + "attn.c_attn", LAYER + "attn.c_proj"


def transposed(name: str, out: str, read: str) -> dict[str, str]:
    """A linear map that is stored [in, out]."""
    return {name + ".weight": f"{read} {out}", name + ".bias": out}


@architecture("gpt2")
def gpt2(c: Config) -> Family:
    return family(c, "gelu_new")


def family(c: Config, activation: str) -> Family:
    """activation: where a config has none."""
    ffn, act = c.get("n_inner", 4 * c.n_embd), c.get("activation_function", activation)
    return Family(
        axes=block_axes(c.n_layer, c.n_embd, c.n_head, ffn, act)
        | {"vocab": Axis(c.vocab_size), "positions": Axis(c.n_positions), "labels": Axis(c.labels)},
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            "wpe.weight": "positions residual",
            **norm(LAYER + "ln_1"),
            **transposed(ATTENTION, "(h qk + h qk* + h v)", "residual*"),
            **transposed(OUT, "residual", "(h v*)"),
            **norm(LAYER + "ln_2"),
            **transposed(LAYER + "mlp.c_fc", "ffn", "residual*"),
            **transposed(LAYER + "mlp.c_proj", "residual", "ffn*"),
            **norm("ln_f"),
        },
        heads=HEADS | {"causal LM": Head(("LMHeadModel",), HEADS["causal LM"].tensors)},
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        buffers=("*.attn.bias", "*.attn.masked_bias"),
        shifts=(Shift(ATTENTION + ".bias", "qk*"), value_shift(ATTENTION, OUT)),
        outputs=OUTPUTS,
        reads={
            LAYER + "ln_1.weight": (ATTENTION + ".weight",),
            LAYER + "ln_2.weight": (LAYER + "mlp.c_fc.weight",),
            "ln_f.weight": READERS,
        },
    )

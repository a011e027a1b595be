"""GPT-J: rotary planes of neighbours, (2i, 2i + 1), in a part of each head; one norm for both blocks."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import HEADS, OUTPUTS, READERS, block_axes, linear, norm, rotary_axes
from symfuse.spec import Axis

LAYER = "h.{l}."
ATTENTION = LAYER + "attn."
UP, DOWN = LAYER + "mlp.fc_in", LAYER + "mlp.fc_out"


@architecture("gptj", tied=False)
def gptj(c: Config) -> Family:
    ffn, act = c.get("n_inner", 4 * c.n_embd), c.get("activation_function", "gelu_new")
    axes = block_axes(c.n_layer, c.n_embd, c.n_head, ffn, act)
    axes |= rotary_axes(axes.pop("qk").size, c.size("rotary_dim", 64), ("l", "h"))
    axes |= {"vocab": Axis(c.vocab_size), "labels": Axis(c.labels)}
    query, key = ("(h (f c + p))", "(h (f c* + p*))") if "p" in axes else ("(h f c)", "(h f c*)")
    language = linear("lm_head", "vocab")
    return Family(
        axes=axes,
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            **norm(LAYER + "ln_1"),
            **linear(ATTENTION + "q_proj", query, bias=False),
            **linear(ATTENTION + "k_proj", key, bias=False),
            **linear(ATTENTION + "v_proj", "(h v)", bias=False),
            **linear(ATTENTION + "out_proj", "residual", "(h v*)", bias=False),
            **linear(UP, "ffn"),
            **linear(DOWN, "residual", "ffn*"),
            **norm("ln_f"),
        },
        heads={name: HEADS[name] for name in ("sequence", "question")}
        | {"causal LM": Head(("ForCausalLM",), language)},
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        buffers=("*.attn.bias", "*.attn.masked_bias", "*embed_positions"),
        outputs=OUTPUTS,
        reads={
            LAYER + "ln_1.weight": (*(f"{ATTENTION}{name}_proj.weight" for name in "qkv"), UP + ".weight"),
            "ln_f.weight": READERS,
        },
    )

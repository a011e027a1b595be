"""GPT-2: pre-norm decoder; projections stored transposed ([in, out]) and fused."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes
from symfuse.spec import Axis, Shift

LAYER = "h.{l}."
ATTENTION = LAYER + "attn."


@architecture("gpt2")
def gpt2(c: Config) -> Family:
    ffn, act = c.get("n_inner", 4 * c.n_embd), c.get("activation_function", "gelu_new")
    return Family(
        axes=block_axes(c.n_layer, c.n_embd, c.n_head, ffn, act)
        | {"vocab": Axis(c.vocab_size), "positions": Axis(c.n_positions), "labels": Axis(c.labels)},
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            "wpe.weight": "positions residual",
            LAYER + "ln_1.weight": "|residual|",
            LAYER + "ln_1.bias": "residual",
            ATTENTION + "c_attn.weight": "residual* (h qk + h qk* + h v)",
            ATTENTION + "c_attn.bias": "(h qk + h qk* + h v)",
            ATTENTION + "c_proj.weight": "(h v*) residual",
            ATTENTION + "c_proj.bias": "residual",
            LAYER + "ln_2.weight": "|residual|",
            LAYER + "ln_2.bias": "residual",
            LAYER + "mlp.c_fc.weight": "residual* ffn",
            LAYER + "mlp.c_fc.bias": "ffn",
            LAYER + "mlp.c_proj.weight": "ffn* residual",
            LAYER + "mlp.c_proj.bias": "residual",
            "ln_f.weight": "|residual|",
            "ln_f.bias": "residual",
        },
        heads={
            "causal LM": Head(("LMHeadModel",), {"lm_head.weight": "vocab residual*"}),
            "sequence": Head(("ForSequenceClassification",), {"score.weight": "labels residual*"}),
            "token": Head(
                ("ForTokenClassification",),
                {"classifier.weight": "labels residual*", "classifier.bias": "labels"},
            ),
            "question": Head(("ForQuestionAnswering",), {"qa_outputs.weight": "2 residual*", "qa_outputs.bias": "2"}),
        },
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        buffers=("*.attn.bias", "*.attn.masked_bias"),
        shifts=(
            Shift(ATTENTION + "c_attn.bias", "qk*"),
            Shift(ATTENTION + "c_attn.bias", "v", ATTENTION + "c_proj.weight", ATTENTION + "c_proj.bias"),
        ),
        outputs={"last_hidden_state": "residual"},
        reads={
            LAYER + "ln_1.weight": (ATTENTION + "c_attn.weight",),
            LAYER + "ln_2.weight": (LAYER + "mlp.c_fc.weight",),
            "ln_f.weight": (
                "last_hidden_state",
                "lm_head.weight",
                "score.weight",
                "classifier.weight",
                "qa_outputs.weight",
            ),
        },
    )

"""XLNet: a post-norm encoder whose queries meet keys of words, of relative positions and of segments, each with a bias
of its own; heads stand in dimensions of their own."""

from __future__ import annotations

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.bert import QUESTION, TOKEN
from symfuse.architectures.blocks import block_axes, feed_forward, linear, neurons, norm, post_norm
from symfuse.spec import Axis

LAYER = "layer.{l}."
ATTENTION, FEED = LAYER + "rel_attn.", LAYER + "ff."
WORDS, SUMMARY = "word_embedding.weight", "sequence_summary.summary"
LAST = ("lm_loss", SUMMARY, "logits_proj", "classifier", "qa_outputs")


def _attention(c: Config) -> dict[str, str]:
    """What is read of positions are sines, which are no part of the stream."""
    ends = {
        "q": "residual* h qk", "k": "residual* h qk*", "v": "residual* h v", "o": "residual h v*",
        "r": f"{c.d_model} h qk*", "seg_embed": "2 h qk*",
    }  # fmt: skip
    ends |= dict.fromkeys(("r_r_bias", "r_s_bias", "r_w_bias"), "h qk")
    return {ATTENTION + name: text for name, text in ends.items()} | norm(ATTENTION + "layer_norm")


@architecture("xlnet")
def xlnet(c: Config) -> Family:
    projected = c.get("summary_use_proj", True)
    summary = linear(SUMMARY, "summary") if projected else {}
    space = "summary*" if projected else "residual*"
    norms = (ATTENTION + "layer_norm", FEED + "layer_norm")
    return Family(
        axes=block_axes(c.n_layer, c.d_model, c.n_head, c.d_inner, c.get("ff_activation", "gelu"))
        | {
            "vocab": Axis(c.vocab_size),
            "summary": Axis(c.d_model, neurons(c.get("summary_activation", "tanh") or "linear")),
            "labels": Axis(c.labels),
        },
        prefix="transformer.",
        tensors={
            WORDS: "vocab residual",
            "mask_emb": "1 1 residual",
            **_attention(c),
            **feed_forward(FEED + "layer_1", FEED + "layer_2"),
            **norm(FEED + "layer_norm"),
        },
        heads={
            "language model": Head(("LMHeadModel",), linear("lm_loss", "vocab")),
            "sequence": Head(("ForSequenceClassification",), summary | linear("logits_proj", "labels", space)),
            "choice": Head(("ForMultipleChoice",), summary | linear("logits_proj", "1", space)),
            "token": TOKEN,
            "question": Head((*QUESTION.classes, "ForQuestionAnsweringSimple"), QUESTION.tensors),
        },
        tied={"lm_loss.weight": WORDS} if c.tied else {},
        outputs={"last_hidden_state": "residual"},
        gauges=post_norm(c.n_layer, [], FEED + "layer_1.", norms, None, [f"{name}." for name in LAST]),
    )

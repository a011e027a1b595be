"""ModernBERT: a pre-norm encoder with rotary positions and gated neurons, both fused. Its first attention reads the
normalised embeddings as they are, so that the stream cannot be rotated: the gain of that norm is of single units."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import OUTPUTS, block_axes, linear, neurons, norm, rotary_axes, value_shift
from symfuse.groups import Permutation
from symfuse.spec import Axis

LAYER = "layers.{l}."
QKV, OUT = LAYER + "attn.Wqkv", LAYER + "attn.Wo"
UP, DOWN = LAYER + "mlp.Wi", LAYER + "mlp.Wo"
EMBEDDING = "embeddings.tok_embeddings.weight"


def _transform(c: Config, space: str) -> dict[str, str]:
    """A dense layer and its norm, before the decoder or the classifier."""
    dense = linear("head.dense", space, bias=c.get("classifier_bias", False))
    return dense | norm("head.norm", space, bias=c.get("norm_bias", False))


def _classifier(c: Config, classes: tuple[str, ...], labels: str) -> Head:
    return Head(classes, _transform(c, "lm") | linear("classifier", labels, "lm*"))


@architecture("modernbert", float32=("ModernBertAttention",))
def modernbert(c: Config) -> Family:
    bias, between = c.get("attention_bias", False), c.get("mlp_bias", False)
    act = c.get("hidden_activation", "gelu")
    neurons(c.get("classifier_activation", "gelu"))  # whether the units of the head may be reordered
    axes = block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act)
    head = axes.pop("qk").size
    axes |= decoder.gated(c, act) | rotary_axes(head, head, ("l", "h"))
    axes |= {"vocab": Axis(c.vocab_size), "labels": Axis(c.labels), "lm": Axis(c.hidden_size, Permutation())}
    # With a tied decoder the transform writes into the residual space of the embeddings; else into its own.
    lm = "residual" if c.tied else "lm"
    norms = ("embeddings.norm", LAYER + "attn_norm", LAYER + "mlp_norm", "final_norm")
    gains = {n: layout for at in norms for n, layout in norm(at, bias=c.get("norm_bias", False)).items()}
    first = {n.format(l=0): "" for n in gains if n.startswith(LAYER + "attn_norm")}  # which is the identity
    return Family(
        axes=axes,
        prefix="model.",
        tensors={
            EMBEDDING: "vocab residual",
            **gains,
            **first,
            **linear(QKV, "(h c f + h c* f + h v)", bias=bias),
            **linear(OUT, "residual", "(h v*)", bias=bias),
            **linear(UP, "(|ffn| + ffn)", bias=between),
            **linear(DOWN, "residual", "ffn*", bias=between),
        },
        heads={
            "masked LM": Head(
                ("ForMaskedLM",),
                _transform(c, lm) | linear("decoder", "vocab", f"{lm}*", bias=c.get("decoder_bias", True)),
            ),
            "classifier": _classifier(
                c, ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"), "labels"
            ),
            "choice": _classifier(c, ("ForMultipleChoice",), "1"),
        },
        tied={"decoder.weight": EMBEDDING} if c.tied else {},
        buffers=("*rotary_emb.*inv_freq",),
        shifts=(value_shift(QKV, OUT),) if bias else (),
        outputs=OUTPUTS,
    )

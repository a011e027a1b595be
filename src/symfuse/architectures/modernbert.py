"""NomicBERT: BERT's post-norm blocks with rotary positions, fused queries, keys and values, and gated neurons.
ModernBERT: a pre-norm encoder with the same, gate and up fused too. Its first attention reads the normalised embeddings
as they are, so that the stream cannot be rotated: the gain of that norm is of single units. Its decoder (Ettin) has
queries, keys and values apart."""

from __future__ import annotations

from collections.abc import Mapping

from symfuse.architectures import bert, decoder
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import OUTPUTS, absent, block_axes, linear, neurons, norm, turned, value_shift
from symfuse.groups import Permutation, Signed
from symfuse.spec import Axis, Shift

LAYER = "layers.{l}."
ATTENTION = LAYER + "attn."
QKV, OUT = LAYER + "attn.Wqkv", LAYER + "attn.Wo"
UP, DOWN = LAYER + "mlp.Wi", LAYER + "mlp.Wo"
EMBEDDING = "embeddings.tok_embeddings.weight"


def _transform(c: Config, space: str, at: str = "head") -> dict[str, str]:
    """A dense layer and its norm, before the decoder or the classifier."""
    dense = linear(f"{at}.dense", space, bias=c.get("classifier_bias", False))
    return dense | norm(f"{at}.norm", space, bias=c.get("norm_bias", False))


def _classifier(c: Config, classes: tuple[str, ...], labels: str, *, bias: bool = True) -> Head:
    return Head(classes, _transform(c, "lm") | linear("classifier", labels, "lm*", bias=bias))


def _language(c: Config, classes: tuple[str, ...], at: str = "head") -> Head:
    """With a tied decoder the transform writes into the residual space of the embeddings; else into its own."""
    lm = "residual" if c.tied else "lm"
    decode = linear("decoder", "vocab", f"{lm}*", bias=c.get("decoder_bias", True))
    return Head(classes, _transform(c, lm, at) | decode)


@architecture("modernbert")
def modernbert(c: Config) -> Family:
    bias = c.get("attention_bias", False)
    fused = linear(QKV, "(h c f + h c* f + h v)", bias=bias) | linear(OUT, "residual", "(h v*)", bias=bias)
    heads = {
        "masked LM": _language(c, ("ForMaskedLM",)),
        "classifier": _classifier(
            c, ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"), "labels"
        ),
        "choice": _classifier(c, ("ForMultipleChoice",), "1"),
    }
    return _family(c, fused, heads, (value_shift(QKV, OUT),) if bias else ())


@architecture("modernbert-decoder")
def modernbert_decoder(c: Config) -> Family:
    bias = c.get("attention_bias", False)
    places = {"q": "(h c f)", "k": "(h c* f)", "v": "(h v)"}
    apart = {n: t for at, out in places.items() for n, t in linear(f"{ATTENTION}{at}_proj", out, bias=bias).items()}
    heads = {
        "causal LM": _language(c, ("ForCausalLM",), "lm_head"),
        "sequence": _classifier(c, ("ForSequenceClassification",), "labels", bias=c.get("classifier_bias", False)),
    }
    shifts = (value_shift(ATTENTION + "v_proj", OUT),) if bias else ()
    return _family(c, apart | linear(OUT, "residual", "(h v*)", bias=bias), heads, shifts)


def _family(c: Config, attention: Mapping[str, str], heads: Mapping[str, Head], shifts: tuple[Shift, ...]) -> Family:
    between, act = c.get("mlp_bias", False), c.get("hidden_activation", "gelu")
    neurons(c.get("classifier_activation", "gelu"))  # whether the units of the head may be reordered
    axes = block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act)
    axes = turned(axes | decoder.gated(c, act))
    axes |= {"vocab": Axis(c.vocab_size), "labels": Axis(c.labels), "lm": Axis(c.hidden_size, Permutation())}
    norms = ("embeddings.norm", LAYER + "attn_norm", LAYER + "mlp_norm", "final_norm")
    gains = {n: layout for at in norms for n, layout in norm(at, bias=c.get("norm_bias", False)).items()}
    first = absent([n for n in gains if n.startswith(LAYER + "attn_norm")], [0])  # which is the identity
    return Family(
        axes=axes,
        prefix="model.",
        tensors={
            EMBEDDING: "vocab residual",
            **gains,
            **first,
            **attention,
            **linear(UP, "(|ffn| + ffn)", bias=between),
            **linear(DOWN, "residual", "ffn*", bias=between),
        },
        heads=heads,
        tied={"decoder.weight": EMBEDDING} if c.tied else {},
        buffers=("*rotary_emb.*inv_freq",),
        shifts=shifts,
        outputs=OUTPUTS,
    )


# Of NomicBERT, as they are on disk; in memory the projections are apart.
BLOCK = "encoder.layers.{l}."


@architecture("nomic_bert")
def nomic_bert(c: Config) -> Family:
    act = c.get("hidden_act", "silu")
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act, c.get("head_dim")
    )
    axes = turned(axes | decoder.gated(c, act))
    axes |= {
        "vocab": Axis(c.vocab_size),
        "types": Axis(c.get("type_vocab_size", 2)),
        "pool": Axis(c.hidden_size, Signed()),  # tanh is odd
        "lm": Axis(c.hidden_size, Permutation()),
        "labels": Axis(c.labels),
    }
    return Family(
        axes=axes,
        prefix="nomic_bert.",
        tensors={
            bert.WORDS: "vocab residual",
            "embeddings.token_type_embeddings.weight": "types residual",
            **norm("emb_ln"),
            **linear(BLOCK + "attn.Wqkv", "(h c f + h c* f + h v)", bias=False),
            **linear(BLOCK + "attn.out_proj", "residual", "(h v*)", bias=False),
            **norm(BLOCK + "norm1"),
            **linear(BLOCK + "mlp.fc11", "ffn", bias=False),
            **linear(BLOCK + "mlp.fc12", "|ffn|", bias=False),  # the gate
            **linear(BLOCK + "mlp.fc2", "residual", "ffn*", bias=False),
            **norm(BLOCK + "norm2"),
        },
        optional={"pooler": bert.POOLER},
        heads={
            "masked LM": Head(("ForMaskedLM",), bert.predictions(c, "layer_norm")),
            "sequence": Head(("ForSequenceClassification",), bert.POOLED),
            "token": bert.TOKEN,
        },
        tied=bert.ties(c),
        buffers=(*bert.BUFFERS, "*rotary_emb.*inv_freq"),
        outputs=bert.OUTPUTS,
    )

"""NomicBERT: BERT's post-norm blocks with rotary positions, fused queries, keys and values, and gated neurons."""

from __future__ import annotations

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, rotary_axes
from symfuse.architectures.causal import linear, norm
from symfuse.architectures.decoder import gated
from symfuse.groups import Permutation, Signed
from symfuse.spec import Axis

# As they are on disk; in memory the projections are apart.
LAYER = "encoder.layers.{l}."
EMBEDDING, PREDICTIONS = "embeddings.word_embeddings.weight", "cls.predictions."


@architecture("nomic_bert")
def nomic_bert(c: Config) -> Family:
    act = c.get("hidden_act", "silu")
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act, c.get("head_dim")
    )
    head = axes.pop("qk").size
    axes |= gated(act, c.intermediate_size) | rotary_axes(head, head, ("l", "h"))
    axes |= {
        "vocab": Axis(c.vocab_size),
        "types": Axis(c.get("type_vocab_size", 2)),
        "pool": Axis(c.hidden_size, Signed()),  # tanh is odd
        "lm": Axis(c.hidden_size, Permutation()),
        "labels": Axis(c.labels),
    }
    # With a tied decoder the transform writes into the residual space of the embeddings; else into its own.
    lm = "residual" if c.tied else "lm"
    after = {n: layout.replace("residual", lm) for n, layout in norm(PREDICTIONS + "transform.layer_norm").items()}
    return Family(
        axes=axes,
        prefix="nomic_bert.",
        tensors={
            EMBEDDING: "vocab residual",
            "embeddings.token_type_embeddings.weight": "types residual",
            **norm("emb_ln"),
            **linear(LAYER + "attn.Wqkv", "(h c f + h c* f + h v)", "residual*", bias=False),
            **linear(LAYER + "attn.out_proj", "residual", "(h v*)", bias=False),
            **norm(LAYER + "norm1"),
            **linear(LAYER + "mlp.fc11", "ffn", "residual*", bias=False),
            **linear(LAYER + "mlp.fc12", "|ffn|", "residual*", bias=False),  # the gate
            **linear(LAYER + "mlp.fc2", "residual", "ffn*", bias=False),
            **norm(LAYER + "norm2"),
        },
        optional={"pooler": bert.POOLER},
        heads={
            "masked LM": Head(
                ("ForMaskedLM",),
                {
                    PREDICTIONS + "bias": "vocab",
                    **linear(PREDICTIONS + "transform.dense", lm, "residual*"),
                    **after,
                    **linear(PREDICTIONS + "decoder", "vocab", f"{lm}*"),
                },
            ),
            "sequence": Head(("ForSequenceClassification",), bert.POOLED),
            "token": bert.TOKEN,
        },
        tied={PREDICTIONS + "decoder.weight": EMBEDDING, PREDICTIONS + "decoder.bias": PREDICTIONS + "bias"}
        if c.tied
        else {},
        buffers=(*bert.BUFFERS, "*rotary_emb.*inv_freq"),
        outputs=bert.OUTPUTS,
    )

"""NomicBERT: BERT's post-norm blocks with rotary positions, fused queries, keys and values, and gated neurons."""

from __future__ import annotations

from symfuse.architectures import bert, decoder
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, linear, norm, rotary_axes
from symfuse.groups import Permutation, Signed
from symfuse.spec import Axis

# As they are on disk; in memory the projections are apart.
LAYER = "encoder.layers.{l}."


@architecture("nomic_bert")
def nomic_bert(c: Config) -> Family:
    act = c.get("hidden_act", "silu")
    axes = block_axes(
        c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act, c.get("head_dim")
    )
    head = axes.pop("qk").size
    axes |= decoder.gated(c, act) | rotary_axes(head, head, ("l", "h"))
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
            **linear(LAYER + "attn.Wqkv", "(h c f + h c* f + h v)", bias=False),
            **linear(LAYER + "attn.out_proj", "residual", "(h v*)", bias=False),
            **norm(LAYER + "norm1"),
            **linear(LAYER + "mlp.fc11", "ffn", bias=False),
            **linear(LAYER + "mlp.fc12", "|ffn|", bias=False),  # the gate
            **linear(LAYER + "mlp.fc2", "residual", "ffn*", bias=False),
            **norm(LAYER + "norm2"),
        },
        optional={"pooler": bert.POOLER},
        heads={
            "masked LM": Head(
                ("ForMaskedLM",),
                bert.predictions(c, "layer_norm"),
            ),
            "sequence": Head(("ForSequenceClassification",), bert.POOLED),
            "token": bert.TOKEN,
        },
        tied=bert.ties(c),
        buffers=(*bert.BUFFERS, "*rotary_emb.*inv_freq"),
        outputs=bert.OUTPUTS,
    )

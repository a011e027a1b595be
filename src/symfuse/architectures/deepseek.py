"""Multi-head latent attention: DeepSeek-V2 and V3, and those that took it from them. Queries pass through a latent
behind a norm, keys and values through another one. Positions turn a part of each head, where all heads have one key."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import rotary_axes
from symfuse.architectures.experts import deepseek, dense_layers
from symfuse.errors import SpecError
from symfuse.groups import Invertible, Permutation
from symfuse.spec import Axis

AT = decoder.ATTENTION
QUERIES = {
    AT + "q_a_proj.weight": "q_latent residual*",
    AT + "q_a_layernorm.weight": "|q_latent|",
    AT + "q_b_proj.weight": "(h (p + c f)) q_latent*",
}
WHOLE_QUERIES = {AT + "q_proj.weight": "(h (p + c f)) residual*"}
KEYS_AND_VALUES = {
    AT + "kv_a_proj_with_mqa.weight": "(kv_latent + c* f) residual*",
    AT + "kv_a_layernorm.weight": "|kv_latent|",
    AT + "kv_b_proj.weight": "(h (p* + v)) kv_latent*",
    AT + "o_proj.weight": "residual (h v*)",
}
BIASES = {AT + "kv_a_proj_with_mqa.bias": "(kv_latent + c* f)", AT + "o_proj.bias": "residual"}
READERS = ("q_a_proj", "q_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj")
READS = {
    decoder.BEFORE_ATTENTION: tuple(AT + f"{one}.weight" for one in READERS),
    AT + "q_a_layernorm.weight": (AT + "q_b_proj.weight", AT + "indexer.wq_b.weight"),
    AT + "kv_a_layernorm.weight": (AT + "kv_b_proj.weight",),
}
# What selects the tokens that are attended to: heads that are added, and one key, of which positions turn a part.
INDEXER = {
    AT + "indexer.wq_b.weight": "(index_h (turned + index_p)) q_latent*",
    AT + "indexer.wk.weight": "(turned + index_p) residual*",
    AT + "indexer.weights_proj.weight": "index_h residual*",
    **dict.fromkeys((AT + "indexer.k_norm.weight", AT + "indexer.k_norm.bias"), "(turned + index_p)"),
}
INDEXED = "a LayerNorm of the key that all heads of the indexer share: what positions do not turn is reordered"
SHARED = "commutes with the rotations of rotary positions; all heads share the key: one element for all"
LATENT = "behind an RMSNorm with a gain for each unit: reordered and flipped; once the gain is folded, rotated"


def _axes(c: Config, value: int | None) -> dict[str, Axis]:
    turned, inside = c.qk_rope_head_dim, ("l", "h")
    rotary = rotary_axes(turned, turned, ("l",))
    ranks = {"kv": c.kv_lora_rank} | ({} if c.is_null("q_lora_rank") else {"q": c.q_lora_rank})
    return {
        "h": Axis(c.num_attention_heads, Permutation(), ("l",)),
        **rotary,
        "c": replace(rotary["c"], why=SHARED),
        "p": Axis(c.qk_nope_head_dim, Invertible(), inside),
        "v": Axis(c.v_head_dim if value is None else c.size("v_head_dim", value), Invertible(), inside),
        **{f"{one}_latent": Axis(rank, decoder.SIGNED, ("l",), LATENT) for one, rank in ranks.items()},
    }


def latent(c: Config, family: Family, *, neighbours: bool = True, value: int | None = None) -> Family:
    """A decoder without attention with this one. neighbours: whether planes are (2i, 2i + 1), and not halves. value:
    the size of values in a head, where the config has none."""
    axes = _axes(c, value)
    tensors = (QUERIES if "q_latent" in axes else WHOLE_QUERIES) | KEYS_AND_VALUES
    if c.get("attention_bias", False):
        tensors |= BIASES | ({AT + "q_a_proj.bias": "q_latent"} if "q_latent" in axes else {})
    whole = family.plus(axes=axes, tensors=tensors, reads=READS)
    return decoder.rearranged(whole, decoder.NEIGHBOURS) if neighbours else whole


def _first(c: Config, usual: int) -> range:
    """The dense layers, before those with experts."""
    return range(min(c.get("first_k_dense_replace", usual), c.num_hidden_layers))


@architecture("deepseek_v2", tied=False)
def deepseek_v2(c: Config) -> Family:
    c.refuse("mlp_bias", "its feed-forwards have biases")
    grouped = c.get("topk_method", "greedy") == "group_limited_greedy"
    return latent(c, deepseek(c, decoder.stream_axes(c), {}, _first(c, 0), correction={}, grouped=grouped))


@architecture("deepseek_v3", "sarvam_mla", tied=False)
def deepseek_v3(c: Config) -> Family:
    return _interleaved(c, deepseek(c, decoder.stream_axes(c), {}, _first(c, 3)))


@architecture("mistral4", tied=False)
def mistral4(c: Config) -> Family:
    return _interleaved(c, deepseek(c, decoder.stream_axes(c), {}, _first(c, 0), correction={}))


@architecture("glm4_moe_lite", tied=False)
def glm4_moe_lite(c: Config) -> Family:
    return _interleaved(c, deepseek(c, decoder.stream_axes(c), {}, dense_layers(c, range(1))))


@architecture("youtu")
def youtu(c: Config) -> Family:
    return _interleaved(c, _dense(c))


@architecture("minicpm3")
def minicpm3(c: Config) -> Family:
    """The embedding, what blocks write and what the head reads are scaled by numbers, which commute with all of it."""
    c.refuse("mlp_bias", "its feed-forward has biases")
    return latent(c, _dense(c), neighbours=False, value=c.hidden_size // c.num_attention_heads)


@architecture("deepseek_v32", tied=False, example={"topk_group": 4})
def deepseek_v32(c: Config) -> Family:
    """Its indexer decides, without a gradient, which tokens attention sees."""
    family = latent(c, deepseek(c, decoder.stream_axes(c), {}, dense_layers(c, _first(c, 3))))
    free = c.size("index_head_dim", 128) - c.qk_rope_head_dim
    if free < 1:
        raise SpecError(
            f"config.json: index_head_dim, {c.index_head_dim}, is not above qk_rope_head_dim, {c.qk_rope_head_dim}"
        )
    axes = {
        "index_h": Axis(c.size("index_n_heads", 64), Permutation(), ("l",)),
        "index_p": Axis(free, Permutation(), ("l",), INDEXED),
        "turned": Axis(c.qk_rope_head_dim, why=INDEXED),
    }
    return family.plus(axes=axes, tensors=INDEXER)


def _interleaved(c: Config, family: Family) -> Family:
    return latent(c, family, neighbours=c.get("rope_interleave", True))


def _dense(c: Config) -> Family:
    return decoder.family(c, decoder.stream_axes(c) | decoder.gated(c), decoder.GATED | decoder.NORMS)

"""DeBERTa-v2 and v3: disentangled attention, in which contents also meet embeddings of relative positions. The first
DeBERTa: the same with queries, keys and values of each head in one map, and no biases of keys."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import bert
from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, key_shift, linear, neurons, norm, renamed, value_shift
from symfuse.architectures.names import LEGACY
from symfuse.errors import SpecError
from symfuse.groups import Permutation
from symfuse.spec import Axis, Shift

SELF = bert.SELF
NAMES = {"self.query": "self.query_proj", "self.key": "self.key_proj", "self.value": "self.value_proj"}


def parts_of(text: str | list[str] | None) -> list[str]:
    """`"c2p|p2c"` of older configs, or a list."""
    pieces = text.split("|") if isinstance(text, str) else (text or [])
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        raise SpecError(f"config.json: {text!r} should be a list of words, such as ['c2p', 'p2c'] of pos_att_type")
    return [piece.strip().lower() for piece in pieces]


def _encoder(c: Config) -> tuple[dict[str, str], tuple[Shift, ...]]:
    """The tensors of the encoder, and which of its biases may be translated."""
    position = parts_of(c.get("pos_att_type")) if c.get("relative_attention", False) else []
    # Positions have projections of their own, or use those of contents.
    own = not c.get("share_att_key", False)
    tensors = renamed(bert.ENCODER, NAMES)
    if c.get("relative_attention", False):
        tensors |= {"encoder.rel_embeddings.weight": "relative residual"}
    if own and "c2p" in position:
        tensors |= linear(SELF + "pos_key_proj", "(h qk*)")
    if own and "p2c" in position:
        tensors |= linear(SELF + "pos_query_proj", "(h qk)")
    if "layer_norm" in parts_of(c.get("norm_rel_ebd")):
        tensors |= norm("encoder.LayerNorm")
    if c.get("conv_kernel_size", 0) > 0:
        tensors |= linear("encoder.conv.conv", "residual", "residual* kernel") | norm("encoder.conv.LayerNorm")
    # A position's key adds a constant per query, as any key does. But with p2c a content's key also meets the
    # query of the relative position, which differs along the row: then its bias is not free.
    free = [key_shift(SELF + "pos_key_proj")] + ([] if "p2c" in position else [key_shift(SELF + "key_proj")])
    value = value_shift(SELF + "value_proj", bert.NAMES["o"])
    return tensors, (*free, value)


def _embeddings(c: Config, e: str) -> tuple[dict[str, str], dict[str, str]]:
    """The tensors of the embeddings, and those that files may have although the model does not read them."""
    tensors = {name: text for name, text in bert.EMBEDDINGS.items() if "LayerNorm" in name}
    written = {name: text.replace("residual", e) for name, text in bert.EMBEDDINGS.items() if name not in tensors}
    positions = "embeddings.position_embeddings.weight"
    unread = {} if c.get("position_biased_input", True) else {positions: written.pop(positions)}
    if c.get("type_vocab_size", 0) == 0:
        del written["embeddings.token_type_embeddings.weight"]
    if e != "residual":
        tensors["embeddings.embed_proj.weight"] = "residual embedding*"
    return written | tensors, unread


def _axes(c: Config, width: int) -> dict[str, Axis]:
    spans = (c.get("position_buckets", -1), c.get("max_relative_positions", -1), c.max_position_embeddings)
    layers, heads, act = c.num_hidden_layers, c.num_attention_heads, c.get("hidden_act", "gelu")
    head = c.get("attention_head_size", c.hidden_size // heads)
    return block_axes(layers, c.hidden_size, heads, c.intermediate_size, act, head) | {
        "vocab": Axis(c.vocab_size),
        "positions": Axis(c.max_position_embeddings),
        "types": Axis(c.get("type_vocab_size", 0)),
        "relative": Axis(2 * next(span for span in spans if span > 0)),
        "kernel": Axis(c.get("conv_kernel_size", 0)),
        "embedding": Axis(width, Permutation()),  # the masked LM's LayerNorm is in this space
        "lm": Axis(width, Permutation()),
        "mask": Axis(c.hidden_size, Permutation()),
        "pool": Axis(c.get("pooler_hidden_size", c.hidden_size), neurons(c.get("pooler_hidden_act", "gelu"))),
        "labels": Axis(c.labels),
    }


def _masked_lm(c: Config, e: str) -> dict[str, Head]:
    """v2's head is BERT's; v3's multiplies with the embedding itself, tied or not. Files of v3 hold the
    discriminator's head as well, which no class reads."""
    at = "lm_predictions.lm_head."
    v3 = {at + "bias": "vocab", **linear(at + "dense", e), **norm(at + "LayerNorm", e)}
    at = "mask_predictions."
    discriminator = linear(at + "dense", "mask") | norm(at + "LayerNorm", "mask")
    discriminator |= linear(at + "classifier", "1", "mask*")
    legacy = c.get("legacy", True)
    return {
        "masked LM (v2)": Head(("ForMaskedLM",) if legacy else (), bert.predictions(c, embedding=e)),
        "masked LM (v3)": Head(() if legacy else ("ForMaskedLM",), v3),
        "discriminator": Head((), discriminator),
    }


@architecture("deberta-v2")
def deberta_v2(c: Config) -> Family:
    width = c.get("embedding_size", c.hidden_size)
    e = "residual" if width == c.hidden_size else "embedding"
    embeddings, unread = _embeddings(c, e)
    encoder, shifts = _encoder(c)
    return Family(
        axes=_axes(c, width),
        prefix="deberta.",
        tensors=embeddings | encoder,
        optional={"absolute positions": unread},
        heads=_masked_lm(c, e)
        | {
            "sequence": Head(("ForSequenceClassification",), bert.POOLER | bert.POOLED),
            "choice": Head(("ForMultipleChoice",), bert.POOLER | dict(bert.CHOICE.tensors)),
            "token": bert.TOKEN,
            "question": bert.QUESTION,
        },
        tied=bert.ties(c),
        buffers=bert.BUFFERS,
        legacy=LEGACY,
        shifts=shifts,
        outputs={"last_hidden_state": "residual"},
    )


@architecture("deberta")
def deberta(c: Config) -> Family:
    if c.get("talking_head", False):
        raise SpecError("config.json: talking_head is true, which mixes heads; symfuse declares DeBERTa without it")
    family = deberta_v2(c)
    position = parts_of(c.get("pos_att_type")) if c.get("relative_attention", False) else []
    own = {SELF + "in_proj.weight": "(h (qk + qk* + v)) residual*", SELF + "q_bias": "(h qk)", SELF + "v_bias": "(h v)"}
    own |= linear(SELF + "pos_proj", "(h qk*)", bias=False) if "c2p" in position else {}
    own |= linear(SELF + "pos_q_proj", "(h qk)") if "p2c" in position else {}
    output = bert.NAMES["o"]
    return replace(
        family,
        tensors={name: text for name, text in family.tensors.items() if not name.startswith(SELF)} | own,
        shifts=(Shift(SELF + "v_bias", "v", output + ".weight", output + ".bias"),),
    )

"""A family without a declaration gets a Spec without symmetries: names, shapes and ties."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

import torch

from symfuse.architectures.names import EMBEDDING, HEAD, HEAD_OF, OWN_HEADS, SHARED, SHARING, TABLE, TIED_BY_DEFAULT
from symfuse.errors import SpecError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.messages import some
from symfuse.model.config import text_config
from symfuse.spec import BEHIND, Axis, Declared, Spec
from symfuse.spec.layout import Atom, Layout

OTHER_MODALITY = re.compile(r"(.*\.)?(vision|visual|audio|image|speech|multi_?modal|mm_|connector)\w*(\..*)?")

LAYER_COUNTS = ("encoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_encoder_layers")
LISTS = {"layers", "layer", "h", "block", "blocks"}
PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # layers after the last, that predict further tokens

LAYER = re.compile(r"(.*?)(?<![^.])(\d+)\.")  # a name up to the number of the layer
MASK = re.compile(r".*\b(attn|attention)\.bias")
PARTITIONED = (
    "It looks like a placeholder of a partitioned save (ZeRO stage 3, FSDP): gather the weights before saving "
    "(DeepSpeed: zero_to_fp32.py)"
)

ROTARY = re.compile(r"(.*\.)?rotary_emb\.(original_)?(inv_freq|cos_cached|sin_cached)")


def undeclared(checkpoint: Checkpoint) -> Spec:
    """The Spec of a checkpoint by its names and shapes: no group acts, the layers of its main stack have index `l`.

    Raises SpecError for a missing output head that config.json requires, and for layers or rows that contradict
    config.json.
    """
    config, where = checkpoint.config, checkpoint.name
    infos = checkpoint.infos
    buffers = frozenset(name for name, info in infos.items() if is_derived(name, info))
    names = [name for name in infos if name not in buffers]
    vocab = text_config(config).get("vocab_size", config.get("vocab_size"))
    tied, renamed = _ties(config, names)
    require_head(checkpoint, names)
    text = dict.fromkeys(name for name in names if text_config(config) is config or not other_modality(name))
    if type(vocab) is int:
        _require_rows(checkpoint, text, vocab)
    count, indices = _layers(config, text, where)
    behind = sum(1 for index in {tuple(i.items()) for i in indices.values()} if index[0][0] == BEHIND)
    tensors = {}
    for file in names:
        name, shape = renamed.get(file, file), infos[file].shape
        dims = [Atom(str(size)) for size in shape]
        if type(vocab) is int and file in text and (EMBEDDING.fullmatch(name) or HEAD.fullmatch(name)):
            dims[:1] = [Atom("vocab")] if shape[:1] == (vocab,) else dims[:1]
        tensors[name] = Declared(Layout(tuple(dims)), indices.get(file, {}))
    axes = ({"l": Axis(count)} if indices else {}) | ({BEHIND: Axis(behind)} if behind else {})
    return Spec(
        family=str(config.get("model_type", "unknown")),
        axes=axes | ({"vocab": Axis(vocab)} if type(vocab) is int else {}),
        tensors=tensors,
        tied=tied,
        names={name: file for file, name in renamed.items()},
        buffers=buffers,
    )


def other_modality(name: str) -> bool:
    """Whether a tensor belongs to an image or audio tower."""
    return OTHER_MODALITY.fullmatch(name) is not None


def is_derived(name: str, info: TensorInfo) -> bool:
    """Whether a tensor follows from the config: rotary frequencies, causal masks, position ids. Dropped, never merged.

    `attn.bias` is a mask only if it has the shape of one; else a bias.
    """
    if MASK.fullmatch(name):
        return len(info.shape) == 4 and info.shape[:2] == (1, 1)
    if name.endswith("position_ids"):
        return not info.dtype.is_floating_point
    return ROTARY.fullmatch(name) is not None or (name.endswith(".masked_bias") and info.shape in ((), (1,)))


def is_tied(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether the output head is the embedding, from the config or the family's default."""
    if config.get("scale_decoder_outputs") is False and any(map(HEAD.fullmatch, names)):
        return False  # `transformers` 5 writes tie_word_embeddings for every T5
    for part in (config, text_config(config)):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return any(part.get("model_type") in TIED_BY_DEFAULT for part in (config, text_config(config)))


def embedding(names: Iterable[str]) -> str | None:
    """The token embedding of the language model: the shared one, where there is one, else the first."""
    candidates = [name for name in names if EMBEDDING.fullmatch(name) and not other_modality(name)]
    candidates.sort(key=lambda name: not name.endswith(SHARED[0]))
    return candidates[0] if candidates else None


def head_name(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The name of the output head's weight, in the file or as its class expects it; None for a class without a head."""
    stored = [name for name in names if HEAD.fullmatch(name) and name.endswith(".weight")]
    if stored:
        return stored[0]
    classes = config.get("architectures")
    class_name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if not class_name.endswith(("ForCausalLM", "LMHeadModel")) and config.get("model_type") not in SHARING:
        return None
    return OWN_HEADS.get(str(config.get("model_type")), HEAD_OF)


def _ties(config: Mapping[str, Any], names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Two maps: alias → the tensor that it equals; and stored name → canonical name where only an alias is stored."""
    tied: dict[str, str] = {}
    renamed: dict[str, str] = {}
    for name in names:
        end = next((end for end in SHARED if name == end or name.endswith("." + end)), None)
        shared = name.removesuffix(end) + SHARED[0] if end else ""
        if not end or name == shared or not (shared in names or config.get("model_type") in SHARING):
            continue
        if shared in names or shared in renamed.values():
            tied[name] = shared
        else:
            renamed[name] = shared
    head, embed = head_name(config, names), embedding(names)
    if head in names and embed is not None and is_tied(config, names):
        tied[str(head)] = renamed.get(embed, embed)
    return tied, renamed


def require_head(checkpoint: Checkpoint, names: Collection[str]) -> None:
    """SpecError if the output head is missing, although config.json does not tie it to the embedding."""
    head = head_name(checkpoint.config, names)
    embed = embedding(names)
    if head is None or head in names or embed is None or is_tied(checkpoint.config, names):
        return
    states = "unties it from" if "tie_word_embeddings" in checkpoint.config else "does not tie it to"
    raise SpecError(
        f"{checkpoint.name}: {head} is missing, and config.json {states} the embedding {embed} (tie_word_embeddings); "
        "it would be initialised at random on loading. Set tie_word_embeddings to true if the model is tied, or "
        "add the tensor"
    )


def _require_rows(checkpoint: Checkpoint, names: Iterable[str], vocab: int) -> None:
    """SpecError if no embedding or head has `vocab_size` rows. (Single ones may have a few more or fewer.)"""
    rows = {name: checkpoint.info(name).shape for name in names if EMBEDDING.fullmatch(name) or HEAD.fullmatch(name)}
    if rows and not any(shape[:1] == (vocab,) for shape in rows.values()):
        name, shape = next(iter(rows.items()))
        raise SpecError(
            f"{checkpoint.name}: {name} has shape {shape}, and config.json says vocab_size {vocab}; "
            "does config.json belong to these weights?"
        )


def serves_all(name: str, names: Container[str]) -> bool:
    """Whether a tensor is stored in the first layer only and used by all layers: the relative bias of T5."""
    return TABLE.fullmatch(name) is not None and LAYER.sub(r"\g<1>1.", name, count=1) not in names


def predicts_more(name: str, layers: int | None) -> bool:
    """Whether a tensor belongs to a layer that predicts further tokens: after the last of `layers`, or in an mtp
    module."""
    match = LAYER.match(name)
    parts = name.split(".")
    return "mtp" in parts or (match is not None and layers is not None and int(match[2]) >= layers)


def declared_depth(config: Mapping[str, Any]) -> int | None:
    """The number of layers of the language model in config.json."""
    text = text_config(config)
    return next((text[key] for key in LAYER_COUNTS if type(text.get(key)) is int), None)


def _layers(config: Mapping[str, Any], names: Collection[str], where: str) -> tuple[int, dict[str, dict[str, int]]]:
    """The number of layers, and the index of each tensor that is in one; SpecError if config.json says another number.

    Every stack with that number of layers counts (encoder and decoder); without a number in the config, the stack with
    the most tensors. Tensors of layers after the last have an index of their own.
    """
    stacks: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        if (match := LAYER.match(name)) and not serves_all(name, names):
            stacks[match[1]][name] = int(match[2])
    sizes = {stack: max(layers.values()) + 1 for stack, layers in stacks.items()}
    known = [stack for stack in stacks if stack.rstrip(".").rpartition(".")[2] in LISTS]
    for stack in known:
        if absent := sorted(set(range(sizes[stack])) - set(stacks[stack].values())):
            raise SpecError(
                f"{where}: no tensors of {stack}{some(map(str, absent))}, and layers up to {sizes[stack] - 1} are there"
            )
    text = text_config(config)
    largest = max(known, key=lambda stack: len(stacks[stack]), default="")
    declared = declared_depth(config)
    count = sizes.get(largest, 0) if declared is None else declared
    more = sum(int(text.get(key) or 0) for key in PREDICTORS)
    chosen_stacks = [stack for stack, size in sizes.items() if size in (count, count + more)]
    if not chosen_stacks and known:
        if count % sizes[largest]:  # otherwise the same layers are run several times
            raise SpecError(
                f"{where}: config.json says {count} layers, and {largest}* has {sizes[largest]}; "
                "does config.json belong to these weights?"
            )
        count, chosen_stacks = sizes[largest], [largest]
    every = {name: i for stack in chosen_stacks for name, i in stacks[stack].items()}
    return count, {name: {"l": i} if i < count else {BEHIND: i - count} for name, i in every.items()}


def refuse_placeholders(checkpoint: Checkpoint) -> None:
    """SpecError for tensors of shape (0,) or (1,) that are matrices, or have another shape in other layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in checkpoint:
        if (shape := checkpoint.info(name).shape) not in ((), (0,), (1,)):
            shapes.setdefault(re.sub(r"\d+", "#", name), shape)
    for name in checkpoint:
        shape, expected = checkpoint.info(name).shape, shapes.get(re.sub(r"\d+", "#", name))
        matrix = name.endswith(("proj.weight", "head.weight")) or EMBEDDING.fullmatch(name)
        if shape == (0,) or (shape == (1,) and (expected or matrix)):
            raise SpecError(
                f"{checkpoint.name}: {name} in {checkpoint.where(name)} has shape {shape}, expected "
                f"{expected or 'that of a whole tensor'}. {PARTITIONED}"
            )


def disagreeing_frequencies(checkpoint: Checkpoint, buffers: Iterable[str], theta: float | None) -> str | None:
    """A note if stored rotary frequencies are not those of the config: θ^(−2i/d) (Su et al. 2021, Eq. 15)."""
    for name in sorted(buffers):
        if theta is None or not name.endswith("rotary_emb.inv_freq"):
            continue
        stored = checkpoint[name].double()
        expected = theta ** -(torch.arange(len(stored), dtype=torch.float64) / max(1, len(stored)))
        if not torch.allclose(stored, expected, rtol=0.02, atol=1e-6):
            return f"{name} differs from the frequencies of rope_theta {theta:g} in config.json; the buffer is dropped"
    return None

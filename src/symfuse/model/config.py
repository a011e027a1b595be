"""Compare two configs: which fields differ after normalising their spelling, and whether the difference matters."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symfuse.architectures.base import Config, is_declared, lookup
from symfuse.architectures.blocks import SAME
from symfuse.errors import SpecError
from symfuse.io import Checkpoint
from symfuse.io.installed import resolved

# Defaults of absent fields, in all declared families that have them and whose declarations do not read them.
SCALARS: dict[str, Any] = {
    "is_decoder": False, "position_embedding_type": "absolute", "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "norm_first": False,
}  # fmt: skip
OF_HEADS = {"architectures", "id2label", "num_labels", "tie_word_embeddings", "legacy", "encoder_stride"}

# Fields that do not change what the same weights compute in evaluation: training (of SCEPTR a block of that name),
# bookkeeping, generation, the head.
HARMLESS = (
    "*dropout*", "*drop_rate*", "*drop_path*", "*layerdrop*", "*_pdrop", "initializer_*", "init_std*", "*_loss_coef",
    "use_cache", "dtype", "torch_dtype", "transformers_version", "_*", "*name", "auto_map", "gradient_checkpointing",
    "output_*", "return_dict", "use_return_dict", "torchscript", "use_bfloat16", "pretraining_tp", "chunk_size_*",
    "attn_implementation", "unsloth_*", "problem_type", "task_specific_params", "finetuning_task", "label2id",
    "*token_id", "*token_ids", "*token_index", "max_position_embeddings", "model_max_length", "max_length",
    "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty", "*penalty",
    "no_repeat_ngram_size", "early_stopping", "router_jitter_noise", "tie_encoder_decoder", "sceptr", *OF_HEADS,
    "num_nextn_predict_layers", "mtp_num_hidden_layers",
)  # fmt: skip

# Fields that record who wrote a config, which is no property of the model.
UNSAID = ("transformers_version", "_name_or_path", "_commit_hash")

# The base of rotary embeddings and the ε of RMSNorm where a config does not contain them (transformers 5.24), by
# family.
THETA = {
    "mixtral": 1e6, "ministral3": 1e6, "smollm3": 2e6, "gpt_oss": 150_000.0, "helium": 1e5, "minimax_m2": 5e6,
    "sarvam_moe": 8e6, "apertus": 12e6, "hy_v3": 11_158_840.0, **dict.fromkeys(("cwm", "phimoe", "solar_open"), 1e6),
    **dict.fromkeys(("cohere", "exaone", "ernie4_5", "flex_olmo", "llama4_text", "olmo3"), 500_000.0),
}  # fmt: skip
EPSILON = {"helium": 1e-8, "glm": 1.5625e-07, "glm4": 1.5625e-07} | dict.fromkeys(
    (
        "mixtral", "ministral3", "phi3", "olmo2", "ernie4_5", "exaone", "llama4_text", "olmo3", "olmoe", "internlm3",
        "iquestcoder", "cwm", "hunyuan_v1_dense", "hunyuan_v1_moe", "arcee", "apertus", "exaone4", "exaone_moe",
        "phimoe", "gpt_oss", "granite_swa", "glm4_moe", "solar_open", "hy_v3", "bamba", "falcon_h1",
    ),
    1e-5,
)  # fmt: skip

# The types of some fields, where they are present.
KINDS: dict[str, Any] = {
    "rope_parameters": {}, "rope_scaling": {}, "text_config": {}, "llm_config": {}, "layer_types": [],
    "architectures": [], "model_type": "",
}  # fmt: skip

# Families that scale the decoder's output by d_model^(−1/2) where the head is the embedding, unless
# `scale_decoder_outputs` says otherwise (transformers 5.24).
SCALED = {"t5", "umt5", "longt5", "switch_transformers", "pop2piano"}

ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
ROPE = {"rope_theta": "rope_theta", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
ROPE |= {"partial_rotary_factor": "partial_rotary_factor"}


@dataclass(frozen=True)
class Difference:
    """One field of config.json, dotted where it is nested, with its values in two models: None where it is absent.
    matters: whether the same weights compute something else."""

    field: str
    ours: Any
    theirs: Any
    matters: bool

    def __str__(self) -> str:
        ours, theirs = ("absent" if value is None else repr(value) for value in (self.ours, self.theirs))
        return f"{self.field}: {ours} and {theirs}"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: of several modalities, or all of it."""
    for key in ("text_config", "llm_config"):
        if isinstance(config.get(key), Mapping):
            return dict(config[key])
    return config


def of_text(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the language model, for `with_fields`: in the object that describes it, where there is one."""
    key = next((key for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)), None)
    return dict(fields) if key is None else {key: dict(fields)} if fields else {}


def with_fields(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these fields, of its nested objects too."""
    nested = {
        key: with_fields(config[key], value)
        for key, value in fields.items()
        if isinstance(value, Mapping) and isinstance(config.get(key), Mapping)
    }
    return {**config, **fields, **nested}


def differences(one: Checkpoint, other: Checkpoint) -> list[Difference]:
    """The fields in which two configs of one model type differ, those that matter first.

    Spellings of older versions of `transformers` are made equal first. All fields matter but those known to be
    harmless, unless one is absent on one side and its default is not known; of a family with a declaration, that which
    it reads matters anyway. A field that is absent equals the default of the installed class, nested ones too.
    SpecError, naming the model, for a field of another kind than it must be.
    """
    configs = [_flat(_spelled(checkpoint)) for checkpoint in (one, other)]
    by_field: dict[str, Difference] = {}
    for key in dict.fromkeys((*configs[0], *configs[1])):
        ours, theirs = (config.get(key, _default(key, config)) for config in configs)
        if key.rpartition(".")[2] in UNSAID or ours == theirs or (not ours and not theirs):  # absent, false, 0: one
            continue
        known = ours is not None and theirs is not None
        if not known and _is_default(key, ours if theirs is None else theirs, one if ours is None else other):
            continue
        field = _field_name(key, one, other)
        by_field[field] = Difference(field, ours, theirs, known and not _harmless(key, configs))
    if all(is_declared(checkpoint.config) for checkpoint in (one, other)):
        by_field |= _deciding_differences(one, other)
    return sorted(by_field.values(), key=lambda difference: not difference.matters)


def label_clash(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """In words, that equal rows of two classifiers are of different labels: one has two numbers, or only one model has
    it. None where they agree, and where no label is common: then one names them otherwise, or not at all."""
    ours, theirs = _labels(one), _labels(other)
    if not ours.keys() & theirs.keys():
        return None
    for label in sorted(ours.keys() | theirs.keys()):
        if ours.get(label) != theirs.get(label):
            numbers = [f"is number {of[label]} in" if label in of else "is not in" for of in (ours, theirs)]
            return f"the label {label!r} {numbers[0]} one, {numbers[1].removeprefix('is number ')} the other (label2id)"
    return None


def _labels(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of a classifier's labels by name; none if the config does not say them, or says no whole numbers."""
    labels = config.get("label2id")
    if isinstance(labels, Mapping) and labels:
        pairs = [(str(name), str(number)) for name, number in labels.items()]
    else:
        names = config.get("id2label")
        pairs = [(str(name), str(number)) for number, name in names.items()] if isinstance(names, Mapping) else []
    return {name: int(number) for name, number in pairs} if all(number.isdecimal() for _, number in pairs) else {}


def _field_name(key: str, one: Checkpoint, other: Checkpoint) -> str:
    """The field of an activation by the name that both configs have for it."""
    fields = {name for checkpoint in (one, other) for name in ACTIVATIONS if name in checkpoint.config}
    return fields.pop() if key == "hidden_act" and len(fields) == 1 else key


def _harmless(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a field changes nothing; the limit of positions does where frequencies are scaled by it."""
    level, _, field = key.rpartition(".")
    kinds = [config.get(f"{level}.rope_parameters.rope_type".lstrip(".")) for config in configs]
    if field == "max_position_embeddings" and any(kind in ("dynamic", "longrope") for kind in kinds):
        return False
    return any(fnmatch.fnmatchcase(part, pattern) for part in key.split(".") for pattern in HARMLESS)


def _default(key: str, config: Mapping[str, Any]) -> Any:
    level, _, field = key.rpartition(".")
    if field == "rope_type":
        return "default"
    if field == "rope_theta":
        return THETA.get(str(config.get(level.rpartition("rope_parameters")[0] + "model_type")), 10_000.0)
    return EPSILON.get(str(config.get(f"{level}.model_type".lstrip("."))), 1e-6) if field == "rms_norm_eps" else None


def _is_default(key: str, value: Any, absent: Checkpoint) -> bool:
    """Whether the installed class of a config gives this value to a field that the config leaves out."""
    defaults = resolved(absent.config)
    return defaults is not None and _flat(_alike(defaults)).get(key) == value


def _flat(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested objects as dotted fields; null is absent. Labels are numbered by strings, as in files."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key in ("id2label", "label2id"):
            out[at + key] = {str(label): one for label, one in value.items()}
        elif isinstance(value, Mapping):
            out |= _flat(value, f"{at}{key}.")
        elif value is not None:
            out[f"{at}{key}"] = value
    return out


def _spelled(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        return _alike(checkpoint.config)
    except SpecError as error:
        raise SpecError(f"{checkpoint.name}: {error}") from None


def _alike(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the spelling of today, with fields that follow from others filled in or left out.

    SpecError for a field of another kind than it must be.
    """
    for key, kind in KINDS.items():
        _get(config, key, kind)
    c = {key: _alike(v) if key.endswith("_config") and isinstance(v, Mapping) else v for key, v in config.items()}
    if "sliding_window" in c and c["sliding_window"] is None:
        c["sliding_window"] = False  # all tokens are seen; where it is absent, the family's default holds
    c = {key: value for key, value in c.items() if value is not None}
    if rope := _rope(c):
        c["rope_parameters"] = rope
    named = [str(c[key]) for key in ACTIVATIONS if isinstance(c.get(key), str)]
    if named:
        activation = named[0]
        if c.get("model_type") == "gemma" and activation == "gelu":
            activation = "gelu_new"  # `transformers` takes the first Gemma's gelu for its approximation by tanh
        c = {key: value for key, value in c.items() if key not in ACTIVATIONS}
        c["hidden_act"] = SAME.get(activation, activation)
    if c.get("model_type") in SCALED:
        c = {"scale_decoder_outputs": c.get("tie_word_embeddings", True), **c}
    if "feed_forward_proj" in c:  # the T5 family: these follow from it
        c = {key: value for key, value in c.items() if key not in ("dense_act_fn", "is_gated_act")}
    heads, width = c.get("num_attention_heads"), c.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        derived = {"num_key_value_heads": heads, "head_dim": width // heads}
        c |= {
            key: value for key, value in derived.items() if key not in c
        }  # last: these come after the fields that they follow from
    if not c.get("use_sliding_window", True):
        c = {key: value for key, value in c.items() if key not in ("sliding_window", "max_window_layers")}
    types = c.get("layer_types")
    if types and all(kind == "full_attention" for kind in types):
        del c["layer_types"]
    return c


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A field, or its default; SpecError if it is of another kind than that."""
    return Config(config, str(config.get("model_type"))).get(key, default)


def _rope(c: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings, taken out of a config, as `rope_parameters` of `transformers` 5 has them."""
    scaling, parameters = c.pop("rope_scaling", {}), c.pop("rope_parameters", {})
    local = c.pop("rope_local_base_freq", None)
    single = {ROPE[key]: c.pop(key) for key in list(c) if key in ROPE}
    settings = {**single, **scaling, **parameters}
    if any(isinstance(value, Mapping) for value in settings.values()):  # one for each type of layer
        return {key: _one_rope(value) if isinstance(value, Mapping) else value for key, value in parameters.items()}
    if local is not None:
        return {"full_attention": _one_rope(settings), "sliding_attention": {"rope_theta": local}}
    return _one_rope(settings)


def _one_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    _get(settings, "rope_theta", 1.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    rest = {key: value for key, value in settings.items() if key not in ("rope_type", "type") and value is not None}
    # "mrope" (Qwen2-VL) has one position for each of three coordinates; those of a text are equal, as by default.
    return rest if kind in ("default", "mrope") else {**rest, "rope_type": kind}


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """The base of rotary embeddings without scaling; None if they are scaled, of several kinds, or not understood."""
    try:
        text = _alike(text_config(config))
    except SpecError:  # raised, with the model's name, where configs are compared
        return None
    rope = {"rope_theta": _default("rope_theta", text), **text.get("rope_parameters", {})}
    return float(rope["rope_theta"]) if set(rope) == {"rope_theta"} else None


def _deciding_differences(one: Checkpoint, other: Checkpoint) -> dict[str, Difference]:
    ours, theirs = deciding(one), deciding(other)
    spelled = all(any(key in checkpoint.config for key in ACTIVATIONS) for checkpoint in (one, other))
    left = ACTIVATIONS if spelled else ()  # compared where spellings are made equal
    keys = [key for key in ours if key in theirs and ours[key] != theirs[key] and key not in left]
    return {key: Difference(key, ours[key], theirs[key], True) for key in keys}


def deciding(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields that a declaration reads, dotted where they are nested, and SCALARS, with their defaults; without
    rotary settings, which have several spellings."""
    c = Config(checkpoint.config, str(checkpoint.config["model_type"]))
    try:
        lookup(checkpoint.config, checkpoint.name).declare(c)
        for key, default in SCALARS.items():
            c.get(key, default)
    except SpecError as error:
        raise SpecError(f"{checkpoint.name}: {error}") from None
    others = {*OF_HEADS, *ROPE, "rope_parameters", "rope_scaling"}
    fields = {key: value for key, value in c.seen.items() if not isinstance(value, Mapping)}
    seen = {key: value for key, value in fields.items() if value is not None and key not in others}
    return {key: SAME.get(str(value), value) for key, value in seen.items()}

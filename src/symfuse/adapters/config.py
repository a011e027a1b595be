"""Read an adapter's folder: its config, whether it is plain LoRA, and its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from symfuse.errors import CheckpointError
from symfuse.io import TensorInfo
from symfuse.io.folder import read_json
from symfuse.io.lazy import StoredTensors
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.tensors import DTYPE_NAMES
from symfuse.io.torch_file import read_torch_file
from symfuse.messages import first_line

CONFIG, SAFETENSORS, TORCH = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MODEL_WEIGHTS = re.compile(r"(model|pytorch_model)\b.*\.(safetensors|bin|index\.json)")
WAY_OUT = "Merge it with peft, PeftModel.from_pretrained(base, adapter).merge_and_unload(), save that and use it"
# Options that make a layer compute something other than W + scale·B·A, or of another model than the base.
UNSUPPORTED = {
    "use_dora": "DoRA, which also rescales the rows of the weight",
    "layer_replication": "layer replication, whose model has more layers than the base",
    "target_parameters": "LoRA of bare parameters, such as fused experts",
    "trainable_token_indices": "trainable tokens",
    "alora_invocation_tokens": "activated LoRA, which acts on some positions only",
    "use_qalora": "QALoRA, which pools the inputs",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow, which routes between adapters",
    "kasa_config": "KaSA, which changes the base's weights",
    "monteclora_config": "MonteCLoRA, which samples its weights",
}
# The initialisation of A and B. The other kinds in peft (pissa, olora, corda, lora_ga, loftq) subtract B·A from the
# base, or quantise it; an adapter that peft converted for the unchanged base has `true` here.
INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Options that describe how the adapter was made, but do not change what it computes.
TRAINING = {
    "task_type", "auto_mapping", "revision", "inference_mode", "peft_version", "target_modules", "exclude_modules",
    "lora_dropout", "bias", "lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "runtime_config",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
MAX_RANK = 2**31 - 1
WHOLE, POSITIVE, FLAG = (
    f"a whole number from 1 to {MAX_RANK}",
    "a positive number below 3.4e38, the end of float32",
    "true or false",
)
KINDS: Mapping[str, Callable[[Any], bool]] = {
    WHOLE: lambda value: type(value) is int and 1 <= value <= MAX_RANK,
    POSITIVE: lambda value: type(value) in (int, float) and 0 < value < 3.4e38,
    FLAG: lambda value: value is None or isinstance(value, bool),
    "a text": lambda value: value is None or isinstance(value, str),
    "a JSON object": lambda value: isinstance(value, Mapping),
}
# Patterns for names of modules are regular expressions of whoever wrote the file. For some, such as `(a+)+x`, `re`
# takes time that doubles with every letter of the name. These are refused.
LETTERS = 64  # the length of a name, about, and so the ways in which one unbounded repeat can match
MOST_WAYS = LETTERS**4  # that `re` may have to try
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")


@dataclass(frozen=True)
class Config:
    """The content of adapter_config.json about the deltas."""

    base: str | None
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    fan_in_fan_out: bool
    unknown: tuple[str, ...]
    dora: bool = False

    @classmethod
    def read(cls, folder: Path, *, dora: bool = False) -> Config:
        """CheckpointError for a file that is damaged, and, by name, for kinds of adapter other than plain LoRA. dora:
        whether DoRA is let pass."""
        values = read_json(folder / CONFIG)
        _refuse_unsupported(folder, {k: v for k, v in values.items() if not (dora and k == "use_dora")})
        known = {"peft_type", "init_lora_weights", "base_model_name_or_path", "r", "lora_alpha", "use_rslora"}
        known |= {"rank_pattern", "alpha_pattern", "fan_in_fan_out", *UNSUPPORTED, *TRAINING}

        def value(key: str, kind: str, default: Any = None) -> Any:
            return _checked(folder, key, values.get(key, default), kind)

        return cls(
            base=value("base_model_name_or_path", "a text") or None,
            rank=value("r", WHOLE, 8),
            alpha=float(value("lora_alpha", POSITIVE, 8)),
            rank_stabilised=bool(value("use_rslora", FLAG)),
            ranks=_patterns(folder, "rank_pattern", values.get("rank_pattern"), WHOLE),
            alphas=_patterns(folder, "alpha_pattern", values.get("alpha_pattern"), POSITIVE),
            fan_in_fan_out=bool(value("fan_in_fan_out", FLAG)),
            unknown=tuple(sorted(key for key, value in values.items() if value and key not in known)),
            dora=bool(value("use_dora", FLAG)),
        )

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """lora_alpha / r, or lora_alpha / √r if rank-stabilised (Kalajdzievski 2023, arXiv 2312.03732)."""
        rank = self.rank_of(module)
        alpha = float(_of_pattern(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a whole model (some trainers leave an adapter's config beside one).
    CheckpointError if it is not readable."""
    try:
        return (folder / CONFIG).is_file() and not any(MODEL_WEIGHTS.fullmatch(path.name) for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def read_tensors(folder: Path) -> tuple[StoredTensors, tuple[str, ...]]:
    """The tensors of an adapter under the names of its file, each read when it is asked for, and notes for the user.

    CheckpointError for a file that is absent or damaged, holds code, or anything other than named tensors.
    """
    path = folder / SAFETENSORS if (folder / SAFETENSORS).is_file() else folder / TORCH
    if not path.is_file():
        raise CheckpointError(f"{folder} has a {CONFIG} and neither {SAFETENSORS} nor {TORCH}. Complete the download.")
    try:
        stored, notes = (read_safetensors(path), ()) if path.name == SAFETENSORS else read_torch_file(path)
    except CheckpointError:
        raise
    except Exception as error:  # bytes that are no pickle can make its reader raise anything
        raise CheckpointError(
            f"{path.name} cannot be read; copy or download it again. ({path}: {first_line(error)})"
        ) from error
    if not stored:
        raise CheckpointError(f"{path.name} holds no tensors, so the adapter would change nothing. ({path})")
    return StoredTensors(stored), notes


def require_floating(where: str, name: str, info: TensorInfo) -> None:
    """CheckpointError if a tensor holds integers, complex numbers or truth values, which are no weights to add."""
    if not info.dtype.is_floating_point or info.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{where}: {name!r} is {info}, expected floating-point numbers (float32, bfloat16, …). Convert it, or, "
            "if it is quantised, use the original."
        )


def _refuse_unsupported(folder: Path, values: Mapping[str, Any]) -> None:
    kind = str(values.get("peft_type"))
    if kind != "LORA":
        raise CheckpointError(f"{folder} is an adapter of type {kind}, expected LORA. {WAY_OUT}. ({folder / CONFIG})")
    for key, what in UNSUPPORTED.items():
        if values.get(key):
            raise CheckpointError(f"{folder} uses {what} ({key}), expected plain LoRA. {WAY_OUT}.")
    init = values.get("init_lora_weights", True)
    if init not in INITS:
        raise CheckpointError(
            f"{folder} was started from {init!r} (init_lora_weights), which changes the base's weights too, so the "
            "adapter alone is not the difference from the base. Convert it to plain LoRA: save_pretrained(folder, "
            "path_initial_model_for_weight_conversion=…) of peft. If the base that you give is already the changed "
            "one, set init_lora_weights to true in a copy of the adapter."
        )


def _checked(folder: Path, key: str, value: Any, kind: str) -> Any:
    """A value of the config, or CheckpointError if it has another type."""
    if not KINDS[kind](value):
        text = repr(value)
        shown = text if len(text) <= 60 else f"{text[:60]}…"
        raise CheckpointError(f"{CONFIG}: {key} is {shown}, expected {kind}. ({folder / CONFIG})")
    return value


def _patterns(folder: Path, key: str, value: Any, kind: str) -> Mapping[str, Any]:
    """The values of a mapping from regular expressions for modules."""
    patterns: Mapping[str, Any] = _checked(folder, key, value or {}, "a JSON object")
    for pattern, one in patterns.items():
        _checked(folder, f"{key} of {pattern!r}", one, kind)
        try:
            module_pattern(pattern)
        except ValueError as error:
            raise CheckpointError(f"{CONFIG}: {key}: {error}. ({folder / CONFIG})") from error
    return patterns


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As peft does: the first pattern that matches."""
    return next((value for pattern, value in patterns.items() if module_pattern(pattern)(module)), default)


@cache
def module_pattern(pattern: str) -> Callable[[str], bool]:
    """What peft makes of a name or a regular expression: whether it matches the end of a module's dotted name.

    ValueError if it is not valid, has look-around, back-references or flags, or could take very long to match.
    """
    try:
        compiled = re.compile(rf"(.*\.)?({pattern})$")
        if _ways(import_module("re._parser").parse(pattern)) > MOST_WAYS:
            raise ValueError("it has too many repeats and alternatives, so that it could take very long to match")
    except (re.error, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is not valid: {error}") from error
    return lambda name: compiled.match(name) is not None


def _ways(nodes: Any) -> int:
    """In how many ways a sequence of nodes can match the letters of a name, at most."""
    return math.prod(_ways_of(str(kind), argument) for kind, argument in nodes)


def _ways_of(kind: str, argument: Any) -> int:
    if kind in _SINGLE:
        return 1
    if kind == "SUBPATTERN" and not argument[1] and not argument[2]:  # no flags of its own
        return _ways(argument[3])
    if kind == "BRANCH":
        return sum(map(_ways, argument[1]))
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = argument
        ways = _ways(inner)
        if most > 1 and ways > 1:
            raise ValueError("it repeats what has repeats or alternatives itself, which could take very long to match")
        repeats: int = max(1, min(most - least + 1, LETTERS))
        return repeats * ways
    raise ValueError(f"it has a part of kind {kind.lower()}, expected no look-around, back-references or flags")

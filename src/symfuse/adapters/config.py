"""Reading an adapter's folder: what its config says, which kinds are plain LoRA, and its tensors."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from symfuse.errors import CheckpointError

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
# How A and B began. The others that peft knows (pissa, olora, corda, lora_ga, loftq) subtract B·A from the base, or
# quantise it; an adapter that peft converted for the unchanged base says `true` here.
INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Options that say how the adapter was made, but not what it computes.
TRAINING = {
    "task_type", "auto_mapping", "revision", "inference_mode", "peft_version", "target_modules", "exclude_modules",
    "lora_dropout", "bias", "lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "runtime_config",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What adapter_config.json says of the deltas."""

    base: str | None
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    fan_in_fan_out: bool
    unknown: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Config:
        """CheckpointError for a file that is damaged, and, by name, for kinds of adapter other than plain LoRA."""
        values = _read_json(folder / CONFIG)
        _refuse_unsupported(folder, values)
        known = {"peft_type", "init_lora_weights", "base_model_name_or_path", "r", "lora_alpha", "use_rslora"}
        known |= {"rank_pattern", "alpha_pattern", "fan_in_fan_out", *UNSUPPORTED, *TRAINING}
        rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
        ranks, alphas = values.get("rank_pattern") or {}, values.get("alpha_pattern") or {}
        base = values.get("base_model_name_or_path") or None
        _check(folder, base, (rank, alpha), (ranks, alphas))
        return cls(
            base=base,
            rank=int(rank),
            alpha=float(alpha),
            rank_stabilised=bool(values.get("use_rslora")),
            ranks=ranks,
            alphas=alphas,
            fan_in_fan_out=bool(values.get("fan_in_fan_out")),
            unknown=tuple(sorted(key for key, value in values.items() if value and key not in known)),
        )

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """lora_alpha / r, or lora_alpha / √r if rank-stabilised (Kalajdzievski 2023, arXiv 2312.03732)."""
        rank = self.rank_of(module)
        alpha = float(_of_pattern(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a whole model (some trainers leave an adapter's config beside one)."""
    return (folder / CONFIG).is_file() and not any(MODEL_WEIGHTS.fullmatch(path.name) for path in folder.iterdir())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter under the names of its file; memory-mapped, so that they are read when used."""
    path = folder / SAFETENSORS if (folder / SAFETENSORS).exists() else folder / TORCH
    if not path.exists():
        raise CheckpointError(f"{folder} has a {CONFIG} and neither {SAFETENSORS} nor {TORCH}. Complete the download.")
    loaded: Any
    try:
        if path.name == SAFETENSORS:
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} was not loaded: it is damaged, or holds Python objects besides tensors, which can run code "
            f"when they are read. Save the adapter as safetensors. ({path})"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read; copy or download it again. ({path}: {error})") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CheckpointError(f"{path.name} holds something other than named tensors. ({path})")
    if not loaded:
        raise CheckpointError(f"{path.name} holds no tensors, so the adapter would change nothing. ({path})")
    return loaded


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON: {error}. ({path})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} holds {type(values).__name__}, expected a JSON object. ({path})")
    return values


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


def _check(folder: Path, base: Any, numbers: tuple[Any, ...], patterns: tuple[Any, ...]) -> None:
    mappings = all(isinstance(pattern, Mapping) for pattern in patterns)
    values = [*numbers, *(value for pattern in patterns if mappings for value in pattern.values())]
    positive = all(isinstance(value, (int, float)) and value > 0 for value in values)
    if not (isinstance(base, str | None) and mappings and positive):
        raise CheckpointError(
            f"{CONFIG}: expected positive numbers for r, lora_alpha and the values of rank_pattern and "
            f"alpha_pattern, and a text for base_model_name_or_path. ({folder / CONFIG})"
        )
    for key in (key for pattern in patterns for key in pattern):
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(
                f"{CONFIG}: the pattern {key!r} is not valid: {error}. ({folder / CONFIG})"
            ) from error


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As peft does: the first pattern, a regular expression, that matches the end of the module's dotted name."""
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)

"""The difference of two models as a LoRA adapter: a truncated singular value decomposition of every linear layer."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.adapters.config import CONFIG, MAX_RANK, SAFETENSORS, module_pattern, require_floating
from symfuse.adapters.factors import Factors, factorise
from symfuse.adapters.names import Layers, class_name, is_tied, is_vocabulary
from symfuse.arguments import checked
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import Checkpoint, TensorInfo, is_finite
from symfuse.io.remote import Place
from symfuse.io.sources import Source, opened
from symfuse.io.writer import output_folder, write_tensors
from symfuse.messages import some

# Task of peft, by the end of the class, with the modules that peft then trains, and expects in a file, as a whole. None
# for questions: the class of peft for that task does not pass token types on.
TASKS: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    r".*(ForCausalLM|LMHeadModel)": ("CAUSAL_LM", ()),
    r".*ForSequenceClassification": ("SEQ_CLS", ("classifier", "score")),
    r".*ForTokenClassification": ("TOKEN_CLS", ("classifier", "score")),
    r".*ForQuestionAnswering": (None, ("qa_outputs",)),
}
# What peft refuses to hold as a whole.
CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
NO_FACTORS = "no layer that peft adapts, or not selected; save_rest (--save-rest) saves it as a whole"
AS_EXPERT = "peft takes a layer of its name for an expert; save_rest (--save-rest) saves it as a whole"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory. factors: by module. saved: tensors held as a whole. left_out: the norms of the
    differences that the adapter does not hold, by tensor. config: the content of adapter_config.json. reasons: why a
    tensor is left out."""

    factors: Mapping[str, Factors]
    saved: Mapping[str, Tensor]
    left_out: Mapping[str, float]
    config: Mapping[str, Any]
    sources: tuple[Place, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """|difference − adapter| / |difference| over all tensors that were not saved as a whole (Frobenius norm)."""
        lost = math.hypot(*(f.residual for f in self.factors.values()), *self.left_out.values())
        total = math.hypot(*(f.norm for f in self.factors.values()), *self.left_out.values())
        return lost / total if total else 0.0

    def report(self) -> list[str]:
        """The truncation error: in total, then of every module; and what was left out."""
        lines = [f"relative error {self.error:.3g} in total, {len(self.factors)} modules of low rank"]
        lines += [
            f"{module}: rank {f.rank}, relative error {f.error:.3g}" + ("" if f.exact else " (randomised SVD)")
            for module, f in self.factors.items()
        ]
        lines += [f"{name}: saved as a whole" for name in self.saved]
        for name, norm in self.left_out.items():
            reason = f" ({self.reasons[name]})" if name in self.reasons else ""
            lines.append(f"{name}: left out, a difference of norm {norm:.3g}{reason}")
        return lines

    def tensors(self) -> dict[str, Tensor]:
        """The tensors under the names that peft gives them."""
        out = {}
        for module, factors in self.factors.items():
            out[f"base_model.model.{module}.lora_A.weight"] = factors.down
            out[f"base_model.model.{module}.lora_B.weight"] = factors.up
        for name, tensor in self.saved.items():
            module, _, leaf = name.rpartition(".")
            at = f"{module}.base_layer" if module in self.factors else module
            out[f"base_model.model.{at}.{leaf}"] = tensor
        return out

    @checked
    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a folder that `PeftModel.from_pretrained` loads; it appears as a whole, or nothing does.

        OutputError if it exists, lies in one of the models, or cannot be written.
        """
        return write_adapter(folder, self.tensors(), self.config, self.sources)


def write_adapter(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    sources: Sequence[Place],
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write an adapter's folder, as a whole or not at all. sources: what is never written to. files: texts beside it,
    by name."""
    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    texts = {**(files or {}), CONFIG: json.dumps(dict(config), indent=2, sort_keys=True) + "\n"}
    nbytes = sum(info.nbytes for info in infos.values()) + sum(map(len, texts.values()))
    with output_folder(folder, nbytes, sources) as partial:
        write_tensors(partial / SAFETENSORS, infos, tensors.__getitem__)
        for name, text in texts.items():
            (partial / name).write_text(text, "utf-8")
    return Path(folder)


@checked
def extract_lora(
    finetuned: Source,
    base: Source,
    rank: int = 128,
    *,
    modules: Sequence[str] = (),
    exclude: Sequence[str] = (),
    alpha: int | None = None,
    dtype: torch.dtype = torch.float32,
    save_rest: bool = False,
) -> Adapter:
    """What a fine-tune changed, as a LoRA adapter of at most that rank, the nearest one, layer by layer.

    `.save(folder)` it in the format of peft.

    modules, exclude: the linear layers to take or to leave, by name, last part of a name, or regular expression, as
    peft matches them. alpha: lora_alpha, by default the rank; only the factors' scale depends on it. What is not of
    low rank (embeddings, norms, biases, excluded layers), and what peft adapts in no layer, is left out and reported,
    or saved as a whole with `save_rest` where peft can load it. A head of a classifier is always saved as a whole: peft
    expects it. Layers have the names that the installed `transformers` gives them in memory, as peft asks for.
    IncompatibleError if the models have other tensors or shapes, or differences or factors are too large for their
    dtypes; CheckpointError for layers of integers; OptionError for patterns that match nothing.
    """
    alpha = rank if alpha is None else alpha
    if not all(1 <= number <= MAX_RANK for number in (rank, alpha)):
        raise OptionError(f"rank and alpha are whole numbers, at least 1 and at most {MAX_RANK}")
    if dtype not in DTYPES:
        names = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        raise OptionError(f"the factors' dtype is {dtype}, expected a common floating-point one: {names}")
    finetuned, base = opened(finetuned), opened(base)
    layers = Layers.of(base.config)
    finetuned, base = layers.named(finetuned), layers.named(base)
    _require_same_tensors(finetuned, base)
    task, heads = _task(base, layers)
    linear = _linear(base, heads, layers)
    selected = _selected(linear, modules, exclude)
    factors: dict[str, Factors] = {}
    rest: dict[str, float] = {}
    for name in _floating(finetuned, base, linear):
        delta = _difference(finetuned, base, name)
        norm = float(torch.linalg.vector_norm(delta, dtype=torch.float64))
        module = name.removesuffix(".weight")
        if norm and name.endswith(".weight") and module in selected:
            turned = delta.T if layers.transposed(module) else delta
            least = rank if layers.together(module) else 1
            factors[module] = factorise(module, turned, rank, alpha, dtype, least)
        elif norm:
            rest[name] = norm
    if any(map(layers.together, factors)):
        alone = [module for module in linear if layers.together(module) and module not in factors]
        factors |= {module: Factors.zero(base.info(f"{module}.weight").shape, rank, dtype) for module in alone}
    refused = _refused({_owner(name) for name in rest} - factors.keys(), factors, base, layers)
    saved = _saved(rest if save_rest else {}, heads, factors, base, refused)
    left_out = {name: norm for name, norm in rest.items() if name not in saved}
    why = {_owner(name): AS_EXPERT if layers.mistaken(_owner(name)) else NO_FACTORS for name in left_out} | refused
    reasons = {name: why[_owner(name)] for name in left_out}
    if not factors:
        raise IncompatibleError(f"{finetuned.name} and {base.name} differ in no selected linear layer")
    config = _config(base, factors, saved, rank, alpha, task, heads)
    config["fan_in_fan_out"] = any(map(layers.transposed, factors))
    tensors = {name: finetuned[name].contiguous() for name in saved}
    return Adapter(factors, tensors, left_out, config, (*base.sources, *finetuned.sources), reasons)


def _require_same_tensors(finetuned: Checkpoint, base: Checkpoint) -> None:
    if single := sorted(base.keys() ^ finetuned.keys()):
        raise IncompatibleError(
            f"{finetuned.name} and {base.name} do not have the same tensors: only one of them has {some(single)}"
        )
    for name in base:
        ours, theirs = finetuned.info(name), base.info(name)
        if ours.shape != theirs.shape:
            raise IncompatibleError(
                f"{name!r} is {ours} in {finetuned.name} and {theirs} in {base.name}. Resize the base's vocabulary, "
                "or give the model that was finetuned"
            )


def _floating(finetuned: Checkpoint, base: Checkpoint, linear: Sequence[str]) -> list[str]:
    """The tensors to compare: all but those that hold other numbers in both models, and are no linear layer."""
    weights = {f"{module}.weight" for module in linear}
    names = []
    for name in base:
        models = (finetuned, base)
        if name in weights or any(model.info(name).dtype.is_floating_point for model in models):
            for model in models:
                require_floating(model.name, name, model.info(name))
            names.append(name)
    return names


def _difference(finetuned: Checkpoint, base: Checkpoint, name: str) -> Tensor:
    delta = finetuned.read(name) - base.read(name)
    if not is_finite(delta):
        raise IncompatibleError(
            f"{name!r}: the difference of {finetuned.name} and {base.name} does not fit in {delta.dtype}; there is no "
            "adapter for it. Look at the numbers of both: some are near the largest that there are"
        )
    return delta


def _linear(base: Checkpoint, heads: Sequence[str], layers: Layers) -> list[str]:
    """Modules with a matrix to multiply with, except the heads that peft holds as a whole."""
    names = [name.removesuffix(".weight") for name in base if name.endswith(".weight")]
    return [
        module
        for module in names
        if len(base.info(f"{module}.weight").shape) == 2
        and layers.adapted(module)
        and not _inside(module, heads)
        and not (is_tied(base) and is_vocabulary(f"{module}.weight", base))
    ]


def _selected(linear: Sequence[str], modules: Sequence[str], exclude: Sequence[str]) -> set[str]:
    def matching(pattern: str) -> set[str]:
        try:
            result = set(filter(module_pattern(pattern), linear))
        except ValueError as error:
            raise OptionError(str(error)) from error
        if not result:
            raise OptionError(f"{pattern!r} matches no linear layer, such as {some(linear, 3)}")
        return result

    taken = set(linear) if not modules else set().union(*map(matching, modules))
    return taken.difference(*map(matching, exclude))


def _inside(module: str, heads: Sequence[str]) -> bool:
    """Whether peft holds the module as a whole: it compares the ends of names."""
    return any(part.endswith(tuple(heads)) for part in module.split("."))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _refused(
    modules: Collection[str], factors: Mapping[str, Factors], base: Checkpoint, layers: Layers
) -> dict[str, str]:
    """Why peft cannot hold modules as a whole, of those that it cannot.

    peft finds modules by the end of their names, and then wants each with all its tensors, changed or not: also those
    that a file has not, because they are tied.
    """
    tensors = layers.tensors
    owners = {_owner(name) for name in (*base, *tensors)}
    outer = {module[: dot.start()] for module in owners for dot in re.finditer(r"\.", module)} | {""}
    tied = {_owner(name) for name, shared in tensors.items() if shared or name not in base}
    tied |= {_owner(name) for name in base if name.endswith(".weight") and is_vocabulary(name, base) and is_tied(base)}
    containers = {module for module, part in layers.parts.items() if isinstance(part, CONTAINERS)}
    result = {}
    for module in modules:
        same = {one for one in (*owners, *layers.parts) if one.endswith(module)}
        if same & tied:
            result[module] = "a weight of its module is tied to that of another"
        elif same & outer:
            result[module] = "peft saves no parameters of a module that has others inside"
        elif same & factors.keys():
            result[module] = "peft would also save layers of low rank, whose names end alike"
        elif same & containers or (layers.parts and module not in layers.parts):
            result[module] = "peft does not save a module of its kind"
    return result


def _saved(
    rest: Mapping[str, float],
    heads: Sequence[str],
    factors: Mapping[str, Factors],
    base: Checkpoint,
    refused: Collection[str],
) -> list[str]:
    """Tensors to hold as a whole: of heads, the biases of layers with factors, and modules with all their tensors."""
    wanted = {_owner(name) for name in rest} - factors.keys() - set(refused)
    return [
        name
        for name in base
        if _inside(_owner(name), heads)
        or any(_owner(name).endswith(module) for module in wanted)
        or (name in rest and _owner(name) in factors and name.endswith(".bias"))
    ]


def _task(base: Checkpoint, layers: Layers) -> tuple[str | None, tuple[str, ...]]:
    name = class_name(base)
    if layers.translates and name.endswith("ForConditionalGeneration"):
        return "SEQ_2_SEQ_LM", ()
    return next((task for pattern, task in TASKS.items() if re.fullmatch(pattern, name)), (None, ()))


def _outermost(module: str, heads: Sequence[str]) -> str:
    """The head that a module is in, which peft wraps as one; else the module."""
    parts = module.split(".")
    ends = (i for i, part in enumerate(parts, 1) if _inside(part, heads))
    return ".".join(parts[: next(ends, len(parts))])


def _config(
    base: Checkpoint,
    factors: Mapping[str, Factors],
    saved: Sequence[str],
    rank: int,
    alpha: int,
    task: str | None,
    heads: Sequence[str],
) -> dict[str, Any]:
    owners = dict.fromkeys(_outermost(_owner(name), heads) for name in saved)
    whole = [module for module in owners if module not in factors]
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base.name if base.folder is None else str(base.folder.resolve()),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(factors),
        "rank_pattern": {re.escape(module): f.rank for module, f in factors.items() if f.rank < rank},
        "alpha_pattern": {},
        "bias": "lora_only" if len(whole) < len(owners) else "none",
        "modules_to_save": whole or None,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }

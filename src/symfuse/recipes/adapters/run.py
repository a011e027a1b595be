"""The merge of a recipe of adapters: their parts by the recipe's method, then factors of a rank, with their error.

Merged parts of DoRA are c − 1 ↦ e and diag(c) s B A ↦ E. The sum W + diag(e) W + E is DoRA again, exactly: of the
update diag(1 / (1 + e)) E, its magnitudes being the norms of the sum's rows.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse import __version__
from symfuse.adapters.extraction import write_adapter
from symfuse.adapters.factors import Factors
from symfuse.adapters.lora import MAGNITUDE
from symfuse.adapters.names import target_name
from symfuse.adapters.spaces import Pair, averaged, in_dtype
from symfuse.adapters.updates import BIAS, Updates, require_alike
from symfuse.arguments import checked
from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.companions import RUN
from symfuse.io.remote import Place
from symfuse.io.tensors import require_fit
from symfuse.merging import Merged
from symfuse.merging.engine import effective_weights
from symfuse.methods import lookup
from symfuse.recipes.adapters.parts import Parts, weight
from symfuse.recipes.effect import without_effect
from symfuse.recipes.plan import plan_recipe
from symfuse.recipes.schema import ModelRef, Recipe
from symfuse.recipes.stage import open_model

LINEAR = ("linear", "task_arithmetic")  # with one result in all coordinates
ZERO = ModelRef("the unchanged base")
BIASES = ("all", "lora_only", "none")
# What a config says of how an adapter was made, or where: the merged one names its modules.
OF_TRAINING = ("exclude_modules", "layers_to_transform", "layers_pattern", "eva_config", "corda_config", "revision")


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter in memory. tensors: under the names that peft gives them. config: the content of adapter_config.json.
    factors: by module, with the error of each; run: what was done, the content of symfuse.json. notes: messages for the
    user."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    factors: Mapping[str, Factors]
    run: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    sources: tuple[Place, ...] = ()

    @property
    def error(self) -> float:
        """|merge − adapter| / |merge| over all updates of low rank (Frobenius norm); rounding aside."""
        return error_of(self.factors)

    @checked
    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a folder that `PeftModel.from_pretrained` loads, with symfuse.json; it appears as a whole, or nothing
        does. OutputError if it exists, lies in one of the adapters, or cannot be written."""
        return write_adapter(folder, self.tensors, self.config, self.sources, {RUN: json.dumps(self.run, indent=2)})


def merge_adapters(recipe: Recipe, known: Mapping[str, Checkpoint] | None = None) -> MergedAdapter:
    """The merge of a recipe whose models are adapters. known: models in memory that `base_model` may name.

    Raises CheckpointError for folders that are no LoRA adapters, and for NaN; IncompatibleError for adapters of other
    bases, and for numbers that do not fit in the dtype; OptionError for methods, spaces and ranks that do not apply,
    and for what needs a base that is not there.
    """
    method = lookup(recipe.merge_method)
    if method.learn is not None:
        error = f"{method.name} runs models on data, and does not merge adapters; merge BASE+ADAPTER of each"
        recipe.refuse(OptionError(error), "merge_method")
    adapters = {entry.model: Updates.read(Path(entry.model.path)) for entry in recipe.models}
    listed = list(adapters.values())
    require_alike(listed)
    usual = "core" if method.name in LINEAR else "full"
    space = "core" if recipe.space == "factors" else recipe.space or usual
    parts = Parts(listed, space, _base(recipe, listed, known or {}))
    _require_ranks(recipe, parts)
    _require_linear(parts)
    _ = parts.grounds  # whose targets are checked
    parts.require_base(of_values=method.name == "linear" and "normalize" not in recipe.parameters)
    models = {ref: parts.model(str(ref), one) for ref, one in adapters.items()}
    zero = None if method.base == "unused" else ZERO
    models |= {} if zero is None else {zero: parts.model(str(zero), None)}
    merged = plan_recipe(replace(recipe, base_model=zero, dtype=None, out_dtype=None), models).tensors
    assert isinstance(merged, Merged)
    return _Result(recipe, parts, merged).adapter()


def _base(recipe: Recipe, adapters: Sequence[Updates], known: Mapping[str, Checkpoint]) -> Checkpoint | None:
    """The base, if the recipe names one, or the adapters name one local folder."""
    if recipe.base_model is not None:
        return open_model(recipe, recipe.base_model, known)
    named = {one.config.base: one.folder for one in adapters if one.config.base is not None}
    places = {str(Path(name).resolve()) if Path(name).is_dir() else name: name for name in named}
    if len(places) > 1:
        listed = ", ".join(f"{named[name]} of {name}" for name in places.values())
        raise IncompatibleError(
            f"the adapters are of other bases: {listed}. Move them onto one first (symfuse rebase ADAPTER --from BASE "
            "--onto OTHER -o NEW); if the bases are one model under two names, name it: --base, or base_model in a "
            "recipe"
        )
    local = [place for place in places if (Path(place) / "config.json").is_file()]
    return open_checkpoint(local[0]) if local else None


def _require_ranks(recipe: Recipe, parts: Parts) -> None:
    """OptionError for a rank, or averaged factors, that these adapters cannot have."""
    ranks = {module: [one.rank(module) for one in parts.adapters if module in one.factors] for module in parts.modules}
    largest = max(ranks, key=lambda module: sum(ranks[module]), default=None)
    if recipe.rank is not None and largest is not None and recipe.rank > sum(ranks[largest]):
        error = (
            f"rank {recipe.rank}: the ranks of these adapters add up to {sum(ranks[largest])} at most ({largest}), at "
            "which nothing is cut off; give that or less, or leave it out"
        )
        recipe.refuse(OptionError(error), "rank")
    if recipe.space == "factors":
        differ = next((module for module, of_each in ranks.items() if len(set(of_each)) > 1), None)
        reasons = {
            f"merge method {recipe.merge_method}": recipe.merge_method != "linear",
            "DoRA": parts.dora,
            f"ranks that differ ({differ})": differ is not None,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            error = f"space factors does not go with {reason}; take core, knots or full"
            recipe.refuse(OptionError(error), "space")


def _require_linear(parts: Parts) -> None:
    """CheckpointError for adapters beside DoRA that peft has not for DoRA."""
    layers = [(one, module, keys) for one in parts.adapters for module, keys in one.factors.items()]
    linear = all("A.weight" in keys and len(one.shape(module)[0]) == 1 for one, module, keys in layers)
    if parts.dora and (parts.biased or not linear):
        raise CheckpointError(
            "DoRA is merged only with adapters of linear layers whose factors have no biases (lora_bias); merge the "
            "models that peft makes of the adapters (merge_and_unload)"
        )


@dataclass(frozen=True)
class _Result:
    """The adapter of merged parts."""

    recipe: Recipe
    parts: Parts
    merged: Merged

    def adapter(self) -> MergedAdapter:
        ranks = {module: self._rank(module) for module in self.parts.modules}
        alpha = max(ranks.values(), default=1)
        tensors: dict[str, Tensor] = {}
        factors: dict[str, Factors] = {}
        for module, rank in ranks.items():
            space, exact = self.parts.space_of(module), self.merged.wide(weight(module))
            near = space.coordinates(self._average(module)) if self.recipe.space == "factors" else exact
            factors[module] = space.factors(module, near, exact, rank, alpha)
            tensors |= self._of_module(module, factors[module], alpha)
        tensors |= {f"base_model.model.{self.parts.inner(name)}": self._whole(name) for name in self.parts.wholes}
        notes = [f"{one.folder.name}: {note}" for one in self.parts.adapters for note in one.notes]
        notes += dict.fromkeys(without_effect(self.recipe, list(self.merged)))
        base = self.parts.base
        sources = (*(one.folder for one in self.parts.adapters), *(() if base is None else base.sources))
        run = self._run(factors, alpha, notes)
        return MergedAdapter(tensors, self._config(factors, alpha), factors, run, tuple(notes), sources)

    def _rank(self, module: str) -> int:
        ranks = [one.rank(module) for one in self.parts.adapters if module in one.factors]
        whole = max(ranks) if self.recipe.space == "factors" else sum(ranks)
        return min(whole, self.recipe.rank or whole)

    def _average(self, module: str) -> Pair:
        """Of the factors, with the weights of the merge."""
        output = self.merged.outputs[weight(module)]
        names = [term.checkpoint.name for term in output.terms]
        shares = dict(zip(names, effective_weights(output) or (), strict=True))
        there = [one for one in self.parts.adapters if module in one.factors]
        scales = [one.config.scale_of(module) for one in there]
        return averaged([one.matrices(module) for one in there], scales, [shares[str(one.folder)] for one in there])

    def _of_module(self, module: str, found: Factors, alpha: int) -> dict[str, Tensor]:
        """The tensors of a module, by key."""
        first = self.parts.first(module)
        keys, scale = first.pair(module), alpha / found.rank
        dtypes = [self._dtype(first, key) for key in keys]
        out: dict[str, Tensor] = {}

        def add(part: str, value: Tensor) -> None:
            out[f"base_model.model.{module}.lora_{part}"] = _rounded(f"{module}.lora_{part}", value, dtypes[1])

        if self.parts.dora:
            stretch = 1 + self.merged.wide(f"{module}.lora_{MAGNITUDE}")
            if not bool((stretch > 0).all()):
                raise IncompatibleError(f"{module}: merged magnitudes of DoRA are not positive; take smaller weights")
            found = replace(found, up=found.up / stretch[:, None])
            rows = self.parts.weight(module) + scale * found.up @ found.down
            add(MAGNITUDE, stretch * torch.linalg.vector_norm(rows, dim=1))
        if self.parts.biased:
            add(BIAS, self.merged.wide(f"{module}.lora_{BIAS}") / scale)
        small = in_dtype(module, found, dtypes[0])
        read, written = first.shape(module)
        for key, factor, shape in zip(
            keys, (small.down, small.up), ((found.rank, *read), (written[0], found.rank, *written[1:])), strict=True
        ):
            out[f"base_model.model.{target_name(key)}"] = factor.reshape(shape).contiguous()
        return out

    def _whole(self, name: str) -> Tensor:
        first, old, value = self.parts.holder(name), self.parts.start(name), self.merged.wide(self.parts.inner(name))
        return _rounded(name, value if old is None else value + old, self._dtype(first, first.whole[name]))

    def _dtype(self, one: Updates, key: str) -> torch.dtype:
        named = self.recipe.out_dtype or self.recipe.dtype
        dtype: torch.dtype = one.tensors.infos[key].dtype if named is None else getattr(torch, named)
        return dtype

    def _config(self, factors: Mapping[str, Factors], alpha: int) -> dict[str, Any]:
        """That of the first adapter, with the modules and options of all."""
        every = [one.written for one in self.parts.adapters]
        saved = [module for one in every for module in one.get("modules_to_save") or ()]
        base = self.recipe.base_model
        named = {} if base is None else {"base_model_name_or_path": str(base)}
        return {
            **every[0],
            **{key: None for key in OF_TRAINING if key in every[0]},
            **named,
            "task_type": next((one["task_type"] for one in every if one.get("task_type")), None),
            "r": alpha,
            "lora_alpha": alpha,
            "target_modules": list(factors),
            "rank_pattern": {re.escape(module): f.rank for module, f in factors.items() if f.rank < alpha},
            "alpha_pattern": {},
            "bias": next((word for word in BIASES if any(one.get("bias") == word for one in every)), "none"),
            "modules_to_save": list(dict.fromkeys(saved)) or None,
            "lora_bias": self.parts.biased,
            "use_rslora": False,
            "use_dora": self.parts.dora,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def _run(self, factors: Mapping[str, Factors], rank: int, notes: Sequence[str]) -> dict[str, Any]:
        return {
            "kind": "adapter merge",
            "symfuse": __version__,
            "method": self.recipe.merge_method,
            "paper": lookup(self.recipe.merge_method).paper,
            "space": self.recipe.space or self.parts.space,
            "recipe": self.recipe.text,
            "models": [str(one.folder) for one in self.parts.adapters],
            "rank": rank,
            "error": error_of(factors),
            "worst": max(factors, key=lambda module: factors[module].error, default=None),
            "errors": {module: found.error for module, found in factors.items()},
            "ranks": {module: found.rank for module, found in factors.items()},
            "seed": self.recipe.seed,
            "notes": list(notes),
        }


def error_of(factors: Mapping[str, Factors]) -> float:
    """|exact − factors| / |exact| over all modules (Frobenius norm)."""
    lost, total = (math.hypot(*(getattr(f, key) for f in factors.values())) for key in ("residual", "norm"))
    return lost / total if total else 0.0


def _rounded(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    require_fit(name, value, dtype)
    return value.to(dtype).contiguous()

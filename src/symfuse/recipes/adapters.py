"""A recipe of adapters, merged into one: a merge method, applied to their updates in coordinates (`adapters.spaces`).

Of each module with factors the method merges the coordinates of the updates ΔW = s·B·A, a module that an adapter does
not change being zero there; of tensors that adapters hold as a whole, their differences from the base. The result is
cut to factors of a rank by a singular value decomposition, with its error.

DoRA computes diag(m / |W + sBA|) (W + sBA), with norms of rows: the update diag(c − 1) W + diag(c) s B A, c being that
quotient. c − 1 and diag(c) s B A are merged apart, to e and E. W + diag(e) W + E is DoRA again: of the update
diag(1 / (1 + e)) E, with the norms of the sum's rows as magnitudes, exactly.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse import __version__
from symfuse.adapters.extraction import write_adapter
from symfuse.adapters.factors import Factors
from symfuse.adapters.lora import MAGNITUDE
from symfuse.adapters.names import target_name
from symfuse.adapters.spaces import Pair, Space, averaged, in_dtype, sizes
from symfuse.adapters.updates import BIAS, Ground, Updates, require_alike
from symfuse.arguments import checked
from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io import open as open_checkpoint
from symfuse.io.companions import RUN
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.remote import Place
from symfuse.io.tensors import require_fit
from symfuse.merging import Merged
from symfuse.merging.engine import effective_weights
from symfuse.messages import some
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.recipes.effect import without_effect
from symfuse.recipes.plan import plan_recipe
from symfuse.recipes.schema import ModelRef, Recipe
from symfuse.recipes.stage import open_model

LINEAR = ("linear", "task_arithmetic")  # with one result in all coordinates
ZERO = ModelRef("the unchanged base")
BIASES = ("none", "lora_only", "all")
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
        """|merge − adapter| / |merge| over all updates of low rank (Frobenius norm)."""
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
        recipe.refuse(
            OptionError(f"{method.name} runs models on data, and does not merge adapters; merge BASE+ADAPTER of each"),
            "merge_method",
        )
    adapters = {entry.model: Updates.read(Path(entry.model.path)) for entry in recipe.models}
    require_alike(list(adapters.values()))
    return _Merge(recipe, adapters, _base(recipe, list(adapters.values()), known or {})).result()


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
            "--onto OTHER -o NEW); if the bases are one model under two names, name it: base_model, or --base"
        )
    local = [place for place in places if (Path(place) / "config.json").is_file()]
    return open_checkpoint(local[0]) if local else None


@dataclass(frozen=True)
class _Merge:
    """A merge of adapters of one base, which is needed only for what is not of low rank."""

    recipe: Recipe
    adapters: Mapping[ModelRef, Updates]
    base: Checkpoint | None
    _spaces: dict[str, Space] = field(default_factory=dict)

    # -- what is merged ----------------------------------------------------------------------------

    @cached_property
    def all(self) -> list[Updates]:
        return list(self.adapters.values())

    @cached_property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for one in self.all for module in one.factors))

    @cached_property
    def wholes(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.all for name in one.whole))

    @cached_property
    def biased(self) -> bool:
        """Whether factors have biases (lora_bias)."""
        return any(BIAS in keys for one in self.all for keys in one.factors.values())

    @cached_property
    def dora(self) -> bool:
        return any(one.config.dora for one in self.all)

    @cached_property
    def space(self) -> str:
        """The coordinates of this merge; those of the exact sum for averaged factors."""
        usual = "core" if self.recipe.merge_method in LINEAR else "full"
        return "core" if self.recipe.space == "factors" else self.recipe.space or usual

    @cached_property
    def grounds(self) -> list[Ground | None]:
        return [None if self.base is None else Ground.of(one, self.base) for one in self.all]

    def ground(self, module: str) -> Ground:
        """The base, for the weight of a module."""
        found = next((ground for ground in self.grounds if ground is not None and module in ground.layers), None)
        if found is None:
            self.need_base("DoRA depends on the base's weights")
        assert found is not None
        return found

    def need_base(self, why: str) -> None:
        named = next((one.config.base for one in self.all if one.config.base), None)
        raise OptionError(
            f"{why}, and the base of these adapters is not a local folder ({named!r}); name it: base_model in the "
            "recipe, or --base"
        )

    def start(self, name: str) -> Tensor | None:
        """A tensor of the base that adapters hold as a whole; None if it has none."""
        for ground in self.grounds:
            if ground is not None and name in ground.names:
                return ground.base.read(ground.names[name]).double()
        return None

    def pair(self, one: Updates, module: str) -> Pair:
        """A and s·B, of DoRA diag(c)·s·B."""
        down, up = one.matrices(module)
        return (down, (1 + self.stretch(one, module))[:, None] * up) if one.config.dora else (down, up)

    def stretch(self, one: Updates, module: str) -> Tensor:
        """c − 1 of DoRA, for each row; zero of other adapters."""
        if module not in one.factors or not one.config.dora:
            return torch.zeros(self.ground(module).weight(module).shape[0], dtype=torch.float64)
        down, up = one.matrices(module)
        norms = torch.linalg.vector_norm(self.ground(module).weight(module) + up @ down, dim=1)
        return one.tensor(one.factors[module][MAGNITUDE]) / norms - 1

    def pairs(self, module: str) -> list[Pair]:
        return [self.pair(one, module) for one in self.all if module in one.factors]

    def space_of(self, module: str) -> Space:
        if module not in self._spaces:
            self._spaces[module] = Space.of(self.space, self.pairs(module))
        return self._spaces[module]

    # -- the merge ---------------------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name, of all that the method merges."""
        out: dict[str, tuple[int, ...]] = {}
        for module in self.modules:
            first = next(one for one in self.all if module in one.factors)
            read, written = first.shape(module)
            ranks = [one.rank(module) for one in self.all if module in one.factors]
            out[f"{module}.weight"] = sizes(self.space, math.prod(read), math.prod(written), ranks)
            if self.biased:
                out[f"{module}.lora_{BIAS}"] = written[:1]
            if self.dora:
                out[f"{module}.lora_{MAGNITUDE}"] = written[:1]
        for name in self.wholes:
            first = next(one for one in self.all if name in one.whole)
            out[name] = first.tensors.infos[first.whole[name]].shape
        return out

    def update(self, one: Updates | None, name: str, shape: tuple[int, ...]) -> Tensor:
        """What the method gets for an adapter, or for the unchanged base."""
        zero = torch.zeros(shape, dtype=torch.float64)
        module, _, part = name.rpartition(".lora_")
        module = module or name.removesuffix(".weight")
        if one is None:
            return zero
        if part == MAGNITUDE:
            return self.stretch(one, module)
        if part == BIAS:
            keys = one.factors.get(module, {})
            return one.config.scale_of(module) * one.tensor(keys[BIAS]) if BIAS in keys else zero
        if name in one.whole:
            old = self.start(name)
            value = one.tensor(one.whole[name])
            if value.shape != shape:
                raise IncompatibleError(
                    f"{name}: {list(value.shape)} in {one.folder}, {list(shape)} in another adapter; give adapters of "
                    "one base and as many labels"
                )
            return value if old is None else value - old
        return self.space_of(module).coordinates(self.pair(one, module)) if module in one.factors else zero

    def plan(self) -> Merged:
        """The merged updates by name, computed when they are read."""
        shapes, method = self.shapes(), lookup(self.recipe.merge_method)
        self.require_bases()

        def model(ref: ModelRef, one: Updates | None) -> Model:
            rules = {
                name: Rule(TensorInfo(torch.float64, shape), partial(self.update, one, name, shape))
                for name, shape in shapes.items()
            }
            return Model.of(Checkpoint(Rewritten(None, rules, str(ref)), {}, name=str(ref)), undeclared=True)

        models = {ref: model(ref, one) for ref, one in self.adapters.items()}
        base = None if method.base == "unused" else ZERO
        models |= {} if base is None else {base: model(base, None)}
        plain = replace(self.recipe, base_model=base, dtype=None, out_dtype=None)
        merged = plan_recipe(plain, models).tensors
        assert isinstance(merged, Merged)
        return merged

    def require_bases(self) -> None:
        """OptionError if tensors held as a whole need a base that is not there."""
        usual = self.recipe.merge_method == "linear" and "normalize" not in self.recipe.parameters
        for name in self.wholes:
            lacking = [str(one.folder) for one in self.all if name not in one.whole]
            if (lacking or not usual) and self.start(name) is None and (self.base is None or lacking):
                why = f"{name} is held as a whole" + (
                    f" by some of these adapters, not by {some(lacking)}" * bool(lacking)
                )
                if self.base is None:
                    self.need_base(why)
                raise IncompatibleError(f"{why}, and {self.base.name} has no such tensor; give adapters of one task")

    # -- the result --------------------------------------------------------------------------------

    def result(self) -> MergedAdapter:
        self.require_options()
        merged = self.plan()
        ranks = {module: self.rank_of(module) for module in self.modules}
        alpha = max(ranks.values(), default=1)
        tensors: dict[str, Tensor] = {}
        factors = {}
        for module, rank in ranks.items():
            factors[module] = self.cut(merged, module, rank, alpha)
            tensors |= self.tensors_of(merged, module, factors[module], alpha)
            self._spaces.pop(module, None)
        for name in self.wholes:
            first = next(one for one in self.all if name in one.whole)
            old, value = self.start(name), merged.wide(name)
            where = ".base_layer." if name.rpartition(".")[0] in factors else "."
            key = f"base_model.model.{name.rpartition('.')[0]}{where}{name.rpartition('.')[2]}"
            tensors[key] = self.rounded(name, value if old is None else value + old, first, first.whole[name])
        config = self.config(factors, alpha)
        notes = tuple(f"{one.folder.name}: {note}" for one in self.all for note in one.notes)
        notes += tuple(dict.fromkeys(without_effect(self.recipe, list(merged))))
        sources = (*(one.folder for one in self.all), *(() if self.base is None else self.base.sources))
        return MergedAdapter(tensors, config, factors, self.run(factors, alpha, notes), notes, sources)

    def require_options(self) -> None:
        """OptionError for a rank, or averaged factors, that these adapters cannot have."""
        sums = {module: sum(one.rank(module) for one in self.all) for module in self.modules}
        if self.recipe.rank is not None and self.recipe.rank > max(sums.values(), default=1):
            at = max(sums, key=lambda module: sums[module])
            self.recipe.refuse(
                OptionError(
                    f"rank {self.recipe.rank}: the ranks of these adapters add up to {sums[at]} at most ({at}), at "
                    "which nothing is cut off; give that or less, or leave it out"
                ),
                "rank",
            )
        if self.recipe.space == "factors":
            different = [m for m in self.modules if len({one.rank(m) for one in self.all if m in one.factors}) > 1]
            reason = f"merge method {self.recipe.merge_method}" if self.recipe.merge_method != "linear" else None
            reason = (
                reason or ("DoRA" if self.dora else None) or (f"ranks that differ ({different[0]})" * bool(different))
            )
            if reason:
                self.recipe.refuse(
                    OptionError(f"space factors does not go with {reason}; take core, knots or full"), "space"
                )
        if self.dora and (self.biased or any(len(dim) > 1 for m in self.modules for dim in self.shape_of(m))):
            raise CheckpointError(
                "DoRA is merged with adapters of linear layers without biases of factors (lora_bias) only; merge the "
                "models that peft makes of the adapters (merge_and_unload)"
            )

    def shape_of(self, module: str) -> tuple[tuple[int, ...], ...]:
        return next(one.shape(module) for one in self.all if module in one.factors)

    def rank_of(self, module: str) -> int:
        whole = sum(one.rank(module) for one in self.all)
        if self.recipe.space == "factors":
            whole = max(one.rank(module) for one in self.all)
        return min(whole, self.recipe.rank or whole)

    def cut(self, merged: Merged, module: str, rank: int, alpha: int) -> Factors:
        """The factors of the merged update, in float64."""
        exact = merged.wide(f"{module}.weight")
        near = (
            self.space_of(module).coordinates(self.average(merged, module)) if self.recipe.space == "factors" else exact
        )
        return self.space_of(module).factors(module, near, exact, rank, alpha)

    def average(self, merged: Merged, module: str) -> Pair:
        """Of the factors, with the weights of the merge."""
        output = merged.outputs[f"{module}.weight"]
        shares = zip([term.checkpoint.name for term in output.terms], effective_weights(output) or (), strict=True)
        named = {str(ref): one for ref, one in self.adapters.items()}
        there = [(named[name], share) for name, share in shares if module in named[name].factors]
        scales = [one.config.scale_of(module) for one, _ in there]
        return averaged([self.pair(one, module) for one, _ in there], scales, [share for _, share in there])

    def tensors_of(self, merged: Merged, module: str, found: Factors, alpha: int) -> dict[str, Tensor]:
        """Of a module, by key."""
        first = next(one for one in self.all if module in one.factors)
        (down_key, up_key), scale = first.pair(module), alpha / found.rank
        out = {}
        if self.dora:
            weight, stretch = self.ground(module).weight(module), 1 + merged.wide(f"{module}.lora_{MAGNITUDE}")
            if not bool((stretch > 0).all()):
                raise IncompatibleError(
                    f"{module}: the merged magnitudes of DoRA are not all positive; take smaller or positive weights"
                )
            found = replace(found, up=found.up / stretch[:, None])
            norms = torch.linalg.vector_norm(weight + scale * found.up @ found.down, dim=1)
            out[_key(module, MAGNITUDE)] = self.rounded(module, stretch * norms, first, down_key)
        if self.biased:
            out[_key(module, BIAS)] = self.rounded(module, merged.wide(f"{module}.lora_{BIAS}") / scale, first, up_key)
        small = in_dtype(module, found, self.dtype(first, down_key))
        read, written = first.shape(module)
        out[_named(down_key)] = small.down.reshape(found.rank, *read).contiguous()
        out[_named(up_key)] = small.up.reshape(written[0], found.rank, *written[1:]).contiguous()
        return out

    def dtype(self, first: Updates, key: str) -> torch.dtype:
        named = self.recipe.dtype or self.recipe.out_dtype
        return first.tensors.infos[key].dtype if named is None else getattr(torch, named)

    def rounded(self, name: str, value: Tensor, first: Updates, key: str) -> Tensor:
        require_fit(name, value, self.dtype(first, key))
        return value.to(self.dtype(first, key)).contiguous()

    def config(self, factors: Mapping[str, Factors], alpha: int) -> dict[str, Any]:
        """That of the first adapter, with the modules and options of all."""
        every = [one.written for one in self.all]
        saved = [module for one in every for module in one.get("modules_to_save") or ()]
        out = dict(every[0]) | {key: None for key in OF_TRAINING if key in every[0]}
        base = self.recipe.base_model
        if base is not None:
            out["base_model_name_or_path"] = str(Path(base.path).resolve()) if Path(base.path).is_dir() else str(base)
        return out | {
            "task_type": next((one["task_type"] for one in every if one.get("task_type")), None),
            "r": alpha,
            "lora_alpha": alpha,
            "target_modules": list(factors),
            "rank_pattern": {re.escape(module): f.rank for module, f in factors.items() if f.rank < alpha},
            "alpha_pattern": {},
            "bias": max((str(one.get("bias") or "none") for one in every), key=BIASES.index),
            "modules_to_save": list(dict.fromkeys(saved)) or None,
            "lora_bias": self.biased,
            "use_rslora": False,
            "use_dora": self.dora,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def run(self, factors: Mapping[str, Factors], rank: int, notes: Sequence[str]) -> dict[str, Any]:
        return {
            "kind": "adapter merge",
            "symfuse": __version__,
            "method": self.recipe.merge_method,
            "paper": lookup(self.recipe.merge_method).paper,
            "space": self.recipe.space or self.space,
            "recipe": self.recipe.text,
            "models": [str(ref) for ref in self.adapters],
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


def _named(key: str) -> str:
    """A key as peft writes it now."""
    return f"base_model.model.{target_name(key)}"


def _key(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}"

"""Merging whole models of one shape: one method, one set of parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from symfuse.device import CPU
from symfuse.errors import IncompatibleError, OptionError
from symfuse.guard import guarded
from symfuse.io import Checkpoint
from symfuse.merging.base import Method, Parameter, lookup
from symfuse.merging.engine import Learnt, Merged, Resolve, Slice, describe, merge_slices, set_dtype
from symfuse.messages import suggestion
from symfuse.model import Model, require_same_shape
from symfuse.model.config import label_clash
from symfuse.rewriting import require_same_frame
from symfuse.runs import recorded


def merge_models(
    models: Sequence[Model],
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: int | None = None,
    heads: str = "average",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str = CPU,
    learned: Learnt | None = None,
    force_config: bool = False,
    **parameters: Any,
) -> Checkpoint:
    """The merge of models of one family, in the frame in which they are: align them first.

    base: the number of the model from which names, dtypes, config and tokenizer come; task vectors start from it, and
    methods that need a base do not count it among the models. weights, parameters: those of the method, one value for
    all models, or a list with one for each (without that base). heads: what becomes of task heads: "average" (all must
    have the same), "drop", or the name or number (from 1) of the model whose head is kept as it is; that model is then
    the base. seed: of random methods. dtype: of the floating-point tensors, default the base's. learned: of a method
    that looks at data, what it found out of those of each model (`symfuse.methods`). force_config: take the base's
    config where the models' compute something else, and gains that are all 1 in some as they are. What is let pass
    stands in the notes of the merge.
    Raises IncompatibleError or OptionError before anything is read.
    """
    chosen = lookup(method)
    if not models:
        raise OptionError("a merge needs models; none are given")
    if base is not None and not 0 <= base < len(models):
        raise OptionError(f"base {base}: there are models 0 to {len(models) - 1}")
    if chosen.data_required and learned is None:
        raise OptionError(f"{method} looks at data of the models first: symfuse.merge(..., data=…), or learned=…")
    notes = require_same_shape(models, force_config=force_config)
    notes += () if force_config else require_same_frame(models)
    kept = head_model(heads, models)
    template = (base or 0) if kept is None else kept
    models = [model.as_in(models[template].spec) for model in models]
    if heads == "average":
        require_same_heads(models)
    given = dict(parameters) | ({} if weights is None else {"weight": list(weights)})
    apart = base if chosen.base != "unused" else None
    resolve = constant(chosen, given, [i for i in range(len(models)) if i != apart])
    spec = models[template].spec
    everything = Slice(tuple(range(len(models))), (0,) * len(models), spec.depth, base, resolve)
    outputs = merge_slices(
        models,
        chosen,
        [everything],
        template=template,
        dtype=dtype,
        skip=spec.heads if heads == "drop" else frozenset(),
        copy=frozenset() if kept is None else spec.heads,
        learned=learned,
    )
    config = template_config(models[template], heads)
    merged = merged_checkpoint(models, template, Merged(outputs, seed=seed, device=device), config)
    return merged.replace(notes=tuple(dict.fromkeys((*merged.notes, *notes))))


def template_config(template: Model, heads: str) -> dict[str, Any]:
    """The template's config, to be changed where the merge changes the model."""
    config = dict(template.checkpoint.config)
    if heads == "drop":
        config.pop("architectures", None)  # the class with the head would fill it in at random
    return config


def merged_checkpoint(
    models: Sequence[Model],
    template: int,
    merged: Merged,
    config: dict[str, Any],
    name: str | None = None,
    opened: Sequence[Checkpoint] = (),
    kept: Collection[str] = (),
) -> Checkpoint:
    """The merged tensors with companions and notes of the template, and this config, which gets their dtype. They are
    on the processor, wherever they are combined. opened: the models as they were opened, the template first. It is
    guarded (`Guard`), now and when it is saved. kept: as there.
    """
    set_dtype(config, merged.infos)
    name = name or describe(merged.outputs)
    sources = [folder for model in models for folder in model.checkpoint.sources]
    checkpoint = recorded(models[template].checkpoint, None)  # what is recorded of the template is not of the merge
    out = checkpoint.replace(tensors=merged, config=config, name=name, sources=sources, device=CPU)
    out = guarded(out, opened or [checkpoint, *(model.checkpoint for model in models)], kept)
    return out.before_save[0](out)


def constant(method: Method, given: Mapping[str, Any], models: Sequence[int]) -> Resolve:
    """The same values for all tensors: one for all models, or a list with one for each of `models`.

    OptionError for parameters that the method does not have, values of the wrong kind and lists of the wrong length.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in method.parameters:
            known = ", ".join(sorted(method.parameters)) or "none"
            near = suggestion(name, method.parameters)
            raise OptionError(f"{method.name} has no parameter {name!r}{near}; it has: {known}")
        parameter = method.parameters[name]
        if parameter.per_model and isinstance(value, (list, tuple)):
            if len(value) != len(models):
                raise OptionError(
                    f"{len(value)} {name}{'' if len(value) == 1 or name.endswith('s') else 's'} for {len(models)} "
                    f"model{'' if len(models) == 1 else 's'}; give one for each, in the same order"
                    + (", the base aside" if method.base != "unused" else "")
                )
            values[name] = {i: parameter.value(v, method.name) for i, v in zip(models, value, strict=True)}
        else:
            values[name] = parameter.value(value, method.name)

    def resolve(parameter: Parameter, model: int | None, _tensor: str, _t: float) -> Any:
        value = values.get(parameter.name)
        return value[model] if isinstance(value, dict) else value

    return resolve


def head_model(heads: str, models: Sequence[Model]) -> int | None:
    """The number of the model whose head is taken; None for "average" and "drop"."""
    if heads in ("average", "drop"):
        return None
    found = [i for i, model in enumerate(models) if heads in (model.name, str(i + 1))]
    if len(found) != 1:
        names = ", ".join(f"{i + 1} ({model.name})" for i, model in enumerate(models))
        raise OptionError(f"heads {heads!r}: write average, drop, or the number or name of one model: {names}")
    return found[0]


def require_same_heads(models: Sequence[Model]) -> None:
    first = models[0]
    for other in models[1:]:
        ours, theirs = (_head_shapes(model) for model in (first, other))
        if ours != theirs:
            differing = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
            lines = [f"  {name}: {ours.get(name, 'absent')} and {theirs.get(name, 'absent')}" for name in differing[:8]]
            raise IncompatibleError(
                f"the task heads of {first.name} and {other.name} differ:\n" + "\n".join(lines) + "\n"
                "choose `heads`: the number or name of the model whose head is to be kept, or drop"
            )
        clash = label_clash(first.checkpoint.config, other.checkpoint.config)
        if ours and clash:
            raise IncompatibleError(
                f"the task heads of {first.name} and {other.name} are of different labels: {clash}. Reorder the rows "
                "of one head, or choose `heads` (--heads): the number or name of the model whose head is to be kept, "
                "or drop"
            )


def _head_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    spec = model.spec
    return {n: spec.tensors[n].layout.shape(spec.sizes) for n in spec.heads if n not in spec.tied}

"""What a merge copies from its template, the model that names its tensors: config and companion files, and the task
head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from symfuse.device import CPU
from symfuse.errors import IncompatibleError
from symfuse.guard import guarded
from symfuse.io import Checkpoint
from symfuse.merging.engine import Merged, describe, set_dtype
from symfuse.model import Model
from symfuse.model.config import label_clash
from symfuse.runs import recorded


def template_config(template: Model, heads: str) -> dict[str, Any]:
    """The template's config, with the changes that the merge requires."""
    config = dict(template.checkpoint.config)
    if heads == "drop":
        config.pop("architectures", None)  # the class with the head would initialise it at random
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
    on the CPU, wherever they are computed. opened: the models as they were opened, the template first. The checkpoint
    is checked by `Guard`, now and when it is saved. kept: as in `Guard`."""
    set_dtype(config, merged.infos)
    name = name or describe(merged.outputs)
    sources = [folder for model in models for folder in model.checkpoint.sources]
    checkpoint = recorded(models[template].checkpoint, None)  # the record of the template is not that of the merge
    out = checkpoint.replace(tensors=merged, config=config, name=name, sources=sources, device=CPU)
    out = guarded(out, opened or [checkpoint, *(model.checkpoint for model in models)], kept)
    return out.before_save[0](out)


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
                f"the task heads of {first.name} and {other.name} have different labels: {clash}. Reorder the rows "
                "of one head, or choose `heads` (--task-heads): the number or name of the model whose head is to be "
                "kept, or drop"
            )


def _head_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    spec = model.spec
    return {n: spec.tensors[n].layout.shape(spec.sizes) for n in spec.heads if n not in spec.tied}

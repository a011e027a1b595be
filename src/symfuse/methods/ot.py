"""Fusion by optimal transport: models are aligned with one of them by soft maps, then averaged."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from symfuse.errors import OptionError, UnknownArchitectureError
from symfuse.groups import Sinkhorn
from symfuse.matching import nearest_to_mean
from symfuse.matching.fusion import ot_alignment
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.methods.data import Inputs, Learned
from symfuse.methods.linear import linear
from symfuse.methods.registry import method
from symfuse.model import Model


def learn(
    inputs: Inputs,
    *,
    axes: str = "auto",
    solver: str = "sinkhorn",
    regularisation: float = Sinkhorn().regularisation,
    residual: str = "all",
) -> Learned:
    """Align every model with the one nearest to their mean; see `ot_alignment`. With data, units are compared by their
    activations on the data of the model that is aligned; else by their weights. Labels are not used."""
    if solver == "emd" and regularisation != Sinkhorn().regularisation:
        raise OptionError("regularisation is only for the solver sinkhorn; leave it out, or use that")
    models = list(inputs.models)
    if strange := [model.name for model in models if not model.declared]:
        raise UnknownArchitectureError(
            f"{strange[0]}: symfuse has no declaration of it, and does not know its units; use linear"
        )
    anchor = nearest_to_mean(models)
    options = {"solver": solver, "residual": residual}
    record: dict[str, object] = {"anchor": models[anchor].name, "moved": {}}
    aligned = dict[int, Model]()
    notes = list[str]()
    for i, model in enumerate(models):
        if i == anchor:
            continue
        task = inputs.tasks[i] if inputs.tasks else None
        inputs.report(f"transport of {model.name} by {'weights' if task is None else f'activations on {task.source}'}")
        alignment = ot_alignment(
            model,
            models[anchor],
            axes=tuple(axes.split(",")) if "," in axes else axes,
            regularisation=regularisation if solver == "sinkhorn" else None,
            batches=None if task is None else task.batches,
            device=inputs.device,
            **options,
        )
        aligned[i] = Model.of(alignment(model.checkpoint).replace(name=model.name))
        aligned[anchor] = Model.of(alignment.in_frame(models[anchor].checkpoint).replace(name=models[anchor].name))
        record["moved"] |= {model.name: dict(alignment.provenance.get("options", {}))}  # type: ignore[operator]
        if alignment.variants:
            notes.append(f"{model.name} is aligned by soft maps ({solver}), which change what it computes")
    record |= options | ({"regularisation": regularisation} if solver == "sinkhorn" else {})
    return Learned(
        models=tuple(aligned.get(i, model) for i, model in enumerate(models)), record=record, notes=tuple(notes)
    )


@method(
    "ot",
    label="OT fusion",
    paper="Singh and Jaggi 2020, Model fusion via optimal transport, arXiv 1910.05653; Imfeld et al. 2024, "
    "Transformer fusion with optimal transport, arXiv 2310.05719",
    models=(2, None),
    learn=learn,
    data_required=False,
    unlabelled=lambda _parameters: True,
)
def ot(stream: Stream, *, weight: PerModel = (1.0,), normalize: bool = True) -> Iterator[Tensor]:
    """The weighted sum of the aligned models, as `linear`."""
    return linear(stream, weight=weight, normalize=normalize)

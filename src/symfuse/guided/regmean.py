"""The linear maps that answer best, together, to what each model's maps read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from symfuse.architectures import Model
from symfuse.device import CPU
from symfuse.evaluate import Task
from symfuse.evaluate.tasks.base import readable
from symfuse.guided.base import Inputs, Learned, examples_of, running, statistics_of
from symfuse.merging.base import method
from symfuse.merging.regmean import merge
from symfuse.stats.gram import gram_matrices
from symfuse.stats.statistics import Statistics


def learn(inputs: Inputs) -> Learned:
    """The Gram matrices of what each model's linear maps read on its data; labels are not looked at. They wait in files
    of a temporary folder, and are in memory for one model, or one group of its layers, at a time."""
    found = statistics_of(inputs, "Gram matrices", inputs.task, partial(gram_of, memory=inputs.memory))
    record = {"examples": {m.name: s.count for m, s in zip(inputs.models, found, strict=True)}}
    notes = tuple(note for s in found for note in s.notes())
    return Learned(statistics=tuple(found), record=record, summary=examples_of(inputs, found), notes=notes)


regmean = method(
    "regmean",
    label="RegMean",
    paper="Jin et al. 2023, Dataless Knowledge Fusion by Merging Weights of Language Models, arXiv 2212.09849 (Eq. 2)",
    learn=learn,
    statistics="gram",
    unlabelled=lambda _parameters: True,
)(merge)


def gram_of(
    model: Model, task: Task, *, memory: int | None = None, scratch: Path | None = None, device: str = CPU
) -> Statistics:
    """Gram matrices of what the declared linear maps of a model read on data, in float32; see `gram_matrices`. device:
    where the model is run."""
    with running([model], task, device=device) as space:
        module = space.set([1.0])
        names = [name for name in model.spec.tensors if name not in model.spec.tied]
        with readable(module):
            found = gram_matrices(module, task.batches, names, memory=memory, scratch=scratch)
    provenance = {"model": model.checkpoint.lineage(compute=True), "task": task.describe()}
    return replace(found, provenance=provenance, name=f"the Gram matrices of {model.name}")

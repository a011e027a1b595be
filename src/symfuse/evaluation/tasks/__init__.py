"""The built-in tasks, by name; and the default task of a checkpoint. To add one: a file, and a line in TASKS."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import DataError, OptionError
from symfuse.evaluation.data import Records
from symfuse.evaluation.task import Batch, Task
from symfuse.evaluation.tasks.base import Data
from symfuse.evaluation.tasks.causal_lm import CausalLM
from symfuse.evaluation.tasks.image_classification import ImageClassification
from symfuse.evaluation.tasks.masked_lm import MaskedLM
from symfuse.evaluation.tasks.retrieval import Retrieval, pooling_of
from symfuse.evaluation.tasks.sequence_classification import SequenceClassification
from symfuse.evaluation.tasks.token_classification import TokenClassification
from symfuse.io import Checkpoint
from symfuse.io.companions import is_of_tokenizer
from symfuse.messages import suggestion

__all__ = [
    "TASKS", "CausalLM", "ImageClassification", "MaskedLM", "Retrieval", "SequenceClassification",
    "TokenClassification", "batch_task", "make_task", "task_of",
]  # fmt: skip

_KINDS = (CausalLM, MaskedLM, SequenceClassification, TokenClassification, ImageClassification, Retrieval)
TASKS = {kind.name: kind for kind in _KINDS}

# By the end of the class that a config names; base models of texts are asked for their embeddings.
_HEADS = {
    "LMHeadModel": CausalLM,
    "ForCausalLM": CausalLM,
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": SequenceClassification,
    "ForTokenClassification": TokenClassification,
    "ForImageClassification": ImageClassification,
}


def make_task(name: str | None, records: Records, checkpoint: Checkpoint, **options: Any) -> Task:
    """A task of TASKS, or for None the checkpoint's default task, on these data.

    options: those of the task, and `unlabelled`, which every task takes: labels are not read. OptionError for a task or
    an option that does not exist; DataError if the data are not what the task needs; CheckpointError if the checkpoint
    lacks its tokenizer or image processor.
    """
    name = task_of(checkpoint) if name is None else name
    kind = _kind(name)
    known = kind.options
    if "unlabelled" not in known:  # there are no labels to leave out
        options.pop("unlabelled", None)
    for option in options:
        if option not in known:
            raise OptionError(
                f"{name} has no option {option!r}{suggestion(option, known)}; its options are {', '.join(known)}"
            )
    task: Task = kind.prepare(Data(records, checkpoint, {**known, **options}))
    return task


def batch_task(name: str | None, batches: Sequence[Batch], checkpoint: Checkpoint, **options: Any) -> Task:
    """A task of TASKS, or for None the checkpoint's default task, on batches of module inputs.

    Each is a mapping of tensors by the names of the module's inputs, with `labels` if the loss needs any. OptionError
    for options of reading rows; DataError, with the batch and the field, for invalid batches.
    """
    kind = _kind(task_of(checkpoint) if name is None else name)
    known = list(inspect.signature(kind).parameters)[2:]
    for option in options:
        if option not in known:
            raise OptionError(
                f"{option}: this says how rows are read, and batches of tensors are taken as they are; leave it out"
            )
    options |= {"pooling": pooling_of(checkpoint)} if kind is Retrieval and "pooling" not in options else {}
    task: Task = kind([_as_batch(batch, f"batch {i}") for i, batch in enumerate(batches, 1)], "memory", **options)
    return task


def _as_batch(fields: Batch, where: str) -> Batch:
    sizes = {tuple(tensor.shape[:1]) for tensor in fields.values()}
    if len(sizes) != 1 or sizes & {(), (0,)}:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in fields.items()) or "no fields"
        raise DataError(
            f"{where}: found {shapes}; expected tensors whose first dimension counts the examples of the batch, the "
            "same in all (a single example: tensor[None])"
        )
    return {name: _plain(tensor.detach().cpu()) for name, tensor in fields.items()}


def _plain(tensor: Tensor) -> Tensor:
    """In float32, or as whole numbers of 64 bits: what losses take, and files can be compared by."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide) if tensor.is_floating_point() else tensor if tensor.dtype is torch.bool else tensor.long()


def _kind(name: str) -> Any:
    if name not in TASKS:
        raise OptionError(f"there is no task {name!r}{suggestion(name, TASKS)}; choose one of {', '.join(TASKS)}")
    return TASKS[name]


def task_of(checkpoint: Checkpoint) -> str:
    """The default task of a checkpoint, by the class in its config. OptionError if no task has that class."""
    named = str((checkpoint.config.get("architectures") or ["none"])[0])
    for end, kind in _HEADS.items():
        if named.endswith(end):
            return kind.name
    if named.endswith("Model") and any(map(is_of_tokenizer, checkpoint.companions())):
        return Retrieval.name
    raise OptionError(
        f"{checkpoint.name}: its config names the class {named}, for which there is no task; choose one of "
        f"{', '.join(TASKS)} (--task), or give a loss of your own"
    )

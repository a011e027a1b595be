"""The built-in tasks, by name; and the one that a checkpoint is made for. To add one: a file, and a line in TASKS."""

from __future__ import annotations

import inspect
from typing import Any

from symfuse.errors import OptionError
from symfuse.evaluate.data import Records
from symfuse.evaluate.task import Task
from symfuse.evaluate.tasks.causal_lm import CausalLM
from symfuse.evaluate.tasks.image_classification import ImageClassification
from symfuse.evaluate.tasks.masked_lm import MaskedLM
from symfuse.evaluate.tasks.retrieval import Retrieval
from symfuse.evaluate.tasks.sequence_classification import SequenceClassification
from symfuse.evaluate.tasks.token_classification import TokenClassification
from symfuse.io import Checkpoint
from symfuse.io.companions import is_of_tokenizer
from symfuse.io.messages import suggestion

__all__ = [
    "TASKS",
    "CausalLM",
    "ImageClassification",
    "MaskedLM",
    "Retrieval",
    "SequenceClassification",
    "TokenClassification",
    "make_task",
    "task_of",
]

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
    """A task of TASKS, or for None the one that the checkpoint is made for, on these data.

    options: those of the task's `prepare`; `unlabelled`, that labels are not read, any task takes. OptionError for a
    task or an option that does not exist; DataError if the data are not what the task needs; CheckpointError if the
    checkpoint lacks its tokenizer or image processor.
    """
    name = task_of(checkpoint) if name is None else name
    if name not in TASKS:
        raise OptionError(f"there is no task {name!r}{suggestion(name, TASKS)}; choose one of {', '.join(TASKS)}")
    kind = TASKS[name]
    known = list(inspect.signature(kind.prepare).parameters)[2:]
    if "unlabelled" not in known:  # there are no labels to leave out
        options.pop("unlabelled", None)
    for option in options:
        if option not in known:
            raise OptionError(
                f"{name} has no option {option!r}{suggestion(option, known)}; its options are {', '.join(known)}"
            )
    return kind.prepare(records, checkpoint, **options)


def task_of(checkpoint: Checkpoint) -> str:
    """The task that a checkpoint is made for, by the class in its config. OptionError if that says nothing of it."""
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

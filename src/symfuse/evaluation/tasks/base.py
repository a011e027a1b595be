"""What tasks share: their options and rows, a module's outputs on a batch, and cross entropy over them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.errors import CheckpointError, DataError, IncompatibleError, OptionError, SymfuseError
from symfuse.evaluation.data import Records
from symfuse.evaluation.task import Batch, Task, Totals
from symfuse.io import Checkpoint
from symfuse.messages import first_line
from symfuse.stats.per_example import NotCovered

# The label of positions that do not count, as in transformers; and of those that count but have no label in the data.
IGNORED = -100
UNKNOWN = -1

READ_WITHOUT = "these data were read without their labels, so they have no loss; read them with labels"

# The fields of batches that are no inputs of the module.
NOT_INPUTS = ("labels", "role")


def config_of(checkpoint: Checkpoint) -> Any:
    """The config as transformers completes it. CheckpointError if it does not know the kind of model."""
    import transformers

    kind = checkpoint.config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint.name}: transformers {transformers.__version__} has no model_type {kind!r}, so no built-in "
            "task fits this model; evaluate it with a loss of your own, a function of the module"
        )
    try:
        return transformers.CONFIG_MAPPING[str(kind)].from_dict(dict(checkpoint.config))
    except Exception as error:  # whatever the config classes raise
        raise CheckpointError(
            f"{checkpoint.name}: transformers cannot read the config.json ({first_line(error)})"
        ) from error


def from_companions(checkpoint: Checkpoint, auto: str, what: str, **options: object) -> Any:
    """The object that an Auto class of transformers loads from the files beside the weights, whether these are in a
    folder or are still to be written. No code of the checkpoint is run. CheckpointError if it cannot be loaded."""
    import transformers

    with _written(checkpoint) as folder:
        try:
            kind = getattr(transformers, auto)
            return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # whatever the classes raise
            reason = first_line(error).replace(str(folder), checkpoint.name)
            raise CheckpointError(f"{checkpoint.name}: transformers cannot read its {what} ({reason})") from error


@contextmanager
def _written(checkpoint: Checkpoint) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="symfuse-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(dict(checkpoint.config), default=str), encoding="utf-8")
        for file, data in checkpoint.companions().items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        yield folder


# The options of every task that reads rows, and of those that read texts, with their defaults. limit: so many rows are
# drawn by the seed. max_length: in tokens. unlabelled: of those that have labels, these are not read.
OPTIONS: dict[str, Any] = {"batch_size": 16, "seed": 0, "limit": None}
OF_TEXTS: dict[str, Any] = {"batch_size": 16, "max_length": None, "seed": 0, "limit": None}
UNLABELLED: dict[str, Any] = {"unlabelled": False}


@dataclass(frozen=True)
class Data:
    """Rows of a task, as a checkpoint reads them. options: all options of the task, by name."""

    records: Records
    checkpoint: Checkpoint
    options: Mapping[str, Any]

    def __getattr__(self, option: str) -> Any:
        if option in self.options:
            return self.options[option]
        raise AttributeError(option)

    def require(self, *columns: str, labels: str | None = None) -> None:
        """DataError unless the columns exist that these options name; that of the labels if they are read."""
        named = [*columns, *([] if labels is None or self.unlabelled else [labels])]
        self.records.require(**{name: self.options[name] for name in named if self.options[name] is not None})

    @cached_property
    def rows(self) -> list[int]:
        return self.drawn(len(self.records))

    def drawn(self, count: int) -> list[int]:
        """All rows, or `limit` of them, in order, drawn by the seed: files are often sorted by class."""
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"limit is {self.limit}; expected 1 example at least")
        if self.limit is None or self.limit >= count:
            return list(range(count))
        return sorted(random.Random(f"rows {self.seed}").sample(range(count), self.limit))

    def texts(self, column: str) -> list[str]:
        return [self.records.text(i, column) for i in self.rows]


def checked(batch_size: int) -> int:
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}; expected 1 at least")
    return batch_size


def output_of(module: nn.Module, batch: Batch, name: str) -> Tensor:
    """A named output of a module, or its first if they have no names, for the fields of a batch that are its inputs, at
    least in float32.

    The fields are copied to the module's device, floating-point ones to its dtype. IncompatibleError if the module has
    no such output, or cannot be run on the batch.
    """
    inputs = {key: at(module, field) for key, field in batch.items() if key not in NOT_INPUTS}
    with readable(module):
        output: Any = module(**inputs)
    if isinstance(output, Tensor | tuple):  # of a module that names no outputs the first is meant
        output = {name: next(iter(output), None) if isinstance(output, tuple) else output}
    if not (isinstance(output, Mapping) and isinstance(output.get(name), Tensor)):
        raise IncompatibleError(
            f"{type(module).__name__} gives no output named {name!r}, which this task needs; choose the task that its "
            "head is made for"
        )
    result: Tensor = output[name]
    return result.to(torch.promote_types(result.dtype, torch.float32))


@contextmanager
def readable(module: nn.Module) -> Iterator[None]:
    """IncompatibleError for whatever a model raises for unknown ids, sizes and arguments."""
    try:
        yield
    except (SymfuseError, NotCovered):
        raise
    except Exception as error:
        raise IncompatibleError(
            f"a {type(module).__name__} cannot be run on these data ({first_line(error)}); were they read by the "
            "tokenizer or image processor of another model?"
        ) from error


def at(module: nn.Module, field: Tensor) -> Tensor:
    """A field of a batch on the module's device, in its dtype if it is floating-point."""
    weight = next(module.parameters())
    return field.to(weight.device, weight.dtype) if field.is_floating_point() else field.to(weight.device)


def labels_of(module: nn.Module, batch: Batch, shape: torch.Size) -> Tensor:
    """The labels of a batch, in this shape. If it has none, they are UNKNOWN, and IGNORED at padding."""
    if "labels" in batch:
        return at(module, batch["labels"])
    labels = torch.full(shape, UNKNOWN)
    mask = batch.get("attention_mask")
    return at(module, labels if mask is None or mask.shape != shape else labels.where(mask.cpu().bool(), IGNORED))


def classified(logits: Tensor, labels: Tensor) -> Totals:
    """Cross entropy and accuracy of logits [..., classes] over the labels [...] that are not IGNORED."""
    if logits.shape[:-1] != labels.shape:
        raise IncompatibleError(
            f"the labels have shape {list(labels.shape)}, and the model puts out {list(logits.shape[:-1])} predictions "
            "of them; give labels of that shape, or a loss of your own: a function of the module"
        )
    kept = labels != IGNORED
    logits, labels = logits[kept], labels[kept]
    if bool((labels == UNKNOWN).any()):
        raise DataError(READ_WITHOUT)
    if labels.numel() and int(labels.max()) >= logits.shape[-1]:
        raise IncompatibleError(
            f"there is a label {int(labels.max())}, and the model tells {logits.shape[-1]} apart, numbered from 0; "
            "were the data read as those of another model?"
        )
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    hits = float((logits.detach().argmax(-1) == labels).sum())
    return Totals(loss, labels.numel(), {"accuracy": hits})


class Predicting(Task):
    """Classification of examples or of positions in them. The examples of a batch (the rows of every field) are
    independent."""

    def predicted(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [examples, …, classes] with their graph, and labels [examples, …]: IGNORED where there is nothing to
        predict, UNKNOWN where the data have no label."""
        logits = output_of(module, batch, "logits")
        return logits, labels_of(module, batch, logits.shape[:-1])

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        return classified(*self.predicted(module, batch))

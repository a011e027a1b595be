"""Run checkpoints as their real class, all on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.device import budget
from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Rewritten, Rule
from symfuse.messages import first_line, some
from symfuse.model import Model, as_declared
from symfuse.modules import live, name_parameters
from symfuse.modules.paging import paged
from symfuse.spec import Atom, Declared, Layout
from symfuse.verification.coverage import Changed, Reach, Reads, long_inputs
from symfuse.verification.outputs import Outputs, random_inputs, run

# The vocabulary of a model that is run layer by layer: enough tokens for the inputs, instead of an embedding and a head
# that can be larger than all else. An alignment acts on all rows of tokens alike, so the other rows show nothing new.
WORDS = 2048
LAYERWISE = ", layer by layer"


def _first_rows(whole: Checkpoint, name: str, rows: int) -> Rule:
    """A tensor without its last rows."""
    info = TensorInfo(whole.info(name).dtype, (rows, *whole.info(name).shape[1:]))
    return Rule(info, lambda: whole.part(name, 0, info.numel).reshape(info.shape))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class Bench:
    """Runs checkpoints on the same inputs: the caller's (floating-point ones in `dtype`), or seeded random ones that
    suit the first checkpoint.

    compared: two models that are compared as completely as possible, also on long inputs that contain `words`; the rows
    that the first one reads are recorded.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor] | None,
        runner: Callable[[Checkpoint], Outputs] | None,
        dtype: torch.dtype,
        memory: int | None = None,
        compared: Sequence[Checkpoint] = (),
        words: Sequence[int] = (),
    ) -> None:
        self.inputs = None if inputs is None else [{name: _cast(value, dtype) for name, value in inputs.items()}]
        self.runner = runner
        self.dtype = dtype
        self.memory = budget() if memory is None else memory
        self.compared = compared
        self.words = words
        self.reads: Reads | None = None
        self.positions: tuple[int, int] | None = None
        self.first: str | None = None
        requested = inputs is not None or runner is not None
        self.what = "the given inputs" if requested else "seeded random inputs"
        self.what += "" if runner is not None else f", run in {str(dtype).removeprefix('torch.')}"

    def pages(self, checkpoint: Checkpoint) -> bool:
        """Whether a model is run layer by layer: its weights as they are read, and those of the module, do not fit into
        memory."""
        infos = [checkpoint.info(name) for name in checkpoint]
        pages = self.runner is None and 2 * sum(info.numel for info in infos) * self.dtype.itemsize > self.memory
        if pages and LAYERWISE not in self.what:
            self.what += LAYERWISE
        return pages

    def few_words(self, checkpoint: Checkpoint) -> Checkpoint:
        """The model with only the first rows of its embeddings and heads, if these have a larger vocabulary."""
        spec = Model.of(checkpoint).spec
        size = spec.sizes.get("vocab", 0)
        layouts = {spec.file_name(name): declared.layout for name, declared in spec.tensors.items()}
        of = {file: layout for file, layout in layouts.items() if "vocab" in layout.names}
        rows = all(str(layout).split()[0] == "vocab" for layout in of.values())
        if size <= WORDS or not rows or checkpoint.config.get("vocab_size") != size:
            return checkpoint
        self.what += f", on {WORDS} of a vocabulary of {size}"
        ids = {key: n % WORDS for key, n in checkpoint.config.items() if key.endswith("_token_id") and type(n) is int}
        rules = {name: _first_rows(checkpoint, name, WORDS) if name in of else name for name in checkpoint}
        config = {**checkpoint.config, **ids, "vocab_size": WORDS}
        return checkpoint.replace(tensors=Rewritten(checkpoint, rules), config=config)

    def run(self, checkpoint: Checkpoint, alignment: Alignment | None = None) -> list[Outputs]:
        """The outputs of a checkpoint on each of the inputs; of an aligned one on inputs that are aligned too."""
        if self.runner is not None:
            return [self.runner(checkpoint)]
        module = (paged if self.pages(checkpoint) else live)(checkpoint, self.dtype)
        if self.first is not None:
            try:
                return [run(module, aligned(fields, alignment)) for fields in self.inputs or ()]
            except Exception as error:  # whatever that class raises
                what = f"{checkpoint.name} does not run on the inputs of {self.first}: {first_line(error)}"
                raise IncompatibleError(what) from error
        self.first = checkpoint.name
        with self._recording(module, checkpoint):
            outputs = self._first(module, checkpoint)
        for fields in outputs:
            _refuse_nan(fields, f"{checkpoint.name} on {self.what}")
        return outputs

    def _first(self, module: torch.nn.Module, checkpoint: Checkpoint) -> list[Outputs]:
        requested = self.inputs is not None
        self.inputs = self.inputs or [random_inputs(module, checkpoint.config)]
        try:
            outputs: list[Outputs] = [run(module, fields) for fields in self.inputs]
        except Exception as error:
            raise CheckpointError(f"{checkpoint.name} does not run on {self.what}: {first_line(error)}") from error
        return outputs if requested or not self.compared else outputs + self._longer(module)

    def _longer(self, module: torch.nn.Module) -> list[Outputs]:
        """The outputs on long inputs, which are added to the others. A module that counts positions from its padding
        token takes fewer than its config allows."""
        configs = [checkpoint.config for checkpoint in self.compared]
        pads = [pad for config in configs if type(pad := config.get("pad_token_id")) is int]
        assert self.inputs is not None
        for less in (0, 1 + max(pads, default=0)):
            longer = long_inputs(module, configs, self.inputs[0], self.words, less)
            try:
                outputs: list[Outputs] = [run(module, fields) for fields in longer]
            except IndexError:
                continue
            except Exception as error:
                self.what += f", none longer as the class does not take them ({first_line(error)})"
                return []
            self.inputs += longer
            if longer:
                self.positions = Reach.of(module).run(longer)
            return outputs
        return []

    @contextmanager
    def _recording(self, module: torch.nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
        if not self.compared:
            yield
            return
        whole = as_declared(checkpoint)
        shapes = {name: whole.info(name).shape for name in name_parameters(module, whole)}
        self.reads = Reads({name: math.prod(shape[:1]) for name, shape in shapes.items()})
        with self.reads:
            yield

    def unread(self, edits: Mapping[str, Changed], tolerance: float) -> tuple[str, ...]:
        """The rows that differ while others do not, and that the first model did not read."""
        rows = {} if self.reads is None else self.reads.rows
        edited = {name: changed.edited(tolerance) & ~rows[name] for name, changed in edits.items() if name in rows}
        return tuple(
            f"{some(map(str, rows.nonzero().flatten().tolist()))} of {name}"
            for name, rows in edited.items()
            if rows.any()
        )

    def coverage(self) -> dict[str, tuple[int, int]]:
        run = {} if self.positions is None else {"positions": self.positions}
        return run if self.reads is None else run | self.reads.counts()


def _refuse_nan(outputs: Outputs, what: str) -> None:
    """CheckpointError for a model that outputs NaN itself, so that nothing can be proved."""
    if names := [name for name, value in outputs.items() if bool(value.isnan().any())]:
        raise CheckpointError(
            f"{what}: output {some(names)} has NaN before anything is aligned. A row of scores whose keys are all "
            "masked makes one in some classes (padding on the left, or wider than the sliding window of the model): "
            "give inputs without such padding"
        )


def aligned(fields: Mapping[str, Tensor], alignment: Alignment | None) -> dict[str, Tensor]:
    """Let the alignment act on the last dimension of the fields whose space it transforms."""
    if alignment is None:
        return dict(fields)
    out = dict(fields)
    for name, layout in alignment.spec.outputs.items():
        if name in fields:
            outer = (Atom(str(size)) for size in fields[name].shape[: -len(layout.dims)])
            spec = replace(alignment.spec, tensors={name: Declared(Layout((*outer, *layout.dims)))})
            out[name] = replace(alignment, spec=spec).move(name, fields[name])
    return out

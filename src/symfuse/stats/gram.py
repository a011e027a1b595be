"""Gram matrices of the inputs of linear maps, Σ x xᵀ over all positions of all batches (Jin et al. 2023, Dataless
Knowledge Fusion by Merging Weights of Language Models, arXiv 2212.09849, Section 3), in bounded memory."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from symfuse.errors import CheckpointError, OptionError
from symfuse.io import TensorInfo, is_finite
from symfuse.io.lazy import StoredTensor, StoredTensors
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.writer import write_tensors
from symfuse.stats.activations import Batch, inputs_of, present, rows
from symfuse.stats.statistics import Input, Statistics
from symfuse.stats.taps import input_dim, owners_of, unfused

# Columns that are multiplied at a time, with those to their right: half of a symmetric matrix is enough, and the
# product in float32 stays small beside the sums.
STEP = 256


def gram_matrices(
    module: nn.Module,
    batches: Sequence[Batch],
    names: Collection[str],
    *,
    memory: int | None = None,
    scratch: Path | None = None,
    keep: Callable[[Batch], Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Σ x xᵀ and Σ x of the inputs x of linear maps, and the number of positions.

    module: live, in evaluation mode. names: canonical names of weights. Every weight of a linear map that is not also
    an embedding, and that is used, gets its Gram matrix, or that of another weight with the same input. memory: bytes
    for the sums, which are float64; if not all fit, the batches are run again for each group of weights that does.
    scratch: a folder to which the sums of each group are written, as one file that the result reads lazily; by default
    they stay in memory. keep: the positions [batch, length] of a batch that count, by default those that its mask does
    not mark as padding; of pooled inputs, [batch, width], every row counts. progress: called after each batch with the
    number done and the total.

    Products are formed in at least float32. A map that is called several times in one run counts each time (a layer
    that is run several times), but inputs that are the same for every batch do not count (the relative positions of
    DeBERTa), unless there are no others. Raises OptionError for no batches, no positions, or memory for less than one
    Gram matrix; CheckpointError for inputs that are not finite.
    """
    if not batches:
        raise OptionError("there are no batches to take Gram matrices from")
    maps = _maps(module, names)
    shared, fixed = _shared(module, maps, batches[0])
    groups = _groups({entry: maps[entry].width for entry in shared}, memory)
    kept: dict[str, Tensor] = {}
    stored: dict[str, StoredTensor] = {}
    inputs: dict[str, Input] = {}
    examples = 0
    for number, group in enumerate(groups):
        report = partial(_report, progress, number * len(batches), len(groups) * len(batches))
        sums = {entry: _Sums(maps[entry].width) for entry in group}
        recorder = _Recorder({entry: shared[entry] for entry in group}, fixed, sums)
        examples = _run(module, batches, maps, recorder, keep, report)
        called = {entry: one for entry, one in sums.items() if one.calls}
        inputs |= {name: Input(e, maps[name].dim, one.positions) for e, one in called.items() for name in shared[e]}
        tensors = {f"{e}.{key}": partial(one.read, e, key) for e, one in called.items() for key in ("gram", "sum")}
        if scratch is None:
            kept |= {name: read() for name, read in tensors.items()}
            continue
        path = scratch / f"gram-{number:05d}.safetensors"
        infos = {f"{e}.{key}": info for e, one in called.items() for key, info in one.infos.items()}
        write_tensors(path, infos, lambda name, tensors=tensors: tensors[name]())  # type: ignore[misc]
        stored |= read_safetensors(path)
    results = kept if scratch is None else StoredTensors(stored)
    used_inputs = {name: inputs[name] for name in maps if name in inputs}
    return Statistics("gram", results, examples, inputs=used_inputs, sources=() if scratch is None else (scratch,))


@dataclass(frozen=True)
class _Map:
    """A linear map: its module, the dimension of its weight that reads the input, and the size of that dimension."""

    owner: nn.Module
    dim: int
    width: int


def _maps(module: nn.Module, names: Collection[str]) -> dict[str, _Map]:
    """The linear maps among the modules that own weights, except those whose weight is also an embedding's (a tied
    head): merged by a Gram matrix, the embedding would follow the inputs of the head."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    linear_maps = {}
    for name, owner in owners_of(names, module).items():
        dim = input_dim(owner)
        weight = getattr(owner, name.rpartition(".")[2], None)
        if dim is not None and isinstance(weight, Tensor) and weight.ndim == 2 and id(weight) not in embeddings:
            linear_maps[name] = _Map(owner, dim, weight.shape[dim])
    return linear_maps


def _shared(
    module: nn.Module, maps: Mapping[str, _Map], batch: Batch
) -> tuple[dict[str, tuple[str, ...]], dict[str, set[int]]]:
    """The weights that share one input tensor, by the first that reads it; and for each weight the numbers of the calls
    whose input does not depend on the batch. Determined by running one example, alone and duplicated: inputs that
    depend on the batch have more positions then."""
    one = {key: field[:1] for key, field in batch.items()}
    alone, twice = _Calls(), _Calls()
    with _recording(maps, alone), unfused():
        module(**inputs_of(module, one))
    # A model that takes one example only has usually been recorded before it raises.
    with suppress(RuntimeError, ValueError), _recording(maps, twice), unfused():
        module(**inputs_of(module, {key: torch.cat([field, field]) for key, field in one.items()}))
    readers: dict[tuple[int, ...], list[str]] = defaultdict(list)
    fixed: dict[str, set[int]] = {}
    for name, calls in alone.of.items():  # in the order in which they read
        pairs = zip(calls, twice.of.get(name, ()), strict=False)
        same = {number for number, (a, b) in enumerate(pairs) if a[1] == b[1]}
        fixed[name] = same if len(same) < len(calls) else set()
        readers[tuple(tensor for number, (tensor, _) in enumerate(calls) if number not in fixed[name])].append(name)
    silent = {name: (name,) for name in maps if name not in alone.of}
    return {names[0]: tuple(names) for names in readers.values()} | silent, fixed


class _Calls:
    """The inputs of one run. of: by weight, for each call, the number of the tensor and of its positions."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, int]]] = {}
        self._numbers, self._fresh = WeakIdKeyDictionary(), count()

    def __call__(self, name: str, x: Tensor) -> None:
        if x not in self._numbers:
            self._numbers[x] = next(self._fresh)
        self.of.setdefault(name, []).append((self._numbers[x], x.shape[:-1].numel()))


def _groups(widths: Mapping[str, int], memory: int | None) -> list[list[str]]:
    """The entries in order, in as few groups as memory allows; OptionError if one alone does not fit."""
    groups: list[list[str]] = [[]]
    taken = 0
    for entry, width in widths.items():
        nbytes = 8 * width * (width + 1)
        if memory is not None and nbytes > memory:
            raise OptionError(
                f"the Gram matrix of what {entry} reads takes {nbytes / 1e6:,.1f} MB, and there are "
                f"{memory / 1e6:,.1f} MB for all: give more memory (--memory), or leave that weight out"
            )
        if groups[-1] and memory is not None and taken + nbytes > memory:
            groups.append([])
            taken = 0
        groups[-1].append(entry)
        taken += nbytes
    return groups


def _run(
    module: nn.Module,
    batches: Sequence[Batch],
    maps: Mapping[str, _Map],
    recorder: _Recorder,
    keep: Callable[[Batch], Tensor] | None,
    report: Callable[[int], None],
) -> int:
    """Add the inputs of all batches. Returns the number of examples."""
    examples = 0
    with _recording({name: maps[name] for name in recorder.entries}, recorder), unfused():
        for number, batch in enumerate(batches):
            inputs = inputs_of(module, batch)
            examples += len(next(iter(inputs.values())))
            recorder.start(keep(batch) if keep is not None else present(batch))
            module(**inputs)
            report(number + 1)
    if any(one.calls and not one.positions for one in recorder.sums.values()):
        raise OptionError(
            "of the batches no positions are left to take Gram matrices from: all are masked, or left out"
        )
    return examples


class _Recorder:
    """The inputs of one run of the module: the first weight of an entry adds its input, the others are checked against
    it. fixed: by weight, the calls that do not count."""

    def __init__(
        self, shared: Mapping[str, Sequence[str]], fixed: Mapping[str, Collection[int]], sums: Mapping[str, _Sums]
    ) -> None:
        self.entries = {name: entry for entry, names in shared.items() for name in names}
        self.fixed = fixed
        self.sums = sums
        self.start(None)

    def start(self, mask: Tensor | None) -> None:
        self.mask = mask
        self.read: dict[str, list[weakref.ref[Tensor]]] = defaultdict(list)
        self.seen: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # of these, those that count

    def __call__(self, name: str, x: Tensor) -> None:
        self.seen[name] += 1
        if self.seen[name] - 1 in self.fixed.get(name, ()):
            return
        entry = self.entries[name]
        read = self.read[entry]
        if name == entry:
            read.append(weakref.ref(x))
            self.sums[entry].add(rows(x, self.mask))
        elif self.calls[name] >= len(read) or read[self.calls[name]]() is not x:
            raise OptionError(
                f"{name} and {entry} read one tensor in the first batch, and not in a later one: give batches of one "
                "kind"
            )
        self.calls[name] += 1


class _Sums:
    """Σ x xᵀ, of which only the upper blocks are computed, and Σ x: float64."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.calls = self.positions = 0
        self.dtype = torch.float32
        self.gram = torch.zeros(width, width, dtype=torch.float64)
        self.total = torch.zeros(width, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """x: [positions, width]."""
        self.calls += 1
        self.positions += len(x)
        self.dtype = x.dtype
        for start in range(0, self.width, STEP):
            stop = start + STEP
            self.gram[start:stop, start:] += (x[:, start:stop].T @ x[:, start:]).cpu()
        self.total += x.sum(0).cpu()

    @property
    def infos(self) -> dict[str, TensorInfo]:
        shapes = {"gram": (self.width, self.width), "sum": (self.width,)}
        return {key: TensorInfo(self.dtype, shape) for key, shape in shapes.items()}

    def read(self, entry: str, key: str) -> Tensor:
        """ "gram" or "sum", in the dtype of the products."""
        if not is_finite(self.total) or not is_finite(self.gram.diagonal()):
            raise CheckpointError(
                f"what {entry} reads is not finite on these data, or too large to be multiplied; run the model in "
                "float32, and look at its weights"
            )
        if key == "sum":
            return self.total.to(self.dtype)
        for start in range(0, self.width, STEP):
            stop = start + STEP
            self.gram[stop:, start:stop] = self.gram[start:stop, stop:].T
        return self.gram.to(self.dtype)


@contextmanager
def _recording(maps: Mapping[str, _Map], record: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While a module runs, pass the input of each weight to `record`."""
    handles = []
    for name, one in maps.items():

        def hook(owner: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            x = _read(owner, args, kwargs)
            if x is not None:
                record(name, x)

        handles.append(one.owner.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read(owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The input of a call; None for torch's cross-attention, whose weight reads two inputs."""
    if not isinstance(owner, nn.MultiheadAttention):
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        return inputs
    named: dict[str, Tensor] = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
    return named["query"] if named["query"] is named["key"] is named["value"] else None


def _report(progress: Callable[[int, int], None] | None, before: int, total: int, done: int) -> None:
    if progress is not None:
        progress(before + done, total)

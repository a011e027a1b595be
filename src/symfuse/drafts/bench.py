"""Test drafts: run the real class with random weights, in float64, before and after random elements."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures.own import builder
from symfuse.drafts.trace import Traced, trace
from symfuse.errors import CheckpointError, OptionError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.live import aliases, constants, counts_batches, names_in_memory, untied
from symfuse.messages import first_line, some
from symfuse.model import Model
from symfuse.modules import build_module, live
from symfuse.spec import Declared, Instance, Spec, parse
from symfuse.verification import TOLERANCE, aligned, compare, guessed, random_inputs, run, verify

# Up to so many weights a class is run in float64 (8 bytes each, twice).
LARGEST = 500_000_000
SEEDS = 20
# Maps that are so much larger reach what classes clip (values at 8, neurons at 7); a change that is no rounding there.
LOUD, CLIPPED = 10.0, 1e-3


class Bench:
    """The class of a checkpoint, run with random weights; `error` measures how much an alignment changes its outputs.

    No gain is 1 and no bias 0, which would hide errors; the checkpoint's own weights are not read. module: a live one
    of a class that `transformers` does not build. Raises CheckpointError or OptionError if the class cannot be built,
    or run on any inputs that symfuse knows.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: torch.nn.Module | None,
        inputs: Mapping[str, Tensor] | None,
        seed: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        count = sum(math.prod(checkpoint.info(name).shape) for name in checkpoint)
        if count > LARGEST:
            raise CheckpointError(
                f"{count:,} weights are too many to run in float64; make the draft of a small model of the same "
                "config, with fewer layers and a smaller vocabulary"
            )
        made = build_module(checkpoint, dtype) if module is None else _copied(module).to(dtype).eval()
        _randomise(made, seed)
        opened = open_checkpoint(made, config=checkpoint.config, name=checkpoint.name)
        self.dtype = dtype
        self.foreign = module is not None
        module = live(opened, dtype) if module is None else made
        self.build = builder(made) if self.foreign else None
        self.ties = aliases(made) if self.foreign else {}
        fixed = constants(made) if self.foreign else set()
        self.buffers = [name for name in opened if name in fixed or counts_batches(name)]
        # The module's weights are overwritten at each run; of several names of one the first is enough.
        kept = opened.keys() - self.ties.keys() - {*self.buffers}
        self.checkpoint = opened.replace(tensors={name: opened[name].clone() for name in opened if name in kept})
        names = names_in_memory(module)
        # Weights that are converted while they are loaded need a new module each time.
        self._live = module if set(self.checkpoint) <= set(names) else None
        self._names = names
        fields = random_inputs(module, self.checkpoint.config) if inputs is None else inputs
        self._inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in fields.items()}
        self._which = "random inputs" if inputs is None else "these inputs"
        try:
            self._expected = self._run(self.checkpoint)
        except CheckpointError:
            fewer = guessed(module) if inputs is None else None  # such as text alone, of a class that takes images too
            if fewer is None:
                raise
            self._inputs = fewer
            self._expected = self._run(self.checkpoint)
        self.traced = self._traced(made)
        if not self._expected:
            raise CheckpointError("it returns no tensors")
        if not all(bool(value.isfinite().all()) for value in self._expected.values()):
            raise CheckpointError("with random weights its outputs are not finite")
        self.tolerance = TOLERANCE[dtype]
        if self._own(1e-10) > 1e-3 * self._own(1e-6):  # not smooth: it computes in float32 out of sight
            self.tolerance = max(self.tolerance, TOLERANCE[torch.float32])
        self.loud: Bench | None = None

    def _traced(self, module: torch.nn.Module) -> Traced:
        """What a run shows, by the names of files; nothing for a class that cannot be traced."""
        files = {name: file for file, name in self._names.items()} | {name: name for name in self.ties}
        module = untied(copy.deepcopy(module)) if aliases(module) else module
        try:
            return trace(module.requires_grad_(), self._inputs).renamed(files)
        except Exception:  # whatever that class raises, of which the plain run shows the reason
            return Traced()

    def louder(self) -> Bench | None:
        """The same class with larger maps, at which limits inside of it are reached; None if it shows nothing there."""
        other = copy.copy(self)
        louder = {n: t * (LOUD if t.ndim > 1 and t.is_floating_point() else 1) for n, t in self.checkpoint.items()}
        other.checkpoint = self.checkpoint.replace(tensors=louder)
        other._expected = other._run(other.checkpoint)
        if not all(bool(value.isfinite().all()) for value in other._expected.values()):
            return None
        other.tolerance = max(CLIPPED, 100 * other._own(1e-10))
        return other if other.tolerance < 1 else None

    def _module(self, checkpoint: Checkpoint) -> torch.nn.Module:
        if self._live is None or checkpoint.keys() != self.checkpoint.keys():
            return live(checkpoint, self.dtype)
        weights = self._live.state_dict()
        with torch.no_grad():
            for name, tensor in checkpoint.items():
                weights[self._names[name]].copy_(tensor)
        return self._live

    def _own(self, step: float) -> float:
        """The effect of a relative change of all weights by so much."""
        nudged = {n: t * (1 + step) if t.is_floating_point() else t for n, t in self.checkpoint.items()}
        return max(compare(self._expected, self._run(self.checkpoint.replace(tensors=nudged))).values())

    def _run(self, checkpoint: Checkpoint, alignment: Alignment | None = None) -> Mapping[str, Tensor]:
        try:
            return run(self._module(checkpoint), aligned(self._inputs, alignment))
        except Exception as error:  # whatever that class raises
            raise CheckpointError(f"it does not run on {self._which}: {first_line(error)}") from error

    def random(self, spec: Spec, axes: set[str] | None, seed: int) -> Alignment:
        """Random elements of these axes, none of which is the identity by chance if that can be avoided."""
        candidates = (random_alignment(spec, seed + 100 * n, axes, largest=True) for n in range(SEEDS))
        first = next(candidates)
        good = (g for g in (first, *candidates) if not any(e.is_identity() for e in g.elements.values()))
        return next(good, first)

    def error(self, spec: Spec, alignment: Alignment) -> float:
        """The largest change of an output, relative to its largest entry; of larger maps too, if there is `loud`."""
        plain = self.change(alignment.on(Model(self.checkpoint, spec)), alignment)
        clipped = 0.0 if self.loud is None else self.loud.error(spec, alignment)
        return max(plain, clipped) if self.loud is not None and clipped > self.loud.tolerance else plain

    def notices(self, spec: Spec, alignment: Alignment) -> bool:
        """Whether the outputs change if an axis is transformed in one tensor alone: else they are no evidence for
        it."""
        broken = _in_one_place(spec, {instance.axis for instance in alignment.elements})
        changed = replace(alignment, spec=broken).on(Model(self.checkpoint, broken))
        return not self.change(changed, alignment) <= self.tolerance

    def depends_on(self, template: str) -> bool:
        """Whether the outputs change with the tensors of a template (with {l} and {e})."""
        named = re.compile(re.sub(r"\\{\w\\}", r"\\d+", re.escape(template)))
        rng = torch.Generator().manual_seed(0)
        tensors = {
            name: t + torch.randn(t.shape, generator=rng, dtype=t.dtype)
            if t.is_floating_point() and named.fullmatch(name)
            else t
            for name, t in self.checkpoint.items()
        }
        return not self.change(self.checkpoint.replace(tensors=tensors)) <= self.tolerance

    def change(self, after: Checkpoint, alignment: Alignment | None = None) -> float:
        """The largest change of an output of another checkpoint of the class, which is aligned by that alignment."""

        def outputs(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
            return self._expected if checkpoint is self.checkpoint else self._run(checkpoint, alignment)

        worst = verify(self.checkpoint, after, alignment, runner=outputs, tolerance=self.tolerance).worst
        return math.inf if math.isnan(worst) else worst


def _in_one_place(spec: Spec, axes: set[str]) -> Spec:
    """A wrong alignment: for each instance of these axes only one occurrence in a matrix is transformed."""
    seen: set[Instance] = set()
    tensors = {}
    for name, declared in sorted(spec.tensors.items(), key=lambda item: len(item[1].layout.dims) < 2):
        text = str(declared.layout)
        for axis in axes:
            word = re.compile(rf"\|?\b{axis}\b\|?\*?")
            start = 0
            instance = spec.instance(axis, declared.index)
            if instance not in seen and (first := word.search(text)):
                seen.add(instance)
                start = first.end()
            text = text[:start] + word.sub(str(spec.sizes[axis]), text[start:])
        tensors[name] = Declared(parse(text), declared.index)
    return replace(spec, tensors={name: tensors[name] for name in spec.tensors})


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """CheckpointError for a module that is not run in float64: one that cannot be copied, or is complex."""
    if found := [name for name, one in module.named_parameters() if one.is_complex()]:
        raise CheckpointError(f"it holds complex weights ({some(found)}), which no group acts on")
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever that class raises
        raise CheckpointError(f"it cannot be copied: {first_line(error)}") from error


def _randomise(module: torch.nn.Module, seed: int) -> None:
    """Weights that keep the magnitude of their input, gains about 1, biases about 0."""
    rng = torch.Generator().manual_seed(seed)

    def normal(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=rng, dtype=torch.float64)

    with torch.no_grad():
        for name, p in module.named_parameters():
            if not p.is_floating_point():
                continue
            if p.ndim < 2:
                p.copy_(0.3 * normal(p) + (0.0 if "bias" in name else 1.0))
            else:
                p.copy_(1.3 * normal(p) / math.sqrt(math.prod(p.shape[1:]) if p.ndim > 3 else p.shape[-1]))


def open_bench(
    checkpoint: Checkpoint, module: torch.nn.Module | None, inputs: Mapping[str, Any] | None, seed: int
) -> tuple[Bench | None, str]:
    """The bench of a checkpoint, or None and the reason."""
    why = ""
    for dtype in (torch.float64, torch.float32):  # some classes do not run in float64
        try:
            return Bench(checkpoint, module, inputs, seed, dtype), ""
        except (CheckpointError, OptionError) as error:
            why = why or first_line(error).removeprefix(f"{checkpoint.name}: ")
    return None, why

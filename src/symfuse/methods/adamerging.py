"""AdaMerging: learn the coefficients of task vectors that minimise the entropy of the merged model's predictions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.evaluation import Batch
from symfuse.evaluation.tasks.base import IGNORED, Predicting
from symfuse.merging.base import PerModel
from symfuse.merging.stream import Stream
from symfuse.messages import suggestion
from symfuse.methods.data import Inputs, Learned, running
from symfuse.methods.registry import method
from symfuse.methods.task_arithmetic import task_arithmetic
from symfuse.model import Model
from symfuse.model.stacks import piece_of
from symfuse.modules import canonical_names
from symfuse.spec import Spec, anatomy

BY = ("layer", "task", "tensor")


def learn(inputs: Inputs, *, by: str = "layer", steps: int = 100, rate: float = 1e-3, start: float = 0.3) -> Learned:
    """The λ of θ₀ + Σ λₖ τₖ that minimise the entropy of the predictions on unlabelled data of each model: Adam on the
    sum over models of the mean entropy of one batch each, with λ clamped to [0, 1] as in the published code (Yang et
    al. 2024, arXiv 2310.02575).

    by: one λ for each model and layer ("layer"; tensors outside of layers share one more), for each model ("task"), or
    for each model and tensor ("tensor", which the published code calls a layer). start: of all λ. Only the positions of
    labels are read. Each model's batches are cycled in a random order of the seed. Heads that models keep have no λ,
    and are used on their own data. Memory: θ₀, all τ, the merged weights and their gradient, in float32, so
    4 · (models + 3) bytes per weight, and one backward pass.
    """
    if by not in BY:
        raise OptionError(f"adamerging: by is {by!r}{suggestion(by, BY)}; choose from {', '.join(BY)}")
    if steps < 1:
        raise OptionError(f"adamerging: steps is {steps}; expected at least 1")
    if rate <= 0:
        raise OptionError(f"adamerging: rate is {rate:g}, expected a number above 0 (usual: 0.001)")
    if not 0 <= start <= 1:
        raise OptionError(f"adamerging: start is {start:g}, expected 0 to 1 (usual: 0.3)")
    tasks = [inputs.predicting(i) for i in range(len(inputs.models))]
    mixture = Mixture(inputs, by)
    coefficients = torch.full((len(tasks), len(mixture.groups)), start, dtype=torch.float64)
    before = mixture.entropies(tasks, coefficients)
    adam = torch.optim.Adam([coefficients], lr=rate)
    streams = [_batches(task, f"adamerging {inputs.seed} {i}") for i, task in enumerate(tasks)]
    for step, batches in enumerate(islice(zip(*streams, strict=True), steps), 1):
        loss, coefficients.grad = mixture.gradient(tasks, batches, coefficients)
        adam.step()
        coefficients.clamp_(0, 1)
        inputs.report(f"adamerging: step {step} of {steps}, entropy {loss / len(tasks):.4f}")
    after = mixture.entropies(tasks, coefficients)
    notes: tuple[str, ...] = ()
    if sum(after) >= sum(before):
        change = f"from {sum(before) / len(tasks):.4f} to {sum(after) / len(tasks):.4f}"
        notes = (f"adamerging: the mean entropy did not fall in {steps} steps ({change}); use more, or a smaller rate",)
    values = coefficients.tolist()
    spec = inputs.models[0].spec
    numbers = {name: number for number, names in enumerate(mixture.groups.values()) for name in names}

    def weight(model: int, name: str) -> float | None:
        piece = None if name in numbers else piece_of(name, spec)  # files may have a stack in pieces
        number = numbers.get(name if piece is None else piece.stack)
        return None if number is None else values[model][number]

    record = {
        "by": by,
        "steps": steps,
        "coefficients": {group: [row[i] for row in values] for i, group in enumerate(mixture.groups)},
        "entropy": {"before": before, "after": after},
    }
    fell = ", ".join(f"{m.name} {a:.4f} to {b:.4f}" for m, a, b in zip(inputs.models, before, after, strict=True))
    return Learned(weights=weight, record=record, summary=f"mean entropy: {fell}", notes=notes)


@method(
    "adamerging",
    label="AdaMerging",
    paper="Yang et al. 2024, AdaMerging, arXiv 2310.02575",
    base="required",
    learn=learn,
    unlabelled=lambda _parameters: True,
    ignored=("weight",),
)
def adamerging(stream: Stream, *, weight: PerModel = (0.3,)) -> Iterator[Tensor]:
    """base + Σ wᵢ δᵢ with the learned weights."""
    return task_arithmetic(stream, weight=weight)


class Mixture:
    """θ₀ + Σ λₖ τₖ as live modules, one for each model's data, which share all weights that are mixed.

    groups: by name, the tensors that share one λ per model. λ are [models, groups], on the CPU.
    """

    def __init__(self, inputs: Inputs, by: str, dtype: torch.dtype = torch.float32) -> None:
        if inputs.base is None:
            raise OptionError("adamerging needs a base model, from which task vectors start (--base, base_model)")
        self.shared: dict[str, nn.Parameter] = {}
        self.modules = [self._module(inputs, i, dtype) for i in range(len(inputs.models))]
        self.base = {name: _read(inputs.base, name, weight) for name, weight in self.shared.items()}
        self.vectors = [
            {name: _read(model, name, weight).sub_(self.base[name]) for name, weight in self.shared.items()}
            for model in inputs.models
        ]
        self.groups: dict[str, list[str]] = {}
        spec = inputs.models[0].spec
        for name in spec.tensors:
            if not (inputs.own_heads and name in spec.heads):
                self.groups.setdefault(_group(spec, name, by), []).append(name)

    def set(self, coefficients: Tensor) -> None:
        """Set the modules' weights to those of these λ."""
        with torch.no_grad():
            for number, name in self._numbered():
                weight = self.shared[name].copy_(self.base[name])
                for share, vectors in zip(coefficients[:, number].tolist(), self.vectors, strict=True):
                    weight.add_(vectors[name], alpha=share)

    def gradient(
        self, tasks: list[Predicting], batches: tuple[Batch, ...], coefficients: Tensor
    ) -> tuple[float, Tensor]:
        """The sum of the mean entropies of one batch of each task, and its gradient with respect to λ: for λₖ and a
        group of weights Σ ⟨∂/∂θ, τₖ⟩ over them, so one backward pass gives all. CheckpointError if it is not finite."""
        self.set(coefficients)
        total = 0.0
        for task, module, batch in zip(tasks, self.modules, batches, strict=True):
            values = entropies(task, module, batch)
            loss = values.sum() / max(1, values.numel())  # a batch may have no labelled position
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        gradient = torch.zeros_like(coefficients)
        for number, name in self._numbered():
            slope = self.shared[name].grad
            if slope is not None:
                for k, vectors in enumerate(self.vectors):
                    gradient[k, number] += torch.dot(slope.flatten(), vectors[name].flatten()).item()
            self.shared[name].grad = None
        if not bool(gradient.isfinite().all()):
            raise CheckpointError(
                f"adamerging: the entropy is {total:g} on a batch and its gradient is not finite; numbers may have "
                "overflowed: look for very large weights, or data that the models cannot read"
            )
        return total, gradient

    def entropies(self, tasks: list[Predicting], coefficients: Tensor) -> list[float]:
        """The mean entropy of the predictions on all data of each task, in nats."""
        self.set(coefficients)
        out = []
        with torch.no_grad():
            for task, module in zip(tasks, self.modules, strict=True):
                values = torch.cat([entropies(task, module, batch) for batch in task.batches])
                out.append(values.double().mean().item())
        return out

    def _numbered(self) -> Iterator[tuple[int, str]]:
        """The mixed weights with the numbers of their groups; a module may lack some that files have."""
        for number, names in enumerate(self.groups.values()):
            yield from ((number, name) for name in names if name in self.shared)

    def _module(self, inputs: Inputs, number: int, dtype: torch.dtype) -> nn.Module:
        """The module for a model's data, with the shared weights instead of its own."""
        model = inputs.models[number]
        with running([model], inputs.task(number), dtype, device=inputs.device) as space:
            module: nn.Module = space.set([1.0])
        names, new = canonical_names(model, module), {}
        for memory, weight in module.named_parameters():
            if memory not in names:
                raise IncompatibleError(
                    f"{model.name}: {memory} of a {type(module).__name__} is not a single tensor of the file, so its "
                    "coefficient cannot be learned; use task_arithmetic with weights"
                )
            if not (inputs.own_heads and names[memory] in model.spec.heads):
                new[weight] = self.shared.setdefault(names[memory], weight).requires_grad_(True)
        for part in module.modules():
            for leaf, own in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if own in new:
                    setattr(part, leaf, new[own])
        return module


def entropies(task: Predicting, module: nn.Module, batch: Batch) -> Tensor:
    """−Σ p log p of each prediction at a labelled position, with its graph; the labels themselves are not used.
    OptionError if there are no classes."""
    logits, labels = task.predicted(module, batch)
    if logits.shape[-1] < 2:
        raise OptionError(f"{task.name} on {task.source}: the model predicts a number; the entropy needs classes")
    logs = logits[labels != IGNORED].log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def _batches(task: Predicting, seed: str) -> Iterator[Batch]:
    """All batches in a random order of the seed, repeated without end."""
    return cycle(random.Random(seed).sample(task.batches, len(task.batches)))


def _group(spec: Spec, name: str, by: str) -> str:
    """The name of a tensor's group, in the record."""
    if by == "task":
        return "all"
    if by == "tensor":
        return name
    index: Mapping[str, Any] = spec.tensors[name].index
    layers = [f"{key.rpartition('_')[0]} layer {at}".strip() for key, at in index.items() if anatomy(key) == "l"]
    return layers[0] if layers else "outside of layers"


def _read(model: Model, name: str, like: Tensor) -> Tensor:
    """A copy of a model's tensor with the dtype and device of the module's weight, whose shape it must have."""
    if name not in model.spec.tensors:
        raise IncompatibleError(
            f"{model.name} has no {name}, which another model has; choose `heads`: the number or name of the model "
            "whose head is to be kept, or drop"
        )
    tensor = model.read(name)
    if tensor.shape != like.shape:
        raise IncompatibleError(
            f"{model.name}: {name} has shape {list(tensor.shape)}, expected {list(like.shape)} as in the module; "
            "models must have one shape, and heads of different labels stay with their models (`heads`: one, or drop)"
        )
    return tensor.to(like.device, like.dtype, copy=True)

"""Where a live module has the activations of an axis, and recording them while it runs.

The layouts determine where. A weight that reads an axis (`axis*` in its input dimension) has the axis's
activations as its module's input. Where no module with hooks reads the axis, the outputs of the weights that write it
are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from symfuse.architectures import ARCHITECTURES
from symfuse.io.live import class_prefix, names_in_memory
from symfuse.spec import Instance, Layout, Spec


@dataclass(frozen=True)
class Tap:
    """Where activations are recorded: the input ("in") or the output ("out") of the module that owns a weight.

    layout: of the features, without the leading positions.
    """

    weight: str
    side: Literal["in", "out"]
    layout: Layout

    def __str__(self) -> str:
        return f"{self.weight.rpartition('.')[0]}.{self.side}"


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def taps(
    spec: Spec,
    module: nn.Module,
    instances: Iterable[Instance],
    without: Collection[str] = (),
    *,
    written: bool = False,
) -> dict[Instance, tuple[Tap, ...]]:
    """The taps of each axis instance: all inputs that have its units, or if there are none, all outputs. without: taps
    that have one of these axes too are left out. written: use the outputs in any case."""
    known = ARCHITECTURES.get(spec.family)
    called = [name for name in spec.tensors if known is None or known.calls(name.rpartition(".")[0])]
    owners = owners_of(called, module)
    return {instance: _taps(spec, owners, instance, without, written) for instance in instances}


def _taps(
    spec: Spec, owners: Mapping[str, nn.Module], instance: Instance, without: Collection[str], written: bool
) -> tuple[Tap, ...]:
    by_side: dict[str, list[Tap]] = {"in": [], "out": []}
    for name in spec.movable[instance]:
        if name not in owners:
            continue
        inputs, outputs = _sides(owners[name], spec.tensors[name].layout)
        if inputs is not None and _has(inputs, instance.axis, without):
            by_side["in"].append(Tap(name, "in", inputs))
        if outputs is not None and _has(outputs, instance.axis, without):
            by_side["out"].append(Tap(name, "out", outputs))
    reads = _of_one_input(by_side["in"], owners)
    return tuple(by_side["out"] if written else reads or by_side["out"])


def _has(layout: Layout, axis: str, without: Collection[str]) -> bool:
    parts = ({atom.name for atom in part} for part in layout.parts)
    return any(axis in part and part.isdisjoint(without) for part in parts)


def _sides(owner: nn.Module, layout: Layout) -> tuple[Layout | None, Layout | None]:
    """The layouts of the input and the output of the module that owns a weight, of a convolution those of its channels;
    None where it is not a linear map."""
    convolution = isinstance(owner, CONVOLUTIONS) and owner.groups == 1 and len(layout.dims) > 2
    if len(layout.dims) != 2 and not convolution:
        return None, None
    dims, at = [Layout((dim,)) for dim in layout.dims], 1 if convolution else input_dim(owner)
    return (None, None) if at is None else (dims[at], dims[1 - at])


def input_dim(owner: nn.Module) -> int | None:
    """The dimension of a linear map's weight that reads its input; None of other modules."""
    if isinstance(owner, nn.Linear | nn.MultiheadAttention):
        return 1
    return 0 if type(owner).__name__ == "Conv1D" else None  # of transformers, with the transposed weight


def owners_of(names: Iterable[str], module: nn.Module) -> dict[str, nn.Module]:
    """The module that owns each weight of those names, if it is called with the weight's input."""
    modules = _by_weight(module)
    prefix = class_prefix(module)
    owners = {}
    for name in names:
        for one in (name, prefix + name, name.removeprefix(prefix)):
            owner = modules.get(one)
            # torch's attention is called with the input of its input projection, and never calls its output projection.
            if owner is not None and type(owner).__name__ != "NonDynamicallyQuantizableLinear":
                owners[name] = owner
                break
    return owners


def _by_weight(module: nn.Module) -> dict[str, nn.Module]:
    """The module that owns each weight, by the weight's name in memory and by its name on disk, which may differ."""
    names = dict(module.named_parameters(remove_duplicate=False))
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in names}
    return {disk: owners[name] for disk, name in names_in_memory(module).items() if name in owners} | owners


def _of_one_input(reads: Sequence[Tap], owners: Mapping[str, nn.Module]) -> list[Tap]:
    """Of several weights with the same input (query, key, value) the first: those of equal module types inside one
    module."""
    by_input: dict[tuple[str, ...], Tap] = {}
    for tap in reads:
        path = tap.weight.rpartition(".")[0]
        inside = path.rpartition(".")[0]
        by_input.setdefault((inside, type(owners[tap.weight]).__name__) if inside else (path,), tap)
    return list(by_input.values())


@contextmanager
def recording(spec: Spec, module: nn.Module, wanted: Iterable[Tap]) -> Iterator[dict[Tap, Tensor]]:
    """While a module runs, the activations at each tap."""
    owners = owners_of(spec.tensors, module)
    recorded: dict[Tap, Tensor] = {}
    handles = []
    for tap in wanted:
        owner = owners[tap.weight]

        def hook(called: Any, args: Any, output: Any, tap: Tap = tap) -> None:
            inputs: Tensor = args[0]
            if tap in recorded:  # called again, as DeBERTa's projections are for the relative positions
                return
            if tap.side == "in":
                recorded[tap] = inputs
            elif isinstance(called, nn.MultiheadAttention):
                recorded[tap] = nn.functional.linear(inputs, called.in_proj_weight, called.in_proj_bias)
            else:
                recorded[tap] = output
            if isinstance(called, CONVOLUTIONS):  # pixels are positions
                recorded[tap] = recorded[tap].movedim(1, -1)

        handles.append(owner.register_forward_hook(hook))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unfused() -> Iterator[None]:
    """Disable gradients, and torch's fused encoder layer, which does not call its submodules."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

"""The moments of AdamW (Loshchilov & Hutter 2019) of a model A, for going on to train A' = alignment(A).

Where W' = g W, gradients are ∂L/∂W' = g⁻ᵀ ∂L/∂W: the first moment moves by the contragredient. The second, of squares
entry by entry, moves only where g is monomial, one entry in each row and column: by the squares of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.adapters.names import match, target_name
from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, OptionError, SymmetryError
from symfuse.groups import Element, Monomial
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Rewritten
from symfuse.io.tensors import DTYPE_NAMES
from symfuse.io.torch_file import load_data
from symfuse.messages import some
from symfuse.model import Model
from symfuse.spec import Declared, Instance, Layout, Variance
from symfuse.transporting.base import described
from symfuse.transporting.declared import WITHOUT, require_exact, varied
from symfuse.transporting.files import read_arrays
from symfuse.transporting.result import Compute, Transported, computed, wide

FIRST, SECOND, COUNT = ("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq"), "step"
CONTRAGREDIENT = {Variance.PRIMAL: Variance.DUAL, Variance.DUAL: Variance.PRIMAL}
WAY_OUT = (
    "Start with new moments, or make an alignment by permutations and signs alone (--group AXIS=permutation, --group "
    "AXIS=signed, or --group AXIS=none to leave it out)"
)


def transport_moments(
    path: Path, alignment: Alignment, base: Checkpoint | None = None, names: Sequence[str] | None = None
) -> Transported:
    """An optimizer's state for the aligned model: optimizer.pt (`torch.save` of `state_dict()`), or a safetensors file
    with NAME.exp_avg, NAME.exp_avg_sq and, if need be, NAME.step.

    A state of optimizer.pt knows parameters by number. names: those of the parameters in the optimizer's order; by
    default those that the file has (`param_names`), or else of the class of `base`, in one group, or in two, with
    weight decay and without, as the Trainer of transformers has them. Raises SymmetryError, which names the axis, for
    rotations and other maps that mix entries, for frames, and for translated value biases; CheckpointError for other
    optimizers and for sizes that are not the model's.
    """
    require_exact(alignment)
    if alignment.frame:
        raise SymmetryError(
            f"this alignment rewrites the model first ({', '.join(alignment.frame)}), which mixes what the moments are "
            f"of. {WAY_OUT}"
        )
    model = Model(described(alignment), alignment.spec) if base is None else Model.of(base)
    alignment = alignment if base is None else alignment.bound(model)
    maps = Maps.of(alignment)
    if path.suffix == ".safetensors":
        tensors = read_arrays(path)
        parts = {key: key.rpartition(".")[::2] for key in tensors}
        read: dict[str, Compute] = {key: partial(tensors.__getitem__, key) for key in tensors}
        infos, writer = tensors.infos, None
    else:
        state = _State.read(path)
        order = state.names(base, names)
        parts = {f"{number}.{key}": (order[number], key) for number, key in state.keys}
        read = {f"{number}.{key}": partial(state.value, number, key) for number, key in state.keys}
        infos, writer = {name: TensorInfo.of(value()) for name, value in read.items()}, state.write
    file_names = match({owner for owner, _ in parts.values()}, model.whole, path.name)
    files = {alignment.spec.file_name(name): name for name in alignment.spec.tensors}
    compute: dict[str, Compute] = {}
    for name, (owner, key) in parts.items():
        file = file_names[owner]
        _check(path, f"{owner}.{key}", key, infos[name], model.whole.info(file).shape)
        compute[name] = _moving(path, name, key, maps, files[file], read[name])
    moments = computed(path.name, infos, compute)
    details = {"parameters": len(file_names), "elements": len(maps.first.elements)}
    sources = (path, *(() if base is None else base.sources))
    kept = {} if writer is None else {"writer": writer}
    return Transported("moments", moments, path.name, {}, maps.notes, details, sources, **kept)


def _moving(path: Path, name: str, key: str, maps: Maps, tensor: str, read: Compute) -> Compute:
    if key == COUNT:
        return read
    by = maps.first if key in FIRST else maps.second
    return lambda: by.move(tensor, wide(path.name, name, read()))


def _check(path: Path, what: str, key: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if key not in (*FIRST, *SECOND, COUNT):
        raise CheckpointError(
            f"{path.name}: {what!r} is no state of AdamW; expected {', '.join((*FIRST, *SECOND, COUNT))}. Other "
            f"optimizers are not supported: start a new one. ({path})"
        )
    if key != COUNT and info.shape != shape:
        raise CheckpointError(
            f"{path.name}: {what!r} is {list(info.shape)}, expected {list(shape)} as of the parameter. Is the order of "
            f"the parameters another (--names), or the model (--base)? ({path})"
        )


@dataclass(frozen=True)
class Maps:
    """Alignments that transform first and second moments like tensors. notes: messages for the user."""

    first: Alignment
    second: Alignment
    notes: tuple[str, ...]

    @classmethod
    def of(cls, alignment: Alignment, way_out: str = WAY_OUT) -> Maps:
        """SymmetryError, with the way out, for translated value biases and elements that mix entries."""
        spec = alignment.spec
        for rule in spec.shifts:
            shift = alignment.shifts.get(rule.bias)
            if rule.into is not None and shift is not None and bool(spec.part(rule.bias, shift, rule.axis).view.any()):
                raise SymmetryError(
                    f"this alignment translates {rule.bias} through {rule.weight}, whose gradient then has a part of "
                    "the bias's, and the mean of its squares cannot be separated from theirs. Make an alignment "
                    "without translations (`symfuse align --no-biases`)"
                )
        for gain, reader in alignment.gauged.items():
            raise SymmetryError(
                f"this alignment changes {reader} along the norm {gain}, whose gradients then have a part of the "
                f"reader's, which cannot be separated from theirs. {WITHOUT}"
            )
        elements = {instance: _monomial(instance, g, way_out) for instance, g in alignment.elements.items()}
        squared = {i: Monomial(g.index, None if g.scale is None else g.scale.square()) for i, g in elements.items()}
        tensors = {
            name: Declared(Layout(tuple(varied(node, CONTRAGREDIENT) for node in d.layout.dims)), d.index)
            for name, d in spec.tensors.items()
        }
        first = replace(alignment, spec=replace(spec, tensors=tensors), elements=elements, shifts={})
        scaled = sorted({i.axis for i, g in elements.items() if bool((g.condition() != 1).any())})
        note = f"{', '.join(scaled)}: rescaled, which AdamW's steps are not (docs/transport.md)"
        return cls(first, replace(first, elements=squared), (note,) if scaled else ())


def _monomial(instance: Instance, g: Element, way_out: str) -> Monomial:
    """The element as a permutation and scales; SymmetryError if it mixes entries."""
    if isinstance(g, Monomial):
        return g
    dense = g.to_dense()
    index = dense.abs().argmax(-1)
    scale = torch.take_along_dim(dense, index[..., None], -1)[..., 0]
    if bool(((dense != 0).sum(-1) != 1).any()) or bool(((dense != 0).sum(-2) != 1).any()):
        raise SymmetryError(
            f"axis {instance} is rotated: its elements mix entries, and the squares of mixed gradients are not mixed "
            f"squares. {way_out}"
        )
    return Monomial(index, scale)


@dataclass(frozen=True)
class _State:
    """What optimizer.pt holds: state by parameter's number, and groups."""

    path: Path
    state: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> _State:
        """CheckpointError if it is absent, damaged, holds code, or is no state of an optimizer."""
        if not path.is_file():
            raise CheckpointError(f"{path} is not there; expected optimizer.pt, or a safetensors file of moments")
        data = load_data(path)
        state, groups = (data.get(key) if isinstance(data, dict) else None for key in ("state", "param_groups"))
        numbers = isinstance(state, dict) and all(isinstance(k, int) and isinstance(v, dict) for k, v in state.items())
        lists = isinstance(groups, list) and all(
            isinstance(g, dict) and _list_of(int, g.get("params")) and _list_of(str, g.get("param_names", []))
            for g in groups
        )
        if not isinstance(state, dict) or not isinstance(groups, list) or not (numbers and lists and state):
            raise CheckpointError(
                f"{path.name} is no state of an optimizer: expected 'state' by number, not empty, and 'param_groups', "
                f"as optimizer.state_dict() has them. ({path})"
            )
        return cls(path, state, groups)

    @property
    def keys(self) -> list[tuple[int, str]]:
        return [(number, key) for number, values in self.state.items() for key in values]

    @property
    def numbers(self) -> list[int]:
        return [number for group in self.groups for number in group["params"]]

    def value(self, number: int, key: str) -> Tensor:
        value = self.state[number][key]
        if isinstance(value, (int, float)) and key == COUNT:
            return torch.tensor(float(value))
        if not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES or value.layout is not torch.strided:
            raise CheckpointError(
                f"{self.path.name}: {key!r} of parameter {number} is no dense tensor of numbers; expected a state of "
                f"AdamW. ({self.path})"
            )
        return value

    def names(self, base: Checkpoint | None, names: Sequence[str] | None) -> dict[int, str]:
        """The name of each parameter that has a state."""
        held = [name for group in self.groups for name in group.get("param_names", ())]
        order = list(names or held or self._of_class(base))
        if len(order) != len(self.numbers):
            raise CheckpointError(
                f"{self.path.name} has {len(self.numbers)} parameters, and {len(order)} names are known. Were some "
                f"frozen, or is the model another? Give their names in the optimizer's order (--names). ({self.path})"
            )
        known = dict(zip(self.numbers, (target_name(name) or name for name in order), strict=True))
        if strange := [number for number in self.state if number not in known]:
            raise CheckpointError(f"{self.path.name}: {some(map(str, strange))} in 'state' are in no group")
        return known

    def _of_class(self, base: Checkpoint | None) -> list[str]:
        """The parameters of the real class, in the groups in which the Trainer has them if there are two."""
        if base is None:
            raise OptionError(
                f"{self.path.name} knows parameters by number: give the model that was trained, whose class has them "
                "in this order (--base), or a file with their names (--names)"
            )
        from symfuse.modules import build_module

        module = build_module(base, torch.float32)
        names = [name for name, _ in module.named_parameters()]
        if len(self.groups) == 1:
            return names
        return _grouped(module, names)

    def write(self, path: Path, tensors: Rewritten) -> None:
        """Write the same file with the new moments, each of which is buffered on the disk, not in memory."""
        scratch = path.with_name("scratch")
        scratch.mkdir()
        out: dict[int, dict[str, Any]] = {number: dict(values) for number, values in self.state.items()}
        for at, (number, key) in enumerate(self.keys):
            if key == COUNT:
                continue
            moments = tensors[f"{number}.{key}"]
            waiting = torch.from_file(str(scratch / str(at)), shared=True, size=moments.numel(), dtype=moments.dtype)
            out[number][key] = waiting.copy_(moments.flatten()).view(moments.shape)
        try:
            torch.save({"state": out, "param_groups": self.groups}, path)
        except RuntimeError as error:  # what torch's writer says of a full disk
            raise OSError(str(error)) from error
        for file in (*scratch.iterdir(), scratch):
            file.unlink() if file.is_file() else file.rmdir()


def _list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _grouped(module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Parameters with weight decay, then those without, as `transformers.Trainer.create_optimizer` sorts them."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, module))  # type: ignore[arg-type]
    listed = list(names)
    return [name for name in listed if name in decayed] + [name for name in listed if name not in decayed]

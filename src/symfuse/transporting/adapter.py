"""A LoRA adapter of a model A for A' = alignment(A) (Hu et al. 2021, arXiv 2106.09685).

The alignment maps W to G W Hᵀ, so that s B A becomes s (G B)(A Hᵀ): the factor B is transformed by the axes that W
writes, A by those that it reads. Where the alignment changes a bias through W (a translated value bias through W_O, a
folded norm's bias through the weight that reads it), the adapter adds a vector B u: the factor's bias.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.adapters.config import CONFIG, SAFETENSORS, Config, read_tensors
from symfuse.adapters.lora import Change, changes_of
from symfuse.adapters.names import target_name
from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, SymmetryError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.folder import read_json
from symfuse.io.lazy import StoredTensors
from symfuse.messages import some
from symfuse.spec import Atom, Axis, Declared, Layout, Shift, bias_of
from symfuse.spec.layout import Node
from symfuse.transporting.base import Base
from symfuse.transporting.declared import WITHOUT, require_alone, require_exact, with_tensors
from symfuse.transporting.frames import Frame, Rewrite
from symfuse.transporting.result import Transported, computed, wide


def transport_adapter(
    folder: Path, alignment: Alignment, base: Checkpoint | None = None, new_base: str | None = None
) -> Transported:
    """The adapter in a folder, for the aligned base: plain LoRA, read as `symfuse.adapters.apply` reads it.

    base: the model that it was trained on, which alignments with a frame need, and biases that the adapter holds as a
    whole. new_base: what its config is to name as its base. Raises CheckpointError for other kinds of adapters, by
    name, and for one of another model; IncompatibleError if base and alignment do not fit; SymmetryError for what
    cannot be transported exactly.
    """
    require_exact(alignment)
    config, (tensors, read_notes) = Config.read(folder), read_tensors(folder)
    ground = Base.of(alignment, base, tensors, read_json(folder / CONFIG).get("task_type"))
    changes = changes_of(folder.name, config, tensors, ground.framed.checkpoint)
    files = {ground.framed.spec.file_name(name): name for name in ground.framed.spec.tensors}
    if inside := [file for file in changes if ground.framed.spec.files.get(file) in ground.framed.spec.stacks]:
        raise SymmetryError(
            f"{folder.name}: it changes single experts ({some(inside, 2)}), and the alignment moves all of a layer as "
            "one; merge the adapter into its base and align that (base+adapter)"
        )
    named = {files[file]: change for file, change in changes.items() if file in files}
    moving = _Moving(folder, tensors, ground.with_whole(named, tensors), named)
    infos, compute = moving.outputs()
    notes = tuple(f"{folder.name}: {note}" for note in read_notes) + moving.notes + ground.notes
    written = read_json(folder / CONFIG)
    if new_base is not None:
        written |= {"base_model_name_or_path": new_base, "revision": None}
    else:
        notes += (f"{CONFIG} still names {config.base!r} as the base; the adapter is of its aligned form (--new-base)",)
    written |= {"lora_bias": True} if moving.lora_bias else {}
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    details: dict[str, Any] = {"base": config.base, "new_base": written.get("base_model_name_or_path")}
    details |= {"modules": len(moving.factors), "whole_tensors": len(moving.whole), "lora_bias": moving.lora_bias}
    return Transported(
        "adapter",
        computed(folder.name, infos, compute),
        SAFETENSORS,
        {CONFIG: text.encode()},
        notes,
        details,
        (folder, *(() if base is None else base.sources)),
    )


@dataclass(frozen=True)
class _Factors:
    """The factors of the change of one weight: keys of the adapter's file, and the axes of each.

    out, into: the dimensions of the weight that B and A share. rewrite: that of the frame. through: the rules by which
    a translation is compensated through this weight.
    """

    down: str
    up: str
    bias: str | None
    scale: float
    out: Node
    into: tuple[Node, ...]
    rewrite: Rewrite
    through: tuple[Shift, ...]

    @property
    def embedding(self) -> bool:
        return self.up.endswith("lora_embedding_B")

    @property
    def needs_bias(self) -> bool:
        return self.bias is not None or self.rewrite.bias is not None or bool(self.through)


class _Moving:
    """The transport of one adapter. whole: keys that replace tensors → their canonical names; factors: by canonical
    name."""

    def __init__(self, folder: Path, tensors: StoredTensors, ground: Base, changes: Mapping[str, Change]) -> None:
        self.folder, self.tensors, self.ground = folder, tensors, ground
        targets = {target_name(change.whole): name for name, change in changes.items() if change.whole is not None}
        self.whole = {key: targets[one] for key in tensors if (one := target_name(key)) in targets}
        self._require_one_value(changes)
        norms = {name: gain for gain in ground.alignment.gauged for name in (gain, bias_of(gain))}
        if trained := [name for name in self.whole.values() if name in norms]:
            gain = norms[trained[0]]
            raise SymmetryError(
                f"{folder.name}: the adapter holds {trained[0]}, and this alignment changes "
                f"{ground.alignment.gauged[gain]} along that norm as it was in the base. {WITHOUT}"
            )
        frame = Frame(ground.model, ground.alignment.frame)
        frame.require_kept(self.whole.values())
        keys = {change.down: name for name, change in changes.items() if change.down is not None}
        biases = {_module(change.shift): change.shift for change in changes.values() if change.shift is not None}
        self.factors = {
            name: self._factors(name, changes[name], down, biases.get(_module(down)), frame.of(name))
            for down, name in keys.items()
        }
        self.lora_bias = bool(biases) or any(
            f.needs_bias and self._bias_of(name) not in self.whole.values() for name, f in self.factors.items()
        )
        self.notes = self._bias_notes(had=bool(biases))
        self.alignment = self._declared()

    def _require_one_value(self, changes: Mapping[str, Change]) -> None:
        """CheckpointError if two keys hold one tensor (peft saves some twice) and differ."""
        for key, name in self.whole.items():
            other = changes[name].whole
            if other is not None and key != other and not torch.equal(self.tensors[key], self.tensors[other]):
                raise CheckpointError(
                    f"{self.folder.name}: {key!r} and {other!r} are both {name}, and differ; remove the one that is old"
                )

    def _factors(self, name: str, change: Change, down: str, bias: str | None, rewrite: Rewrite) -> _Factors:
        dims = self.ground.alignment.spec.tensors[name].layout.dims
        out, into = (dims[1], dims[:1]) if change.transposed else (dims[0], dims[1:])
        for nodes in ((out,), into):
            require_alone(self.ground.alignment.spec, name, nodes)
        rules = tuple(rule for rule in self.ground.alignment.spec.shifts if rule.weight == name and self._moves(rule))
        return _Factors(down, change.up or "", bias, change.scale, out, into, rewrite, rules)

    def _moves(self, rule: Shift) -> bool:
        alignment = self.ground.alignment
        shift = alignment.shifts.get(rule.bias)
        return shift is not None and bool(alignment.spec.part(rule.bias, shift, rule.axis).view.any())

    def _bias_notes(self, had: bool) -> tuple[str, ...]:
        if not self.lora_bias or had:
            return ()
        translated = [name for name, f in self.factors.items() if f.needs_bias]
        if any(f.embedding for f in self.factors.values()):
            raise SymmetryError(
                f"{self.folder.name}: what it changes of {some(translated)} also changes where the alignment moves "
                "biases to, for which its factors need a bias (lora_bias), and peft has none for the embedding that "
                "it adapts too. Make an alignment without translations (--no-biases) and without a frame, or merge "
                "the adapter into its base and align that (base+adapter)"
            )
        return (
            f"{len(translated)} factors have a bias now (lora_bias): through what the adapter changes of "
            f"{some(translated, 2)} the alignment moves biases",
        )

    def _bias_of(self, name: str) -> str:
        return f"{name.removesuffix('.weight')}.bias"

    def _declared(self) -> Alignment:
        """The alignment, with the factors in its declaration."""
        declared, axes = {}, {}
        for name, f in self.factors.items():
            index = self.ground.alignment.spec.tensors[name].index
            rank = self.tensors.infos[f.down].shape[0]
            axes[f"rank{rank}"] = Axis(rank)
            rank_of, ones = Atom(f"rank{rank}"), (Atom("1"),) * (len(self.tensors.infos[f.up].shape) - 2)
            declared[f.down] = Declared(Layout((rank_of, *f.into)), index)
            declared[f.up] = Declared(Layout((f.out, rank_of, *ones)), index)
            declared[_bias_key(f)] = Declared(Layout((f.out,)), index)
            declared[f"{f.down}: rank"] = Declared(Layout((rank_of,)), index)
        return with_tensors(self.ground.alignment, declared, axes)

    def outputs(self) -> tuple[dict[str, TensorInfo], dict[str, Callable[[], Tensor]]]:
        """The tensors of the transported adapter's file."""
        infos, compute = {}, {}

        def add(key: str, info: TensorInfo, function: Callable[..., Tensor], *args: Any) -> None:
            infos[key], compute[key] = info, lambda: function(*args)

        for f in self.factors.values():
            add(f.down, self.tensors.infos[f.down], self._down, f)
            add(f.up, self.tensors.infos[f.up], self._up, f)
            if self.lora_bias:
                up = self.tensors.infos[f.up]
                add(_bias_key(f), TensorInfo(up.dtype, up.shape[:1]), self._bias, f)
        owners = {self._bias_of(name): f for name, f in self.factors.items()}
        for key, name in self.whole.items():
            add(key, self.tensors.infos[key], self._whole, name, owners.get(name))
        return infos, compute

    def _read(self, key: str) -> Tensor:
        return wide(self.folder.name, key, self.tensors[key])

    def _down(self, f: _Factors) -> Tensor:
        a = self._read(f.down)
        if f.rewrite.gain is not None:
            a = _beside(a, f.rewrite.gain) * f.rewrite.gain
            a = (a - a.mean(-1, keepdim=True) if f.rewrite.drops else a).flatten(1)
        return self.alignment.move(f.down, a)

    def _up(self, f: _Factors) -> Tensor:
        return self.alignment.move(f.up, self._written(f, self._read(f.up)))

    def _written(self, f: _Factors, b: Tensor) -> Tensor:
        """Apply the frame's rewrite to the first dimension of a change, which is written by the weight."""
        if f.rewrite.scale is not None:
            b = (b.movedim(0, -1) * f.rewrite.scale).movedim(-1, 0)
        return b - b.mean(0, keepdim=True) if f.rewrite.centres else b

    def _bias(self, f: _Factors) -> Tensor:
        """The bias of B, as peft scales it: the old bias, plus B A β for a folded norm, transformed, minus B' A' t."""
        b = self._read(f.up)
        bias = b.new_zeros(b.shape[0]) if f.bias is None else self._read(f.bias)
        if f.rewrite.bias is not None:
            bias = bias + b @ (_beside(self._read(f.down), f.rewrite.bias) @ f.rewrite.bias).sum(1)
        bias = self.alignment.move(_bias_key(f), self._written(f, bias))
        for rule in f.through:
            bias = bias - self._up(f).flatten(1) @ self._through(rule, f)
        return bias

    def _through(self, rule: Shift, f: _Factors) -> Tensor:
        """A' t, t being the translation of what this weight reads."""
        spec = self.alignment.spec
        t = spec.part(rule.bias, self.alignment.shifts[rule.bias].double(), rule.axis).view
        inner = replace(rule, weight=f.down, into=f"{f.down}: rank")
        left: Tensor = torch.tensordot(t, spec.through(inner, self._down(f)), t.ndim)
        return left

    def _whole(self, name: str, owner: _Factors | None) -> Tensor:
        """A tensor that the adapter holds as a whole; with the bias of its layer's factors, if these have none."""
        tensor = self.ground.aligned(name)
        return tensor if owner is None or self.lora_bias else tensor + owner.scale * self._bias(owner)


def _beside(a: Tensor, one: Tensor) -> Tensor:
    """The factor A of a weight that reads several vectors side by side: [rank, how many, size of one]."""
    return a.reshape(len(a), -1, len(one))


def _module(key: str) -> str:
    return key.rpartition(".lora_")[0]


@cache
def _bias_key(f: _Factors) -> str:
    return f.bias or f"{_module(f.up)}.lora_B.bias"

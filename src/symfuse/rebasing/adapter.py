"""LoRA adapters of A: the adapter of B with the change α g(BA), of the same rank.

`symfuse.transporting` gives the adapter of g(A), in the frame of g. Where that frame folds norms or scales into
weights, what reads B's own norms is divided by B's gains, and what a LayerScale of B scales by that: the adapter is of
B as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from symfuse.adapters.config import Config
from symfuse.adapters.lora import Change, changes_of
from symfuse.alignment import Alignment
from symfuse.errors import SymmetryError
from symfuse.io import Checkpoint
from symfuse.io.lazy import Lazy
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.transporting.adapter import transport_adapter
from symfuse.transporting.frames import Frame, Rewrite
from symfuse.transporting.result import Transported, computed

WAY_OUT = (
    "Rebase the whole model instead: merge the adapter into its base (symfuse merge BASE+ADAPTER), and extract an "
    "adapter of the result (symfuse extract-lora)"
)


def rebase_adapter(
    folder: Path, alignment: Alignment, base: Checkpoint, onto: Checkpoint, alpha: float = 1.0
) -> Transported:
    """The adapter in a folder, of `base`, for `onto`; its tensors are computed when they are read.

    Raises what `transport_adapter` raises; SymmetryError where B has no such adapter: a gain of zero, a bias that the
    adapter has no place for, tensors held as a whole that a frame rewrites.
    """
    moved = transport_adapter(folder, alignment, base, str(onto.folder or onto.name))
    model = canonical(Model.of(onto), {"untie"} & set(alignment.frame))
    changes = changes_of(folder.name, Config.read(folder), moved.tensors, model.checkpoint)
    files = {model.spec.file_name(name): name for name in model.spec.tensors}
    base_g = Model.of(alignment(base))
    onto_b = _Onto(folder.name, moved.tensors, Frame(model, alignment.frame), model, alpha)
    by_key: dict[str, Callable[[], Tensor]] = {}
    for file, change in changes.items():
        name = files.get(file, file)
        by_key |= onto_b.parts(name, change)
        if change.whole is not None:
            by_key[change.whole] = partial(onto_b.whole, change, name, base_g)
    names = {key: by_key.get(key, partial(moved.tensors.wide, key)) for key in moved.tensors}
    tensors = computed(folder.name, moved.tensors.infos, names)
    details = {**moved.details, "alpha": alpha}
    return replace(moved, tensors=tensors, details=details, sources=(*moved.sources, *onto.sources))


@dataclass(frozen=True)
class _Onto:
    """What becomes of the parts of an adapter of g(A), in the frame of g, for B as it is."""

    name: str
    tensors: Lazy
    frame: Frame
    model: Model
    alpha: float

    def parts(self, name: str, change: Change) -> dict[str, Callable[[], Tensor]]:
        """By key, the factors and the bias of one tensor that the adapter changes."""
        out: dict[str, Callable[[], Tensor]] = {}
        if change.down is not None and change.up is not None:
            rewrite = self.frame.of(name)
            bias = f"{change.up.rpartition('.lora_')[0]}.lora_B.bias"
            self._require(name, rewrite, bias in self.tensors)
            out[change.down] = partial(self._down, change.down, rewrite)
            out[change.up] = partial(self._up, change.up, rewrite)
            if bias in self.tensors:
                out[bias] = partial(self._bias, bias, change, rewrite)
        return out

    def _require(self, name: str, rewrite: Rewrite, biased: bool) -> None:
        for what in (rewrite.gain, rewrite.scale):
            if what is not None and not bool(what.all()):
                raise SymmetryError(f"{self.model.name}: a gain that {name} meets is zero. {WAY_OUT}")
        if rewrite.bias is not None and not biased:
            raise SymmetryError(
                f"{self.model.name}: the norm that {name} reads has a bias, which the base of {self.name} has not, and "
                f"the adapter has no bias that could take it up. {WAY_OUT}"
            )

    def _read(self, key: str) -> Tensor:
        return self.tensors.wide(key).double()

    def _down(self, key: str, rewrite: Rewrite) -> Tensor:
        a = self._read(key)
        return a if rewrite.gain is None else _ungained(a.flatten(1), rewrite.gain).reshape(a.shape)

    def _up(self, key: str, rewrite: Rewrite) -> Tensor:
        return self.alpha * _unscaled(self._read(key), rewrite)

    def _bias(self, key: str, change: Change, rewrite: Rewrite) -> Tensor:
        """Less what the change makes of the bias of B's norm."""
        bias = self._read(key)
        if rewrite.bias is not None:
            read = self._down(str(change.down), rewrite)
            read = read.reshape(len(read), -1, len(rewrite.bias))
            bias = bias - self._read(str(change.up)).flatten(1) @ (read @ rewrite.bias).sum(1)
        return self.alpha * _unscaled(bias, rewrite)

    def whole(self, change: Change, name: str, base: Model) -> Tensor:
        """A tensor that the adapter holds as a whole: B's with the moved difference, or the adapter's alone, if A or B
        has none of that shape. base: g(A)."""
        rewrite = self.frame.of(name)
        one_sided = rewrite.scale is None and rewrite.bias is None and not rewrite.centres
        if not one_sided or (rewrite.gain is not None and change.down is None):
            raise SymmetryError(
                f"{self.name}: it holds {name} as a whole, which the frame of this alignment rewrites. {WAY_OUT}"
            )
        moved = self._read(str(change.whole))
        if name not in base.spec.tensors or not base.spec.shares(name, self.model.spec):
            return moved
        tau = (moved - base.read(name).double()).movedim(0 if change.transposed else -1, -1)
        if rewrite.gain is not None:
            tau = _ungained(tau, rewrite.gain)
        return self.model.read(name).double() + self.alpha * tau.movedim(-1, 0 if change.transposed else -1)


def _ungained(read: Tensor, gain: Tensor) -> Tensor:
    """[…, vectors · in], of what reads some vectors [in] side by side, divided by the gain of their norm."""
    return (read.reshape(*read.shape[:-1], -1, len(gain)) / gain).reshape(read.shape)


def _unscaled(written: Tensor, rewrite: Rewrite) -> Tensor:
    return written if rewrite.scale is None else (written.movedim(0, -1) / rewrite.scale).movedim(-1, 0)

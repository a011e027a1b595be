"""Tensors that are declared whole and that files may have in pieces: the experts of a mixture are one stack in memory,
and on disk mostly one tensor for each map of each.

All that moves by layouts sees stacks, `stacked`, and what comes of it has the names of the file again, `unstacked`.
What treats tensors one by one, as a merge does, sees those of the file (`Model.as_in`). Both ways are lazy: laid flat,
a stack is its pieces one after the other (`Spec.stored`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from symfuse.io import Checkpoint, TensorInfo
from symfuse.spec import Layout, Spec
from symfuse.spec.spec import pieces_of


def stacked(checkpoint: Checkpoint, spec: Spec) -> Checkpoint:
    """The checkpoint with every stack whole, by the name that `spec.file_name` has for it, in place of its pieces; what
    is not there, or not all of it, is left as it is."""
    names = [name for name in spec.stacks if all(piece in checkpoint for piece in spec.stored(name))]
    stacks = {spec.file_name(name): list(spec.stored(name)) for name in names}
    if not stacks:
        return checkpoint
    whole = checkpoint.tensors.source if isinstance(checkpoint.tensors, _Pieces) else None
    if whole is not None and all(name in whole for name in stacks):  # what these pieces were cut from
        return checkpoint.replace(tensors=whole.tensors, infos={name: whole.info(name) for name in whole})
    shapes = {spec.file_name(name): spec.tensors[name].layout.shape(spec.sizes) for name in names}
    stack_of = {piece: stack for stack, pieces in stacks.items() for piece in pieces}
    infos: dict[str, TensorInfo] = {}
    for name in checkpoint:
        stack = stack_of.get(name)
        if stack is None:
            infos[name] = checkpoint.info(name)
        elif stack not in infos:
            dtypes = (checkpoint.info(piece).dtype for piece in stacks[stack])
            infos[stack] = TensorInfo(reduce(torch.promote_types, dtypes), shapes[stack])
    return checkpoint.replace(tensors=_Stacks(checkpoint, stacks, infos), infos=infos)


def unstacked(checkpoint: Checkpoint, spec: Spec) -> Checkpoint:
    """The checkpoint with the pieces that the file has in place of each stack: the inverse of `stacked`."""
    pieces: dict[str, dict[str, Piece]] = {}
    for name in spec.stacks:
        start = 0
        for file, layout in spec.stored(name).items():
            piece = Piece(spec.file_name(name), start, layout.shape(spec.sizes))
            pieces.setdefault(piece.stack, {})[file] = piece
            start += piece.numel
    if not pieces:
        return checkpoint
    infos: dict[str, TensorInfo] = {}
    for name in checkpoint:
        info = checkpoint.info(name)
        infos |= {file: TensorInfo(info.dtype, p.shape) for file, p in pieces.get(name, {}).items()} or {name: info}
    every = {file: piece for own in pieces.values() for file, piece in own.items()}
    return checkpoint.replace(tensors=_Pieces(checkpoint, every, infos), infos=infos)


def piece_of(name: str, spec: Spec) -> Piece | None:
    """Where in a stack a tensor lies that `Model.as_in` calls STACK.number; None if it is no such piece. spec: declares
    the stack whole. Pieces are numbered through: at each index of the first axis all parts of the next dimension."""
    stack, _, number = name.rpartition(".")
    if name in spec.tensors or stack not in spec.tensors or not number.isdecimal():
        return None
    layout = spec.tensors[stack].layout
    shapes = [piece.shape(spec.sizes) for piece in pieces_of(layout)]
    slot, part = divmod(int(number), len(shapes)) if shapes else (0, 0)
    if not shapes or slot >= Layout(layout.dims[:1]).shape(spec.sizes)[0]:
        return None
    sizes = [math.prod(shape) for shape in shapes]
    return Piece(stack, slot * sum(sizes) + sum(sizes[:part]), shapes[part])


@dataclass(frozen=True)
class Piece:
    """A tensor of that shape in the flat numbers of a stack, from `start` on."""

    stack: str
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _Stacks(Mapping[str, Tensor]):
    """Tensors of a checkpoint, and stacks of others, which are put together when they are read."""

    def __init__(self, source: Checkpoint, stacks: Mapping[str, list[str]], infos: Mapping[str, TensorInfo]) -> None:
        self.source = source
        self.stacks = stacks
        self.infos = infos

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stacks:
            return self.source[name]
        info = self.infos[name]
        out = torch.empty(info.shape, dtype=info.dtype, device=self.source.device)
        return self._filled(out, (self.source[piece] for piece in self.stacks[name]))

    def wide(self, name: str) -> Tensor:
        """Not yet rounded, where pieces are computed."""
        if name not in self.stacks:
            return self.source.scanned(name)
        pieces = (self.source.scanned(piece) for piece in self.stacks[name])
        first = next(pieces)
        out = first.new_empty(self.infos[name].shape, dtype=torch.promote_types(first.dtype, self.infos[name].dtype))
        return self._filled(out, (piece for part in ((first,), pieces) for piece in part))

    def _filled(self, out: Tensor, pieces: Iterator[Tensor]) -> Tensor:
        flat, start = out.view(-1), 0
        for piece in pieces:
            flat[start : start + piece.numel()] = piece.reshape(-1)
            start += piece.numel()
        return out

    def part(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self.stacks:
            return self.source.part(name, start, stop)
        parts, at = [], 0
        for piece in self.stacks[name]:
            size = self.source.info(piece).numel
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                parts.append(self.source.part(piece, low, high))
            at += size
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.infos[name].dtype)

    def blocks(self, name: str) -> Iterator[Tensor]:
        for piece in self.stacks.get(name, [name]):
            yield from self.source.blocks(piece)

    def where(self, name: str) -> str | None:
        """The file that holds the tensor as it is, if one does."""
        return None if name in self.stacks else self.source.file_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


class _Pieces(Mapping[str, Tensor]):
    """Tensors of a checkpoint, and pieces of its stacks. Of these the last that was read is kept, so that all its
    pieces, read one after the other by whichever threads, are of one computation."""

    def __init__(self, source: Checkpoint, pieces: Mapping[str, Piece], infos: Mapping[str, TensorInfo]) -> None:
        self.source = source
        self.pieces = pieces
        self.infos = infos
        self._lock = threading.Lock()
        self._last: tuple[str, bool, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        piece = self.pieces.get(name)
        return self.source[name] if piece is None else self._cut(piece, wide=False)

    def wide(self, name: str) -> Tensor:
        """Not yet rounded, where the stack is computed."""
        piece = self.pieces.get(name)
        return self.source.scanned(name) if piece is None else self._cut(piece, wide=True)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        piece = self.pieces.get(name)
        if piece is None:
            return self.source.part(name, start, stop)
        if self.source.file_of(piece.stack) is None:
            return self._cut(piece, wide=True).reshape(-1)[start:stop]
        return self.source.part(piece.stack, piece.start + start, piece.start + stop)

    def _cut(self, piece: Piece, *, wide: bool) -> Tensor:
        flat = self._stack(piece.stack, wide).reshape(-1)
        return flat[piece.start : piece.start + piece.numel].view(piece.shape)

    def _stack(self, name: str, wide: bool) -> Tensor:
        with self._lock:
            if self._last is None or self._last[:2] != (name, wide):
                self._last = None  # gone before the next is computed
                self._last = (name, wide, self.source.scanned(name) if wide else self.source[name])
            return self._last[2]

    def where(self, name: str) -> str | None:
        """The file that holds the tensor as it is, if one does."""
        return None if name in self.pieces else self.source.file_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

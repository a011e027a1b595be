"""Tensors that are declared as one stack, and that files may have in pieces: the experts of a mixture are one tensor in
memory, and on disk usually one tensor for each weight matrix of each expert.

Code that acts by layouts sees stacks (`stacked`); its result gets the names of the file again (`unstacked`). Code that
treats tensors one by one, such as a merge, sees those of the file (`Model.as_in`). Both directions are lazy: flattened,
a stack is the concatenation of its pieces (`Spec.stored`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Latest, Rewritten, Rule
from symfuse.spec import Layout, Spec
from symfuse.spec.spec import pieces_of


def stacked(checkpoint: Checkpoint, spec: Spec) -> Checkpoint:
    """The checkpoint with every stack whole, by the name that `spec.file_name` has for it, in place of its pieces.
    A stack of which a piece is missing stays in pieces."""
    names = [name for name in spec.stacks if all(piece in checkpoint for piece in spec.stored(name))]
    stacks = {spec.file_name(name): list(spec.stored(name)) for name in names}
    if not stacks:
        return checkpoint
    if isinstance(checkpoint.tensors, _Pieces):
        whole = checkpoint.tensors.whole
        if all(name in whole for name in stacks):  # these pieces were cut from it
            return checkpoint.replace(tensors=whole.tensors)
    shapes = {spec.file_name(name): spec.tensors[name].layout.shape(spec.sizes) for name in names}
    stack_of = {piece: stack for stack, pieces in stacks.items() for piece in pieces}
    rules: dict[str, str | Rule] = {}
    for name in checkpoint:
        stack = stack_of.get(name)
        if stack is None:
            rules[name] = name
        elif stack not in rules:
            rules[stack] = _Stack(checkpoint, stacks[stack], shapes[stack]).rule()
    return checkpoint.replace(tensors=Rewritten(checkpoint, rules))


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
    return checkpoint.replace(tensors=_Pieces(checkpoint, pieces))


def piece_of(name: str, spec: Spec) -> Piece | None:
    """The piece of a stack that `Model.as_in` names STACK.number; None if the name is no such piece. spec: declares the
    stack whole. Numbers go over the first axis, and at each of its indices over the parts of the next dimension."""
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
    """A tensor of that shape in a flattened stack, from element `start` on."""

    stack: str
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _Stack:
    """A stack that is concatenated from the pieces of a source when it is read."""

    def __init__(self, source: Checkpoint, pieces: Sequence[str], shape: tuple[int, ...]) -> None:
        dtypes = (source.info(piece).dtype for piece in pieces)
        self.source = source
        self.pieces = pieces
        self.info = TensorInfo(reduce(torch.promote_types, dtypes), shape)

    def rule(self) -> Rule:
        return Rule(self.info, self.wide, self.value, self.part, self.blocks)

    def value(self) -> Tensor:
        out = torch.empty(self.info.shape, dtype=self.info.dtype, device=self.source.device)
        return _filled(out, (self.source[piece] for piece in self.pieces))

    def wide(self) -> Tensor:
        """Not yet rounded, where pieces are computed."""
        pieces = (self.source.scanned(piece) for piece in self.pieces)
        first = next(pieces)
        out = first.new_empty(self.info.shape, dtype=torch.promote_types(first.dtype, self.info.dtype))
        return _filled(out, (piece for part in ((first,), pieces) for piece in part))

    def part(self, start: int, stop: int) -> Tensor:
        parts, at = [], 0
        for piece in self.pieces:
            size = self.source.info(piece).numel
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                parts.append(self.source.part(piece, low, high))
            at += size
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.info.dtype)

    def blocks(self) -> Iterator[Tensor]:
        for piece in self.pieces:
            yield from self.source.blocks(piece)


def _filled(out: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    flat, start = out.view(-1), 0
    for piece in pieces:
        flat[start : start + piece.numel()] = piece.reshape(-1)
        start += piece.numel()
    return out


class _Pieces(Rewritten):
    """Tensors of a checkpoint, with its stacks cut into pieces. The stack that was read last is cached, so that it is
    computed once for all its pieces, whichever threads read them."""

    def __init__(self, whole: Checkpoint, pieces: Mapping[str, Mapping[str, Piece]]) -> None:
        self.whole = whole
        self._stacks = Latest[tuple[str, bool], Tensor]()
        rules: dict[str, str | Rule] = {}
        for name in whole:
            if name in pieces:
                rules |= {file: self._rule(piece) for file, piece in pieces[name].items()}
            else:
                rules[name] = name
        super().__init__(whole, rules)

    def _rule(self, piece: Piece) -> Rule:
        info = TensorInfo(self.whole.info(piece.stack).dtype, piece.shape)
        return Rule(info, partial(self._cut, piece, True), partial(self._cut, piece, False), partial(self._part, piece))

    def _cut(self, piece: Piece, wide: bool) -> Tensor:
        read = self.whole.scanned if wide else self.whole.__getitem__
        flat = self._stacks.get((piece.stack, wide), partial(read, piece.stack)).reshape(-1)
        return flat[piece.start : piece.start + piece.numel].view(piece.shape)

    def _part(self, piece: Piece, start: int, stop: int) -> Tensor:
        if self.whole.file_of(piece.stack) is None:
            return self._cut(piece, True).reshape(-1)[start:stop]
        return self.whole.part(piece.stack, piece.start + start, piece.start + stop)

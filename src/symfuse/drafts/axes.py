"""The axes of a draft: their sizes, the axes that they are `per`, and which modules have neurons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from symfuse.architectures.base import Config
from symfuse.drafts.facts import EXPERT_NEURONS, NEURONS, Facts, Size
from symfuse.errors import SymfuseError

ROWS = {
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "types": ("type_vocab_size",),
}


@dataclass(frozen=True)
class Neurons:
    """Of a feed-forward block. width: how many. fused: the module of gate and up in one. pair: those of both, the one
    that is called gate first; or of one map alone. down: those that read them."""

    width: int
    fused: str | None
    pair: tuple[str, ...]
    down: tuple[str, ...]

    @property
    def gated(self) -> bool:
        return self.fused is not None or len(self.pair) == 2


@dataclass(frozen=True)
class Axes:
    """place: the layout of queries and keys in a head (`symfuse.drafts.layouts.PLACES`)."""

    facts: Facts
    place: str

    @cached_property
    def neurons(self) -> dict[str, Neurons]:
        """By axis: those of experts, of shared experts, and the others."""
        out = {}
        for axis in dict.fromkeys(self.of_neurons.values()):
            weights = [p for p in self.facts.weights if self.of_neurons.get(p.module) == axis and len(p.shape) > 1]
            others = {p.module: self._other(p.shape) for p in weights}
            down = [module for module in others if self.facts.roles[module] == "down"]
            width = others[down[0]] if down else 0
            inputs = [module for module in others if module not in down and others[module] == width]
            fused = next((module for module in others if module not in down and others[module] == 2 * width), None)
            inputs.sort(key=lambda module: self.facts.roles[module] != "gate")
            if inputs or fused:
                out[axis] = Neurons(width, fused, tuple(inputs), tuple(m for m in down if others[m] == width))
        return out

    def _other(self, shape: tuple[int, ...]) -> int:
        """The side of a map that is not the stream."""
        sizes = list(shape[-2:])
        sizes.remove(self.facts.hidden.value)
        return sizes[0]

    @cached_property
    def of_neurons(self) -> dict[str, str]:
        """The axis of neurons of each module of a feed-forward block."""
        out = {}
        for module, role in self.facts.roles.items():
            if role in ("gate", "up", "read", "down"):
                words = module.lower()
                apart = "shared_" if "shared" in words else "expert_" if "experts" in words else ""
                out[module] = f"{apart}ffn"
        return out

    @cached_property
    def sizes(self) -> dict[str, Size]:
        """Every axis that a layout may contain."""
        f = self.facts
        out = {"l": f.layers} if f.templates.layers else {}
        out["residual"] = f.hidden
        for name, keys in ROWS.items():
            if size := f.size(keys):
                out[name] = size
        if self.labels > 1:
            out["labels"] = Size(self.labels, "c.labels")
        if f.embedding:
            out["embedding"] = f.embedding
        if f.experts:
            out["e"] = f.experts
        for name, role in (("lm", "transform"), ("pool", "pool")):
            rows = next((p.shape[0] for p in f.weights if f.roles.get(p.module) == role), None)
            if rows:
                out[name] = f.hidden if rows == f.hidden.value else f.sized(rows, f.config)
        for axis, block in self.neurons.items():
            keys = NEURONS if axis == "ffn" else EXPERT_NEURONS
            four = Size(block.width, f"4 * {f.hidden.text}")
            out[axis] = f.size(keys, block.width) or (
                four if block.width == 4 * f.hidden.value else Size(block.width, str(block.width))
            )
        return out | self._of_heads()

    def _of_heads(self) -> dict[str, Size]:
        f = self.facts
        if f.heads is None or f.head is None:
            return {}
        out = {"h": f.heads}
        if f.groups:
            each = f.heads.value // f.groups.value
            out = {"kv": f.groups, "q": Size(each, f"{f.heads.text} // {f.groups.text}")}
        out["v"] = Size(f.head.value, "head")
        if self.place == "whole":
            return out | {"qk": out["v"]}
        out |= {"f": Size(f.planes.value, "planes"), "c": Size(2, "2")}
        return out | ({"p": Size(self.rest, "head - 2 * planes")} if self.rest else {})

    @property
    def rest(self) -> int:
        """The number of units of a head without rotary positions, if it has rotary planes."""
        if self.place == "whole" or self.facts.head is None:
            return 0
        return self.facts.head.value - 2 * self.facts.planes.value

    @cached_property
    def labels(self) -> int:
        try:
            return Config(self.facts.config, self.facts.model_type).labels
        except SymfuseError:
            return 0

    def per(self, axis: str) -> tuple[str, ...]:
        """The `per` of an axis: the axes for each of whose indices it has a separate element."""
        layer = ("l",) if self.facts.templates.layers else ()
        heads = "kv" if self.facts.groups else "h"
        inside = {"qk": (heads,), "v": (heads,), "p": (heads,), "c": (heads, "f"), "q": ("kv",), "expert_ffn": ("e",)}
        if axis in inside or axis in ("h", "kv", "e") or axis.endswith("ffn"):
            return (*layer, *inside.get(axis, ()))
        return ()

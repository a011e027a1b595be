"""The layout of each tensor, from its role, and from choices that names do not determine and that are tried."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from symfuse.architectures.base import Config
from symfuse.drafts.facts import EXPERT_NEURONS, NEURONS, Facts, Part, Shape, Size
from symfuse.errors import LayoutError, SymfuseError
from symfuse.spec import parse
from symfuse.spec.layout import SCALAR

ROWS = {
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "types": ("type_vocab_size",),
}
# Layouts of queries and keys in a head: plain, or rotary planes of halves or of neighbours.
PLACES = ("whole", "halves", "neighbours")
_ORDERS = ((0, 1, 2), *(order for order in itertools.permutations(range(3)) if order != (0, 1, 2)))
# Gate and up in one tensor: one after the other, or neighbours.
GATES = ("|{0}| + {0}", "{0} + |{0}|", "{0} 2")


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
    """place: the layout of queries and keys in a head (PLACES)."""

    facts: Facts
    place: str

    @cached_property
    def neurons(self) -> dict[str, Neurons]:
        """By axis: those of experts, of shared experts, and the others."""
        out = {}
        for axis in dict.fromkeys(self.of_neurons.values()):
            weights = [p for p in self.facts.weights if self.of_neurons.get(p.module) == axis and len(p.shape) > 1]
            others = {p.module: self._other(p.shape) for p in weights if self.facts.hidden.value in p.shape[-2:]}
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


@dataclass(frozen=True)
class Choice:
    """order: of queries, keys and values in one tensor, a number of `Layouts.orders`. place: one of PLACES. gates: by
    axis of neurons which of GATES; of two maps 1 if the second is the gate. source: what heads read."""

    order: int = 0
    place: str = "whole"
    gates: Mapping[str, int] = field(default_factory=dict)
    source: str = "residual"


@dataclass(frozen=True)
class Layouts:
    """The layouts of all templates. A dimension that cannot be classified is a number, on which no group acts."""

    facts: Facts
    choice: Choice

    @cached_property
    def axes(self) -> Axes:
        return Axes(self.facts, self.choice.place)

    @cached_property
    def tensors(self) -> dict[str, str]:
        """By template, in the order of the file."""
        return {template: self._of(p) for template, p in self.facts.parts.items()}

    @cached_property
    def unplaced(self) -> list[str]:
        """Templates with a dimension larger than 1 that could not be classified, and has no known reason to be
        fixed."""
        known = {"embed", "patches", "head", "q_norm", "k_norm", "project"}
        return [
            template
            for template, text in self.tensors.items()
            if self.facts.roles.get(self.facts.parts[template].module) not in known
            and any(int(number) > 1 for number in re.findall(r"\b\d+\b", text))
            and "labels" not in text
        ]

    def _of(self, p: Part) -> str:
        plain = " ".join(map(str, p.shape)) or SCALAR
        if self.facts.apart(p):
            return plain
        ways = (self._map(p), self._vector(p), self._map(p, known=False))
        return next((text for text in ways if text is not None and self._shape(text) == p.shape), plain)

    def _shape(self, text: str) -> Shape | None:
        """The shape of a tensor of that layout; None where an axis has no size."""
        try:
            return parse(text).shape({name: size.value for name, size in self.axes.sizes.items()})
        except LayoutError:
            return None

    # -- linear maps, their biases, and tables --

    def _map(self, p: Part, known: bool = True) -> str | None:
        """known: by its role; else by which of its sides is the stream."""
        if self.facts.roles.get(p.module) == "embed":
            axis = "residual" if p.shape[-1] == self.facts.hidden.value else "embedding"
            return " ".join([*map(self._rows, p.shape[:-1]), axis])
        weight = p if p.kind == "weight" else self.facts.weight_of(p)
        if weight is None:
            return None
        ends = self._ends(weight, self.facts.roles.get(weight.module)) if known else self._unknown(weight)
        if ends is None:
            return None
        out, read = ends
        experts = self.facts.experts
        rows = len(p.shape) - (2 if p.kind == "weight" else 1)
        lead = "e " if p.layered and rows == 1 and experts is not None and p.shape[0] == experts.value else ""
        if p.kind == "bias":
            return lead + _one(out)
        if read is None:
            return f"{out} {' '.join(map(str, p.shape[1:]))}"
        pair = (_one(read), _one(out)) if self._backwards(p, out, read) else (_one(out), _one(read))
        return lead + " ".join(pair)

    def _backwards(self, p: Part, out: str, read: str) -> bool:
        """Whether a map is stored [in, out]."""
        if self.facts.traced.roles and len(p.shape) == 2:
            return p.template in self.facts.traced.backwards
        one, other = self._shape(_one(out)), self._shape(_one(read))
        if one is None or other is None or one == other or not p.layered:
            return p.layered and self.facts.transposed
        return p.shape[-2:] == (*other, *one)

    def _ends(self, p: Part, role: str | None) -> tuple[str, str | None] | None:
        """The axes that a map writes and reads: None for a fixed side."""
        if role in ("q", "k", "v", "o", "qkv"):
            return self._of_attention(role)
        if role == "router" and self.facts.experts is not None:
            return "e", "residual*"
        outer: dict[str, tuple[str, str | None]] = {
            "patches": ("residual", None),
            "project": ("residual", "embedding*"),
            "pool": ("pool", "residual*"),
            "transform": (self.transformed, "residual*"),
        }
        if role is not None and role in outer:
            return outer[role]
        if role == "head":
            sources = [self.choice.source, "residual", self.transformed, "embedding"]
            rows, width = p.shape[::-1] if p.template in self.facts.traced.backwards else (p.shape[0], p.shape[-1])
            fitting = [axis for axis in sources if self._shape(axis) == (width,)]
            return (self._rows(rows), f"{fitting[0]}*") if fitting else None
        axis = self.axes.of_neurons.get(p.module)
        block = self.axes.neurons.get(str(axis))
        if block is not None and p.module in (block.fused, *block.pair, *block.down):
            return self._of_neurons(p, str(axis), role)
        return None

    def _of_attention(self, role: str) -> tuple[str, str] | None:
        if self.facts.head is None:
            return None
        query, key, value = self._pieces()
        out = "kv q v*" if self.facts.groups else "h v*"
        ends = {"q": (query, "residual*"), "k": (key, "residual*"), "v": (value, "residual*"), "o": ("residual", out)}
        return ends[role] if role in ends else (self.orders[self.choice.order], "residual*")

    def _of_neurons(self, p: Part, axis: str, role: str | None) -> tuple[str, str]:
        block, which = self.axes.neurons[axis], self.choice.gates.get(axis, 0)
        if role == "down":
            return "residual", axis + "*"
        if p.module == block.fused:
            return GATES[which].format(axis), "residual*"
        gate = block.gated and p.module == block.pair[min(which, 1)]
        return (f"|{axis}|" if gate else axis), "residual*"

    def _unknown(self, p: Part) -> tuple[str, str] | None:
        """Of a map inside a layer of which one side is the stream."""
        hidden = self.facts.hidden.value
        if not p.layered or len(p.shape) != 2 or p.shape.count(hidden) != 1:
            return None
        rows, columns = p.shape
        return (str(rows), "residual*") if columns == hidden else ("residual", str(columns))

    # -- queries, keys and values --

    @property
    def orders(self) -> list[str]:
        """Layouts of queries, keys and values in one tensor, the usual ones first."""
        if self.facts.module("qkv") is None or self.facts.head is None:
            return [""]
        outside, inside = self._pieces(), self._pieces(of_head=True)
        heads = "kv" if self.facts.groups else "h"
        out = []
        for order in _ORDERS:
            out.append(" + ".join(outside[i] for i in order))
            out.append(f"{heads} ({' + '.join(inside[i] for i in order)})")
        return out

    def with_values_there(self) -> list[int]:
        """The orders in which the values are where this choice has them."""

        def at(i: int) -> tuple[int, int]:
            return i % 2, _ORDERS[i // 2].index(2)

        return [i for i in range(len(self.orders)) if at(i) == at(self.choice.order)]

    def _pieces(self, of_head: bool = False) -> tuple[str, str, str]:
        """Queries, keys and values of all heads, or of those that share a key."""
        query, key = self._queries
        if of_head:
            return (f"q {query}" if self.facts.groups else query), key, "v"
        outer, inner = ("kv", "kv q") if self.facts.groups else ("h", "h")
        return f"{inner} {query}", f"{outer} {key}", f"{outer} v"

    @property
    def _queries(self) -> tuple[str, str]:
        """The queries and the keys of one head."""
        if self.choice.place == "whole":
            return "qk", "qk*"
        pair = ("c f", "c* f") if self.choice.place == "halves" else ("f c", "f c*")
        return (f"({pair[0]} + p)", f"({pair[1]} + p*)") if self.axes.rest else pair

    def _of_norm(self, p: Part, role: str) -> str | None:
        """Of queries or keys: of a plane only the sign is free, which a gain does not change."""
        if self.facts.head is None:
            return None
        heads = ("kv q" if role == "q_norm" else "kv") if self.facts.groups else "h"
        inside = {"whole": str(self.facts.head.value), "halves": "2 f", "neighbours": "f 2"}[self.choice.place]
        inside = f"({inside} + {self.axes.rest})" if self.axes.rest else inside
        if len(p.shape) == 2:
            return f"{_one(heads)} {_one(inside)}"
        return _one(inside if p.shape[0] == self.facts.head.value else f"{heads} {inside}")

    # -- vectors --

    def _vector(self, p: Part) -> str | None:
        """Of gains and biases of norms, and of what has an entry for each unit of the stream, or row of a head."""
        role = self.facts.roles.get(p.module)
        if role in ("q_norm", "k_norm"):
            return self._of_norm(p, str(role))
        if len(p.shape) != 1:
            return None
        axis = "residual" if p.shape[0] == self.facts.hidden.value else None
        if role == "norm" and not p.layered:
            inner = next((a for a in (self.transformed, "embedding") if self._shape(a) == p.shape), None)
            axis = inner if self._beside_transform(p) or axis is None else axis
        if axis is None:
            return self._rows(p.shape[0])
        return axis if p.kind == "bias" else f"|{axis}|"

    def _beside_transform(self, p: Part) -> bool:
        module = self.facts.module("transform")
        return module is not None and p.module.rpartition(".")[0] == module.rpartition(".")[0]

    @property
    def transformed(self) -> str:
        """The axis that the transform of a head writes: that of the embedding if the head is tied to it."""
        if not self.facts.tied:
            return "lm"
        return "embedding" if self.facts.embedding else "residual"

    def _rows(self, size: int) -> str:
        """Fixed rows: of tokens, positions, classes; else a number."""
        named = (name for name, keys in ROWS.items() if self.facts.size(keys, size))
        return next(named, "labels" if size == self.axes.labels > 1 else str(size))


def _one(text: str) -> str:
    """A dimension of a layout: in brackets if it is made of several axes."""
    whole = " " not in text or (text.startswith("(") and text.endswith(")") and "(" not in text[1:])
    return text if whole else f"({text})"

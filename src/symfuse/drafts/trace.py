"""A run of a module, operation by operation: which weight reads what which weights wrote, and what of it is attention.

Every operation of torch is seen, however a module is written (`nn.Linear`, `einsum`, `scaled_dot_product_attention` or
a product that is written out) and whatever its parts are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from symfuse.verification import by_name

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "convolution"}
NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}
STATISTICS = {"rsqrt", "sqrt", "linalg_vector_norm"}  # what a norm that is written out divides by
ACTIVATIONS = {"relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "elu", "leaky_relu", "hardswish"}
INPUT = "input:"
_PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Flow:
    """What is known of a tensor. parameter: which one it is, perhaps in another form. writers: the weights and inputs
    whose sum it is, behind norms and functions. norm: the gain of the norm whose output it is. kind: "scores" or
    "values" of attention. act: the last function of single entries."""

    parameter: str = ""
    writers: frozenset[str] = frozenset()
    norm: str = ""
    kind: str = ""
    act: str = ""


@dataclass(frozen=True)
class Traced:
    """What a run shows. roles: of parameters, by name, in the words of `Facts.roles`. biases: of each bias the weight,
    or itself if it is added to a sum. reads: of each norm the weights and output fields that read it, if nothing else
    does. outputs: the layout of each field, and of inputs: "residual" or "". scales: of each LayerScale the weight that
    it scales. config: sizes and activation. backwards: weights that are stored [in, out]."""

    roles: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    backwards: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> Traced:
        """By other names, which several parameters may share."""
        reads: dict[str, tuple[str, ...]] = {}
        for norm, readers in self.reads.items():
            if norm in names:
                own = reads.get(names[norm], ())
                reads[names[norm]] = tuple(dict.fromkeys((*own, *(names.get(reader, reader) for reader in readers))))

        def both(pairs: Mapping[str, str]) -> dict[str, str]:
            return {names[a]: names[b] for a, b in pairs.items() if a in names and b in names}

        return replace(
            self,
            roles={names[name]: role for name, role in self.roles.items() if name in names},
            biases=both(self.biases),
            scales=both(self.scales),
            reads=reads,
            backwards=frozenset(names[name] for name in self.backwards if name in names),
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters = dict(module.named_parameters())
        self._names = {p.untyped_storage().data_ptr(): name for name, p in self.parameters.items()}
        self._flows: dict[int, tuple[Tensor, Flow]] = {}
        self.reads: dict[str, Flow] = {}
        self.attention: dict[str, set[str]] = {part: set() for part in _PARTS}
        self.gains: dict[str, frozenset[str]] = {}
        self.biases: dict[str, frozenset[str]] = {}
        self.sums: list[tuple[frozenset[str], int]] = []
        self._joined = False  # whether the operation that runs adds different writers
        self.added: set[str] = set()  # norms whose output is added to something
        self.heads: Counter[int] = Counter()
        self.tables: list[str] = []
        self.scales: dict[str, str] = {}
        self.backwards: set[str] = set()

    def of(self, tensor: Tensor) -> Flow:
        known = self._flows.get(id(tensor))
        return Flow(self._names.get(tensor.untyped_storage().data_ptr(), "")) if known is None else known[1]

    def know(self, tensor: Tensor, flow: Flow) -> None:
        self._flows[id(tensor)] = tensor, flow  # the tensor too, so that its id stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flow = self._flow(func.overloadpacket.__name__.rstrip("_"), list(_tensors((args, *(kwargs or {}).values()))))
        for result in _tensors(out):
            self.know(result, flow)
            if self._joined and result.ndim:
                self.sums.append((flow.writers, result.shape[-1]))
        self._joined = False
        return out

    def _flow(self, op: str, tensors: list[Tensor]) -> Flow:
        flows = [self.of(t) for t in tensors]
        data = [f for f in flows if f.writers or f.kind]
        names = [f.parameter for f in flows if f.parameter]
        if "scaled_dot_product" in op:
            q, k, v = flows[:3]
            return self._product(self._product(q, k, tensors[0]), v, tensors[2])
        if op == "embedding":
            self.tables += names
            return Flow(writers=frozenset(names))
        if not data:  # a form of a parameter, or of none
            return Flow(names[0]) if len(set(names)) == 1 else Flow(writers=frozenset(names))
        if op in PRODUCTS:
            weight = next((i for i, f in enumerate(flows) if self._multiplies(op, f, tensors[i])), None)
            if weight is None:
                return self._product(flows[-2], flows[-1], tensors[-2])
            return self._linear(tensors[weight], flows[weight].parameter, data[0], names)
        if op in NORMS:
            return self._gained(data[0], next(iter(names), ""), names[1:], norm=True)
        if op in ("mul", "div") and len(data) == 1 and names:
            return self._gained(data[0], names[0], [], norm=data[0].act in STATISTICS)
        return self._entries(op, data, names)

    @staticmethod
    def _multiplies(op: str, flow: Flow, tensor: Tensor) -> bool:
        return bool(flow.parameter) and tensor.ndim > 1 and (op == "convolution" or tensor.ndim < 4)

    def _linear(self, stored: Tensor, weight: str, data: Flow, names: list[str]) -> Flow:
        self.reads[weight] = data
        own = self.parameters[weight]
        if stored.ndim == 2 and (stored.shape, stored.stride()) == (own.shape, own.stride()):
            self.backwards.add(weight)
        self.biases |= {name: frozenset({weight}) for name in names if name != weight}
        return Flow(writers=frozenset({weight}))

    def _product(self, one: Flow, other: Flow, left: Tensor) -> Flow:
        """Of two tensors that are no parameters: scores of queries and keys, or means of values."""
        if other.kind == "scores":
            one, other = other, one
        if one.kind == "scores":
            self.attention["v"] |= other.writers
            return Flow(writers=other.writers, kind="values")
        self.attention["q"] |= one.writers
        self.attention["k"] |= other.writers
        self.heads[left.shape[-1]] += 1
        return Flow(kind="scores")

    def _gained(self, data: Flow, gain: str, biases: list[str], *, norm: bool) -> Flow:
        if norm and gain:
            self.gains[gain] = self.gains.get(gain, frozenset()) | data.writers
        if not norm and len(data.writers) == 1 and self.parameters[gain].ndim == 1:
            self.scales[gain] = next(iter(data.writers))
        self.biases |= {bias: frozenset({gain}) for bias in biases}
        return replace(data, norm=gain if norm else "", act="")

    def _entries(self, op: str, data: list[Flow], names: list[str]) -> Flow:
        """Of what acts on entries, or moves them."""
        kind = next((f.kind for f in data if f.kind), "")
        joined = op in ("add", "sub", "cat", "stack")
        tables = {n for n in names if joined and not kind and self.parameters[n].ndim > 1}
        writers = frozenset(tables).union(*(f.writers for f in data))
        act = op if op in ACTIVATIONS | STATISTICS else next((f.act for f in data if f.act), "")
        several = len({f.writers for f in data}) > 1 or bool(tables)
        if joined and several:
            self.added |= {f.norm for f in data}
            self._joined = not kind
            return Flow(writers=writers, kind=kind)
        if joined:
            self.biases |= {name: frozenset({data[0].norm}) if data[0].norm else writers for name in names}
        norms = {f.norm for f in data}
        return Flow("", writers, norms.pop() if len(norms) == 1 and op not in ACTIVATIONS else "", kind, act)

    # -- what it shows --

    def shown(self, outputs: Mapping[str, Tensor]) -> Traced:
        stream, width = self._stream()
        roles = self._roles(stream)
        of = {name: self.of(t) for name, t in outputs.items()}
        there = {
            name for name, f in of.items() if f.writers & stream and not f.kind and outputs[name].shape[-1] == width
        }
        there |= {name.removeprefix(INPUT) for name in stream if name.startswith(INPUT)}
        read: dict[str, list[str]] = {}
        for name, flow in [*self.reads.items(), *of.items()]:
            if flow.norm and roles.get(flow.norm) == "norm" and flow.norm not in self.added:
                read.setdefault(flow.norm, []).append(name)
        biases = {bias: next(iter(of)) if len(of) == 1 else bias for bias, of in self.biases.items()}
        return Traced(
            roles=roles,
            biases={bias: weight for bias, weight in biases.items() if weight in self.parameters},
            reads={norm: tuple(names) for norm, names in read.items()},
            outputs=dict.fromkeys(of, "") | dict.fromkeys(sorted(there), "residual"),
            config=self._config(roles, width),
            scales={gain: writer for gain, writer in self.scales.items() if writer in stream & self.reads.keys()},
            backwards=frozenset(self.backwards),
        )

    def _stream(self) -> tuple[frozenset[str], int]:
        """The writers that are added to each other most, and the width of what they write."""
        if not self.sums:
            return frozenset(), 0
        stream, width = max(self.sums, key=lambda one: len(one[0]))
        for writers, size in 2 * self.sums:
            if size == width and writers & stream:
                stream |= writers
        return stream, width

    def _roles(self, stream: frozenset[str]) -> dict[str, str]:
        roles = dict.fromkeys(stream & self.parameters.keys() - self.reads.keys(), "embed")
        down = {
            name: flow.writers
            for name, flow in self.reads.items()
            if name in stream and flow.writers and not flow.kind and not flow.writers & stream
        }
        inner = frozenset().union(*down.values())
        read = {part: {self.reads.get(name) for name in self.attention[part]} for part in _PARTS}
        for name, flow in self.reads.items():
            parts = [part for part in _PARTS if name in self.attention[part]]
            of_self = flow in read["q"] & read["k"] & read["v"]  # queries, keys and values of one thing
            if parts and of_self and flow.writers & stream:
                roles |= {name: "qkv"} if len(parts) == 3 else {name: parts[0]} if len(parts) == 1 else {}
            elif flow.kind == "values" and name in stream and flow.writers <= roles.keys():
                roles[name] = "o"
            elif name in down and not any(writer.startswith(INPUT) for writer in down[name]):
                roles[name] = "down"
            elif name in inner and flow.writers & stream:
                roles[name] = "read"
            elif name in stream and self.parameters[name].ndim == 4:
                roles[name] = "patches"
            elif flow.writers & stream and name not in stream and not parts:
                roles[name] = "head"
        queries, keys = self.attention["q"], self.attention["k"]
        for gain, writers in self.gains.items():
            of = {"norm": stream, "q_norm": queries - keys, "k_norm": keys - queries}
            roles |= next(({gain: role} for role, space in of.items() if writers and writers <= space), {})
        return roles

    def _config(self, roles: Mapping[str, str], width: int) -> dict[str, Any]:
        config: dict[str, Any] = {"hidden_size": width} if width else {}
        attention = ((role, name) for name, role in roles.items() if role in ("q", "k", "o"))
        sides = {role: self.parameters[name].numel() // width for role, name in attention}
        head = next((size for size, _ in self.heads.most_common(1)), 0)
        if head and (queries := sides.get("q", sides.get("o", 0))) and queries % head == 0:
            config["num_attention_heads"] = queries // head
            if (keys := sides.get("k", queries)) != queries:
                config["num_key_value_heads"] = keys // head
        acts = Counter(flow.act for name, flow in self.reads.items() if roles.get(name) == "down")
        if act := next((act for act, _ in acts.most_common(1) if act in ACTIVATIONS), ""):
            config["hidden_act"] = act
        if rows := [self.parameters[name].shape[0] for name in self.tables if roles.get(name) == "embed"]:
            config["vocab_size"] = rows[0]
        return config


def trace(module: nn.Module, inputs: Mapping[str, Tensor]) -> Traced:
    """Run a module on these inputs and say what reads what. Its parameters must not share memory (`untied`), and need
    gradients: torch fuses the layers of some classes where none is asked for."""
    recorder = _Recorder(module)
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            recorder.know(tensor, Flow(writers=frozenset({INPUT + name})))
    with torch.enable_grad(), recorder:
        out = by_name(module(**inputs))
    return recorder.shown({name: t for name, t in out.items() if isinstance(t, Tensor)})


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)

"""The squares of per-example gradients, summed over the examples of a batch, from one backward pass of the whole batch.

Every call of a function with a parameter is intercepted (`torch.overrides`). Autograd sees a constant, and does not
form the weight's gradient; when the gradient d of the function's output arrives, the gradient of each example is formed
from d and the function's other input x. For a linear map that is G_b = d_bᵀ x_b, whose square is added while it is in
the cache: as many multiplications as for the sum over examples that autograd would form. For an example with one
position the square factorises (Goodfellow 2015, Efficient per-example gradient computations).

How a call splits into examples is inferred from shapes, which can mislead: callers compare the result first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from symfuse.stats.squares import Outer, Part, Rows, add_square

DENSE = 2**26  # elements of per-example gradients in memory at a time, where they are formed in full
Arrived = Callable[[Tensor], Mapping[str, Part]]
Meetings = tuple[tuple[str, str], ...]


class NotCovered(Exception):  # noqa: N818
    """A parameter is used in a way that does not split into examples. No failure: examples are then run one by one."""


def add_squares(
    loss: Callable[[], Tensor],
    parameters: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
    size: int,
    as_before: Meetings | None = None,
) -> Meetings:
    """Add to each of the sums Σ_b (∂ loss_b / ∂ parameter)², over the `size` examples b of a batch.

    loss: the sum over examples, a scalar with its graph. parameters: all of the module; those without a sum are
    constants. sums: by name, in the dtype in which gradients are formed and squared. Returns the calls with parameters:
    (parameter, function), in order. Raises NotCovered, before anything is added, also if the calls differ from
    `as_before`: a comparison with those does not hold for others.
    """
    meetings = _Intercepted(parameters, sums, size)
    try:
        with torch.enable_grad():
            with meetings:
                value = loss()
            if as_before is not None and tuple(meetings.met) != as_before:
                raise NotCovered("the model took another path than at first")
            meetings.backward(value)
        return tuple(meetings.met)
    finally:
        vars(meetings).clear()  # hooks of its tensors hold it: the activations would live until garbage is collected


class _Intercepted(TorchFunctionMode):
    """Record, while a loss is computed, the calls of functions with parameters; `backward` then adds to the sums."""

    def __init__(self, parameters: Mapping[str, Tensor], sums: Mapping[str, Tensor], size: int) -> None:
        super().__init__()
        self.sums, self.size = sums, size
        self.names = {id(p): name for name, p in parameters.items()}
        self.parameters = {name: p.detach().requires_grad_(name in sums) for name, p in parameters.items()}
        # Results of functions of parameters alone, with their graphs and the names of these parameters.
        self.derived: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self.copies: dict[str, Tensor] = {}  # of parameters [1, …], as [B, …]
        self.leaves: list[Tensor] = []
        self.met: list[tuple[str, str]] = []
        self.by_content = False  # whether rows were selected by content
        self.expected: Counter[str] = Counter()
        self.parts: dict[str, list[Part]] = {}
        self.later: list[tuple[Tensor, frozenset[str], Tensor]] = []  # derived tensors with their gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, structure = tree_flatten((args, kwargs))
        self.by_content |= _chooses_by_content(func, flat)
        if not any(isinstance(t, Tensor) and self.known(t) for t in flat):
            return func(*args, **kwargs)
        if func in _RULES:
            out = _RULES[func](self, *args, **kwargs)
            if out is not None:
                return out
        flat = [self._copied(t) if id(t) in self.names and t.ndim > 1 and len(t) == 1 else t for t in flat]

        def call(values: Sequence[Any]) -> Any:
            a, k = tree_unflatten(values, structure)
            return func(*a, **k)

        what = getattr(func, "__name__", str(func))
        others = [t for t in flat if isinstance(t, Tensor) and not self.known(t)]
        if any(t.is_floating_point() or (t.ndim and len(t) == self.size) for t in others):  # also a mask
            return self._general(call, flat, what)
        out = call([self.parameters[self.names[id(t)]] if id(t) in self.names else t for t in flat])
        sources = frozenset().union(*(self.sources(t) for t in flat if isinstance(t, Tensor)))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.requires_grad:
                self.derived[id(t)] = (t, sources)
        return out

    def known(self, t: Tensor) -> bool:
        """Whether it is a parameter, or computed from parameters alone."""
        return id(t) in self.names or id(t) in self.derived

    def sources(self, t: Tensor) -> frozenset[str]:
        """The parameters with a sum from which a known tensor was computed."""
        if id(t) in self.derived:
            return self.derived[id(t)][1]
        return frozenset({self.names[id(t)]} & self.sums.keys()) if id(t) in self.names else frozenset()

    def wanted(self, p: Tensor | None) -> str | None:
        """The name of a parameter with a sum."""
        name = self.names.get(id(p))
        return name if name in self.sums else None

    def split(self, t: Tensor, features: int) -> Tensor:
        """[B, …, *features], or [B · …, *features], as [B, T, *features]."""
        return t.reshape(self.size, -1, *t.shape[t.ndim - features :])

    def require_split(self, name: str, what: str, t: Tensor, features: int) -> None:
        if t.ndim <= features or len(t) % self.size:
            raise NotCovered(f"{name!r} meets in {what} a tensor {list(t.shape)}, which is not of {self.size} examples")

    def meet(self, out: Tensor, names: Iterable[str], what: str, arrived: Arrived) -> Tensor:
        """Register the output of a call. When its gradient d arrives, arrived(d) are parts of the parameters'
        gradients."""
        for name in names:
            if self.by_content:  # then the number of rows may equal that of examples by chance
                raise NotCovered(
                    f"{name!r} comes behind a choice of rows by content, which does not split into examples"
                )
            self.met.append((name, what))
            self.expected[name] += 1
        if not out.requires_grad:
            self.leaves.append(out.detach().requires_grad_())
            out = self.leaves[-1].clone()  # which the model may change in place

        def hook(d: Tensor) -> None:
            for name, part in arrived(d).items():
                self.parts.setdefault(name, []).append(part)
                self.expected[name] -= 1
                if not self.expected[name]:
                    add_square(self.sums[name], self.parts.pop(name), self.size)

        out.register_hook(hook)  # type: ignore[no-untyped-call]
        return out

    def _copied(self, p: Tensor) -> Tensor:
        name = self.names[id(p)]
        if name not in self.copies:
            copies = p.detach().expand(self.size, *p.shape[1:])
            if name in self.sums:
                copies = self.meet(copies, [name], "one row for all", lambda d: {name: d.unsqueeze(1)})
            self.copies[name] = copies
        return self.copies[name]

    def _general(self, call: Callable[[Sequence[Any]], Any], flat: Sequence[Any], what: str) -> Any:
        """Any function of known tensors and tensors [B, …]: its vector-Jacobian product, example by example."""
        tensors = {i: t for i, t in enumerate(flat) if isinstance(t, Tensor)}
        constants = [t.detach() if i in tensors and self.known(t) else t for i, t in enumerate(flat)]
        wanted = [i for i, t in tensors.items() if self.sources(t)]
        if not wanted:
            return call(constants)
        others = [i for i, t in tensors.items() if not self.known(t) and t.ndim]
        batched = [i for i in others if len(tensors[i]) == self.size]
        names = sorted(frozenset().union(*(self.sources(tensors[i]) for i in wanted)))
        in_place = what.startswith("__i") or (what.endswith("_") and not what.endswith("__"))
        out = None if in_place or any(tensors[i].requires_grad for i in others if i not in batched) else call(constants)
        numbers = self.size * sum(tensors[i].numel() for i in wanted)
        if not isinstance(out, Tensor) or not out.ndim or len(out) != self.size or numbers > DENSE:
            raise NotCovered(f"{names[0]!r} is used in {what} in a way that does not split into examples")
        rows = [tensors[i].detach().unsqueeze(1) for i in batched]  # each example is a batch of one

        def product(weights: Sequence[Tensor], inputs: Sequence[Tensor], d: Tensor) -> Tensor:
            values = list(constants)
            for i, t in zip([*wanted, *batched], [*weights, *inputs], strict=True):
                values[i] = t
            out: Tensor = call(values)
            return (out * d).sum()

        def arrived(d: Tensor) -> dict[str, Part]:
            each = torch.func.vmap(torch.func.grad(product), in_dims=(None, 0, 0))
            gradients = each([constants[i] for i in wanted], rows, d.unsqueeze(1))
            parts: dict[str, Part] = {}
            for i, gradient in zip(wanted, gradients, strict=True):
                if i in direct:
                    parts[direct[i]] = gradient
                else:
                    self.later.append((*self.derived[id(flat[i])], gradient))
            return parts

        direct = {i: self.names[id(flat[i])] for i in wanted if id(flat[i]) in self.names}
        for name in (name for i in wanted if i not in direct for name in self.sources(flat[i])):
            self.met.append((name, f"derived, {what}"))
            self.expected[name] += 1  # which comes last
        return self.meet(out, direct.values(), what, arrived)

    def backward(self, value: Tensor) -> None:
        if self.leaves:
            torch.autograd.grad(value, self.leaves, allow_unused=True)
        for t, sources, gradient in self.later:
            names = sorted(sources)
            own = [self.parameters[name] for name in names]
            gradients = torch.autograd.grad(t, own, gradient, retain_graph=True, is_grads_batched=True)
            for name, part in zip(names, gradients, strict=True):
                self.parts.setdefault(name, []).append(part)
        for name, parts in self.parts.items():  # also where the loss did not use all of it
            add_square(self.sums[name], parts, self.size)


def _chooses_by_content(func: Any, flat: Sequence[Any]) -> bool:
    """Whether the number of rows of a function's result depends on the content of tensors, as where a router picks
    tokens."""
    if func is Tensor.__getitem__:
        return any(isinstance(t, Tensor) and t.dtype == torch.bool and t.ndim for t in flat[1:])
    return func in _CHOOSING or (func is torch.where and sum(isinstance(t, Tensor) for t in flat) == 1 == len(flat))


_CHOOSING = {torch.nonzero, Tensor.nonzero, torch.masked_select, Tensor.masked_select}


def _linear(at: _Intercepted, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    return _product(at, F.linear, x, weight, bias)


def _addmm(at: _Intercepted, bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Tensor | None:
    """b + x W, as in GPT-2."""
    return None if scales else _product(at, lambda x, weight, bias: torch.addmm(bias, x, weight), x, weight, bias)


def _product(
    at: _Intercepted, call: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """x Wᵀ + b, or x W + b."""
    own = [t for t in (weight, bias) if t is not None]
    if at.known(x) or not all(id(t) in at.names for t in own) or weight.ndim != 2:
        return None
    name, bias_name = at.wanted(weight), at.wanted(bias)
    out = call(x, weight.detach(), None if bias is None else bias.detach())
    names = [n for n in (name, bias_name) if n is not None]
    if not names:
        return out
    at.require_split(names[0], "a linear map", x, 1)
    kept = x.detach() if name else None

    def arrived(d: Tensor) -> dict[str, Part]:
        d = at.split(d, 1)
        parts: dict[str, Part] = {}
        if name and kept is not None:
            parts[name] = Outer.of(d, at.split(kept, 1), transposed=call is not F.linear)
        if bias_name:
            parts[bias_name] = d.sum(1, dtype=at.sums[bias_name].dtype)
        return parts

    return at.meet(out, names, "a linear map", arrived)


def _embedding(
    at: _Intercepted,
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or id(weight) not in at.names:
        return None
    if ids.ndim > 1 and len(ids) == 1:  # the same positions for all
        ids = ids.expand(at.size, *ids.shape[1:])
    if not ids.ndim or len(ids) != at.size:
        return None
    out = F.embedding(ids, weight.detach())
    names = at.sources(weight)

    def arrived(d: Tensor) -> dict[str, Part]:
        rows, at_rows = at.split(d, 1), at.split(ids, 0)
        if padding_idx is not None:  # which gets no gradient
            rows = rows.masked_fill((at_rows == padding_idx % len(weight))[..., None], 0)
        return {name: Rows(at_rows, rows) for name in names}

    return at.meet(out, names, "an embedding", arrived) if names else out


def _layer_norm(
    at: _Intercepted,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    own = [t for t in (weight, bias) if t is not None]
    if at.known(x) or not all(id(t) in at.names for t in own):
        return None
    shape = [*normalized_shape]
    gain, shift = (None if t is None else t.detach() for t in (weight, bias))
    out = F.layer_norm(x, shape, gain, shift, eps)
    name, shift_name = at.wanted(weight), at.wanted(bias)
    names = [n for n in (name, shift_name) if n is not None]
    if not names:
        return out
    at.require_split(names[0], "a normalisation", x, len(shape))
    kept = x.detach() if name else None

    def arrived(d: Tensor) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        if name and kept is not None:
            parts[name] = at.split(d * F.layer_norm(kept, shape, eps=eps), len(shape)).sum(1, dtype=at.sums[name].dtype)
        if shift_name:
            parts[shift_name] = at.split(d, len(shape)).sum(1, dtype=at.sums[shift_name].dtype)
        return parts

    return at.meet(out, names, "a normalisation", arrived)


_RULES: Mapping[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
}

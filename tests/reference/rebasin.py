"""Git Re-Basin (Ainsworth et al. 2023, arXiv 2209.04836) for transformers: weight matching (Algorithm 1) and activation
matching. Permutations only, without symfuse.

Of attention, whole heads are permuted, and the units inside of each head, those of queries and keys and those of values
apart (as Verma & Elbayad 2024). `heads` is `num_attention_heads` of the config. Plain per-head permutation is
`weight_matching(..., residual=False, ffn=False)`: then nothing depends on anything else, and one sweep does it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import spaces
import torch
from scipy.optimize import linear_sum_assignment
from spaces import Place, State
from torch import Tensor, nn

Permutations = dict[str, Tensor]  # by space: unit i of the moved model is unit index[i] of the source
LEAST = 1e-9  # gain of a step, as a share of what the units weigh


def weight_matching(
    source: State,
    anchor: State,
    kind: str,
    heads: int,
    *,
    residual: bool = True,
    attention: bool = True,
    ffn: bool = True,
    seed: int = 0,
    sweeps: int = 20,
) -> dict[str, Tensor]:
    """The source moved: coordinate descent from the identity over the residual stream, the heads of each layer and the
    neurons of each layer, in random order, until a sweep changes nothing. kind: "bert", "vit" or "gpt2".

    With the residual stream the result depends on the order, and far from the anchor much: neurons that were matched
    in the wrong basis hold it where it is. Take several seeds, and keep the one of least `spaces.distance`.
    """
    state = dict(source)
    for step in descend(source, anchor, kind, heads, residual, attention, ffn, seed, sweeps):
        state = step
    return spaces.retied(state, spaces.tied(source, kind))


def descend(
    source: State,
    anchor: State,
    kind: str,
    heads: int,
    residual: bool,
    attention: bool,
    ffn: bool,
    seed: int,
    sweeps: int,
) -> Iterator[dict[str, Tensor]]:
    """The moved source after each step that changed it; tied tensors are not moved."""
    state, where = dict(source), by_space(source, kind)
    steps = chosen_spaces(where, residual, attention, ffn)
    order = random.Random(seed)
    for _ in range(sweeps):
        order.shuffle(steps)
        changed = False
        for step in steps:
            grams = {name: gram(anchor, state, where[name]) for name in step}
            found = best_heads(grams, heads) if len(step) > 1 else {name: assign(g)[0] for name, g in grams.items()}
            gain = sum(float(g.gather(1, found[n][:, None]).sum() - g.trace()) for n, g in grams.items())
            if gain > LEAST * sum(float(g.abs().max()) * len(g) for g in grams.values()):
                changed = True
                state = permute(state, kind, found)
                yield state
        if not changed:
            return


def by_space(state: State, kind: str) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in spaces.places(state, kind):
        found.setdefault(place.space, []).append(place)
    return found


def chosen_spaces(names: Iterable[str], residual: bool, attention: bool, ffn: bool) -> list[tuple[str, ...]]:
    """What is solved in one step: queries and keys of a layer with its values, since its heads are theirs."""
    asked = {"residual": residual, "qk": attention, "ffn": ffn}
    steps = [name for name in names if asked.get(name.rpartition(".")[2])]
    return [(name, name.replace("qk", "v")) if name.endswith("qk") else (name,) for name in steps]


def gram(anchor: State, source: State, where: Iterable[Place]) -> Tensor:
    """Σ over tensors of ⟨anchor unit, source unit⟩."""
    return sum((p.units(anchor) @ p.units(source).T for p in where), start=torch.zeros((), dtype=torch.float64))


def assign(score: Tensor) -> tuple[Tensor, float]:
    """The index that maximises Σ score[i, index[i]], and the maximum."""
    rows, columns = linear_sum_assignment(score.numpy(), maximize=True)
    return torch.as_tensor(columns), float(score[rows, columns].sum())


def best_heads(scores: Mapping[str, Tensor], heads: int, decide: Iterable[str] | None = None) -> Permutations:
    """Of spaces of a layer with the same heads: inside of each pair of heads the best assignment, then the best
    assignment of heads by what those reach together; decide: in these spaces only."""
    totals = torch.zeros(heads, heads, dtype=torch.float64)
    inner: dict[tuple[str, int, int], Tensor] = {}
    for name, score in scores.items():
        size = len(score) // heads
        for i in range(heads):
            for j in range(heads):
                block = score[i * size : (i + 1) * size, j * size : (j + 1) * size]
                inner[name, i, j], value = assign(block)
                totals[i, j] += value if decide is None or name in decide else 0
    order = assign(totals)[0].tolist()
    return {
        name: torch.cat([inner[name, i, j] + j * (len(score) // heads) for i, j in enumerate(order)])
        for name, score in scores.items()
    }


def permute(state: State, kind: str, permutations: Permutations) -> dict[str, Tensor]:
    """The state with these spaces permuted: the same function, if heads are kept whole."""
    out, where = dict(state), by_space(state, kind)
    for name, index in permutations.items():
        out = spaces.moved(out, where[name], index)
    return spaces.retied(out, spaces.tied(state, kind))


def nearest_weight_matching(
    source: State, anchor: State, kind: str, heads: int, *, seeds: int = 4, **options: Any
) -> dict[str, Tensor]:
    """What `weight_matching` finds from several seeds, of which the order of its descent depends: the nearest."""
    found = (weight_matching(source, anchor, kind, heads, seed=seed, **options) for seed in range(seeds))
    return min(found, key=lambda moved: spaces.distance(moved, anchor, kind))


def activation_matching(
    source_module: nn.Module, anchor_module: nn.Module, batches: Iterable[Mapping[str, Tensor]], kind: str, heads: int,
    **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """The source's `state_dict`, moved by `activation_permutations`, whose options these are."""
    found = activation_permutations(source_module, anchor_module, batches, kind, heads, **options)
    return permute(source_module.state_dict(), kind, found)


@torch.no_grad()
def activation_permutations(
    source_module: nn.Module,
    anchor_module: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    kind: str,
    heads: int,
    *,
    residual: str | None = None,
    attention: bool = True,
    ffn: bool = True,
) -> Permutations:
    """Permutations that maximise Pearson's correlations of activations on the same batches (inputs of the modules,
    whose `attention_mask` says which positions count); `permute` applies them to a state dict of either spelling.

    Neurons: behind the activation. Heads: by their outputs; inside of each the units of values by these outputs, those
    of queries and keys by their sum of correlations. residual: None, or the stream "first" (embeddings), "last" (behind
    the last layer), or "all" (at every layer, summed).
    """
    if residual not in (None, "first", "last", "all"):
        raise ValueError(f"residual is {residual!r}")
    modules = source_module.eval(), anchor_module.eval()
    (from_source, hooks), (from_anchor, more) = (listen(module, kind) for module in modules)
    sums: dict[str, Correlation] = {}
    try:
        for batch in batches:
            for module in modules:
                module(**batch)
            mask = batch.get("attention_mask")
            kept = slice(None) if mask is None else mask.flatten().bool()
            for key, x in from_anchor.items():
                sums.setdefault(key, Correlation()).add(x[kept], from_source[key][kept])
    finally:
        for hook in hooks + more:
            hook.remove()
    scores: dict[str, Tensor] = {}
    stream = sorted((key for key in sums if key.startswith("residual ")), key=lambda key: int(key.split()[1]))
    left_out = set(stream) - set({"first": stream[:1], "last": stream[-1:], "all": stream}.get(residual or "", []))
    for key, found in sums.items():
        if key not in left_out:
            space = key.split()[0]
            scores[space] = scores.get(space, 0) + found.value()
    out: Permutations = {}
    for step in chosen_spaces(scores, residual is not None, attention, ffn):
        part = {name: scores[name] for name in step}
        out |= best_heads(part, heads, step[1:]) if len(step) > 1 else {step[0]: assign(scores[step[0]])[0]}
    return out


def listen(module: nn.Module, kind: str) -> tuple[dict[str, Tensor], list[Any]]:
    """Hooks that keep the last activations (positions × units), by space and, where it has several places, place."""
    heard: dict[str, Tensor] = {}
    hooks: list[Any] = []
    state = module.state_dict()

    def keep(key: str, value: Any, part: int = 0, parts: int = 1) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        heard[key] = tensor.flatten(0, -2).chunk(parts, -1)[part].double()

    for place in spaces.places(state, kind):
        if not place.name.endswith(".weight") or (place.word not in ("q", "k", "v", "ffn")):
            continue
        owner = module.get_submodule(place.name.removesuffix(".weight"))
        if place.role == "reads":
            hooks.append(owner.register_forward_pre_hook(lambda _, args, s=place.space: keep(s, args)))
        elif place.word in ("q", "k"):
            hooks.append(
                owner.register_forward_hook(
                    lambda _m, _, out, p=place: keep(f"{p.space} {p.word}", out, p.part, p.parts)
                )
            )
    count = spaces.layers(state, kind)
    for name, part in module.named_modules():
        key, layer = spaces.canonical(name + ".", kind)
        if layer is not None and key.endswith(".#."):  # a whole layer
            hooks.append(part.register_forward_pre_hook(lambda _, args, n=layer: keep(f"residual {n}", args)))
            if layer == count - 1:
                hooks.append(part.register_forward_hook(lambda _m, _, out: keep(f"residual {count}", out)))
    return heard, hooks


class Correlation:
    """Of each unit of the anchor with each of the source, summed up batch by batch."""

    def __init__(self) -> None:
        self.count, self.sums = 0, [torch.zeros(())] * 5

    def add(self, x: Tensor, y: Tensor) -> None:
        self.count += len(x)
        new = (x.sum(0), y.sum(0), x.square().sum(0), y.square().sum(0), x.T @ y)
        self.sums = [a + b for a, b in zip(self.sums, new, strict=True)]

    def value(self) -> Tensor:
        """0 for a unit that never changes."""
        x, y, xx, yy, xy = (s / self.count for s in self.sums)
        spread = torch.outer((xx - x * x).clamp_min(0), (yy - y * y).clamp_min(0)).sqrt()
        return torch.where(spread > 1e-12, (xy - torch.outer(x, y)) / spread, 0.0)

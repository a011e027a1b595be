"""Attention as the products of its matrices, the circuits of GLMC (Theus et al. 2025, arXiv 2506.22712): for ViT and
GPT-2, whose norms stand before them. Without symfuse.

With x̃ = (x, 1) what a head reads: scores x̃ᵀ M_qk y with M_qk = [W_Q b_Q]ᵀ W_K, [d+1, d], and outputs ỹᵀ M_vo with
M_vo = [W_V b_V]ᵀ W_Oᵀ, [d+1, d]. The key's bias adds a constant to each row of scores, which softmax ignores. Any
change of basis inside of a head leaves both as they are, so that a mean does not depend on it; but the rank of a
mean is up to twice the head's size, and the model no longer fits its class.

    a, b = (to_circuits(state, "vit", heads) for state in (aligned, anchor))
    model = circuit_module(module, interpolate(a, b, 0.5), "vit", heads)   # module: any of that class and config
    loss = model(**batch).loss
"""

from __future__ import annotations

import copy
from typing import Any

import spaces
import torch
from spaces import State
from torch import Tensor, nn

QK, VO = "circuits.{}.qk", "circuits.{}.vo"
ATTENTION = {"vit": "attention", "gpt2": "attn"}


def to_circuits(state: State, kind: str, heads: int) -> dict[str, Tensor]:
    """The state with `circuits.LAYER.qk` and `.vo`, [heads, d+1, d], in the place of the projections of attention, but
    for the bias of the last, which stays; in its dtype. kind: "vit" or "gpt2". heads: of the config."""
    if kind not in ATTENTION:
        raise ValueError(f"circuits are of {' and '.join(ATTENTION)}, not of {kind}")
    parts: dict[tuple[str, str], Tensor] = {}  # by space, and word and role: units × (d, or 1 of a bias)
    for place in spaces.places(state, kind):
        if place.word in ("q", "k", "v"):
            ending = "o" if place.role == "reads" else place.word + ("b" if place.name.endswith("bias") else "")
            found = place.units(state)
            parts[place.space.partition(".")[0], ending] = found.reshape(heads, -1, found.shape[1])
    gone = {place.name for place in spaces.places(state, kind) if place.word in ("q", "k", "v")}
    out = {name: tensor for name, tensor in state.items() if name not in gone}
    for layer in range(spaces.layers(state, kind)):
        q, k, v, o = (parts[str(layer), word] for word in "qkvo")
        q, v = (
            torch.cat([w, parts.get((str(layer), b), w.new_zeros(*w.shape[:2], 1))], 2)
            for w, b in ((q, "qb"), (v, "vb"))
        )
        out[QK.format(layer)] = (q.mT @ k).to(state[min(gone)].dtype)
        out[VO.format(layer)] = (v.mT @ o).to(state[min(gone)].dtype)
    return out


def interpolate(a: State, b: State, weight: float) -> dict[str, Tensor]:
    """(1 − weight) a + weight b. ValueError if they have not the same tensors."""
    if a.keys() != b.keys():
        raise ValueError(f"only one of the models has {sorted(a.keys() ^ b.keys())[:3]}")
    return {name: torch.lerp(a[name], b[name].to(a[name].dtype), weight) for name in a}


def circuit_module(module: nn.Module, circuits: State, kind: str, heads: int) -> nn.Module:
    """A copy of a module of the `transformers` class (whichever weights it has) that computes with these circuits; in
    evaluation mode, in their dtype. Called as the module is, without a cache."""
    out = copy.deepcopy(module).to(next(iter(circuits.values())).dtype).eval()
    names = {spaces.canonical(name, kind): name for name in out.state_dict()}
    for name, part in [*out.named_modules()]:
        key, layer = spaces.canonical(name + ".", kind)
        if layer is not None and key.endswith(f".#.{ATTENTION[kind]}."):
            output = part.o_proj if kind == "vit" else part.c_proj
            attention = CircuitAttention(
                circuits[QK.format(layer)], circuits[VO.format(layer)], output.bias, part.scaling, kind == "gpt2"
            )
            out.set_submodule(name, attention)
            names[spaces.canonical(f"{name}.{'o_proj' if kind == 'vit' else 'c_proj'}.bias", kind)] = f"{name}.bias"
    config: Any = out.config
    config.use_cache = False
    rest = {n: t for n, t in circuits.items() if not n.startswith("circuits.")}
    given = {names[spaces.canonical(name, kind)]: tensor for name, tensor in rest.items()}
    missing, _ = out.load_state_dict(given, strict=False)
    aliases = spaces.tied(out.state_dict(), kind)
    if left := [n for n in missing if n not in aliases and not n.endswith((".qk", ".vo"))]:
        raise ValueError(f"the circuits have no {left[:3]}")
    return out


class CircuitAttention(nn.Module):
    """In the place of the attention of `transformers`. qk, vo: [heads, d+1, d]; bias: of the output projection."""

    def __init__(self, qk: Tensor, vo: Tensor, bias: Tensor, scaling: float, causal: bool) -> None:
        super().__init__()
        self.qk, self.vo, self.bias = (nn.Parameter(t.detach().clone()) for t in (qk, vo, bias))
        self.scaling, self.causal = scaling, causal

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """hidden_states: [batch, positions, d]. attention_mask: additive, or true where something is to be seen."""
        x = hidden_states[:, None]
        full = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
        scores = self.scaling * (full @ self.qk @ x.mT)
        never = torch.finfo(scores.dtype).min  # not -inf: a row of padding may see nothing
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~seen, never)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, never)
        elif attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(-1) @ (full @ self.vo)).sum(1) + self.bias, None

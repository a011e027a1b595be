"""Kimi Linear: latent attention without positions in some layers, and in the others linear attention, whose memory
decays by channels of the keys."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import absent, placed
from symfuse.architectures.deepseek import latent
from symfuse.architectures.experts import PIECES, deepseek, dense_layers, stacks_of
from symfuse.architectures.qwen3_next import ALL, BOTH
from symfuse.groups import Invertible, Permutation, SignedMonomial
from symfuse.spec import Axis

AT = decoder.ATTENTION
LINEAR = {
    **{AT + f"{one}_proj.weight": "(delta_h delta_qk) residual*" for one in "qk"},
    **{AT + f"{one}_conv1d.weight": "(delta_h delta_qk*) 1 taps" for one in "qk"},
    AT + "v_proj.weight": "(delta_h delta_v) residual*",
    AT + "v_conv1d.weight": "(delta_h delta_v*) 1 taps",
    AT + "f_a_proj.weight": "decay_latent residual*",
    AT + "f_b_proj.weight": "(delta_h |delta_qk|) decay_latent*",
    AT + "dt_bias": "(delta_h |delta_qk|)",
    AT + "A_log": "1 1 delta_h 1",
    AT + "b_proj.weight": "delta_h residual*",
    AT + "g_a_proj.weight": "gate_latent residual*",
    AT + "g_b_proj.weight": "(delta_h |delta_v|) gate_latent*",
    AT + "o_norm.weight": "|delta_v|",
    AT + "o_proj.weight": "residual (delta_h |delta_v|)",
}
READERS = tuple(name for name, layout in LINEAR.items() if layout.endswith("residual*"))
BLOCK = decoder.LAYER + "block_sparse_moe."
GATED = tuple(f"{one}.weight" for one in PIECES)
# Names in files, and in memory → those of today.
LEGACY = {
    f".block_sparse_moe.{name}": f".mlp.{name}"
    for name in ("gate.weight", "gate.e_score_correction_bias", *GATED, *(f"shared_experts.{name}" for name in GATED))
}
LEGACY |= {f".forget_gate.{one}": f".{one}" for one in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")}
FIELDS = {"n_group": "num_expert_group", "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


@architecture("kimi_linear", tied=False, spelt=FIELDS)
def kimi_linear(c: Config) -> Family:
    c = c.completed()
    full = set(decoder.full_layers(c, ["full_attention"] * c.num_hidden_layers))
    family = deepseek(c, decoder.stream_axes(c), {}, dense_layers(c, range(1)))
    family = replace(family, stacks=stacks_of(("w1", "w3", "w2"), BLOCK), legacy=LEGACY)
    whole = latent(c, family, neighbours=False)
    axes = {name: axis for name, axis in whole.axes.items() if name not in ("c", "f")} | _axes(c)
    tensors = placed(whole.tensors, {"c f": "shared_p", "c* f": "shared_p*"})
    both, own = tensors.keys() & LINEAR.keys(), [name for name in tensors if name.startswith(AT)]
    tensors |= {name: layout for name, layout in LINEAR.items() if name not in both}
    linear = set(range(c.num_hidden_layers)) - full
    tensors |= absent([name for name in own if name not in both], linear) | absent(LINEAR.keys() - both, full)
    tensors |= {name.format(l=layer): LINEAR[name] for name in both for layer in linear}
    before = dict.fromkeys((*whole.reads[decoder.BEFORE_ATTENTION], *READERS))
    return replace(whole.plus(reads={decoder.BEFORE_ATTENTION: tuple(before)}), axes=axes, tensors=tensors)


def _axes(c: Config) -> dict[str, Axis]:
    size = c.size("linear_head_dim", 128)
    return {
        "shared_p": Axis(c.qk_rope_head_dim, Invertible(), ("l",), "all heads share this part of the key: one for all"),
        "delta_h": Axis(c.size("linear_num_heads", 32), Permutation(), ("l",)),
        "delta_qk": Axis(size, SignedMonomial(), ("l", "delta_h"), BOTH),
        "delta_v": Axis(size, SignedMonomial(), ("l",), ALL),
        **{one: Axis(size, Invertible(), ("l",)) for one in ("decay_latent", "gate_latent")},
        "taps": Axis(c.size("linear_conv_kernel_dim", 4)),
    }

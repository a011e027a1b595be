"""EXAONE 4: norms behind each block, queries and keys that are normalised, no positions in layers that see all tokens;
and mixtures with such queries and keys, and norms before each block: EXAONE's, dots.llm1, Hunyuan 3."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import with_names
from symfuse.architectures.experts import deepseek, dense_layers
from symfuse.architectures.olmo import POST_NORMS
from symfuse.groups import Sign

NORMED = decoder.PROJECTIONS | decoder.NORMS_OF_HEADS
EXAONE = {"gate.e_score": "e_score"}
HUNYUAN = {"mlp.gate.e_score_correction_bias": "mlp.expert_bias", "mlp.gate.": "mlp.router.gate."}
HUNYUAN |= {"shared_experts.": "shared_mlp."}
NAMES = "num_experts", "num_shared_experts"


def _without_positions(c: Config) -> list[int]:
    """Where there is no window, positions turn every layer."""
    if c.is_null("sliding_window"):
        return []
    layers, every = c.num_hidden_layers, c.size("sliding_window_pattern", 4)
    return decoder.full_layers(c, [("sliding" if (at + 1) % every else "full") + "_attention" for at in range(layers)])


@architecture("exaone4", tied=False)
def exaone4(c: Config) -> Family:
    axes = decoder.axes(c, plane=Sign()) | decoder.gated(c)
    family = decoder.family(c, axes, NORMED | decoder.GATED | POST_NORMS, reads={})
    return decoder.unturned(family, _without_positions(c), normed=True)


@architecture("exaone_moe", tied=False)
def exaone_moe(c: Config) -> Family:
    family = _mixture(c, c.get("first_k_dense_replace", 1), NAMES)
    return decoder.unturned(with_names(family, EXAONE), _without_positions(c), normed=True)


@architecture("dots1", tied=False, example={"n_routed_experts": 128, "n_shared_experts": 2})
def dots1(c: Config) -> Family:
    family = _mixture(c, c.get("first_k_dense_replace", 0))
    return decoder.biased(family, c.get("attention_bias", False))


@architecture("hy_v3", tied=False)
def hy_v3(c: Config) -> Family:
    return with_names(decoder.biased(_mixture(c, 1, NAMES), c.get("attention_bias", False)), HUNYUAN)


def _mixture(c: Config, first: int, names: tuple[str, str] = ("n_routed_experts", "n_shared_experts")) -> Family:
    """first: the number of dense layers before those with experts."""
    return deepseek(c, decoder.axes(c, plane=Sign()), NORMED, dense_layers(c, range(first)), names=names)

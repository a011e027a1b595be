"""The next larger group on the axes of state space models: units behind a non-linearity flipped or rescaled, states
mixed, heads that leave their block. Each must change the function."""

from __future__ import annotations

import pytest

from contract.test_must_fail import BROKEN, acting, applied, rewritten, undeclared, with_axis
from contract.test_must_fail_decoders import larger
from contract.tiny import case
from symfuse.architectures import resolve
from symfuse.errors import SpecError, SymmetryError
from symfuse.groups import (
    Group,
    Invertible,
    Orthogonal,
    Permutation,
    PositiveMonomial,
    Scaling,
    Signed,
    SignedMonomial,
)
from symfuse.spec import Axis

SECOND = ("mamba2-lm", "bamba-lm", "granite-hybrid-lm", "falcon-h1-lm", "falcon-h1-plain", "nemotron-h-lm")


@pytest.mark.parametrize(
    ("label", "axis", "groups"),
    [
        ("mamba-lm", "scanned", (Signed(), Scaling())),
        ("falcon-mamba", "rank", (Scaling(), Invertible())),
        ("falcon-mamba", "states", (Scaling(),)),  # without norms, each state may be rescaled
        ("jamba-lm", "rank", (Scaling(),)),
        ("jamba-lm", "states", (Scaling(),)),
        ("jamba-lm", "scanned", (Signed(), Scaling())),
        *((label, axis, (Signed(), Scaling())) for label in SECOND for axis in ("scanned", "states")),
        ("nemotron-h-lm", "dense_ffn", (Signed(), Scaling())),
        ("nemotron-h-lm", "ffn", (Signed(), Scaling())),
        ("nemotron-h-lm", "residual", (Scaling(),)),
    ],
)
def test_a_larger_group_breaks(label: str, axis: str, groups: tuple[Group, ...]) -> None:
    this = case(label)
    for group in groups:
        assert larger(this, axis, group) > BROKEN, group


@pytest.mark.parametrize("label", ["mamba-lm", "falcon-mamba"])
def test_rotating_the_states_breaks(label: str) -> None:
    """Each decays at its own rate, which would have to be rotated with them."""
    this = case(label)
    with pytest.raises(SymmetryError, match="no permutation part"):
        larger(this, "states", Orthogonal())
    fixed = rewritten(this.spec, {"A_log": "scanned 5"})
    assert this.error(applied(this, acting(fixed, "states", Orthogonal()))) > BROKEN
    assert this.error(applied(this, acting(fixed, "states", Permutation()))) > BROKEN


def layouts(channels: str, heads: str, states: str) -> dict[str, str]:
    """Those of a mixer of Mamba-2 by what its channels, its heads and its states are."""
    scanned = f"{channels} + {states} + {states}"
    whole = f"({channels} + {scanned} + {heads})"
    return {
        "in_proj.weight": f"{whole} residual*",
        "in_proj.bias": whole,
        "conv1d.weight": f"({scanned}) 1 3",
        "conv1d.bias": f"({scanned})",
        **dict.fromkeys(("dt_bias", "A_log", ".D"), f"({heads})"),
        "mixer.norm.weight": f"({channels})",
        "out_proj.weight": f"residual ({channels})",
    }


@pytest.mark.parametrize(
    ("channels", "heads", "states", "size"),
    [
        ("m 6", "m", "15", 12),  # heads among all blocks, whose states stay
        ("3 m 6", "3 m", "15", 4),  # one order of heads for all blocks, which is allowed
        ("m", "12", "15", 72),  # channels among all heads
        ("3 m", "12", "15", 24),  # channels among the heads of a block
        ("12 m", "12", "15", 6),  # one order of channels for all heads, which is allowed
        ("72", "12", "m", 15),  # states among all blocks
        ("72", "12", "3 m", 5),  # one order of states for all blocks, which is allowed
        ("m 24", "12", "m 5", 3),  # blocks without their heads
    ],
)
def test_units_of_a_scan_stay_in_their_head_and_their_block(channels: str, heads: str, states: str, size: int) -> None:
    this = case("mamba2-lm")
    assert [this.spec.sizes[axis] for axis in ("ssm_m", "ssm_h", "scanned", "states")] == [3, 4, 6, 5]
    spec = with_axis(this.spec, "m", Axis(size, Permutation(), ("l",)), layouts(channels, heads, states))
    error = undeclared(this, acting(spec, "m", Permutation()))
    if size in (4, 5, 6):
        assert error < this.exact
    else:
        assert error > BROKEN


def test_channels_of_mamba_are_of_one_kind() -> None:
    """Each has step sizes and decays of its own, so that it has no heads; those of its gate go with them."""
    this = case("mamba-lm")
    apart = {"in_proj.weight": "(scanned + 48) residual*", "in_proj.bias": "(scanned + 48)"}
    assert this.error(applied(this, acting(this.spec, "scanned", Permutation()))) < this.exact
    assert this.error(applied(this, acting(rewritten(this.spec, apart), "scanned", Permutation()))) > BROKEN


def test_what_writes_states_and_what_reads_them_are_dual() -> None:
    this = case("mamba-lm")
    alike = rewritten(this.spec, {"x_proj.weight": "(rank + states + states) scanned*"})
    assert this.error(applied(this, acting(this.spec, "states", SignedMonomial()))) < this.exact
    for group in (PositiveMonomial(), SignedMonomial()):
        assert this.error(applied(this, acting(alike, "states", group))) > BROKEN
    assert this.error(applied(this, acting(alike, "states", Signed()))) < this.exact


@pytest.mark.parametrize(("label", "layer"), [("jamba-lm", 1), ("nemotron-h-lm", 3), ("granite-hybrid-lm", 1)])
def test_attention_without_positions_is_free(label: str, layer: int) -> None:
    this = case(label)
    assert {i.index for i in this.spec.movable if i.axis == "p"} == {(layer,)}
    assert "c" not in {i.axis for i in this.spec.movable}
    assert this.error(applied(this, acting(this.spec, "p", Invertible()))) < this.exact


def test_attention_with_positions_is_not() -> None:
    this = case("granite-hybrid-dense")
    at = "layers.1.self_attn."
    free = {at + "q_proj.weight": "(kv q p) residual*", at + "k_proj.weight": "(kv p*) residual*"}
    spec = with_axis(this.spec, "p", Axis(10, Invertible(), ("l", "kv")), free)
    assert undeclared(this, acting(spec, "p", Invertible())) > BROKEN
    assert larger(case("bamba-lm"), "c", Orthogonal()) > BROKEN


def test_experts_of_nemotron_read_another_space_than_they_write() -> None:
    this = case("nemotron-h-lm")
    one = {"experts.down_proj": "e in_narrow ffn*", "fc2_latent_proj.weight": "residual out_narrow*"}
    assert this.error(applied(this, acting(this.spec, "in_narrow", Invertible()))) < this.exact
    assert this.error(applied(this, acting(rewritten(this.spec, one), "in_narrow", Invertible()))) > BROKEN


def test_layers_have_the_tensors_of_their_kind() -> None:
    spec = case("nemotron-h-lm").spec
    parts = [{name.split(".")[3] for name in spec.tensors if name.startswith(f"layers.{i}.mixer.")} for i in range(4)]
    assert "A_log" in parts[0]
    assert parts[1] == {"up_proj", "down_proj"}
    assert {"gate", "experts", "shared_experts"} < parts[2]
    assert parts[3] == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("label", "older"),
    [
        ("nemotron-h-lm", {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "M-E*"}),
        ("nemotron-h-lm", {"layers_block_type": ["mamba", "mlp", "moe", "attention"]}),
        ("nemotron-h-lm", {"n_groups": None, "mamba_n_groups": 3, "conv_kernel": None, "mamba_d_conv": 3}),
        ("granite-hybrid-lm", {"layer_types": None, "layers_block_type": ["mamba", "attention"]}),
        ("bamba-lm", {"mamba_d_head": "auto"}),
        ("falcon-h1-lm", {"mamba_d_head": "auto"}),
        ("falcon-h1-lm", {"mamba_d_head": None, "mamba_d_ssm": None}),
    ],
)
def test_older_configs_say_the_same(label: str, older: dict[str, object]) -> None:
    this = case(label)
    config = {key: value for key, value in (this.checkpoint.config | older).items() if value is not None}
    assert config != this.checkpoint.config
    assert resolve(config | {key: None for key in older if key == "mamba_d_ssm"}, this.checkpoint) == this.spec


@pytest.mark.parametrize(
    ("label", "wrong", "message"),
    [
        ("mamba2-lm", {"n_groups": 5}, "the number of heads of a mixer, 12, is no multiple of its groups, 5"),
        ("nemotron-h-lm", {"layers_block_type": ["linear_attention", "gru"]}, "'gru' is no kind of layer; known are"),
        ("granite-hybrid-lm", {"layer_types": ["linear_attention"]}, "layer_types has 1 entries, expected"),
        ("mamba-lm", {"time_step_rank": "many"}, "time_step_rank is 'many', expected an integer"),
        ("bamba-lm", {"mamba_d_head": "half"}, "mamba_d_head is 'half', expected a positive integer"),
        (
            "jamba-lm",
            {"attn_layer_offset": None, "attn_layer_period": 0},
            "attn_layer_period is 0, expected",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(label: str, wrong: dict[str, object], message: str) -> None:
    this = case(label)
    with pytest.raises(SpecError, match=message):
        resolve({**this.checkpoint.config, **wrong}, this.checkpoint)

"""Decoders: rotary positions, grouped queries, fused projections, gates, norms. Named after the cases, whose inputs
they have; moves are made by hand, so that they do not follow from what they test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cases.moved import BROKEN, case_of, left_behind
from contract.tiny import Case, of
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import OptionError, SymmetryError
from symfuse.groups import Monomial, Orthogonal, PositiveMonomial, Rotary, Sign, SignedMonomial
from symfuse.io import Checkpoint
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
FALCON = SIZES | {"ffn_hidden_size": 48}
ATTENTION = "model.layers.{l}.self_attn."
Order = Sequence[int]


def tiny(kind: str, sizes: Mapping[str, Any] = GROUPED, seed: int = 0, **options: Any) -> Checkpoint:
    config = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    return of(f"{kind}ForCausalLM", config, {**sizes}, **options)(seed)


def units(order: Order, size: int = 8) -> torch.Tensor:
    """The units of blocks of that size, the blocks in that order."""
    return (torch.tensor(order)[:, None] * size + torch.arange(size)).flatten()


def reordered(checkpoint: Checkpoint, orders: Mapping[str, tuple[int, torch.Tensor]]) -> Checkpoint:
    """Tensors by the ends of their names, in both layers, with the entries of one dimension in another order."""
    tensors = dict(checkpoint)
    for name in tensors:
        for end, (dim, order) in orders.items():
            if name.endswith(end):
                tensors[name] = tensors[name].index_select(dim, order)
    return checkpoint.replace(tensors=tensors)


def grouped(checkpoint: Checkpoint, kv: Order = (1, 0), q: Order = (3, 2, 0, 1)) -> Checkpoint:
    """Key/value heads and query heads in other orders."""
    keys, queries = units(kv), units(q)
    orders = {f"{name}_proj.{end}": (0, keys) for name in "kv" for end in ("weight", "bias")}
    orders |= {"q_proj.weight": (0, queries), "q_proj.bias": (0, queries), "o_proj.weight": (1, queries)}
    norms = {"q_norm.weight": (0, queries), "k_norm.weight": (0, keys)}
    return reordered(checkpoint, orders | (norms if checkpoint.config["model_type"] == "olmo2" else {}))


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def put_back(moved: Checkpoint, this: Case, axes: str = "heads", **groups: str) -> None:
    """Matched, it is the model again, bit for bit."""
    assert not same(moved, this.checkpoint)
    assert same(api.match(moved, this.checkpoint, axes=axes, groups=groups)(moved), this.checkpoint)


def exactly(this: Case, axes: Iterable[str] | None = None, seed: int = 1) -> None:
    g = random_alignment(this.spec, seed, axes, largest=True)
    assert g.elements
    assert this.error(g(this.checkpoint), g) < this.exact


# ---- C26: queries, keys and values of each head in turn


def by_head(order: Order = (2, 0, 3, 1)) -> dict[str, tuple[int, torch.Tensor]]:
    return {
        "query_key_value.weight": (0, units(order, 24)), "query_key_value.bias": (0, units(order, 24)),
        "attention.dense.weight": (1, units(order)),
    }  # fmt: skip


def test_c26_heads_of_neox_are_blocks_of_three() -> None:
    this = case_of(tiny("GPTNeoX", SIZES | {"intermediate_size": 48}, rotary_pct=0.25))
    moved = reordered(this.checkpoint, by_head())
    assert this.error(moved) < this.exact
    put_back(moved, this)
    thirds = torch.cat([units((2, 0, 3, 1)) + 32 * third for third in range(3)])
    wrong = by_head() | {"query_key_value.weight": (0, thirds), "query_key_value.bias": (0, thirds)}
    assert this.error(reordered(this.checkpoint, wrong)) > BROKEN
    for name in by_head():
        rest = {end: order for end, order in by_head().items() if end != name}
        assert this.error(reordered(this.checkpoint, rest)) > BROKEN


# ---- C27: three fused layouts under one name

FALCONS: dict[str, tuple[dict[str, Any], str]] = {
    "by head": ({"multi_query": False}, "(h (c f + c* f + v)) residual*"),
    "one key": ({"multi_query": True}, "(q c f + c* f + v) residual*"),
    "groups": ({"new_decoder_architecture": True, "num_kv_heads": 2}, "(kv (q c f + c* f + v)) residual*"),
    "groups, one norm": (
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "(kv (q c f + c* f + v)) residual*",
    ),
}


@pytest.mark.parametrize("kind", FALCONS)
def test_c27_the_flags_of_falcon_choose_its_layout(kind: str) -> None:
    options, layout = FALCONS[kind]
    this = case_of(tiny("Falcon", FALCON, **options))
    assert str(this.spec.tensors["h.0.self_attention.query_key_value.weight"].layout) == layout
    g = random_alignment(this.spec, 2, {"h", "kv", "q", "ffn"})
    moved = g(this.checkpoint)
    assert this.error(moved, g) < this.exact
    put_back(moved, this, "heads,ffn")
    exactly(this)


# ---- C28: fused projections of unequal parts


def test_c28_parts_of_phi3_are_those_of_its_heads_and_are_stored_fused(tmp_path: Path) -> None:
    this = case_of(tiny("Phi3"))
    assert this.checkpoint.info(f"{ATTENTION.format(l=0)}qkv_proj.weight").shape == (64, 32)
    assert this.checkpoint.info("model.layers.0.mlp.gate_up_proj.weight").shape == (96, 32)
    queries, keys = units((3, 2, 0, 1)), units((1, 0))
    neurons = torch.randperm(48, generator=torch.Generator().manual_seed(5))
    orders = {
        "qkv_proj.weight": (0, torch.cat([queries, 32 + keys, 48 + keys])), "o_proj.weight": (1, queries),
        "gate_up_proj.weight": (0, torch.cat([neurons, 48 + neurons])), "down_proj.weight": (1, neurons),
    }  # fmt: skip
    moved = reordered(this.checkpoint, orders)
    assert this.error(moved) < this.exact
    put_back(moved, this, "heads,ffn", ffn="permutation")
    folder = api.match(moved, this.checkpoint, axes="heads,ffn")(moved).save(tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        name: this.checkpoint.info(name).shape for name in this.checkpoint
    }


# ---- C29: sinks, interleaved gates


def test_c29_sinks_move_with_heads_and_gate_and_up_in_turns() -> None:
    this = case_of(tiny("GptOss", GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}))
    kv, q = (1, 0), (3, 2, 0, 1)
    neurons = torch.randperm(48, generator=torch.Generator().manual_seed(5))
    experts, turns = torch.tensor((2, 0, 1)), (2 * neurons[:, None] + torch.arange(2)).flatten()

    def moved(left: str = "", pairs: torch.Tensor = turns) -> Checkpoint:
        ends = {"sinks": (0, torch.tensor(q)), "router.weight": (0, experts), "router.bias": (0, experts)}
        rest = {end: order for end, order in ends.items() if end != left}
        out = reordered(grouped(this.checkpoint, kv, q), rest)
        inside = {"gate_up_proj": (-1, pairs), "gate_up_proj_bias": (-1, pairs), "down_proj": (1, neurons)}
        out = reordered(out, {f"experts.{part}": order for part, order in inside.items()})
        return reordered(out, {f"experts.{part}": (0, experts) for part in (*inside, "down_proj_bias")})

    assert this.error(moved()) < this.exact
    put_back(moved(), this, "heads,ffn,experts", ffn="permutation", e="permutation")
    for left in ("sinks", "router.weight", "router.bias"):
        assert this.error(moved(left)) > BROKEN
    assert this.error(moved(pairs=torch.cat([neurons, 48 + neurons]))) > BROKEN  # as if they were halves


# ---- C32: groups of query heads


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma"])
def test_c32_query_heads_move_with_their_key(kind: str) -> None:
    this = case_of(tiny(kind))
    moved = grouped(this.checkpoint)
    assert this.error(moved) < this.exact
    put_back(moved, this)
    wrong = grouped(this.checkpoint, q=(2, 1, 0, 3))
    assert this.error(wrong) > BROKEN
    found = api.match(wrong, this.checkpoint, axes="heads")  # there is none that leads back
    assert not same(found(wrong), this.checkpoint)
    assert api.prove(wrong, found).exact.equal


# ---- C33: pairs of rotary dimensions


@pytest.mark.parametrize("kind", ["Llama", "GPTJ"])
def test_c33_only_pairs_are_turned(kind: str) -> None:
    """Half-split in Llama, neighbours in GPT-J: what is found is a phase and a scale of each pair, for q and for k."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 8}
    a, b = (tiny(kind, GROUPED if kind == "Llama" else sizes, seed) for seed in (0, 1))
    found = api.match(a, b, axes="attention")
    planes = [g for i, g in found.elements.items() if i.axis == "c"]
    assert len(planes) == 2
    assert all(Rotary().contains(g, 1e-9) for g in planes)
    assert not {"qk", "p"} & {i.axis for i in found.elements}
    assert api.prove(a, found).exact.equal
    this, first = case_of(a), "0.self_attn." if kind == "Llama" else "0.attn."
    permuted, mixed = torch.randperm(8, generator=torch.Generator().manual_seed(3)), torch.arange(8)
    for order in (permuted, mixed.flip(0)):
        heads = {f"{first}{name}_proj.weight": (0, order) for name in "qk"}
        rows = {end: (0, torch.cat([order + 8 * h for h in range(4 if kind == "GPTJ" or "q_" in end else 2)]))
                for end in heads}  # fmt: skip
        assert this.error(reordered(a, rows)) > BROKEN


# ---- C34: partly rotary heads


@pytest.mark.parametrize(
    ("kind", "options", "planes"), [("GPTNeoX", {"rotary_pct": 0.25}, 1), ("Phi3", {"partial_rotary_factor": 0.5}, 2)]
)
def test_c34_what_is_not_turned_takes_any_map(kind: str, options: dict[str, Any], planes: int) -> None:
    a = tiny(kind, GROUPED if kind == "Phi3" else SIZES | {"intermediate_size": 48}, **options)
    this = case_of(a)
    assert (this.spec.sizes["f"], this.spec.sizes["p"]) == (planes, 8 - 2 * planes)
    for axes in ({"p"}, {"c"}, {"p", "c"}):
        exactly(this, axes)
    moved = random_alignment(this.spec, 4, {"p", "c"})(a)
    back = api.match(moved, a, axes="attention")(moved)
    for name in a:
        torch.testing.assert_close(back[name], a[name], rtol=1e-5, atol=1e-6)


# ---- C36: one norm of queries, and of keys, over all heads; norms behind the blocks


def test_c36_norms_over_all_heads_move_with_them() -> None:
    this = case_of(tiny("Olmo2"))
    assert this.checkpoint.info(f"{ATTENTION.format(l=0)}q_norm.weight").shape == (32,)
    assert this.checkpoint.info(f"{ATTENTION.format(l=0)}k_norm.weight").shape == (16,)
    moved = grouped(this.checkpoint)
    assert this.error(moved) < this.exact
    put_back(moved, this)
    kept = {name: this.checkpoint[name] for name in moved if name.endswith("q_norm.weight")}
    assert this.error(moved.replace(tensors={**moved, **kept})) > BROKEN
    assert this.spec.axes["c"].group == Sign()  # no scale of a head


@pytest.mark.parametrize("kind", ["Olmo2", "Gemma2", "Gemma3"])
def test_c36_the_stream_behind_norms_of_branches_is_not_rotated(kind: str) -> None:
    this = case_of(tiny(kind))
    exactly(this, {"residual"})
    gains = [name for name in this.checkpoint if "post_feedforward_layernorm" in name]
    assert left_behind(this, random_alignment(this.spec, 1, {"residual"}), gains) > BROKEN
    other = tiny(kind, seed=1)
    with pytest.raises(OptionError, match="'orthogonal' is no part of what may act on axis 'residual'"):
        api.match(this.checkpoint, other, groups={"residual": "orthogonal"})
    with pytest.raises(SymmetryError, match="no declared pre-norm residual stream"):
        canonical(Model.of(this.checkpoint), ("untie", "fold_norms"))


# ---- C37: slopes of ALiBi


@pytest.mark.parametrize("kind", ["Bloom", "Mpt"])
def test_c37_heads_with_slopes_stay_and_all_else_is_matched(kind: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_head": 4, "n_layer": 2} if kind == "Bloom" else {
        "vocab_size": 64, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}  # fmt: skip
    a, b = (tiny(kind, sizes, seed) for seed in (0, 1))
    with pytest.raises(OptionError, match=r"has no such axis, so that there is nothing to match; it has qk, v, ffn"):
        api.match(a, b, axes="heads")
    found = api.match(a, b, axes="all")
    assert {i.axis for i in found.elements} >= {"qk", "v", "ffn"}
    assert api.prove(a, found).exact.equal
    if kind == "Bloom":
        heads = {**by_head(), "self_attention.dense.weight": by_head()["attention.dense.weight"]}
        assert case_of(a).error(reordered(a, heads)) > BROKEN


# ---- C40, C41: values, and biases


def test_c40_one_map_of_values_for_a_group_in_all_of_its_blocks() -> None:
    this = case_of(tiny("Llama"))
    rng = torch.Generator().manual_seed(6)
    maps = torch.eye(8, dtype=torch.float64) + 0.3 * torch.randn(2, 2, 8, 8, generator=rng, dtype=torch.float64)
    tensors, forgotten = dict(this.checkpoint), dict(this.checkpoint)
    for layer in range(2):
        v, o = (f"{ATTENTION.format(l=layer)}{name}_proj.weight" for name in "vo")
        tensors[v] = (maps[layer] @ tensors[v].unflatten(0, (2, 8))).flatten(0, 1)
        back = torch.linalg.inv(maps[layer]).repeat_interleave(2, 0)  # two query heads read each
        tensors[o] = torch.einsum("ohv,hvw->ohw", tensors[o].unflatten(1, (4, 8)), back).flatten(1)
        forgotten[v] = tensors[v]
    moved = this.checkpoint.replace(tensors=tensors)
    assert this.error(moved) < this.exact * 100  # of what float64 makes of inverses
    assert this.error(this.checkpoint.replace(tensors=forgotten)) > BROKEN
    found = api.match(moved, this.checkpoint, axes="v", groups={"v": "invertible"})
    assert {i.axis for i in found.elements} == {"v"}
    for name, tensor in found(moved).items():
        torch.testing.assert_close(tensor, this.checkpoint[name], rtol=1e-5, atol=1e-5)


def test_c41_biases_of_queries_keys_and_values_move_with_heads() -> None:
    this = case_of(tiny("Qwen2"))
    moved = grouped(this.checkpoint)
    assert this.error(moved) < this.exact
    put_back(moved, this)
    for bias in ("q_proj.bias", "k_proj.bias", "v_proj.bias"):
        kept = {name: this.checkpoint[name] for name in moved if name.endswith(bias)}
        assert this.error(moved.replace(tensors={**moved, **kept})) > BROKEN
    exactly(this, {"v"})
    g = random_alignment(this.spec, 1, {"v"})
    assert left_behind(this, g, [name for name in this.checkpoint if name.endswith("v_proj.bias")]) > BROKEN


# ---- C45, C46: scales of neurons


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_c45_neurons_of_opt_are_rescaled_behind_relu_only(act: str) -> None:
    a, b = (tiny("OPT", SIZES | {"ffn_dim": 48}, seed, activation_function=act) for seed in (0, 1))
    this = case_of(a)
    scale = torch.linspace(0.5, 2, 48, dtype=torch.float64)
    for sign in (1, -1):
        tensors = dict(a)
        for name in a:
            if "fc1" in name:
                tensors[name] = torch.einsum("f...,f->f...", tensors[name], sign * scale)
            elif "fc2.weight" in name:
                tensors[name] = tensors[name] / (sign * scale)
        changed = this.error(a.replace(tensors=tensors))
        assert (changed < this.exact) if act == "relu" and sign == 1 else (changed > BROKEN)
    found = [g for i, g in api.match(a, b, axes="ffn").elements.items() if i.axis == "ffn"]
    assert all(PositiveMonomial().contains(g, 1e-9) for g in found)
    assert all(isinstance(g, Monomial) and g.reorders_only == (act == "gelu") for g in found)


def test_c46_up_is_rescaled_and_the_gate_is_not() -> None:
    a, b = (tiny("Llama", seed=seed) for seed in (0, 1))
    this = case_of(a)
    scale = torch.linspace(-2, 2, 48, dtype=torch.float64)
    down = {n: t / scale for n, t in a.items() if n.endswith("down_proj.weight")}
    up = {n: t * scale[:, None] for n, t in a.items() if n.endswith("up_proj.weight")}
    gate = {n: t * scale[:, None] for n, t in a.items() if n.endswith("gate_proj.weight")}
    assert this.error(a.replace(tensors={**a, **up, **down})) < this.exact
    assert this.error(a.replace(tensors={**a, **gate, **down})) > BROKEN
    assert this.error(reordered(a, {"gate_proj.weight": (0, torch.arange(48).flip(0))})) > BROKEN
    found = api.match(a, b, axes="ffn")
    moved = found(a)
    for (layer,), g in ((i.index, g) for i, g in found.elements.items()):
        assert SignedMonomial().contains(g, 1e-9)
        assert isinstance(g, Monomial)
        assert not bool((g.scale == 1).all())  # type: ignore[union-attr]
        name = f"model.layers.{layer}.mlp.gate_proj.weight"
        assert torch.equal(moved[name], a[name][g.index])


# ---- C48, C49: what norms do with the stream


def test_c48_offsets_of_gemma_are_folded_as_one_and_more() -> None:
    this = case_of(tiny("Gemma"))
    assert api.prove(this.checkpoint, replace(Alignment(this.spec, {}), frame=("untie", "fold_norms"))).exact.equal
    folded = canonical(Model.of(this.checkpoint), ("untie", "fold_norms"))
    gain = this.checkpoint["model.layers.0.input_layernorm.weight"]
    name = f"{ATTENTION.format(l=0)}q_proj.weight"
    torch.testing.assert_close(folded.checkpoint[name], this.checkpoint[name] * (1 + gain), rtol=1e-15, atol=0)
    assert not bool(folded.checkpoint["model.layers.0.input_layernorm.weight"].any())


@pytest.mark.parametrize("kind", ["OPT", "Llama"])
def test_c49_a_mean_is_subtracted_where_the_norm_subtracts_it(kind: str, tmp_path: Path) -> None:
    this = case_of(tiny(kind, SIZES | {"ffn_dim": 48} if kind == "OPT" else GROUPED, tie_word_embeddings=False))
    home = canonical(Model.of(this.checkpoint), ROTATABLE)
    embedding = next(name for name in this.checkpoint if "embed_tokens" in name)
    centred = home.checkpoint[embedding].mean(-1).abs().max() < 1e-12
    assert bool(centred) == (kind == "OPT")
    generic = Orthogonal().random(32, (), torch.Generator().manual_seed(0))
    g = Alignment(home.spec, {Instance("residual", ()): generic}, frame=ROTATABLE)
    kept = api.verify(this.checkpoint, g(this.checkpoint), g).worst
    assert (kept > BROKEN) if kind == "OPT" else (kept < this.exact)
    about = replace(random_alignment(home.spec, 3, {"residual"}), frame=ROTATABLE)
    assert api.prove(this.checkpoint, about).exact.worst < this.exact


# ---- C50: rotations in half precision


def test_c50_a_deep_llama_is_rounded_once() -> None:
    source = tiny("Llama", num_hidden_layers=8).to(torch.bfloat16)
    spec = canonical(Model.of(source), ROTATABLE).spec
    g = replace(random_alignment(spec, 3), frame=ROTATABLE)
    moved, exact = g(source), g(source.to(torch.float64))
    unit = torch.finfo(torch.bfloat16).eps
    for name in moved:
        assert moved[name].dtype == torch.bfloat16
        torch.testing.assert_close(moved[name].double(), exact[name], rtol=unit / 2 * 1.001, atol=1e-7)
    proof = api.prove(source, g)
    assert proof.exact.equal
    assert 1e-5 < proof.rounding < 1e-1
    home, back = g.in_frame(source), g.inverse()(moved)
    for name in home:
        at_most = 4 * unit * float(home[name].double().abs().max())
        torch.testing.assert_close(back[name].double(), home[name].double(), rtol=0, atol=at_most)

"""Mixtures of experts: what broke other tools, and the right behaviour. C30: stacks in memory, single tensors in files.
C54: experts have no order, and neither have their neurons."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from command import done
from contract.tiny import MIXTURE, MODELS, QWEN_MIXTURE, case, moving, of
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures import resolve
from symfuse.errors import IncompatibleError, SpecError, SymmetryError
from symfuse.groups import Permutation, Signed
from symfuse.groups.monomial import Monomial
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.merging import Merged
from symfuse.model import Model
from symfuse.modules import live
from symfuse.rewriting import canonical
from symfuse.spec import Instance

BROKEN = 1e-3
PIECES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}
make = of("MixtralForCausalLM", "MixtralConfig", MIXTURE | {"num_local_experts": 4, "num_experts_per_tok": 2})


def saved(checkpoint: Checkpoint, folder: Path) -> Path:
    """As the class itself writes it."""
    live(checkpoint).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> torch.nn.Module:
    """By the class itself, without any complaint."""
    module, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float64, experts_implementation="eager"
    )
    assert not any(report.values()), report
    return module.eval()


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    ids = torch.randint(5, 61, (3, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        a, b = (module(ids).logits for module in (one, other))
    return float((a - b).abs().max() / a.abs().max())


def in_memory(checkpoint: Checkpoint, layers: tuple[int, ...] = (0, 1)) -> Checkpoint:
    """The model under the names in memory, with stacks, in these layers; in others as in its file."""
    module = live(checkpoint)
    ours = {f"model.layers.{layer}." for layer in layers}
    stacked = {n: t for n, t in module.state_dict().items() if any(n.startswith(at) for at in ours)}
    rest = {n: t for n, t in checkpoint.items() if not any(n.startswith(at) for at in ours)}
    return Checkpoint({**stacked, **rest}, checkpoint.config, name="in memory")


# ---- C54


def reordered(checkpoint: Checkpoint, seed: int) -> tuple[Checkpoint, dict[Instance, Tensor]]:
    """Tensor by tensor, without a declaration: the experts of each layer in another order, with the router's rows, and
    the neurons inside each. With the planted orders: of experts, and of the neurons of each as they were numbered."""
    rng = torch.Generator().manual_seed(seed)
    out, planted = dict(checkpoint), {}
    for layer in range(2):
        at = f"model.layers.{layer}.block_sparse_moe."
        experts = torch.tensor([[2, 0, 3, 1], [3, 2, 0, 1]][layer])
        neurons = torch.stack([torch.randperm(29, generator=rng) for _ in range(4)])
        planted |= {Instance("e", (layer,)): experts, Instance("ffn", (layer,)): neurons}
        out[f"{at}gate.weight"] = checkpoint[f"{at}gate.weight"][experts]
        for new, old in enumerate(experts.tolist()):
            for name in ("w1", "w3"):
                tensor = checkpoint[f"{at}experts.{old}.{name}.weight"][neurons[old]]
                out[f"{at}experts.{new}.{name}.weight"] = tensor
            down = checkpoint[f"{at}experts.{old}.w2.weight"][:, neurons[old]]
            out[f"{at}experts.{new}.w2.weight"] = down
    return checkpoint.replace(tensors=out), planted


@cache
def pair() -> tuple[Checkpoint, Checkpoint, dict[Instance, Tensor]]:
    a = make(0)
    return a, *reordered(a, 1)


def test_c54_both_orders_are_found_again_bit_for_bit() -> None:
    a, b, planted = pair()
    assert difference(live(a), live(b)) < 2e-6
    found = api.match(a, b, axes="experts,ffn", groups={"ffn": "permutation"})
    assert found.elements.keys() == planted.keys()
    for instance, element in found.elements.items():
        assert isinstance(element, Monomial)
        assert torch.equal(element.index, planted[instance])
    moved = found(a)
    assert list(moved) == list(found(b))
    assert all(torch.equal(moved[name], b[name]) for name in b)


def test_c54_rescaled_and_flipped_neurons_are_found_too() -> None:
    a, b, _ = pair()
    b = moving(api.declare(b), 3, {"ffn"})(b)
    found = api.match(a, b, axes="experts,ffn")
    left, before = api.relate(found(a), b).distance, api.relate(a, b).distance
    assert left.euclidean < 1e-5 * before.euclidean
    assert api.prove(a, found).exact.equal


def test_c54_experts_alone_are_matched_by_what_they_are() -> None:
    a, _, _ = pair()
    spec = api.declare(a)
    experts = moving(spec, 1, {"e"})
    found = api.match(a, experts(a), axes="experts")
    assert {i.axis for i in found.elements} == {"e"}
    assert all(torch.equal(found(a)[name], experts(a)[name]) for name in a)


def test_c54_the_order_is_kept_where_nobody_asks() -> None:
    a, b, _ = pair()
    assert "e" not in {i.axis for i in api.match(a, b, axes="attention,ffn").elements}


def test_c54_without_the_order_an_average_is_far_from_both() -> None:
    a, b, _ = pair()
    plain = api.relate(api.merge([a, b]), b).distance.euclidean
    aligned = api.relate(
        api.merge([api.match(a, b, axes="all", groups={"residual": "none"})(a), b]), b
    ).distance.euclidean
    assert aligned < 1e-4 * plain


def acting(label: str, axis: str, group: Any) -> Alignment:
    """Random elements of a group, allowed or not, on one axis."""
    spec, rng = case(label).spec, torch.Generator().manual_seed(5)
    instances = [i for i in spec.movable if i.axis == axis]
    return Alignment(spec, {i: group.random(spec.axes[axis].size, spec.batch(axis), rng) for i in instances})


@pytest.mark.parametrize("left", ["gate.weight", "experts.gate_up_proj", "experts.down_proj"])
def test_what_does_not_follow_the_experts_breaks(left: str) -> None:
    this = case("mixtral-lm")
    g = acting("mixtral-lm", "e", Permutation())
    moved = dict(g(this.checkpoint))
    assert this.error(this.checkpoint.replace(tensors=moved)) < this.exact
    kept = {file for name in this.spec.tensors if name.endswith(left) for file in this.spec.stored(name)}
    assert kept
    assert this.error(this.checkpoint.replace(tensors=moved | {name: this.checkpoint[name] for name in kept})) > BROKEN


@pytest.mark.parametrize("axis", ["ffn", "shared_ffn", "dense_ffn"])
def test_a_gate_is_neither_flipped_nor_left_behind(axis: str) -> None:
    this = case("qwen2-mixture-dense")
    g = acting("qwen2-mixture-dense", axis, Signed())
    moved = dict(g(this.checkpoint))
    assert this.error(this.checkpoint.replace(tensors=moved)) < this.exact
    gates = {n for n in moved if n.endswith("gate_proj.weight") and not torch.equal(moved[n], this.checkpoint[n])}
    assert gates
    assert this.error(this.checkpoint.replace(tensors=moved | {n: -moved[n] for n in gates})) > BROKEN
    assert this.error(this.checkpoint.replace(tensors=moved | {n: this.checkpoint[n] for n in gates})) > BROKEN


def test_each_part_has_neurons_of_its_own() -> None:
    spec = case("qwen2-mixture-dense").spec
    found = {axis: spec.axes[axis].size for axis in ("ffn", "shared_ffn", "dense_ffn", "e")}
    assert found == {"ffn": 13, "shared_ffn": 11, "dense_ffn": 29, "e": 9}
    at = {axis: [i.index for i in spec.movable if i.axis == axis] for axis in found}
    assert at == {"ffn": [(1,)], "shared_ffn": [(1,)], "dense_ffn": [(0,)], "e": [(1,)]}


@pytest.mark.parametrize("label", ["mixtral-lm", "qwen2-mixture-dense", "qwen3-mixture-lm", "olmoe-lm"])
def test_norms_fold_into_the_router_and_all_experts(label: str) -> None:
    this = case(label)
    frame = ("untie", "fold_norms")
    folded = canonical(Model.of(this.checkpoint), frame)
    assert set(folded.checkpoint) == set(this.checkpoint)
    assert folded.spec.axes["residual"].group is not None
    assert folded.spec.axes["residual"].group.name == "orthogonal"
    assert this.error(folded.checkpoint) < this.exact
    g = moving(folded.spec, 3)
    assert this.error(Alignment(g.spec, g.elements, frame=frame)(this.checkpoint)) < this.exact


# ---- C30


@pytest.mark.parametrize("label", ["mixtral-lm", "qwen2-mixture-lm", "qwen3-mixture-lm", "olmoe-lm"])
def test_c30_files_of_the_class_are_moved_and_written_under_their_own_names(label: str, tmp_path: Path) -> None:
    source = open_checkpoint(saved(MODELS[label](), tmp_path / "source"))
    assert any(".experts.0." in name for name in source)
    assert not any("gate_up_proj" in name for name in source)
    g = moving(api.declare(source), 1)
    g.save(tmp_path / "alignment.safetensors")
    moved = Alignment.load(tmp_path / "alignment.safetensors")(source)
    moved.save(tmp_path / "moved", max_shard_size="20KB")
    assert set(open_checkpoint(tmp_path / "moved")) == set(source)
    assert difference(loaded(tmp_path / "source"), loaded(tmp_path / "moved")) < 2e-6


@pytest.mark.parametrize("layers", [(0, 1), (1,)], ids=["whole", "mixed"])
def test_c30_stacks_in_a_file_are_the_same_model(layers: tuple[int, ...], tmp_path: Path) -> None:
    a = make(0)
    b = in_memory(a, layers)
    assert not set(a) >= set(b)
    spec = api.declare(b)
    assert {name.split(".")[1] for name in spec.stacks} == {"0", "1"} - {str(layer) for layer in layers}
    assert api.relate(a, b).distance.euclidean == 0
    g = moving(api.declare(a), 2)
    ours, theirs = g(a), g(b)
    assert set(theirs) == set(b)
    for name in api.declare(a).tensors:
        assert torch.equal(Model.of(ours).read(name), Model.of(theirs).read(name)), name
    theirs.save(tmp_path / "moved")
    assert difference(live(a), loaded(tmp_path / "moved")) < 2e-6


@pytest.mark.parametrize("base", [0, 1], ids=["base in pieces", "base in stacks"])
def test_c30_a_merge_has_the_tensors_of_the_base(base: int, tmp_path: Path) -> None:
    a, b = make(0), make(1)
    sources = [a, in_memory(b)]
    for name, source in zip("ab", sources, strict=True):
        source.save(tmp_path / name)
    recipe = {
        "merge_method": "linear", "base_model": str(tmp_path / "ab"[base]),
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in "ab"],
    }  # fmt: skip
    merged = api.merge_recipe(recipe)
    assert set(merged) == set(sources[base])
    expected = api.merge([a, b])
    assert all(torch.equal(Model.of(merged).read(n), Model.of(expected).read(n)) for n in api.declare(a).tensors)
    merged.save(tmp_path / "merged")
    loaded(tmp_path / "merged")


@pytest.mark.parametrize("form", ["pieces", "stacks"])
def test_c30_layers_that_the_base_does_not_have_come_in_its_pieces(form: str, tmp_path: Path) -> None:
    few = MIXTURE | {"num_local_experts": 4, "num_experts_per_tok": 2}
    a, b = make(0), of("MixtralForCausalLM", "MixtralConfig", few | {"num_hidden_layers": 3})(1)
    for name, source in (("a", a), ("b", b if form == "pieces" else in_memory(b, (0, 1, 2)))):
        source.save(tmp_path / name)

    def merged(method: str, *slices: dict[str, list[int]]) -> Checkpoint:
        parts = [
            {"sources": [{"model": str(tmp_path / name), "layer_range": layers} for name, layers in part.items()]}
            for part in slices
        ]
        recipe = {"merge_method": method, "base_model": str(tmp_path / "a"), "slices": parts}
        return api.merge_recipe(recipe | ({"parameters": {"weight": 0.5}} if method == "linear" else {}))

    name = "model.layers.{}.block_sparse_moe.experts.2.w3.weight"
    mean = merged("linear", {"a": [0, 2], "b": [1, 3]})
    assert set(mean) == set(a)
    torch.testing.assert_close(mean[name.format(1)], (a[name.format(1)] + b[name.format(2)]) / 2)
    longer = merged("passthrough", {"a": [0, 2]}, {"b": [2, 3]})
    assert set(longer) == set(b)
    assert torch.equal(longer[name.format(2)], b[name.format(2)])


def test_c30_what_is_merged_is_a_tensor_of_the_file(tmp_path: Path) -> None:
    """Methods look at one tensor: of experts, not at all of a layer together."""
    a, b = (open_checkpoint(saved(make(seed), tmp_path / str(seed))) for seed in (0, 1))
    merged = api.merge([a, b], method="slerp", base=0, parameters={"t": 0.3})
    assert set(merged) == set(a)
    assert isinstance(merged.tensors, Merged)
    assert all(term.stored for output in merged.tensors.outputs.values() for term in output.terms)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    single = [Checkpoint({"w": c[name]}, {"model_type": "none"}, name=c.name) for c in (a, b)]
    torch.testing.assert_close(
        merged[name], api.merge(single, method="slerp", base=0, parameters={"t": 0.3})["w"], rtol=0, atol=1e-14
    )


def test_c30_aligned_files_are_merged_by_a_recipe(tmp_path: Path) -> None:
    a, b, _ = pair()
    for name, source in (("a", a), ("b", b)):
        saved(source, tmp_path / name)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"merge_method: linear\nmodels:\n  - model: {tmp_path / 'a'}\n  - model: {tmp_path / 'b'}\n"
        f"parameters: {{weight: 0.5}}\nalign: {{axes: [attention, ffn, experts], anchor: 2}}\n"
    )
    done("merge", str(recipe), "-o", str(tmp_path / "merged"))
    assert set(open_checkpoint(tmp_path / "merged")) == set(open_checkpoint(tmp_path / "a"))
    assert difference(loaded(tmp_path / "b"), loaded(tmp_path / "merged")) < 1e-5


def test_c30_a_stack_is_moved_once_for_all_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(saved(make(0), tmp_path / "source"))
    moved = moving(api.declare(source), 1)(source)
    count: dict[str, int] = {}
    move = Alignment.move

    def counted(self: Alignment, name: str, tensor: Tensor) -> Tensor:
        count[name] = count.get(name, 0) + 1
        return move(self, name, tensor)

    monkeypatch.setattr(Alignment, "move", counted)
    moved.save(tmp_path / "moved", threads=1)
    assert count.keys() == api.declare(source).tensors.keys()
    first = next(iter(count))  # which the type checker of the tests reads wherever a checkpoint is passed on
    assert {name: n for name, n in count.items() if n > 1 and name != first} == {}


def test_parts_of_stacks_and_of_pieces() -> None:
    """Flat ranges, whatever the file has."""
    a = make(0)
    pieces, whole = Model.of(a), Model.of(in_memory(a))
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    flat = whole.checkpoint[stack].reshape(-1)
    assert torch.equal(torch.cat([block.reshape(-1) for block in pieces.whole.blocks(stack)]), flat)
    cut = whole.as_in(pieces.spec)
    renamed = {f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in (0, 1)}
    assert set(a) - set(cut.checkpoint) == renamed
    for start, stop in ((0, 5), (700, 2100), (29 * 24 - 1, 29 * 24 + 1), (flat.numel() - 3, flat.numel()), (4, 4)):
        assert torch.equal(pieces.whole.part(stack, start, stop), flat[start:stop])
    for name in set(a) - renamed:
        assert torch.equal(cut.checkpoint.part(name, 1, 7), a[name].reshape(-1)[1:7])
        assert torch.equal(cut.checkpoint[name], a[name])
    again = pieces.as_in(whole.spec)
    assert {name for name in again.checkpoint if "experts" in name} == {n for n in whole.checkpoint if "experts" in n}
    assert again.spec.tensors.keys() == whole.spec.tensors.keys()


def test_values_that_are_not_finite_are_named_with_the_piece(tmp_path: Path) -> None:
    a = make(0)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    bad = a.replace(tensors={**a, name: torch.full_like(a[name], torch.nan)})
    with pytest.raises(Exception, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight.* NaN"):
        api.match(bad, make(1), axes="experts,ffn")


def test_a_model_is_evaluated_from_either_form(tmp_path: Path) -> None:
    a = make(0)
    a.save(tmp_path / "pieces")
    in_memory(a).save(tmp_path / "whole")
    ids = torch.randint(5, 61, (3, 12), generator=torch.Generator().manual_seed(3))

    def loss(module: torch.nn.Module) -> float:
        return float(module(ids, labels=ids).loss.detach())

    expected = loss(live(a))
    moved = moving(api.declare(a), 1)(a)
    for source in (a, str(tmp_path / "pieces"), str(tmp_path / "whole"), moved):
        score = api.evaluate(source, loss, dtype=torch.float64)
        assert score.loss == pytest.approx(expected, rel=1e-6)


def test_activations_match_what_can_be_heard() -> None:
    """Experts run in one product of their stacks, which no module is called for."""
    a, b = (of("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN_MIXTURE)(seed) for seed in (0, 1))
    ids = torch.randint(5, 61, (4, 16), generator=torch.Generator().manual_seed(2))
    found = api.match(a, b, axes="ffn,experts", data=[{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    assert {i.axis for i in found.elements} == {"shared_ffn"}
    assert api.prove(a, found).exact.equal


# ---- Configs that do not fit


def refused(checkpoint: Checkpoint, **fields: object) -> Callable[[], object]:
    return lambda: resolve(checkpoint.config | fields, checkpoint, "there").check(
        {name: checkpoint.info(name).shape for name in checkpoint}, "there"
    )


@pytest.mark.parametrize(
    ("label", "fields", "says"),
    [
        ("mixtral-lm", {"num_local_experts": 10**9}, "1000000000 of the pieces of a stack"),
        ("mixtral-lm", {"num_local_experts": 10}, r"missing: .*experts\.9\.w1"),
        ("mixtral-lm", {"num_local_experts": 8}, r"not declared: .*experts\.8\.w1"),
        ("mixtral-lm", {"intermediate_size": 30}, r"experts\.0\.w1\.weight: the stored shape \(29, 24\)"),
        ("qwen2-mixture-lm", {"mlp_only_layers": [2]}, "mlp_only_layers names 2"),
        ("qwen2-mixture-lm", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen2-mixture-lm", {"mlp_only_layers": [0]}, r"missing: model\.layers\.0\.mlp\.gate_proj\.weight"),
        ("olmoe-lm", {"hidden_act": "softmax"}, "activation 'softmax' is not known"),
    ],
)
def test_a_config_that_does_not_belong_to_the_weights(label: str, fields: Mapping[str, object], says: str) -> None:
    with pytest.raises((SpecError, Exception), match=says):
        refused(case(label).checkpoint, **fields)()


def test_mixtures_that_differ_are_not_merged() -> None:
    other = of("MixtralForCausalLM", "MixtralConfig", MIXTURE | {"num_local_experts": 5, "num_experts_per_tok": 2})(1)
    with pytest.raises(IncompatibleError, match="numbers of experts differ: 4 and 5"):
        api.merge([make(0), other])
    routed = make(1)
    with pytest.raises(IncompatibleError, match="num_experts_per_tok: 2 and 3"):
        api.merge([make(0), routed.replace(config=routed.config | {"num_experts_per_tok": 3})])


def test_an_adapter_of_single_experts_is_not_transported_in_part(tmp_path: Path) -> None:
    a = make(0)
    alignment = moving(api.declare(a), 1)
    factors = {}
    for at in ("self_attn.q_proj", "block_sparse_moe.experts.2.w1"):
        rows, columns = a[f"model.layers.0.{at}.weight"].shape
        key = f"base_model.model.model.layers.0.{at}.lora_"
        factors |= {f"{key}A.weight": torch.ones(2, columns), f"{key}B.weight": torch.ones(rows, 2)}
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "w1"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SymmetryError, match=r"single experts \(.*experts\.2\.w1\.weight\)"):
        api.transport(folder, alignment, base=a)


def test_moments_of_a_mixture_have_the_names_of_its_class(tmp_path: Path) -> None:
    """Gradients, which first moments are averages of, of the stacks and of the router under its name in memory."""
    a = make(0)
    alignment = replace(random_alignment(api.declare(a), 3, ["e", "ffn", "kv", "q", "residual"]), shifts={})
    ids = torch.randint(5, 61, (3, 12), generator=torch.Generator().manual_seed(3))

    def gradients(checkpoint: Checkpoint) -> dict[str, Tensor]:
        module = live(checkpoint)
        module(ids, labels=ids).loss.backward()
        return {f"{name}.exp_avg": p.grad for name, p in module.named_parameters() if p.grad is not None}

    save_file(gradients(a), tmp_path / "moments.safetensors")
    moved = api.transport(tmp_path / "moments.safetensors", alignment, base=a).tensors
    for name, gradient in gradients(alignment(a)).items():
        torch.testing.assert_close(moved[name], gradient, rtol=1e-4, atol=1e-6)

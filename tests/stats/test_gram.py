"""Gram matrices of the inputs of linear maps: against sums over examples run one by one, without padding and hooks of
ours; their memory; and what becomes of them under an alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from contract.tiny import MODELS, real
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymmetryError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.live import names_in_memory
from symfuse.model import Model
from symfuse.model.undeclared import undeclared
from symfuse.stats.gram import gram_matrices
from symfuse.stats.statistics import Statistics
from symfuse.transporting import transport
from symfuse.transporting.statistics import transported_statistics
from symfuse.verification import random_inputs

Batch = dict[str, Tensor]
LENGTHS = [(9, 5, 7), (4, 11)]
KINDS = ["bert-sequence", "gpt2-lm", "llama-biased"]


def batches(lengths: Sequence[Sequence[int]] = LENGTHS, seed: int = 0) -> list[Batch]:
    """Batches of texts of these lengths, padded on the right."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for group in lengths:
        mask = torch.stack([torch.arange(max(group)) < length for length in group]).long()
        ids = torch.randint(3, 61, mask.shape, generator=rng)
        out.append({"input_ids": ids * mask, "attention_mask": mask, "labels": torch.zeros(len(group)).long()})
    return out


def one_by_one(given: Sequence[Batch]) -> list[Batch]:
    """Each text in a batch of its own, without its padding."""
    out = []
    for batch in given:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            out.append({"input_ids": ids[mask.bool()][None], "attention_mask": torch.ones(1, int(mask.sum()))})
    return out


def reference(module: nn.Module, texts: Sequence[Batch]) -> dict[str, list[Tensor]]:
    """What each linear map reads, [positions, width], by the name of its weight in memory."""
    heard: dict[str, list[Tensor]] = {}
    handles = []
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":

            def hook(_: Any, args: Any, __: Any, name: str = f"{path}.weight") -> None:
                heard.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))

            handles.append(part.register_forward_hook(hook))
    with torch.no_grad():
        for text in texts:
            module(**text)
    for handle in handles:
        handle.remove()
    return heard


def collect(checkpoint: Checkpoint, given: Sequence[Batch], **options: Any) -> Statistics:
    return gram_matrices(real(checkpoint), given, Model.of(checkpoint).spec.tensors, **options)


def in_memory(module: Any, name: str) -> str:
    names = dict(module.named_parameters(remove_duplicate=False))
    on_disk = names_in_memory(module)  # where they have other names (ViT)
    both = (name, f"{getattr(module, 'base_model_prefix', '')}.{name}")
    return next(one for given in both for one in (given, on_disk.get(given, "")) if one in names)


@pytest.mark.parametrize("label", KINDS)
def test_gram_matrices_are_sums_over_positions_of_examples(label: str) -> None:
    checkpoint, data = MODELS[label](), batches()
    module, found = real(checkpoint), collect(checkpoint, data)
    expected = reference(module, one_by_one(data))
    tolerance = 1e-5 if label.startswith("llama") else 1e-12  # whose norms are computed in float32
    for name, one in found.inputs.items():
        x = torch.cat(expected[in_memory(module, name)])
        weight = checkpoint[Model.of(checkpoint).spec.file_name(name)]
        assert weight.shape[one.dim] == x.shape[1]
        assert one.positions == len(x)
        of = found.of(name)
        assert of is not None
        assert_close(of.read("gram"), x.T @ x, rtol=tolerance, atol=tolerance * len(x))
        assert_close(of.read("sum"), x.sum(0), rtol=tolerance, atol=tolerance * len(x))
    linear = {in_memory(module, name) for name in found.inputs}
    tied = {"lm_head.weight"} if label == "gpt2-lm" else set()
    assert linear == expected.keys() - tied  # all of them but a head that is the embedding
    assert found.count == 5


@pytest.mark.parametrize("label", KINDS)
def test_padding_must_not_count_and_batches_are_not_averaged(label: str) -> None:
    """Traps of published code: both give something else."""
    checkpoint, data = MODELS[label](), batches()
    right = collect(checkpoint, data)
    padded = collect(checkpoint, data, keep=lambda batch: torch.ones_like(batch["attention_mask"]))
    parts = [collect(checkpoint, [batch]) for batch in data]
    for name in right.inputs:
        one, other, *each = (s.of(name) for s in (right, padded, *parts))
        assert one is not None and other is not None  # noqa: PT018
        mean = one.read("gram") / one.values["positions"]
        by_batch = torch.stack([s.read("gram") / s.values["positions"] for s in each if s is not None]).mean(0)
        assert not torch.allclose(by_batch, mean, rtol=1e-3)
        if right.inputs[name].positions != 5:  # of each text one position is pooled
            assert other.values["positions"] > one.values["positions"]
            assert not torch.allclose(other.read("gram"), one.read("gram"), rtol=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.permutations([9, 5, 7, 4, 11, 6]), st.integers(1, 5))
def test_how_examples_are_batched_does_not_matter(lengths: Sequence[int], cut: int) -> None:
    checkpoint = MODELS["bert-sequence"]()
    data = batches([lengths[:cut], lengths[cut:]])
    both, alone = (collect(checkpoint, d) for d in (data, one_by_one(data)))
    assert both.inputs == alone.inputs
    for name in both.tensors:
        assert_close(both.read(name), alone.read(name), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("bert-sequence", {"query": 3, "dense": 1}),
        ("gpt2-lm", {"c_attn": 1, "c_proj": 1}),
        ("llama-biased", {"q_proj": 3, "gate_proj": 2, "down_proj": 1}),
    ],
)
def test_maps_that_read_one_input_share_one_gram(label: str, names: Mapping[str, int]) -> None:
    found = collect(MODELS[label](), batches())
    sharing: dict[str, int] = {}
    for one in found.inputs.values():
        sharing[one.entry] = sharing.get(one.entry, 0) + 1
    for part, count in names.items():
        assert {n for entry, n in sharing.items() if entry.endswith(f"{part}.weight") and "layer" in entry} <= {count}
        assert any(entry.endswith(f"{part}.weight") for entry in sharing)
    assert len(found.tensors) == 2 * len(sharing)


def test_memory_bounds_the_sums_and_groups_go_to_files(tmp_path: Path) -> None:
    checkpoint, data, done = MODELS["gpt2-lm"](), batches(), []
    whole = collect(checkpoint, data)
    memory = 8 * 29 * 30  # the widest alone
    few = collect(checkpoint, data, memory=memory, scratch=tmp_path, progress=lambda *now: done.append(now))
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) <= memory + 1000
    assert done == [(i + 1, 2 * len(files)) for i in range(2 * len(files))]
    assert few.inputs == whole.inputs
    assert few.count == whole.count == 5
    for name in whole.tensors:
        assert torch.equal(few.read(name), whole.read(name))
    with pytest.raises(OptionError, match=r"Gram matrix of what .*c_proj.weight reads takes 0.0 MB"):
        collect(checkpoint, data, memory=memory - 1)


class Stack(nn.Module):
    """Linear maps, one after the other; the first as often as `times`."""

    def __init__(self, *sizes: int, times: int = 1) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(a, b, dtype=torch.float64) for a, b in pairwise(sizes))
        self.times = times

    def forward(self, src: Tensor) -> Tensor:
        for _ in range(self.times - 1):
            src = self.parts[0](src)
        for part in self.parts:
            src = part(src)
        return src


def test_float32_is_summed_up_in_float64() -> None:
    """Over many batches the rounding stays that of one product."""
    torch.manual_seed(0)
    data = [{"src": 100 + torch.randn(5, 11, 7)} for _ in range(300)]
    found = gram_matrices(Stack(7, 3).float(), data, ["parts.0.weight"])
    x = torch.cat([batch["src"].reshape(-1, 7) for batch in data]).double()
    assert found.read("parts.0.weight.gram").dtype == torch.float32
    assert_close(found.read("parts.0.weight.gram").double(), x.T @ x, rtol=2e-7, atol=0)


def test_a_wide_input_is_multiplied_in_blocks() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 600, dtype=torch.float64)
    found = gram_matrices(Stack(600, 2), [{"src": x[:30]}, {"src": x[30:]}], ["parts.0.weight"])
    assert_close(found.read("parts.0.weight.gram"), x.T @ x, rtol=1e-12, atol=1e-10)


def test_a_layer_that_is_run_several_times_counts_each_time() -> None:
    torch.manual_seed(0)
    module, x = Stack(5, 5, 3, times=3), torch.randn(7, 5, dtype=torch.float64)
    found = gram_matrices(module, [{"src": x}], ["parts.0.weight", "parts.1.weight"])
    reads = [x]
    for _ in range(3):
        reads.append(module.parts[0](reads[-1]).detach())
    every = torch.cat(reads[:3])
    assert found.inputs["parts.0.weight"].positions == 21
    assert_close(found.read("parts.0.weight.gram"), every.T @ every)
    assert_close(found.read("parts.1.weight.gram"), reads[3].T @ reads[3])


def test_maps_that_read_one_tensor_in_some_batches_only_are_an_error() -> None:
    class Odd(Stack):
        def forward(self, src: Tensor) -> Tensor:
            return self.parts[0](src) + self.parts[1](src if len(src) < 5 else src + 1)

    module, names = Odd(3, 3, 3), ["parts.0.weight", "parts.1.weight"]
    assert len(gram_matrices(module, [{"src": torch.ones(4, 3)}], names).tensors) == 2
    with pytest.raises(OptionError, match=r"parts.1.weight and parts.0.weight read one tensor in the first batch"):
        gram_matrices(module, [{"src": torch.ones(4, 3)}, {"src": torch.ones(5, 3)}], names)


@pytest.mark.parametrize("label", ["torch-relu-post", "vit-classification", "deberta-sequence", "deberta-choice"])
def test_other_kinds_of_models(label: str) -> None:
    """Against one batch run as it is: fused attention of torch, images, attention with relative positions, choices."""
    checkpoint, rng = MODELS[label](), torch.Generator().manual_seed(0)
    data: Batch = {"src": torch.randn(3, 7, 20, generator=rng, dtype=torch.float64)}
    if label.startswith("vit"):
        data = {"pixel_values": torch.randn(2, 3, 12, 20, generator=rng, dtype=torch.float64)}
    elif label.startswith("deberta"):
        shape = (2, 3, 9) if label.endswith("choice") else (3, 9)
        data = {"input_ids": torch.randint(3, 61, shape, generator=rng), "attention_mask": torch.ones(shape)}
    found = collect(checkpoint, [data])
    module = real(checkpoint)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    expected = reference(module, [data])
    torch.backends.mha.set_fastpath_enabled(before)
    if label.startswith("torch"):
        expected["layers.0.self_attn.in_proj_weight"] = [data["src"].reshape(-1, 20)]
    names = [name for name in found.inputs if in_memory(module, name) in expected]
    assert len(names) >= 5
    for name in names:
        x = expected[in_memory(module, name)][0]  # of DeBERTa the second are relative positions
        assert_close(found.read(f"{found.inputs[name].entry}.gram"), x.T @ x, rtol=1e-6, atol=1e-6)


def test_relative_positions_are_no_tokens_however_many_there_are() -> None:
    """Also where a batch of one text is as long as the table of relative positions."""
    checkpoint = MODELS["deberta-sequence"]()
    module: Any = real(checkpoint)
    length = 2 * module.deberta.encoder.layer[0].attention.self.pos_ebd_size
    data = batches([(length, length)])
    expected = reference(module, one_by_one(data))
    for found in (collect(checkpoint, data), collect(checkpoint, one_by_one(data))):
        for part in ("query_proj", "key_proj"):
            name = f"encoder.layer.1.attention.self.{part}.weight"
            calls = expected[in_memory(module, name)]
            assert [len(call) for call in calls] == [length] * 4  # a text, positions, a text, positions
            x = torch.cat(calls[::2])
            assert found.inputs[name].positions == 2 * length
            assert_close(found.read(f"{found.inputs[name].entry}.gram"), x.T @ x, rtol=1e-6, atol=1e-6)


def test_what_is_of_no_batch_counts_where_nothing_else_is_read() -> None:
    class Positions(Stack):
        """The first map reads a table too, the second nothing else. The model may take one example only."""

        one = False

        def forward(self, src: Tensor) -> Tensor:
            table = torch.ones(1, 3, dtype=torch.float64)
            out = self.parts[0](table) + self.parts[0](src) + self.parts[0](table) + self.parts[1](table)
            if self.one and len(src) > 1:
                raise ValueError("one example only")
            return out

    torch.manual_seed(0)
    module, names = Positions(3, 3, 3), ["parts.0.weight", "parts.1.weight"]
    for one in (False, True):
        module.one = one
        data = [{"src": torch.randn(1, 3, dtype=torch.float64)} for _ in range(5)]
        found = gram_matrices(module, data, names)
        x = torch.cat([batch["src"] for batch in data])
        assert_close(found.read("parts.0.weight.gram"), x.T @ x)
        assert_close(found.read("parts.1.weight.gram"), torch.full((3, 3), 5.0, dtype=torch.float64))
        assert [found.inputs[name].positions for name in names] == [5, 5]


def test_a_family_without_a_declaration() -> None:
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=61, hidden_size=12, num_layers=2, attention_types=[[["global"], 2]], num_heads=3,
        max_position_embeddings=37, intermediate_size=17, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    module = transformers.GPTNeoForCausalLM(config).double().eval()
    spec = undeclared(open_checkpoint(module))
    found = gram_matrices(module, batches(), spec.tensors)
    expected = reference(module, one_by_one(batches()))
    assert set(found.inputs) == expected.keys() - {"lm_head.weight"}
    for name, one in found.inputs.items():
        x = torch.cat(expected[name])
        assert_close(found.read(f"{one.entry}.gram"), x.T @ x, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_collected() -> None:
    checkpoint = MODELS["bert-sequence"]()
    with pytest.raises(OptionError, match="no batches"):
        collect(checkpoint, [])
    nothing = [{**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])} for batch in batches()]
    with pytest.raises(OptionError, match="no positions are left"):
        collect(checkpoint, nothing, keep=lambda batch: batch["attention_mask"])
    module: Any = real(checkpoint)
    module.bert.encoder.layer[0].output.dense.bias.data[3] = float("inf")
    with pytest.raises(CheckpointError, match=r"what encoder.layer.1.attention.self.query.weight reads is not finite"):
        gram_matrices(module, batches(), Model.of(checkpoint).spec.tensors)
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_too_few_positions_are_told() -> None:
    (note,) = collect(MODELS["bert-sequence"](), batches([(4, 5)])).notes()
    assert "encoder.layer.0.attention.self.query.weight (9 positions, 20 inputs)" in note
    assert collect(MODELS["bert-sequence"](), batches([(20, 20)] * 20)).notes() == ()


@pytest.mark.parametrize("label", KINDS)
def test_the_gram_matrices_of_the_aligned_model_are_the_moved_ones(label: str) -> None:
    """All symmetries at once: rotations inside heads, permuted groups of heads, scales, translated value biases."""
    checkpoint, data = MODELS[label](), batches()
    alignment = random_alignment(Model.of(checkpoint).spec, 3, largest=True)
    assert alignment.shifts
    ours = collect(checkpoint, data)
    moved, expected = transported_statistics(ours, alignment, checkpoint), collect(alignment(checkpoint), data)
    tolerance = 1e-5 if label.startswith("llama") else 1e-10
    assert moved.inputs == expected.inputs
    for name in expected.tensors:
        scale = expected.tensors[name].abs().max().item()
        assert_close(moved.read(name), expected.read(name), rtol=0, atol=tolerance * scale)
    wrong = {
        "nothing": ours,
        "the inverse": transported_statistics(ours, alignment.inverse()),
        "no translations": transported_statistics(ours, replace(alignment, shifts={})),
    }
    for other in wrong.values():
        errors = [
            ((other.read(n) - expected.read(n)).abs().max() / expected.read(n).abs().max()).item()
            for n in expected.tensors
        ]
        assert max(errors) > 1e-2
    assert moved.provenance["model"]["sha256"] is None


def test_moved_gram_matrices_are_written_by_the_verb(tmp_path: Path) -> None:
    checkpoint = MODELS["bert-sequence"]()
    alignment = random_alignment(Model.of(checkpoint).spec, 3, largest=True)
    ours = replace(collect(checkpoint, batches()), provenance={"model": checkpoint.lineage()})
    ours.save(tmp_path / "grams")
    alignment(checkpoint).save(tmp_path / "moved", extra={"alignment.symfuse": alignment.to_bytes()})
    out = transport(tmp_path / "grams", tmp_path / "moved")
    assert out.kind == "statistics"
    found = Statistics.load(out.save(tmp_path / "out"))
    found.require(Model.of(open_checkpoint(tmp_path / "moved")))
    with pytest.raises(IncompatibleError, match="taken from another model"):
        found.require(Model.of(checkpoint))
    expected = transported_statistics(ours, alignment)
    for name in expected.tensors:
        assert_close(found.read(name), expected.read(name).float(), rtol=1e-5, atol=1e-4)


def test_frames_and_variants_are_refused(tmp_path: Path) -> None:
    checkpoint = MODELS["gpt2-lm"]()
    ours, alignment = collect(checkpoint, batches()), random_alignment(Model.of(checkpoint).spec, 3)
    with pytest.raises(SymmetryError, match=r"rewrites the model first \(untie, fold_norms\).*from the aligned model"):
        transported_statistics(ours, replace(alignment, frame=("untie", "fold_norms")))
    with pytest.raises(SymmetryError, match="inexact"):
        transported_statistics(ours, replace(alignment, variants=("flat_heads",)))
    with pytest.raises(IncompatibleError, match=r"the gram of .* is of shape \[20\], expected none for this alignment"):
        transported_statistics(ours, random_alignment(Model.of(MODELS["bert-sequence"]()).spec, 3))


EVERY = [
    "sceptr", "bert-mlm", "distilbert-sequence", "electra-sequence", "deberta-sequence", "deberta-token", "nomic",
    "modernbert-mlm", "vit-classification", "beit-classification", "dinov2-gated", "clip", "siglip", "gptj-lm",
    "falcon-grouped", "bloom-lm", "mpt-lm", "opt-lm", "phi3-partly", "qwen3-lm", "gemma3-lm", "mixtral-lm", "olmoe-lm",
    "t5-token", "bart-sequence",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("label", EVERY)
def test_gram_matrices_of_every_kind_of_family_move_along(label: str) -> None:
    checkpoint = MODELS[label]()
    data = [random_inputs(real(checkpoint), checkpoint.config)]
    alignment = random_alignment(Model.of(checkpoint).spec, 3, largest=True)
    moved = transported_statistics(collect(checkpoint, data), alignment, checkpoint)
    expected = collect(alignment(checkpoint), data)
    assert moved.inputs == expected.inputs
    for name in expected.tensors:
        assert_close(moved.read(name), expected.read(name), rtol=0, atol=1e-5 * expected.read(name).abs().max().item())

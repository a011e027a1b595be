"""The diagonal Fisher information, against autograd on each example by itself in float64; and the ways to get it wrong
that published code has: gradients of batch means, padding, tied weights counted apart."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from symfuse.errors import CheckpointError, DataError, OptionError
from symfuse.stats.fisher import Batch, fisher_diagonal

ROWS, LENGTH = 5, 7
SMALL = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29}
TEXT = SMALL | {"vocab_size": 61, "max_position_embeddings": 37, "num_labels": 3}
GPT2 = {"vocab_size": 61, "n_embd": 20, "n_layer": 2, "n_head": 4, "n_positions": 37}
LLAMA = TEXT | {"num_key_value_heads": 2, "head_dim": 6}
VIT = SMALL | {"image_size": 12, "patch_size": 4, "num_labels": 3}
T5 = {"vocab_size": 61, "d_model": 20, "d_kv": 5, "d_ff": 29, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
DEBERTA = TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
MIXTURE = LLAMA | {"num_local_experts": 3, "experts_implementation": "eager"}


def texts(labels: str, seed: int = 0) -> dict[str, Tensor]:
    """Texts with a token that occurs three times in one of them, padded to different lengths."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 61, (ROWS, LENGTH), generator=rng)
    ids[0, 2:5] = 9
    mask = torch.ones_like(ids)
    for row in range(1, ROWS):
        mask[row, LENGTH - row :] = 0
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if labels == "text":
        return batch | {"labels": torch.randint(0, 3, (ROWS,), generator=rng)}
    if labels == "token":
        return batch | {"labels": torch.randint(0, 3, (ROWS, LENGTH), generator=rng).masked_fill(mask == 0, -100)}
    return batch | {"labels": batch["input_ids"].masked_fill(mask == 0, -100)}


def images() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randn(ROWS, 3, 12, 12, generator=rng, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (ROWS,), generator=rng)}


def loss(module: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    if module.config.is_encoder_decoder:  # type: ignore[union-attr]
        inputs["decoder_input_ids"] = batch["input_ids"]
    logits, labels = module(**inputs).logits, batch["labels"]
    if "CausalLM" in type(module).__name__ or "LMHead" in type(module).__name__:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


# name: class, config, what is labelled, whether all examples of a batch can be taken together
CASES: Mapping[str, tuple[str, dict[str, Any], str, bool]] = {
    "bert": ("BertForSequenceClassification", TEXT, "text", True),
    "bert-tokens": ("BertForTokenClassification", TEXT, "token", True),
    "gpt2": ("GPT2LMHeadModel", GPT2, "all", True),
    "llama": ("LlamaForCausalLM", LLAMA, "all", True),
    "gemma": ("Gemma2ForCausalLM", LLAMA, "all", True),
    "albert": ("AlbertForSequenceClassification", TEXT | {"embedding_size": 11}, "text", True),
    "vit": ("ViTForImageClassification", VIT, "image", True),
    "t5": ("T5ForConditionalGeneration", T5, "all", True),
    "deberta": ("DebertaV2ForSequenceClassification", DEBERTA, "text", False),
    "mixtral": ("MixtralForCausalLM", MIXTURE, "all", False),
}
FAST = ("bert", "gpt2")


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model in float64 with every number random, gains and biases too, and a batch for it."""
    kind, options, labels, _ = CASES[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    module = cls(cls.config_class(**options, pad_token_id=0) if labels != "image" else cls.config_class(**options))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.double().eval(), images() if labels == "image" else texts(labels)


def rows(batch: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: t[start:stop] for name, t in batch.items()}


def one_by_one(
    module: nn.Module, batch: Mapping[str, Tensor], loss: Callable[[nn.Module, Batch], Tensor] = loss
) -> dict[str, Tensor]:
    """The definition: the mean over rows of the squared gradient."""
    names = dict(module.named_parameters())
    count = len(next(iter(batch.values())))
    total = {name: torch.zeros_like(p) for name, p in names.items()}
    for row in range(count):
        found = torch.autograd.grad(loss(module, rows(batch, row, row + 1)), [*names.values()], allow_unused=True)
        for name, gradient in zip(names, found, strict=True):
            total[name] += 0 if gradient is None else gradient.square() / count
    return {name: t.float() for name, t in total.items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        scale = 1e-12 * tensor.max().item()  # of what cancels
        assert_close(found[name], tensor, rtol=1e-6, atol=scale + 1e-25, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]
)  # fmt: skip
def test_it_is_what_autograd_says_of_each_example(name: str) -> None:
    module, batch = build(name)
    found = fisher_diagonal(module, [rows(batch, 0, 4), rows(batch, 4, 5)], loss)
    assert found.count == ROWS
    assert all(t.dtype == torch.float32 for t in found.tensors.values())
    assert not found.notes if CASES[name][3] else "split into examples" in found.notes[0]
    assert_same(found.tensors, one_by_one(module, batch))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, ROWS), min_size=1, max_size=ROWS))
def test_it_does_not_depend_on_the_size_of_batches(sizes: list[int]) -> None:
    """That of the gradient of a batch's mean does."""
    module, batch = CLASSIFIER
    starts = [min(sum(sizes[:i]), ROWS) for i in range(len(sizes))] + [ROWS]
    batches = [rows(batch, a, b) for a, b in pairwise(starts) if b > a]
    found = fisher_diagonal(module, batches, plain_loss)
    assert not found.notes
    assert found.count == ROWS
    assert_same(found.tensors, one_by_one(module, batch, plain_loss))


def test_it_is_not_the_square_of_a_mean() -> None:
    module, batch = CLASSIFIER
    found = fisher_diagonal(module, [batch], plain_loss).tensors
    mean = torch.autograd.grad(plain_loss(module, batch) / ROWS, [*module.parameters()])
    for tensor, gradient in zip(found.values(), mean, strict=True):
        assert tensor.sum() > 1.5 * gradient.square().sum()


def test_batches_count_by_their_examples() -> None:
    module, batch = CLASSIFIER
    parts = [one_by_one(module, rows(batch, *part), plain_loss) for part in ((0, 4), (4, 5))]
    weighted = {name: 0.8 * t + 0.2 * parts[1][name] for name, t in parts[0].items()}
    batches = [rows(batch, 0, 4), rows(batch, 4, 5)]
    found = fisher_diagonal(module, iter(batches), plain_loss).tensors
    for name, tensor in weighted.items():
        assert_close(found[name], tensor, rtol=1e-5, atol=1e-12)


def plain_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["labels"], reduction="sum")


def classifier() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    return nn.Sequential(*layers).double().eval(), {"x": x, "labels": torch.randint(0, 3, (ROWS,))}


CLASSIFIER = classifier()


def test_padding_counts_for_nothing() -> None:
    module, batch = build("bert")
    wider = {name: F.pad(t, (0, 3)) if t.ndim == 2 else t for name, t in batch.items()}
    found, again = (fisher_diagonal(module, [b], loss).tensors for b in (batch, wider))
    for name, tensor in found.items():
        assert_close(again[name], tensor, rtol=1e-5, atol=1e-10 * tensor.max().item() + 1e-25)
    unseen = [row for row in range(61) if row not in batch["input_ids"][batch["attention_mask"] == 1]]
    assert not found["bert.embeddings.word_embeddings.weight"][unseen].any()


class Tied(nn.Module):
    """An embedding that is also the head, called as one linear map and, for a scale, in another place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)).cumsum(1))


def tied_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["ids"]).flatten(0, 1), batch["ids"].roll(1, 1).flatten(), reduction="sum")


def test_what_is_tied_is_added_before_it_is_squared() -> None:
    torch.manual_seed(0)
    module = Tied().double()
    batch = {"ids": torch.tensor([[3, 3, 3, 5], [1, 0, 2, 3], [9, 10, 9, 0]])}
    found = fisher_diagonal(module, [batch], tied_loss)
    assert not found.notes
    assert_same(found.tensors, one_by_one(module, batch, tied_loss))


@pytest.mark.parametrize("repeat", [1, 4])
def test_a_repeated_token_is_added_up_before_it_is_squared(repeat: int) -> None:
    module = nn.Embedding(5, 3).double()
    batch = {"ids": torch.full((2, repeat), 2)}
    found = fisher_diagonal(module, [batch], lambda module, batch: module(batch["ids"]).sum()).tensors["weight"]
    assert_close(found[2], torch.full((3,), float(repeat**2)))
    assert found.sum() == 3 * repeat**2


class Misleading(nn.Module):
    """Linear maps of tensors that are not of the examples of a batch, although their shapes may look like it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "transposed":
            return self.inner(x.transpose(0, 1)).transpose(0, 1)
        if self.how == "of weights":
            return torch.bmm(x, (self.inner.weight.T @ self.inner.weight).repeat(len(x), 1, 1)) + self.inner.bias.sum()
        chosen = x[..., 0] > 0  # as a router does
        out = x.new_zeros(*x.shape[:2], 3)
        out[chosen] = self.inner(x[chosen])
        return out


def sine_loss(module: nn.Module, batch: Batch) -> Tensor:
    return (module(batch["x"]) * batch["x"][..., :1]).sin().sum()


@pytest.mark.parametrize("how", ["transposed", "of weights", "by content"])
def test_what_does_not_split_is_taken_one_by_one(how: str) -> None:
    """Of the first two examples each has as many rows chosen as the other; of later ones one has all."""
    torch.manual_seed(0)
    module = Misleading(how).double()
    x = torch.randn(6, 2, 6, dtype=torch.float64)
    x[..., 0] = torch.tensor([[1, -1], [1, -1], [1, 1], [1, 1], [-1, -1], [-1, -1]]) * x[..., 0].abs()
    found = fisher_diagonal(module, [{"x": x[:2]}, {"x": x[2:]}], sine_loss)
    (note,) = found.notes
    assert "one by one: " in note
    assert_same(found.tensors, one_by_one(module, {"x": x}, sine_loss))


def test_a_path_that_later_examples_take_alone_is_seen() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.shape[1] < 5 else self.inner(x) + self.other(x.transpose(0, 1)).transpose(0, 1)

    torch.manual_seed(0)
    module = Sometimes().double()
    short, long = (torch.randn(5, length, 6, dtype=torch.float64) for length in (3, 5))
    found = fisher_diagonal(module, [{"x": short}, {"x": long}], sine_loss)
    assert found.notes == ("examples taken one by one: in some batches the model took another path than at first",)
    each = [one_by_one(module, {"x": x}, sine_loss) for x in (short, long)]
    assert_same(found.tensors, {name: (t + each[1][name]) / 2 for name, t in each[0].items()})


def test_a_choice_of_parameters() -> None:
    module, batch = build("bert")
    name = "bert.encoder.layer.1.output.dense.weight"
    found = fisher_diagonal(module, [batch], loss, parameters=[name])
    assert_same(found.tensors, {name: one_by_one(module, batch)[name]})


def test_the_module_is_left_as_it_was() -> None:
    module, batch = classifier()
    module.train()
    module[2].eval()
    module[0].weight.requires_grad_(False)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    fisher_diagonal(module, [batch], plain_loss)
    with pytest.raises(ZeroDivisionError):
        fisher_diagonal(module, [batch], lambda module, batch: plain_loss(module, batch) / (1 // 0))
    assert [part.training for part in module] == [True, True, False, True, True]
    assert [p.requires_grad for p in module.parameters()] == [False, True, True, True, True, True]
    assert all(p.grad is None for p in module.parameters())
    assert not any(part._forward_hooks or part._backward_hooks for part in module.modules())
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize("how", ["copies", "refused"])
def test_nothing_of_a_batch_outlives_it(how: str) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.inner = nn.Parameter(torch.randn(1, 3, 6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.places
            outputs.append(weakref.ref(y))
            return self.inner(y if how == "copies" else y[y[..., 0] < torch.inf])

    outputs: list[weakref.ref[Tensor]] = []
    gc.disable()
    try:
        fisher_diagonal(Placed(), [{"x": torch.randn(4, 3, 6)}], lambda module, batch: module(batch["x"]).sin().sum())
        assert len(outputs) == (4 if how == "copies" else 5)
        assert not any(output() is not None for output in outputs)
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [1, 3])
def test_half_precision_is_squared_in_single(size: int) -> None:
    """2⁻²⁶ is nothing in float16."""
    module = nn.Linear(6, 3, dtype=torch.float16)
    batch = {"x": torch.full((size, 6), 2.0**-13, dtype=torch.float16)}
    found = fisher_diagonal(module, [batch], lambda module, batch: module(batch["x"]).sum())
    assert not found.notes
    assert_close(found.tensors["weight"], torch.full((3, 6), 2.0**-26), rtol=0, atol=0)


def test_progress_is_told_the_examples_done() -> None:
    module, batch = CLASSIFIER
    told: list[int] = []
    fisher_diagonal(module, [rows(batch, 0, 3), rows(batch, 3, 5)], plain_loss, progress=told.append)
    assert told == [3, 5]


@pytest.mark.parametrize(
    ("batches", "what"),
    [
        ([], "no examples"),
        ([{"x": torch.zeros(0, 6).double(), "labels": torch.zeros(0).long()}], "no examples"),
        ([{}], "a field or more"),
        ([{"x": torch.zeros(2, 6).double(), "labels": torch.zeros(3).long()}], "'x': 2, 'labels': 3"),
        ([{"x": torch.zeros(2, 6).double(), "labels": torch.tensor(1)}], "'labels': None"),
    ],
)
def test_batches_that_are_none(batches: list[Batch], what: str) -> None:
    with pytest.raises(DataError, match=what):
        fisher_diagonal(CLASSIFIER[0], batches, plain_loss)


def test_numbers_that_are_not_finite() -> None:
    module, batch = classifier()
    bad = batch["x"].clone()
    bad[3, 1] = torch.nan
    with pytest.raises(CheckpointError, match=r"the loss of batch 1 is nan.*labels.*float64"):
        fisher_diagonal(module, [batch, batch | {"x": bad}], plain_loss)
    steep = nn.Sequential(nn.Linear(6, 3))
    data = [{"x": torch.ones(3, 6) * scale} for scale in (1, 1e30)]
    with pytest.raises(CheckpointError, match=r"'0.weight': its squared gradient is not finite in batch 1.*float64"):
        fisher_diagonal(steep, data, lambda module, batch: module(batch["x"]).sum())


def test_a_loss_that_is_none() -> None:
    module, batch = CLASSIFIER
    with pytest.raises(OptionError, match=r"a tensor \[5\]"):
        fisher_diagonal(module, [batch], lambda module, batch: module(batch["x"]).sum(1).expand(5))
    with pytest.raises(OptionError, match="requires_grad=False"):
        fisher_diagonal(module, [batch], lambda module, batch: plain_loss(module, batch).detach())


@pytest.mark.parametrize("names", [["0.weights"], []])
def test_parameters_that_are_none(names: list[str]) -> None:
    module, batch = CLASSIFIER
    with pytest.raises(OptionError, match="parameters: "):
        fisher_diagonal(module, [batch], plain_loss, parameters=names)

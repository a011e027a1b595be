"""One module is each of the models in turn only if they differ in their weights alone (C107)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import symfuse
from evaluation.task_cases import CASES, task
from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation import barrier, measure
from symfuse.io import Checkpoint

IDS = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(0))
SIZES: Mapping[str, Any] = {
    "vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 34,
    "max_position_embeddings": 12, "initializer_range": 0.4,
}  # fmt: skip


def bert(folder: Path, seed: int, **options: Any) -> Path:
    torch.manual_seed(seed)
    transformers.BertForMaskedLM(transformers.BertConfig(**{**SIZES, **options})).save_pretrained(folder)
    return folder


def token_loss(module: Any) -> Tensor:
    logits: Tensor = module(input_ids=IDS).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def nothing(module: nn.Module) -> float:
    return 0.0


def ends(a: Any, b: Any, loss: Any = token_loss, **options: Any) -> tuple[float, float]:
    return symfuse.barrier(a, b, loss, points=3, refine=0, **options).curves["none"].ends


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("layer_norm_eps", 0.5, "layer_norm_eps: 0.5 and 1e-12"),
        ("hidden_act", "relu", "hidden_act: 'relu' and 'gelu'"),
        ("num_attention_heads", 6, "num_attention_heads: 6 and 3"),
        ("num_hidden_layers", 3, "num_hidden_layers: 3 and 2"),
    ],
)
def test_configs_that_compute_something_else_are_refused(tmp_path: Path, field: str, value: Any, said: str) -> None:
    a, b = bert(tmp_path / "a", 0), bert(tmp_path / "b", 1, **{field: value})
    for source, anchor in ((a, b), (b, a)):
        with pytest.raises(IncompatibleError, match=field):
            ends(source, anchor)
    with pytest.raises(IncompatibleError, match=said):
        ends(a, b)
    module: Any = transformers.BertForMaskedLM.from_pretrained(b)
    with pytest.raises(IncompatibleError, match=field):  # a live one beside a folder
        ends(a, module)
    with pytest.raises(IncompatibleError, match=field):
        symfuse.landscape({"a": a, "b": b, "c": bert(tmp_path / "c", 2)}, token_loss, steps=2)


def test_another_family_is_refused(tmp_path: Path) -> None:
    config = transformers.ElectraConfig(**SIZES, embedding_size=24)
    transformers.ElectraForMaskedLM(config).save_pretrained(tmp_path / "e")
    with pytest.raises(IncompatibleError, match="one is a electra, the other a bert"):
        ends(bert(tmp_path / "a", 0), tmp_path / "e")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_tied_and_an_untied_model_are_both_themselves(tmp_path: Path, order: tuple[int, int]) -> None:
    folders = [bert(tmp_path / "tied", 0), bert(tmp_path / "own", 1, tie_word_embeddings=False)]
    modules: list[Any] = [transformers.BertForMaskedLM.from_pretrained(folder) for folder in folders]
    losses = [symfuse.evaluate(folder, token_loss).loss for folder in folders]
    a, b = order
    assert ends(folders[a], folders[b]) == (losses[b], losses[a])
    assert ends(modules[a], modules[b]) == (losses[b], losses[a])
    assert losses[0] != losses[1]


def test_a_live_pair_whose_module_ties_what_a_folder_has_apart_is_refused(tmp_path: Path) -> None:
    own = bert(tmp_path / "own", 1, tie_word_embeddings=False)
    tied: Any = transformers.BertForMaskedLM.from_pretrained(bert(tmp_path / "tied", 0))
    with pytest.raises(IncompatibleError, match="are one weight in BertForMaskedLM, and here they differ"):
        ends(own, tied)


class Power(nn.Module):
    def __init__(self, value: float, exponent: int, depth: int = 1) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))
        self.exponent = exponent
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1 * depth)) for _ in range(depth)])

    def forward(self) -> Tensor:
        return self.value**self.exponent


def power(module: nn.Module) -> Tensor:
    out: Tensor = module().sum()
    return out


def test_live_modules_with_other_settings_or_parts_are_refused_unless_someone_builds_the_module() -> None:
    with pytest.raises(IncompatibleError, match=r"Power\.exponent is 3 in one and 2 in the other.*build"):
        ends(Power(2.0, 2), Power(3.0, 3), power)
    with pytest.raises(IncompatibleError, match="layers"):
        ends(Power(2.0, 2), Power(3.0, 2, depth=2), power)
    with pytest.raises(IncompatibleError, match=r"eps=0\.1"):
        ends(nn.LayerNorm(3), nn.LayerNorm(3, eps=0.1), nothing)
    assert ends(Power(2.0, 2), Power(3.0, 2), power) == (9.0, 4.0)
    dropped = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    assert ends(*dropped, nothing) == (0.0, 0.0)


class Part(nn.Module):
    """A linear map, of the same weights whatever else it has."""

    def __init__(self, seed: int, mask: float = 1.0, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([mask, 1.0]), persistent=False)
        for key, value in attributes.items():
            setattr(self, key, value)


def times(factor: float) -> Any:
    return lambda x: factor * x


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "functions of C": ({"act": torch.relu}, {"act": torch.tanh}, r"Part\.act is .*tanh in one and .*relu in the other"),
    "functions": ({"act": nn.functional.relu}, {"act": nn.functional.silu}, r"Part\.act is silu in one and relu"),
    "code": ({"act": lambda x: x + 1}, {"act": lambda x: x + 2}, r"Part\.act is another"),
    "closures": ({"act": times(1.0)}, {"act": times(2.0)}, r"Part\.act is another"),
    "methods of C": ({"act": torch.Tensor.relu}, {"act": torch.Tensor.tanh}, r"Part\.act"),
    "lists": ({"shifts": [1, 2]}, {"shifts": [1, 3]}, r"Part\.shifts is \[1, 3\] in one and \[1, 2\] in the other"),
    "dictionaries": ({"how": {"a": [1]}}, {"how": {"a": [2]}}, r"Part\.how is \{'a': \[2\]\} in one"),
    "buffers": ({"mask": 1.0}, {"mask": 0.0}, r"Part\.mask is another"),
    "tensors": ({"t": torch.tensor(1)}, {"t": torch.tensor(2)}, r"Part\.t is another"),
    "dtypes": ({"kind": torch.float32}, {"kind": torch.float16}, r"Part\.kind is torch\.float16 in one"),
    "absent": ({}, {"act": torch.relu}, r"Part\.act is .*relu in one and absent in the other"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_live_modules_that_differ_beside_their_weights_are_refused(what: str) -> None:
    ours, theirs, said = OTHERS[what]
    with pytest.raises(IncompatibleError, match=said):
        ends(Part(0, **ours), Part(1, **theirs), nothing)
    assert ends(Part(0, **ours), Part(1, **ours), nothing) == (0.0, 0.0)


def test_layers_of_torch_with_another_activation_are_refused() -> None:
    layers = [nn.TransformerEncoderLayer(4, 2, 8, activation=act) for act in (torch.tanh, torch.sin, torch.tanh)]
    with pytest.raises(IncompatibleError, match=r"TransformerEncoderLayer\.activation is .*sin in one and .*tanh"):
        ends(layers[0], layers[1], nothing)
    assert ends(layers[0], layers[2], nothing) == (0.0, 0.0)


def test_what_does_not_decide_what_live_modules_compute_may_differ() -> None:
    def part(seed: int, **attributes: Any) -> Any:
        made: Any = Part(seed, **attributes)
        made.again = [made.linear, made.linear.weight]  # weights, in a list
        made.turn = lambda x: made.linear(x) + made.linear.bias  # and in a closure
        made.own = made.forward
        return made

    one = part(0, scale=1, sizes=[1, 2], _cache=torch.zeros(2), dropout=0.1, pretrained_cfg={"tag": "a"})
    other = part(1, scale=1.0, sizes=(1, 2), _cache=torch.ones(3), dropout=0.2, pretrained_cfg={"tag": "b"})
    assert ends(one, other, nothing) == (0.0, 0.0)
    half, single = Part(0).half(), Part(1)
    assert ends(half, single, nothing) == (0.0, 0.0)


def test_layers_that_the_module_has_not_are_refused_and_heads_of_other_tasks_are_not(tmp_path: Path) -> None:
    folder = bert(tmp_path / "deep", 0, num_hidden_layers=3)
    stored = dict(symfuse.open(folder))
    shallow = Checkpoint(stored, {**symfuse.open(folder).config, "num_hidden_layers": 2}, name="shallow")

    def build(checkpoint: Checkpoint) -> nn.Module:
        return transformers.BertForMaskedLM(transformers.BertConfig.from_dict(dict(checkpoint.config)))

    with pytest.raises(IncompatibleError, match=r"shallow: a BertForMaskedLM of this depth has no place for bert\."):
        symfuse.evaluate(shallow, token_loss, build=build)

    def body(checkpoint: Checkpoint) -> nn.Module:
        config = transformers.BertConfig.from_dict(dict(checkpoint.config))
        return transformers.BertModel(config, add_pooling_layer=False)

    states = lambda module: module(input_ids=IDS).last_hidden_state.square().mean()  # noqa: E731
    assert ends(bert(tmp_path / "a", 0), bert(tmp_path / "b", 1), states, build=body)[0] > 0


def test_labels_in_another_order_are_refused_by_the_tasks_that_have_labels(tmp_path: Path) -> None:
    checkpoint = CASES["sequence"][1]()
    labels = checkpoint.config["label2id"]
    other = {name: len(labels) - 1 - number for name, number in labels.items()}
    swapped = checkpoint.replace(config={**checkpoint.config, "label2id": other}, name="swapped")
    with pytest.raises(IncompatibleError, match=r"the label '\S+' is number \d in one, \d in the other"):
        ends(swapped, checkpoint, task("sequence"))
    assert ends(swapped, checkpoint, nothing) == (0.0, 0.0)  # a loss that may not look at them


class Tripled(transformers.BertForMaskedLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = 3 * out.logits
        return out


def test_a_class_of_ones_own_is_aligned_and_evaluated_as_itself() -> None:
    a, b = (Tripled(transformers.BertConfig(**SIZES)) for seed in (0, 1) if torch.manual_seed(seed))
    found = symfuse.barrier(a, b, token_loss, {"ffn": symfuse.match(a, b, axes="ffn")}, points=3, refine=0)
    expected = measure(token_loss, b).loss, measure(token_loss, a).loss
    assert found.curves["none"].ends == expected
    torch.testing.assert_close(found.curves["ffn"].ends, expected, rtol=1e-6, atol=0)


def test_aligned_models_are_as_exact_as_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    a, b = bert(tmp_path / "a", 0), bert(tmp_path / "b", 1)
    turned = symfuse.match(a, b, axes="attention")
    curves = symfuse.barrier(a, b, token_loss, {"turned": turned}, points=3, refine=0, dtype=torch.float64).curves
    torch.testing.assert_close(curves["turned"].ends, curves["none"].ends, rtol=1e-14, atol=0)


def test_distances_of_half_precision_modules_are_those_of_their_numbers() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(64, 64).half(), nn.Linear(64, 64).half()
    with torch.no_grad():
        one.weight.fill_(300.0), one.bias.copy_(other.bias)
        other.weight.fill_(-300.0)
    curve = barrier({"none": (one, other)}, nothing, points=3, refine=0).curves["none"]
    assert curve.distance == 600.0 * 64
    with torch.no_grad():
        one.weight.copy_(other.weight.float() + 1.0 + 1e-3 * torch.rand(64, 64))
    true = (one.weight.double() - other.weight.double()).norm().item()
    assert barrier({"none": (one, other)}, nothing, points=3, refine=0).curves["none"].distance == (
        pytest.approx(true, rel=1e-12)
    )


def test_how_many_batches_were_seen_in_training_is_no_weight() -> None:
    torch.manual_seed(0)
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    one(torch.randn(4, 3)), other(torch.randn(4, 3)), other(torch.randn(4, 3))
    loss = lambda module: module(torch.ones(2, 3)).square().sum()  # noqa: E731
    assert ends(one, other, loss) == (measure(loss, other).loss, measure(loss, one).loss)


class Stem(nn.Module):
    """Batch normalisation behind a linear map, whose means shift as its weights do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.out = nn.Linear(7, 3)
        for _ in range(40):
            self(x=3 + torch.randn(64, 5))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.norm(self.linear(x))))
        return out


def test_c57_batch_statistics_are_taken_anew_at_inner_points_only_and_only_if_there_are_data() -> None:
    a, b, held = Stem(0), Stem(1), 3 + torch.randn(256, 5, generator=torch.Generator().manual_seed(0))
    seen = {}

    @torch.no_grad()
    def loss(module: nn.Module) -> float:
        stem: Any = module
        assert not any(part.training for part in module.modules())
        inside = stem.norm(stem.linear(held))
        seen[float(stem.out.weight[0, 0].detach())] = inside.mean(0), inside.std(0)
        return float(module(held).square().mean())

    batches = [{"x": part} for part in held.split(64)]
    plain = barrier({"none": (a, b)}, loss, points=3, refine=0)
    old = seen.copy()
    renewed = barrier({"none": (a, b)}, loss, points=3, refine=0, renew=batches)
    assert plain.curves["none"].ends == renewed.curves["none"].ends == (loss(b), loss(a))
    assert plain.curves["none"].points[1] != renewed.curves["none"].points[1]
    (middle,) = seen.keys() - {float(m.out.weight[0, 0].detach()) for m in (a, b)}
    gain = (a.norm.weight + b.norm.weight) / 2
    torch.testing.assert_close(seen[middle][0], (a.norm.bias + b.norm.bias).detach() / 2, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[middle][1], gain.detach(), rtol=0.02, atol=0)
    assert float((old[middle][1] - gain).detach().abs().max()) > 0.2  # interpolated they are wrong
    assert renewed.to_dict()["batch_statistics"] == "taken anew from 4 batches at inner points"
    assert "batch_statistics" not in plain.to_dict()
    assert a.norm.momentum == 0.1
    with pytest.raises(OptionError, match="no batches to take the statistics"):
        barrier({"none": (a, b)}, loss, points=3, refine=0, renew=[])

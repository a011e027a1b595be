"""Loss barriers: the endpoints are the models, both definitions, fair comparisons (C107, C108), bad input."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import symfuse
from symfuse.alignment import random_alignment
from symfuse.cli.evaluate import say_barrier
from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation import Barrier, Batch, Curve, Point, Score, Task, Totals, WeightSpace, barrier, measure
from symfuse.output import Output


class TokenLoss(Task):
    """Cross entropy of every token against fixed labels, by the model's own logits."""

    name = "masked-lm"
    auto = "AutoModelForMaskedLM"

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        labels = batch["labels"]
        logits = module(input_ids=batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        hits = float((logits.argmax(-1) == labels).sum())
        return Totals(loss, labels.numel(), {"accuracy": hits})


def bert(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=34,
        max_position_embeddings=12, initializer_range=0.4, hidden_dropout_prob=0.5,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def token_loss(teacher: Path) -> TokenLoss:
    """Some random sentences, and what that model would say: it has the least loss."""
    rng = torch.Generator().manual_seed(0)
    module = symfuse.to_module(teacher)
    ids = [torch.randint(0, 31, shape, generator=rng) for shape in ((3, 9), (2, 5), (4, 7))]
    return TokenLoss([{"input_ids": one, "labels": module(one).logits.argmax(-1)} for one in ids])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return bert(root / "a", 0), bert(root / "b", 1)


def test_c107_the_ends_of_the_path_are_the_models_bit_for_bit_and_every_run_is_the_same(
    folders: tuple[Path, Path],
) -> None:
    loss = token_loss(folders[0])
    a, b = map(symfuse.open, folders)
    first, second = (barrier({"none": (a, b)}, loss, points=5, refine=1).curves["none"] for _ in range(2))
    assert first == second
    for folder, point in ((folders[1], first.points[0]), (folders[0], first.points[-1])):
        module: Any = transformers.BertForMaskedLM.from_pretrained(folder).eval()  # with dropout 0.5 at hand
        with torch.no_grad():
            assert loss(module) == point.score
        assert measure(loss, module.train()) == point.score
        assert module.training
    assert first.points[0].score.count == 27 + 10 + 28
    assert 5 < len(first.points) <= 5 + 4


def test_c108_a_planted_copy_has_no_barrier_once_aligned_and_two_trainings_have_their_own_ends(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    loss = token_loss(folders[0])
    a, other = map(symfuse.open, folders)
    plant = random_alignment(symfuse.declare(a), 3, axes=("qk", "v", "ffn"))
    copy = symfuse.open(plant(a).save(tmp_path / "copy"))
    found = symfuse.barrier(copy, a, loss, {"all": symfuse.match(copy, to=a)}, points=5)
    none, aligned = found.curves["none"], found.curves["all"]
    assert none.barrier > 0.05
    assert aligned.barrier < 1e-5  # rounding in float32
    assert aligned.distance < 1e-4 * none.distance
    assert aligned.ends == pytest.approx(none.ends, abs=1e-5)
    assert found.share("all", "none") == aligned.barrier / none.barrier
    seeds = symfuse.barrier(a, other, loss, {"all": symfuse.match(a, to=other)}, points=3, refine=0)
    assert {curve.name: curve.points[0] for curve in seeds.curves.values()} == dict.fromkeys(
        ("none", "all"), seeds.curves["none"].points[0]
    )
    assert seeds.curves["none"].ends[1] == measure(loss, symfuse.to_module(folders[0])).loss
    assert seeds.curves["none"].distance == pytest.approx(symfuse.relate(a, other).distance.euclidean, rel=1e-6)
    assert seeds.task == loss.describe()


class Number(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=torch.float64))


def well(module: nn.Module) -> Tensor:
    """1 - (x - 0.3)^2, highest at 0.3, on top of a slope of 0.5: between 0 and 1 an arch above its chord."""
    x = next(module.parameters())
    return (1 - (x - 0.3) ** 2 + 0.5 * x).sum()


@pytest.mark.parametrize(("refine", "near"), [(0, 0.05), (2, 0.02), (8, 1e-3)])
def test_both_definitions_and_the_place_of_the_maximum_on_a_path_that_is_known(refine: int, near: float) -> None:
    found = barrier({"none": (Number(1.0), Number(0.0))}, well, refine=refine, dtype=torch.float64).curves["none"]
    loss = {x: 1 - (x - 0.3) ** 2 + 0.5 * x for x in (0.0, 0.5, 0.55, 1.0)}
    assert found.ends == (loss[0.0], loss[1.0])
    assert found.peak.at == pytest.approx(0.5, abs=near)  # x(1 - x) above the chord
    assert found.barrier == pytest.approx(0.25, abs=near**2)
    exact = loss[0.55] - (loss[0.0] + loss[1.0]) / 2  # the loss itself is highest at 0.55
    assert found.barrier_over_mean == pytest.approx(exact, abs=0.003)
    assert found.barrier_over_mean <= exact + 1e-12
    assert found.distance == 1.0
    assert [p.at for p in found.points] == sorted({p.at for p in found.points})
    assert {i / 10 for i in range(11)} <= {p.at for p in found.points}


@pytest.mark.parametrize("slope", [0.87, -0.53])
def test_each_definition_is_refined_beside_its_own_maximum(slope: float) -> None:
    """On a slope the loss is highest far from where it is highest above the chord."""
    found = barrier(
        {"none": (Number(1.0), Number(0.0))},
        lambda m: 1 - (next(m.parameters()) - 0.3) ** 2 + slope * next(m.parameters()),
        refine=8,
        dtype=torch.float64,
    ).curves["none"]
    top = 0.3 + slope / 2
    assert found.peak.at == pytest.approx(0.5, abs=1e-3)
    assert found.peak_over_mean.at == pytest.approx(top, abs=1e-3)
    mean = (1 - 0.09 + 1 - 0.49 + slope) / 2
    assert found.barrier_over_mean == pytest.approx(1 - (top - 0.3) ** 2 + slope * top - mean, abs=1e-6)
    assert (found.to_dict()["at"], found.to_dict()["at_over_mean"]) == (found.peak.at, found.peak_over_mean.at)


@pytest.mark.parametrize("refine", [0, 1, 3])
def test_progress_ends_with_as_many_points_as_there_were(refine: int) -> None:
    """One maximum or two, at an end or inside: the number of all points is never too small, and at last right."""
    losses: dict[str, Any] = {
        "two maxima": lambda x: 1 - (x - 0.3) ** 2 + 0.87 * x,
        "one maximum": lambda x: 1 - (x - 0.5) ** 2,
        "sagging": lambda x: (x - 0.4) ** 2,
    }
    for order in (list(losses), list(losses)[::-1]):
        seen: list[tuple[str, float, int]] = []
        modules = {name: (Number(10.0 * i + 1), Number(10.0 * i)) for i, name in enumerate(losses)}

        def loss(module: nn.Module) -> float:
            number, x = divmod(next(module.parameters()).item() + 1e-12, 10)
            return float(losses[list(losses)[int(number)]](x))

        found = barrier(
            {name: modules[name] for name in order}, loss, refine=refine, dtype=torch.float64,
            progress=lambda name, point, total, seen=seen: seen.append((name, point.at, total)),
        )  # fmt: skip
        totals = [total for _, _, total in seen]
        assert totals == sorted(totals, reverse=True)
        assert totals[-1] == len(seen) == sum(len(curve.points) for curve in found.curves.values())
        for name, curve in found.curves.items():
            assert sorted(at for of, at, _ in seen if of == name) == [point.at for point in curve.points]


def curve(*losses: float, dtype: torch.dtype = torch.float64, name: str = "") -> Curve:
    points = (Point(i / (len(losses) - 1), Score(loss)) for i, loss in enumerate(losses))
    return Curve(name, tuple(points), 1.0, dtype)


def test_a_curve_of_unequal_ends() -> None:
    """By hand: at λ = ¼ the chord from 2 (B) to 6 (A) is at 3, at ½ at 4, at ¾ at 5."""
    found = curve(2.0, 4.5, 4.25, 5.25, 6.0)
    assert found.ends == (2.0, 6.0)
    assert [found.excess(point) for point in found.points] == [0.0, 1.5, 0.25, 0.25, 0.0]
    assert (found.barrier, found.peak.at) == (1.5, 0.25)
    assert (found.barrier_over_mean, found.peak_over_mean.at) == (2.0, 1.0)


def test_the_ends_lie_on_the_chord_exactly() -> None:
    """Whatever their losses: a path that sags has a barrier of 0, not of a last digit, and so has a level one."""
    rng = torch.Generator().manual_seed(0)
    for start, end in torch.rand(200, 2, generator=rng, dtype=torch.float64).mul(3).tolist():
        found = curve(start, min(start, end) / 2, end)
        assert [found.excess(found.points[0]), found.excess(found.points[-1])] == [0.0, 0.0]
        assert found.barrier == 0.0
        assert found.peak.at in (0.0, 1.0)
        assert curve(*[start] * 11).barrier == 0.0


def test_a_path_that_sags_has_no_barrier() -> None:
    found = barrier({"none": (Number(1.1), Number(-0.7))}, lambda m: next(m.parameters()).item() ** 2).curves["none"]
    assert found.barrier == 0.0
    assert found.peak.at in (0.0, 1.0)
    assert found.barrier_over_mean == pytest.approx((1.1**2 - 0.7**2) / 2)
    assert found.peak_over_mean.at == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_a_barrier_within_rounding_nothing_can_be_left(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    curves = {
        "above": curve(2.0, 2.0 + 18 * eps, 2.0, dtype=dtype),  # 8 eps of the largest loss are 16 eps
        "within": curve(2.0, 2.0 + 14 * eps, 2.0, dtype=dtype),
        "last digit": curve(-0.3, -0.3 + 1e-16, -0.3, dtype=dtype),
        "level": curve(2.0, 2.0, 2.0, dtype=dtype),
        "g": curve(2.0, 2.5, 2.0, dtype=dtype),
    }
    found = Barrier("a", "b", {"task": "own"}, curves, {"g": tuple(curves)})
    assert curves["last digit"].barrier > 0
    assert found.share("g", "above") == pytest.approx(0.5 / (18 * eps), rel=1e-3)
    assert [found.share("g", base) for base in ("within", "last digit", "level")] == [None] * 3
    assert found.share("g", "g") == 1.0
    assert found.share("level", "g") == 0.0
    assert found.to_dict()["curves"][-1]["left_of"]["last digit"] is None


def test_the_dtype_of_the_evaluation_says_what_rounding_is() -> None:
    pairs = {"none": (Number(1.0), Number(0.0)), "g": (Number(2.0), Number(0.0))}
    shares = {
        dtype: barrier(pairs, lambda m: 1 + 1e-7 * well(m), refine=0, dtype=dtype).share("g", "none")
        for dtype in (torch.float32, torch.float64)
    }
    assert shares[torch.float32] is None
    assert shares[torch.float64] == pytest.approx(4, rel=1e-3)  # x (2 - x) and x (1 - x) above their chords


def test_the_table_says_where_both_maxima_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    curves = {
        "none": curve(2.0, 4.5, 4.25, 5.25, 6.0),
        "sagging": curve(2.0, 2.5, 6.0),
        "level": curve(3.0, 3.0 + 1e-15, 3.0),
    }
    say_barrier(Output(False, False), Barrier("a", "b", {"task": "own"}, curves, {"level": ("none",)}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["none", "1", "6.0000,", "2.0000", "1.5000", "2.0000", "0.25,", "1", "-"] in rows
    assert ["sagging", "1", "6.0000,", "2.0000", "0.0000", "2.0000", "-,", "1", "-"] in rows
    assert ["level", "1", "3.0000,", "3.0000", "0.0000", "0.0000", "-,", "-", "0.0%"] in rows


def test_the_baseline_is_taken_in_both_parametrisations() -> None:
    pairs = {
        "none": (Number(0.0), Number(4.0)),
        "none, folded": (Number(0.0), Number(2.0)),
        "g": (Number(1.0), Number(2.0)),
    }
    found = barrier(
        pairs, lambda m: math.sin(next(m.parameters()).item()), baselines={"g": ("none, folded", "none")}, refine=0
    )
    assert found.share("g", "none") == found.curves["g"].barrier / found.curves["none"].barrier
    assert list(found.to_dict()["curves"][2]["left_of"]) == ["none, folded", "none"]


def test_live_modules_stay_as_they_are_and_an_unrounded_midpoint_is_the_mean() -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double() for _ in range(2))
    before = [{name: tensor.clone() for name, tensor in m.state_dict().items()} for m in (a, b)]
    seen: list[dict[str, Tensor]] = []

    def loss(module: nn.Module) -> float:
        seen.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
        return float(len(seen))

    barrier({"none": (a, b)}, loss, points=3, refine=0, dtype=torch.float64)
    for module, state in zip((a, b), before, strict=True):
        assert module.training
        assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    for name, tensor in seen[1].items():
        torch.testing.assert_close(
            tensor, (before[0][name] + before[1][name]) / 2 if tensor.is_floating_point() else tensor
        )
    assert all(torch.equal(seen[0][name], before[1][name]) for name in seen[0])
    assert all(torch.equal(seen[2][name], before[0][name]) for name in seen[2])


def test_combinations_of_several_models_and_their_gram_matrix() -> None:
    rng = torch.Generator().manual_seed(0)
    states = [{"weight": torch.randn(2, 3, generator=rng), "bias": torch.randn(2, generator=rng)} for _ in range(3)]
    space = WeightSpace(nn.Linear(3, 2), states, ["a", "b", "c"])
    space.set([0.2, 0.3, 0.5])
    for name, weight in space.weights.items():
        expected = sum(c * state[name].double() for c, state in zip((0.2, 0.3, 0.5), states, strict=True))
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)
    steps = torch.stack([torch.cat([(s[n] - states[0][n]).flatten() for n in s]) for s in states[1:]]).double()
    torch.testing.assert_close(space.gram(), steps @ steps.T, rtol=1e-6, atol=1e-6)
    for i, state in enumerate(states):
        space.set([float(i == j) for j in range(3)])
        assert all(torch.equal(weight, state[name]) for name, weight in space.weights.items())


def test_tied_weights_and_missing_prefixes_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=19, n_embd=12, n_layer=1, n_head=2, n_positions=8)
    models = [transformers.GPT2LMHeadModel(config) for _ in range(2)]
    for model, name in zip(models, "ab", strict=True):
        model.transformer.save_pretrained(tmp_path / name)  # without the prefix, and without the tied head

    class Causal(TokenLoss):
        auto = "AutoModelForCausalLM"

    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    loss = Causal([batch])
    a, b = (symfuse.open(tmp_path / name) for name in "ab")
    curve = barrier({"none": (a, b)}, loss, points=3, refine=0).curves["none"]
    assert curve.ends == tuple(measure(loss, model).loss for model in reversed(models))


def test_a_task_whose_head_a_model_lacks_is_refused_by_name(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    inner: Any = symfuse.to_module(folders[0])
    headless = symfuse.open(inner.bert)
    with pytest.raises(IncompatibleError, match=r"BertForMaskedLM has weights that this model lacks: cls\.predictions"):
        barrier({"none": (headless, symfuse.open(folders[1]))}, token_loss(folders[0]))


def test_other_shapes_and_integers_that_differ_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"in_features=3, .* in one and .*in_features=4, "):
        barrier({"none": (nn.Linear(4, 2), nn.Linear(3, 2))}, well)
    a, b = nn.Linear(4, 2), nn.Linear(3, 2)
    with pytest.raises(IncompatibleError, match=r"weight has shape \(2, 3\), expected \(2, 4\)"):
        barrier({"none": (a, b)}, well, build=lambda _: copy.deepcopy(a))
    for number, module in enumerate((a, b := nn.Linear(4, 2))):
        module.register_buffer("order", torch.tensor([number]))
    with pytest.raises(symfuse.SymfuseError, match="order holds integers that differ"):
        barrier({"none": (a, b)}, lambda _: 0.0)


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2)])
def test_a_loss_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match="expected a symfuse Score, or one number"):
        barrier({"none": (Number(0.0), Number(1.0))}, lambda _: value)  # type: ignore[arg-type,return-value]


def test_a_loss_that_is_nan_has_no_barrier_to_report() -> None:
    with pytest.raises(symfuse.SymfuseError, match=r"the loss is nan at λ = 0\.5"):
        barrier(
            {"none": (Number(0.0), Number(1.0))}, lambda m: math.log(1) if next(m.parameters()) != 0.5 else math.nan
        )


def test_options_out_of_range() -> None:
    pair = {"none": (Number(0.0), Number(1.0))}
    with pytest.raises(OptionError, match="3 points at least"):
        barrier(pair, well, points=2)
    with pytest.raises(OptionError, match="needs a pair"):
        barrier({}, well)


def untouched(module: nn.Module) -> float:
    raise AssertionError(f"{module} was measured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 3.5}, "points is 3.5"),
        ({"points": True}, "points is True"),
        ({"refine": 0.5}, "refine is 0.5"),
        ({"loss": None}, "loss is None; expected a function"),
        ({"baselines": {"none": ("nope",)}}, "baselines: there is no curve 'nope'; there are 'none'"),
        ({"baselines": {"x": ("none",)}}, "baselines: there is no curve 'x'"),
        ({"build": lambda _: None}, "build gave NoneType, expected a module"),
        ({"renew": []}, "there are no batches"),
        ({"renew": [{"nope": torch.zeros(4, 3)}]}, r"renew: Normed does not take these batches .*it takes x"),
        ({"renew": [{"x": torch.zeros(4, 2)}]}, "renew: Normed does not take these batches"),
    ],
)
def test_arguments_that_make_no_sense_are_told_before_anything_is_measured(
    options: dict[str, Any], message: str
) -> None:
    arguments = {"loss": untouched} | options
    anything: Any = barrier
    with pytest.raises(OptionError, match=message):
        anything({"none": (Normed(), Normed())}, **arguments)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def test_batches_for_statistics_may_come_one_by_one_and_are_counted_only_if_they_were_used() -> None:
    def loss(module: nn.Module) -> float:
        return sum(float(t.sum()) for t in module.state_dict().values())

    batches = [{"x": torch.arange(12.0).reshape(4, 3) + i} for i in range(5)]
    pair = {"none": (Normed(), Normed())}
    once, listed = (barrier(pair, loss, points=4, refine=1, renew=r) for r in (iter(batches), batches))
    assert once == listed
    assert once.renewed == 5
    assert once.curves["none"].points[1] != once.curves["none"].points[0]
    numbers = barrier({"none": (Number(0.0), Number(1.0))}, well, points=3, refine=0, renew=iter(batches))
    assert numbers.renewed == 0
    assert "batch_statistics" not in numbers.to_dict()
    with pytest.raises(OptionError, match="renew: Normed does not take"):
        barrier(pair, loss, points=3, refine=0, renew=[*batches, {"x": torch.zeros(4, 2)}])
    with pytest.raises(OptionError, match="statistics of these batches are not finite"):
        barrier(pair, loss, points=3, refine=0, renew=[{"x": torch.full((4, 3), torch.nan)}])


def test_an_alignment_that_is_called_as_the_plain_curve(folders: tuple[Path, Path]) -> None:
    a, b = map(symfuse.open, folders)
    for given in (random_alignment(symfuse.declare(a), 0), (a, b)):
        with pytest.raises(OptionError, match="cannot be called 'none'"):
            symfuse.barrier(a, b, untouched, {"none": given})


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = barrier({"none": (Number(0.0), Number(1.0))}, lambda _: Score(torch.rand(1).item()), points=3, refine=0)
    assert torch.equal(torch.rand(3), expected)
    assert len({p.score.loss for p in found.curves["none"].points}) == 1  # the same draws at every point


def test_weights_that_transformers_renames_in_memory_are_found(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=14, image_size=8, patch_size=4
    )
    models = []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        models.append(transformers.ViTForImageClassification(config).eval())
        models[-1].save_pretrained(tmp_path / name)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = symfuse.barrier(
        tmp_path / "a", tmp_path / "b", lambda m: m(pixel_values=pixels).logits.square().sum(), points=3, refine=0
    )
    for end, model in zip(found.curves["none"].ends, reversed(models), strict=True):
        with torch.no_grad():
            assert end == pytest.approx(model(pixel_values=pixels).logits.square().sum().item(), rel=1e-5)

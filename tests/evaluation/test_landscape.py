"""The plane through three models: distances are kept, known surfaces come out, a stopped run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import symfuse
from contract.tiny import TEXT, of
from symfuse.errors import IncompatibleError, OptionError, OutputError
from symfuse.evaluation import Plane, Score, landscape


class Vector(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values, dtype=torch.float64))


# None is as good as another, and the third stands upright above no other.
MODELS = {"a": Vector(1, 0, 0, 2), "b": Vector(3, 1, 0, 2), "c": Vector(2, 2, 5, 1)}


def bowl(module: nn.Module) -> float:
    return next(module.parameters()).square().sum().item()


class Watch:
    """How often `watched` was called, and before which call it is interrupted."""

    calls = 0
    stop = -1


def watched(module: nn.Module) -> float:
    if Watch.calls == Watch.stop:
        raise KeyboardInterrupt
    Watch.calls += 1
    return bowl(module)


def test_the_plane_keeps_all_distances_and_the_loss_is_that_of_the_point() -> None:
    found = landscape(MODELS, bowl, steps=5, margin=0.5, dtype=torch.float64)
    places = torch.tensor(found.plane.corners, dtype=torch.float64)
    vectors = torch.stack([m.value.detach() for m in MODELS.values()])
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(vectors, vectors))
    assert found.plane.corners[0] == (0.0, 0.0)
    assert found.plane.corners[1][1] == 0.0
    assert found.plane.corners[2][1] > 0
    first = (vectors[1] - vectors[0]) / (vectors[1] - vectors[0]).norm()
    rest = vectors[2] - vectors[0]
    second = rest - (rest @ first) * first
    second = second / second.norm()
    for i, y in enumerate(found.ys):
        for j, x in enumerate(found.xs):
            point = vectors[0] + x * first + y * second
            assert found.scores[i][j].loss == pytest.approx((point @ point).item(), rel=1e-12)
            assert found.to_dict()["loss"][i][j] == found.scores[i][j].loss
    assert found.scores[0][-1].loss != pytest.approx(found.scores[-1][0].loss, rel=0.1)  # rows are not columns
    assert [score.loss for score in found.corners] == [bowl(m) for m in MODELS.values()]
    for axis, ticks in enumerate((found.xs, found.ys)):
        low, high = places[:, axis].min().item(), places[:, axis].max().item()
        assert ticks[0] == pytest.approx(low - 0.5 * (high - low))
        assert ticks[-1] == pytest.approx(high + 0.5 * (high - low))


def test_the_metrics_stand_where_the_losses_do() -> None:
    found = landscape(MODELS, lambda m: Score(bowl(m), {"twice": 2 * bowl(m)}, 1), steps=3, margin=0.1)
    document = found.to_dict()
    assert document["metrics"]["twice"] == [[2 * loss for loss in row] for row in document["loss"]]


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "landscape.jsonl"
    monkeypatch.setattr(Watch, "calls", 0)
    monkeypatch.setattr(Watch, "stop", 7)
    with pytest.raises(KeyboardInterrupt):
        landscape(MODELS, watched, steps=3, journal=journal)
    monkeypatch.setattr(Watch, "stop", -1)
    with journal.open("a") as file:
        file.write('[7, {"loss": 1')  # as a kill in the middle of a line leaves it
    seen: list[tuple[int, int]] = []
    found = landscape(MODELS, watched, steps=3, journal=journal, progress=lambda done, of: seen.append((done, of)))
    assert Watch.calls == 3 + 9
    assert seen == [(done, 12) for done in range(1, 13)]
    assert landscape(MODELS, watched, steps=3, journal=journal) == found
    assert Watch.calls == 3 + 9
    assert found == landscape(MODELS, watched, steps=3)


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "landscape.jsonl"
    landscape(MODELS, bowl, steps=2, journal=journal)
    with pytest.raises(OutputError, match="is of other models, data or grid"):
        landscape(MODELS, bowl, steps=3, journal=journal)
    with pytest.raises(OutputError, match="is of other models, data or grid"):
        landscape(MODELS | {"c": Vector(1, 1, 1, 1)}, bowl, steps=2, journal=journal)
    turned = {name: Vector(*model.value.tolist()[::-1]) for name, model in MODELS.items()}
    with pytest.raises(OutputError, match="is of other models"):  # whose distances are the same
        landscape(turned, bowl, steps=2, journal=journal)
    two = [lambda m: bowl(m) + 1.0, lambda m: bowl(m) + 2.0]  # of one name
    landscape(MODELS, two[0], steps=2, journal=tmp_path / "of two.jsonl")
    with pytest.raises(OutputError, match="or of another loss"):
        landscape(MODELS, two[1], steps=2, journal=tmp_path / "of two.jsonl")
    tanh, relu = ({n: nn.Sequential(m, layer) for n, m in MODELS.items()} for layer in (nn.Tanh(), nn.ReLU()))
    landscape(tanh, bowl, steps=2, journal=tmp_path / "tanh.jsonl")
    with pytest.raises(OutputError, match="is of other models"):  # of the same weights
        landscape(relu, bowl, steps=2, journal=tmp_path / "tanh.jsonl")
    journal.write_bytes(b"\xff\xfe")
    with pytest.raises(OutputError, match="cannot be kept as the journal"):
        landscape(MODELS, bowl, steps=2, journal=journal)


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ([0, {"loss": "x", "metrics": {"twice": 1.0}, "count": 1}], "the loss is 'x'"),
        ([0, {"loss": math.nan, "metrics": {"twice": 1.0}, "count": 1}], "the loss is nan"),
        ([0, {"loss": math.inf, "metrics": {"twice": 1.0}, "count": 1}], "the loss is inf"),
        ([0, {"loss": True, "metrics": {"twice": 1.0}, "count": 1}], "the loss is True"),
        ([0, {"loss": 1.0, "metrics": {}, "count": 1}], "it has other metrics"),
        ([0, {"loss": 1.0, "metrics": {"other": 1.0}, "count": 1}], "it has other metrics"),
        ([0, {"loss": 1.0, "metrics": [1.0], "count": 1}], "the metrics are"),
        ([0, {"loss": 1.0, "metrics": {"twice": "1"}, "count": 1}], "the metrics are"),
        ([0, {"loss": 1.0, "metrics": {"twice": 1.0}, "count": -1}], "the count is -1"),
        ([0, {"loss": 1.0, "metrics": {"twice": 1.0}, "count": math.nan}], "the count is nan"),
        ([0, {"loss": 1.0, "metrics": {"twice": 1.0}}], "expected a score"),
        ([0, 1.0], "expected a score"),
        *(([n, {"loss": 1.0, "metrics": {"twice": 1.0}, "count": 1}], "0 to 6") for n in (-1, 7, 9999, "0", 0.0, None)),
        ([0], "0 to 6"),
        ({}, "0 to 6"),
        ("", "0 to 6"),
    ],
    ids=str,
)
def test_a_line_of_a_journal_that_is_no_point_is_refused_by_its_number(tmp_path: Path, point: object, why: str) -> None:
    def loss(module: nn.Module) -> Score:
        return Score(bowl(module), {"twice": 2 * bowl(module)}, 1)

    journal = tmp_path / "landscape.jsonl"
    landscape(MODELS, loss, steps=2, journal=journal)
    lines = journal.read_text("utf-8").splitlines()
    damaged = "\n".join([*lines[:3], json.dumps(point), *lines[4:], ""])
    journal.write_text(damaged, "utf-8")
    with pytest.raises(OutputError) as caught:
        landscape(MODELS, loss, steps=2, journal=journal)
    assert f"{journal}, line 4: no point of this landscape (" in str(caught.value)
    assert why in str(caught.value)
    assert "remove the file to start anew" in str(caught.value)
    assert journal.read_text("utf-8") == damaged


def test_a_line_of_a_journal_that_is_no_json(tmp_path: Path) -> None:
    journal = tmp_path / "landscape.jsonl"
    landscape(MODELS, bowl, steps=2, journal=journal)
    lines = journal.read_text("utf-8").splitlines()
    journal.write_text("\n".join([*lines[:2], '[1, {"loss"', *lines[3:], ""]), "utf-8")
    with pytest.raises(OutputError, match="line 3: no point of this landscape"):
        landscape(MODELS, bowl, steps=2, journal=journal)


@pytest.mark.parametrize(
    "third", [Vector(1, 0, 0, 2), Vector(3, 1, 0, 2), Vector(2, 0.5, 0, 2)], ids=["first", "second", "between"]
)
def test_models_on_a_line_span_no_plane(third: Vector) -> None:
    with pytest.raises(IncompatibleError, match="lie on a line"):
        landscape(MODELS | {"c": third}, bowl, steps=2)


def test_options_of_a_landscape() -> None:
    with pytest.raises(OptionError, match="three models; 2 given"):
        landscape({"a": Vector(1), "b": Vector(2)}, bowl)
    with pytest.raises(OptionError, match="2 steps at least"):
        landscape(MODELS, bowl, steps=1)


def test_a_plane_from_inner_products() -> None:
    plane = Plane.of(torch.tensor([[16.0, 4.0], [4.0, 10.0]], dtype=torch.float64))
    assert plane.corners == ((0.0, 0.0), (4.0, 0.0), (1.0, 3.0))
    for i, corner in enumerate(plane.corners):
        assert plane.coefficients(*corner) == tuple(float(i == j) for j in range(3))
    weights = (0.5, 0.3, 0.2)
    place = [sum(c * corner[i] for c, corner in zip(weights, plane.corners, strict=True)) for i in (0, 1)]
    assert plane.coefficients(*place) == pytest.approx(weights)


def test_the_corners_of_a_real_pair_are_the_models(tmp_path: Path) -> None:
    """A, A aligned, and B: of B the loss is another, and the order is that of the names."""
    a, b = (of("BertForMaskedLM", "BertConfig", TEXT)(seed) for seed in (0, 1))
    models = {
        "a": a.save(tmp_path / "a"),
        "moved": symfuse.match(a, to=b, axes="attention,ffn")(a),
        "b": b.save(tmp_path / "b"),
    }
    ids = torch.arange(2, 12)[None]

    def loss(module: nn.Module) -> float:
        return nn.functional.cross_entropy(module(input_ids=ids).logits[0], ids[0]).item()

    found = symfuse.landscape(models, loss, steps=2, margin=0.0)
    assert found.names == ("a", "moved", "b")
    losses = [score.loss for score in found.corners]
    assert [losses[0], losses[2]] == [symfuse.evaluate(folder, loss).loss for folder in (models["a"], models["b"])]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-2
    distances = [symfuse.relate(a, model).distance.euclidean for model in (models["moved"], b)]
    places = [math.hypot(x, y) for x, y in found.plane.corners[1:]]
    assert places == pytest.approx(distances, rel=1e-5)
    assert distances[0] != pytest.approx(distances[1], rel=0.05)

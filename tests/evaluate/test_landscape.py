"""The plane through three models: distances are kept, known surfaces come out, a stopped run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import symfuse
from symfuse.errors import IncompatibleError, OptionError, OutputError
from symfuse.evaluate import Plane, landscape


class Vector(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(values, dtype=torch.float64))


MODELS = {"a": Vector(1, 0, 0, 2), "b": Vector(3, 1, 0, 2), "c": Vector(0, 2, 5, 1)}


def bowl(module: nn.Module) -> float:
    return next(module.parameters()).square().sum().item()


def counted(
    function: Callable[[nn.Module], float], stop: int | None = None
) -> tuple[Callable[[nn.Module], float], list[int]]:
    calls: list[int] = []

    def loss(module: nn.Module) -> float:
        if stop is not None and len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(1)
        return function(module)

    return loss, calls


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
    assert [score.loss for score in found.corners] == [bowl(m) for m in MODELS.values()]
    xs = [x for x, _ in found.plane.corners]
    assert found.xs[0] == pytest.approx(min(xs) - 0.5 * (max(xs) - min(xs)))
    assert found.xs[-1] == pytest.approx(max(xs) + 0.5 * (max(xs) - min(xs)))


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    journal = tmp_path / "landscape.jsonl"
    loss, calls = counted(bowl, stop=7)
    with pytest.raises(KeyboardInterrupt):
        landscape(MODELS, loss, steps=3, journal=journal)
    with journal.open("a") as file:
        file.write('[7, {"loss": 1')  # as a kill in the middle of a line leaves it
    rest, more = counted(bowl)
    rest.__name__ = loss.__name__
    seen: list[tuple[int, int]] = []
    found = landscape(MODELS, rest, steps=3, journal=journal, progress=lambda done, of: seen.append((done, of)))
    assert len(calls) == 7
    assert len(more) == 3 + 9 - 7
    assert seen[-1] == (12, 12)
    assert found == landscape(MODELS, rest, steps=3)
    again, none = counted(bowl)
    assert landscape(MODELS, again, steps=3, journal=journal) == found
    assert not none


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "landscape.jsonl"
    landscape(MODELS, bowl, steps=2, journal=journal)
    with pytest.raises(OutputError, match="is of other models, data or grid"):
        landscape(MODELS, bowl, steps=3, journal=journal)
    with pytest.raises(OutputError, match="is of other models, data or grid"):
        landscape(MODELS | {"c": Vector(1, 1, 1, 1)}, bowl, steps=2, journal=journal)
    journal.write_bytes(b"\xff\xfe")
    with pytest.raises(OutputError, match="cannot be kept as the journal"):
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


def test_the_corners_of_a_real_pair_are_the_models(tmp_path: Path) -> None:
    plane = Plane.of(torch.tensor([[4.0, 2.0], [2.0, 10.0]], dtype=torch.float64))
    assert plane.corners == ((0.0, 0.0), (2.0, 0.0), (1.0, 3.0))
    for i, corner in enumerate(plane.corners):
        assert plane.coefficients(*corner) == tuple(float(i == j) for j in range(3))
    assert plane.coefficients(1.0, 1.0) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert symfuse.landscape is not None

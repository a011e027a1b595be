"""Distances of parts: what a gap says of two vectors that are unlike, and how parts make up the whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import symfuse
from command import done
from contract.tiny import TEXT, of
from symfuse.evaluation import Distance
from symfuse.evaluation.distance import Gap, Piece


def gap(a: list[float], b: list[float]) -> Gap:
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return Gap(*((one @ other).item() for one, other in ((x - y, x - y), (x, y), (x, x), (y, y))))


def test_a_gap_of_vectors_of_unlike_length() -> None:
    found = gap([3.0, 4.0], [12.0, 0.0])
    assert found == Gap(97.0, 36.0, 25.0, 144.0)
    assert found.cosine == pytest.approx(0.6)  # 36 / (5 · 12)
    assert found.euclidean == pytest.approx(math.sqrt(97))
    assert found.relative == pytest.approx(math.sqrt(97) / 12)  # of the norm of b
    assert gap([3.0], [4.0]) + gap([0.0, 2.0], [1.0, 5.0]) == gap([3.0, 0.0, 2.0], [4.0, 1.0, 5.0])


def test_a_zero_vector_has_no_angle_and_no_share() -> None:
    for found in (gap([0.0], [2.0]), gap([2.0], [0.0])):
        assert math.isnan(found.cosine)
    assert gap([2.0], [0.0]).relative == math.inf
    assert gap([0.0], [2.0]).relative == 1.0


def test_shares_are_of_the_whole_squared_distance() -> None:
    pieces = (
        Piece("w", "qk", 1, gap([1.0], [0.0])),
        Piece("w", "residual", 1, gap([2.0], [0.0])),
        Piece("u", "qk", 0, gap([0.0], [3.0])),
        Piece("e", "residual", -1, gap([1.0, 1.0], [0.0, 0.0])),
    )
    found = Distance(pieces)
    assert found.shares("axis") == {"qk": pytest.approx(10 / 16), "residual": pytest.approx(6 / 16)}
    assert found.shares("layer") == {-1: pytest.approx(2 / 16), 0: pytest.approx(9 / 16), 1: pytest.approx(5 / 16)}
    assert list(found.shares("layer")) == [-1, 0, 1]
    assert found.shares("tensor", "axis")["w", "residual"] == pytest.approx(4 / 16)
    assert all(
        math.isnan(share) for share in Distance((Piece("w", "qk", 0, gap([1.0], [1.0])),)).shares("axis").values()
    )


def test_shares_of_two_models_add_up_and_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    a, b = (of("BertForMaskedLM", "BertConfig", TEXT)(seed) for seed in (0, 1))
    folders = [str(model.save(tmp_path / name)) for name, model in (("a", a), ("b", b))]
    before, after = symfuse.relate(a, b).distance, symfuse.relate(symfuse.match(a, to=b)(a), b).distance
    said = done("relate", *folders).stdout
    for keys in (("axis",), ("layer",), ("layer", "axis"), ("tensor",)):
        assert sum(before.shares(*keys).values()) == pytest.approx(1)
    assert before.shares("axis")["qk"] == before.by("axis")["qk"].squared / before.whole.squared
    for axis in before.by("axis"):
        assert f"{before.shares('axis')[axis]:.1%}, {after.shares('axis')[axis]:.1%}" in said


def test_the_cosine_of_numbers_whose_squares_are_subnormal() -> None:
    assert Gap(0.0, 3e-170, 3e-170, 3e-170).cosine == pytest.approx(1.0)

"""What the studies of Zhang et al. measure on pairs: named matchings, distances, the choice of a layer, paths."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import matchings
import naive
import pytest
import torch
import transformers
import zhang_figure4
import zhang_table2
from config import Config
from study import Study, study_named
from torch.testing import assert_close

import symfuse
from symfuse.alignment import random_alignment
from symfuse.io import Checkpoint

TINY = Path(__file__).parent / "tiny.yml"
LAYERS, HEADS = 2, 2


def bert(seed: int, kind: str = "BertModel") -> Checkpoint:
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=17,
        max_position_embeddings=19, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = getattr(transformers, kind)(config).double()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
    return symfuse.open(module, name=f"bert {seed}")


def tiny(name: str) -> Study:
    return study_named(name, Config.read(str(TINY)))


def test_the_papers_matching_is_the_published_mathematics() -> None:
    """Head by head, one rotation and then one scale; neurons by one assignment; nothing else is changed."""
    source, anchor = bert(0), bert(1)
    expected = dict(source.items())
    for layer in range(LAYERS):
        expected |= naive.apply_attention(source, layer, *naive.match_attention(source, anchor, layer, HEADS))
        expected |= naive.apply_ffn(source, layer, naive.match_ffn(source, anchor, layer))
    found = matchings.matched("both, scaled", source, anchor)
    for name, tensor in expected.items():
        assert_close(found.source[name], tensor, rtol=0, atol=1e-9)
    assert found.anchor["pooler.dense.weight"].equal(anchor["pooler.dense.weight"])
    assert not found.framed


def test_without_scales_nothing_is_rescaled() -> None:
    source, anchor = bert(0), bert(1)
    for name in ("attention", "ffn", "both"):
        found = matchings.matched(name, source, anchor)
        for weight, tensor in source.items():
            assert_close(found.source[weight].norm(), tensor.norm(), rtol=1e-12, atol=0)
    scaled = matchings.matched("attention, scaled", source, anchor).source
    query = naive.SELF.format(0) + "query.weight"
    assert abs(float(scaled[query].norm() / source[query].norm()) - 1) > 1e-3


def test_shares_are_norms_of_differences_over_those_before() -> None:
    source, anchor = bert(0), bert(1)
    study: Any = tiny("zhang_figure4")
    row = study._measured("both", source, anchor)
    moved = matchings.matched("both", source, anchor).source
    parts = {
        "all": ("",),
        "attention": (".query.", ".key.", ".value.", ".attention.output.dense.weight"),
        "ffn": (".intermediate.dense.", "output.dense.weight"),
    }
    for part, words in parts.items():
        own = [name for name in source if any(word in name for word in words)]
        if part == "ffn":
            own = [name for name in own if ".attention." not in name]
        apart = [torch.cat([(m[n] - anchor[n]).flatten() for n in own]).norm() for m in (moved, source)]
        assert row[part] == pytest.approx(float(apart[0] / apart[1]), rel=1e-9)
    assert row["distance"] == pytest.approx(row["all"] * symfuse.relate(source, anchor).distance.euclidean)
    assert row["exact"]
    assert row["change"] < 1e-11


def test_what_was_turned_is_turned_back_by_rotations_and_not_by_permutations() -> None:
    anchor = bert(1)
    source = random_alignment(symfuse.declare(anchor), 0, axes=("qk", "v", "ffn"))(anchor)
    study: Any = tiny("zhang_figure4")
    whole, permuted = (study._measured(way, source, anchor) for way in ("all axes", "per-head permutation"))
    assert whole["all"] < 1e-6
    assert study._measured("both", source, anchor)["ffn"] < 1e-6
    assert study._measured("attention", source, anchor)["attention"] < 0.7 * permuted["attention"]
    assert permuted["exact"]


@pytest.mark.parametrize(("peer", "exact"), [("Git Re-Basin", True), ("OT, hard", False), ("OT, soft", False)])
def test_what_leaves_the_function_is_told_from_what_does_not(peer: str, exact: bool) -> None:
    study: Any = tiny("zhang_figure4")
    row = study._measured(peer, *(bert(seed, "BertForMaskedLM") for seed in (0, 1)))
    assert row["exact"] is exact
    assert (row["change"] > 1e-3) is not exact


class Judged:
    """A pair whose merges have the accuracies that it is told."""

    def __init__(self, **parts: list[float]) -> None:
        self.parts = parts

    def accuracy(self, model: int, split: str = "test") -> float:
        return self.parts[split][model]


def test_the_best_layer_is_chosen_on_the_part_match_and_reported_on_test() -> None:
    study: Any = tiny("zhang_table2")
    row = study._best([0, 1, 2], Judged(match=[0.3, 0.6, 0.5], test=[0.9, 0.2, 0.8]))
    assert row == {"accuracy": 0.2, "layer": 1, "match part": [0.3, 0.6, 0.5]}


def rows(of: str, better: str, value: float) -> list[dict[str, Any]]:
    """Of Table 2: all have 0.5, but a column, which has another value."""
    columns = (*zhang_table2.COLUMNS, zhang_table2.BEST)
    return [
        {"models": "vit", "source": 2 * i, "anchor": 2 * i + 1, "method": method, "matching": column, of: 0.5}
        | ({of: value + i / 1000} if column == better else {})
        for i in range(3)
        for method in zhang_table2.METHODS
        for column in columns
    ]


@pytest.mark.parametrize(("value", "holds"), [(0.7, True), (0.3, False)])
@pytest.mark.parametrize(("column", "says"), [("match", "so does"), (zhang_table2.BEST, "matching the best layer")])
def test_claims_follow_the_rows(column: str, says: str, value: float, holds: bool) -> None:
    claims = tiny("zhang_table2").claims(rows("accuracy", column, value))
    said = [claim.holds for claim in claims if claim.says.startswith(says)]
    assert said == [holds] * len(zhang_table2.METHODS)


@pytest.mark.parametrize(("rotated", "holds"), [(0.8, True), (0.95, False)])
def test_the_shorter_distance_is_the_nearer(rotated: float, holds: bool) -> None:
    study = tiny("zhang_figure4")
    shares = {"attention": rotated, "both": rotated, "per-head permutation": 0.9}
    found = [
        {"models": name, "source": 2 * i, "anchor": 2 * i + 1, "matching": way, "change": 0.0, "exact": True}
        | dict.fromkeys(zhang_figure4.PARTS, shares.get(way, 0.9) + i / 1000)
        for i in range(3)
        for name in study.options["models"]
        for way in (*zhang_figure4.OURS, *zhang_figure4.SHOWN)
    ]
    claims = [claim for claim in study.claims(found) if "than" in claim.says]
    assert len(claims) == 6
    assert {claim.holds for claim in claims} == {holds}
    (transport,) = (claim for claim in study.claims(found) if claim.says.startswith("optimal transport"))
    assert transport.holds is False  # it left the function, it is said


@pytest.fixture
def vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> matchings.Pair:
    """Two hardly trained ViTs."""
    monkeypatch.setenv("SYMFUSE_CACHE", str(tmp_path))
    return matchings.Pair(Config.read(str(TINY)), "vit", (0, 1))


def test_a_path_has_the_losses_of_interpolated_models(vit: matchings.Pair) -> None:
    study: Any = tiny("zhang_figure5")
    source, anchor = vit.models
    found = matchings.matched("all axes", source, anchor)
    assert found.framed
    row = study._path(vit, found.source, found)
    assert row["at"] == [0.0, 0.5, 1.0]
    for at, loss in zip(row["at"], row["loss"], strict=True):
        between = found.source.replace(
            tensors={n: at * t + (1 - at) * found.anchor[n] for n, t in found.source.items()}
        )
        assert loss == pytest.approx(symfuse.evaluate(between, vit.tasks("test")[0]).loss, rel=1e-5)
    start, middle, end = row["loss"]
    assert row["excess"] == pytest.approx(fmean([0, middle - (start + end) / 2, 0]), abs=1e-7)
    # The moved source is the same function: so is its loss.
    assert end == pytest.approx(symfuse.evaluate(source, vit.tasks("test")[0]).loss, rel=1e-5)


def test_a_plane_has_the_models_at_its_corners(vit: matchings.Pair) -> None:
    study: Any = tiny("zhang_figure5")
    found = matchings.matched("both", *vit.models)
    row = study._plane(vit, found)
    corners = {name: torch.tensor(at) for name, at in row["corners"].items()}
    for (one, a), (other, b) in (
        (("A", found.plain), ("B", found.anchor)),
        (("A'", found.source), ("B", found.anchor)),
        (("A", found.plain), ("A'", found.source)),
    ):
        apart = float((corners[one] - corners[other]).norm())
        assert apart == pytest.approx(symfuse.relate(a, b).distance.euclidean, rel=1e-5)


def test_peers_are_what_is_shown() -> None:
    assert set(zhang_figure4.SHOWN) <= set(matchings.PEERS)

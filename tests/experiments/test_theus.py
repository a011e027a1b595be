"""What the studies of Theus et al. measure: paths, circuits, sweeps, simplices, and what is kept of learning."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import symfuse
from symfuse.alignment import Alignment, random_alignment
from symfuse.groups import Monomial

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
import families
import paths
import peers
import results
import theus_iterations
import theus_simplex
import ways
from config import Config
from study import Store, study_named

TINY = Path(__file__).parent / "tiny.yml"
LONG = ("theus_table2", "theus_simplex", "theus_widths")


@pytest.fixture(scope="module", autouse=True)
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYMFUSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class SaidByTheFirst(families.Trained):
    """Labels are what the first of some models says most, so that models which agree with it have a low loss."""

    said: Any = None

    def task(self, split: Any) -> Any:  # type: ignore[override]
        task, module = super().task(split), symfuse.to_module(self.said)
        with torch.inference_mode():
            batches = [{**batch, "labels": task.predicted(module, batch)[0].argmax(-1)} for batch in task.batches]
        return type(task)(batches, task.source)


@pytest.fixture(scope="module")
def apart(away: None, tmp_path_factory: pytest.TempPathFactory) -> ways.Apart:
    """A tiny ViT of large weights, and one that computes nearly the same with its units elsewhere."""
    found = ways.Apart(Config.read(str(TINY)), "vit", (0, 1), {"steps": 2, "batches": 4})
    folder, noise = tmp_path_factory.mktemp("large"), torch.Generator().manual_seed(0)
    first = found.family.model(0)
    first = first.replace(tensors={n: 30 * t if t.ndim > 1 else t for n, t in first.items()})
    other = random_alignment(symfuse.declare(first), seed=1)(first)
    near = {
        n: t + 0.02 * t.std() * torch.randn(t.shape, generator=noise) if t.ndim > 1 else t for n, t in other.items()
    }
    for number, model in enumerate((first, other.replace(tensors=near))):
        model.save(folder / str(number))
    vars(found)["models"] = tuple(symfuse.open(folder / str(number)) for number in range(2))
    family = SaidByTheFirst(found.family.kind)
    object.__setattr__(family, "said", first)
    vars(found)["family"] = family
    return found


def test_a_barrier_is_that_of_its_definition(apart: ways.Apart) -> None:
    row = paths.measured(apart, "plain", ways.plain)
    source, anchor = (symfuse.to_module(model) for model in apart.models)
    batches = apart.family.task("test").batches
    images, labels = (torch.cat([batch[key] for batch in batches]) for key in ("pixel_values", "labels"))
    between, losses = symfuse.to_module(apart.models[1]), {}
    for at, *_ in row["curve"]:
        state = {
            n: at * a + (1 - at) * b
            for (n, a), b in zip(source.state_dict().items(), anchor.state_dict().values(), strict=True)
        }
        between.load_state_dict(state)
        with torch.no_grad():
            logits = between(images).logits
        losses[at] = torch.nn.functional.cross_entropy(logits, labels).item()
    assert_close([loss for _, loss, _ in row["curve"]], list(losses.values()), rtol=1e-4, atol=1e-5)
    excess = max(loss - at * losses[1.0] - (1 - at) * losses[0.0] for at, loss in losses.items())
    assert excess > 0.01
    assert_close(row["barrier"], excess, rtol=1e-4, atol=1e-5)
    assert_close(row["barrier over mean"], max(losses.values()) - (losses[0.0] + losses[1.0]) / 2, rtol=1e-4, atol=1e-5)


def test_circuits_do_not_see_the_basis_inside_of_heads(apart: ways.Apart) -> None:
    spec = symfuse.declare(apart.models[0])
    drawn = random_alignment(spec, seed=3)
    inside = {i: g for i, g in drawn.elements.items() if i.axis in ("qk", "v")}
    assert len(inside) == 4
    turned = Alignment(spec, inside)

    def elsewhere(one: ways.Apart, _: Path) -> ways.Outcome:
        return ways.Outcome((turned(one.models[0]), one.models[1]))

    plain, other = (peers.measured_in_circuits(apart, "x", way, "test") for way in (ways.plain, elsewhere))
    assert_close([p[1] for p in other["curve"]], [p[1] for p in plain["curve"]], rtol=1e-4, atol=1e-5)
    native, moved = (paths.measured(apart, "x", way) for way in (ways.plain, elsewhere))
    assert_close(plain["end losses"], native["end losses"], rtol=1e-4, atol=1e-5)
    assert abs(native["midpoint loss"] - moved["midpoint loss"]) > 1e-3


def test_peers_keep_what_a_model_computes(apart: ways.Apart) -> None:
    loss = symfuse.evaluate(apart.models[0], apart.family.task("match")).loss
    for name, way in peers.WAYS.items():
        source, anchor = way(apart, Path()).models
        assert anchor is apart.models[1]
        assert any(not torch.equal(source[key], tensor) for key, tensor in apart.models[0].items()), name
        assert_close(symfuse.evaluate(source, apart.family.task("match")).loss, loss, rtol=1e-4, atol=1e-5)


def test_sweeps_come_nearer_to_what_they_end_at(apart: ways.Apart) -> None:
    row = theus_iterations.swept(apart, theus_iterations.STARTS[0], 2)
    assert row["given"] == row["distances"][0] > row["distances"][1] >= row["distances"][2]
    frame = ways.plain_in_frame(apart, Path()).models
    assert_close(row["given"], symfuse.relate(*frame).distance.euclidean ** 2, rtol=1e-4, atol=0)
    plain = paths.measured(apart, "plain, rotatable", ways.plain_in_frame)
    evenly = [point for point in plain["curve"] if abs(10 * point[0] - round(10 * point[0])) < 1e-9]
    chord = [loss - at * evenly[-1][1] - (1 - at) * evenly[0][1] for at, loss, _ in evenly]
    assert_close(row["barriers"][0], max(chord), rtol=1e-3, atol=1e-5)
    assert row["places"][-1] == 1.0 > row["places"][0]


def test_places_that_are_kept(apart: ways.Apart) -> None:
    spec = symfuse.declare(apart.models[0])
    size = spec.axes["ffn"].size
    instances = [i for i in spec.movable if i.axis == "ffn"]
    swapped = torch.arange(size)
    swapped[:2] = torch.tensor([1, 0])
    one = Alignment(spec, {instances[0]: Monomial(swapped)})
    assert len(instances) == 2
    assert_close(ways.places_kept(Alignment(spec, {}), one), 1 - 2 / (2 * size))
    assert ways.places_kept(one, one) == 1.0


def test_what_is_learned_is_learned_once(apart: ways.Apart) -> None:
    calls = []

    def way(one: ways.Apart, journal: Path) -> ways.Outcome:
        calls.append(journal)
        return ways.Outcome(one.models, {"learning": {"steps": 7}})

    first, again = (ways.outcome_of(apart, "learned so", way) for _ in range(2))
    other = ways.Apart(apart.config, "vit", (0, 1), {"steps": 3, "batches": 4})
    ways.outcome_of(other, "learned so", way)
    assert len(set(calls)) == len(calls) == 2
    assert first.about == again.about
    assert first.about["learning"] == {"steps": 7}
    for kept, model in zip(again.models, apart.models, strict=True):
        assert all(torch.equal(kept[name], tensor) for name, tensor in model.items())
    ways.outcome_of(apart, "plain", way)
    ways.outcome_of(apart, "plain", way)
    assert len(calls) == 4


def test_labels_as_models_say_are_not_those_of_the_data(apart: ways.Apart) -> None:
    task = apart.family.task("match")
    said = ways.labelled_by(task, apart)
    wrong = type(task)([{**batch, "labels": (batch["labels"] + 1) % 10} for batch in task.batches], task.source)
    assert all(
        torch.equal(a["labels"], b["labels"])
        for a, b in zip(said.batches, ways.labelled_by(wrong, apart).batches, strict=True)
    )
    assert ways.first(task, 1).batches == task.batches[:1]


def test_the_barrier_of_a_simplex() -> None:
    points = []
    for i, j in itertools.product(range(7), repeat=2):
        if i + j <= 6:
            a, b, c = i / 6, j / 6, (6 - i - j) / 6
            points.append([a, b, c, 1 * a + 2 * b + 3 * c + 27 * a * b * c, 0.5])
    row = theus_simplex.of_points(points)
    assert_close([row["barrier"], *row["end losses"]], [1.0, 1.0, 2.0, 3.0])
    assert_close(row["center"], [3.0, 0.5])
    assert_close(row["barrier over mean"], max(p[3] for p in points) - 2.0)


def rows_of(barriers: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """One row for each way and pair."""
    return [
        {
            "family": "vit", "split": "test", "method": method, "source": 2 * k, "anchor": 2 * k + 1, "barrier": value,
            "barrier over mean": value, "kept places": 0.97, "curve": [], "end losses": [1, 1],
        }
        for method, values in barriers.items()
        for k, value in enumerate(values)
    ]  # fmt: skip


def test_claims_of_table_2_follow_the_rows() -> None:
    as_in_the_paper = {
        "plain": (2.0, 1.0, 4.0),
        "activation matching": (1.5, 0.8, 3.0),
        "weight matching": (0.5, 0.2, 1.0),
        "learned permutations": (0.4, 0.2, 0.8),
        "learned orthogonal": (0.01, 0.005, 0.02),
        "learned orthogonal, permutations too": (0.02, 0.004, 0.03),
    }
    study = study_named("theus_table2", Config.read("small"))
    found = [claim for claim in study.claims(rows_of(as_in_the_paper)) if claim.here.startswith("vit")]
    assert [claim.holds for claim in found] == [True] * 5
    assert "neurons that kept their place 97 ± 0 %" in found[-1].here
    turned = dict(zip(as_in_the_paper, reversed(as_in_the_paper.values()), strict=True))
    turned |= {"plain": (0.9, 0.9, 0.9), "learned orthogonal, permutations too": (0.0, 0.0, 0.0)}
    found = [claim for claim in study.claims(rows_of(turned)) if claim.here.startswith("vit")]
    assert found[0].holds
    assert not any(claim.holds for claim in found[1:])


def test_seeds_of_learning_count_once_for_each_pair() -> None:
    rows = rows_of({"plain": (2.0, 1.0, 4.0), "learned orthogonal": (0.01, 0.004, 0.02)})
    rows += [
        {**row, "seed": seed, "barrier": row["barrier"] + more}
        for seed, more in ((1, 0.04), (2, 0.02))
        for row in rows
        if row["method"] == "learned orthogonal"
    ]
    study, found = study_named("theus_table2", Config.read("long")), paths.Paths.of(rows)
    assert len({study.key(row) for row in rows}) == len(rows) == 12
    assert_close(found.shares("learned orthogonal"), [0.015, 0.024, 0.01])
    variance = [(0.02 / plain) ** 2 for plain in (2.0, 1.0, 4.0)]
    assert found.spread("learned orthogonal") == ["3", f"{100 * (sum(variance) / 3) ** 0.5:.2f}", "4.40"]
    assert found.spread("plain") == ["–"] * 3
    assert found.none("learned orthogonal")[1] is None  # their mean is above 1 %; so few pairs do not say that it is
    low = rows_of({"plain": (1.0, 1.0, 1.0), "learned orthogonal": (0.004, 0.005, 0.003)})
    assert paths.Paths.of(low).none("learned orthogonal")[1] is True
    high = rows_of({"plain": (1.0, 1.0, 1.0), "learned orthogonal": (0.04, 0.05, 0.03)})
    assert paths.Paths.of(high).none("learned orthogonal")[1] is False
    one = rows_of({"plain": (1.0,), "learned orthogonal": (0.004,)})
    assert paths.Paths.of(one).none("learned orthogonal")[1] is None


def test_a_seed_of_learning_reaches_it_and_what_is_kept(apart: ways.Apart) -> None:
    study = study_named("theus_table2", Config.read("long"))
    parts = [part for part in study.parts() if part[:4] == ("vit", 0, 1, "learned orthogonal")]
    assert [part[5:] for part in parts] == [(), (1,)]
    other = replace(apart, seed=2)
    assert other.learning(Path("journal")).seed == 2
    assert other.file("learned orthogonal").name != apart.file("learned orthogonal").name


@pytest.mark.parametrize("name", LONG)
def test_what_docs_connect_shows_is_what_the_rows_say(name: str) -> None:
    study = study_named(name, Config.read("long"))
    store = Store.of(study)
    assert not store.unfinished()
    text = (results.DOCS / "connect.md").read_text("utf-8")
    assert f"<!-- table: {name} of long -->\n\n{study.tables(store.rows())}\n\n<!-- end of table -->" in text

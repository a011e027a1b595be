"""Theus et al. 2025, iterations: what every sweep of weight matching gains, and every step of learning."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from drawing import COLOURS, DASHES, figure, legend
from families import Seed
from study import Claim, Key, Part, Row, Study, mean_error, table
from ways import OPTIONS, SEED, WAYS, Apart, outcome_of, places_kept

from symfuse.alignment import Alignment
from symfuse.evaluation import barrier
from symfuse.matching.descent import Sweeper
from symfuse.matching.problem import problem_of
from symfuse.matching.workspace import Workspace
from symfuse.model import Model

FEW = 5  # sweeps
NEARLY = 0.95  # of what all sweeps gain
STARTS = ("weight matching from the identity", "weight matching from the embeddings")


class Iterations(Study):
    """Options: families: {NAME: {pairs: [[seed, seed], …], sweeps: how many, ways: learned ones of WAYS, shown: every
    which validation the table has (default: every second), and the options of `Apart`}}."""

    name = "theus_iterations"
    paper = "theus"
    title = "Theus et al., iterations"
    keys = ("family", "source", "anchor", "method")
    known = ("families", "pairs", "sweeps", "ways", "shown", "methods", "once", "paper", *OPTIONS)
    about = """
Weight matching sweeps over the residual stream, heads and neurons in random order. It starts from the identity, or
from the best stream for those tensors that no other axis transforms, such as embeddings. (Elsewhere the better of
both is used, and biases are translated too.) After each sweep: the squared distance to the anchor, as a share of that
of the models as they are; the test barrier on 11 points; the share of neurons whose place is the one after the last
sweep. Learning: the barrier on the part "match" at 5 inner points, by step. Claims are decided by the start that ends
closer, and count from the models as they are.
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["families"].items():
            for method in (*STARTS, *about.get("ways", [])):
                yield from ((name, *pair, method) for pair in about["pairs"])

    def models(self) -> Iterator[tuple[str, Seed]]:
        for name, about in self.options["families"].items():
            yield from ((name, seed) for pair in about["pairs"] for seed in pair)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        if part in done:
            return
        name, first, second, method = part
        about = self.options["families"][name]
        apart = Apart(self.config, name, (first, second), about)
        measured = swept(apart, method, about["sweeps"]) if method in STARTS else history(apart, method)
        yield {**dict(zip(self.keys, part, strict=True)), **measured}

    def tables(self, rows: Sequence[Row]) -> str:
        parts = []
        for name, about in self.options["families"].items():
            for method in STARTS:
                rows_here = rows_of(rows, name, method)
                far = [[100 * d / row["given"] for d in row["distances"]] for row in rows_here]
                lines = [
                    ["distance, %", *_means(far, 1)],
                    ["barrier", *_means([row["barriers"] for row in rows_here], 3)],
                    [
                        "neurons in place, %",
                        *_means([[100 * share for share in row["places"]] for row in rows_here], 0),
                    ],
                ]
                head = ["after sweep", *map(str, range(1 + about["sweeps"]))]
                parts.append(f"**{name}**, {method}, {len(rows_here)} pairs:\n\n{table(head, lines)}")
            for method in about.get("ways", []):
                rows_here = rows_of(rows, name, method)
                steps = _common([row["steps"] for row in rows_here])[:: about.get("shown", 2)]
                at = [[row["barriers"][row["steps"].index(step)] for step in steps] for row in rows_here]
                head = ["after step", *map(str, steps)]
                lines = [['barrier on "match"', *_means(at, 3)]]
                parts.append(f"**{name}**, {method}, {len(rows_here)} pairs:\n\n{table(head, lines)}")
        return "\n\n".join(parts)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        claims = []
        for name in self.options["families"]:
            starts = zip(*(rows_of(rows, name, method) for method in STARTS), strict=False)
            best = [min(both, key=lambda row: row["distances"][-1]) for both in starts]
            plain = [row["barriers"][0] for row in rows_of(rows, name, STARTS[0])]
            for what, first in (("distance", [row["given"] for row in best]), ("barrier", plain)):
                curves = [[start, *row[f"{what}s"][1:]] for start, row in zip(first, best, strict=False)]
                shares = [(c[0] - c[FEW]) / (c[0] - c[-1]) for c in curves if c[-1] < c[0]]
                says = f"weight matching settles in about {FEW} sweeps ({NEARLY:.0%} of what it gains in {what})"
                if shares:
                    claims.append(Claim(says, f"{name}: {mean_error(shares, 1, 100)} %", fmean(shares) >= NEARLY))
        return claims

    def draw(self, rows: Sequence[Row], file: Path) -> None:
        """Barriers by sweep, and by step of learning; a line for each pair."""
        names = list(self.options["families"])
        with figure(file, 2, len(names)) as axes:
            for column, name in enumerate(names):
                methods = (*STARTS, *self.options["families"][name].get("ways", []))
                for method, colour, dash in zip(methods, COLOURS, DASHES, strict=False):
                    one = axes[int(method not in STARTS)][column]
                    for number, row in enumerate(rows_of(rows, name, method)):
                        at = row.get("steps", range(len(row["barriers"])))
                        one.plot(at, row["barriers"], color=colour, linestyle=dash, label=None if number else method)
                for one, what in zip(axes[:, column], ("sweep", "step"), strict=True):
                    one.set(xlabel=what, title=name, ylim=(0, None))
            for one in axes[:, 0]:
                one.set_ylabel("barrier")
            legend(axes, 2)


def swept(apart: Apart, start: str, sweeps: int) -> Row:
    """Distance, barrier and places after each sweep of weight matching, the start among them. given: the distance of
    the models as they are."""
    source, anchor = map(Model.of, apart.models)
    usual = {"scaling": True, "groups": None, "variants": (), "frame": None, "one_pass": False}
    problem = problem_of(source, anchor, "all", None, **usual)
    frame = Alignment(problem.spec, {}, frame=problem.frame)
    with ThreadPoolExecutor(1) as pool:
        sweeper = Sweeper(problem.spec, problem.anchor.read, list(problem.groups), problem.groups, pool, ())
        state = Workspace(problem.spec, {name: problem.source.read(name) for name in problem.spec.tensors})
        order = random.Random(SEED)
        unaligned, from_embeddings = sweeper.distance(state), start == STARTS[1]
        for instance in problem.groups if from_embeddings else ():
            if problem.spec.is_shared(instance.axis) and (element := sweeper.from_fixed(instance, state)) is not None:
                state.apply(instance, element, pool)
        alignments, distances = [Alignment(problem.spec, state.elements) @ frame], [sweeper.distance(state)]
        for number in range(sweeps):
            sweeper.sweep(state, order, layers_first=from_embeddings and number == 0)
            distances.append(sweeper.distance(state))
            alignments.append(Alignment(problem.spec, state.elements) @ frame)
    task = apart.family.task("test")
    paths = {str(k): (g(source.checkpoint), frame.in_frame(anchor.checkpoint)) for k, g in enumerate(alignments)}
    curves = barrier(paths, task, refine=0, build=apart.family.build).curves
    return {
        "given": unaligned,
        "distances": distances,
        "barriers": [curves[name].barrier for name in paths],
        "places": [places_kept(alignment, alignments[-1]) for alignment in alignments],
    }


def history(apart: Apart, method: str) -> Row:
    """The barrier by step of learning; of the run that other studies have too, if there is one."""
    points = outcome_of(apart, method, WAYS[method]).about["learning"]["history"]
    return {"steps": [point["step"] for point in points], "barriers": [point["barrier"] for point in points]}


def rows_of(rows: Sequence[Row], name: str, method: str) -> list[Row]:
    selected = [row for row in rows if (row["family"], row["method"]) == (name, method)]
    return sorted(selected, key=lambda row: (row["source"], row["anchor"]))


def _means(curves: Sequence[Sequence[float]], digits: int) -> list[str]:
    """Over pairs, place by place."""
    return [mean_error(values, digits) for values in zip(*curves, strict=True)]


def _common(lists: Sequence[Sequence[int]]) -> list[int]:
    """In all of them."""
    return sorted(set.intersection(*map(set, lists))) if lists else []

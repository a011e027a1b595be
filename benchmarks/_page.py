"""The results of the benchmarks, in words and tables: docs/benchmarks.md, from their data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from _harness import ABOVE, COUNT, NUMBER, PACKAGES, SLOW, SLOW_PEER, TEXT, Benchmark, Goal, Maybe, ratio

Data = Mapping[str, Any]  # what run.py writes for a benchmark
CaseData = Mapping[str, Any]

# What the page needs of them, as `read_json` checks it.
ENVIRONMENT = {**dict.fromkeys(("date", "commit", "processor", "python", *PACKAGES), TEXT), "cores": Maybe(COUNT)}
ROW = {
    "row": TEXT, "wall": ABOVE, "cpu": ABOVE, "spread": NUMBER, "peak": Maybe(NUMBER),
    "rounds": {"wall": [ABOVE], "cpu": [ABOVE]},
}  # fmt: skip
CASE = {"sizes": {str: ABOVE}, "setting": {str: TEXT}, "threads": COUNT, "load": NUMBER, "rows": [ROW]}
DATA = {"environment": ENVIRONMENT, "rounds": COUNT, "command": TEXT, "seconds": NUMBER, "cases": [CASE]}
VERSION = {"commit": TEXT, "seconds": ABOVE, "rows": [{"function": TEXT, "calls": COUNT, "own": NUMBER}]}
PROFILED = {
    "environment": {**ENVIRONMENT, "load": [NUMBER]}, "command": TEXT, "most": COUNT,
    "jobs": {str: {"before": VERSION, "after": VERSION}},
}  # fmt: skip

HEAD = """# Benchmarks

Written by `python benchmarks/run.py --write` from `benchmarks/data`; do not edit. `make bench` measures everything
again.

Models are synthetic, with heads of 64 and feed-forwards of four widths; nothing is downloaded.

- Every round runs all rows of a case once, in a new order. Seconds are medians over the rounds, ± is half the
  interquartile range. A ratio is the median of the ratios within rounds, in wall time and in CPU time of all threads;
  a busy machine distorts the latter less. What takes longer than {slow:g} s is run once, other implementations from
  {slow_peer:g} s on.
- **Floor**: the work that no implementation could leave out, as library calls on prepared numbers, or plain reading
  and writing, measured in the same rounds.
- MB is the peak of memory: for a process ("symfuse …", "mergekit") all of it, otherwise what a call takes besides its
  prepared inputs.
"""


# -- the figures -----------------------------------------------------------------------------------


def row_of(case: CaseData, name: str) -> Data | None:
    return next((row for row in case["rows"] if row["row"] == name), None)


def over(case: CaseData, name: str, base: str, by: str) -> float | None:
    """How many times what the base takes a row takes; None if one of them was not run, or its memory is not known."""
    one, other = row_of(case, name), row_of(case, base)
    if one is None or other is None:
        return None
    if by == "peak":
        return one["peak"] / other["peak"] if one["peak"] and other["peak"] else None
    return ratio(one["rounds"][by], other["rounds"][by])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power law that fits best, by least squares of logarithms."""
    x, y = ([math.log(v) for v in numbers] for numbers in (sizes, values))
    means = [sum(numbers) / len(numbers) for numbers in (x, y)]
    x, y = ([v - mean for v in numbers] for numbers, mean in zip((x, y), means, strict=True))
    return sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)


@dataclass(frozen=True)
class Series:
    """Cases that differ in one size alone, by it."""

    size: str
    label: str
    cases: Sequence[CaseData]

    def exponent(self, row: str | None) -> float | None:
        """Of the processor seconds of a row; None if it was not run in three sizes."""
        found = [(case["sizes"][self.size], one["cpu"]) for case in self.cases if (one := row_of(case, row or ""))]
        return exponent(*zip(*found, strict=True)) if len(found) > 2 else None


def series(cases: Sequence[CaseData]) -> Iterator[Series]:
    """Of three sizes at least."""
    for size in dict.fromkeys(size for case in cases for size in case["sizes"]):
        groups: dict[str, list[CaseData]] = {}
        for case in cases:
            if size in case["sizes"]:
                rest = [f"{name} {value:g}" for name, value in case["sizes"].items() if name != size]
                threads = [f"{case['threads']} threads"] if len({one["threads"] for one in cases}) > 1 else []
                groups.setdefault(", ".join([*case["setting"].values(), *rest, *threads]), []).append(case)
        for label, found in groups.items():
            if len({case["sizes"][size] for case in found}) > 2:
                yield Series(size, label, sorted(found, key=lambda case: float(case["sizes"][size])))


# -- goals -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was found in each case that it is for."""

    goal: Goal
    found: Sequence[tuple[CaseData, float]]

    @property
    def missed(self) -> list[tuple[CaseData, float]]:
        return [(case, value) for case, value in self.found if not self._holds(value)]

    def _holds(self, value: float) -> bool:
        return value >= self.goal.bound if self.goal.least else value <= self.goal.bound

    @property
    def worst(self) -> tuple[CaseData, float]:
        return (min if self.goal.least else max)(self.found, key=lambda pair: pair[1])

    @property
    def says(self) -> str:
        """met, missed, in how many cases, or not measured."""
        if not self.found:
            return "not measured"
        if not self.missed:
            return "met"
        if len(self.missed) == len(self.found):
            return "**missed**"
        return f"**missed** in {len(self.missed)} of {len(self.found)}"


def judge(goal: Goal, cases: Sequence[CaseData]) -> Verdict:
    found = []
    for case in cases:
        is_ = {**case["sizes"], **case["setting"], "threads": case["threads"]}
        if all(is_.get(key) == value for key, value in goal.where.items()):
            value = over(case, goal.row, goal.base, goal.by)
            if value is not None:
                found.append((case, value))
    return Verdict(goal, found)


def _where(case: CaseData) -> str:
    return ", ".join([*case["setting"].values(), *(f"{name} {value:g}" for name, value in case["sizes"].items())])


def _goal(goal: Goal) -> str:
    where = ", ".join(value if isinstance(value, str) else f"{name} {value:g}" for name, value in goal.where.items())
    return f"{goal.row} {'≥' if goal.least else '≤'} {goal.bound:g} × {goal.base}{f' ({where})' if where else ''}"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def goals(benchmarks: Mapping[str, Benchmark], data: Mapping[str, Data]) -> Iterator[str]:
    """The table of all goals, and its summary."""
    verdicts = [
        (name, judge(goal, data[name]["cases"] if name in data else []))
        for name, benchmark in benchmarks.items()
        for goal in benchmark.goals
    ]
    yield "## Goals\n"
    yield _counted([verdict for _, verdict in verdicts])
    yield "\nRanges over all cases to which a goal applies; the deciding column is **bold**.\n"
    yield "| | goal | CPU | wall | |\n|---|---|--:|--:|---|"
    for name, verdict in verdicts:
        found = data[name]["cases"] if name in data else []
        cells = [
            _range(judge(replace(verdict.goal, by=by), found), bold=by == verdict.goal.by) for by in ("cpu", "wall")
        ]
        link = f"[{benchmarks[name].title}](#{anchor(benchmarks[name].title)})"
        yield f"| {link} | {_goal(verdict.goal)} | {' | '.join(cells)} | {verdict.says} |"
    misses = [
        f"- {benchmarks[name].title}: {verdict.goal.row} takes {_figure(verdict.worst[1])} × {verdict.goal.base} "
        f"at worst ({_where(verdict.worst[0])}), {_beside(verdict)}."
        for name, verdict in verdicts
        if verdict.missed
    ]
    if misses:
        yield "\nMissed:\n"
        yield from misses


def _range(verdict: Verdict, *, bold: bool) -> str:
    values = sorted(value for _, value in verdict.found)
    text = " to ".join(dict.fromkeys(map(_figure, (values[0], values[-1])))) if values else "–"
    return f"**{text}**" if bold and values else text


def _beside(verdict: Verdict) -> str:
    goal, value = verdict.goal, verdict.worst[1]
    apart = (goal.bound / value if goal.least else value / goal.bound) - 1
    return f"{apart:.0%} {'short of' if goal.least else 'over'} the goal of {goal.bound:g}"


def _counted(verdicts: Sequence[Verdict]) -> str:
    measured = [v for v in verdicts if v.found]
    met = sum(not v.missed for v in measured)
    missed = sum(len(v.missed) == len(v.found) for v in measured)
    return (
        f"Of {len(verdicts)} goals {met} are met in all cases to which they apply, {len(measured) - met - missed} in "
        f"some, {missed} in none; {len(verdicts) - len(measured)} were not measured."
    )


# -- the page --------------------------------------------------------------------------------------


def anchor(title: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def growth(benchmarks: Mapping[str, Benchmark], data: Mapping[str, Data]) -> Iterator[str]:
    yield "## Growth\n"
    yield "CPU seconds grow as this power of the size, with everything else fixed (least squares of the logarithms):\n"
    yield "| | of | over | ours | floor | peer |\n|---|---|---|--:|--:|--:|"
    for name, found in data.items():
        benchmark = benchmarks[name]
        for one in series(found["cases"]):
            powers = [one.exponent(row) for row in (benchmark.ours, benchmark.floor, next(iter(benchmark.peers), None))]
            cells = ["" if power is None else f"{power:.2f}" for power in powers]
            ends = " to ".join(f"{case['sizes'][one.size]:g}" for case in (one.cases[0], one.cases[-1]))
            yield f"| {benchmark.title} | {one.label} | {one.size} {ends} | {' | '.join(cells)} |"


def table(benchmark: Benchmark, cases: Sequence[CaseData]) -> Iterator[str]:
    """A line for each row of each case."""
    sizes = list(dict.fromkeys(size for case in cases for size in case["sizes"]))
    settings = list(dict.fromkeys(key for case in cases for key in case["setting"]))
    threads = ["threads"] if len({case["threads"] for case in cases}) > 1 else []
    ratios = [(base, by) for base in (benchmark.floor, benchmark.ours) if base for by in ("wall", "cpu")]
    if not benchmark.peers:
        ratios = [(base, by) for base, by in ratios if base == benchmark.floor]
    names = {benchmark.floor: "floor", benchmark.ours: "ours"}
    heads = [f"× {names[base]}, {'CPU' if by == 'cpu' else by}" for base, by in ratios]
    columns = [*settings, *sizes, *threads, "", "wall s", "±", "CPU s", "MB", *heads]
    left = len(settings) + len(sizes) + len(threads)
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(settings)}{'--:|' * (left - len(settings))}---|" + "--:|" * (
        len(columns) - left - 1
    )
    for case in cases:
        labels = [case["setting"].get(key, "") for key in settings]
        labels += [f"{case['sizes'][size]:g}" if size in case["sizes"] else "" for size in sizes]
        labels += [str(case["threads"]) for _ in threads]
        for row in case["rows"]:
            cells = [
                f"{row['wall']:.3g}",
                f"{row['spread']:.0%}" if len(row["rounds"]["wall"]) > 1 else "",
                f"{row['cpu']:.3g}",
            ]
            cells.append("" if row["peak"] is None else f"{row['peak'] / 1e6:.0f}")
            for base, by in ratios:
                shown = base == benchmark.floor or row["row"] in benchmark.peers  # not ours against ours
                value = over(case, row["row"], base, by) if shown and row["row"] != base else None
                cells.append("" if value is None else _figure(value))
            mark = {benchmark.floor: " (floor)", benchmark.ours: " (ours)"}.get(row["row"], "")
            yield f"| {' | '.join([*labels, row['row'] + mark, *cells])} |"
            labels = [""] * left


def _stamp(data: Data) -> str:
    e, loads = data["environment"], [case["load"] for case in data["cases"]]
    return (
        f"`{data['command']}`, {data['rounds']} rounds (fewer for long cases, more for short ones), "
        f"{data['seconds']:.0f} s; load {min(loads):.1f} to {max(loads):.1f}; {_machine(e)}."
    )


def _machine(e: Data) -> str:
    versions = ", ".join(f"{name} {e[name]}" for name in PACKAGES if e[name] != "absent")
    return f"{e['date']}, commit {e['commit']}; {e['cores']} cores ({e['processor']}); Python {e['python']}, {versions}"


def section(benchmark: Benchmark, data: Data) -> Iterator[str]:
    yield f"\n## {benchmark.title}\n\n{benchmark.about}\n"
    yield from table(benchmark, data["cases"])
    yield f"\n{_stamp(data)}"


def profiles(data: Data) -> Iterator[str]:
    """The largest costs before and after."""
    yield "\n## Profiles before and after\n"
    yield (
        "CPU seconds of each function without those that it calls, of all threads, by cProfile, which overstates small "
        f"calls: the {data['most']} largest of either. `{data['command']}`.\n"
    )
    for title, versions in data["jobs"].items():
        before, after = versions["before"], versions["after"]
        less = before["seconds"] / after["seconds"]
        yield f"### {title}\n"
        yield (
            f"Before ({before['commit']}): {before['seconds']:.1f} CPU s under the profiler; after "
            f"({after['commit']}): {after['seconds']:.1f} s, {less:.1f} times less.\n"
        )
        yield "| | before: s | calls | after: s | calls |\n|---|--:|--:|--:|--:|"
        sides = [{row["function"]: row for row in one["rows"]} for one in (before, after)]
        names = sorted(sides[0] | sides[1], key=lambda name: -max(side[name]["own"] for side in sides if name in side))
        for name in names:
            cells = [f"{side[name]['own']:.2f} | {side[name]['calls']}" if name in side else "– | –" for side in sides]
            yield f"| `{name}` | {' | '.join(cells)} |"
        yield ""
    yield f"Load {data['environment']['load'][0]:.1f}; {_machine(data['environment'])}."


def page(benchmarks: Mapping[str, Benchmark], data: Mapping[str, Data], profiled: Data | None) -> str:
    """Of benchmarks in their order, as far as they have data."""
    found = {name: data[name] for name in benchmarks if name in data}
    parts = [HEAD.format(slow=SLOW, slow_peer=SLOW_PEER), *goals(benchmarks, found), "", *growth(benchmarks, found)]
    for name, one in found.items():
        parts += section(benchmarks[name], one)
    if profiled is not None:
        parts += profiles(profiled)
    return "\n".join([*parts, ""])

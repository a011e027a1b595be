"""The models on a page: names and metrics, time and memory, folders and hashes."""

from __future__ import annotations

from typing import Any

from symfuse import __version__
from symfuse.reports.collect import Collected, Document
from symfuse.reports.content import Cell, Part, Section, Table, listed, metric_titles, short


def names(run: Document) -> tuple[str, str]:
    """Source and anchor of a run."""
    source, anchor = (short(one["name"] if isinstance(one, dict) else one) for one in (run["source"], run["anchor"]))
    return source, anchor


def pair(run: Document) -> str:
    return " → ".join(names(run))


def task(run: Document) -> str:
    data = run["task"].get("data")
    return f"{run['task']['task']} on {data}" if data else str(run["task"]["task"])


def evaluation(run: Document) -> Table:
    metrics = metric_titles((model["metrics"] for model in run["models"]), taken=("model", "loss", "counted"))
    columns = {"model": "", "loss": ".4f"} | dict.fromkeys(metrics.values(), ".4f") | {"counted": ","}
    rows = [
        [short(m["name"]), m["loss"], *(m["metrics"].get(metric) for metric in metrics), m.get("count") or None]
        for m in run["models"]
    ]
    return Table(task(run), columns, rows, {"loss": "min"} | dict.fromkeys(metrics.values(), "max"))


def cost(collected: Collected) -> Section:
    rows: list[list[Cell]] = []
    for kind, runs in {**collected.documents, "alignment": collected.alignments}.items():
        for run in runs:
            rows.append([kind, _subject(run), run.get("seconds"), _mib(run)])
            if kind == "evaluation":
                rows += [[kind, short(m["name"]), m.get("seconds"), _mib(m)] for m in run["models"]]
    rows = [row for row in rows if row[2:] != [None, None]]
    columns = {"run": "", "of": "", "seconds": ".1f", "peak memory (MiB)": ",.0f"}
    for number in (3, 2):
        if all(row[number] is None for row in rows):
            rows = [row[:number] + row[number + 1 :] for row in rows]
            columns = {title: form for i, (title, form) in enumerate(columns.items()) if i != number}
    return Section("Time and memory", [Table("Cost", columns, rows)] if rows else [])


def _subject(run: Document) -> str:
    return str(run["merged"]) if "merged" in run else pair(run) if "source" in run else task(run)


def _mib(run: Document) -> float | None:
    """The peak memory in MiB."""
    peak = run.get("peak_memory")
    return None if peak is None else peak / 2**20


def origins(collected: Collected) -> Section:
    models: list[dict[str, Any]] = []
    for run in collected.alignments:
        models += [run["source"], run["anchor"]]
    for run in collected.documents["merge"]:
        models += run["inputs"]
    rows: list[list[Cell]] = [[m["name"], m.get("folder"), m.get("sha256")] for m in models]
    rows = [row for i, row in enumerate(rows) if row not in rows[:i]]
    tasks = [run["task"] for kind in ("barrier", "landscape", "evaluation") for run in collected.documents[kind]]
    data: list[list[Cell]] = [[t["task"], t.get("data"), t.get("sha256")] for t in tasks if t.get("sha256")]
    data = [row for i, row in enumerate(data) if row not in data[:i]]
    versions = {run["symfuse"] for runs in collected.documents.values() for run in runs if run.get("symfuse")}
    parts: list[Part] = []
    if rows:
        parts.append(Table("Models", {"name": "", "folder": "", "sha256 (of a sample)": ""}, rows))
    if data:
        parts.append(Table("Data", {"task": "", "data": "", "sha256": ""}, data))
    made = f"Runs of symfuse {listed(sorted(versions))}. " if versions else ""
    return Section("Inputs and versions", [*parts, f"{made}Page made by symfuse {__version__}."])

"""Measures symfuse beside its floors and its peers.

    python benchmarks/run.py [NAME …] [--quick] [--rounds N] [--threads 1,2]     measures, prints, and keeps data
    python benchmarks/run.py --write                                             makes docs/benchmarks.md of the data

A benchmark is a module in this folder with a BENCHMARK: what yields its cases. All else is in _harness.py and _page.py.
Each benchmark's data are written when it is done, so that what is finished outlives an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import _page
import torch
from _harness import (
    ENOUGH,
    HERE,
    ROOT,
    Benchmark,
    Plan,
    Unfit,
    environment,
    measure,
    option,
    positive,
    positives,
    read_json,
    writable_file,
    writable_folder,
)

NAMES = (
    "startup", "assignment", "attention", "feed_forward", "sweep", "applying", "alignment", "merging", "moments",
    "learning", "barrier", "fisher", "regmean",
)  # fmt: skip
DATA, PAGE, PROFILES = HERE / "data", ROOT / "docs" / "benchmarks.md", "profiles"


def benchmark(name: str) -> Benchmark:
    found: Benchmark = import_module(name).BENCHMARK
    return found


def cache() -> Path:
    """Where models are made and kept."""
    return Path(os.environ.get("SYMFUSE_CACHE", Path.home() / ".cache" / "symfuse")) / "benchmarks"


def compile_all() -> None:
    """What is compiled at its first call is compiled before anything is timed."""
    from symfuse.groups.assignment import LARGE, assign

    for dtype in (torch.float32, torch.float64):
        assign(torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(0)).to(dtype))


def run(name: str, plan: Plan, rounds: int, threads: Sequence[int], *, enough: float = ENOUGH) -> dict[str, Any]:
    """All cases of a benchmark, as data; each is said on stderr when it is done."""
    found, begun, cases = benchmark(name), time.perf_counter(), []
    data: dict[str, Any] = {"benchmark": name, "environment": environment(), "rounds": rounds}
    for case in found.cases(plan):
        for count in threads if found.threaded else threads[:1]:
            cases.append(measure(found, case, count if found.threaded else 1, rounds, enough=enough))
            print("\n".join(_page.table(found, cases[-1:])), file=sys.stderr, flush=True)
    command = f"python benchmarks/run.py {name}{' --quick' if plan.quick else ''}"
    return {**data, "command": command, "seconds": round(time.perf_counter() - begun, 1), "cases": cases}


def keep(data: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{data['benchmark']}.json"
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(folder / f"{data['benchmark']}.json")


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        name: read_json(folder / f"{name}.json", _page.DATA) for name in NAMES if (folder / f"{name}.json").exists()
    }


def page(folder: Path) -> str:
    """Of the data in a folder; Unfit, what is not as it should be."""
    if not folder.is_dir():
        raise Unfit(f"expected a folder with data, found none at {str(folder)!r}")
    profiled = folder / f"{PROFILES}.json"
    found = read_json(profiled, _page.PROFILED) if profiled.exists() else None
    return _page.page({name: benchmark(name) for name in NAMES}, kept(folder), found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; data are kept only with --data")
    parser.add_argument("--rounds", type=positive, help="interleaved rounds, default 3 (with --quick 1)")
    parser.add_argument("--threads", type=positives, help="numbers of threads, such as 1,2; default: all cores")
    parser.add_argument("--data", type=Path, help="where data are kept, default benchmarks/data")
    parser.add_argument("--work", type=Path, help="where models are made and kept; default: $SYMFUSE_CACHE/benchmarks")
    parser.add_argument("--write", action="store_true", help="make docs/benchmarks.md of the data, and measure nothing")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if args.write:
        with option(parser, "--data"):
            text = page(args.data or DATA)
            target = writable_file(PAGE if args.data is None else args.data / PAGE.name)
        target.write_text(text, "utf-8")
        print(f"written: {target}")
        return
    data = args.data or (None if args.quick else DATA)
    if data is not None:
        with option(parser, "--data"):
            writable_folder(data)
    with option(parser, "--work"):
        plan = Plan(args.quick, writable_folder((args.work or cache()).absolute()))
    threads = args.threads or [os.cpu_count() or 1]
    compile_all()
    for name in args.names or NAMES:
        rounds = args.rounds or (1 if args.quick else 3)
        found = run(name, plan, rounds, threads, enough=0.0 if args.quick else ENOUGH)
        print("\n".join(_page.section(benchmark(name), found)), flush=True)
        if data is not None:
            keep(found, data)


if __name__ == "__main__":
    main()

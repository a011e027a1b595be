"""Where the time of the two largest costs goes: now, and at an older commit.

    python benchmarks/profiles.py --before CLONE [--quick] [--work FOLDER] [--data FOLDER]

CLONE is a clone of this repository at the older commit, whose src/ is imported in the place of this one. Each job is
run in a process of its own, `symfuse` with the arguments that it has on the command line, on one worker; a profiler in
each thread counts that thread's processor time, so that nothing which waits is counted. `run.py --write` puts it on the
page.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST = 12  # functions that are shown, the largest of either version
HERE = Path(__file__).parent


def profiled(call: Callable[[], object]) -> dict[str, Any]:
    """A call, with all threads that it starts: processor seconds, and of each function calls and its own seconds."""
    found: list[cProfile.Profile] = []
    plain = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        own = cProfile.Profile(time.thread_time)
        found.append(own)
        own.runcall(plain, thread)

    threading.Thread.run = run  # type: ignore[method-assign]
    start = time.process_time()
    try:
        run(threading.Thread(target=call))
    finally:
        threading.Thread.run = plain  # type: ignore[method-assign]
    seconds = time.process_time() - start
    stats = pstats.Stats(found[0])
    stats.add(*found[1:])
    rows: dict[str, dict[str, Any]] = {}
    for (file, _, name), (_, calls, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        row = rows.setdefault(_named(file, name), {"calls": 0, "own": 0.0})
        row["calls"] += calls
        row["own"] += own
    rows = dict(sorted(rows.items(), key=lambda item: -item[1]["own"])[: 5 * MOST])
    return {"seconds": round(seconds, 2), "rows": [{"function": name, **row} for name, row in rows.items()]}


def _named(file: str, name: str) -> str:
    """A function by its module, without the folders of a machine."""
    parts = Path(file).with_suffix("").parts
    for package in ("symfuse", "torch", "site-packages"):
        if package in parts[:-1]:
            start = len(parts) - 1 - parts[::-1].index(package)
            return ".".join([*parts[start + (package == "site-packages") :], name])
    module = "" if file == "~" else parts[-1] if file[0] != "<" else file.strip("<>").removeprefix("frozen ")
    return f"{module}.{name}" if module else name.strip("<>").removeprefix("built-in method ")


def child(result: Path, arguments: Sequence[str]) -> None:
    """What is imported at the start is not profiled."""
    import symfuse.api
    import symfuse.cli.align
    import symfuse.cli.merge
    from symfuse.cli import main

    def job() -> None:
        try:
            main(list(arguments), standalone_mode=False)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"symfuse {' '.join(arguments)} ended with {end.code}") from end

    found = profiled(job)
    result.write_text(json.dumps({**found, "of": str(Path(symfuse.__file__).parent)}))


def jobs(quick: bool, work: Path) -> dict[str, tuple[str, ...]]:
    """The command lines; OUT is where they write."""
    import yaml
    from _models import roberta, saved

    import merging

    size = {"width": 128, "layers": 2} if quick else {"width": 768, "layers": 12, "words": 50265, "positions": 514}
    name = f"roberta-{size['width']}-{size['layers']}"
    source, anchor = (str(saved(work / f"{name}-{seed}", roberta(**size), seed)) for seed in (1, 0))
    shape = merging.QUICK[0] if quick else merging.SIZES[1]
    models = merging.make(work / f"llama-{shape.hidden}-{shape.layers}", shape)
    models["c"] = merging.fine_tune(work / f"llama-{shape.hidden}-{shape.layers}", shape, "c", 3)
    each = [{"model": str(models[key]), "parameters": {"weight": 0.4, "density": 0.5}} for key in ("a", "b", "c")]
    recipe = work / "ties.yml"
    text = {"merge_method": "ties", "base_model": str(models["base"]), "models": each}
    recipe.write_text(yaml.safe_dump(text, sort_keys=False))
    return {
        "Aligning an independent RoBERTa-base": (
            "align", source, "--to", anchor, "-o", "OUT", "--axes", "attention,ffn", "--no-verify", "--quiet",
            "--threads", "1",
        ),
        f"TIES of three models of {shape.gigabytes:g} GB": ("merge", str(recipe), "OUT", "--quiet", "--threads", "1"),
    }  # fmt: skip


def measure(arguments: Sequence[str], source: Path, work: Path) -> dict[str, Any]:
    """One job under one version, whose src/ this is."""
    out, result = work / "out", work / "profile.json"
    env = dict(os.environ, PYTHONPATH=str(source), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, __file__, "--child", str(result), *(str(out) if a == "OUT" else a for a in arguments)]
    try:
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(result.read_text())
    finally:
        shutil.rmtree(out, ignore_errors=True)
        result.unlink(missing_ok=True)
    if Path(found.pop("of")) != source / "symfuse":
        raise RuntimeError(f"another symfuse was imported than that of {source}")
    return found


def shortened(versions: Mapping[str, dict[str, Any]]) -> None:
    """Keep the rows that are among the MOST of either version."""
    shown = {row["function"] for one in versions.values() for row in one["rows"][:MOST]}
    for one in versions.values():
        one["rows"] = [{**row, "own": round(row["own"], 3)} for row in one["rows"] if row["function"] in shown]


def commit(folder: Path) -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
        return
    from _harness import ROOT, environment
    from run import DATA, PROFILES, cache, keep

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a clone at the older commit")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--work", type=Path, default=cache(), help="where models are made and kept")
    parser.add_argument("--data", type=Path, default=DATA, help="where data are kept")
    args = parser.parse_args()
    versions = {"before": args.before.absolute(), "after": ROOT}
    work = args.work.absolute()
    data: dict[str, Any] = {
        "benchmark": PROFILES, "command": "python benchmarks/profiles.py --before CLONE", "most": MOST,
        "environment": environment(), "jobs": {},
    }  # fmt: skip
    for title, arguments in jobs(args.quick, work).items():
        found = {when: {"commit": commit(at), **measure(arguments, at / "src", work)} for when, at in versions.items()}
        shortened(found)
        data["jobs"][title] = found
        print(f"{title}: {found['before']['seconds']} s, {found['after']['seconds']} s", flush=True)
    keep(data, args.data)


if __name__ == "__main__":
    main()

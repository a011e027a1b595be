"""Barriers between models that were trained apart, by every way of matching: python experiments/connect.py [KIND …]

The table of Theus et al. (2025), small, in native shapes: what is matched stays a checkpoint of its class. Kinds are
those of `train.py`; three disjoint pairs of seeds each, and of models of half the width with those of the full width.
Learned ways learn on the part "train", stop by the barrier on "match", and all are reported on "test". Inputs for
activations are of "train", without labels. The first pair was also used to choose among the ways without labels
(`--trials`, on "match").

Rows go to data/connect.json as they are made, and those that it has are not made again; one alone:
python experiments/connect.py vit --pairs 0 --methods "learned orthogonal". Moved models are kept in the cache folder,
and a learning that was stopped goes on. `--write` puts the tables in docs/connect.md and draws its figure.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pairs
import torch
import train
from connect_tables import Row, draw, report
from connect_ways import BATCHES, HEARD, KINDS, METHODS, OF_POST_NORM, SEED, SIMPLEX, THREE, TRIALS, Pair, held, ways_of

import symfuse
from symfuse.demo.packages import publishing
from symfuse.evaluate import Curve, barrier

DATA = Path(__file__).parent / "data" / "connect.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "connect.md"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "connect.svg"
MARKS = ("<!-- tables: python experiments/connect.py --write -->", "<!-- end of tables -->")
KEY = ("kind", "pair", "method", "split")


def run(pair: Pair, method: str, split: Any = "test") -> Row:
    """The row of one way; its models are made unless they are kept."""
    folder = pair.folder(method)
    if not folder.is_dir():
        start = time.process_time(), time.perf_counter()
        moved = (ways_of(pair.kind) | TRIALS)[method](pair)
        with publishing(folder) as scratch:
            for name, model in (("source", moved.source), ("anchor", moved.anchor)):
                model.save(scratch / name)
            cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
            about = {**moved.about, "cpu seconds": round(cpu, 1), "wall seconds": round(wall, 1)}
            about |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}"}
            (scratch / "about.json").write_text(json.dumps(about, default=str), "utf-8")
    models = symfuse.open(folder / "source"), symfuse.open(folder / "anchor")
    curve = barrier({"path": models}, pair.task(split), build=pair.build).curves["path"]
    return {
        "kind": pair.kind,
        "pair": pair.name,
        "method": method,
        "split": split,
        **of_curve(curve),
        **json.loads((folder / "about.json").read_text("utf-8")),
    }


def of_curve(curve: Curve) -> Row:
    ends, middle = (curve.points[0], curve.points[-1]), next(p for p in curve.points if p.at == 0.5)
    return {
        "barrier": curve.barrier,
        "barrier over mean": curve.barrier_over_mean,
        "peak": curve.peak.at,
        "distance": curve.distance,
        "end losses": [p.score.loss for p in ends],
        "end accuracies": [p.score.metrics["accuracy"] for p in ends],
        "midpoint loss": middle.score.loss,
        "midpoint accuracy": middle.score.metrics["accuracy"],
        "curve": [[p.at, p.score.loss, p.score.metrics["accuracy"]] for p in curve.points],
    }


def simplex(kind: str, method: str, steps: int, parts: int = 6) -> Row:
    """The loss over the simplex of the first three seeds, `parts` steps a side, against the plane through the losses at
    its corners, and against their mean."""
    models = [symfuse.open(train.train(kind, seed)) for seed in (0, 1, 2)]
    pair, start = Pair(kind, 0, steps), time.process_time()
    models = [held(model) for model in SIMPLEX[method](models, pair)]
    seconds = time.process_time() - start
    task, points = pair.task("test"), []
    for i, j in itertools.product(range(parts + 1), repeat=2):
        if i + j <= parts:
            weights = [i / parts, j / parts, (parts - i - j) / parts]
            score = symfuse.score(symfuse.merge(models, weights=weights), task)
            points.append([*weights, score.loss, score.metrics["accuracy"]])
    corners = [next(p[3] for p in points if p[i] == 1.0) for i in range(3)]
    return {
        "kind": kind,
        "pair": "0-1-2",
        "method": method,
        "split": "test",
        "barrier": max(p[3] - sum(w * c for w, c in zip(p, corners, strict=False)) for p in points),
        "barrier over mean": max(p[3] for p in points) - statistics.fmean(corners),
        "center": next(p[3:] for p in points if p[0] == p[1] == p[2]),
        "end losses": corners,
        "points": points,
        "cpu seconds": round(seconds, 1),
    }


def save_midpoint(pair: Pair, method: str, folder: Path) -> None:
    """Write the mean of the moved models, and measure what `transformers` loads of it."""
    import transformers

    kept = pair.folder(method)
    symfuse.merge([symfuse.open(kept / "source"), symfuse.open(kept / "anchor")]).save(folder)
    task = pair.task("test")
    module, about = getattr(transformers, task.auto).from_pretrained(folder, output_loading_info=True)
    score = task(module.eval())
    wrong = {key: len(value) for key, value in about.items()}
    print(f"{folder}: {type(module).__name__}, loss {score.loss:.4f}, {dict(score.metrics)}, {wrong}")


def known(file: Path) -> list[Row]:
    return json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def record(file: Path, row: Row) -> None:
    """Put a row in the file, to which another run may be adding, in place of the one that it has."""
    file.touch()
    with file.open("r+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        text = opened.read()
        rows = [one for one in (json.loads(text)["rows"] if text else []) if key(one) != key(row)]
        about = pairs.about("python experiments/connect.py") | {"batches": BATCHES, "heard": HEARD}
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in [*rows, row])
        head = json.dumps(about, indent=1, ensure_ascii=False).removesuffix("\n}")
        opened.seek(0)
        opened.truncate()
        opened.write(f'{head},\n "rows": [\n{lines}\n]}}\n')


@functools.cache
def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=DATA.parent, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    ways = {**METHODS, **OF_POST_NORM, **SIMPLEX}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--pairs", type=int, nargs="+", default=[0, 1, 2], help="numbers of pairs (default: all three)")
    parser.add_argument("--methods", nargs="+", default=list(ways), metavar="WAY", help=f"of {', '.join(ways)}")
    parser.add_argument(
        "--trials", action="store_true", help="the ways without labels, on the first pair and the part match"
    )
    parser.add_argument("--steps", type=int, help="of learning (default: by kind)")
    parser.add_argument("--again", action="store_true", help="also what is in the file")
    parser.add_argument("--save-midpoint", type=Path, metavar="FOLDER", help="only write the mean of one pair's models")
    parser.add_argument("--print", action="store_true", help="only print what is in the file")
    parser.add_argument("--write", action="store_true", help="only put what is in the file in docs/connect.md")
    parser.add_argument("--data", type=Path, default=DATA, help="the file of rows (default: %(default)s)")
    options = parser.parse_args()
    for what, given, known_ones in (("kind", options.kinds, KINDS), ("way", options.methods, ways)):
        if strange := [one for one in given if one not in known_ones]:
            parser.error(f"no {what} is called {strange[0]!r}; there are {', '.join(known_ones)}")
    torch.set_num_threads(1)
    rows = known(options.data)
    if options.write:
        pairs.write(DOCUMENT, report(rows, KINDS, [*ways, *TRIALS]), MARKS)
        draw(rows, list(KINDS), FIGURE)
        return
    if options.print:
        print(report(rows, KINDS, [*ways, *TRIALS]))
        return
    done = set() if options.again else {key(row) for row in rows}
    for kind, number, method, split in asked(options):
        pair = Pair(kind, number, options.steps or KINDS[kind].steps)
        if options.save_midpoint:
            save_midpoint(pair, method, options.save_midpoint)
            return
        three = method in SIMPLEX
        if (kind, "0-1-2" if three else pair.name, method, split) in done:
            print(f"{kind} {pair.name} {method}: in {options.data} already; --again makes it anew", flush=True)
            continue
        row = simplex(kind, method, pair.steps) if three else run(pair, method, split)
        record(options.data, row | {"seed": SEED, "commit": commit()})
        print(*key(row), f"barrier {row['barrier']:.4f}, over the mean {row['barrier over mean']:.4f}", flush=True)


def asked(options: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    """Kind, pair, way and part of the data of the rows to make."""
    for kind in options.kinds or KINDS:
        if options.trials:
            yield from ((kind, 0, method, "match") for method in ("plain", *TRIALS))
            continue
        for number, method in itertools.product(options.pairs, options.methods):
            if method in ways_of(kind):
                yield kind, number, method, "test"
        yield from ((kind, 0, method, "test") for method in options.methods if method in SIMPLEX and kind in THREE)


if __name__ == "__main__":
    main()

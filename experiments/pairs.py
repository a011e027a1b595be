"""Axes × frame × source of the statistics, against distance and barrier: python experiments/pairs.py [--quick] [PAIR …]

For every pair: match on each choice of axes, from the weights and from activations on the part "match" of its data;
then the path between the models on the part "test". Rows go to data/pairs.json, where those
of other pairs stay, and the tables to standard output; `--print` only prints what is in the file, `--write` puts it in
docs/pairs.md.

none: the models as they are. "rotatable": pre-norm models with norms folded and writers centred, so that the residual
stream may be rotated; elsewhere it is permuted. Activations of the residual stream are those of all its places, or of
the first or the last. "activations, weights": the residual stream and the order of heads from activations, then all
else from the weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import train
from torch import Tensor, nn

import symfuse
from symfuse.alignment import Alignment
from symfuse.demo import packages, page, receptors, sentences
from symfuse.evaluation import Barrier, Curve, Loss
from symfuse.io import Checkpoint
from symfuse.matching import choose_axes, match_by_activations, match_models
from symfuse.matching.problem import ROTATABLE
from symfuse.model import Model
from symfuse.stats.activations import Batch

DATA = Path(__file__).parent / "data" / "pairs.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "pairs.md"
MARKS = ("<!-- tables: python experiments/pairs.py --write -->", "<!-- end of tables -->")
SEED = 0
STARTS = 3  # identity, embeddings, one random

INSIDE = ("ffn", "attention")
SETTINGS: dict[str, tuple[str, ...]] = {
    "ffn": ("ffn",),
    "attention": ("attention",),
    "attention, ffn": INSIDE,
    "+ heads": (*INSIDE, "heads"),
    "+ residual": (*INSIDE, "heads", "residual"),
    "all": (*INSIDE, "heads", "residual", "pooler", "head"),
}


@dataclass(frozen=True)
class Pair:
    """loss: on the test part. batches: of the match part. metric: of loss, to report. points: on the path. build,
    listen: the module to evaluate and the one to take activations from, where `transformers` has none."""

    name: str
    source: Checkpoint
    anchor: Checkpoint
    loss: Loss
    batches: Sequence[Batch]
    metric: str
    points: int
    build: Callable[[Checkpoint], nn.Module] | None = None
    listen: Callable[[Checkpoint], nn.Module] | None = None


def trained(name: str) -> Pair:
    """Two seeds of a model of `train.py`."""
    source, anchor = (symfuse.open(train.train(name, seed)) for seed in (0, 1))
    task, statistics = train.KINDS[name].task("test"), train.KINDS[name].task("match")
    return Pair(name, source, anchor, task, statistics.batches, "accuracy", points=11)


def minilm() -> Pair:
    """all-MiniLM-L6-v2 and its fine-tune; statistics on sentences of BBC news."""
    from transformers import AutoTokenizer

    source, anchor = symfuse.open(packages.minilm()), symfuse.open(packages.minilm_finetuned())
    tokenizer = AutoTokenizer.from_pretrained(packages.minilm(), local_files_only=True)
    texts = sorted(sentences.sentences(128), key=len)
    batches = [
        dict(tokenizer(texts[i : i + 32], padding=True, truncation=True, max_length=64, return_tensors="pt"))
        for i in range(0, len(texts), 32)
    ]
    return Pair("minilm", source, anchor, page.retrieval(anchor), batches, "mrr", points=5)


def sceptr(source: str, anchor: str) -> Pair:
    """Two SCEPTR checkpoints; statistics on the masked receptors of the part "match"."""
    a, b = (symfuse.open(receptors.convert(name)) for name in (source, anchor))
    masked, _ = receptors.mask(receptors.tokens(b.config, "match")[:400], seed=SEED)
    batches = [{"src": part, "attention_mask": part[..., 0] != 0} for part in torch.split(masked, 200)]
    name = f"sceptr: {source.removeprefix('SCEPTR_')} → {anchor.removeprefix('SCEPTR_')}"
    build = page.build_receptors
    return Pair(name, a, b, page.masked_receptors, batches, "accuracy", points=5, build=build, listen=listen_receptors)


def listen_receptors(checkpoint: Checkpoint) -> nn.Module:
    """The package calls the last projection past its hooks; here it is called as a module."""
    module = receptors.load(checkpoint, checkpoint.config)
    parts: Any = module

    def forward(src: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = parts._self_attention_stack.forward(parts._embed(src), ~attention_mask)
        logits: Tensor = parts._mlm_token_prediction_projector.projector(hidden)
        return logits

    parts.forward = forward
    return module.eval()


def _pairs() -> dict[str, Callable[[], Pair]]:
    by_name: dict[str, Callable[[], Pair]] = {name: functools.partial(trained, name) for name in train.KINDS}
    by_name["minilm"] = minilm
    for source, anchor in combinations(receptors.SAME_SHAPE, 2):
        if (source, anchor) != ("SCEPTR", "SCEPTR_finetuned"):  # the others are independent of each other
            by_name[f"{source}:{anchor}"] = functools.partial(sceptr, source, anchor)
    return by_name


PAIRS = _pairs()
QUICK = ("vit", "gpt2", "SCEPTR_MLM_only:SCEPTR_dropout_noise_only")


def from_weights(pair: Pair, axes: tuple[str, ...], frame: tuple[str, ...]) -> Alignment:
    a, b = Model.of(pair.source), Model.of(pair.anchor)
    return match_models(a, b, axes=axes, frame=frame, starts=STARTS, seed=SEED, threads=torch.get_num_threads())


def from_activations(
    pair: Pair, axes: tuple[str, ...], frame: tuple[str, ...], residual: str = "all", scaling: bool = True
) -> Alignment:
    a, b = Model.of(pair.source), Model.of(pair.anchor)
    return match_by_activations(
        a, b, pair.batches, axes=axes, frame=frame, scaling=scaling, residual=residual, build=pair.listen
    )


def from_both(pair: Pair, axes: tuple[str, ...], frame: tuple[str, ...]) -> Alignment:
    """What is inside of heads and feed-forward blocks from the weights, after all else from activations."""
    first = from_activations(pair, tuple(axis for axis in axes if axis not in INSIDE), frame)
    a, b = first(pair.source), first.in_frame(pair.anchor)
    then = match_models(Model(a, first.spec), Model(b, first.spec), axes=INSIDE, threads=torch.get_num_threads())
    return then @ first


SOURCES: dict[str, Callable[[Pair, tuple[str, ...], tuple[str, ...]], Alignment]] = {
    "weights": from_weights,
    "activations": from_activations,
    "activations, first": functools.partial(from_activations, residual="first"),
    "activations, last": functools.partial(from_activations, residual="last"),
    "activations, no scales": functools.partial(from_activations, scaling=False),
    "activations, weights": from_both,
}


def settings(pair: Pair) -> Iterator[tuple[str, tuple[str, ...], str, tuple[str, ...]]]:
    """Label, axes, source and frame of all that is tried on a pair."""
    spec = Model.of(pair.source).spec
    movable = {instance.axis for instance in spec.movable}
    seen = set()
    for source in SOURCES:
        for label, axes in SETTINGS.items():
            selected = tuple(axis for axis in choose_axes(axes, spec) if axis in movable)
            if (source, selected) in seen or ("," in source and label != "+ residual"):
                continue
            seen.add((source, selected))
            for frame in ((), ROTATABLE) if spec.reads and "residual" in selected else ((),):
                yield label, axes, source, frame


def run(pair: Pair) -> list[dict[str, Any]]:
    """The rows of a pair, the plain path of each frame first."""
    alignments: dict[str, Alignment] = {}
    about: dict[str, dict[str, Any]] = {}
    for label, axes, source, frame in settings(pair):
        start = time.perf_counter()
        alignment = SOURCES[source](pair, axes, frame)
        seconds = time.perf_counter() - start
        name = f"{label}; {source}; {_frame(frame)}"
        alignments[name] = alignment
        about[name] = {"axes": label, "source": source, "frame": _frame(frame), "seconds": round(seconds, 2)}
        print(f"{pair.name}: {name} {seconds:.1f} s", file=sys.stderr, flush=True)
    paths = symfuse.barrier(
        pair.source, pair.anchor, pair.loss, alignments, points=pair.points, refine=0, build=pair.build
    )
    return [_row(pair, paths, name, curve, about.get(name)) for name, curve in paths.curves.items()]


def _frame(frame: Iterable[str]) -> str:
    return "rotatable" if tuple(frame) else "as they are"


def _row(pair: Pair, paths: Barrier, name: str, curve: Curve, about: Mapping[str, Any] | None) -> dict[str, Any]:
    plain = paths.curves[paths.baselines[name][0]] if about and name in paths.baselines else curve
    middle = next(point for point in curve.points if point.at == 0.5)
    frame = "as they are" if name == "none" else "rotatable"
    return {
        "pair": pair.name,
        **(about or {"axes": "none", "source": "–", "frame": frame, "seconds": 0.0}),
        "distance": curve.distance / plain.distance,
        "barrier": curve.barrier,
        "barrier over mean": curve.barrier_over_mean,
        "peak": curve.peak.at,
        "midpoint loss": middle.score.loss,
        "midpoint metric": middle.score.metrics[pair.metric],
        "metric": pair.metric,
        "end losses": list(curve.ends),
        "end metrics": [p.score.metrics[pair.metric] for p in (curve.points[0], curve.points[-1])],
        "moved end changed by": abs(curve.ends[1] - paths.curves["none"].ends[1]),
        "points": pair.points,
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown, one row each."""
    lines = [
        f"| {r['axes']} | {r['frame']} | {r['source']} | {r['distance']:.3f} | {r['barrier']:.3f} "
        f"| {r['barrier over mean']:.3f} | {r['midpoint loss']:.3f} | {r['midpoint metric']:.3f} | {r['seconds']:.1f} |"
        for r in rows
    ]
    head = "| axes | frame | from | distance | barrier | over the mean | midpoint loss | midpoint metric | seconds |"
    return "\n".join([head, "|---" * 9 + "|", *lines])


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: the mean over pairs of each setting, with the range of barriers, and how many got better."""
    keys = list(dict.fromkeys((r["axes"], r["frame"], r["source"]) for r in rows))
    plain = {r["pair"]: r["barrier"] for r in rows if r["axes"] == "none"}
    lines = [
        "| axes | from | distance | barrier | lowest to highest | of plain | pairs better | midpoint loss | accuracy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in keys:
        group_rows = [r for r in rows if (r["axes"], r["frame"], r["source"]) == key]
        barriers = [r["barrier"] for r in group_rows]
        better = sum(r["barrier"] < plain[r["pair"]] for r in group_rows)
        left = sum(r["barrier"] / plain[r["pair"]] for r in group_rows) / len(group_rows)
        lines.append(
            f"| {key[0]} | {key[2]} | {_mean(group_rows, 'distance'):.3f} | {_mean(group_rows, 'barrier'):.2f} "
            f"| {min(barriers):.2f} to {max(barriers):.2f} | {left:.2f} | {better} of {len(group_rows)} "
            f"| {_mean(group_rows, 'midpoint loss'):.2f} | {_mean(group_rows, 'midpoint metric'):.3f} |"
        )
    return "\n".join(lines)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(r[key]) for r in rows) / len(rows)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """All tables: one for each pair, and for the SCEPTR pairs their summary."""
    parts = []
    for name in dict.fromkeys(r["pair"] for r in rows if not r["pair"].startswith("sceptr")):
        own = [r for r in rows if r["pair"] == name]
        (first, *_), ends = own, "/".join(f"{x:.3f}" for x in own[0]["end losses"])
        metrics = "/".join(f"{x:.3f}" for x in first["end metrics"])
        parts.append(f"### {name}\n\nEnd losses {ends}, {first['metric']} {metrics}.\n\n{table(own)}")
    hard = [r for r in rows if r["pair"].startswith("sceptr")]
    if hard:
        count = len({r["pair"] for r in hard})
        parts.append(f"### SCEPTR: {count} independent pairs\n\n{summary(hard)}")
    return "\n\n".join(parts)


def write(file: Path, tables: str, marks: tuple[str, str] = MARKS) -> None:
    """Put the tables in a Markdown file, between two lines of it."""
    before, _, rest = file.read_text("utf-8").partition(marks[0])
    file.write_text(f"{before}{marks[0]}\n\n{tables}\n\n{marks[1]}{rest.partition(marks[1])[2]}", "utf-8")


def _known(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {"rows": []}
    return data


def _record(file: Path, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Put the rows of a pair in the file, in place of those that it has."""
    known, name = _known(file), rows[0]["pair"]
    spent = known.get("seconds by pair", {}) | {name: round(seconds, 1)}
    kept = [row for row in known["rows"] if row["pair"] != name]
    data = about("python experiments/pairs.py") | {"starts": STARTS, "seconds by pair": spent, "rows": [*kept, *rows]}
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")


def about(command: str) -> dict[str, Any]:
    """Of what versions and machine figures are."""
    import transformers

    return {
        "symfuse": symfuse.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {torch.get_num_threads()} thread",
        "seed": SEED,
        "command": command,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"of {', '.join(PAIRS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--print", action="store_true", help="only print what is in the file")
    parser.add_argument("--write", action="store_true", help="only put what is in the file in docs/pairs.md")
    parser.add_argument("--data", type=Path, default=DATA, help="the file of rows (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not (options.print or options.write):
        for name in options.pairs or (QUICK if options.quick else PAIRS):
            start = time.perf_counter()
            rows = run(PAIRS[name]())
            _record(options.data, rows, time.perf_counter() - start)
    tables = report(_known(options.data)["rows"])
    if options.write:
        write(DOCUMENT, tables)
    else:
        print(tables)


if __name__ == "__main__":
    main()

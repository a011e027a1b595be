"""Verbs that run models on data: evaluate, barrier, landscape."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import common, declare_option, device_option, main, matched, open_model
from symfuse.cli.command import F, grouped
from symfuse.cli.results import finish, result_option
from symfuse.errors import CheckpointError, OptionError
from symfuse.output import Output, warn

if TYPE_CHECKING:
    from symfuse.api import Alignment, Barrier, Checkpoint, Task

# Alignments by name, as in the papers' tables: permutations of neurons; with rotations of heads; and their scales.
NAMED: dict[str, dict[str, Any]] = {
    "permutation": {"axes": "ffn", "scaling": False},
    "rotation": {"axes": "attention,ffn", "scaling": False},
    "scaling": {"axes": "attention,ffn", "scaling": True},
}
_OPTIONS = ("batch_size", "max_length", "limit", "seed", "pooling")
DATA_OPTIONS = ("task", "columns", "encoding", *_OPTIONS)  # without --data itself


def data_options(function: F, required: bool = True, several: bool = False) -> F:
    """The options of a task. required: whether --data is required. several: --data takes one file for all models or one
    for each, and the verb has its own --seed."""
    what = "Read text, CSV, TSV, JSON (lines), Parquet, or a folder of images."
    each = " Repeatable: one for each model." if several else ""
    seed = click.option("--seed", type=int, help="Seed the choice of masks and rows. Default: 0.")
    return grouped(
        "Data",
        click.option("--data", required=required, multiple=several, help=what + each),
        click.option("--task", help="Measure this: causal-lm, masked-lm, … Default: by the model's head."),
        click.option("--column", "columns", multiple=True, metavar="ROLE=NAME", help="Name a column: text=sentence."),
        click.option("--encoding", help="Set the encoding of text files. Default: utf-8."),
        click.option("--limit", type=click.IntRange(1), help="Use this many random rows. Default: all."),
        click.option("--batch-size", type=click.IntRange(1), help="Batch this many texts or images. Default: 16."),
        click.option(
            "--max-length",
            type=click.IntRange(2),
            help="Cut texts at this many tokens. Default: 256, or the model's limit.",
        ),
        click.option(
            "--pooling", type=click.Choice(["mean", "cls", "max"]), help="Pool embeddings this way (retrieval)."
        ),
        *([] if several else [seed]),
    )(function)


def task(options: Mapping[str, Any], checkpoint: Checkpoint, *others: Checkpoint, unlabelled: bool = False) -> Task:
    """The task of the options, on data read by the checkpoint's tokenizer or image processor. Warns of each other model
    that would read them differently. unlabelled: do not read labels."""
    from symfuse import api

    columns = {f"{role}_column": name for role, name in columns_of(options).items()}
    settings = {key: options[key] for key in _OPTIONS if options[key] is not None} | {"unlabelled": unlabelled}
    encoding = options["encoding"] or "utf-8"
    made, warnings = api.task_of_models(
        options["task"], options["data"], [checkpoint, *others], encoding, columns | settings
    )
    for text in warnings:
        warn(f"warning: {text}")
    return made


def columns_of(options: Mapping[str, Any]) -> dict[str, str]:
    """The columns of --column, by role."""
    columns: dict[str, str] = {}
    for text in options["columns"]:
        role, equals, name = text.partition("=")
        if not (role and equals and name):
            raise OptionError(f"--column {text!r}: write ROLE=NAME, such as text=sentence or label=topic")
        if role in columns:
            raise OptionError(f"--column {text!r}: {role} is named twice; name one column for each role")
        columns[role] = name
    return columns


@main.command()
@click.argument("models", nargs=-1, required=True)
@data_options
@click.option("--ensemble", is_flag=True, help="Add the mean of the models' predicted probabilities.")
@device_option
@result_option
@declare_option
@common
def evaluate(models: tuple[str, ...], ensemble: bool, output: Path | None, out: Output, **options: Any) -> None:
    """Measure loss and metrics of MODELS on the same data.

    The data are read by the tokenizer or image processor of the first model.
    """
    from symfuse import api, reports

    reports.check_result(output, "evaluation", models)
    if ensemble and len(models) < 2:
        raise OptionError("--ensemble needs at least two models; name another, or leave it out")
    checkpoints = [open_model(out, model) for model in models]
    loss = task(options, *checkpoints)
    result = []
    rows_of: list[tuple[str, Any]] = [(checkpoint.name, checkpoint) for checkpoint in checkpoints]
    rows_of += [("ensemble", checkpoints)] if ensemble else []
    with out.progress("evaluating", len(rows_of)) as advance:
        for name, source in rows_of:
            start = time.perf_counter()
            score = api.evaluate(source, loss, device=options["device"])
            if not math.isfinite(score.loss):
                raise CheckpointError(
                    f"{name}: the loss on {loss.source} is {score.loss}, which cannot be compared; numbers may "
                    "have overflowed (look for very large weights), or a text may be degenerate"
                )
            result.append({"name": name, **score.to_dict(), "seconds": time.perf_counter() - start})
            advance(None)
    metrics = list(result[0]["metrics"])
    rows = [
        [one["name"], f"{one['loss']:.4f}", *(f"{one['metrics'][m]:.4f}" for m in metrics), str(one["count"])]
        for one in result
    ]
    out.table(["model", "loss", *metrics, "counted"], rows, f"{loss.name} on {loss.source}")
    finish(out, {"kind": "evaluation", "task": loss.describe(), "models": result}, output)


@main.command()
@click.argument("a")
@click.argument("b")
@data_options
@click.option(
    "--align", "alignments", multiple=True, metavar="WHAT", help="Align by this (see above). Default: auto. Repeatable."
)
@click.option(
    "--points",
    type=click.IntRange(3),
    default=11,
    show_default=True,
    help="Measure at this many evenly spaced λ, ends included.",
)
@click.option(
    "--refine",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Halve the intervals around the maximum this many times.",
)
@device_option
@result_option
@declare_option
@common
def barrier(
    a: str, b: str, alignments: tuple[str, ...], points: int, refine: int, output: Path | None, out: Output,
    **options: Any,
) -> None:  # fmt: skip
    """Measure the loss on the straight path from B to A.

    Measures the models without alignment, and aligned. WHAT is auto (attention,ffn if the models share a basis, else
    all axes), permutation (of neurons), rotation (of heads too), scaling (with scales too), axes such as attention, or
    NAME=FOLDER for an alignment that `symfuse align` wrote (its folder, or the file in it).
    """
    from symfuse import api, reports

    reports.check_result(output, "barrier", (a, b))
    requested = _requested(alignments or ("auto",))
    source, anchor = open_model(out, a), open_model(out, b)
    loss = task(options, anchor, source)
    device = options["device"]
    computed = {name: _alignment(out, what, source, anchor, device) for name, what in requested.items()}
    with out.progress("evaluating", None) as advance:
        result = api.barrier(
            source,
            anchor,
            loss,
            computed,
            points=points,
            refine=refine,
            device=device,
            progress=lambda *done: advance(done[-1]),
        )
    say_barrier(out, result)
    finish(out, _traced(result, computed), output)


def say_barrier(out: Output, result: Barrier) -> None:
    rows = []
    for name, curve in result.curves.items():
        shares = [result.share(name, base) for base in result.baselines.get(name, ())]  # of its own form first
        of_b, of_a = curve.ends
        peaks = ((curve.barrier, curve.peak), (curve.barrier_over_mean, curve.peak_over_mean))
        rows.append(
            [
                name,
                f"{curve.distance:.4g}",
                f"{of_a:.4f}, {of_b:.4f}",
                f"{curve.barrier:.4f}",
                f"{curve.barrier_over_mean:.4f}",
                ", ".join(f"{point.at:g}" if height > curve.rounding else "-" for height, point in peaks),
                " / ".join("-" if share is None else f"{share:.1%}" for share in shares) or "-",
            ]
        )
    columns = ["alignment", "distance", "loss of A, B", "barrier", "over the mean", "at λ", "left of plain"]
    out.table(columns, rows, f"{result.source} to {result.anchor}: {result.task['task']}")


def _requested(texts: Sequence[str]) -> dict[str, Alignment | dict[str, Any]]:
    """The alignments by name: those that are read from files, and the options of those to compute."""
    from symfuse import api
    from symfuse.messages import suggestion

    words = [api.AUTO, *NAMED, *api.WORDS]
    known = f"choose from {', '.join(words)}, or NAME=FOLDER, such as mine=moved"
    result: dict[str, Alignment | dict[str, Any]] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not name or (equals and not file):
            missing = "the name is missing" if equals and file else "the folder is missing" if equals else "it is empty"
            raise OptionError(f"--align {text!r}: {missing}; {known}")
        if name == "none" or name in result:
            what = "the models without alignment, always shown" if name == "none" else "named twice"
            raise OptionError(f"--align {text!r}: {name!r} is {what}; choose another name")
        if equals:
            try:
                loaded = api.Alignment.load(_file(Path(file)))
            except CheckpointError as error:
                raise CheckpointError(f"--align {text!r}: {error} (NAME=FOLDER is what `align` wrote)") from error
            if others := loaded.provenance.get("together_with"):
                raise OptionError(
                    f"--align {text!r}: this alignment was learned together with that of {', '.join(others)}, which "
                    "is aligned too: measure the two folders that were written instead"
                )
            result[name] = loaded
            continue
        if name not in NAMED and Path(name).exists():
            raise OptionError(f"--align {text!r}: a saved alignment needs a name for the table; write NAME={text}")
        if name not in NAMED:
            try:
                api.require_axes(name)
            except OptionError as error:
                near = suggestion(text, words)
                why = f": {error}" if api.AUTO in text.split(",") else f" is not known{near}; {known}"
                raise OptionError(f"--align {text!r}{why}") from error
        result[name] = NAMED.get(name, {"axes": name})
    return result


def _file(place: Path) -> Path:
    """The file of an alignment, which `align` keeps in its folder; CheckpointError if there is none."""
    if not place.exists():
        raise CheckpointError(f"{place} does not exist")
    from symfuse.runs import alignment_file, alignments_in

    file = alignment_file(place)
    if not file.is_file():
        others = ", ".join(path.name for path in alignments_in(place))
        raise CheckpointError(f"{file} does not exist" + (f"; name one file: there are {others}" if others else ""))
    return file


def _traced(result: Barrier, alignments: Mapping[str, Alignment]) -> dict[str, Any]:
    """The document of a barrier, with the alignment of each curve (None: the models without alignment)."""
    document = result.to_dict()
    frames = {result.baselines[name][0]: list(one.frame) for name, one in alignments.items() if one.frame}
    for curve in document["curves"]:
        name = curve["name"]
        curve["alignment"] = {"frame": frames[name]} if name in frames else None
        if (one := alignments.get(name)) is not None:
            options = one.provenance.get("options") or {"provenance": dict(one.provenance)}
            own = {"from": one.provenance.get("from"), "frame": list(one.frame), "variants": list(one.variants)}
            curve["alignment"] = {**options, **own}
    return document


def _alignment(
    out: Output, what: Alignment | dict[str, Any], source: Checkpoint, anchor: Checkpoint, device: str
) -> Alignment:
    """The alignment, computed with these options, or as read, if it fits the source. Warns if it was computed for other
    models."""
    from symfuse import api

    if isinstance(what, dict):
        return matched(out, source, anchor, what | {"device": device})
    what(source)
    for role, checkpoint in (("source", source), ("anchor", anchor)):
        made = what.provenance.get(role)
        if isinstance(made, dict) and api.is_other(made, checkpoint.lineage()):
            warn(
                f"warning: the alignment was computed for another {role} ({made.get('name')}) than {checkpoint.name}; "
                f"it may not bring {source.name} nearer to {anchor.name}"
            )
    return what


@main.command()
@click.argument("a")
@click.argument("b")
@click.argument("c", required=False)
@data_options
@click.option("--align", "what", help="Align A by this, as in barrier; not with a third model. Default: auto.")
@click.option(
    "--steps", type=click.IntRange(2), default=21, show_default=True, help="Measure this many grid points a side."
)
@click.option(
    "--margin",
    type=click.FloatRange(0),
    default=0.25,
    show_default=True,
    help="Extend the grid by this share around the models.",
)
@device_option
@result_option
@declare_option
@common
def landscape(
    a: str, b: str, c: str | None, what: str | None, steps: int, margin: float, output: Path | None, out: Output,
    **options: Any,
) -> None:  # fmt: skip
    """Measure the loss on the plane through three models.

    The models are A, A aligned to B, and B; or A, B and C. With -o each point is saved in DIR/landscape.jsonl as soon
    as it is measured: after an interruption, run the same command again to continue.
    """
    from symfuse import api, reports

    names = [model for model in (a, b, c) if model is not None]
    reports.check_result(output, "landscape", names)
    if len(set(names)) < len(names):
        raise OptionError(f"{', '.join(names)}: a plane goes through different models; one is named twice")
    if c is not None and what is not None:
        raise OptionError("--align: three models are measured without alignment; leave it out, or the third model")
    requested = {} if c is not None else _requested(["auto" if what is None else what])
    opened = [open_model(out, name) for name in names]
    loss = task(options, opened[-1], *opened[:-1])
    models = dict(zip(names, opened, strict=True))
    for one in requested.values():
        alignment = _alignment(out, one, opened[0], opened[1], options["device"])
        framed = alignment.in_frame  # the models, in the frame of the alignment if it has one
        models = {a: framed(opened[0]), f"{a} (aligned)": alignment(opened[0]), b: framed(opened[1])}
    journal = None if output is None else output / "landscape.jsonl"
    with out.progress("evaluating", None) as advance:
        result = api.landscape(
            models,
            loss,
            steps=steps,
            margin=margin,
            journal=journal,
            device=options["device"],
            progress=lambda _done, total: advance(total),
        )
    rows = [
        [name, f"{x:.4g}", f"{y:.4g}", f"{score.loss:.4f}"]
        for name, (x, y), score in zip(result.names, result.plane.corners, result.corners, strict=True)
    ]
    out.table(["model", "x", "y", "loss"], rows, f"{loss.name} on {loss.source}: the plane")
    losses = [score.loss for row in result.scores for score in row]
    out.say(f"{len(losses)} points, loss {min(losses):.4f} to {max(losses):.4f}")
    finish(out, result.to_dict(), output)

"""The command line: parse, call, print. Everything else is in the API.

Exit codes: 0 done; 2 a wrong option; 3 and up the kind of error (see symfuse.errors); 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from symfuse import __version__
from symfuse.errors import OptionError, SymfuseError
from symfuse.output import Output

if TYPE_CHECKING:
    from symfuse.alignment import Alignment
    from symfuse.io import Checkpoint
    from symfuse.verification import Verification

F = TypeVar("F", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns a SymfuseError, and an interrupt, into one message on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("symfuse: interrupted", err=True)
            sys.exit(130)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            super().main(*args, **kwargs)
        except SymfuseError as error:
            click.echo(f"symfuse: {error}", err=True)
            sys.exit(error.exit_code)
        except (OSError, MemoryError) as error:  # standard output on a full disk, for example
            click.echo(f"symfuse: {str(error) or 'not enough memory'}", err=True)
            with suppress(OSError, ValueError):  # what is still to be flushed would fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(0)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="symfuse")
def main() -> None:
    """Align transformers by their symmetries, prove that nothing changed, and merge them."""


def _common(function: F) -> F:
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)
    return click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")(function)


def _matching(function: F) -> F:
    for option in reversed(
        [
            click.option("--layers", metavar="RANGE", help="Which layers: 0-4, 3, -1, 0-2,5, tail:3, head:3."),
            click.option("--no-scaling", is_flag=True, help="Rotate and permute only."),
            click.option("--one-pass", is_flag=True, help="Rotation, then scale, once (as in the paper)."),
            click.option("--no-biases", is_flag=True, help="Do not translate key and value biases."),
            click.option("--threads", type=click.IntRange(1), help="Worker threads. Default: all cores."),
        ]
    ):
        function = option(function)
    return function


def _writing(function: F) -> F:
    for option in reversed(
        [
            click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="The new folder."),
            click.option("--overwrite", is_flag=True, help="Replace the target if it exists."),
            click.option("--max-shard-size", default="5GB", show_default=True, help="The largest weight file."),
            click.option("--no-verify", is_flag=True, help="Do not run the models to prove that nothing changed."),
        ]
    ):
        function = option(function)
    return function


def _match_options(options: dict[str, Any], axes: str) -> dict[str, Any]:
    return {
        "axes": axes,
        "layers": options["layers"],
        "scaling": not options["no_scaling"],
        "one_pass": options["one_pass"],
        "biases": not options["no_biases"],
        "threads": options["threads"],
    }


@main.command()
@click.argument("model")
@_common
def inspect(model: str, as_json: bool, quiet: bool) -> None:
    """Axes, groups and sizes of MODEL: what can be matched, what not, and why."""
    from symfuse.report import inspection

    out = Output(as_json, quiet)
    data = inspection(_open(out, model))
    out.say(
        f"{model}: {data['family']}, {data['tensors']} tensors, {data['parameters']:,} parameters, {data['dtypes']}"
    )
    rows = [[a["axis"], a["group"], str(a["size"]), str(a["instances"]), a["matched by"]] for a in data["axes"]]
    out.table(["axis", "group", "size", "elements", "matched by"], rows)
    for group, why in dict.fromkeys((a["group"], a["why"]) for a in data["axes"]):
        out.say(f"  {group}: {why}")
    for note in data["notes"]:
        out.say(f"note: {note}")
    out.finish(data)


@main.command()
@click.argument("source")
@click.option("--to", "anchor", required=True, help="The anchor, which stays as it is.")
@click.option("--axes", default="all", show_default=True, help="attention, ffn, qk, v, all.")
@_matching
@_writing
@_common
def align(source: str, anchor: str, axes: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Move SOURCE onto the anchor: the same function, nearer in weight space."""
    from symfuse import report

    out = Output(as_json, quiet)
    a, b = _open(out, source), _open(out, anchor)
    _check_target(options, a, b)
    alignment = _matched(out, a, b, _match_options(options, axes))
    run = report.alignment_run(a, b, alignment, None if options["no_verify"] else _proved(out, a, alignment))
    _save(out, alignment(a), options, run, {"alignment.safetensors": alignment.to_bytes()})
    _say_alignment(out, run)
    run |= {"output": str(options["output"]), "seconds": time.perf_counter() - out.start}
    out.say(f"written to {options['output']} in {run['seconds']:.1f} s")
    out.finish(run)


@main.command()
@click.argument("before")
@click.argument("after")
@click.option("--tolerance", type=float, help="Largest relative difference allowed. Default: by dtype.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False), help="Lines to run, with the model's tokenizer.")
@_common
def verify(before: str, after: str, tolerance: float | None, text: str | None, as_json: bool, quiet: bool) -> None:
    """Run both models on the same inputs and compare what they compute. Exit code 7 if they differ."""
    from symfuse import api, report

    out = Output(as_json, quiet)
    a, b = _open(out, before), _open(out, after)
    inputs = None if text is None else report.text_inputs(a, Path(text))
    result = api.verify(a, b, inputs=inputs, tolerance=tolerance)
    out.table(["output", "relative difference"], [[k, f"{v:.2e}"] for k, v in result.errors.items()])
    out.say(f"{'equal' if result.equal else 'different'} to {result.tolerance:.0e} ({result.inputs})")
    out.finish(_verified(result))
    if not result.equal:
        sys.exit(7)


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--axes", default="all", show_default=True, help="What to match for the second column.")
@_matching
@_common
def distance(a: str, b: str, axes: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """How far A is from B, by axis and layer, before and after alignment."""
    from symfuse import api, report

    out = Output(as_json, quiet)
    source, anchor = _open(out, a), _open(out, b)
    alignment = _matched(out, source, anchor, _match_options(options, axes))
    before, after = api.distance(source, anchor), api.distance(alignment(source), anchor)
    data = report.distances(before, after)
    for part in ("axis", "layer"):
        rows = [
            [
                "none" if r[part] == -1 else str(r[part]),
                f"{r['before']:.4g}",
                f"{r['after']:.4g}",
                f"{r['share']:.1%}" if r["before"] else "-",
            ]
            for r in data[f"by_{part}"]
        ]
        out.table([part, "squared distance", "after", "left"], rows)
    out.say(
        f"distance {data['before']:.4g} -> {data['after']:.4g} ({data['left']:.1%} left), relative to |B| "
        f"{before.relative:.3g} -> {after.relative:.3g}, cosine {before.cosine:.4f} -> {after.cosine:.4f}"
    )
    out.finish(data)


@main.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--method", default="linear", show_default=True, help="How tensors are combined.")
@click.option("--weights", help="One per model, in order: 0.3,0.7. Default: equal.")
@click.option("--no-normalize", is_flag=True, help="Take the weights as they are.")
@click.option("--align", "axes", metavar="AXES", help="Align first: attention, ffn, all.")
@click.option("--anchor", help="Number (from 1) or path of the model to align to. Default: nearest to the mean.")
@click.option(
    "--base",
    help="Number or path of the model whose config, dtypes and tokenizer it has. Default: 1, or that of --heads.",
)
@click.option("--heads", default="average", show_default=True, help="Task heads: average, drop, or a model's number.")
@_matching
@_writing
@_common
def merge(models: tuple[str, ...], axes: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Merge MODELS, after aligning them if --align says what."""
    from symfuse import api, report
    from symfuse.matching import choose_axes, choose_layers

    out = Output(as_json, quiet)
    opened = [_open(out, model) for model in models]
    base = _base(options["base"], options["heads"], models)
    anchor = None if options["anchor"] is None else _model_number("--anchor", options["anchor"], models)
    _check_target(options, *opened)
    # Before anything is computed: can these be merged at all, and do the options make sense?
    merging = {
        "method": options["method"], "weights": _numbers(options["weights"]), "normalize": not options["no_normalize"],
        "base": base, "heads": options["heads"],
    }  # fmt: skip
    api.merge(opened, **merging)
    for note in report.tokenizer_notes(opened, base):
        out.say(f"note: {note}")
    inputs = [checkpoint.lineage() for checkpoint in opened]
    runs: list[dict[str, Any]] = []
    extra: dict[str, bytes] = {}
    if axes is None:
        _refuse_unused(options)
    else:
        spec = api.declare(opened[0])
        choose_axes(axes, spec)
        choose_layers(options["layers"], spec.axes["l"].size)
        anchor = api.nearest(opened) if anchor is None else anchor
        out.say(f"anchor: {models[anchor]}")
        for i, source in enumerate(opened):
            if i == anchor:
                continue
            alignment = _matched(out, source, opened[anchor], _match_options(options, axes))
            proof = None if options["no_verify"] else _proved(out, source, alignment)
            runs.append(report.alignment_run(source, opened[anchor], alignment, proof))
            _say_alignment(out, runs[-1])
            extra[f"alignment-{i + 1}.safetensors"] = alignment.to_bytes()
            opened[i] = alignment(source).replace(name=source.name)  # by which --heads may call it
    merged = api.merge(opened, **merging)
    run = {
        "symfuse": __version__,
        "models": list(models),
        "inputs": inputs,
        **merging,
        "base": models[base],
        "anchor": None if anchor is None else models[anchor],
        "alignments": runs,
    }
    _save(out, merged, options, run, extra)
    run |= {"output": str(options["output"]), "seconds": time.perf_counter() - out.start}
    out.say(f"{merged.name}; config, dtypes and tokenizer of {models[base]}")
    out.say(f"written to {options['output']} in {run['seconds']:.1f} s")
    out.finish(run)


def _base(text: str | None, heads: str, models: Sequence[str]) -> int:
    """The number of the model that the result is named and typed after: the one whose head is kept, else the first."""
    kept = None if heads in ("average", "drop") else _model_number("--heads", heads, models)
    base = kept or 0 if text is None else _model_number("--base", text, models)
    if kept is not None and base != kept:
        raise OptionError(
            f"--base {text} and --heads {heads}: whose head is kept is also the base, as its config names the class; "
            "leave --base out, or name the same model"
        )
    return base


def _refuse_unused(options: dict[str, Any]) -> None:
    """Options that only an alignment reads are not ignored without a word."""
    unused = ("layers", "no_scaling", "one_pass", "no_biases", "threads", "anchor", "no_verify")
    given = ["--" + key.replace("_", "-") for key in unused if options[key]]
    if given:
        raise OptionError(f"{', '.join(given)}: without --align nothing is aligned; add --align, or leave them out")


@main.command()
@click.option("--work", type=click.Path(path_type=Path), help="Where models are written. Default: a temporary folder.")
@_common
def demo(work: Path | None, as_json: bool, quiet: bool) -> None:
    """All of it, on real models that registry packages carry, in minutes."""
    from symfuse.demo.run import run_demo

    run_demo(Output(as_json, quiet), work)


def _open(out: Output, source: str) -> Checkpoint:
    from symfuse.io import open as open_checkpoint

    checkpoint = open_checkpoint(source, name=source)
    for note in () if out.quiet else checkpoint.notes:
        click.echo(f"symfuse: note: {note}", err=True)
    return checkpoint


def _check_target(options: dict[str, Any], *inputs: Checkpoint) -> None:
    """Whether the target can be written is known in the first second, not after the work."""
    from symfuse.io import check_target
    from symfuse.io.shards import parse_size

    parse_size(options["max_shard_size"])
    folders = [c.folder for c in inputs if c.folder is not None]
    check_target(options["output"], overwrite=options["overwrite"], inputs=folders)


def _matched(out: Output, source: Checkpoint, anchor: Checkpoint, options: dict[str, Any]) -> Alignment:
    from symfuse import api

    with out.progress("matching", None) as advance:
        return api.match(source, anchor, progress=lambda _step, total: advance(total), **options)


def _proved(out: Output, source: Checkpoint, alignment: Alignment) -> dict[str, Any]:
    """Run source and moved model; VerificationError, before anything is written, if they differ."""
    from symfuse import api

    proof = api.prove(source, alignment)
    out.say(
        f"proved: outputs equal to {proof.exact.worst:.0e} before rounding, {proof.rounding:.0e} after "
        f"({proof.exact.inputs})"
    )
    return _verified(proof.exact) | {"rounding": proof.rounding}


def _verified(result: Verification) -> dict[str, Any]:
    return {
        "equal": result.equal,
        "errors": dict(result.errors),
        "tolerance": result.tolerance,
        "inputs": result.inputs,
    }


def _save(
    out: Output,
    checkpoint: Checkpoint,
    options: dict[str, Any],
    run: dict[str, Any],
    extra: dict[str, bytes],
) -> None:
    from symfuse import report

    files: dict[str, bytes | str] = {
        "symfuse.json": json.dumps(run, indent=2) + "\n",
        "README.md": report.model_card(run),
        **extra,
    }
    with out.progress("writing", len(checkpoint)) as advance:
        checkpoint.save(
            options["output"],
            overwrite=options["overwrite"],
            max_shard_size=options["max_shard_size"],
            extra=files,
            progress=lambda _name, _nbytes: advance(None),
        )


def _say_alignment(out: Output, run: dict[str, Any]) -> None:
    rows = [
        [
            r["axis"],
            r["group"],
            f"{r['moved']} of {r['units']}",
            f"{r['before']:.4g}",
            f"{r['after']:.4g}",
        ]
        for r in run["matched"]
    ]
    title = f"{run['source']['name']} -> {run['anchor']['name']}"
    out.table(["axis", "group", "elements moved", "squared distance", "after"], rows, title)
    if run["verified"] is None:
        out.say("not proved (--no-verify)")
    d = run["distance"]
    out.say(f"distance (not squared) of all parameters {d['before']:.4g} -> {d['after']:.4g} ({d['left']:.1%} of it)")


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--weights {text!r}: write numbers separated by commas, such as 0.3,0.7") from None


def _model_number(option: str, text: str, models: Sequence[str]) -> int:
    found = [i for i, model in enumerate(models) if text in (model, str(i + 1))]
    if len(found) != 1:
        listed = ", ".join(f"{i + 1} ({model})" for i, model in enumerate(models))
        raise OptionError(f"{option} {text!r}: write the number or the path of one model: {listed}")
    return found[0]

"""The verb align: a model moved onto an anchor, and proved to be the same."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import (
    NEW_FOLDER,
    check_place,
    common,
    groups_of,
    main,
    match_options,
    matched,
    matching_options,
    memory_of,
    open_model,
    proved,
    save,
    say_alignment,
    writing_options,
)
from symfuse.cli.evaluate import DATA_OPTIONS, data_options, task
from symfuse.errors import OptionError, OutputError
from symfuse.output import Output

if TYPE_CHECKING:
    from symfuse.alignment import Alignment
    from symfuse.io import Checkpoint


@main.command()
@click.argument("source")
@click.option("--to", "anchor", required=True, help="The anchor, which stays as it is.")
@click.option(
    "--axes",
    default="auto",
    show_default=True,
    help="attention, ffn, heads, residual, pooler, all, qk, …; auto: attention,ffn of related models, else all.",
)
@click.option(
    "--from",
    "statistics",
    type=click.Choice(["weights", "activations"]),
    default="weights",
    show_default=True,
    help="What is compared; activations need --data.",
)
@matching_options
@click.option(
    "--inexact",
    multiple=True,
    metavar="VARIANT",
    help="heads-ignored, separate-qk, separate-residual or transport: the result computes something else. Repeatable.",
)
@partial(data_options, required=False)
@click.option(
    "--anchor-output",
    type=NEW_FOLDER,
    help="A folder for the anchor in the frame of the result, where that is another (residual, pre-norm models).",
)
@click.option("--output", "-o", required=True, type=NEW_FOLDER, help="The new folder.")
@writing_options
@common
def align(
    source: str, anchor: str, axes: str, statistics: str, anchor_output: Path | None, as_json: bool, quiet: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Move SOURCE onto an anchor, and prove that it is the same.

    The same function, nearer in weight space. Of each axis the squared distance over all that it touches is said: of
    value heads also the output bias that value biases move into, which `distance` counts under residual.
    """
    from symfuse import report
    from symfuse.io.target import overlap

    out = Output(as_json, quiet)
    _require_use(statistics, options)
    a, b = open_model(out, source), open_model(out, anchor)
    check_place(options, a, b)
    if anchor_output is not None:
        check_place(options | {"output": anchor_output}, a, b)
        if relation := overlap(anchor_output, options["output"]):
            raise OutputError(
                f"--anchor-output {anchor_output} {relation} the output {options['output']}; choose another folder"
            )
    start = time.perf_counter()
    alignment = _matched(out, a, b, axes, options)
    matching = {"seconds": time.perf_counter() - start}  # the file is written before all of it is known
    proof = None if options["no_verify"] else proved(out, a, alignment, memory_of(options))
    run = report.alignment_run(a, b, alignment, proof)
    run |= out.cost() | matching
    _save(out, a, b, alignment, run, options, anchor_output)
    say_alignment(out, run)
    run |= {"output": str(options["output"])} | out.cost()
    out.say(f"written to {options['output']} in {run['seconds']:.1f} s")
    if anchor_output is not None:
        out.say(f"the anchor in {report.frame_text(alignment.frame)}: {anchor_output}")
    elif alignment.frame:
        _say_frame(out, alignment, anchor)
    out.finish(run)


def _matched(out: Output, source: Checkpoint, anchor: Checkpoint, axes: str, options: dict[str, Any]) -> Alignment:
    """From activations if there are data, else from the weights."""
    from symfuse import api

    if options["data"] is None:
        return matched(out, source, anchor, match_options(options, axes) | {"variants": options["inexact"]})
    if options["threads"]:
        import torch

        torch.set_num_threads(options["threads"])
    chosen = {"axes": axes, "layers": options["layers"]}  # without scales, as by default from activations
    chosen |= {"groups": groups_of(options), "variants": options["inexact"]}
    return api.match(source, anchor, data=task(options, anchor), **chosen)


def _save(
    out: Output, source: Checkpoint, anchor: Checkpoint, alignment: Alignment, run: dict[str, Any],
    options: dict[str, Any], anchor_output: Path | None,
) -> None:  # fmt: skip
    """The moved source and, if asked for, the anchor in its frame: both, or none."""
    from symfuse import report

    if anchor_output is not None:
        framed = report.frame_run(anchor, alignment.frame)
        save(out, alignment.in_frame(anchor), options | {"output": anchor_output}, framed, {})
    try:
        save(out, alignment(source), options, run, {"alignment.safetensors": alignment.to_bytes()})
    except BaseException:  # neither without the other
        if anchor_output is not None:
            shutil.rmtree(anchor_output, ignore_errors=True)
        raise


def _say_frame(out: Output, alignment: Alignment, anchor: str) -> None:
    """How to bring the anchor into the frame of the result: also with --quiet, as without it they cannot be merged."""
    from symfuse import report

    folder = Path(anchor).resolve().name + "-in-frame"
    command = shlex.join(["symfuse", "align", anchor, "--to", anchor, "--axes", "residual", "-o", folder])
    text = (
        f"the result is in {report.frame_text(alignment.frame)}. To merge it with {anchor}, run this again with "
        f"--anchor-output FOLDER, which writes both, or bring {anchor} into the same frame: {command}"
    )
    if out.quiet or out.as_json:
        click.echo(f"symfuse: warning: {text}", err=True)
    out.say(f"warning: {text}")


def _require_use(statistics: str, options: Mapping[str, Any]) -> None:
    """OptionError for options that would be ignored: those of the other statistics."""
    if (statistics == "activations") != (options["data"] is not None):
        raise OptionError("--from activations and --data belong together: name the data that both models are run on")
    ignored = DATA_OPTIONS if statistics == "weights" else ("one_pass", "no_biases", "no_scaling")
    unused = [key for key in ignored if options[key] is not None and options[key] is not False and options[key] != ()]
    if unused:
        names = ", ".join("--" + key.replace("columns", "column").replace("_", "-") for key in unused)
        other = "activations" if statistics == "weights" else "weights"
        raise OptionError(f"{names}: this is of matching from {other}; leave it out, or take --from {other}")

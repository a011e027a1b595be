"""The verb align: a model moved onto an anchor, and proved to be the same."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import (
    NEW_PLACE,
    check_place,
    common,
    device_option,
    executor_of,
    executor_options,
    executor_summary,
    groups_of,
    main,
    match_options,
    matched,
    matching_options,
    open_model,
    proved,
    pushed,
    save,
    say_alignment,
    writing_options,
)
from symfuse.cli.evaluate import DATA_OPTIONS, data_options, task
from symfuse.cli.learning import HEARD, LEARNING_OPTIONS, learning_of, learning_options, say_learned
from symfuse.device import CPU
from symfuse.errors import OptionError, OutputError
from symfuse.output import Output, warn

if TYPE_CHECKING:
    from symfuse.alignment import Alignment
    from symfuse.io import Checkpoint
    from symfuse.io.remote import Place


@main.command()
@click.argument("source")
@click.option("--to", "anchor", required=True, help="The anchor, which stays as it is.")
@click.option(
    "--axes",
    default="auto",
    show_default=True,
    help="attention, ffn, heads, residual, pooler, all, qk, …; auto: attention,ffn of models in one basis, else all.",
)
@click.option(
    "--from",
    "statistics",
    type=click.Choice(["weights", "activations", "learned"]),
    default="weights",
    show_default=True,
    help="What is compared; learned: the loss between the models is descended. Those two need --data.",
)
@matching_options
@learning_options
@click.option(
    "--inexact",
    multiple=True,
    metavar="VARIANT",
    help="heads-ignored, separate-qk, separate-residual or transport: the result computes something else. Repeatable.",
)
@partial(data_options, required=False)
@click.option(
    "--anchor-output",
    type=NEW_PLACE,
    help="A folder for the anchor in the frame of the result, where that is another (residual, pre-norm models).",
)
@click.option("--widen", is_flag=True, help="Give SOURCE the widths of a wider anchor first, exactly (docs/widths.md).")
@click.option("--output", "-o", required=True, type=NEW_PLACE, help="The new folder, or its URL (s3://…).")
@device_option
@writing_options
@executor_options
@common
def align(
    source: str, anchor: str, axes: str, statistics: str, anchor_output: Place | None, as_json: bool, quiet: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Move SOURCE onto an anchor, and prove that it is the same.

    The same function, nearer in weight space; or, learned, such that the loss between the two stays low. Of each axis
    the squared distance over all that it touches is said: of value heads also the output bias that value biases move
    into, which `distance` counts under residual.
    """
    from symfuse.io.remote import Remote
    from symfuse.io.target import overlap
    from symfuse.runs import frame_text

    out = Output(as_json, quiet)
    _require_use(statistics, options | {"anchor_output": anchor_output})
    options["executor"] = executor = executor_of(out, options)
    a, b = (open_model(out, model).on(options["device"]) for model in (source, anchor))
    if anchor_output is not None and any(isinstance(place, Remote) for place in (options["output"], anchor_output)):
        options["overwrite"] = None  # what a store has is replaced as soon as the new one comes, and cannot be restored
    check_place(options, a, b)
    if anchor_output is not None:
        check_place(options | {"output": anchor_output}, a, b)
        if relation := overlap(anchor_output, options["output"]):
            raise OutputError(
                f"--anchor-output {anchor_output} {relation} the output {options['output']}; choose another folder"
            )
    for folder in (options["output"], anchor_output):
        if folder is not None and options["journal"] is not None and overlap(options["journal"], folder):
            raise OutputError(f"--journal {options['journal']} lies in the output {folder}; choose another place")
    start, found = time.perf_counter(), None
    if options["widen"]:
        a, found = _widened(out, a, b, axes, options)
    alignment, other = _matched(out, a, b, axes, statistics, options, found)
    matching = {"seconds": time.perf_counter() - start}  # the file is written before all of it is known
    run = _run(out, a, b, alignment, options, None if other is None else other(b)) | matching
    moved = None if other is None else _run(out, b, a, other, options, alignment(a)) | matching
    _save(out, a, b, alignment, run, options, anchor_output, other, moved)
    say_alignment(out, run)
    if "learning" in run:
        say_learned(out, run["learning"])
    run |= {"output": str(options["output"])} | out.cost() | executor_summary(executor)
    out.say(f"written to {options['output']} in {run['seconds']:.1f} s")
    if anchor_output is not None:
        what = "moved too" if other is not None else f"in {frame_text(alignment.frame)}"
        out.say(f"the anchor, {what}: {anchor_output}")
    elif alignment.frame:
        _say_frame(out, alignment, anchor)
    out.finish(run | pushed(out, options))


def _run(
    out: Output, source: Checkpoint, anchor: Checkpoint, alignment: Alignment, options: dict[str, Any],
    moved: Checkpoint | None,
) -> dict[str, Any]:  # fmt: skip
    """What became of the source. moved: the anchor, if it was moved too."""
    from symfuse import reports

    proof = None if options["no_verify"] else proved(out, source, alignment, options["memory"])
    return reports.alignment_run(source, anchor, alignment, proof, moved) | out.cost()


def _widened(
    out: Output, source: Checkpoint, anchor: Checkpoint, axes: str, options: dict[str, Any]
) -> tuple[Checkpoint, Alignment]:
    """The source in the widths of the anchor, proved to compute the same, and how it is matched from the weights."""
    import torch

    from symfuse import api
    from symfuse.model import Model
    from symfuse.widths import match_widths

    chosen = {key: value for key, value in match_options(options, axes).items() if key != "axes"}
    words = "all" if axes == "auto" else axes
    with out.progress("matching widths", None):
        pair = (Model.of(model.on(CPU)) for model in (source, anchor))
        expanded, found = match_widths(*pair, axes=words, **chosen)
    if not options["no_verify"]:
        result = api.verify(source.to(torch.float64), expanded.checkpoint.to(torch.float64))
        result.raise_if_different(f"{source.name} in the widths of {anchor.name}")
        out.say(f"widened, and proved: outputs equal to {result.worst:.0e} ({result.inputs})")
    return expanded.checkpoint.on(options["device"]), found


def _matched(
    out: Output, source: Checkpoint, anchor: Checkpoint, axes: str, statistics: str, options: dict[str, Any],
    found: Alignment | None,
) -> tuple[Alignment, Alignment | None]:  # fmt: skip
    """The alignment of the source, and that of the anchor if it is moved too. found: what the weights say, if known."""
    from symfuse import api

    if statistics == "weights":
        if found is not None:
            return found, None
        more = {"variants": options["inexact"], "executor": options["executor"]}
        return matched(out, source, anchor, match_options(options, axes) | more), None
    if statistics == "learned":
        return _learned(out, source, anchor, axes, options, found)
    if options["threads"]:
        import torch

        torch.set_num_threads(options["threads"])
    chosen = {"axes": axes, "layers": options["layers"]}  # without scales, as by default from activations
    chosen |= {"groups": groups_of(options), "variants": options["inexact"], "device": options["device"]}
    return api.match(source, anchor, data=task(options, anchor), **chosen), None


def _learned(
    out: Output, source: Checkpoint, anchor: Checkpoint, axes: str, options: dict[str, Any], found: Alignment | None
) -> tuple[Alignment, Alignment | None]:
    from symfuse import api

    chosen = match_options(options, axes)
    with out.progress("learning", None) as advance:
        learning = learning_of(options, anchor, advance)
        data = learning.task if options["start"] == "activations" else None
        if data is not None:  # of which no more are needed, and which do not match from weights
            data = data.part(data.batches[:HEARD])
            chosen = {key: chosen[key] for key in ("axes", "layers", "groups", "device")}
        if not options["both"]:
            return api.match(source, anchor, learn=learning, data=data, start=found, **chosen), None
        moved = api.align([source, anchor], "universe", data=data, learn=learning, **chosen)
    one, other = moved.alignments
    assert one is not None
    return one, other


def _save(
    out: Output, source: Checkpoint, anchor: Checkpoint, alignment: Alignment, run: dict[str, Any],
    options: dict[str, Any], anchor_output: Place | None, other: Alignment | None, moved: dict[str, Any] | None,
) -> None:  # fmt: skip
    """The moved source and, if asked for, the anchor, in its frame or moved too: both, or none."""
    from symfuse.io.target import check_space
    from symfuse.io.together import together
    from symfuse.recipes.record import alignment_record
    from symfuse.runs import framed, recorded

    new = recorded(alignment(source), alignment_record(source, anchor, alignment).known(run))
    with together():
        if anchor_output is not None:
            if other is None or moved is None:
                beside = framed(anchor, alignment)
            else:
                beside = recorded(other(anchor), alignment_record(anchor, source, other).known(moved))
            sizes = {options["output"]: new.nbytes, anchor_output: beside.nbytes}
            check_space({place: size for place, size in sizes.items() if isinstance(place, Path)})
            save(out, beside, options | {"output": anchor_output})
        save(out, new, options)


def _say_frame(out: Output, alignment: Alignment, anchor: str) -> None:
    """How to bring the anchor into the frame of the result: also with --quiet, as without it they cannot be merged."""
    from symfuse.runs import frame_text

    folder = Path(anchor).resolve().name + "-in-frame"
    command = shlex.join(["symfuse", "align", anchor, "--to", anchor, "--axes", "residual", "-o", folder])
    text = (
        f"the result is in {frame_text(alignment.frame)}. To merge it with {anchor}, run this again with "
        f"--anchor-output FOLDER, which writes both, or bring {anchor} into the same frame: {command}"
    )
    if out.quiet or out.as_json:
        warn(f"warning: {text}")
    out.say(f"warning: {text}")


def _require_use(statistics: str, options: Mapping[str, Any]) -> None:
    """OptionError for options that would be ignored: those of other statistics."""
    if (statistics == "weights") != (options["data"] is None):
        raise OptionError(
            "--from activations, or --from learned, and --data belong together: name the data that both models are run "
            "on"
        )
    ignored = {
        "weights": (*DATA_OPTIONS, *LEARNING_OPTIONS),
        "activations": ("one_pass", "no_biases", "no_scaling", *LEARNING_OPTIONS),
        "learned": ("inexact",),
    }[statistics]
    unused = [key for key in ignored if options[key] is not None and options[key] is not False and options[key] != ()]
    if unused:
        names = ", ".join("--" + key.replace("columns", "column").replace("_", "-") for key in unused)
        other = "activations" if statistics == "weights" else "weights"
        other = "learned" if unused[0] in LEARNING_OPTIONS else other
        raise OptionError(f"{names}: this is of matching from {other}; leave it out, or take --from {other}")
    if options["both"] and options["anchor_output"] is None:
        raise OptionError("--both moves the anchor too: name a folder for it (--anchor-output)")
    if options["widen"] and (
        options["both"] or options["start"] == "activations" or statistics == "activations" or options["inexact"]
    ):
        raise OptionError(
            "--widen goes with --from weights and --from learned, without --both, --inexact and --start activations"
        )

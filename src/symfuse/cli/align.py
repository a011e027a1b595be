"""The verb align: align a model to an anchor, and prove that its outputs did not change."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import (
    CPU,
    NEW_PLACE,
    check_place,
    common,
    declare_option,
    device_option,
    executor_of,
    executor_options,
    executor_summary,
    import_at_once,
    main,
    match_options,
    matching_options,
    open_model,
    pushed,
    save,
    say_alignment,
    writing_options,
)
from symfuse.cli.evaluate import DATA_OPTIONS, data_options, task
from symfuse.cli.events import Printer
from symfuse.cli.learning import LEARNING_OPTIONS, START_BATCHES, learning_of, learning_options, say_learned
from symfuse.errors import OptionError, OutputError
from symfuse.output import Output

if TYPE_CHECKING:
    from symfuse.api import Alignment, Checkpoint, Place
    from symfuse.recipes.events import Event


@main.command()
@click.argument("source")
@click.option("--to", "anchor", required=True, help="Align to this model, which is not changed.")
@click.option(
    "--axes",
    default="auto",
    show_default=True,
    help="Match these axes: attention, ffn, heads, residual, pooler, all, qk, …; auto: attention,ffn if the models "
    "share a basis, else all.",
)
@click.option(
    "--from",
    "statistics",
    type=click.Choice(["weights", "activations", "learned"]),
    default="weights",
    show_default=True,
    help="Compare weights or activations, or minimise the loss on the path (learned). The last two need --data.",
)
@matching_options
@learning_options
@click.option(
    "--inexact",
    multiple=True,
    metavar="VARIANT",
    help="Match inexactly (the result computes another function): heads-ignored, separate-qk, separate-residual or "
    "transport. Repeatable.",
)
@partial(data_options, required=False)
@click.option(
    "--anchor-output",
    type=NEW_PLACE,
    help="Also write the anchor to this folder, in the frame of the result (residual axis of pre-norm models).",
)
@click.option("--widen", is_flag=True, help="First widen SOURCE to the widths of the anchor, exactly (docs/widths.md).")
@click.option("--output", "-o", required=True, type=NEW_PLACE, help="Write to this new folder or URL (s3://…).")
@device_option
@writing_options
@executor_options
@declare_option
@common
def align(
    source: str, anchor: str, axes: str, statistics: str, anchor_output: Place | None, out: Output,
    **options: Any,
) -> None:  # fmt: skip
    """Align SOURCE to an anchor, and prove its outputs unchanged.

    The result computes the same function as SOURCE and is nearer to the anchor; with --from learned the loss on the
    path between the two is low. Prints, per axis, the squared distance over the tensors that the axis acts on. Value
    heads act on the output bias too, which `relate` counts under residual.
    """
    import_at_once("api")
    from symfuse import api
    from symfuse.runs import frame_text, record_of

    _require_use(statistics, options | {"anchor_output": anchor_output})
    options["executor"] = executor = executor_of(out, options)
    a, b = (open_model(out, model).on(options["device"]) for model in (source, anchor))
    _check_places(options, a, b, anchor_output)
    start = None
    with Printer(out) as follow:
        if options["widen"]:
            a, start = _widened(out, a, b, axes, options)
        done = api.align(
            [a, b],
            "universe" if options["both"] else 1,
            start=None if start is None else [start, None],
            prove=not options["no_verify"],
            follow=lambda event: None if isinstance(event, api.events.AlignmentDone) else follow(event),
            **_matching(statistics, axes, options, b, follow),
        )
    alignment, other = done.alignments
    assert alignment is not None
    new, beside = (_costed(out, one) for one in done.checkpoints)
    _save(out, new, beside, options, anchor_output)
    record = record_of(new)
    assert record is not None
    say_alignment(out, record.run)
    if "learning" in record.run:
        say_learned(out, record.run["learning"])
    run = {**record.run, "output": str(options["output"])} | out.cost() | executor_summary(executor)
    out.say(f"written to {options['output']} in {run['seconds']:.1f} s")
    if anchor_output is not None:
        what = "moved too" if other is not None else f"in {frame_text(alignment.frame)}"
        out.say(f"the anchor, {what}: {anchor_output}")
    elif alignment.frame:
        _say_frame(out, alignment.frame, anchor)
    out.finish(run | pushed(out, options))


def _check_places(options: dict[str, Any], source: Checkpoint, anchor: Checkpoint, anchor_output: Place | None) -> None:
    """OutputError, before any work, for folders that cannot be written, or of which one contains another."""
    from symfuse import api

    if anchor_output is not None and any(isinstance(place, api.Remote) for place in (options["output"], anchor_output)):
        options["overwrite"] = None  # a store replaces objects one by one, and cannot restore them after a failure
    check_place(options, source, anchor)
    if anchor_output is not None:
        check_place(options | {"output": anchor_output}, source, anchor)
        if relation := api.overlap(anchor_output, options["output"]):
            raise OutputError(
                f"--anchor-output {anchor_output} {relation} the output {options['output']}; choose another folder"
            )
    for folder in (options["output"], anchor_output):
        if folder is not None and options["journal"] is not None and api.overlap(options["journal"], folder):
            raise OutputError(f"--journal {options['journal']} is inside the output {folder}; choose another place")


def _widened(
    out: Output, source: Checkpoint, anchor: Checkpoint, axes: str, options: dict[str, Any]
) -> tuple[Checkpoint, Alignment]:
    """The source widened to the widths of the anchor (proved exact), and its alignment by weights."""
    import torch

    from symfuse import api

    with out.progress("matching widths", None):
        matching = match_options(options, "all" if axes == "auto" else axes)
        wide, alignment = api.widen(source.on(CPU), anchor.on(CPU), **matching)
    if not options["no_verify"]:
        result = api.verify(source.to(torch.float64), wide.to(torch.float64))
        result.raise_if_different(f"{source.name} in the widths of {anchor.name}")
        out.say(f"widened; proved: outputs equal to {result.worst:.0e} ({result.inputs})")
    return wide.on(options["device"]), alignment


def _matching(
    statistics: str, axes: str, options: dict[str, Any], anchor: Checkpoint, follow: Callable[[Event], None]
) -> dict[str, Any]:
    """The arguments of `symfuse.align` for these options of the command line."""
    from symfuse import api

    matching = match_options(options, axes)
    if statistics == "weights":
        return matching | {"variants": options["inexact"], "executor": options["executor"]}
    plain = {key: matching[key] for key in ("axes", "layers", "groups", "device")}  # without scales, as by default
    if statistics == "learned":
        learning = learning_of(options, anchor, lambda text: follow(api.events.Step(text=text)))
        if options["start"] != "activations":
            return matching | {"learn": learning}
        task_ = learning.task
        return plain | {"learn": learning, "data": task_.part(task_.batches[:START_BATCHES])}
    if options["threads"]:
        import torch

        torch.set_num_threads(options["threads"])
    return plain | {"variants": options["inexact"], "data": task(options, anchor)}


def _costed(out: Output, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with time and memory so far in its record."""
    from symfuse.runs import record_of, recorded

    record = record_of(checkpoint)
    if record is None or record.kind != "alignment":
        return checkpoint
    return recorded(checkpoint, record.known({**record.run, **(out.cost() | {"seconds": record.run["seconds"]})}))


def _save(
    out: Output, new: Checkpoint, beside: Checkpoint, options: dict[str, Any], anchor_output: Place | None
) -> None:
    """Write the aligned source and, with --anchor-output, the anchor (in its frame, or aligned too): both or none."""
    from symfuse import api

    with api.together():
        if anchor_output is not None:
            sizes = {options["output"]: new.nbytes, anchor_output: beside.nbytes}
            api.check_space({place: size for place, size in sizes.items() if isinstance(place, Path)})
            save(out, beside, options | {"output": anchor_output})
        save(out, new, options)


def _say_frame(out: Output, frame: Sequence[str], anchor: str) -> None:
    """Print how to bring the anchor into the frame of the result, without which the two cannot be merged."""
    from symfuse.runs import frame_text

    folder = Path(anchor).resolve().name + "-in-frame"
    command = shlex.join(["symfuse", "align", anchor, "--to", anchor, "--axes", "residual", "-o", folder])
    out.warning(
        f"the result is in {frame_text(frame)}. To merge it with {anchor}, run this again with --anchor-output "
        f"FOLDER, which writes both, or bring {anchor} into the same frame: {command}"
    )


def _require_use(statistics: str, options: Mapping[str, Any]) -> None:
    """OptionError for options that would be ignored: those of other statistics."""
    if (statistics == "weights") != (options["data"] is None):
        raise OptionError(
            "--from activations and --from learned need --data, on which both models are run; --from weights takes none"
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
        raise OptionError(f"{names}: only for --from {other}; leave it out, or add --from {other}")
    if options["both"] and options["anchor_output"] is None:
        raise OptionError("--both moves the anchor too: name a folder for it (--anchor-output)")
    if options["widen"] and (
        options["both"] or options["start"] == "activations" or statistics == "activations" or options["inexact"]
    ):
        raise OptionError(
            "--widen goes with --from weights and --from learned, without --both, --inexact and --start activations"
        )

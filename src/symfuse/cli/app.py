"""What all verbs share: the group, common options, opening, proving and saving."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from symfuse import __version__
from symfuse.cli.command import Command, F, grouped
from symfuse.cli.verbs import OLD_VERBS, VERBS, Verbs
from symfuse.errors import OptionError, SymfuseError, SymfuseWarning, masked
from symfuse.output import Output, note, warn
from symfuse.signals import signals_as_exceptions

if TYPE_CHECKING:
    from symfuse.api import Alignment, Checkpoint, Ray

CPU = "cpu"  # the default of --device


class _NewFolder(click.Path):
    """A folder to write. An empty name (of an unset variable) is refused, since it would mean the working folder. url:
    whether it may be a URL."""

    def __init__(self, *, url: bool = False) -> None:
        super().__init__(path_type=Path)
        self._url = url

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty; name a folder", param, ctx)
        if isinstance(value, str) and value != masked(value) and "://" not in value:
            self.fail(f"the name {masked(value)} is not UTF-8; name another folder", param, ctx)
        if isinstance(value, str) and "://" in value:
            from symfuse import api

            place = api.place_of(value)
            if not self._url and not isinstance(place, Path):
                self.fail(f"{masked(value)} is a URL; name a folder", param, ctx)
            return place
        return super().convert(value, param, ctx)


NEW_FOLDER = _NewFolder()
NEW_PLACE = _NewFolder(url=True)


class _Group(click.Group):
    """Turns a SymfuseError, and an interrupt, into one message on stderr and an exit code; lists verbs without
    importing them."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = formatter.width - 6 - max(map(len, VERBS))
        lines = {name: click.Command(name, help=line).get_short_help_str(width) for name, (_, line) in VERBS.items()}
        with formatter.section("Commands"):
            formatter.write_dl(list(lines.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb; an old name runs the new verb, with a note."""
        if args[0] in OLD_VERBS:
            now = OLD_VERBS[args[0]]
            if not {"--quiet", "-q"} & set(args):
                note(f"symfuse {args[0]} is now called symfuse {' '.join(now)}")
            args = [*now, *args[1:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, SystemExit) as error:
            _say_notes(error)
            if isinstance(error, SystemExit):
                raise
            _interrupted()

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            with signals_as_exceptions(), warnings.catch_warnings():
                warnings.simplefilter("ignore", SymfuseWarning)  # verbs print these warnings themselves
                super().main(*args, **kwargs)
        except KeyboardInterrupt:
            _interrupted()
        except (SymfuseError, OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
                raise
            warn(str(error) or "not enough memory")
            _say_notes(error)
            if isinstance(error, SymfuseError):
                sys.exit(error.exit_code)
            # Standard output on a full disk, for example.
            with suppress(OSError, ValueError):  # flushing the rest would fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(0)


NO_THREAD = "can't start new thread"  # as Python says


def _interrupted() -> NoReturn:
    warn("interrupted")
    sys.exit(130)


def _say_notes(error: BaseException) -> None:
    """Print the notes of an error: what a run that ended early left on disk."""
    for text in getattr(error, "__notes__", ()):
        warn(text)


@click.group(
    cls=_Group, commands=Verbs(), context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 79}
)
@click.version_option(__version__, prog_name="symfuse")
def main() -> None:
    """Align transformers by their symmetries, prove that nothing changed, and merge them."""


def common(function: F) -> F:
    """Add the options that every verb has; its function gets an `Output` as `out`."""

    @wraps(function)
    def verb(*args: Any, as_json: bool, quiet: bool, **options: Any) -> Any:
        return function(*args, out=Output(as_json, quiet), **options)

    return grouped(
        "Output",
        click.option("--quiet", "-q", is_flag=True, help="Print errors and warnings only."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    )(verb)  # type: ignore[return-value]


def _device(name: str) -> str:
    if name == CPU:  # which needs no import
        return name
    from symfuse import api

    return api.require(name)


device_option = grouped(
    "Resources",
    click.option(
        "--device",
        default=CPU,
        show_default=True,
        callback=lambda _ctx, _param, value: _device(value),  # OptionError before any work
        help="Compute on cpu, cuda, or cuda:1 (the second GPU).",
    ),
)


def memory_option(text: str) -> Callable[[F], F]:
    """--memory, a size, parsed to bytes. text: its help."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
        if value is None:
            return None
        from symfuse import api

        size = api.parse_size(value, "--memory")
        if size < 1000:
            raise OptionError(f"--memory {value} is {size} bytes, which is too little; add a unit: 6GB")
        return size

    return grouped("Resources", click.option("--memory", metavar="SIZE", callback=read, help=text))


def _declare(files: Sequence[str]) -> None:
    if files:
        from symfuse import api

        for file in files:
            api.declare_file(file)


declare_option = click.option(
    "--declare",
    metavar="FILE",
    multiple=True,
    expose_value=False,
    callback=lambda _ctx, _param, files: _declare(files),
    help="Declare a family as in this file (docs/declare.md).",
)


def _layers(text: str | None) -> str | None:
    """The range, with the old words head and tail replaced; a note says so."""
    if text is None:
        return None
    now = text.replace("head:", "first:").replace("tail:", "last:")
    if now != text:
        note(f"--layers {text} is now written {now}")
    return now


def matching_options(function: F) -> F:
    resources = grouped(
        "Resources",
        click.option("--threads", type=click.IntRange(1), help="Use this many threads. Default: all cores."),
    )
    matching = grouped(
        "Matching",
        click.option(
            "--layers",
            metavar="RANGE",
            callback=lambda _ctx, _param, value: _layers(value),
            help="Match these layers: 0-4, 3, -1, 0-2,5, first:3, last:3.",
        ),
        click.option("--no-scaling", is_flag=True, help="Rotate and permute only."),
        click.option(
            "--group",
            multiple=True,
            metavar="AXIS=GROUP",
            help="Match an axis with a smaller or larger group: qk=orthogonal. Repeatable.",
        ),
        click.option("--one-pass", is_flag=True, help="Rotate, then scale, once (as in the paper)."),
        click.option("--no-biases", is_flag=True, help="Do not translate key and value biases."),
    )
    return matching(resources(memory_option("Limit the memory of matching and proof, such as 6GB.")(function)))


writing_options = grouped(
    "Writing",
    click.option("--overwrite", is_flag=True, help="Replace the target if it exists."),
    click.option("--max-shard-size", default="5GB", show_default=True, help="Limit each weight file to this size."),
    click.option("--push", metavar="ORG/NAME", help="Upload the folder to the Hugging Face hub."),
    click.option("--private", is_flag=True, help="Make the repository of --push private."),
    click.option("--no-verify", is_flag=True, help="Do not run the models to prove that nothing changed."),
)
executor_options = grouped(
    "Resources",
    click.option(
        "--executor",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Match and write in threads of this process, or on a Ray cluster (docs/distributed.md).",
    ),
    click.option("--address", help="Connect to this Ray cluster. Default: start one on this machine."),
)


def executor_of(out: Output, options: Mapping[str, Any]) -> Ray | None:
    """The executor of --executor and --address, closed when the verb ends; None for threads."""
    device = options["device"]
    if options["executor"] == "local":
        if options["address"] is not None:
            raise OptionError("--address needs --executor ray: add that, or leave --address out")
        return None
    if device != CPU and not device.endswith(":0"):
        raise OptionError(f"--device {device}: Ray gives each task a GPU of its own; write --device cuda")
    from symfuse import api

    gpus = int(device != CPU)
    cluster = api.Ray(
        options["address"], workers=options["threads"], gpus=gpus, say=out.say, note=out.note, follow=out.follow
    )
    return click.get_current_context().with_resource(cluster)


def executor_summary(executor: Ray | None) -> dict[str, Any]:
    """What the executor did, for the document of a run."""
    return {} if executor is None else {"executor": executor.summary()}


def import_at_once(*modules: str) -> None:
    """Import what a verb needs, torch too, without garbage collection, which takes a tenth of the time and has nothing
    to collect. The imported objects are frozen, so that later collections skip them."""
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        for module in modules:
            import_module(f"symfuse.{module}")
        gc.freeze()
    finally:
        gc.enable()


def match_options(options: dict[str, Any], axes: str) -> dict[str, Any]:
    return {
        "axes": axes,
        "layers": options["layers"],
        "scaling": not options["no_scaling"],
        "groups": groups_of(options),
        "one_pass": options["one_pass"],
        "biases": not options["no_biases"],
        "threads": options["threads"],
        "memory": options["memory"],
        "device": options["device"],
    }


def groups_of(options: Mapping[str, Any]) -> dict[str, str]:
    """The groups of --group, by axis; OptionError for what is not AXIS=GROUP, and for an axis named twice."""
    groups: dict[str, str] = {}
    for text in options["group"]:
        axis, sign, name = (part.strip() for part in text.partition("="))
        if not sign or axis in groups:
            raise OptionError(f"--group {text}: expected AXIS=GROUP, such as qk=orthogonal, once for each axis")
        groups[axis] = name
    return groups


def open_model(out: Output, source: str) -> Checkpoint:
    from symfuse import api

    checkpoint = api.open_checkpoint(source, name=source)
    for text in () if out.quiet else checkpoint.notes:
        note(f"{checkpoint.name}: {text}")
    return checkpoint


def check_place(options: dict[str, Any], *inputs: Checkpoint, others: Sequence[Path] = ()) -> None:
    """Raise, before any work, if the target cannot be written or the cluster cannot be reached. others: more inputs."""
    from symfuse import api

    api.parse_size(options["max_shard_size"])
    folders = [*(folder for checkpoint in inputs for folder in checkpoint.sources), *others]
    resume = bool(options.get("resume"))
    api.check_target(options["output"], overwrite=options["overwrite"], inputs=folders, resume=resume, lasting=True)
    if options["push"] is not None:
        api.require_upload(options["push"], options["output"])
    elif options["private"]:
        raise OptionError("--private needs --push ORG/NAME: add that, or leave --private out")
    if options["executor"] is not None:
        options["executor"].connect()


def matched(out: Output, source: Checkpoint, anchor: Checkpoint, options: dict[str, Any]) -> Alignment:
    from symfuse import api

    with out.progress("matching", None) as advance:
        return api.match(
            source,
            anchor,
            progress=lambda _step, total: advance(total),
            watch=lambda start, value: advance(text=f"sweeps from {start}: squared distance {value:.5g}"),
            **options,
        )


def save(out: Output, checkpoint: Checkpoint, options: dict[str, Any], **how: Any) -> None:
    """Write a checkpoint. how: for `Checkpoint.save`."""
    with out.progress("writing", len(checkpoint)) as advance:
        checkpoint.save(
            options["output"],
            executor=options["executor"],
            overwrite=options["overwrite"],
            max_shard_size=options["max_shard_size"],
            progress=lambda _name, _nbytes: advance(None),
            **how,
        )


def pushed(out: Output, options: Mapping[str, Any]) -> dict[str, Any]:
    """Upload the output folder if --push is set; returns the entry for the document of the run."""
    from symfuse import api

    if options["push"] is None:
        return {}
    url = api.upload(Path(options["output"]), options["push"], private=options["private"] or None)
    out.say(f"uploaded to {url}")
    return {"pushed": url}


def say_alignment(out: Output, run: Mapping[str, Any]) -> None:
    if "inexact" in run:
        out.say(f"inexact: {', '.join(run['inexact'])}: the result computes another function")
    if "auto" in run["options"]:
        auto = run["options"]["auto"]
        kind = "share a basis" if auto["same_basis"] else "do not share a basis"
        out.say(f"axes chosen for models that {kind} (cosine {auto['cosine']:.2f} in a sample)")
    if "not_rotated" in run["options"]:
        out.say(f"the residual stream is not rotated: {run['options']['not_rotated']}")
    matched = run["matched"]
    rows = [
        [r["axis"], r["group"], f"{r['moved']} of {r['units']}", f"{r['before']:.4g}", f"{r['after']:.4g}"]
        for r in matched
    ]
    columns = ["axis", "group", "elements moved", "squared distance", "after"]
    conditions = [f"{r['condition']:.3g}" for r in matched]
    if set(conditions) - {"1"}:  # else all are permutations, rotations and scales
        columns.append("condition")
        rows = [[*row, condition] for row, condition in zip(rows, conditions, strict=True)]
    out.table(columns, rows, f"{run['source']['name']} -> {run['anchor']['name']}")
    starts = {start: curve for start, curve in run.get("descents", {}).items() if ", round " not in start}
    if starts:  # the other curves, and those after bias translations, are in the JSON
        start, curve = min(starts.items(), key=lambda item: float(item[1][-1]))
        out.say(f"sweeps from {start}: squared distance {' > '.join(f'{value:.5g}' for value in curve)}")
    if run["verified"] is None:
        out.say("not proved (--no-verify)")
    d = run["distance"]
    out.say(f"distance (not squared) of all parameters {d['before']:.4g} -> {d['after']:.4g} ({d['left']:.1%} of it)")

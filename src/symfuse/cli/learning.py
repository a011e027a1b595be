"""The options of a learned matching, and what is printed of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.command import grouped
from symfuse.cli.evaluate import task
from symfuse.output import Output

if TYPE_CHECKING:
    from symfuse.api import Checkpoint, Learning, Progress

# Those that a Learning takes as they are.
_SETTINGS = ("steps", "rate", "spread", "distil", "permutations", "journal", "keep", "teacher")
LEARNING_OPTIONS = ("validation", "both", "start", *_SETTINGS)
HEARD = 32  # batches of activations to start from


def _point(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | float | None:
    """A λ where it is a number."""
    if value in (None, "barrier", "midpoint"):
        return value
    with suppress(ValueError):
        if 0 <= float(value) <= 1:
            return float(value)
    raise click.UsageError(f"--keep is {value}, expected barrier, midpoint or a λ from 0 to 1")


def _teacher(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | int | None:
    """The number of one of the two models, from 0, where it is a number."""
    if value is None or not value.isdecimal():
        return value
    if value not in ("1", "2"):
        raise click.UsageError(f"--teacher is {value}, expected 1 (SOURCE), 2 (the anchor) or another model")
    return int(value) - 1


learning_options = grouped(
    "Learning",
    click.option("--validation", help="Stop by the barrier on these data. Default: some of --data."),
    click.option("--steps", type=click.IntRange(1), help="Take so many steps at most. Default: 2000."),
    click.option("--rate", type=float, help="The learning rate. Default: 0.01."),
    click.option("--spread", type=float, help="Learn on this share of the path, around its middle. Default: 0.8."),
    click.option(
        "--distil",
        type=float,
        help="Weigh the distance to what the models predict so much, 0 to 1 (no labels). Default: 0.",
    ),
    click.option(
        "--teacher",
        callback=_teacher,
        help="Predictions to learn from: 1 (SOURCE), 2 (the anchor) or another model. Default: their mean.",
    ),
    click.option(
        "--keep",
        callback=_point,
        help="Keep the step of the least barrier (default), or loss at the midpoint or at a λ: 0.3.",
    ),
    click.option(
        "--start",
        type=click.Choice(["weights", "activations"]),
        help="Start from a match of weights or of activations (for post-norm models). Default: weights.",
    ),
    click.option(
        "--permutations",
        type=click.Choice(["kept", "straight-through", "annealed", "soft"]),
        help="Learn permutations so; soft ones are inexact. Default: kept.",
    ),
    click.option("--both", is_flag=True, help="Move the anchor too (dual learning); needs --anchor-output."),
    click.option(
        "--journal", type=click.Path(path_type=Path), help="Keep each step in this file; run again to continue."
    ),
)


def learning_of(options: Mapping[str, Any], anchor: Checkpoint, advance: Any) -> Learning:
    """The settings of the options, with tasks on data that the anchor's tokenizer reads."""
    from symfuse import api

    given = {key: options[key] for key in _SETTINGS if options[key] is not None}
    validation = None
    if options["validation"] is not None:
        validation = task({**options, "data": options["validation"]}, anchor)

    def report(progress: Progress) -> None:
        text = f"step {progress.step} of {progress.steps}: barrier {progress.barrier:.4f}"
        advance(text=f"{text}, at best {progress.best:.4f}, at the start {progress.start:.4f}")

    seed = {} if options["seed"] is None else {"seed": options["seed"]}
    given |= {"device": options["device"], **seed}
    return api.Learning(task(options, anchor), validation=validation, progress=report, **given)


def say_learned(out: Output, learned: Mapping[str, Any]) -> None:
    """Print the barrier before and after learning."""
    barriers = [one["barrier"] for one in learned["history"]]
    deciding = [one["decides"] for one in learned["history"]]
    best = deciding.index(min(deciding))
    if best == 0:
        out.say("no step was better than the start: take more steps, another rate (--rate), or more data")
    out.say(
        f"learned: barrier on the validation data {barriers[0]:.4g} -> {barriers[best]:.4g}, at step "
        f"{learned['history'][best]['step']} of {learned['stopped_at']}"
    )

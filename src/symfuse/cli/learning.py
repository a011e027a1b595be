"""The options of learned matching, and its printed summary."""

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

# Passed to Learning unchanged.
_SETTINGS = ("steps", "rate", "spread", "distil", "permutations", "journal", "keep", "teacher")
LEARNING_OPTIONS = ("validation", "both", "start", *_SETTINGS)
START_BATCHES = 32  # of which the activations are matched to start from


def _point(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | float | None:
    """A number as a λ; Learning checks it."""
    with suppress(ValueError):
        return value if value is None else float(value)
    return value


def _teacher(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | int | None:
    """A number (from 1) as the index of one of the two models."""
    if value is None or not value.isdecimal():
        return value
    if value not in ("1", "2"):
        raise click.UsageError(f"--teacher is {value}, expected 1 (SOURCE), 2 (the anchor) or another model")
    return int(value) - 1


learning_options = grouped(
    "Learning",
    click.option("--validation", help="Stop early by the barrier on these data. Default: some of --data."),
    click.option("--steps", type=click.IntRange(1), help="Take at most this many steps. Default: 2000."),
    click.option("--rate", type=float, help="Set the learning rate. Default: 0.01."),
    click.option("--spread", type=float, help="Learn on this share of the path, around its middle. Default: 0.8."),
    click.option(
        "--distil",
        type=float,
        help="Set the share of distillation in the loss, 0 to 1 (1 needs no labels). Default: 0.",
    ),
    click.option(
        "--teacher",
        callback=_teacher,
        help="Distil from 1 (SOURCE), 2 (the anchor) or another model. Default: the mean of both.",
    ),
    click.option(
        "--keep",
        callback=_point,
        help="Keep the step with the lowest barrier (default), or loss at midpoint or at a λ: 0.3.",
    ),
    click.option(
        "--start",
        type=click.Choice(["weights", "activations"]),
        help="Start from a match of weights or of activations (for post-norm models). Default: weights.",
    ),
    click.option(
        "--permutations",
        type=click.Choice(["kept", "straight-through", "annealed", "soft"]),
        help="Learn permutations this way (kept: not at all; soft: inexact). Default: kept.",
    ),
    click.option("--both", is_flag=True, help="Move the anchor too (dual learning); needs --anchor-output."),
    click.option(
        "--journal", type=click.Path(path_type=Path), help="Save progress in this file; run again to continue."
    ),
)


def learning_of(options: Mapping[str, Any], anchor: Checkpoint, advance: Any) -> Learning:
    """The settings of the options, with tasks on data read by the anchor's tokenizer."""
    from symfuse import api

    settings = {key: options[key] for key in _SETTINGS if options[key] is not None}
    validation = None
    if options["validation"] is not None:
        validation = task({**options, "data": options["validation"]}, anchor)

    def report(progress: Progress) -> None:
        text = f"step {progress.step} of {progress.steps}: barrier {progress.barrier:.4f}"
        advance(text=f"{text}, at best {progress.best:.4f}, at the start {progress.start:.4f}")

    seed = {} if options["seed"] is None else {"seed": options["seed"]}
    settings |= {"device": options["device"], **seed}
    return api.Learning(task(options, anchor), validation=validation, progress=report, **settings)


def say_learned(out: Output, learned: Mapping[str, Any]) -> None:
    """Print the barrier before and after learning."""
    barriers = [one["barrier"] for one in learned["history"]]
    deciding = [one["decides"] for one in learned["history"]]
    best = deciding.index(min(deciding))
    if best == 0:
        out.say("no step was better than the start: try more --steps, another --rate, or more data")
    out.say(
        f"learned: barrier on the validation data {barriers[0]:.4g} -> {barriers[best]:.4g}, at step "
        f"{learned['history'][best]['step']} of {learned['stopped_at']}"
    )

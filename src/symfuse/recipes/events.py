"""The events that a run reports, as data: the command line prints them, and a Python function can follow them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from symfuse.verification import Proof, Verification

if TYPE_CHECKING:
    from symfuse.io import Checkpoint
    from symfuse.recipes.check.report import Report
    from symfuse.recipes.stage import Stage
    from symfuse.runs import Record


@dataclass(frozen=True)
class Note:
    """Information about a merge. about: "model", one model as it was opened; "harmless", fields of config.json that
    change nothing; "merge", how models differ, or what was done to them."""

    text: str
    about: Literal["model", "harmless", "merge"] = "merge"


@dataclass(frozen=True)
class Warned:
    """A warning of the check of a merge."""

    text: str


@dataclass(frozen=True)
class Planned:
    """Models are opened, prepared and planned; no work is done yet. merged: the plan. report: its check. last: whether
    this recipe is the last of the run."""

    stage: Stage
    merged: Checkpoint
    report: Report
    last: bool


@dataclass(frozen=True)
class Anchored:
    """The model that the others are aligned to."""

    anchor: str


@dataclass(frozen=True)
class Working:
    """A longer piece of work begins: "matching", "proving", "learning from data"."""

    what: str


@dataclass(frozen=True)
class Step:
    """A step of this work is done. total: the number of steps, if known. text: what is being done; such an event does
    not count as a step."""

    total: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Proved:
    """The outputs of a model before and after its alignment: a Verification if the alignment is inexact."""

    result: Proof | Verification


@dataclass(frozen=True)
class AlignmentDone:
    """A model was aligned. record: what is saved with it; `record.run` has the distances, which read all tensors."""

    record: Record


@dataclass(frozen=True)
class LearningDone:
    """What the method learned from data, in a line."""

    summary: str


Event: TypeAlias = Note | Warned | Planned | Anchored | Working | Step | Proved | AlignmentDone | LearningDone
Follow: TypeAlias = Callable[[Event], object]


def ignore(_event: Event) -> None:
    """Does nothing."""

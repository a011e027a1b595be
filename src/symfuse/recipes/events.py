"""What a run reports while it works, as data: the command line prints it, and a function in Python can follow it."""

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
    """What a user should know of a merge. about: "model", one model as it was opened; "harmless", fields of config.json
    that change nothing; "merge", what the models differ in, or what was done to them."""

    text: str
    about: Literal["model", "harmless", "merge"] = "merge"


@dataclass(frozen=True)
class Warned:
    """What makes a merge doubtful: a warning of its check."""

    text: str


@dataclass(frozen=True)
class Planned:
    """Models opened, prepared and planned; no work is done yet. merged: the plan. report: its check. last: the result
    of this recipe is that of the run."""

    stage: Stage
    merged: Checkpoint
    report: Report
    last: bool


@dataclass(frozen=True)
class Anchored:
    """The model that the others are moved onto."""

    anchor: str


@dataclass(frozen=True)
class Working:
    """A piece of work that takes time begins: "matching", "proving", "looking at data"."""

    what: str


@dataclass(frozen=True)
class Step:
    """A step of this work is done. total: how many there are, where that is known. text: what is being done; such a
    step is none of the total."""

    total: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Proved:
    """The outputs of a model before and after its alignment: a Verification if the alignment is inexact."""

    result: Proof | Verification


@dataclass(frozen=True)
class AlignmentDone:
    """A model was moved. record: what it is saved with; `record.run` has the distances, for which it reads all
    tensors."""

    record: Record


@dataclass(frozen=True)
class LearningDone:
    """What the method learned from data, in a line."""

    summary: str


Event: TypeAlias = Note | Warned | Planned | Anchored | Working | Step | Proved | AlignmentDone | LearningDone
Follow: TypeAlias = Callable[[Event], object]


def ignore(_event: Event) -> None:
    """Follows nothing."""

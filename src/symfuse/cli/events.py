"""The events of a run, printed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from symfuse.cli.app import say_alignment
from symfuse.output import Output

if TYPE_CHECKING:
    from symfuse.recipes.events import Event, Planned, Proved


class Printer:
    """Prints the events of a run, with a progress bar during work. before_work: called with the last plan."""

    def __init__(self, out: Output, before_work: Callable[[Planned], None] = lambda _plan: None) -> None:
        self._out = out
        self._before_work = before_work
        self._bar = ExitStack()
        self._advance: Any = None

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, event: Event) -> None:
        from symfuse.api import events

        if isinstance(event, events.Step):
            if self._advance is not None:
                self._advance(event.total, text=event.text)
            return
        self._bar.close()
        self._advance = None
        match event:
            case events.Working(what):
                self._advance = self._bar.enter_context(self._out.progress(what, None))
            case events.Note(text):
                self._out.note(text)
            case events.Warned(text):
                self._out.warning(text)
            case events.Planned() if event.last:
                self._plan(event)
            case events.Anchored(anchor):
                self._out.say(f"anchor: {anchor}")
            case events.Proved():
                say_proof(self._out, event)
            case events.AlignmentDone(record):
                say_alignment(self._out, record.run)
            case events.LearningDone(summary):
                self._out.say(summary)

    def _plan(self, event: Planned) -> None:
        for line in event.report.summary()[1:] if event.report.possible else ():
            self._out.say(line)  # the first line is printed with the result
        self._before_work(event)


def say_proof(out: Output, event: Proved) -> None:
    from symfuse.api import Verification

    proof = event.result
    if isinstance(proof, Verification):  # of an inexact alignment
        out.say(f"outputs changed by {proof.worst:.2g} ({proof.inputs})")
        return
    out.say(
        f"proved: outputs equal to {proof.exact.worst:.0e} before rounding; rounding to {proof.rounded_to} changes "
        f"them by {proof.rounding:.0e} ({proof.exact.inputs})"
    )

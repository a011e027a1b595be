"""Runs as data, shown as tables, model cards, one page, or figures."""

from __future__ import annotations

from symfuse.recipes.record import alignment_run, distances
from symfuse.reports.results import check_draft, check_result, write_result
from symfuse.reports.run import inspect, text_inputs
from symfuse.reports.transported import transport_card, transport_run
from symfuse.reports.verb import report

__all__ = [
    "alignment_run", "check_draft", "check_result", "distances", "inspect", "report", "text_inputs", "transport_card",
    "transport_run", "write_result",
]  # fmt: skip

"""Runs as data, and what is shown of them: tables, model cards, one page, figures."""

from __future__ import annotations

from symfuse.recipes.record import alignment_run, distances
from symfuse.reports.page import write_page
from symfuse.reports.run import inspection, text_inputs
from symfuse.reports.transported import transport_card, transport_run

__all__ = [
    "alignment_run", "distances", "inspection", "text_inputs", "transport_card", "transport_run", "write_page",
]  # fmt: skip

"""Runs as data, and what is shown of them: tables, model cards, one page, figures."""

from __future__ import annotations

from symfuse.report.page import write_page
from symfuse.report.run import (
    alignment_run,
    distances,
    frame_run,
    frame_text,
    inspection,
    model_card,
    text_inputs,
    tokenizer_notes,
)
from symfuse.report.transported import transport_card, transport_run

__all__ = [
    "alignment_run", "distances", "frame_run", "frame_text", "inspection", "model_card", "text_inputs",
    "tokenizer_notes", "transport_card", "transport_run", "write_page",
]  # fmt: skip

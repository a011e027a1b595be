"""Models of different widths: expand the narrower one to the shape of the wider, exactly; compress it back,
inexactly."""

from __future__ import annotations

from symfuse.widths.compression import compress
from symfuse.widths.copies import assign_copies, match_copies
from symfuse.widths.expansion import expand, widened
from symfuse.widths.maps import Duplication, Isometry, Widening
from symfuse.widths.match import match_widths

__all__ = [
    "Duplication",
    "Isometry",
    "Widening",
    "assign_copies",
    "compress",
    "expand",
    "match_copies",
    "match_widths",
    "widened",
]  # fmt: skip

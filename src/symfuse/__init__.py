"""symfuse: align transformers by their symmetries, prove that nothing changed, and merge them."""

from __future__ import annotations

__version__ = "0.1.0"

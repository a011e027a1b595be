"""Shape and type checks (jaxtyping, beartype) are on in tests, and nothing reaches for the network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("symfuse", "beartype.beartype")

"""The tiny models of the contract tests are mutated here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "contract"))

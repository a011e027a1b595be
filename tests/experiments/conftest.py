"""Experiments are scripts: their folder is looked in for modules, as when they are run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "experiments"))

"""Verify that two models compute the same, by running both, and report how much of them the inputs reached."""

from __future__ import annotations

from symfuse.verification.bench import aligned
from symfuse.verification.comparison import TOLERANCE, Verification, verify
from symfuse.verification.guess import guessed
from symfuse.verification.outputs import Outputs, by_name, compare, random_inputs, run
from symfuse.verification.proof import Proof, prove

__all__ = [
    "TOLERANCE", "Outputs", "Proof", "Verification", "aligned", "by_name", "compare", "guessed",
    "prove", "random_inputs", "run", "verify",
]  # fmt: skip

"""Verify that two models compute the same, by running both, and report how much of them the inputs reached."""

from __future__ import annotations

from symfuse.verification.comparison import TOLERANCE, Verification, verify
from symfuse.verification.outputs import Outputs, compare, computes_in, random_inputs, run
from symfuse.verification.proof import Proof, prove

__all__ = [
    "TOLERANCE", "Outputs", "Proof", "Verification", "compare", "computes_in", "prove", "random_inputs", "run",
    "verify",
]  # fmt: skip

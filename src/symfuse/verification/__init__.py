"""Whether two models compute the same, by running both, and how much of them was seen."""

from __future__ import annotations

from symfuse.verification.outputs import (
    TOLERANCE,
    Outputs,
    Proof,
    Verification,
    compare,
    computes_in,
    prove,
    random_inputs,
    run,
    verify,
)

__all__ = [
    "TOLERANCE", "Outputs", "Proof", "Verification", "compare", "computes_in", "prove", "random_inputs", "run",
    "verify",
]  # fmt: skip

"""How models are related: moved, tuned, rounded, pruned or cut from one another, or trained apart."""

from __future__ import annotations

from symfuse.relations.evidence import Change, Evidence, Units
from symfuse.relations.relation import Relation, evidence_of
from symfuse.relations.several import Merge, Relations, mixture
from symfuse.relations.verdict import Verdict, decide

__all__ = [
    "Change", "Evidence", "Merge", "Relation", "Relations", "Units", "Verdict", "decide",
    "evidence_of", "mixture",
]  # fmt: skip

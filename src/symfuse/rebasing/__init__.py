"""Move a fine-tune of one base onto another: B + α (g(FT) − g(A)), g the alignment of A with B."""

from __future__ import annotations

from symfuse.rebasing.adapter import rebase_adapter
from symfuse.rebasing.models import Moved, combined, move_all
from symfuse.rebasing.relation import Relation, relation

__all__ = ["Moved", "Relation", "combined", "move_all", "rebase_adapter", "relation"]

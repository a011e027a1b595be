"""What a merge will do and cost, and every reason why it cannot be done, before the merge."""

from __future__ import annotations

from symfuse.recipes.check.report import Report
from symfuse.recipes.check.run import Target, check_all, report_of

__all__ = ["Report", "Target", "check_all", "report_of"]

"""The command line: parse, call, print. Everything else is in the API.

Exit codes: 0 done; 2 a wrong option; 3 and up the kind of error (see symfuse.errors); 130 interrupted.
"""

from __future__ import annotations

from symfuse.cli import adapter, align, check, collect, evaluate, merge, models, report, transport
from symfuse.cli.app import main

__all__ = ["adapter", "align", "check", "collect", "evaluate", "main", "merge", "models", "report", "transport"]

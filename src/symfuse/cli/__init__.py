"""The command line: parse, call, print. Everything else is in the API.

Exit codes: 0 done; 2 a wrong option; 3 and up the kind of error (see symfuse.errors); 130 interrupted.
"""

from __future__ import annotations

from symfuse.cli.app import main

__all__ = ["main"]

"""Runs a command and says what it took, as JSON in a file: python _child.py RESULT COMMAND…

A process begins with the peak resident set of the one that starts it, so that is a small one: this.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def timed(command: list[str]) -> dict[str, float]:
    """Seconds by the clock and of the processor (user and system), peak resident set in bytes, and exit code."""
    start = time.perf_counter()
    _, status, usage = os.wait4(os.posix_spawn(command[0], command, os.environ), 0)
    return {
        "wall": time.perf_counter() - start,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "code": os.waitstatus_to_exitcode(status),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(timed(sys.argv[2:])))

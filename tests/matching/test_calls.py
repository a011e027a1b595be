"""How many Python functions run when two tiny Llamas are aligned: what a declaration says is worked out once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Apart from this process, in which every function is checked by another one.
SCRIPT = """
import sys, threading
import symfuse
from contract.tiny import MODELS

def align(label, profile=lambda _: None):
    source, anchor = (MODELS[label](seed) for seed in (0, 1))
    calls = 0
    def count(_frame, event, _arg):
        nonlocal calls
        calls += event == "call"
    profile(count)
    moved = symfuse.match(source, anchor)(source)
    for name in moved:
        moved[name]
    profile(None)
    return calls

def profile(function):
    threading.setprofile(function)
    sys.setprofile(function)

for label in sys.argv[1:]:
    align(label)  # layouts are parsed, modules imported
    print(align(label, profile))
"""


MOST = {"llama": 50_000, "llama-lm": 220_000}


def test_calls_of_an_alignment() -> None:
    """Where every axis is looked up anew, there are 112,000 and 836,000; of the second, 1,100 blocks are solved."""
    command, tests = [sys.executable, "-c", SCRIPT, *MOST], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls = dict(zip(MOST, map(int, done.stdout.split()), strict=True))
    assert all(calls[label] < most for label, most in MOST.items()), calls

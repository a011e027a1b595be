"""Many attacks in a process of their own, which may not grow by more than 1 GB, nor take more than 10 s of the
processor for one.

    python tests/attacks/worker.py KIND FIRST COUNT FOLDER

Prints a line of JSON before each mutant and for each thing that is wrong; a hang ends the process with a traceback.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from attacks.kinds import attack, warm

GROWTH, SECONDS = 2**30, 10


def size() -> int:
    """The address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def campaign(kind: str, first: int, count: int, folder: Path) -> list[dict[str, Any]]:
    """What is wrong in that many attacks; a worker that a hang or the limit ends is followed by another."""
    found, seed = [], first
    while seed < first + count:
        command = [sys.executable, __file__, kind, str(seed), str(first + count - seed), str(folder)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        found += [line for line in lines if "problem" in line]
        if lines and "done" in lines[-1]:
            return found
        if not lines:
            raise RuntimeError(ran.stderr)
        seed = lines[-1]["seed"]
        found.append(
            {"seed": seed, "verb": "", "problem": f"ends the process ({ran.returncode}): {ran.stderr[-3000:]}"}
        )
        seed += 1
    return found


def watch() -> None:
    """End the process, with a traceback, after 10 s of the processor, or 300 s by the clock."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    faulthandler.dump_traceback_later(30 * SECONDS, exit=True)


def main(kind: str, first: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    valid, work = folder / "valid", folder / f"work-{os.getpid()}"
    work.mkdir()
    os.chdir(work)
    warm(kind, work)
    faulthandler.register(signal.SIGVTALRM, chain=True)
    resource.setrlimit(resource.RLIMIT_AS, (size() + GROWTH,) * 2)
    for seed in range(first, first + count):
        print(json.dumps({"seed": seed}), flush=True)
        watch()
        for verb, problem in attack(kind, seed, valid, work):
            if problem:
                print(json.dumps({"seed": seed, "verb": " ".join(verb), "problem": problem}), flush=True)
            watch()
    print(json.dumps({"done": count}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]).resolve())

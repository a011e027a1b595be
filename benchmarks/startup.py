"""How long the program takes to start."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from _harness import BIN, Benchmark, Call, Case, Goal, Plan, process

BARE, TORCH, IMPORT, HELP = "python -c pass", "import torch", "import symfuse", "symfuse --help"
PEER = "mergekit-yaml --help"


def rows(threads: int) -> dict[str, Call]:
    def python(code: str) -> Call:
        return lambda: process([sys.executable, "-c", code], threads=threads)

    found = {BARE: python("pass"), IMPORT: python(IMPORT), TORCH: python(TORCH)}
    for command in (HELP, PEER):
        program, option = command.split()
        if (BIN / program).exists():
            found[command] = lambda path=BIN / program, option=option: process([path, option], threads=threads)
    return found


def cases(plan: Plan) -> Iterator[Case]:  # noqa: ARG001 - there is one
    yield Case({}, {}, rows)


BENCHMARK = Benchmark(
    title="Start-up",
    about="""Each row is a process. Any command that reads a weight has `import torch` as well.""",
    cases=cases,
    ours=HELP,
    floor=BARE,
    peers=(PEER,),
    goals=(Goal(IMPORT, BARE, 4), Goal(HELP, BARE, 8)),
    threaded=False,
)

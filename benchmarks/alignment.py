"""A whole alignment, from files to files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial

import attention
import feed_forward
from _harness import BIN, HERE, ROOT, Benchmark, Call, Case, Goal, Plan, Took, process, timed, torch_threads
from _models import HEAD, fresh, roberta, saved, weights
from safetensors.torch import load_file, save_file

import symfuse
from symfuse.model import Model

sys.path.append(str(ROOT / "tests" / "reference"))
import naive

FLOOR, OURS, LIVE = "copying, products, SVDs, assignments", "symfuse align", "the same, in a process that runs"
PROVED, PEER = "… with its proof", "as published"


def rows(plan: Plan, sizes: Mapping[str, int], proved: bool, threads: int) -> dict[str, Call]:
    config = roberta(**sizes, **({} if plan.quick else {"words": 50265, "positions": 514}))
    name = f"roberta-{sizes['width']}-{sizes['layers']}"
    folders = [saved(plan.work / f"{name}-{seed}", config, seed) for seed in (1, 0)]
    source, anchor = (Model.of(symfuse.open(folder)) for folder in folders)
    out = plan.work / "out"
    once_each = partial(fresh, inputs=folders, out=out)
    solve = attention.floor(source, anchor, threads), feed_forward.floor(source, anchor, threads)
    files = weights(folders)

    def copy() -> Took:
        return process([sys.executable, "-S", HERE / "_copy.py", "direct", out, str(files[0].stat().st_size), *files])

    def align(*options: str) -> Call:
        command = [BIN / "symfuse", "align", folders[0], "--to", folders[1], "-o", out, "--quiet", *options]
        command += ["--axes", "attention,ffn", "--threads", str(threads)]
        return once_each(lambda: process(command, threads=threads))

    def live() -> None:
        model = symfuse.open(folders[0])
        symfuse.match(model, to=folders[1], axes="attention,ffn", threads=threads)(model).save(out, threads=threads)

    def published() -> None:
        states = [load_file(path) for path in files]
        a, b = ({name.removeprefix("roberta."): t for name, t in state.items()} for state in states)
        for layer in range(sizes["layers"]):
            with torch_threads(1):  # two slow it down
                heads = naive.match_attention(a, b, layer, sizes["width"] // HEAD)
            a |= naive.apply_attention(a, layer, *heads)
            a |= naive.apply_ffn(a, layer, naive.match_ffn(a, b, layer))
        out.mkdir()
        save_file({name: t.contiguous() for name, t in a.items()}, out / "model.safetensors")

    found = {
        FLOOR: lambda: once_each(copy)() + timed(solve[0]) + timed(solve[1]),
        OURS: align("--no-verify"),
        LIVE: once_each(live),
        PEER: once_each(published),
    }
    return found | ({PROVED: align()} if proved else {})


def cases(plan: Plan) -> Iterator[Case]:
    cross = plan.cross()
    for sizes in cross:
        yield Case(sizes, {"pair": "independent"}, partial(rows, plan, sizes, sizes == cross[-1]))


BASE = {"width": 768, "layers": 12}
BENCHMARK = Benchmark(
    title="Whole alignment",
    about="""`symfuse align A --to B --axes attention,ffn --no-verify -o OUT`, as a process from start to end: two
RoBERTas in float32 are read (whole vocabularies; width 768 with 12 layers is RoBERTa-base), matched, transformed and
written. The floor is the sum of its parts in the same round: a program that does nothing else reads both files and
writes and syncs one; the products and SVDs of attention; the products and assignments of feed-forward. It does not
include the start of Python and torch; neither does the third row. Inputs are dropped from the page cache before each
run. As published: the loops of `tests/reference/naive.py`, from files to a file that is not synced, in a running
process.""",
    cases=cases,
    ours=OURS,
    floor=FLOOR,
    peers=(PEER,),
    goals=(Goal(OURS, FLOOR, 1.4, by="wall", where=BASE), Goal(LIVE, FLOOR, 1.4, by="wall", where=BASE)),
    warm=False,
)

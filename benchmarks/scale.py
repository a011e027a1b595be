"""What aligning a Llama of 8 billion weights takes: seconds of each layer, memory, and how both grow; and whether that
is what `costs.py` says, of the seconds of its parts.

    python benchmarks/scale.py [--quick] [--work FOLDER] [--widths 4096,2560,1536] [--layers 1,2,4] [--json FILE]
    python benchmarks/scale.py --write                                  puts the tables of its data into docs/scale.md

Measures the parts (products, solvers, bytes merged, moved and proved). Then makes synthetic pairs (bfloat16, sharded)
in the work folder, a few layers of full width, and deletes them after each measurement: planted ones, of which the
anchor is the source moved by random elements of attention and feed-forward with 2 % of noise, and independent ones.
What is timed is `symfuse align` in a process of its own. Prints Markdown tables; what they say: docs/scale.md. Data of
a real run go to benchmarks/data/scale.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from _harness import (
    ABOVE,
    BIN,
    COUNT,
    NUMBER,
    ROOT,
    TEXT,
    Maybe,
    Unfit,
    environment,
    option,
    positives,
    read_json,
    torch_threads,
    writable_file,
    writable_folder,
)
from _harness import process as run
from costs import CONSTANTS, DATA, Cluster, Constants, Shape, alone, matching, moving, proof, spend, tables
from torch import Tensor

import symfuse
from symfuse.alignment import Alignment, random_alignment
from symfuse.groups import Monomial
from symfuse.groups.assignment import LARGE, assign
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io import open as open_checkpoint

NOISE = 0.02
PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- made by benchmarks/scale.py --write -->", "<!-- that was it -->"
LAYERS = 32  # of the model whose time is told
LIMIT = 6e9  # bytes that `align` may take
AXES = ("c", "v", "ffn")

# What is needed of data, as `read_json` checks it.
ROW = {
    "kind": TEXT, "width": COUNT, "layers": COUNT, "gigabytes": NUMBER, "wall": ABOVE, "cpu": ABOVE, "peak": ABOVE,
    "matching": NUMBER, "left": NUMBER, "recovered": Maybe({"neurons": NUMBER, "turns": NUMBER, "factors": NUMBER}),
    "verified": Maybe({"errors": {str: NUMBER}, "rounding": NUMBER}),
    "shape": {field.name: TEXT if field.name == "kind" else COUNT for field in fields(Shape)},
}  # fmt: skip
WANTED = {"environment": {"date": TEXT}, "constants": CONSTANTS, "rows": [ROW]}


def llama(width: int, layers: int, vocab: int = 128256, head: int = 128) -> Shape:
    """A Llama 3, whose heads are 128 wide, four to a key; Unfit, of a width that is not made of such."""
    if width % (4 * head):
        raise Unfit(f"expected multiples of {4 * head}, found {width}")
    heads = width // head
    return Shape("llama", width, layers, width * 7 // 2, heads, heads // 4, vocab, head)


class Drawn(Mapping[str, Tensor]):
    """Weights that are drawn when they are read: N(0, 0.02), gains around 1; of an anchor with noise on a source."""

    def __init__(self, infos: Mapping[str, TensorInfo], seed: int, source: Checkpoint | None = None) -> None:
        self.infos, self.seed, self.source = infos, seed, source
        self.numbers = {name: number for number, name in enumerate(infos)}

    def __getitem__(self, name: str) -> Tensor:
        rng = torch.Generator().manual_seed(1000 * self.seed + self.numbers[name])
        out = torch.randn(self.infos[name].shape, generator=rng)
        if self.source is not None:
            under = self.source[name].float()
            return out.mul_(NOISE * under.std()).add_(under).bfloat16()
        return (out * 0.1 + 1 if "norm" in name else out.mul_(0.02)).bfloat16()

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def make(work: Path, shape: Shape, kind: str) -> tuple[dict[str, Path], Alignment | None]:
    """source and anchor in the work folder, and what was planted."""
    models = {name: work / name for name in ("source", "anchor")}
    infos = shape.infos

    def write(name: str, tensors: Mapping[str, Tensor]) -> None:
        checkpoint = Checkpoint(tensors, shape.config(), name=name, infos=infos)
        checkpoint.save(models[name], max_shard_size="2GB", overwrite=True, threads=1)

    write("source", Drawn(infos, 0))
    if kind == "independent":
        write("anchor", Drawn(infos, 1))
        return models, None
    source = open_checkpoint(models["source"])
    planted = random_alignment(symfuse.declare(source), 7, axes=AXES)
    write("anchor", Drawn(infos, 2, planted(source)))
    return models, planted


def recovered(found: Alignment, planted: Alignment) -> dict[str, float]:
    """The share of neurons that are at their place, and the largest error of an entry of a rotation with its scale, and
    of a neuron's factor."""
    right = total = 0
    errors = {"turns": 0.0, "factors": 0.0}
    for instance, g in planted.elements.items():
        h = found.elements[instance]
        if isinstance(g, Monomial):
            assert isinstance(h, Monomial)
            right += int((g.index == h.index).sum())
            total += g.size
            assert g.scale is not None
            factors = torch.ones_like(g.scale) if h.scale is None else h.scale
            errors["factors"] = max(errors["factors"], float((factors / g.scale - 1).abs().max()))
        else:
            errors["turns"] = max(errors["turns"], float((g.to_dense() - h.to_dense()).abs().max()))
    return {"neurons": right / total, **errors}


# ---- the parts


def cpu(call: Callable[[], object]) -> float:
    """Seconds of the processor, all threads."""
    gc.collect()
    before = time.process_time()
    call()
    return time.process_time() - before


def constants(work: Path, *, quick: bool) -> Constants:
    """What `costs.py` reckons with, in this process and on one BLAS thread each; best of three where that is short."""
    rng = torch.Generator().manual_seed(0)
    n = 512 if quick else 4096
    with torch_threads(1):
        square = torch.randn(n, n, generator=rng)
        rates = {}
        for name, one in (("floats", square), ("doubles", square[: n // 2, : n // 2].double())):
            rates[name] = 2 * len(one) ** 3 / min(cpu(lambda one=one: one @ one) for _ in range(3))
        heads = torch.randn(16, 128, 128, generator=rng, dtype=torch.float64)
        svd = min(cpu(lambda: torch.linalg.svd(heads)) for _ in range(3)) / len(heads)
        sizes = (512, 1024) if quick else (7168, 14336)
        solved = [_assigned(units, rng) for units in sizes]
        power = math.log(solved[1] / solved[0]) / math.log(2)
    folder = Path(tempfile.mkdtemp(dir=work))
    try:
        shape = llama(512 if quick else 4096, 2, vocab=500, head=32 if quick else 128)
        models, planted = make(folder, shape, "planted")
        source, anchor = (open_checkpoint(path) for path in models.values())
        assert planted is not None
        weights = sum(source.info(name).numel for name in source if ".layers." in name)
        size = sum(source.info(name).nbytes for name in source)
        found = Constants(**rates, svd=svd, assigned=solved[1], units=sizes[1], power=power, matched=0.0, moved=0.0,
                          merged={}, proved=0.0, began=0.0, resident=0)  # fmt: skip
        tasks = matching(shape, found, related=True)
        took = cpu(lambda: symfuse.match(source, to=anchor, axes=("attention", "ffn"), threads=1))
        merged = {}
        for method, options in (("linear", {}), ("ties", {"base": 0, "parameters": {"density": 0.5}})):
            three = symfuse.merge([source, anchor, source], method=method, **options)
            merged[method] = cpu(lambda three=three: three.save(folder / "out", overwrite=True)) / (4 * size)
        moved = planted(source)
        small, moves = make(folder / "tiny", llama(64, 1, vocab=100, head=16), "planted")
        assert moves is not None
        symfuse.prove(small["source"], moves)  # the first imports all that it needs
        pair = (small["source"], "--to", small["anchor"])
        began = run([BIN / "symfuse", "align", *pair, "-o", folder / "moved", "--quiet"])
        return replace(
            found,
            matched=max(0.0, took - sum(task.seconds for task in tasks)) / sum(task.read for task in tasks),
            moved=cpu(lambda: moved.save(folder / "out", overwrite=True)) / size,
            merged=merged,
            proved=cpu(lambda: symfuse.prove(source, planted, memory=10**9)) / weights,
            began=began.cpu,
            resident=began.peak or 0,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _assigned(units: int, rng: torch.Generator) -> float:
    """Of the neurons of two networks that have nothing in common. The first assignment of some may compile."""
    one, two = (torch.randn(units, units * 2 // 7, generator=rng) for _ in range(2))
    scores = one @ two.T
    assign(scores[:LARGE, :LARGE])
    return cpu(lambda: assign(scores))


# ---- the whole


def predicted(shape: Shape, kind: str, c: Constants) -> tuple[float, float]:
    """Seconds of the processor and bytes at the peak, of one alignment that is proved and written."""
    here = Cluster(1, 2, LIMIT)
    parts = [
        spend(matching(shape, c, related=kind == "planted"), here, c),
        alone(proof(shape, c), here, c),
        spend(moving(shape, c, files=False), here, c),
    ]
    return c.began + sum(part.busy for part in parts), max(part.memory for part in parts)


def measure(work: Path, shape: Shape, kind: str, options: Sequence[str]) -> dict[str, Any]:
    """One alignment, as data; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(dir=work))
    try:
        models, planted = make(folder, shape, kind)
        command = [BIN / "symfuse", "align", models["source"], "--to", models["anchor"], "-o", folder / "out"]
        found = run([*command, "--axes", "attention,ffn", "--quiet", *options])
        document = json.loads((folder / "out" / "symfuse.json").read_text())
        check = {}
        if planted is not None:
            check = recovered(Alignment.load(folder / "out" / "alignment.symfuse"), planted)
        size = sum(path.stat().st_size for path in models["source"].glob("*.safetensors"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = {
        "kind": kind, "width": shape.width, "layers": shape.layers, "options": list(options), "gigabytes": size / 1e9,
        "wall": found.wall, "cpu": found.cpu, "peak": found.peak, "matching": document["seconds"],
        "left": document["distance"]["left"], "shape": asdict(shape),
        "verified": document["verified"], "recovered": check,
    }  # fmt: skip
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[Mapping[str, Any]], c: Constants) -> Iterator[str]:
    yield (
        "| pair | width | layers | GB each | wall s | of which matching | CPU s | predicted | × | peak GB | predicted "
        "| neurons recovered | error of factors, of rotations | distance left | proved to | rounding |\n|---|"
        + "--:|" * 15
    )  # fmt: skip
    for row in rows:
        check, proof = row["recovered"], row["verified"]
        seconds, peak = predicted(Shape(**row["shape"]), row["kind"], c)
        found = [f"{check['neurons']:.2%}", f"{check['factors']:.0e}, {check['turns']:.0e}"] if check else ["", ""]
        proved = [f"{max(proof['errors'].values()):.0e}", f"{proof['rounding']:.0e}"] if proof else ["", ""]
        cells = [
            row["kind"], row["width"], row["layers"], f"{row['gigabytes']:.1f}", f"{row['wall']:.0f}",
            f"{row['matching']:.0f}", f"{row['cpu']:.0f}", f"{seconds:.0f}", f"{row['cpu'] / seconds:.2f}",
            f"{row['peak'] / 1e9:.2f}", f"{peak / 1e9:.2f}", *found,
            f"{row['left']:.1%}", *proved,
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power law that fits best, by least squares of logarithms."""
    x, y = (torch.tensor([math.log(v) for v in numbers], dtype=torch.float64) for numbers in (sizes, values))
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x @ x))


def each(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float]:
    """A line through values by number of layers: what a layer takes, and what is taken without any."""
    x, y = (torch.tensor([float(row[k]) for row in rows], dtype=torch.float64) for k in ("layers", key))
    slope = float((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum())
    return slope, float(y.mean()) - slope * float(x.mean())


def growth(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of planted pairs: by depth, by width, and the time of the whole model."""
    plain = [row for row in rows if row["kind"] == "planted"]
    by_width: dict[int, list[Mapping[str, Any]]] = {}
    for row in plain:
        by_width.setdefault(row["width"], []).append(row)
    several = {width: found for width, found in by_width.items() if len({row["layers"] for row in found}) > 1}
    yield "| width | CPU s a layer | wall s a layer | CPU s without layers | peak GB, deepest |\n|--:|--:|--:|--:|--:|"
    slopes = {}
    for width, found in sorted(several.items()):
        slopes[width], start = each(found, "cpu")
        wall, _ = each(found, "wall")
        peak = max(found, key=lambda row: int(row["layers"]))["peak"] / 1e9
        yield f"| {width} | {slopes[width]:.1f} | {wall:.1f} | {start:.1f} | {peak:.2f} |"
    if len(slopes) > 1:
        widths = list(slopes)
        law = exponent(widths, [slopes[w] for w in widths])
        last = exponent(widths[-2:], [slopes[w] for w in widths[-2:]])
        yield f"\nCPU seconds of a layer grow as width^{law:.2f}, over the two largest as width^{last:.2f}."
    for width, found in sorted(several.items()):
        if len(found) > 2:
            depths = [row["layers"] for row in found]
            start = each(found, "cpu")[1]
            law = exponent(depths, [row["cpu"] - start for row in found])
            memory = exponent(depths, [row["peak"] for row in found])
            yield f"At width {width}: CPU seconds beyond the start as depth^{law:.2f}, peak as depth^{memory:.2f}."
    if several:
        widest = max(several)
        cpu, wall = each(several[widest], "cpu"), each(several[widest], "wall")
        whole = [(slope * LAYERS + start) / 60 for slope, start in (cpu, wall)]
        yield (
            f"For {LAYERS} layers of width {widest} that makes {whole[0]:.0f} minutes of the processor, {whole[1]:.0f} "
            "by the clock."
        )


def cases(widths: Sequence[int], layers: Sequence[int], *, quick: bool) -> Iterator[tuple[Shape, str]]:
    """All depths at each width, the widest first, and independent pairs, of two depths at the widest."""
    small = {"vocab": 500, "head": 32} if quick else {}
    for width in widths:
        for depth in layers:
            yield llama(width, depth, **small), "planted"
    for depth in layers[:2]:
        yield llama(widths[0], depth, **small), "independent"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small ones, for a test")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--json", type=Path, help="where data go; default, of a run that is not quick, where they are kept"
    )
    parser.add_argument("--resume", action="store_true", help="what is in the file is not measured again")
    parser.add_argument("--write", action="store_true", help="make the page, and measure nothing")
    parser.add_argument("--widths", type=positives)
    parser.add_argument("--layers", type=positives, default=(1, 2, 4))
    chosen = parser.parse_args(arguments)
    if chosen.write:
        with option(parser, "--write"):
            data = read_json(DATA, WANTED)
        PAGE.write_text(paged(PAGE.read_text("utf-8"), data), "utf-8")
        return
    widths = chosen.widths or ((512, 1024) if chosen.quick else (4096, 2560, 1536))
    with option(parser, "--widths"):
        wanted = list(cases(widths, chosen.layers, quick=chosen.quick))
    kept = chosen.json or (None if chosen.quick else DATA)
    if kept is not None:
        with option(parser, "--json"):
            writable_file(kept)
    with option(parser, "--work"):
        writable_folder(chosen.work)
    if chosen.resume and kept is not None and kept.exists():
        with option(parser, "--resume"):
            data = read_json(kept, WANTED)
    else:
        made = asdict(constants(chosen.work, quick=chosen.quick))
        data = {"environment": environment(), "constants": made, "rows": []}
    found = Constants.of(data["constants"])
    done = {(row["kind"], row["width"], row["layers"]) for row in data["rows"]}
    for shape, kind in wanted:
        if (kind, shape.width, shape.layers) in done:
            continue
        data["rows"].append(measure(chosen.work, shape, kind, ("--memory", f"{LIMIT / 1e9:g}GB")))
        if kept is not None:
            kept.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    print("\n".join([json.dumps(data["constants"], indent=1), *table(data["rows"], found), "", *growth(data["rows"])]))


# ---- the page

UNITS = {  # of the constants: by what to multiply, and what it is then
    "floats": (1e-9, "10⁹ operations per second, products in float32"),
    "doubles": (1e-9, "10⁹ operations per second, products in float64"),
    "svd": (1e3, "ms for the SVD of a matrix of 128 × 128, float64"),
    "assigned": (1, "s for the assignment of {units} neurons of independent networks"),
    "power": (1, "exponent with which that time grows in their number, from half as many on"),
    "matched": (1e9, "s per GB that matching reads, besides products and solvers"),
    "moved": (1e9, "s per GB that is transformed and written"),
    "merged": (1e9, "s per GB that a merge reads or writes"),
    "proved": (1e9, "s per 10⁹ weights of layers in a proof (three runs)"),
    "began": (1, "s until `align` starts, and for everything of constant size"),
    "resident": (1e-9, "GB of resident memory at that point"),
}


def section(data: Mapping[str, Any]) -> Iterator[str]:
    """What is made of data, for the page."""
    about = data["environment"]
    yield f"Measured on {about['date']}: {', '.join(f'{key} {about[key]}' for key in about if key != 'date')}.\n"
    yield "| one core | |\n|--:|---|"
    for key, (unit, words) in UNITS.items():
        for name, value in (data["constants"][key] if key == "merged" else {"": data["constants"][key]}).items():
            yield f"| {value * unit:.3g} | {words.format(**data['constants'])}{f', {name}' if name else ''} |"
    yield ""
    yield from table(data["rows"], Constants.of(data["constants"]))
    if len({row["layers"] for row in data["rows"] if row["kind"] == "planted"}) > 1:
        yield ""
        yield from growth(data["rows"])
    yield "\n## Computed costs\n"
    yield from tables(Constants.of(data["constants"]))


def paged(text: str, data: Mapping[str, Any]) -> str:
    """The page with the tables of the data between its two marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([before + BEGIN, *section(data), END + rest.split(END)[1]])


if __name__ == "__main__":
    main()

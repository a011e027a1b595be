"""What the output is and takes: bytes, memory, time; all predicted from headers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping

from symfuse.io import Checkpoint
from symfuse.io.direct import PIECE
from symfuse.io.shards import parse_size, plan_shards
from symfuse.merging import Output
from symfuse.merging.engine import effective_weights
from symfuse.merging.stream import PIECE as SEEN
from symfuse.model.config import text_config
from symfuse.recipes.check.report import Cost, Resolved

START = 250_000_000  # held once everything is imported (200 MB measured), and a little
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
SPEED = 500e6  # bytes per second, read and written together, of element-wise methods on two cores and a local disk
# Blocks that are alive at once, for k + 2 that a method must hold. Measured on two threads and bfloat16, as (k + 2)·n
# blocks beside START, of memory that no file holds: linear n = 2, task_arithmetic 2.6, karcher 1.6, ram 3.3, ties and
# breadcrumbs 3.7, dare_linear 4.5, dare_ties 5.9, sce and arcee_fusion 6.2, della 7, della_linear 8.8.
LEAN = {"linear", "soup", "passthrough", "task_arithmetic"}
LEAN_COPIES, COPIES = 3, 9
# Methods that see a matrix whole: copies of it in float64, for each model and the base (measured 3.5 and 5.7).
WHOLE = {"tsv": 6, "iso_c": 4, "iso_cts": 6}


def cost(
    merged: Checkpoint, outputs: Mapping[str, Output], moved: Collection[str], *, shard: int | str, threads: int | None
) -> Cost:
    """moved: names of models whose tensors are computed whole: aligned ones, and those with an adapter.

    A worker holds, of an element-wise method on k tensors, k + 2 blocks (2¹⁹ values, or a row) in the working dtype,
    COPIES times; of methods of WHOLE, whole matrices; of each moved model, a tensor and a copy; and a piece to write.
    At worst all workers hold the largest tensors at the same time.
    """
    infos = {name: merged.info(name) for name in merged}
    workers = min(len(infos), threads or max(2, os.cpu_count() or 1))
    peaks = sorted((_held(output, moved) for output in outputs.values()), reverse=True)[:workers]
    method = next((output.method.name for output in outputs.values() if output.method is not None), "copy")
    how = f"whole matrices ({method})" if method in WHOLE else "blocks"
    how += f" and whole tensors of {', '.join(sorted(moved))}" if moved else ""
    guided = any(output.method is not None and output.method.learn is not None for output in outputs.values())
    others = ["matching"] * bool(moved) + ["looking at data"] * guided
    size = sum(info.nbytes for info in infos.values())
    read = sum(t.info.nbytes for o in outputs.values() for t in o.inputs)
    config = text_config(merged.config)
    layers = next((config[key] for key in LAYERS if type(config.get(key)) is int), None)
    return Cost(
        tensors=len(infos),
        bytes=size,
        files=len(plan_shards(infos, parse_size(shard))),
        dtypes=dict(Counter(str(i.dtype).removeprefix("torch.") for i in infos.values()).most_common()),
        layers=layers,
        read=read,
        written=size,
        threads=workers,
        memory=START + workers * PIECE + sum(peaks),
        memory_of=f"{workers} threads, {how}" + (f"; {' and '.join(others)} not counted" if others else ""),
        disk_needed=size + size // 100,
        disk_free=None,
        seconds=(read + size) / SPEED,
        speed=f"at {SPEED / 1e9:g} GB/s read and written, assumed; without "
        + (" and ".join(others) or ("what decompositions take" if method in WHOLE else "start-up")),
    )


def _held(output: Output, moved: Collection[str]) -> int:
    terms = [*output.terms, *([output.base] if output.base else [])]
    infos = [term.info for term in terms]
    half = all(i.dtype.itemsize <= 2 for i in infos) and all(t.stored for t in terms)
    computed = [t for t in terms if t.checkpoint.name in moved]
    item = 4 if half and not computed else 8
    numel = output.info.numel
    whole = 2 * numel * 8 * len(computed)
    if output.method is None:
        return whole + min(numel, SEEN) * item
    if output.method.name in WHOLE and len(output.info.shape) in (2, 3):
        return whole + numel * 8 * len(terms) * WHOLE[output.method.name]
    columns = output.info.shape[-1] if len(output.info.shape) > 1 else math.prod(output.info.shape)
    block = min(numel, max(1, SEEN // max(1, columns)) * columns)
    copies = LEAN_COPIES if output.method.name in LEAN else COPIES
    return whole + int(block * item * (len(terms) + 2) * copies)


def weights_of(outputs: Mapping[str, Output]) -> dict[str, list[float]]:
    """Of each model the smallest and the largest weight in effect; empty if the method has none."""
    out: dict[str, list[float]] = {}
    for output in outputs.values():
        guided = output.method is not None and output.method.learn is not None  # which is to find them out
        weights = None if output.method is None or guided else effective_weights(output)
        for term, weight in zip(output.terms, weights or (), strict=False):
            low, high = out.setdefault(term.checkpoint.name, [weight, weight])
            out[term.checkpoint.name] = [min(low, weight), max(high, weight)]
    return out


def resolved(outputs: Mapping[str, Output]) -> list[Resolved]:
    """The first, the middle and the last merged tensor, with their parameters."""
    names = [name for name, output in outputs.items() if output.method is not None]
    chosen = dict.fromkeys(names[i] for i in (0, len(names) // 2, len(names) - 1)) if names else {}
    return [
        Resolved(
            name,
            [term.checkpoint.name for term in outputs[name].terms],
            effective_weights(outputs[name]),
            dict(outputs[name].parameters or {}),
        )
        for name in chosen
    ]

"""How long the diagonal Fisher information takes, against the forward and backward passes over the same batches:
OMP_NUM_THREADS=1 python benchmarks/fisher.py [--rounds 7]

all-MiniLM-L6-v2 with a head for two classes, on full batches of random tokens: plain passes with the gradients of all
weights, this, and one pass for each example, in turns in the same run. Prints a Markdown table, with the peak of memory
above that of the model, each way in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from _timing import Task, interleave, median, ratio, spread
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import symfuse
from symfuse.demo import packages
from symfuse.stats.fisher import fisher_diagonal

SHAPES = ((16, 32), (32, 64))
PLAIN, OURS, EACH = "forward and backward passes", "Fisher, all at once", "Fisher, one by one"
Batches = list[dict[str, Tensor]]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoModelForSequenceClassification.from_pretrained(packages.minilm(), num_labels=2)
    return made.eval()  # type: ignore[no-any-return]


def texts(count: int, rows: int, length: int) -> Batches:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (count, rows, length), generator=rng)
    labels = torch.randint(0, 2, (count, rows), generator=rng)
    return [
        {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": of}
        for one, of in zip(ids, labels, strict=True)
    ]


def loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    return F.cross_entropy(module(**inputs).logits, batch["labels"], reduction="sum")


def tasks(module: nn.Module, batches: Batches) -> dict[str, Task]:
    parameters = [*module.parameters()]

    def plain() -> None:
        for batch in batches:
            module.zero_grad()
            loss(module, batch).backward()

    def each() -> None:
        sums = [torch.zeros_like(p) for p in parameters]
        for batch in batches:
            for row in range(len(batch["labels"])):
                value = loss(module, {name: t[row : row + 1] for name, t in batch.items()})
                for total, gradient in zip(sums, torch.autograd.grad(value, parameters), strict=True):
                    total.addcmul_(gradient, gradient)

    return {PLAIN: plain, OURS: lambda: fisher_diagonal(module, batches, loss), EACH: each}


def resident(what: str) -> float:
    """MiB of this process: VmRSS, or its peak since that was last reset, VmHWM (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def peak(name: str, shape: tuple[int, int]) -> float:
    """MiB that a task takes at its peak, beside the model and the batches."""
    module = model()
    task = tasks(module, texts(2, *shape))[name]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    task()
    return resident("VmHWM") - before


def peaks(shape: tuple[int, int]) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in (PLAIN, OURS, EACH):
        with context.Pool(1) as pool:
            found[name] = pool.apply(peak, (name, shape))
    return found


def table(shape: tuple[int, int], count: int, rounds: int) -> str:
    module = model()
    times = interleave(tasks(module, texts(count, *shape)), rounds)
    memory = peaks(shape)
    lines = [
        f"| {count} batches of {shape[0]} × {shape[1]} tokens | seconds | ± | × passes | × passes, CPU | MiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for task, wall in times.wall.items():
        ratios = [ratio(one, task, PLAIN) for one in (times.wall, times.cpu)]
        columns = f"{median(wall):.2f} | {spread(wall):.0%} | {ratios[0]:.2f} | {ratios[1]:.2f} | {memory[task]:.0f}"
        lines.append(f"| {task} | {columns} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, default 7")
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    versions = f"torch {torch.__version__}; transformers {transformers.__version__}; symfuse {symfuse.__version__}"
    print(f"cores {os.cpu_count()}; threads {torch.get_num_threads()}; load {os.getloadavg()}; {platform.platform()}")
    print(f"{versions}; {options.rounds} rounds\n")
    for shape in SHAPES:
        print(table(shape, options.batches, options.rounds), flush=True)


if __name__ == "__main__":
    main()

"""What a step of learning a matching costs, against a step of training the same model on the same batch:
OMP_NUM_THREADS=1 python benchmarks/learning.py [--rounds 15]

Models with random weights: forward and backward passes, clipping and AdamW of all weights, and in turns in the same run
a step of learning: permutations kept, learned straight through, and kept with both models moved. Prints a Markdown
table, and with --profile what a step of learning spends its time in.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from _timing import Task as Timed
from _timing import interleave, median, ratio
from torch import Tensor, nn

import symfuse
from symfuse.architectures import Model
from symfuse.canonical import canonical
from symfuse.evaluate import Task, open_space
from symfuse.evaluate.tasks.causal_lm import CausalLM
from symfuse.evaluate.tasks.image_classification import ImageClassification
from symfuse.evaluate.tasks.masked_lm import MaskedLM
from symfuse.groups import Group
from symfuse.io import Checkpoint
from symfuse.learning import Learning
from symfuse.learning.journal import Run
from symfuse.learning.latents import Latents
from symfuse.learning.loop import _step
from symfuse.learning.objective import Objective
from symfuse.learning.path import Path as Between
from symfuse.learning.settings import Permutations
from symfuse.matching.chosen import rotatable
from symfuse.spec import Instance

PLAIN = "training"
MODES: dict[str, tuple[Permutations, bool]] = {
    "kept": ("kept", False),
    "straight-through": ("straight-through", False),
    "dual": ("kept", True),
}
GOAL = 1.6


@dataclass(frozen=True)
class Shape:
    """A kind of model and its sizes. batch, length: rows of a batch, and tokens of a row of text."""

    name: str
    kind: str
    config: dict[str, Any]
    batch: int
    length: int = 0


def vit(width: int, layers: int, heads: int, ffn: int, image: int, patch: int, channels: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "image_size": image, "patch_size": patch, "num_channels": channels, "num_labels": 10,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def gpt2(width: int, layers: int, heads: int, words: int, length: int) -> dict[str, Any]:
    return {
        "vocab_size": words, "n_positions": length, "n_embd": width, "n_layer": layers, "n_head": heads,
        "n_inner": 4 * width, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip


MINILM = {
    "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# The first two are those of experiments/, the next two those of Theus et al. 2025.
SHAPES = (
    Shape("ViT, width 64", "vit", vit(64, 4, 4, 128, 8, 2, 1), 64),
    Shape("GPT-2, width 64", "gpt2", gpt2(64, 3, 4, 65, 64), 32, 64),
    Shape("ViT, width 256", "vit", vit(256, 6, 8, 512, 32, 4, 3), 64),
    Shape("GPT-2, width 256", "gpt2", gpt2(256, 6, 4, 65, 256), 8, 256),
    Shape("MiniLM", "bert", MINILM, 16, 64),
)
KINDS = {
    "vit": ("ViTForImageClassification", "ViTConfig", ImageClassification),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", CausalLM),
    "bert": ("BertForMaskedLM", "BertConfig", MaskedLM),
}


def module(shape: Shape, seed: int) -> Any:
    kind, config, _ = KINDS[shape.kind]
    torch.manual_seed(seed)
    made = getattr(transformers, kind)(getattr(transformers, config)(**shape.config))
    return made.eval()


def task(shape: Shape) -> Task:
    """Two batches of random data."""
    rng = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        if shape.kind == "vit":
            size = shape.config["image_size"]
            images = torch.randn(shape.batch, shape.config["num_channels"], size, size, generator=rng)
            batches.append({"pixel_values": images, "labels": torch.randint(10, (shape.batch,), generator=rng)})
        else:
            ids = torch.randint(5, shape.config["vocab_size"], (shape.batch, shape.length), generator=rng)
            labels = ids.clone()
            if shape.kind == "bert":
                labels[torch.rand(ids.shape, generator=rng) > 0.15] = -100
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return KINDS[shape.kind][2](batches, "random")


def pair(shape: Shape) -> list[Model]:
    """Two models in the frame in which everything is matched."""
    models = [Model.of(symfuse.open(module(shape, seed), name=str(seed))) for seed in (0, 1)]
    return [canonical(one, rotatable(one.spec)) if one.spec.reads else one for one in models]


def training(shape: Shape, data: Task) -> Timed:
    live = module(shape, 0)
    parameters = list(live.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step() -> None:
        found = data.totals(live, data.batches[0])
        optimizer.zero_grad()
        cast(Any, found.loss / found.count).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def learned(models: list[Model], data: Task, folder: Path, permutations: Permutations, both: bool) -> Timed:
    """A step in the largest groups of all axes."""
    spec = models[0].spec
    groups: dict[Instance, Group] = {i: g for i in spec.movable if (g := spec.axes[i.axis].group) is not None}
    own = Learning(data, permutations=permutations)
    sources: list[Checkpoint | nn.Module] = [one.checkpoint for one in models]
    space = open_space(sources, ["a", "b"], data, folder)
    latents = [Latents.of(spec, groups, permutations, torch.float32, "cpu") if i == 0 or both else None for i in (0, 1)]
    objective = Objective(Between(space, models, latents, "cpu"), data, 0.0)
    leaves: list[Tensor] = [leaf for one in latents if one is not None for leaf in one.leaves.values()]
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=0.0)
    rng, run = random.Random(0), Run()
    return lambda: _step(objective, data.batches[0], own, run, rng, optimizer, leaves)


def tasks(shape: Shape, folder: Path) -> dict[str, Timed]:
    data, models = task(shape), pair(shape)
    found = {PLAIN: training(shape, data)}
    for name, (permutations, both) in MODES.items():
        found[name] = learned(models, data, folder / name, permutations, both)
    return found


def profile(step: Callable[[], object], rows: int = 15) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            step()
    table: str = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40)
    return table


def row(shape: Shape, found: dict[str, Timed], rounds: int) -> str:
    times = interleave(found, rounds).cpu
    ratios = " | ".join(f"{ratio(times, name, PLAIN):.2f}" for name in MODES)
    return f"| {shape.name} | {1e3 * median(times[PLAIN]):.0f} | {ratios} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds, default 15")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}; transformers {transformers.__version__}; symfuse {symfuse.__version__}"
    print(f"cores {os.cpu_count()}; one thread; load {os.getloadavg()}; {platform.platform()}")
    print(f"{versions}; {options.rounds} rounds; goal {GOAL} × training, seconds of the processor\n")
    print(f"| | {PLAIN}, ms | {' | '.join(f'{name}, ×' for name in MODES)} |\n|---|{'--:|' * (len(MODES) + 1)}")
    for shape in SHAPES:
        if options.only in shape.name:
            with tempfile.TemporaryDirectory() as folder:
                found = tasks(shape, Path(folder))
                print(row(shape, found, options.rounds), flush=True)
                if options.profile:
                    print(*(f"\n{name}\n{profile(found[name])}" for name in found), sep="\n", flush=True)


if __name__ == "__main__":
    main()

"""A step of learning a matching."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from _harness import Benchmark, Call, Case, Goal, Plan
from torch import Tensor, nn

import symfuse
from symfuse.evaluation import Task, open_space
from symfuse.evaluation.tasks.causal_lm import CausalLM
from symfuse.evaluation.tasks.image_classification import ImageClassification
from symfuse.evaluation.tasks.masked_lm import MaskedLM
from symfuse.groups import Group
from symfuse.io import Checkpoint
from symfuse.matching.learned import Learning
from symfuse.matching.learned.journal import Run
from symfuse.matching.learned.latents import Latents
from symfuse.matching.learned.loop import _step
from symfuse.matching.learned.objective import Objective
from symfuse.matching.learned.path import Path as Between
from symfuse.matching.learned.settings import Permutations
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance

FLOOR, OURS = "training", "learning, permutations kept"
MODES: dict[str, tuple[Permutations, bool]] = {
    OURS: ("kept", False),
    "learning, straight through": ("straight-through", False),
    "learning, kept, both models moved": ("kept", True),
}


@dataclass(frozen=True)
class Shape:
    """A kind of model and its sizes. batch, length: rows of a batch, and tokens of a row of text."""

    kind: str
    config: dict[str, Any]
    batch: int
    length: int = 0


def vit(width: int, layers: int) -> Shape:
    """As in experiments/: 64 images of 17 tokens."""
    config = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 2 * width,
        "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return Shape("ViT", config, 64)


def gpt2(width: int, layers: int, length: int, batch: int) -> Shape:
    """As in Theus et al. 2025 at width 256, 6 layers and 256 tokens, of letters."""
    config = {
        "vocab_size": 65, "n_positions": length, "n_embd": width, "n_layer": layers, "n_head": 4,
        "n_inner": 4 * width, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    return Shape("GPT-2", config, batch, length)


def bert(width: int, layers: int, words: int, batch: int, length: int) -> Shape:
    config = {
        "vocab_size": words, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4,
        "intermediate_size": 4 * width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return Shape("BERT", config, batch, length)


KINDS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", ImageClassification),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", CausalLM),
    "BERT": ("BertForMaskedLM", "BertConfig", MaskedLM),
}


def module(shape: Shape, seed: int) -> Any:
    import transformers

    kind, config, _ = KINDS[shape.kind]
    torch.manual_seed(seed)
    made = getattr(transformers, kind)(getattr(transformers, config)(**shape.config))
    return made.eval()


def task(shape: Shape) -> Task:
    """Two batches of random data."""
    rng = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        if shape.kind == "ViT":
            size = shape.config["image_size"]
            images = torch.randn(shape.batch, shape.config["num_channels"], size, size, generator=rng)
            batches.append({"pixel_values": images, "labels": torch.randint(10, (shape.batch,), generator=rng)})
        else:
            ids = torch.randint(5, shape.config["vocab_size"], (shape.batch, shape.length), generator=rng)
            labels = ids.clone()
            if shape.kind == "BERT":
                labels[torch.rand(ids.shape, generator=rng) > 0.15] = -100
            batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return KINDS[shape.kind][2](batches, "random")


def pair(shape: Shape) -> list[Model]:
    """Two models in the frame in which everything is matched."""
    models = [Model.of(symfuse.open(module(shape, seed), name=str(seed))) for seed in (0, 1)]
    return [canonical(one, rotatable(one.spec)) if one.spec.reads else one for one in models]


def training(shape: Shape, data: Task) -> Call:
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


def learned(models: list[Model], data: Task, folder: Path, permutations: Permutations, both: bool) -> Call:
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


def rows(plan: Plan, shape: Shape, threads: int) -> dict[str, Call]:  # noqa: ARG001 - one
    data, models = task(shape), pair(shape)
    found = {FLOOR: training(shape, data)}
    for number, (name, (permutations, both)) in enumerate(MODES.items()):
        with tempfile.TemporaryDirectory(dir=plan.work) as folder:  # weights are read before it goes
            found[name] = learned(models, data, Path(folder) / str(number), permutations, both)
    return found


def cases(plan: Plan) -> Iterator[Case]:
    widths = (16, 32, 64) if plan.quick else (64, 128, 256)
    layers = (1, 2, 3) if plan.quick else (3, 6, 12)
    cells = [(width, layers[0]) for width in widths] + [(widths[1], depth) for depth in layers[1:]]
    shapes = [vit(*cell) for cell in cells]
    if plan.quick:
        shapes += [gpt2(32, 1, 8, 2), bert(32, 1, 100, 2, 8)]
    else:
        shapes += [gpt2(64, 3, 64, 32), gpt2(256, 6, 256, 8), bert(384, 6, 30522, 16, 64)]
    for shape in shapes:
        config: Mapping[str, Any] = shape.config
        width = config.get("hidden_size", config.get("n_embd"))
        depth = config.get("num_hidden_layers", config.get("n_layer"))
        yield Case({"width": width, "layers": depth}, {"model": shape.kind}, partial(rows, plan, shape))


BENCHMARK = Benchmark(
    title="Learned step",
    about="""A step of learned matching between two models of random weights, compared with a step of training one of
them on the same batch: forward, backward, clipping, AdamW of all weights.""",
    cases=cases,
    ours=OURS,
    floor=FLOOR,
    goals=tuple(Goal(mode, FLOOR, 1.6) for mode in MODES),
    threaded=False,
)

"""A barrier between two models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from _harness import NARROW, Benchmark, Call, Case, Goal, Plan
from _models import bert, once

import symfuse
from symfuse.evaluation import Task, make_task, measure, read_records

POINTS = 11
FLOOR, OURS = f"{POINTS} plain evaluations", f"barrier of {POINTS} points"


def saved(folder: Path, width: int, layers: int, words: int, seed: int) -> Path:
    """A BERT of random weights with a tokenizer of whole words, as a folder."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    def write(to: Path) -> None:
        bert("BertForMaskedLM", width, layers, words, seed).save_pretrained(to)
        vocabulary = {
            word: i for i, word in enumerate(["[PAD]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(words - 3))])
        }
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
        ).save_pretrained(to)

    return once(folder, {"width": width, "layers": layers, "words": words, "seed": seed}, write)


def task(folder: Path, texts: int, length: int, words: int) -> Task:
    rng = torch.Generator().manual_seed(0)
    draws = torch.randint(0, words - 3, (texts, length), generator=rng).tolist()
    rows = [{"text": " ".join(f"w{i}" for i in row)} for row in draws]
    return make_task("masked-lm", read_records(rows), symfuse.open(folder), batch_size=16)


def rows(plan: Plan, sizes: Mapping[str, int], threads: int) -> dict[str, Call]:  # noqa: ARG001 - one
    words = 200 if plan.quick else 2000
    names = [plan.work / f"bert-{sizes['width']}-{sizes['layers']}-{seed}" for seed in (0, 1)]
    a, b = (saved(name, **sizes, words=words, seed=seed) for seed, name in enumerate(names))
    loss = task(b, *((2, 8) if plan.quick else (64, 64)), words)
    module = symfuse.to_module(b)

    def plain() -> None:
        for _ in range(POINTS):
            measure(loss, module)

    return {FLOOR: plain, OURS: lambda: symfuse.barrier(a, b, loss, points=POINTS, refine=0)}


def cases(plan: Plan) -> Iterator[Case]:
    for sizes in plan.cross(widths=NARROW):
        yield Case(sizes, {}, partial(rows, plan, sizes))


BENCHMARK = Benchmark(
    title="Barrier",
    about=f"""A barrier of {POINTS} points between two BERTs of random weights, on 64 texts of 64 tokens, compared
with calling the task {POINTS} times on one live module. The barrier also opens both files, builds the module and
computes the weights of every point; with more texts that is a smaller share. Its memory includes the module, which
the plain evaluations have beforehand.""",
    cases=cases,
    ours=OURS,
    floor=FLOOR,
    goals=(Goal(OURS, FLOOR, 1.1),),
    threaded=False,
)

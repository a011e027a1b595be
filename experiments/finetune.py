"""One pretrained encoder, fine-tuned on domains of two tasks: python experiments/finetune.py [TASK …] [--seeds 0 1 2]

all-MiniLM-L6-v2 with a new head, on each domain of `domains.py` that is trained on; two to three minutes each on one
core. They are kept as `transformers` folders in the cache folder of `symfuse.demo.packages`, and trained again only if
RECIPE is raised. The seed decides the head's initial weights, which the domains of a task share, the dropout and the
order of the data.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import domains
import torch
from torch import Tensor, nn

import symfuse
from symfuse.demo.packages import cache, minilm, publishing
from symfuse.evaluate import Task
from symfuse.evaluate.tasks.base import IGNORED
from symfuse.io import Checkpoint

RECIPE = 1
BATCH = 32
EPOCHS = 2
RATE = 1e-4
WARM_UP = 0.1  # of all steps
TOKENIZER = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def finetuned(name: str, domain: str, seed: int) -> Path:
    """The folder of a fine-tuned model; it is trained if it is not there yet. `training.json` in it: how long it took,
    and its score on what was held back."""
    folder = cache() / f"finetuned-{RECIPE}" / f"{name}-{domain}-{seed}"
    if folder.is_dir():
        return folder
    start = time.perf_counter()
    model = _start(name, seed)
    examples = part(name, domain, "train", symfuse.open(minilm()), batch_size=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _train(model, examples)
    seconds = time.perf_counter() - start
    with publishing(folder) as scratch:
        model.save_pretrained(scratch)
        for file in TOKENIZER:
            (scratch / file).write_bytes((minilm() / file).read_bytes())
        score = symfuse.score(scratch, part(name, domain, "match", symfuse.open(minilm())))
        about = {"seconds": round(seconds, 1), "match": score.to_json()}
        (scratch / "training.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    print(f"{folder.name}: {score.loss:.3f} {dict(score.metrics)} in {seconds:.0f} s", flush=True)
    return folder


def seconds(name: str, domain: str, seed: int) -> float:
    """What the training of a model took."""
    found = json.loads((finetuned(name, domain, seed) / "training.json").read_text("utf-8"))
    return float(found["seconds"])


def part(name: str, domain: str, split: Any, model: Checkpoint, **options: Any) -> Task:
    """One part of a domain, for symfuse: all its texts, or by the seed 0 so many as `limit`."""
    kind = domains.TASKS[name]
    known = model.replace(config={**model.config, **_labels(kind)})
    options = {"batch_size": BATCH, "max_length": domains.CUT} | options
    return symfuse.task(kind.task, domains.file(name, domain, split), known, **options)


def _labels(kind: domains.Domains) -> dict[str, Any]:
    return {"id2label": dict(enumerate(kind.labels)), "label2id": {label: i for i, label in enumerate(kind.labels)}}


def _start(name: str, seed: int) -> Any:
    """The pretrained encoder with a head that depends on the seed alone."""
    import transformers

    kind = domains.TASKS[name]
    auto = getattr(transformers, kind.auto)
    model = auto.from_pretrained(minilm(), local_files_only=True, **_labels(kind))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        nn.init.normal_(model.classifier.weight, std=model.config.initializer_range)
        nn.init.zeros_(model.classifier.bias)
    return model


def _train(model: nn.Module, examples: Task) -> None:
    """examples: a batch for each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    count = len(examples.batches)
    steps = EPOCHS * -(-count // BATCH)
    first = WARM_UP * steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / first, (steps - step) / (steps - first))
    )
    model.train()
    for _ in range(EPOCHS):
        for chosen in torch.randperm(count).split(BATCH):
            totals = examples.totals(model, _collated([examples.batches[i] for i in chosen.tolist()]))
            optimizer.zero_grad()
            (totals.loss / totals.count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def _collated(examples: list[Any]) -> dict[str, Tensor]:
    """One batch of examples [1, length] or [1]; MiniLM pads with 0."""
    fill = {"labels": IGNORED}
    return {
        field: torch.nn.utils.rnn.pad_sequence([e[field][0] for e in examples], True, fill.get(field, 0))
        if examples[0][field].ndim == 2
        else torch.cat([e[field] for e in examples])
        for field in examples[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(domains.TASKS)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name in options.tasks or domains.TASKS:
            for domain in domains.TASKS[name].trained:
                finetuned(name, domain, seed)


if __name__ == "__main__":
    main()

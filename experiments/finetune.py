"""One pretrained encoder, fine-tuned on domains of a task: python experiments/finetune.py [NAME …] [--seeds 0 1 2]

What a config's `tuned` describes: a base with a new head, on each domain of `domains.py` that is trained on, or models
that were trained apart, each on a task of `letters.py`; those of configs/small.yml take two minutes at most on a core.
They are kept as `transformers` folders in the cache folder of `symfuse.demo.packages`, and trained again only if their
description or RECIPE is changed. The seed decides the head's initial weights, which the domains of a task share (of
models that were trained apart all share them), the dropout and the order of the data.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import corpora
import letters
import paraphrase
import torch
import yaml
from domains import Domains
from torch import Tensor, nn
from train import Kind, require_numbers

import symfuse
from symfuse.demo import packages
from symfuse.demo.packages import cache, publishing
from symfuse.errors import OptionError
from symfuse.evaluation import Task
from symfuse.evaluation.tasks.base import IGNORED
from symfuse.io import Checkpoint

RECIPE = 1
WARM_UP = 0.1  # of all steps

BASES: dict[str, Callable[[], Path]] = {"minilm": packages.minilm, "paraphrase-l3": paraphrase.folder}


@dataclass(frozen=True)
class Tuned:
    """name: in the config. base: of BASES, a folder, or a model of the hub; with "{seed}" in it, or if it is a family
    of the config that reads by the letter, each seed has its own. domains: see `Domains.of`. batch: texts in a step.
    tokens: at which a text is cut. rate: the highest. family: the base, if it is one."""

    name: str
    base: str
    domains: str | Mapping[str, Any]
    batch: int = 32
    epochs: int = 2
    rate: float = 1e-4
    tokens: int = 32
    device: str = "cpu"
    family: Kind | None = None

    @property
    def kind(self) -> Domains:
        return Domains.of(self.domains, letters.TASKS)

    @property
    def pretrained(self) -> str:
        """A folder, or the ID of a model of the hub: what is fine-tuned, or one of those that are."""
        return self.start(0)

    @property
    def of_seeds(self) -> bool:
        """Whether each seed has a base of its own."""
        return self.family is not None or "{seed}" in self.base

    def start(self, seed: int) -> str:
        """A folder, or the ID of a model of the hub: what a seed is fine-tuned from."""
        if self.family is not None:
            return str(letters.base(self.family, seed))
        return str(BASES[self.base]()) if self.base in BASES else self.base.format(seed=seed)

    def model(self, domain: str, seed: int) -> Checkpoint:
        return symfuse.open(self.folder(domain, seed))

    def folder(self, domain: str, seed: int) -> Path:
        """Of a fine-tuned model, which is trained if it is not there yet. `training.json` in it: how long it took, and
        its score on what was held back."""
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("device", "family")}
        about |= {} if self.family is None else {"family": self.family.folder.name}
        if isinstance(self.domains, Mapping):
            files = self.domains["files"]
            pattern = files if isinstance(files, str) else files["train"]
            about["files"] = corpora.stamps([pattern.format(domain=domain, split="train")])
        folder = cache() / f"finetuned-{RECIPE}" / f"{self.name}-{corpora.digest(about)}" / f"{domain}-{seed}"
        if folder.is_dir():
            return folder
        from transformers import AutoTokenizer

        start = time.perf_counter()
        model = self._start(seed).to(self.device)
        examples = self.part(domain, "train", batch_size=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._train(model, examples)
        seconds = time.perf_counter() - start
        with publishing(folder) as scratch:
            model.cpu().save_pretrained(scratch)
            AutoTokenizer.from_pretrained(self.start(seed)).save_pretrained(scratch)
            score = symfuse.evaluate(scratch, self.part(domain, "match"))
            its_own = {"seconds": round(seconds, 1), "match": score.to_dict()}
            (scratch / "training.json").write_text(json.dumps(its_own, indent=1) + "\n", "utf-8")
        print(f"{self.name} {domain} {seed}: {score.loss:.3f} {dict(score.metrics)} in {seconds:.0f} s", flush=True)
        return folder

    def seconds(self, domain: str, seed: int) -> float:
        """What the training of a model took."""
        return float(json.loads((self.folder(domain, seed) / "training.json").read_text("utf-8"))["seconds"])

    def part(self, domain: str, split: corpora.Split, **options: Any) -> Task:
        """One part of a domain, for symfuse: all its texts, or by the seed 0 so many as `limit`."""
        known = symfuse.open(self.pretrained)
        known = known.replace(config={**known.config, **self._labels()})
        options = {"batch_size": self.batch, "max_length": self.tokens, **self.kind.columns} | options
        return symfuse.task(self.kind.task, self.kind.file(domain, split), known, **options)

    def _labels(self) -> dict[str, Any]:
        labels = self.kind.labels
        return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}

    def _start(self, seed: int) -> Any:
        """The pretrained encoder with a head that depends on the seed alone, or is the same for all bases."""
        import transformers

        auto = getattr(transformers, self.kind.auto)
        # Whatever a checkpoint is stored in: AdamW's steps would vanish in half precision.
        options = {"dtype": torch.float32, "output_loading_info": True, **self._labels()}
        model, about = auto.from_pretrained(self.start(seed), **options)
        new = set(about["missing_keys"])  # a pooler, where the base has none
        prefix = f"{model.base_model_prefix}."
        head = [(n, p) for n, p in model.named_parameters() if n in new or not n.startswith(prefix)]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0 if self.of_seeds else seed)
            for name, parameter in head:
                if parameter.ndim > 1:
                    parameter.normal_(std=model.config.initializer_range)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return model

    def _train(self, model: nn.Module, examples: Task) -> None:
        """examples: a batch for each."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.01)
        count = len(examples.batches)
        steps = self.epochs * -(-count // self.batch)
        first = WARM_UP * steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / first, (steps - step) / (steps - first))
        )
        config: Any = model.config
        pad = getattr(config, "pad_token_id", None) or 0
        model.train()
        for _ in range(self.epochs):
            for indices in torch.randperm(count).split(self.batch):
                totals = examples.totals(model, _collated([examples.batches[i] for i in indices.tolist()], pad))
                optimizer.zero_grad()
                (totals.loss / totals.count).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()


def tuned(
    name: str, known: Mapping[str, Any], device: str = "cpu", families: Mapping[str, Mapping[str, Any]] | None = None
) -> Tuned:
    """One that a config's `tuned` describes, with its families. Raises OptionError if it does not, or with an unknown
    key."""
    if name not in known:
        raise OptionError(f"tuned: nothing is called {name!r}; there are {', '.join(known)}")
    allowed = {f.name for f in fields(Tuned)} - {"name", "device", "family"}
    if wrong := sorted(set(known[name]) - allowed):
        raise OptionError(f"tuned: {name}: {wrong[0]!r} is no key; there are {', '.join(sorted(allowed))}")
    if missing := [key for key in ("base", "domains") if key not in known[name]]:
        raise OptionError(f"tuned: {name}: {missing[0]!r} is missing")
    require_numbers(f"tuned: {name}", known[name], ("batch", "epochs", "tokens"))
    description = (families or {}).get(known[name].get("base"), {})
    family = Kind.of(known[name]["base"], description, device) if "class" in description else None
    return Tuned(name, **known[name], device=device, family=family)


def _collated(examples: list[Any], pad: int) -> dict[str, Tensor]:
    """One batch of examples [1, length] or [1]."""
    fill = {"labels": IGNORED, "input_ids": pad}
    return {
        field: torch.nn.utils.rnn.pad_sequence([e[field][0] for e in examples], True, fill.get(field, 0))
        if examples[0][field].ndim == 2
        else torch.cat([e[field] for e in examples])
        for field in examples[0]
    }


def main() -> None:
    known = yaml.safe_load((Path(__file__).parent / "configs" / "small.yml").read_text("utf-8"))["tuned"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name in options.names or known:
            its = tuned(name, known)
            for domain in its.kind.trained:
                its.folder(domain, seed)


if __name__ == "__main__":
    main()

"""Small models of one shape from different seeds, which were trained independently: python experiments/train.py

The families of a config of configs/ that are trained from random weights; those of configs/small.yml take one to four
minutes each on a core. They are kept as `transformers` folders in the cache folder of `symfuse.demo.packages`, and
trained again only if their description or RECIPE is changed. The seed decides the initial weights and the order of the
data.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import corpora
import torch
import yaml
from torch import Tensor, nn

from symfuse.demo.packages import cache, publishing
from symfuse.errors import CheckpointError, OptionError
from symfuse.evaluation.tasks.base import Predicting
from symfuse.evaluation.tasks.causal_lm import CausalLM
from symfuse.evaluation.tasks.image_classification import ImageClassification
from symfuse.evaluation.tasks.masked_lm import MaskedLM

RECIPE = 1
CONFIGS = Path(__file__).parent / "configs"

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """name: of the family. model: its class in `transformers`. config: the options of its config, without the size of
    the vocabulary, which the data has. data: of `corpora`. batch: images or windows in a step. length: tokens in a
    window. windows: of a part to measure on. at_once: images or windows in a batch of them."""

    name: str
    model: str
    config: Mapping[str, Any]
    data: str | Mapping[str, Any]
    batch: int
    steps: int
    rate: float
    length: int = 0
    windows: int = 0
    at_once: int = 500
    warm_up: int = 50
    device: str = "cpu"

    @classmethod
    def of(cls, name: str, description: Mapping[str, Any], device: str) -> Kind:
        """From a family of a config. Raises OptionError if it has an unknown key or lacks one."""
        settings = {"model" if key == "class" else key: value for key, value in description.items()}
        allowed = {field.name for field in fields(cls)} - {"name", "device"}
        needed = {"model", "config", "data", "batch", "steps", "rate"}
        if wrong := sorted((set(settings) - allowed) | (needed - set(settings))):
            raise OptionError(
                f"families: {name}: {wrong[0]!r} is {'missing' if wrong[0] in needed else 'not a key'}; "
                f"there are {', '.join('class' if key == 'model' else key for key in sorted(allowed))}"
            )
        require_numbers(f"families: {name}", settings, ("batch", "steps", "at_once", "warm_up"), ("length", "windows"))
        if "length" in settings and not settings.get("windows"):
            raise OptionError(f"families: {name}: windows: of text a number of them is needed to measure on")
        return cls(name, **settings, device=device)

    @property
    def folder(self) -> Path:
        """Of all seeds, by what the models are trained from."""
        about = {f.name: getattr(self, f.name) for f in fields(self)}
        about = {key: value for key, value in about.items() if key not in ("windows", "at_once", "device")}
        if isinstance(self.data, Mapping):
            about["files"] = corpora.stamps((self.data.get("images") or self.data["text"]).values())
        return cache() / f"trained-{RECIPE}" / f"{self.name}-{corpora.digest(about)}"

    def build(self) -> Any:
        """A new model, its weights random."""
        import transformers

        kind = getattr(transformers, str(self.model), None)
        if kind is None:
            raise OptionError(f"families: {self.name}: transformers has no class {self.model!r}")
        vocabulary = {} if self.of_images else {"vocab_size": corpora.vocabulary(self.data) + self.masked}
        try:
            return kind(kind.config_class(**vocabulary, **self.config))
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise OptionError(f"families: {self.name}: {self.model} cannot be built ({error})") from error

    @property
    def of_images(self) -> bool:
        return self.length == 0

    @property
    def masked(self) -> bool:
        return self.model.endswith("ForMaskedLM")

    def draw(self, rng: torch.Generator) -> Inputs:
        """One batch of the part "train"."""
        if self.of_images:
            images, labels = corpora.images(self.data, "train")
            indices = torch.randint(len(labels), (self.batch,), generator=rng)
            return {"pixel_values": corpora.scaled(images[indices]), "labels": labels[indices]}
        tokens_of_text = corpora.text(self.data, "train")
        corpora.require_length(self.data, "train", self.length)
        starts = torch.randint(len(tokens_of_text) - self.length, (self.batch,), generator=rng)
        tokens = tokens_of_text[starts[:, None] + torch.arange(self.length)]
        tokens, labels = corpora.mask(tokens, rng, corpora.vocabulary(self.data)) if self.masked else (tokens, tokens)
        return {"input_ids": tokens, "labels": labels}

    def task(self, split: corpora.Split) -> Predicting:
        """All images of a part, or its windows, for symfuse."""
        source = f"{self.data if isinstance(self.data, str) else self.name}, {split}"
        if self.of_images:
            images, labels = (torch.split(part, self.at_once) for part in corpora.images(self.data, split))
            batches = [{"pixel_values": corpora.scaled(x), "labels": y} for x, y in zip(images, labels, strict=True)]
            return ImageClassification(batches, source)
        tokens = torch.split(corpora.windows(self.data, split, self.windows, self.length), self.at_once)
        if not self.masked:
            return CausalLM([_text(t, t) for t in tokens], source)
        rng, hidden = torch.Generator().manual_seed(0), corpora.vocabulary(self.data)
        return MaskedLM([_text(*corpora.mask(t, rng, hidden)) for t in tokens], source)

    def trained(self, seed: int) -> Path:
        """The folder of a trained model; it is trained if it is not there yet."""
        folder = self.folder / str(seed)
        if folder.is_dir():
            return folder
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().to(self.device)
        rng = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        model.train()
        for _ in range(self.steps):
            loss = model(**{key: value.to(self.device) for key, value in self.draw(rng).items()}).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        score = self.task("match")(model.eval())
        if not math.isfinite(score.loss):
            raise CheckpointError(f"{self.name}-{seed}: its loss is {score.loss} after training; lower its rate")
        took = time.perf_counter() - start
        print(f"{self.name}-{seed}: {score.loss:.3f} {dict(score.metrics)} in {took:.0f} s", flush=True)
        with publishing(folder) as scratch:
            model.cpu().save_pretrained(scratch)
        return folder

    def _rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to nothing."""
        return min(1.0, (step + 1) / self.warm_up) * (1 + math.cos(math.pi * step / self.steps)) / 2


def require_numbers(
    where: str, values: Mapping[str, Any], positive: Sequence[str], from_nothing: Sequence[str] = ()
) -> None:
    """Raises OptionError if one of these is no whole number from 1 (or from 0) on, or the rate is not above 0."""
    for key in (*positive, *from_nothing):
        value, least = values.get(key, 1), 1 if key in positive else 0
        if type(value) is not int or value < least:
            raise OptionError(f"{where}: {key}: expected a whole number from {least} on, found {value!r}")
    rate = values.get("rate", 1.0)
    if type(rate) not in (int, float) or not 0 < rate < math.inf:
        raise OptionError(f"{where}: rate: expected a number above 0 (in YAML 1.0e-3, not 1e-3), found {rate!r}")


def _text(tokens: Tensor, labels: Tensor) -> Inputs:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def kinds(config: Path) -> dict[str, Kind]:
    """The families of a config that are trained from random weights."""
    loaded = yaml.safe_load(config.read_text("utf-8"))
    return {
        name: Kind.of(name, family, loaded.get("device", "cpu"))
        for name, family in loaded["families"].items()
        if "class" in family
    }


KINDS = kinds(CONFIGS / "small.yml")


def train(name: str, seed: int) -> Path:
    """The folder of a trained model of configs/small.yml."""
    return KINDS[name].trained(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", default=[], help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    for name in options.kinds or KINDS:
        for seed in options.seeds:
            print(train(name, seed))


if __name__ == "__main__":
    main()

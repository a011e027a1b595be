"""Families: models of one shape from different seeds, trained apart, and the data that they are measured on.

A config's `families` says how to come by each of them: trained here from random weights (`class`, see `train.py`),
published (`hub`: an ID or a folder with "{seed}" in it), or the SCEPTR checkpoints (`package: sceptr`), whose seeds are
names.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import corpora
import pairs
import receptor_task
import torch
from torch import nn
from train import Kind

import symfuse
from symfuse.demo import page
from symfuse.errors import OptionError
from symfuse.evaluation import Batch
from symfuse.evaluation.tasks.base import Predicting
from symfuse.io import Checkpoint
from symfuse.modules import build_module

SEED = 0
Seed = int | str
Build = Callable[[Checkpoint], nn.Module]


class Family(ABC):
    """name: in the config. build: makes the module to evaluate, where `symfuse.to_module` does not."""

    name: str
    build: Build | None = None

    @abstractmethod
    def model(self, seed: Seed) -> Checkpoint:
        """One of the models; it is trained or fetched if it is not there yet."""

    @abstractmethod
    def task(self, split: corpora.Split) -> Predicting:
        """A part of the data: "match" to choose and to stop by, "test" to report."""

    @abstractmethod
    def training(self, count: int) -> Predicting:
        """`count` batches as the models were trained on, drawn once."""

    def for_activations(self, count: int) -> dict[str, Any]:
        """Options of `symfuse.match` for activations of `count` batches of the part "train", without their labels. They
        are listened to on the CPU."""
        return {"data": unlabelled(self.training(count).batches)}


@dataclass(frozen=True, eq=False)
class Trained(Family):
    """Of models that are trained here."""

    kind: Kind

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kind.name

    @property
    def build(self) -> Build | None:  # type: ignore[override]
        return on_device(self.kind.device)

    def model(self, seed: Seed) -> Checkpoint:
        return symfuse.open(self.kind.trained(int(seed)))

    @functools.lru_cache(maxsize=8)  # noqa: B019 - there are a handful of families, which live as long as the process
    def task(self, split: corpora.Split) -> Predicting:
        return self.kind.task(split)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def training(self, count: int) -> Predicting:
        rng = torch.Generator().manual_seed(SEED)
        return type(self.task("match"))([self.kind.draw(rng) for _ in range(count)], f"{self.name}, train")


@dataclass(frozen=True, eq=False)
class Published(Family):
    """Of models of the hub, or of folders. files: of each part. options: of the task."""

    name: str
    pattern: str
    task_name: str
    files: Mapping[str, str]
    options: Mapping[str, Any]
    device: str

    @property
    def build(self) -> Build | None:  # type: ignore[override]
        """Of the class that the task asks for: a checkpoint may name another, such as BertForPreTraining."""
        return on_device(self.device, lambda model: build_module(model, torch.float32, self.task("test").auto))

    def model(self, seed: Seed) -> Checkpoint:
        return symfuse.open(self.pattern.format(seed=seed))

    def task(self, split: corpora.Split) -> Predicting:
        return self._task(split, None)

    def training(self, count: int) -> Predicting:
        whole = self._task("train", count * int(self.options.get("batch_size", 32)))
        return type(whole)(whole.batches[:count], whole.source)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def _task(self, split: corpora.Split, limit: int | None) -> Predicting:
        any_one = self.model(self.options.get("seed", 0))
        options = {"limit": limit} if limit else {}
        options |= {key: value for key, value in self.options.items() if key != "seed"}
        task = symfuse.task(self.task_name, corpora.located(self.files[split]), any_one, **options)
        assert isinstance(task, Predicting)
        return task


class Receptors(Family):
    """The SCEPTR checkpoints of one shape, by their names."""

    name = "sceptr"
    build = staticmethod(page.build_receptors)

    def model(self, seed: Seed) -> Checkpoint:
        return receptor_task.checkpoint(f"SCEPTR_{seed}")

    def task(self, split: corpora.Split) -> Predicting:
        return receptor_task.task(self.model("MLM_only").config, split)

    def training(self, count: int) -> Predicting:
        whole = receptor_task.task(self.model("MLM_only").config, "train")
        return type(whole)(whole.batches[:count], whole.source)

    def for_activations(self, count: int) -> dict[str, Any]:
        tokens = [batch["tokens"] for batch in self.training(count).batches]
        data = [{"src": t, "attention_mask": t[..., 0] != 0} for t in tokens]
        return {"data": data, "build": pairs.listen_receptors}


def unlabelled(batches: Sequence[Batch]) -> list[Batch]:
    return [{name: field for name, field in batch.items() if name != "labels"} for batch in batches]


def held(checkpoint: Checkpoint) -> Checkpoint:
    """With all tensors in memory: what is lazy is done now."""
    return checkpoint.replace(tensors=dict(checkpoint.items()))


def on_device(device: str, build: Build = symfuse.to_module) -> Build | None:
    """Makes modules on another device than the CPU, to which tasks then take their batches; None for the CPU."""
    return None if device == "cpu" else lambda checkpoint: build(checkpoint).to(device)


def family(name: str, known: Mapping[str, Any], device: str) -> Family:
    """One of a config's families. Raises OptionError if it has none of that name, or does not say what it is."""
    if name not in known:
        raise OptionError(f"families: no family is called {name!r}; there are {', '.join(known)}")
    about = known[name]
    if "class" in about:
        return Trained(Kind.of(name, about, device))
    if "hub" in about:
        return Published(name, about["hub"], about["task"], about["data"], about.get("options", {}), device)
    if about == {"package": "sceptr"}:
        return Receptors()
    raise OptionError(f"families: {name}: expected `class`, `hub` or `package: sceptr`, found {', '.join(about)}")

"""Tiny models, planted pairs, and tasks in memory on which matchings are learned within a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from contract.tiny import DECODER, GPT2, TEXT, of
from symfuse.alignment import Alignment
from symfuse.evaluation import Task
from symfuse.evaluation.tasks.causal_lm import CausalLM
from symfuse.evaluation.tasks.sequence_classification import SequenceClassification
from symfuse.groups import Element, Group
from symfuse.io import Checkpoint
from symfuse.matching.learned import Learning
from symfuse.model import Model
from symfuse.modules import live
from symfuse.spec import Instance, Spec

SMALL: dict[str, Callable[..., Checkpoint]] = {
    "bert": of("BertForSequenceClassification", "BertConfig", TEXT),
    "gpt2": of("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": of("LlamaForCausalLM", "LlamaConfig", DECODER),
    "relu": of("BertForSequenceClassification", "BertConfig", TEXT, hidden_act="relu"),
}
ROWS, LENGTH, VOCABULARY = 12, 7, 61


@cache
def model(label: str, seed: int = 0) -> Checkpoint:
    return SMALL[label](seed).replace(name=f"{label}-{seed}")


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@cache
def task(label: str, count: int = 5, seed: int = 0) -> Task:
    """Batches of random tokens, with the labels or the next tokens that model 0 thinks most likely."""
    module, batches = live(model(label)), []
    for i in range(count):
        ids = drawn((ROWS, LENGTH), 100 * seed + i)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            likely = module(**batch).logits.argmax(-1)
        batch["labels"] = likely if likely.ndim == 1 else torch.cat([ids[:, :1], likely[:, :-1]], 1)
        batches.append(batch)
    kind = SequenceClassification if label in {"bert", "relu"} else CausalLM
    return kind(batches, f"random tokens {seed}")


def learning(label: str, **options: Any) -> Learning:
    """Short, and with a validation after each five steps."""
    data = options.pop("task", None) or task(label)
    return Learning(data, **({"steps": 10, "every": 5, "points": 3} | options))


def planted(label: str, size: float = 0.4, seed: int = 1, axes: tuple[str, ...] = ("qk", "v")) -> Checkpoint:
    """Model 0, moved by elements of these axes that are near the identity."""
    source = model(label)
    spec = Model.of(source).spec
    return near(spec, size, seed, axes)(source).replace(name="planted")


def near(spec: Spec, size: float, seed: int, axes: tuple[str, ...] | None = None) -> Alignment:
    """Elements near the identity, of the largest groups; nothing of axes whose elements lie apart."""
    rng = torch.Generator().manual_seed(seed)
    found: dict[Instance, Element] = {}
    for instance in sorted(spec.movable):
        axis = spec.axes[instance.axis]
        assert axis.group is not None
        if (axes is None or instance.axis in axes) and (shapes := axis.group.tangent(axis.size)):
            batch = spec.batch(instance.axis)
            at = {
                name: size * torch.randn(*batch, *shape, generator=rng, dtype=torch.float64)
                for name, shape in shapes.items()
            }
            found[instance] = axis.group.near(at)
    return Alignment(spec, found)


def identity(label: str) -> Alignment:
    return Alignment(Model.of(model(label)).spec, {})


def groups_of(spec: Spec) -> dict[Instance, Group]:
    """The largest group of every instance."""
    return {i: g for i in sorted(spec.movable) if (g := spec.axes[i.axis].group) is not None}


def history(alignment: Alignment) -> list[float]:
    """The barriers of a learned alignment, from its record."""
    return [one["barrier"] for one in alignment.provenance["learning"]["history"]]


def same(one: Alignment, other: Alignment) -> bool:
    """Bitwise, element by element."""
    return one.to_bytes() == other.to_bytes()


def tensors(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: checkpoint[name].clone() for name in checkpoint}

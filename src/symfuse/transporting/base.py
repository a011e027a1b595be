"""The model that an adapter was trained on: its checkpoint, or names and shapes alone, as an alignment records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symfuse.adapters.lora import Change
from symfuse.adapters.names import target_name
from symfuse.alignment import Alignment
from symfuse.architectures import Config, lookup
from symfuse.errors import CheckpointError, OptionError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Rewritten, Rule, StoredTensors
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.rewriting.ties import declared_ties

# How the class that peft trains for a task ends.
CLASSES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}


@dataclass(frozen=True)
class Base:
    """model: as it is stored, its head untied where the frame unties it; framed: after the rewrites of the alignment's
    frame; alignment: with the declaration of that. notes: messages for the user."""

    model: Model
    framed: Model
    alignment: Alignment
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, alignment: Alignment, base: Checkpoint | None, adapter: StoredTensors, task: object) -> Base:
        """task: of peft, for the head of a class that the base is not of, such as a classifier that the adapter holds.

        Raises OptionError if the alignment has a frame and there is no base; IncompatibleError if they do not fit.
        """
        if base is None:
            if alignment.frame:
                raise OptionError(
                    f"this alignment first rewrites the model ({', '.join(alignment.frame)}), and what that does to "
                    "the adapter depends on its weights: give the model that the adapter was trained on (--base)"
                )
            model = Model(described(alignment), alignment.spec)
            return cls(model, model, alignment)
        checkpoint, notes = _with_heads(base, adapter, task)
        model = canonical(Model.of(checkpoint), {"untie"} & set(alignment.frame))
        framed = canonical(model, alignment.frame)
        return cls(model, framed, alignment.bound(framed), notes)

    def with_whole(self, changes: Mapping[str, Change], adapter: StoredTensors) -> Base:
        """With the tensors that an adapter replaces as a whole. changes: by canonical name."""
        checkpoint = self.model.checkpoint
        files = {self.framed.spec.file_name(name): c.whole for name, c in changes.items() if c.whole is not None}
        if not files:
            return self
        rules: dict[str, str | Rule] = {name: name for name in checkpoint}
        rules |= {name: _whole(adapter, key) for name, key in files.items() if name in checkpoint}
        model = replace(self.model, checkpoint=checkpoint.replace(tensors=Rewritten(checkpoint, rules)))
        framed = canonical(model, self.alignment.frame) if self.alignment.frame else model
        return replace(self, model=model, framed=framed)

    def aligned(self, name: str) -> Tensor:
        """The aligned tensor of that canonical name, float64, with its part of the translations."""
        alignment = self.alignment
        return alignment.shift(name, self._linear(name), self._linear)

    def _linear(self, name: str) -> Tensor:
        file = self.framed.spec.file_name(name)
        if self.framed.checkpoint[file].is_meta:  # of a model that is only described
            raise OptionError(
                f"what becomes of a bias that the adapter holds as a whole depends on {file!r} of its base, through "
                "which the alignment translates it: give the model that the adapter was trained on (--base)"
            )
        return self.alignment.move(name, self.framed.read(name).double())


def described(alignment: Alignment) -> Checkpoint:
    """The model of an alignment, from its declaration alone: names and shapes, tensors without data."""
    spec = alignment.spec
    infos = {spec.file_name(n): TensorInfo(torch.float32, d.layout.shape(spec.sizes)) for n, d in spec.tensors.items()}
    empty = {name: torch.empty(info.shape, device="meta") for name, info in infos.items()}
    source = alignment.provenance.get("source", {})
    name = source.get("name", spec.family) if isinstance(source, Mapping) else spec.family
    return Checkpoint(empty, {"model_type": spec.family}, name=f"{name}, as the alignment has it", infos=infos)


def _whole(adapter: StoredTensors, key: str) -> Rule:
    """A tensor that an adapter holds as a whole."""
    return Rule(adapter.info(key), partial(adapter.scanned, key))


def _with_heads(base: Checkpoint, adapter: StoredTensors, task: object) -> tuple[Checkpoint, tuple[str, ...]]:
    """The base with what an adapter knows by a name of its own: a tied head, and a task head that it holds as a whole
    and the base has not; and a note of the latter."""
    family = lookup(base.config, base.name).declare(Config(base.config, str(base.config.get("model_type"))))
    whole = {name: key for key in adapter if (name := target_name(key)) is not None and ".lora_" not in name}
    wanted = {*whole, *(f"{target_name(key)}".rpartition(".lora_")[0] + ".weight" for key in adapter)}
    aliases = {alias: name for alias, name in declared_ties(base).items() if alias in wanted and alias not in base}
    known = {name for head in family.heads.values() for name in head.tensors} - aliases.keys()
    heads = {name: key for name, key in whole.items() if name in known and name not in base}
    if not heads:
        return (_joined(base, "", aliases, {}, adapter, base.config), ()) if aliases else (base, ())
    ending = CLASSES.get(str(task))
    if ending is None:
        raise CheckpointError(
            f"the adapter holds {', '.join(heads)}, which {base.name} has not, and its task_type is {task!r}, expected "
            f"one of {', '.join(CLASSES)}. Give a base of the class that was trained (--base)"
        )
    prefix = "" if any(name.startswith(family.prefix) for name in base) else family.prefix
    config = {k: v for k, v in base.config.items() if k not in ("id2label", "label2id")}
    config |= {"architectures": [ending], "num_labels": adapter.infos[next(iter(heads.values()))].shape[0]}
    note = f"{', '.join(heads)}: a head that the adapter brings along, and {base.name} has not"
    return _joined(base, prefix, aliases, heads, adapter, config), (note,)


def _joined(
    base: Checkpoint,
    prefix: str,
    aliases: Mapping[str, str],
    heads: Mapping[str, str],
    adapter: StoredTensors,
    config: Mapping[str, Any],
) -> Checkpoint:
    rules: dict[str, str | Rule] = {prefix + name: name for name in base}
    rules |= aliases
    rules |= {name: _whole(adapter, key) for name, key in heads.items()}
    return Checkpoint(Rewritten(base, rules), config, name=base.name, folder=base.folder, sources=base.sources)

"""Give output heads that are tied to the embedding a table of their own: where another model has one, and where a
rotation or a folded gain changes the head and must not change the embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from symfuse.architectures.base import ARCHITECTURES, Config, Family, declaration, is_declared
from symfuse.architectures.binding import resolve
from symfuse.errors import SymmetryError
from symfuse.io import Checkpoint
from symfuse.io.lazy import Rule
from symfuse.messages import some
from symfuse.model import Model
from symfuse.model.config import SCALED
from symfuse.model.model import require_equal
from symfuse.model.undeclared import embedding, head_name, is_tied, undeclared
from symfuse.rewriting.rewritten import drop, rewritten


def match_ties(checkpoints: Sequence[Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    """If one model has a head of its own, models with a tied head get one; with notes.

    No alias of an embedding is left. SpecError if a stored alias differs from its tensor.
    """
    owner = next((c for c in checkpoints if not _is_tied(c) and _own_head(c)), None)
    out, notes = [], []
    for checkpoint in checkpoints:
        heads = _aliases(checkpoint, owner) if owner is not None and _is_tied(checkpoint) else {}
        if heads and owner is not None:
            checkpoint = with_heads(checkpoint, heads)
            notes.append(
                f"{checkpoint.name}: the tie of {some(heads)} to {some(heads.values())} is broken, because "
                f"{owner.name} has a head of its own; config.json says tie_word_embeddings false"
            )
        known = is_declared(checkpoint.config)
        spec = resolve(checkpoint.config, checkpoint, checkpoint.name) if known else undeclared(checkpoint)
        for alias, name in spec.tied.items():
            require_equal(checkpoint, spec.file_name(alias), spec.file_name(name))
        out.append(drop(checkpoint, map(spec.file_name, spec.tied)))
    return out, notes


def _is_tied(checkpoint: Checkpoint) -> bool:
    if is_declared(checkpoint.config):
        family, _ = declaration(checkpoint.config, list(checkpoint), checkpoint.name)
        return not family.tied.keys().isdisjoint(_breakable(checkpoint))
    return is_tied(checkpoint.config, checkpoint)


def _own_head(checkpoint: Checkpoint) -> bool:
    if is_declared(checkpoint.config):
        return any(alias in checkpoint for alias in declared_ties(checkpoint))
    return head_name(checkpoint.config, checkpoint) in checkpoint


def _aliases(checkpoint: Checkpoint, owner: Checkpoint) -> dict[str, str]:
    """The head tensors that `owner` stores and this checkpoint ties to its embedding: name → stored tensor."""
    if is_declared(checkpoint.config):
        return {alias: name for alias, name in declared_ties(checkpoint).items() if alias in owner}
    head, embed = head_name(owner.config, owner), embedding(checkpoint)
    return {head: embed} if head and embed else {}


def declared_ties(checkpoint: Checkpoint) -> dict[str, str]:
    """Alias → tensor, for tied models of the family, by the names in the file; without those that are tied whatever the
    config."""
    spec = resolve({**checkpoint.config, "tie_word_embeddings": True}, checkpoint, checkpoint.name)
    return {
        spec.file_name(alias): spec.file_name(name)
        for alias, name in _breakable(checkpoint).items()
        if spec.file_name(name) in checkpoint
    }


def _breakable(checkpoint: Checkpoint) -> dict[str, str]:
    """Alias → tensor, only those that are tied if and because config.json ties them."""
    tied, untied = (_declare({**checkpoint.config, "tie_word_embeddings": tied_value}) for tied_value in (True, False))
    return {alias: name for alias, name in {**tied.tied, **tied.absent}.items() if alias not in untied.tied}


def _declare(config: Mapping[str, Any]) -> Family:
    model_type = str(config["model_type"])
    return ARCHITECTURES[model_type].declare(Config(config, model_type))


def untie(model: Model) -> Model:
    """The model with an output head of its own, tie_word_embeddings false, and a note; unchanged without a tied head.

    SpecError if a stored head differs from the embedding to which the config ties it.
    """
    heads = tied_heads(model)
    if not heads:
        return model
    note = (
        f"{model.name}: the tie of {some(heads)} to {some(dict.fromkeys(heads.values()))} is broken; config.json says "
        "tie_word_embeddings false"
    )
    return replace(Model.of(with_heads(model.checkpoint, heads)), notes=(*model.notes, note))


def tied_heads(model: Model) -> dict[str, str]:
    """The tied tensors of the model's head, and those tied together with it, → the tensors that they equal, by names in
    the file.

    A bare base model has none, even if its config contains tie_word_embeddings.
    """
    checkpoint, spec = model.checkpoint, model.spec
    family, class_name = declaration(checkpoint.config, list(checkpoint), model.name)
    heads = [head for head in family.heads.values() if class_name.endswith(head.classes)]
    own = {name for head in heads for name in head.tensors}
    if own:  # an encoder's embedding, as BART has it
        own |= family.tensors.keys()
    names = {spec.file_name(alias) for alias in family.tied if alias in own or spec.file_name(alias) in checkpoint}
    return {alias: name for alias, name in declared_ties(checkpoint).items() if alias in names}


def require_untied(model: Model, what: str) -> None:
    """SymmetryError if a head of the model is tied."""
    if heads := tied_heads(model):
        raise SymmetryError(
            f"{model.name}: {some(heads)} is {some(dict.fromkeys(heads.values()))} (tie_word_embeddings), so that "
            f"{what} would change both; untie them first (the rewrite 'untie')"
        )


def with_heads(checkpoint: Checkpoint, heads: Mapping[str, str]) -> Checkpoint:
    """The same function with an output head of its own. heads: new tensor → the stored one that it copies.

    Families that scale the output of a tied decoder get a scaled head instead. SpecError if the head is stored already
    and differs from the embedding, although config.json ties them.
    """
    config = dict(checkpoint.config)
    factor = 1.0
    if str(config.get("model_type")) in SCALED:
        scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
        factor = float(config["d_model"]) ** -0.5 if scaled else 1.0
        config["scale_decoder_outputs"] = False
    for head, name in heads.items():
        require_equal(checkpoint, head, name)
    config["tie_word_embeddings"] = False
    if isinstance(inner := config.get("text_config"), Mapping) and "tie_word_embeddings" in inner:
        config["text_config"] = {**inner, "tie_word_embeddings": False}
    rules = {name: name for name in checkpoint} | {h: _scaled(checkpoint, name, factor) for h, name in heads.items()}
    return rewritten(checkpoint, rules).replace(config=config)


def _scaled(checkpoint: Checkpoint, name: str, factor: float) -> str | Rule:
    """A tensor of the checkpoint times a factor."""
    if factor == 1.0:
        return name

    def scale(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor

    return Rule(
        checkpoint.info(name),
        lambda: scale(checkpoint.read(name)),
        part=lambda start, stop: scale(checkpoint.part(name, start, stop)),
        blocks=lambda: map(scale, checkpoint.blocks(name)),
    )

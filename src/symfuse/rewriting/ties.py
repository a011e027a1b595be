"""Output heads that are the embedding, beside models whose head is their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from symfuse.architectures.base import ARCHITECTURES, Config, Family, declaration, resolve
from symfuse.io import Checkpoint
from symfuse.messages import some
from symfuse.model.undeclared import embedding, head_name, is_tied, undeclared
from symfuse.rewriting.rewritten import drop, require_equal, untie


def match_ties(checkpoints: Sequence[Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    """If one model has a head of its own, those whose head is their embedding get one; with notes.

    No alias of an embedding is left. SpecError if a stored one differs from what it stands for.
    """
    owner = next((c for c in checkpoints if not _is_tied(c) and _own_head(c)), None)
    out, notes = [], []
    for checkpoint in checkpoints:
        heads = _aliases(checkpoint, owner) if owner is not None and _is_tied(checkpoint) else {}
        if heads and owner is not None:
            checkpoint = untie(checkpoint, heads)
            notes.append(
                f"{checkpoint.name}: the tie of {some(heads)} to {some(heads.values())} is broken, because "
                f"{owner.name} has a head of its own; config.json says tie_word_embeddings false"
            )
        known = declared(checkpoint)
        spec = resolve(checkpoint.config, checkpoint, checkpoint.name) if known else undeclared(checkpoint)
        for alias, name in spec.tied.items():
            require_equal(checkpoint, spec.file_name(alias), spec.file_name(name))
        out.append(drop(checkpoint, map(spec.file_name, spec.tied)))
    return out, notes


def declared(checkpoint: Checkpoint) -> bool:
    """Whether symfuse has a declaration of the family."""
    return str(checkpoint.config.get("model_type")) in ARCHITECTURES


def _is_tied(checkpoint: Checkpoint) -> bool:
    if declared(checkpoint):
        family, _ = declaration(checkpoint.config, list(checkpoint), checkpoint.name)
        return not family.tied.keys().isdisjoint(_breakable(checkpoint))
    return is_tied(checkpoint.config, checkpoint)


def _own_head(checkpoint: Checkpoint) -> bool:
    if declared(checkpoint):
        return any(alias in checkpoint for alias in declared_ties(checkpoint))
    return head_name(checkpoint.config, checkpoint) in checkpoint


def _aliases(checkpoint: Checkpoint, owner: Checkpoint) -> dict[str, str]:
    """The head tensors that the owner stores and this checkpoint takes from its embedding: name → stored tensor."""
    if declared(checkpoint):
        return {alias: name for alias, name in declared_ties(checkpoint).items() if alias in owner}
    head, embed = head_name(owner.config, owner), embedding(checkpoint)
    return {head: embed} if head and embed else {}


def declared_ties(checkpoint: Checkpoint) -> dict[str, str]:
    """Alias → tensor, as the family has them where they are tied, by the names in the file; without what is one tensor
    whatever the config says."""
    spec = resolve({**checkpoint.config, "tie_word_embeddings": True}, checkpoint, checkpoint.name)
    return {
        spec.file_name(alias): spec.file_name(name)
        for alias, name in _breakable(checkpoint).items()
        if spec.file_name(name) in checkpoint
    }


def _breakable(checkpoint: Checkpoint) -> dict[str, str]:
    """Alias → tensor, as the family has them where config.json says that they are tied, and not where it does not."""
    tied, untied = (_declare({**checkpoint.config, "tie_word_embeddings": said}) for said in (True, False))
    return {alias: name for alias, name in {**tied.tied, **tied.absent}.items() if alias not in untied.tied}


def _declare(config: Mapping[str, Any]) -> Family:
    model_type = str(config["model_type"])
    return ARCHITECTURES[model_type].declare(Config(config, model_type))

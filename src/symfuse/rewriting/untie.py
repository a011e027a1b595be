"""Output heads that are the embedding: a rotation, or a gain folded into the head, must not reach the embedding."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import declaration
from symfuse.errors import SymmetryError
from symfuse.messages import some
from symfuse.model import Model
from symfuse.rewriting.rewritten import untie as untied
from symfuse.rewriting.ties import declared_ties


def untie(model: Model) -> Model:
    """The model with an output head of its own, tie_word_embeddings false, and a note; as it is without a tied head.

    SpecError if a stored head differs from the embedding that it should equal by the config.
    """
    heads = tied_heads(model)
    if not heads:
        return model
    note = (
        f"{model.name}: the tie of {some(heads)} to {some(dict.fromkeys(heads.values()))} is broken; config.json says "
        "tie_word_embeddings false"
    )
    return replace(Model.of(untied(model.checkpoint, heads)), notes=(*model.notes, note))


def tied_heads(model: Model) -> dict[str, str]:
    """The tied tensors of the model's head, and what else is tied with it, → the tensors that they equal, by names in
    the file.

    A bare base model has none, though its config says that they would be tied.
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

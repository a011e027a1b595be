"""What is written has exactly the tensors that its own config demands, by its declaration or its real class."""

from __future__ import annotations

import re
from dataclasses import dataclass

from symfuse.architectures import ARCHITECTURES, Model
from symfuse.architectures.undeclared import undeclared
from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint
from symfuse.io.messages import some
from symfuse.modules import unloadable
from symfuse.rewrite.rewritten import drop

DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Guard:
    """Refuses an output that its class would not load as it is; one of the functions of `Checkpoint.before_save`.

    like: the model whose config it has, as it was opened: what was wrong with that already is no fault of the output.
    kept: tensors that are kept beside what the class demands."""

    like: Checkpoint
    kept: frozenset[str] = frozenset()

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same checkpoint. SpecError or LayoutError if it is not what its declaration demands, IncompatibleError if
        its class of `transformers` demands tensors that it has not, or would not load some that it has."""
        if str(checkpoint.config.get("model_type")) in ARCHITECTURES:
            Model.of(drop(checkpoint, self.kept))
        elif _outline(checkpoint) != _outline(self.like):
            self._ask_class(checkpoint)
        return checkpoint

    def _ask_class(self, checkpoint: Checkpoint) -> None:
        found = unloadable(checkpoint)
        if found is None:
            return
        before = unloadable(self.like) or {}
        if self.kept and found["unexpected_keys"]:
            found |= {"unexpected_keys": (unloadable(drop(checkpoint, self.kept)) or found)["unexpected_keys"]}
        for key, words in _WORDS.items():
            known = {_anywhere(name) for name in before.get(key, ())}
            if new := sorted(name for name in found[key] if _anywhere(name) not in known):
                kind = (checkpoint.config.get("architectures") or [checkpoint.config.get("model_type")])[0]
                raise IncompatibleError(f"{checkpoint.name}: {kind}, as config.json has it, {words}: {some(new, 8)}")


_WORDS = {
    "missing_keys": "needs tensors that the output would not have and that would be filled with random numbers on "
    "loading (choose --foreign keep, or layers of the same kind, or models that have them)",
    "mismatched_keys": "has tensors of other shapes than the output would have",
    "unexpected_keys": "has no place for tensors of the output, which would be lost on loading",
}


def _anywhere(name: str) -> str:
    """A name for all layers."""
    return re.sub(r"\d+", "#", name)


def _outline(checkpoint: Checkpoint) -> tuple[object, object]:
    """What decides whether a class can load it: the config, and names and shapes without those of derived tensors."""
    spec = undeclared(checkpoint)
    left_out = {spec.file_name(alias) for alias in spec.tied} | spec.buffers
    shapes = {name: checkpoint.info(name).shape for name in checkpoint if name not in left_out}
    return {key: value for key, value in checkpoint.config.items() if key not in DTYPES}, shapes

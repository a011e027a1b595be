"""Check that an output has exactly the tensors that its own config requires, by its declaration or its real class."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from symfuse.architectures import resolve
from symfuse.architectures.base import is_declared
from symfuse.errors import CheckpointError, IncompatibleError, SpecError
from symfuse.io import Checkpoint
from symfuse.messages import some
from symfuse.model import Model
from symfuse.model.undeclared import undeclared
from symfuse.modules import unloadable
from symfuse.rewriting.rewritten import drop

DTYPES = ("dtype", "torch_dtype")
_SAYS = {
    "missing_keys": "needs tensors that the output would not have, and that would be filled with random numbers on "
    "loading (choose --foreign keep, layers of the same kind, or models that have them)",
    "mismatched_keys": "has tensors of other shapes than the output would have",
    "unexpected_keys": "has no place for tensors of the output, which would be lost on loading",
}


@dataclass(frozen=True)
class Guard:
    """Refuses an output that its class would not load completely; one of the functions of `Checkpoint.before_save`.

    inputs: the models of the output, as they were opened, first the one whose config it has: faults that this one has
    too are accepted. kept: tensors that are kept in addition to those that the class requires.
    """

    inputs: tuple[Checkpoint, ...]
    kept: frozenset[str] = frozenset()

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the same checkpoint. SpecError or LayoutError if it does not fit its declaration; IncompatibleError if
        its `transformers` class requires tensors that it does not have, or would not load some that it has."""
        if is_declared(checkpoint.config):
            own = resolve(checkpoint.config, checkpoint, checkpoint.name).files.keys() if self.kept else ()
            Model.of(drop(checkpoint, self.kept.difference(own)))
            changed = self._lacks(checkpoint)
        else:
            changed = self._changed(checkpoint)
        if changed:
            self._ask_class(checkpoint)
        return checkpoint

    def _lacks(self, checkpoint: Checkpoint) -> bool:
        """Whether it lacks tensors of the first input that are optional in its declaration, for the same class."""
        first = self.inputs[0]
        same = first.config.get("architectures") == checkpoint.config.get("architectures")
        return same and bool({_anywhere(name) for name in first} - {_anywhere(name) for name in checkpoint})

    def _changed(self, checkpoint: Checkpoint) -> bool:
        """Whether it differs from the first input in config, names or shapes, or an input has other names."""
        try:
            shapes, *theirs = (_shapes(one) for one in (checkpoint, *self.inputs))
        except SpecError:  # of an input that was renamed first
            return True
        configs = [{k: v for k, v in c.config.items() if k not in DTYPES} for c in (checkpoint, self.inputs[0])]
        return configs[0] != configs[1] or shapes != theirs[0] or any(not one.keys() <= shapes.keys() for one in theirs)

    def _ask_class(self, checkpoint: Checkpoint) -> None:
        try:
            before = unloadable(self.inputs[0])
        except CheckpointError:  # then the output cannot be loaded either
            return
        problems = None if before is None else unloadable(checkpoint)
        if before is None or problems is None:
            return
        if self.kept and problems["unexpected_keys"]:
            problems |= {"unexpected_keys": (unloadable(drop(checkpoint, self.kept)) or problems)["unexpected_keys"]}
        there = {_anywhere(name) for one in self.inputs for name in one}
        named = checkpoint.config.get("architectures")
        for key, says in _SAYS.items():
            known = {_anywhere(name) for name in before[key]}
            new = {name for name in problems[key] if _anywhere(name) not in known}
            if key == "missing_keys":  # what no input has, such as a pooler, has to be trained anyway
                new = {name for name in problems[key] if any(_ends_alike(_anywhere(name), one) for one in there)}
            if new and (named or key != "unexpected_keys"):  # a base model is loaded from files with any head
                kind = named[0] if named else checkpoint.config.get("model_type")
                raise IncompatibleError(
                    f"{checkpoint.name}: {kind}, as config.json has it, {says}: {some(sorted(new), 8)}"
                )


def guarded(checkpoint: Checkpoint, inputs: Sequence[Checkpoint], kept: Collection[str] = ()) -> Checkpoint:
    """The checkpoint with a Guard, which replaces those of its inputs."""
    others = tuple(step for step in checkpoint.before_save if not isinstance(step, Guard))
    return checkpoint.replace(before_save=(Guard(tuple(inputs), frozenset(kept)), *others))


def _anywhere(name: str) -> str:
    """A name with the layer's number replaced, the same for all layers."""
    return re.sub(r"\d+", "#", name)


def _ends_alike(one: str, other: str) -> bool:
    """Whether two names are equal up to a prefix."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors except derived ones and aliases."""
    spec = undeclared(checkpoint)
    left_out = {spec.file_name(alias) for alias in spec.tied} | spec.buffers
    return {name: checkpoint.info(name).shape for name in checkpoint if name not in left_out}

"""The verb that moves a fine-tune onto another base: rebase."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from symfuse import __version__
from symfuse.adapters.config import is_adapter
from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.device import CPU
from symfuse.errors import IncompatibleError, OptionError
from symfuse.evaluation import Batch, Task
from symfuse.io import Checkpoint, is_other
from symfuse.io.sources import Source, opened
from symfuse.matching.learned import Learning
from symfuse.rebasing import Moved, Relation, combined, move_all, rebase_adapter, relation
from symfuse.runs import SUFFIX, Record, Run, described, lineage, model_card, recorded
from symfuse.transporting import Transported, alignment_of
from symfuse.verification import Verification
from symfuse.verification import verify as verify_checkpoints

# Of A with B, beside a fine-tune on B: no alignment of the model in that folder.
BASES = f"alignment-bases{SUFFIX}"


@dataclass(frozen=True)
class Rebased:
    """A fine-tune of A, on B. result: a model, or the adapter of one; alignment: of A with B; relation: of g(A) with
    B, and what to expect of that; expect: the same in words; run: all as data; notes: more messages. verified: of a
    model that must compute what the fine-tune does, whether it does."""

    result: Checkpoint | Transported
    alignment: Alignment
    relation: Relation
    expect: str
    run: Run
    notes: tuple[str, ...] = ()
    verified: Verification | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The model. OptionError for an adapter."""
        if isinstance(self.result, Transported):
            raise OptionError("the result is an adapter; save it, and load it on its base")
        return self.result

    @checked
    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model, or the adapter, with a card, symfuse.json and the alignment: a new folder, as a whole or not
        at all. OutputError if that is not possible. overwrite: replace a model's folder."""
        if isinstance(self.result, Transported):
            return self.result.save(folder)
        self.result.save(folder, overwrite=overwrite)
        return Path(folder)


@checked
def rebase(
    finetune: Source, base: Source, onto: Source, *, alignment: Alignment | str | os.PathLike[str] | None = None,
    alpha: float = 1.0, towards: float = 0.0, axes: str | Sequence[str] = "auto",
    data: Task | Iterable[Batch] | None = None, learn: Task | Learning | None = None, device: str = CPU,
    prove: bool = False,
) -> Rebased:  # fmt: skip
    """Move a fine-tune of `base` (A) onto another base `onto` (B): B + alpha·(g(FT) − g(A)), g the alignment A → B.

    Exact if B is A moved: the result computes what the fine-tune does. Else `expect` says how far A is from B, and what
    that usually means (docs/rebase.md). finetune: a model, or the folder of a LoRA adapter, which becomes an adapter of
    B of the same rank. A head that the fine-tune added is moved with the stream; rows of vocabularies that differ are
    carried by token; a wider B gets the widened fine-tune. In a frame that rotates the stream, the result is in that
    frame (`Alignment.in_frame`); an adapter is of B as it is.

    alignment: of A with B, in memory, as a file, or the folder of `symfuse align A --to B`; by default it is matched
    now (`symfuse.match`: axes, data, learn, device). alpha: the strength. towards: b of B + b·(g(A) − B) + …, from B
    (0) to g(A) (1), where the result is the fine-tune itself. prove: run the result beside the fine-tune where they
    must be equal.

    Raises IncompatibleError for models of other families or depths, for a fine-tune or an alignment of another base;
    OptionError for an alpha that is not finite and for `towards` with an adapter; SymmetryError where an adapter cannot
    stay one.
    """
    if not math.isfinite(alpha):
        raise OptionError(f"alpha is {alpha}; expected a finite number, such as 1")
    a, b = opened(base), opened(onto)
    options: dict[str, Any] = {"axes": axes if isinstance(axes, str) else tuple(axes), "device": device}
    options |= {} if data is None else {"batches": data.batches if isinstance(data, Task) else list(data)}
    if learn is not None:
        options["learning"] = learn if isinstance(learn, Learning) else Learning(learn, device=device)
    known = None if alignment is None else _known(alignment, a, b)
    if isinstance(finetune, str | os.PathLike) and is_adapter_folder(finetune):
        if towards:
            raise OptionError(
                "towards: an adapter leaves its base as it is; rebase the merged model (symfuse merge BASE+ADAPTER)"
            )
        return _adapter(Path(finetune), a, b, known, alpha, options)
    ft = opened(finetune)
    moved = move_all(ft, a, b, known, **options)
    related = relation(moved.base, moved.onto)
    new = combined(moved, alpha, towards, device, [b, a, ft])
    same = alpha == 1 and (related.kind == "moved" or towards == 1) and not moved.by_token
    verified = verify_checkpoints(ft, new, moved.alignment) if prove and same else None
    run = _run(moved, related, [ft, a, b], alpha, towards)
    run |= {} if verified is None else {"verified": verified.to_dict()}
    record = Record("rebase", partial(dict, run), (ft, a, b), {BASES: moved.alignment}, moved.alignment.frame)
    return Rebased(recorded(new, record), moved.alignment, related, run["expect"], run, moved.notes, verified)


def is_adapter_folder(finetune: Source) -> bool:
    """Whether a fine-tune is given as the folder of an adapter, without its base."""
    if not isinstance(finetune, str | os.PathLike):
        return False
    return os.path.isdir(finetune) and is_adapter(Path(finetune))  # noqa: PTH112 - false for names that are too long


def _known(alignment: Alignment | str | os.PathLike[str], base: Checkpoint, onto: Checkpoint) -> Alignment:
    """IncompatibleError for an alignment of other models, as far as it says of which it is."""
    loaded = alignment_of(alignment)
    for role, model in (("source", base), ("anchor", onto)):
        of = loaded.provenance.get(role)
        if isinstance(of, dict) and is_other(of, model.lineage()):
            raise IncompatibleError(
                f"the alignment has {of.get('name')!r} as its {role}, found {model.name!r}; give one of the base with "
                "the model that the fine-tune is moved onto: symfuse align BASE --to ONTO"
            )
    return loaded


def _adapter(
    folder: Path, base: Checkpoint, onto: Checkpoint, alignment: Alignment | None, alpha: float, options: dict[str, Any]
) -> Rebased:
    moved = move_all(base, base, onto, alignment, adapter=True, **options)
    related = relation(moved.base, moved.onto)
    new = rebase_adapter(folder, moved.alignment, base, onto, alpha)
    notes = (*moved.notes, *new.notes)
    run = _run(moved, related, [base, onto], alpha, 0.0) | {"adapter": folder.name, "notes": list(notes)}
    run["names"] = [folder.name, *run["names"]]
    files = {name: text.encode() for name, text in described(run, model_card(run, onto)).items()}
    files[BASES] = moved.alignment.to_bytes()
    result = replace(new, files={**new.files, **files})
    return Rebased(result, moved.alignment, related, run["expect"], run, notes)


def _run(moved: Moved, related: Relation, inputs: Sequence[Checkpoint], alpha: float, towards: float) -> dict[str, Any]:
    """The document of a rebase. inputs: the last two are the bases."""
    names = [one.name for one in inputs]
    return {
        "kind": "rebase",
        "symfuse": __version__,
        "inputs": lineage(inputs),
        "names": names,
        "alpha": alpha,
        "towards": towards,
        "relation": related.to_dict(),
        "expect": related.says(names[-2], names[-1], alpha),
        "options": moved.alignment.provenance.get("options"),
        "frame": list(moved.alignment.frame),
        "notes": list(moved.notes),
    }

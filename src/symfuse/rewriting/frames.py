"""Check that models that are to be averaged are in one frame."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from symfuse.errors import IncompatibleError, SymfuseError, SymmetryError
from symfuse.io import Checkpoint
from symfuse.io.companions import RUN
from symfuse.io.folder import read_json
from symfuse.messages import some
from symfuse.model import Model
from symfuse.rewriting.computed import reader
from symfuse.rewriting.residual import fold_rules, norms_of
from symfuse.runs import record_of

NORMS = 8  # that are compared, instead of all weights
RELATED = 0.1  # a cosine of weights that cannot be chance
NEARER = 1.01


def require_same_frame(models: Sequence[Model]) -> tuple[str, ...]:
    """IncompatibleError if some models have the gains of all their norms folded, as in the frame in which a residual
    stream is rotated, and others do not: their average would be meaningless.

    Gains are also all 1 if they were never trained. Then folding the gains of the other models brings them no nearer,
    and a note is returned instead.
    """
    normed = [(model, _has_no_gains(model)) for model in models if model.spec.reads]
    folded, others = ([model for model, without in normed if without is kind] for kind in (True, False))
    if not folded or not others:
        return ()
    names = " and ".join(some(model.name for model in kind) for kind in (folded, others))
    recorded = any("fold_norms" in _recorded_frame(one.checkpoint) for one in folded)
    if recorded or any(_is_fold_of(one, other) for one in folded for other in others):
        raise IncompatibleError(
            f"{names}: in the first all gains of norms are folded into the weights (the "
            "frame in which an alignment rotates the residual stream), in the second they are not, so that equal "
            "weights do not mean the same; bring all into the frame: `alignment.in_frame(model)`, or `symfuse align "
            "--anchor-output FOLDER`. If they are 1 for want of training, --force-config (force_config: true in a "
            "recipe) takes them as they are"
        )
    return (
        f"{names}: in the first all gains of norms are 1, in the second they are not; they are merged as they are, as "
        "if the gains had not been trained. If they were folded into the weights (`symfuse align`), bring all models "
        "into that frame first: --anchor-output FOLDER",
    )


def _recorded_frame(checkpoint: Checkpoint) -> Sequence[str]:
    """The frame that is recorded for a model made by symfuse, also in the folder that it is read from."""
    if (record := record_of(checkpoint)) is not None and record.frame:
        return tuple(record.frame)
    if checkpoint.folder is not None:
        with suppress(SymfuseError):  # none, or a file of another program
            run = read_json(checkpoint.folder / RUN)
            frame = run.get("frame") or (run.get("align") or {}).get("frame") or ()
            return frame if isinstance(frame, list) else ()
    return ()


def _has_no_gains(model: Model) -> bool:
    one = 1 - model.spec.offset
    return all(bool((model.read(gain) == one).all()) for gain in model.spec.reads)


def _is_fold_of(folded: Model, other: Model) -> bool:
    """Whether the weights that read the norms with the most uneven gains are clearly nearer after folding."""
    read, there = reader(other), reader(folded)
    with suppress(SymmetryError):
        norms = sorted(norms_of(other), key=lambda norm: -float(read(norm.gain).std()))[:NORMS]
        rules = {name: rule for norm in norms for name, rule in fold_rules(other, norm).items() if name in norm.readers}
        target, plain, scaled = (
            torch.cat([values(name).flatten() for name in rules if name in folded.spec.tensors])
            for values in (there, read, lambda name: rules[name](read))
        )
        before, after = (float(torch.cosine_similarity(target, one, dim=0)) for one in (plain, scaled))
        return after > max(RELATED, NEARER * before)
    return False

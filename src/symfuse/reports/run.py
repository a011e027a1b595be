"""A model described as data, and a text file as inputs of a model."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from symfuse import api
from symfuse.alignment import Alignment
from symfuse.architectures import ARCHITECTURES
from symfuse.arguments import checked
from symfuse.errors import CheckpointError, SymfuseError
from symfuse.files import regular
from symfuse.io import Checkpoint
from symfuse.io.sources import opened
from symfuse.matching import usual, word_of
from symfuse.messages import first_line
from symfuse.model import Model
from symfuse.model.reasons import reason
from symfuse.recipes import ModelRef
from symfuse.recipes.check.facts import model_facts
from symfuse.runs import REWRITTEN, alignment_file
from symfuse.spec import Spec
from symfuse.verification.rounding import rounding_of


@checked
def inspect(source: api.Source, *, rounding: bool = False) -> dict[str, Any]:
    """The axes of a model, which can be matched and why others cannot, from headers and config: `model`, `family`,
    `tensors`, `parameters`, `dtypes`, `heads`, `axes` (each with `axis`, `size`, `group`, `instances`, `matched_by`,
    `why`) and `notes`. A family without a declaration has no axes.

    rounding: also `rounding`, what rounding the weights to 4 and 8 bits costs, in groups of 128, of 64 and of a row
    (0), as the model is and rewritten: `form`, `bits`, `group`, and the relative errors of `weights` and `outputs`. It
    runs the model on random inputs in float32.
    """
    checkpoint = opened(source)
    family = checkpoint.config.get("model_type")
    if isinstance(family, str) and family not in ARCHITECTURES:
        return _undeclared(checkpoint)
    spec = api.declare(checkpoint)
    infos = [checkpoint.info(name) for name in checkpoint]
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
    notes = list(checkpoint.notes)
    notes += [f"{alias} is tied to {name}" for alias, name in spec.tied.items()]
    notes += _rotatable(checkpoint)
    notes += _inexact(checkpoint)
    if spec.buffers:
        notes.append(f"derived buffers are not saved: {', '.join(sorted(spec.buffers))}")
    return {
        "model": checkpoint.name,
        "family": spec.family,
        "tensors": len(infos),
        "parameters": sum(info.nbytes // info.dtype.itemsize for info in infos),
        "dtypes": ", ".join(dtypes),
        "heads": sorted(spec.heads),
        "axes": _axes(spec),
        "notes": notes,
        **(_rounding(checkpoint) if rounding else {}),
    }


def _rounding(checkpoint: Checkpoint) -> dict[str, Any]:
    rows, notes = rounding_of(Model.of(checkpoint))
    return {"rounding": [asdict(row) for row in rows], "not_rounded": notes}


def _undeclared(checkpoint: Checkpoint) -> dict[str, Any]:
    """`inspect` for a family without a declaration."""
    result = model_facts(ModelRef(checkpoint.name), checkpoint, Model.of(checkpoint, undeclared=True), ())
    return {
        "model": checkpoint.name,
        "family": result.family,
        "tensors": len(checkpoint),
        "parameters": result.parameters,
        "dtypes": ", ".join(result.dtypes),
        "heads": [],
        "axes": [],
        "notes": [
            *checkpoint.notes,
            f"{result.layers or 'no'} layers, vocabulary of {result.vocabulary or 'no'} tokens",
            f"symfuse has no declaration for {result.family!r}: it can be merged by names and shapes, but not "
            f"aligned; declared are {', '.join(sorted(ARCHITECTURES))}; `symfuse suggest` drafts a declaration",
        ],
    }


def _rotatable(checkpoint: Checkpoint) -> list[str]:
    """Whether the residual stream of a pre-norm model may be rotated."""
    model = Model.of(checkpoint)
    if not model.spec.reads:
        return []
    _, frame, why = usual([model], ("residual",))
    words = ", ".join(REWRITTEN[name] for name in frame)
    may = f"may be rotated in a frame ({words})" if frame else f"may not be rotated: {why['not_rotated']}"
    streams = {atom.name: None for gain in model.spec.reads for atom in model.spec.tensors[gain].layout.atoms}
    return [f"{', '.join(streams)}: {may}"]


def _inexact(checkpoint: Checkpoint) -> list[str]:
    """The variants of an aligned model's alignment, if it is inexact."""
    file = alignment_file(checkpoint.folder) if isinstance(checkpoint.folder, Path) else None
    variants: tuple[str, ...] = ()
    if file is not None and file.is_file():
        with suppress(SymfuseError):  # another file of that name
            variants = Alignment.load(file).variants
    return [f"inexact: {', '.join(variants)}: the result computes another function"] if variants else []


def _axes(spec: Spec) -> list[dict[str, Any]]:
    touched = Counter(instance.axis for instance in spec.movable)
    used = {axis for declared in spec.tensors.values() for axis in declared.layout.names}
    rows = []
    for name, axis in spec.axes.items():
        if name not in used:
            continue
        batch = 1
        for size in spec.batch(name):
            batch *= size
        rows.append(
            {
                "axis": name,
                "size": axis.size,
                "group": axis.group.label if axis.group else "none",
                "instances": touched[name] * batch if axis.group else 0,
                "matched_by": word_of(name) or "-",
                "why": reason(name, axis),
            }
        )
    if spec.shifts:
        free = sum(shift.into is None for shift in spec.shifts)
        row = {
            "axis": "biases",
            "size": "-",
            "group": "translation",
            "instances": len(spec.shifts),
            "matched_by": "attention",
        }
        why = ("softmax ignores key biases; " if free else "") + "value biases may move into the output bias"
        rows.append(row | {"why": why})
    return rows


def text_inputs(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """The lines of a text file as inputs of a model, by its tokenizer."""
    from symfuse.evaluation.tasks.base import from_companions

    try:
        lines = [line for line in regular(path).read_text("utf-8").splitlines() if line.strip()]
    except (UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path}: not a text file in UTF-8 that can be read ({error})") from error
    if not lines:
        raise CheckpointError(f"{path}: no lines of text in it")
    # Without tokenizer files, transformers makes an empty tokenizer.
    if not any(re.match(r"tokenizer\.|vocab|.*\.model$", file) for file in checkpoint.companions()):
        raise CheckpointError(f"{checkpoint.name}: there is no tokenizer beside its weights; add its files")
    positions = checkpoint.config.get("max_position_embeddings", checkpoint.config.get("n_positions", 128))
    try:
        tokenizer = from_companions(checkpoint, "AutoTokenizer", "tokenizer")
        if tokenizer.pad_token is None:  # as of GPT-2; padding is masked
            tokenizer.pad_token = tokenizer.eos_token
        length = min(128, positions - 4)
        return dict(tokenizer(lines, return_tensors="pt", padding=True, truncation=True, max_length=length))
    except Exception as error:  # tokenizers raise various errors
        raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot read the text ({first_line(error)})") from error

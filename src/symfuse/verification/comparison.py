"""Whether two checkpoints compute the same: run both as the real class on the same inputs, and compare the outputs.

An output in a transformed space (a base model's hidden states under a residual permutation) is compared after the same
element has acted on the original's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.errors import IncompatibleError, OptionError, SpecError, VerificationError
from symfuse.io import Checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.sources import Source, opened, opened_any
from symfuse.messages import SCHEMA, shown, some
from symfuse.model import as_declared
from symfuse.model.config import OF_HEADS, differences, text_config
from symfuse.modules import with_defaults
from symfuse.rewriting.like import alike
from symfuse.rewriting.names import match_names
from symfuse.verification.bench import Bench, aligned
from symfuse.verification.coverage import Changed, changes
from symfuse.verification.naming import NAMED, described, missing
from symfuse.verification.outputs import Outputs, worst

# The largest relative difference of outputs that counts as rounding: a few dozen times the effect of rounding the
# weights of real encoders (1e-7, 2e-4 and 1e-3), and for float64 a thousand times the error of exact alignments. In
# half precision this can hide small mistakes: `prove` compares an alignment before it is rounded.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Verification:
    """errors: for each output field the largest difference, relative to the largest entry of the original's output: of
    its row for `verify`, of all for `prove`. tolerance: the largest difference allowed. inputs: a description of the
    inputs. config: the fields of config.json that differ and change what the same weights compute. unread: tensors of
    which single rows differ that no input read, with these rows. coverage: of tables (embeddings, positions, experts)
    how many rows were read, of how many; of "positions" how many were run; tensors that were not read count 0.
    tensors: how those with the same name differ by more than rounding, or which model lacks one, in the order of the
    original. lacking: whether the models were not run, as one of them lacks tensors that its class needs. notes: how
    the names of a model were read, and which weights were rounded."""

    errors: Mapping[str, float]
    tolerance: float
    inputs: str
    config: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    coverage: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    lacking: bool = False
    notes: tuple[str, ...] = ()

    @property
    def worst_output(self) -> str:
        """The output that differs most, one with NaN before all others; empty if the models were not run."""
        sizes = {name: math.inf if math.isnan(error) else error for name, error in self.errors.items()}
        return max(sizes, key=sizes.__getitem__, default="")

    @property
    def worst(self) -> float:
        """The largest difference of an output; infinite if the models were not run."""
        return self.errors[self.worst_output] if self.errors else math.inf

    @property
    def equal(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    __repr__, _repr_html_ = shown(
        lambda self: {
            "result": "equal" if self.equal else "different",
            "largest relative difference": float(self.worst),
            "tolerance": float(self.tolerance),
            "inputs": self.inputs,
        }
    )

    def to_dict(self) -> dict[str, Any]:
        """As JSON: what `symfuse verify --json` prints."""
        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "errors": dict(self.errors),
            "tolerance": self.tolerance,
            "inputs": self.inputs,
            "config": list(self.config),
            "unread": list(self.unread),
            "coverage": {name: list(counts) for name, counts in self.coverage.items()},
            "tensors": dict(self.tensors),
            "notes": list(self.notes),
        }

    @property
    def differences(self) -> list[str]:
        """Every reason why the models are not equal."""
        if self.lacking:
            return [f"tensors are missing, so that it cannot be run: {self.where}"]
        outputs = f"output {self.worst_output!r} differs by {self.worst:.2e}, {self.tolerance:.0e} allowed"
        out = [] if self.worst <= self.tolerance else [outputs]  # NaN compares false
        out += [f"config.json differs in {text}" for text in self.config]
        return out + [f"rows differ that no input reads: {text}" for text in self.unread]

    @property
    def where(self) -> str:
        """The tensors that differ, the first ones named, in words; empty if none do."""
        first = [f"{name} {how}" for name, how in [*self.tensors.items()][:NAMED]]
        more = len(self.tensors) - NAMED
        return "; ".join([*first, *([f"and {more} more"] if more > 0 else [])])

    @property
    def seen(self) -> str:
        """How many rows of tables and positions were read, in words; empty if unknown."""
        whole = sum(read == of for read, of in self.coverage.values())
        parts = [f"{read} of {of} rows of {name}" for name, (read, of) in self.coverage.items() if 0 < read < of]
        none = [name for name, (read, _) in self.coverage.items() if not read]
        parts += [f"all rows of {whole} table{'s' if whole > 1 else ''}"] if whole else []
        return "; ".join([*parts, *([f"nothing of {some(none)}"] if none else [])])

    def raise_if_different(self, what: str) -> None:
        if not self.equal:
            raise VerificationError(self.difference(what))

    def difference(self, what: str) -> str:
        return (
            f"{what}: output {self.worst_output!r} differs by {self.worst:.2e} relative to its largest entry, "
            f"{self.tolerance:.0e} allowed ({self.inputs}); nothing was written"
        )


@checked
def verify(
    before: Source,
    after: Source,
    alignment: Alignment | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Outputs] | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    like: Source | None = None,
    names: Mapping[str, Any] | None = None,
) -> Verification:
    """Whether two models compute the same function, by running both as the real class on the same inputs.

    Models of other libraries, in other files and under other names can be compared (docs/conversions.md). A model
    without a config is read as the other one, or as `like`; so is one whose names are in `names`: by the name (with {l}
    for the number of a layer) the name in the other model, a list of names for a tensor whose rows they are, or
    {"transposed": name}.

    inputs: what to feed; by default seeded random ones, which reach special tokens, all token types, rows that differ,
    and positions as far as is affordable, and of which some have padding. Configs are compared as for a merge, and the
    tensors that both have row by row: rows of a table that differ while others do not are among the inputs, and make
    the models differ if no input reads them; `.coverage` and `.seen` say how much of tables and positions was read.
    alignment: the one that produced `after`, if its outputs are in transformed spaces: those of `before` are then
    transformed too. runner: runs a checkpoint, for models that `transformers` does not have. dtype: in which both are
    run; where dtypes differ, the wider weights are rounded first. tolerance: of a difference relative to the largest
    output of its row; by default by the coarsest dtype of the tensors that differ, or that is computed in (TOLERANCE).
    The result says `.equal`, `.errors` and `.differences`, and in `.tensors` which tensors differ. Raises
    CheckpointError if a model cannot be run, IncompatibleError if the second does not accept the inputs, or does not
    have the outputs, of the first.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise OptionError(f"tolerance {tolerance}: it must be a number from 0 on, such as 1e-6")
    opening = opened if runner is None else opened_any
    models = (opening(before), opening(after))
    before, after = models if runner else alike(*models, None if like is None else opened(like), names)
    read = [(new.name, new.notes[len(old.notes) :]) for old, new in zip(models, (before, after), strict=True)]
    notes = tuple(f"{name}: {note}" for name, own in read for note in own)
    if runner is None and (lacking := missing(before, after)):
        return Verification({}, 0.0, "not run", tensors=lacking, lacking=True, notes=notes)
    if runner is None and alignment is None:
        (before, one), (after, two) = _rounded(before, after), _rounded(after, before)
        notes += one + two
    pair, compared = _edits(before, after, alignment) if runner is None else (None, None)
    edits = compared or {}
    bench = Bench(inputs, runner, dtype, compared=(before, after), words=_words(before, edits))
    expected = [aligned(outputs, alignment) for outputs in bench.run(before)]
    errors = worst(expected, bench.run(after, alignment), by_row=True)
    if tolerance is None:
        changed = changes(before, after) if compared is None or alignment is not None else compared
        dtypes = _differing_dtypes(before, after, changed) | {dtype}
        tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    unread = bench.unread(edits, tolerance)
    tensors = {} if pair is None else described(*pair, edits)
    config, coverage = _deciding(before, after), bench.coverage()
    return Verification(errors, tolerance, bench.what, config, unread, coverage, tensors, notes=notes)


def _rounded(one: Checkpoint, other: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """The first model with its tensors rounded to the dtypes of those of the same name in the other one, where these
    are coarser, and notes of that: a conversion of dtypes alone then changes nothing."""

    def eps(model: Checkpoint, name: str) -> float:
        dtype = model.info(name).dtype
        return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0

    coarser = [name for name in one if name in other and 0 < eps(one, name) < eps(other, name)]
    if not coarser:
        return one, ()
    dtypes = some(sorted({str(other.info(name).dtype).removeprefix("torch.") for name in coarser}))
    narrow = {dtype: one.to(dtype) for dtype in {other.info(name).dtype for name in coarser}}
    rules: dict[str, str | Rule] = {name: name for name in one}
    for name in coarser:
        cast = narrow[other.info(name).dtype]
        rules[name] = Rule(cast.info(name), partial(cast.read, name), part=partial(cast.part, name))
    note = f"{one.name}: {len(coarser)} tensors are rounded to {dtypes}, as in {other.name}"
    return one.replace(tensors=Rewritten(one, rules)), (note,)


def _edits(
    before: Checkpoint, after: Checkpoint, alignment: Alignment | None
) -> tuple[tuple[Checkpoint, Checkpoint], dict[str, Changed]] | tuple[None, None]:
    """Both with every tensor as it is declared, the second one under the names of the first, and how they differ after
    the alignment. None where that is unknown: for an alignment that does not fit the declaration, where only outputs
    are compared, and for models that are not of one declared family."""
    with suppress(IncompatibleError, SpecError):  # whether they run will show
        source = as_declared(before if alignment is None else alignment(before))
        pair = source, match_names(as_declared(after), source)[0]
        return pair, changes(*pair)
    return None, None


def _words(before: Checkpoint, edits: Mapping[str, Changed]) -> list[int]:
    """The rows of vocabulary tables in which the models differ, largest difference first."""
    size = text_config(before.config).get("vocab_size")
    per_row = [changed.rows for changed in edits.values() if len(changed.rows) == size]
    if not per_row:
        return []
    rows = torch.stack(per_row).amax(0)
    order: list[int] = rows.argsort(descending=True)[: int(rows.count_nonzero())].tolist()
    return order


def _differing_dtypes(before: Checkpoint, after: Checkpoint, changed: Mapping[str, Changed]) -> set[torch.dtype]:
    """The dtypes of the tensors that have changed, or that only one of the models has in that shape."""
    shared = {name for name in before if name in after and before.info(name).shape == after.info(name).shape}
    dtypes = {d for one in changed.values() for d in one.dtypes}
    dtypes |= {c.info(name).dtype for c in (before, after) for name in c if name not in shared}
    return dtypes & TOLERANCE.keys()


def _deciding(before: Checkpoint, after: Checkpoint) -> tuple[str, ...]:
    """The fields of the configs that differ and change what the same weights compute. Where the weights have other
    shapes (widened models), whole numbers are ignored: running the models shows whether sizes fit."""
    if before.config.get("model_type") != after.config.get("model_type"):
        return ()
    resized = any(name in after and before.info(name).shape != after.info(name).shape for name in before)
    differing = [d for d in differences(*map(with_defaults, (before, after))) if d.matters and d.field not in OF_HEADS]
    return tuple(str(d) for d in differing if not (resized and type(d.ours) is type(d.theirs) is int))

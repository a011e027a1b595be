"""The verbs that look at one model, or rewrite it: suggest, rewrite, to_module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment.digest import Digest
from symfuse.alignment.digest import digest as digest_of
from symfuse.alignment.rewrites import rewrite as apply_rewrites
from symfuse.alignment.rewrites import spread
from symfuse.api.sources import model_of
from symfuse.arguments import checked
from symfuse.drafts import Draft, draft_of
from symfuse.errors import CheckpointError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.live import unwrap
from symfuse.io.sources import Source, bare, opened
from symfuse.modules import live
from symfuse.runs import Record, frame_run, recorded
from symfuse.transporting.files import read_arrays


@checked
def suggest(
    source: Source,
    *,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    run: bool = True,
    seed: int = 0,
) -> Draft:
    """A draft of a declaration for a family that symfuse does not know, from names, shapes and config, and from a run.

    Where `transformers` has the class, or for a live module, it is run with random weights: what reads what is traced,
    and each axis gets the largest group that leaves its outputs; else, or with run=False, the draft is UNVERIFIED and
    its file refuses to be used.
    The source is not changed, and its weights are not read. config: sizes of a module that has none, where its run does
    not show them. inputs: what to run it on; default random ones. `draft.covers` says on what share of the parameters
    which axes act, `draft.unplaced` the tensors that it could not place. `draft.save(path)` writes the file;
    `symfuse.declare(source, draft)` uses it.
    """
    module = unwrap(source) if isinstance(source, torch.nn.Module) else None
    if bare(source):
        config = {"model_type": type(module).__name__, **(config or {})}
    checkpoint = opened(source) if module is None and config is None else open_checkpoint(source, config=config)
    foreign = module is not None and not type(module).__module__.startswith("transformers.")
    if not checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.name} has no config.json, or one without model_type: a draft needs its sizes"
        )
    return draft_of(checkpoint, module if foreign else None, inputs=inputs, run=run, seed=seed)


@checked
def rewrite(source: Source, rewrites: Sequence[str], *, seed: int = 0) -> Checkpoint:
    """The model after exact rewrites: the same function in other weights, as a lazy checkpoint with the same dtypes.

    rewrites, in whatever order: "untie" (the head gets a table of its own), "fold_scales" (those of layers go into
    weights), "fold_norms" (gains and biases of norms go into what reads them), "centre" (writers of a stream that
    LayerNorm reads lose their mean), "drop_gauges" (what cancels out of the outputs becomes zero), "balance" (both
    sides of each head, and of neurons that may be rescaled, weigh the same); and rotations, which spread single large
    entries: "rotate=hadamard", "rotate=random" or "rotate=FILE" (the residual streams, after the rewrites that this
    needs; of LayerNorm the ones vector is kept; the file is .safetensors or .npz with one matrix [size, size]),
    "heads=hadamard" or "heads=random" (the values of each head); "order" (units by their norms), and "canonical" (the
    canonical form: folded, balanced, ordered and oriented by the model itself). seed: of random rotations and of the
    signs of Hadamard's. A tensor is computed in float64 when it is read, and rounded once; `prove` and `verify` say how
    far outputs move. `.save(folder)` writes a card and symfuse.json: the rewrites, what they needed and what changed
    nothing (`notes`), and of each tensor the largest entry and the kurtosis, before and after (`tensors`).

    Raises OptionError for an unknown name and one that is there twice, SymmetryError where the model does not allow a
    rewrite.
    """
    model = model_of(source)
    done = apply_rewrites(model, rewrites, seed, _matrix)

    def more() -> dict[str, Any]:
        about = {"moves": list(done.moves), "seed": seed, "notes": list(done.notes)}
        return about | {"tensors": {"before": spread(model.checkpoint), "after": spread(done.model.checkpoint)}}

    run = partial(frame_run, model.checkpoint, done.frame, more)
    return recorded(done.model.checkpoint, Record("frame", run, (model.checkpoint,), frame=done.frame))


@checked
def digest(source: Source) -> Digest:
    """A hash of the model that does not depend on its symmetries: equal for all models that differ only by an element
    of the group of their family, different if one unit changes by a hundredth. `.hash` is of the whole, `.parts` by
    axis and layer, so that `a.same(b)` names what two models share.

    It is taken of the canonical form, after rounding. `.margin` says how near a number was to the edge of its step, and
    `.sure` how far the form is determined; a copy that was rounded again, as one moved in float32, may have another
    digest in some parts (docs/rotations.md). Reads every tensor a few times, and no data.
    Raises SymmetryError where values tie that orient an axis, UnknownArchitectureError without a declaration.
    """
    return digest_of(model_of(source))


def _matrix(file: str) -> Tensor:
    """The one matrix of a file."""
    arrays = read_arrays(Path(file))
    if len(arrays) != 1:
        raise CheckpointError(f"{file} holds {len(arrays)} tensors; expected one matrix")
    (name,) = arrays
    return arrays[name]


@checked
def to_module(source: Source, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A live module of the class that the config names, in evaluation mode: `merge([a, b])` → module out."""
    return live(opened(source), dtype)

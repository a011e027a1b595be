"""Drafts of declarations for families without one, from names, shapes and config, tested on the real class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from symfuse.drafts.bench import open_bench
from symfuse.drafts.draft import Draft, Trial
from symfuse.drafts.facts import gather
from symfuse.drafts.trials import settled, with_reads
from symfuse.io import Checkpoint
from symfuse.model.undeclared import refuse_placeholders

__all__ = ["Draft", "Trial", "draft_of"]


def draft_of(
    checkpoint: Checkpoint,
    module: torch.nn.Module | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    run: bool = True,
    seed: int = 0,
) -> Draft:
    """A declaration for the family of a checkpoint, from headers and config alone.

    Where `transformers` has the class (or there is a live module) it is run with random weights, and each axis gets the
    largest group that does not change its outputs; otherwise, or with run=False, the draft is UNVERIFIED, with the
    reason. Tensors that cannot be classified are listed, and stay fixed. inputs: inputs for the class; default random
    ones.
    """
    refuse_placeholders(checkpoint)
    shapes = {name: checkpoint.info(name).shape for name in checkpoint}
    bench, why = open_bench(checkpoint, module, inputs, seed) if run else (None, "it was not run")
    shown = (None, {}, []) if bench is None else (bench.traced, bench.ties, bench.buffers)
    facts = gather(shapes, checkpoint.config, *shown)
    draft = settled(facts, bench)
    if bench is not None and draft.verified:
        draft = with_reads(draft, bench)
    if bench is None:
        draft = replace(draft, reason=why)
    return draft

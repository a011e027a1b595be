"""Prove that an alignment keeps the function of its source, before anything is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.errors import VerificationError
from symfuse.io import Checkpoint
from symfuse.io.lazy import Rewritten, Rule
from symfuse.io.sources import Source, opened, opened_any
from symfuse.messages import shown
from symfuse.verification.bench import Bench, aligned
from symfuse.verification.comparison import TOLERANCE, Verification
from symfuse.verification.outputs import Outputs, worst


@dataclass(frozen=True)
class Proof:
    """exact: source and aligned model before anything is rounded, in float64. rounding: the further change from casting
    the aligned weights to the dtypes of the source, in the same units. rounded_to: these dtypes, by name."""

    exact: Verification
    rounding: float
    rounded_to: str

    __repr__, _repr_html_ = shown(
        lambda self: {
            "largest relative difference": float(self.exact.worst),
            "rounding": float(self.rounding),
            "rounded to": self.rounded_to,
            "inputs": self.exact.inputs,
        }
    )

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the exact comparison, and the effect of rounding."""
        return self.exact.to_dict() | {"rounding": self.rounding, "rounded_to": self.rounded_to}


@checked
def prove(
    source: Source,
    alignment: Alignment,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Outputs] | None = None,
    memory: int | None = None,
) -> Proof:
    """Whether an alignment keeps the function of its source, whatever the dtype that it is stored in: stronger than
    `verify(source, alignment(source))`, above all in half precision, where rounding can hide a mistake.

    The source is widened to float64, aligned and run, in float64 also where its class casts to float32: an exact
    symmetry shows 1e-15. The effect of rounding the aligned weights to the stored dtype is measured separately.
    memory: bytes (default: a share of the free memory); a model that needs more in float64 is run layer by layer, each
    layer being read when it runs, and without `inputs` on the first WORDS tokens of its vocabulary. Raises
    VerificationError if the function changed.
    """
    source = opened(source) if runner is None else opened_any(source)
    bench = Bench(inputs, runner, torch.float64, memory)
    if bench.pages(source) and inputs is None:
        source = bench.few_words(source)
    wide = source.to(torch.float64)
    expected = [aligned(outputs, alignment) for outputs in bench.run(wide)]
    errors = worst(expected, bench.run(alignment(wide), alignment))
    exact = Verification(errors, TOLERANCE[bench.dtype], bench.what)
    if not exact.equal:
        nudged = bench.run(_nudged(wide))
        own = worst(expected, [aligned(outputs, alignment) for outputs in nudged])[exact.worst_output]
        raise VerificationError(f"{exact.difference(f'{source.name} after alignment')}{_hint(exact.worst, own)}")
    stored = Verification(worst(expected, bench.run(alignment(source), alignment)), math.inf, bench.what)
    dtypes = dict.fromkeys(info.dtype for name in source if (info := source.info(name)).dtype.is_floating_point)
    return Proof(exact, stored.worst, ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))


# A difference of up to so many times the effect of the weights' last bits is explained by them: aligning rounds a few
# more times.
_MAGNIFIED = 100


def _nudged(wide: Checkpoint) -> Checkpoint:
    """A model in float64 with the last bit of every weight changed at random."""

    def nudged(name: str, seed: int) -> Tensor:
        t = wide[name]
        rng = torch.Generator().manual_seed(seed)
        return t * (1 + torch.finfo(t.dtype).eps * torch.randint(-1, 2, t.shape, generator=rng, dtype=t.dtype))

    rules = {
        name: Rule(info, partial(nudged, name, seed)) if info.dtype.is_floating_point else name
        for seed, (name, info) in enumerate(wide.infos.items())
    }
    return wide.replace(tensors=Rewritten(wide, rules))


def _hint(difference: float, own: float) -> str:
    """Advice about a difference, by comparison with the effect of the last bits of the model's own weights."""
    if not difference <= _MAGNIFIED * own:
        return ""
    return (
        f". Changes in the last bit of its own weights change that output by {own:.2e}: the model magnifies rounding "
        "(norms of what hardly varies, very large weights), so that this is no sign of a wrong alignment. Without "
        "translations (--no-biases, biases=False) or scales (--no-scaling) there may be less of it; --no-verify leaves "
        "the proof out"
    )

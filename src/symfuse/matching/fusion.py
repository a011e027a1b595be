"""Alignment by optimal transport (OT fusion), in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from symfuse.alignment import Alignment
from symfuse.errors import OptionError
from symfuse.groups import Sinkhorn
from symfuse.matching.activations import RESIDUAL, match_by_activations
from symfuse.matching.axes import choose_axes, may_transport
from symfuse.matching.coordinate import match_models
from symfuse.matching.problem import usual
from symfuse.matching.transport import POLICIES
from symfuse.model import TRANSPORT, Model
from symfuse.stats.activations import Batch

SOLVERS = ("sinkhorn", "emd")
SEPARATE = "separate"


def ot_alignment(
    source: Model,
    anchor: Model,
    *,
    axes: str | tuple[str, ...] = "auto",
    solver: str = "sinkhorn",
    regularisation: float | None = None,
    batches: Iterable[Batch] | None = None,
    residual: str = "all",
    **options: Any,
) -> Alignment:
    """The alignment of the source with the anchor by optimal transport. The mean of both after it is OT fusion.

    solver: "sinkhorn", whose plans are soft, so that the alignment is inexact; or "emd", whose plans are permutations.
    regularisation: of sinkhorn, as a share of the mean cost (default: that of `Sinkhorn`). batches: units are compared
    by their activations on these; None: by their weights. residual: "all", one map for the whole stream; "separate", a
    map for each point of it; from activations also "first", "last", and the policies of Imfeld et al.
    (`along_the_stream`). Heads are assigned one to one, and planes of rotary positions are turned, as without
    transport. options: of `match_models` or `match_by_activations`. Raises OptionError, and what these raise.
    """
    if solver not in SOLVERS:
        raise OptionError(f"solver is {solver!r}; expected {' or '.join(SOLVERS)}")
    if solver == "emd" and regularisation is not None:
        raise OptionError("regularisation is of sinkhorn; leave it out, or take that solver")
    if regularisation is not None and not regularisation > 0:
        raise OptionError(f"regularisation is {regularisation}; expected a positive number")
    known = [*(RESIDUAL if batches is not None else ["all"]), SEPARATE, *(POLICIES if batches is not None else ())]
    if residual not in known:
        how = "weights; from activations there are more" if batches is None else "activations"
        raise OptionError(f"residual is {residual!r}; expected {', '.join(known)} from {how}")
    name = "permutation" if solver == "emd" else f"sinkhorn:{regularisation or Sinkhorn().regularisation!r}"
    axes, _, _ = usual([source, anchor], axes, variants=(TRANSPORT,))
    spec = source.spec
    movable = {instance.axis: spec.axes[instance.axis] for instance in spec.movable}
    groups = {
        axis: name
        for axis in choose_axes(axes, spec)
        if axis in movable and (group := movable[axis].group) and may_transport(axis, group, movable[axis].size)
    }
    options |= {"axes": axes, "groups": groups, "variants": ("separate-residual",) if residual == SEPARATE else ()}
    if batches is None:
        return match_models(source, anchor, **options)
    return match_by_activations(
        source, anchor, batches, residual="all" if residual == SEPARATE else residual, **options
    )

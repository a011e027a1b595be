"""The relation of two models: a verdict, the evidence for it, and their distance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from symfuse.errors import IncompatibleError
from symfuse.evaluation import Distance
from symfuse.messages import SCHEMA, shown
from symfuse.model import Model
from symfuse.relations.evidence import Evidence
from symfuse.relations.fitting import fitted
from symfuse.relations.gathering import gather
from symfuse.relations.verdict import COSINE, MUCH, OTHER, SURE, Verdict, decide


@dataclass(frozen=True, eq=False)
class Relation:
    """How two models are related. Each part is computed when it is first asked for.

    measure: computes the distance. quick: the verdict is read from the first evidence that is sure.
    """

    source: Model
    anchor: Model
    measure: Callable[[], Distance]
    quick: bool = False

    @cached_property
    def distance(self) -> Distance:
        """Before an alignment and, if one was given, after it. IncompatibleError for models of different shapes."""
        return self.measure()

    @cached_property
    def evidence(self) -> Evidence | None:
        """None for models that cannot be compared: see `verdict`."""
        return None if isinstance(self._found, Verdict) else self._found

    @cached_property
    def verdict(self) -> Verdict:
        return self._found if isinstance(self._found, Verdict) else decide(self._found)

    @cached_property
    def _found(self) -> Evidence | Verdict:
        try:
            return evidence_of(self.source, self.anchor, quick=self.quick)
        except IncompatibleError as error:
            return Verdict(OTHER, None, (str(error),), math.nan)

    @property
    def one_shape(self) -> bool:
        """Whether both have all layers and widths in common, so that a distance is defined."""
        return self.evidence is not None and self.evidence.layers is None and not self.evidence.widths

    @property
    def kind(self) -> str:
        """The word of the verdict."""
        return self.verdict.kind

    __repr__, _repr_html_ = shown(
        lambda self: {"models": f"{self.source.name} to {self.anchor.name}", "verdict": str(self.verdict)}
    )

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without the distance, which has a document of its own."""
        verdict = self.verdict.to_dict()
        verdict["similarity"] = None if math.isnan(self.verdict.similarity) else self.verdict.similarity
        evidence = None if self.evidence is None else self.evidence.to_dict()
        return {
            "schema": SCHEMA, "source": self.source.name, "anchor": self.anchor.name, "verdict": verdict,
            "evidence": evidence,
        }  # fmt: skip


def evidence_of(source: Model, anchor: Model, *, quick: bool = False) -> Evidence:
    """In place if that is sure, else after matching. IncompatibleError for models that cannot be brought in one shape,
    and for those of a family without a declaration that are not alike in place."""
    pair = fitted(source, anchor)
    here, _ = gather(pair.source, pair.anchor, placed=True, quick=quick)
    found = here
    if not here.worst >= COSINE and here.equal < 1:  # units that are zero have no cosine
        found, _ = gather(pair.source, pair.anchor, quick=quick)
        if quick and not found.worst >= SURE:
            found, _ = gather(pair.source, pair.anchor)
        undone = found.relative < MUCH * here.relative and found.worst >= SURE
        if here.cosine >= COSINE and not undone:
            found = here  # what differs is not undone by moving it
    return replace(found, layers=pair.layers, depths=pair.depths, widths=pair.widths)

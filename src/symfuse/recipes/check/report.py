"""The result of a check, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from symfuse.errors import SymfuseError
from symfuse.messages import SCHEMA


@dataclass(frozen=True)
class Problem:
    """A reason why the models cannot be merged. kind: the error that the merge would raise."""

    kind: str
    exit_code: int
    text: str

    @classmethod
    def of(cls, error: SymfuseError) -> Problem:
        return cls(type(error).__name__, error.exit_code, str(error))


@dataclass(frozen=True)
class ModelFacts:
    """One model. alignment: the axes that may be aligned, or why none may. dtypes: the number of tensors of each.
    buffers: derived tensors, which are dropped. gives: what the result takes from this model."""

    name: str
    family: str
    declared: bool
    alignment: str
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    tied: bool
    vocabulary: int | None
    layers: int | None
    tokenizer: bool
    adapter: str | None
    buffers: list[str]
    gives: list[str]


@dataclass(frozen=True)
class Field:
    """A field of config.json that differs. matters: whether it changes what the weights compute."""

    models: list[str]
    field: str
    ours: Any
    theirs: Any
    matters: bool


@dataclass(frozen=True)
class Tokens:
    """How two tokenizers differ: numbers of tokens, and examples in words. mixed: ids of different tokens."""

    models: list[str]
    same: int
    moved: int
    only_first: int
    only_second: int
    mixed: int
    text: str


@dataclass(frozen=True)
class Sample:
    """The weights that were read. tensors: names in the reference's files. of: the number of matrices from which they
    were drawn. entries: per model."""

    tensors: list[str]
    of: int
    entries: int
    bytes: int


@dataclass(frozen=True)
class Relation:
    """How near a model is to the reference, in the sample. distance: |model - reference| / |reference|; equal_entries,
    equal_rows: shares. None: undefined, since a norm is zero."""

    model: str
    reference: str
    distance: float | None
    cosine: float | None
    equal_entries: float
    equal_rows: float


@dataclass(frozen=True)
class Deltas:
    """Task vectors, in the sample. norms: relative to the base's. correlations: cosines between them, in the order of
    `models`. with_base: cosines with the base (near -0.7 if the model was not trained from it). None: a norm is
    zero."""

    base: str
    models: list[str]
    norms: list[float | None]
    correlations: list[list[float | None]]
    with_base: list[float | None]


@dataclass(frozen=True)
class Resolved:
    """The parameters of one output tensor, lists in the order of models. weights: the effective ones, if any."""

    tensor: str
    models: list[str]
    weights: list[float] | None
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """The output and its cost. memory: predicted resident bytes. read, written: bytes. disk_free: at the target; None
    without a target, or if it cannot be written. seconds: at `speed`, which is described in words."""

    tensors: int
    bytes: int
    files: int
    dtypes: dict[str, int]
    layers: int | None
    read: int
    written: int
    threads: int
    memory: int
    memory_of: str
    disk_needed: int
    disk_free: int | None
    seconds: float
    speed: str

    def __str__(self) -> str:
        """The output and its cost in a line."""
        return (
            f"output: {self.tensors} tensors, {size_text(self.bytes)} {', '.join(self.dtypes)} in {self.files} file"
            f"{'s' if self.files > 1 else ''}; memory about {size_text(self.memory)}, time about {self.seconds:.0f} s "
            f"({self.speed})"
        )


@dataclass(frozen=True)
class Alignment:
    """What is aligned before the merge. anchor: None for the model nearest to the mean, which is known once all weights
    are read. data: on which activations are compared or a loss is minimised; None for weights. The others: as selected
    by the recipe's `align`."""

    anchor: str | None
    axes: list[str]
    layers: list[int]
    scaling: bool
    groups: dict[str, str]
    one_pass: bool
    biases: bool
    data: str | None = None
    source: str = "weights"


@dataclass
class Report:
    """The result of a check. problems: every reason why the merge cannot be done, in the order in which it would meet
    them. sample: None if nothing was read. base, why_base: the model that gives config, names and dtypes, and why.
    tokenizer: its origin, in words. alignment: None if nothing is aligned, or it is not known. weights: by model, the
    smallest and the largest of all tensors."""

    method: str
    name: str | None = None
    base: str | None = None
    why_base: str = ""
    tokenizer: str | None = None
    alignment: Alignment | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: list[ModelFacts] = field(default_factory=list)
    config: list[Field] = field(default_factory=list)
    tokenizers: list[Tokens] = field(default_factory=list)
    sample: Sample | None = None
    relations: list[Relation] = field(default_factory=list)
    deltas: Deltas | None = None
    weights: dict[str, list[float]] = field(default_factory=dict)
    resolved: list[Resolved] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    cost: Cost | None = None

    @property
    def possible(self) -> bool:
        return not self.problems

    @property
    def exit_code(self) -> int:
        """0, or that of the first problem's error."""
        return self.problems[0].exit_code if self.problems else 0

    def summary(self) -> list[str]:
        """At most three lines: the merge, or why it cannot be done; how related the models are; the cost."""
        families = list(dict.fromkeys(model.family for model in self.models)) or ["no"]
        models = "model" if len(self.models) == 1 else "models"
        models = f"{families[0]} {models}" if len(families) == 1 else f"{models} ({', '.join(families)})"
        what = f"{self.method} of {len(self.models)} {models}"
        if self.problems:
            more = f" (and {len(self.problems) - 1} more reasons)" if len(self.problems) > 1 else ""
            return [f"cannot merge: {what}{more}", self.problems[0].text]
        gives = next((model.gives for model in self.models if model.name == self.base), [])
        other = f"; {self.tokenizer}" if self.tokenizer is not None and "tokenizer" not in gives else ""
        lines = [f"{what}; {', '.join(gives)} of {self.base} ({self.why_base}){other}"]
        if self.relations:
            lines.append("; ".join(map(relation_text, self.relations)) + " (in a sample)")
        if self.cost is not None:
            lines.append(str(self.cost))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """JSON data; values of configs that JSON does not have are texts."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return {
            "schema": SCHEMA,
            "possible": self.possible,
            "exit_code": self.exit_code,
            "summary": self.summary(),
            **data,
        }


def relation_text(relation: Relation) -> str:
    cosine = "-" if relation.cosine is None else f"{relation.cosine:.4f}"
    distance = "-" if relation.distance is None else f"{relation.distance:.3g}"
    return (
        f"{relation.model} is {distance} of the norm away from {relation.reference}, cosine {cosine}, "
        f"{relation.equal_rows:.0%} of rows identical"
    )


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"

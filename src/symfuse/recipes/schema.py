"""A merge recipe as frozen data, with paths as written. A parameter has one value for all tensors, values along the
layers, or values by names of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias

from symfuse.errors import OptionError
from symfuse.merging import Method
from symfuse.merging.base import Parameter
from symfuse.messages import suggestion
from symfuse.methods import METHODS
from symfuse.recipes.yaml_reader import Item
from symfuse.rewriting.vocabulary import TokenSource

Scalar: TypeAlias = str | int | float | bool
Settings: TypeAlias = Mapping[str, "Setting"]
COPY = " (copy "  # after the name of a model in memory, if several have the same name


@dataclass(frozen=True)
class Case:
    """values: one, or several that are spread over the layers. filter: a part of the names of its tensors; None: all.
    place: file, line and path, if it was read from a text."""

    values: tuple[Scalar, ...]
    filter: str | None = None
    place: str = field(default="", compare=False, repr=False)

    @property
    def of_all(self) -> bool:
        """Whether this is for every tensor."""
        return self.filter in (None, "*")

    def covers(self, tensor: str) -> bool:
        """Whether this is for that tensor."""
        return self.filter is None or self.of_all or self.filter in tensor


@dataclass(frozen=True)
class Setting:
    """The value of a parameter in a recipe. The first case that covers a tensor is used."""

    cases: tuple[Case, ...]

    def at(self, tensor: str, t: int | float) -> Scalar | None:
        """The value for a tensor at depth t, from 0 (the first layer) to 1 (the last); None if no case covers it.

        Value i of n is at depth i/(n-1). Numbers are interpolated linearly between them; of booleans and texts the one
        at or before t is used.
        """
        values = next((case.values for case in self.cases if case.covers(tensor)), None)
        if values is None:
            return None
        position = t * (len(values) - 1)
        low = int(position)
        a, b = values[low], values[min(low + 1, len(values) - 1)]
        if isinstance(a, (bool, str)) or isinstance(b, (bool, str)) or a == b:
            return a
        part = position - low
        return (1 - part) * a + part * b


def read_settings(item: Item | None, method: Method, *, of_model: bool) -> Settings:
    """A block `parameters:`. of_model: it belongs to one model.

    OptionError for a parameter that the method does not have, for one of the whole merge that is set for one model, for
    values of another type, and for numbers that are infinite or too large.
    """
    if item is None:
        return {}
    settings = {}
    for name, value in item.mapping().items():
        if name not in method.parameters:
            value.fail(_unknown(name, method))
        parameter = method.parameters[name]
        if of_model and not parameter.per_model:
            value.fail(f"{name} of {method.name} is for the whole merge, not for one model; move it to a block above")
        settings[name] = _setting(value, parameter)
    return settings


def _unknown(name: str, method: Method) -> str:
    others = sorted(other.name for other in METHODS.values() if name in other.parameters)
    known = f"; {name} belongs to {', '.join(others)}" if others else ""
    has = ", ".join(method.parameters) or "no parameters"
    return f"unknown parameter of {method.name}{suggestion(name, method.parameters)}; it has {has}{known}"


def _setting(item: Item, parameter: Parameter) -> Setting:
    if isinstance(item.value, dict):
        return Setting((_case(item, parameter),))
    if isinstance(item.value, list) and any(isinstance(part.value, dict) for part in item.value):
        return Setting(tuple(_case(part, parameter) for part in item.value))
    return Setting((Case(_values(item, parameter), place=item.place),))


def _case(item: Item, parameter: Parameter) -> Case:
    fields = item.fields(("filter", "value"))
    if "value" not in fields:
        item.fail("`value` is missing")
    where = fields["filter"].text() if "filter" in fields else None
    return Case(_values(fields["value"], parameter), where, item.place)


def _values(item: Item, parameter: Parameter) -> tuple[Scalar, ...]:
    parts = item.sequence() if isinstance(item.value, list) else [item]
    return tuple(_scalar(part, parameter) for part in parts)


def _scalar(item: Item, parameter: Parameter) -> Scalar:
    value: Scalar = parameter.value(item.scalar(), item.place)
    return value


@dataclass(frozen=True)
class ModelRef:
    """A model by folder or hub name, at a revision, with a LoRA adapter added to it."""

    path: str
    revision: str | None = None
    adapter: ModelRef | None = None

    def __str__(self) -> str:
        """`path@revision+adapter@revision`, as in recipes."""
        own = f"{self.path}@{self.revision}" if self.revision else self.path
        return f"{own}+{self.adapter}" if self.adapter else own


@dataclass(frozen=True)
class Data:
    """The data of a data-driven method: a file, as for `symfuse.task`, and how it is read. columns: by role, such as
    {"text": "sentence"}. options: of the task, such as limit. file None: options for all models, each of which has its
    own file."""

    file: str | None = None
    task: str | None = None
    encoding: str = "utf-8"
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str | int] = field(default_factory=dict)

    def over(self, other: Data | None) -> Data:
        """These data, with those of all models (other) where something is not set."""
        if other is None:
            return self
        return Data(
            self.file or other.file,
            self.task or other.task,
            self.encoding if self.encoding != "utf-8" else other.encoding,
            {**other.columns, **self.columns},
            {**other.options, **self.options},
        )


@dataclass(frozen=True)
class Input:
    """A model that is merged. layer_range: first layer, and the one after the last; None: all. data: its own, for
    data-driven methods. statistics: the folder of saved statistics, instead of data. is_adapter: an adapter's folder,
    merged as such."""

    model: ModelRef
    parameters: Settings = field(default_factory=dict)
    layer_range: tuple[int, int] | None = None
    data: Data | None = None
    statistics: str | None = None
    is_adapter: bool = False


@dataclass(frozen=True)
class Slice:
    """Consecutive layers of the output, merged from equally many layers of each source. base_model None: the
    recipe's."""

    sources: tuple[Input, ...]
    base_model: ModelRef | None = None
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """A part of a model with several stacks of layers, such as an encoder: either models or slices."""

    models: tuple[Input, ...] = ()
    slices: tuple[Slice, ...] = ()
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Align:
    """What is aligned before the merge. anchor None: the model nearest to the mean. source: compare weights, or
    activations on `limit` random rows of `data` (a file, as for `symfuse.task`), or minimise the loss on `data`
    (learned): for `steps` steps at learning rate `rate`, with a share `distil` of distillation from the models'
    predictions, validated on `validation` or on a part of the data. scaling None: the default of the source. The
    others: the options of `symfuse.match`."""

    axes: str | tuple[str, ...] = "auto"
    anchor: ModelRef | None = None
    source: Literal["weights", "activations", "learned"] = "weights"
    data: str | None = None
    validation: str | None = None
    limit: int | None = None
    steps: int | None = None
    rate: float | None = None
    distil: float | None = None
    layers: str | None = None
    scaling: bool | None = None
    groups: Mapping[str, str] = field(default_factory=dict)
    one_pass: bool = False
    biases: bool = True


@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary of the output: of all models, of the base or of one model; and single tokens, with their
    models."""

    source: Literal["union", "base"] | ModelRef = "union"
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    models: tuple[ModelRef, ...] = ()
    pad_to_multiple_of: int | None = None

    def models_used(self) -> tuple[ModelRef, ...]:
        """The models that this names, whose vocabulary or embeddings are used."""
        own = [self.source] if isinstance(self.source, ModelRef) else []
        return _unique([*own, *self.models])


@dataclass(frozen=True)
class Recipe:
    """A merge. Exactly one of models, slices and modules is not empty. name: other recipes of the file refer to the
    result by it. data: of all models (see `Data`). foreign, missing_bias, force_config: for models that do not fit (see
    `Reconcile`). rank, space: of a merge of adapters into one (`recipes.adapters`). text: the YAML, as read. places:
    file, line and path of every key, by path; empty if the recipe was not a text. notes: a line for each key without
    effect."""

    merge_method: str
    models: tuple[Input, ...] = ()
    slices: tuple[Slice, ...] = ()
    modules: Mapping[str, Module] = field(default_factory=dict)
    name: str | None = None
    base_model: ModelRef | None = None
    parameters: Settings = field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    align: Align | None = None
    data: Data | None = None
    seed: int = 0
    heads: str = "average"
    foreign: Literal["refuse", "drop", "keep"] = "refuse"
    missing_bias: Literal["refuse", "zero"] = "refuse"
    force_config: bool = False
    rank: int | None = None
    space: str | None = None
    text: str = ""
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = ()

    def models_used(self) -> tuple[ModelRef, ...]:
        """The models whose layers are read: the base, the inputs in order, the anchor. `Tokenizer.models_used` has the
        models of tokens."""
        return _unique([self.base_model, *self._inputs(), None if self.align is None else self.align.anchor])

    @property
    def parts(self) -> tuple[Module, ...]:
        """Its modules, after the models or slices of the whole."""
        return (Module(self.models, self.slices), *self.modules.values())

    @property
    def inputs(self) -> list[Input]:
        """Every model that is merged, of all parts, in order."""
        return [entry for part in self.parts for entry in (*part.models, *(s for x in part.slices for s in x.sources))]

    @property
    def of_adapters(self) -> bool:
        """Whether adapters are merged into one."""
        return any(entry.is_adapter for entry in self.models)

    @property
    def whole(self) -> bool:
        """Whether whole models are merged, not slices of their layers."""
        return not any(part.slices for part in self.parts)

    def refuse(self, error: OptionError, *keys: str) -> NoReturn:
        """Raise the error with the known places of these keys (full paths, or their last parts) in front of it."""
        places = [place for path, place in self.places.items() if path in keys or path.rpartition(".")[2] in keys]
        raise OptionError(f"{' and '.join(places[:3])}: {error}" if places else str(error)) from None

    @contextmanager
    def blaming(self, *keys: str) -> Iterator[None]:
        """An OptionError raised inside is raised again with the places of these keys (`refuse`)."""
        try:
            yield
        except OptionError as error:
            self.refuse(error, *keys)

    def _inputs(self) -> Iterator[ModelRef | None]:
        for part in self.parts:
            yield from (entry.model for entry in part.models)
            for layers in part.slices:
                yield layers.base_model
                yield from (entry.model for entry in layers.sources)


def settings_for(
    recipe: Recipe, module: Module | None = None, layers: Slice | None = None, source: Input | None = None
) -> tuple[Settings, ...]:
    """The blocks of parameters for one source, by precedence: source, slice, module, recipe."""
    return tuple(part.parameters for part in (source, layers, module, recipe) if part is not None)


def _unique(models: Iterable[ModelRef | None]) -> tuple[ModelRef, ...]:
    return tuple(dict.fromkeys(model for model in models if model is not None))


def matching(heads: str, models: Sequence[object]) -> list[int]:
    """The indices (from 0) of the models that `heads` names: by name, or by number (from 1)."""
    return [number for number, model in enumerate(models) if heads in (str(model), str(number + 1))]


def kept_head(heads: str, models: Sequence[object]) -> int | None:
    """The index (from 0) of the model whose head is kept; None for average and drop. OptionError if `heads` names no
    model, or several."""
    named = matching(heads, models)
    if heads in ("average", "drop"):
        return None
    if len(named) != 1:
        listed = ", ".join(f"{number} ({model})" for number, model in enumerate(models, 1))
        raise OptionError(f"heads {heads!r}: write average, drop, or the number or name of one model: {listed}")
    return named[0]

"""YAML → Recipe: mergekit's keys and ours, checked with the place of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from symfuse.adapters.spaces import SPACES
from symfuse.errors import OptionError
from symfuse.matching.axes import require_axes, require_groups
from symfuse.merging import Method
from symfuse.messages import nearest
from symfuse.methods import METHODS, lookup
from symfuse.recipes.schema import Align, Data, Input, ModelRef, Module, Recipe, Slice, Tokenizer, read_settings
from symfuse.recipes.yaml_reader import Document, Item, read_documents
from symfuse.rewriting.vocabulary import TokenSource

DTYPES = ("bfloat16", "float16", "float32", "float64")
_LAYOUTS = ("models", "slices", "modules")
_TOKENIZERS = ("tokenizer", "tokenizer_source")
_KEYS = (
    *("name", "merge_method", "base_model", *_LAYOUTS, "parameters", "dtype", "out_dtype", *_TOKENIZERS),
    *("chat_template", "align", "data", "seed", "heads", "foreign", "missing_bias", "force_config"),
    *("rank", "space"),
)
_OF_ADAPTERS = {
    "name",
    "merge_method",
    "base_model",
    "models",
    "parameters",
    "dtype",
    "out_dtype",
    "seed",
    "rank",
    "space",
}
_SWITCHES = ("scaling", "one_pass", "biases")
_ONLY_IN_SLICES = {"layer_range": "layers are chosen in `slices` (slices: - sources: - model …, layer_range), not here"}
_OF_EXPERTS = "this recipe is for a mixture of experts, which mergekit-moe builds; symfuse does not"
_OF_SEARCH = "this is a recipe for mergekit-evolve, which searches for parameters; symfuse does not: write {}"
_NOT_OURS = {
    **dict.fromkeys(("experts", "experts_per_token", "gate_mode"), _OF_EXPERTS),
    "genome": _OF_SEARCH.format("what is in `genome` here, with `parameters` of its models"),
    "tasks": _OF_SEARCH.format("a recipe with merge_method and models"),
}
_WITHOUT_EFFECT = {  # keys that mergekit ignores without a message
    **dict.fromkeys(("out_path", "output_path"), "the new folder is named on the command line"),
    **dict.fromkeys(
        ("cuda", "allow_crimes", "trust_remote_code", "copy_tokenizer", "out_shard_size", "lazy_unpickle",
         "low_cpu_memory", "write_model_card", "random_seed"), "it is an option of the command line, not of a recipe"
    ),
    "int8_mask": "it does not change the result",
}  # fmt: skip
_PARAMETERS = {name for method in METHODS.values() for name in method.parameters}
_NO_RESIDUAL = {"residual_weight": "mergekit ignores this key; remove it"}
_NO_OVERRIDE = {"override_architecture": "the architecture is that of the model's config.json; change it there"}


def parse_recipe(recipe: str | Mapping[str, Any], where: str = "recipe") -> Recipe:
    """One recipe from YAML text or the equivalent mapping. where: its name in messages.

    Raises OptionError, with line and path, for unknown keys, methods and parameters, values of another type, and layers
    that do not fit.
    """
    text = recipe if isinstance(recipe, str) else _written(recipe, where)
    documents = read_documents(text, where, lines=isinstance(recipe, str))
    if len(documents) != 1:
        number = f"holds {len(documents)} documents, expected one" if documents else "is empty"
        raise OptionError(f"{where}: the recipe {number}")
    return read_recipe(documents[0])


def read_recipe(document: Document) -> Recipe:
    """The recipe of a YAML document."""
    root = document.root
    if not isinstance(root.value, dict):
        root.fail("a recipe is a mapping with keys such as merge_method and models, not a list or a single value")
    fields, notes = _top_level(root)
    method = _method(_required(root, fields, "merge_method"))
    layout = _layout(root, fields, _LAYOUTS)
    base = _optional_model(fields)
    models = _models(fields["models"], method) if layout == "models" else ()
    _require_of_adapters(fields, models)
    if "align" in root.mapping() and "align" not in fields:
        root.mapping()["align"].fail("the block is empty; write `align: {}` to align with the usual options")
    return Recipe(
        merge_method=method.name,
        models=models,
        slices=_slices(fields["slices"], method) if layout == "slices" else (),
        modules=_modules(fields["modules"], method) if layout == "modules" else {},
        name=_name(fields["name"]) if "name" in fields else None,
        base_model=base,
        parameters=read_settings(fields.get("parameters"), method, of_model=False),
        dtype=_dtype(fields.get("dtype")),
        out_dtype=_dtype(fields.get("out_dtype")),
        tokenizer=_tokenizer(fields, models),
        chat_template=fields["chat_template"].text() if "chat_template" in fields else None,
        align=_align(fields["align"], models) if "align" in fields else None,
        data=_data(fields["data"], method) if "data" in fields else None,
        seed=fields["seed"].integer(0) if "seed" in fields else 0,
        heads=_word_or_number(fields["heads"]) if "heads" in fields else "average",
        rank=fields["rank"].integer(1) if "rank" in fields else None,
        space=fields["space"].choice(SPACES) if "space" in fields else None,
        text=document.text,
        places=dict(_places(root)),
        notes=notes,
        **_reconciled(fields),
    )


def _top_level(root: Item) -> tuple[dict[str, Item], tuple[str, ...]]:
    """The values by key, and a line for each key without effect: it only holds YAML anchors, or is an option of the
    command line."""
    unread = {}
    for key, item in root.mapping().items():
        near = nearest(key, _KEYS)
        if key in _WITHOUT_EFFECT:
            unread[key] = _WITHOUT_EFFECT[key]
        elif item.anchored and key not in (*_KEYS, *_NOT_OURS) and near in (None, *root.mapping()):
            unread[key] = "it only holds YAML anchors"
        elif key in _PARAMETERS and key not in _KEYS:
            item.fail(f"{key} is a parameter of methods; write it in a block, `parameters: {{{key}: …}}`")
    read = Item({key: item for key, item in root.mapping().items() if key not in unread}, root.where, root.line, "")
    notes = tuple(f"{root.mapping()[key].place}: without effect: {why}" for key, why in unread.items())
    return read.fields(_KEYS, _NOT_OURS), notes


def _require_of_adapters(fields: Mapping[str, Item], models: Sequence[Input]) -> None:
    """OptionError for adapters beside models, and for keys that only a merge of one kind has."""
    of_adapters = any(entry.is_adapter for entry in models)
    for item, entry in zip(fields["models"].sequence() if of_adapters else (), models, strict=False):
        if not entry.is_adapter:
            item.fail(
                f"{entry.model} is a model, beside adapters; to merge models, write each adapter with its base "
                "(model: BASE+ADAPTER)"
            )
    for key, item in fields.items():
        if of_adapters and key not in _OF_ADAPTERS:
            item.fail(f"{key} is not for a merge of adapters; write each with its base (model: BASE+ADAPTER)")
        if not of_adapters and key in ("rank", "space"):
            item.fail(f"{key} is for a merge of adapters (models: - adapter: FOLDER); leave it out")


def _reconciled(fields: Mapping[str, Item]) -> dict[str, Any]:
    """The keys for models that do not fit together."""
    words = {"foreign": ("refuse", "drop", "keep"), "missing_bias": ("refuse", "zero")}
    choices: dict[str, Any] = {key: fields[key].choice(known) for key, known in words.items() if key in fields}
    return choices | ({"force_config": fields["force_config"].boolean()} if "force_config" in fields else {})


def _places(item: Item) -> Iterator[tuple[str, str]]:
    if item.line is None:
        return
    yield item.path, item.place
    parts = item.value.values() if isinstance(item.value, dict) else item.value
    for part in parts if isinstance(item.value, (dict, list)) else ():
        yield from _places(part)


def _written(recipe: Mapping[str, Any], where: str) -> str:
    try:
        text: str = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise OptionError(f"{where}: only texts, numbers, lists and mappings make a recipe ({error})") from None
    return text


def _required(item: Item, fields: Mapping[str, Item], key: str) -> Item:
    if key not in fields:
        item.fail(f"`{key}` is missing")
    return fields[key]


def _layout(item: Item, fields: Mapping[str, Item], names: tuple[str, ...]) -> str:
    present = [name for name in names if name in fields]
    if len(present) != 1:
        has = " and ".join(present) or "none of them"
        (fields[present[-1]] if present else item).fail(f"expected one of {', '.join(names)}, found {has}")
    return present[0]


def _method(item: Item) -> Method:
    name = item.text()
    try:
        return lookup(name)
    except OptionError as error:
        item.fail(str(error))


def _name(item: Item) -> str:
    name = item.text()
    if re.search(r"[/\\+@\s]", name) or name.startswith("."):
        item.fail(f"{name!r} cannot be a name, which recipes and folders use: no space, slash, + or @, no leading dot")
    return name


def _dtype(item: Item | None) -> str | None:
    if item is None:
        return None
    named = Item(item.text().removeprefix("torch."), item.where, item.line, item.path)
    return named.choice(DTYPES)


def _word_or_number(item: Item) -> str:
    return str(item.value) if type(item.value) is int else item.text()


# -- models and layers -----------------------------------------------------------------------------


def _model(item: Item) -> ModelRef:
    """`model@revision+adapter@revision`, or the mapping {model: …, lora: …} for paths with these characters in them."""
    if isinstance(item.value, dict):
        fields = item.fields(("model", "lora"), _NO_OVERRIDE)
        own = _path(_required(item, fields, "model"))
        return ModelRef(own.path, own.revision, _path(fields["lora"]) if "lora" in fields else None)
    parts = item.text().split("+")
    if len(parts) > 2:
        item.fail(f"{item.value!r} has more than one +; expected model+adapter, or {{model: …, lora: …}}")
    own, *adapter = (_at_revision(item, part) for part in parts)
    return ModelRef(own.path, own.revision, adapter[0] if adapter else None)


def _path(item: Item) -> ModelRef:
    if isinstance(item.value, dict):
        fields = item.fields(("path", "revision"))
        revision = fields["revision"].text() if "revision" in fields else None
        return ModelRef(_required(item, fields, "path").text(), revision)
    return _at_revision(item, item.text())


def _at_revision(item: Item, text: str) -> ModelRef:
    # The @ of a URL is its own: user@host.
    path, at, revision = (part.strip() for part in ((text, "", "") if "://" in text else text.partition("@")))
    if not path or (at and not revision) or "@" in revision:
        item.fail(f"{item.value!r} does not name a model; expected path, path@revision or path+adapter")
    return ModelRef(path, revision or None)


def _optional_model(fields: Mapping[str, Item]) -> ModelRef | None:
    return _model(fields["base_model"]) if "base_model" in fields else None


def _models(item: Item, method: Method) -> tuple[Input, ...]:
    keys = ("model", "adapter", "parameters", "data", "statistics")
    return tuple(_input(part, method, part.fields(keys, _ONLY_IN_SLICES)) for part in item.sequence())


def _input(item: Item, method: Method, fields: Mapping[str, Item]) -> Input:
    is_adapter = "adapter" in fields
    if is_adapter and "model" in fields:
        item.fail("both model and adapter; for a model with its adapter write `model: BASE+ADAPTER`")
    return Input(
        ModelRef(fields["adapter"].text()) if is_adapter else _model(_required(item, fields, "model")),
        read_settings(fields.get("parameters"), method, of_model=True),
        _layer_range(fields["layer_range"]) if "layer_range" in fields else None,
        _data(fields["data"], method) if "data" in fields else None,
        _statistics(fields["statistics"], method) if "statistics" in fields else None,
        is_adapter,
    )


def _layer_range(item: Item) -> tuple[int, int]:
    numbers = [part.integer(0) for part in item.sequence()]
    if len(numbers) != 2 or numbers[0] >= numbers[1]:
        item.fail(f"{numbers}: expected [first layer, layer after the last], such as [0, 16]")
    return numbers[0], numbers[1]


def _slices(item: Item, method: Method) -> tuple[Slice, ...]:
    return tuple(_slice(part, method) for part in item.sequence())


def _slice(item: Item, method: Method) -> Slice:
    fields = item.fields(("sources", "base_model", "parameters"), _NO_RESIDUAL)
    sources = []
    for part in _required(item, fields, "sources").sequence():
        own = part.fields(("model", "layer_range", "parameters"))
        first, stop = _layer_range(_required(part, own, "layer_range"))
        sources.append(_input(part, method, own))
        start, end = sources[0].layer_range or (0, 0)
        if stop - first != end - start:
            own["layer_range"].fail(
                f"{stop - first} layers, but the first source of the slice has {end - start}; all need the same number"
            )
    parameters = read_settings(fields.get("parameters"), method, of_model=False)
    return Slice(tuple(sources), _optional_model(fields), parameters)


def _modules(item: Item, method: Method) -> dict[str, Module]:
    if not item.mapping():
        item.fail("no module is named")
    return {name: _module(part, method) for name, part in item.mapping().items()}


def _module(item: Item, method: Method) -> Module:
    fields = item.fields(("models", "slices", "parameters"))
    parameters = read_settings(fields.get("parameters"), method, of_model=False)
    if _layout(item, fields, ("models", "slices")) == "models":
        return Module(models=_models(fields["models"], method), parameters=parameters)
    return Module(slices=_slices(fields["slices"], method), parameters=parameters)


# -- data ------------------------------------------------------------------------------------------


def _data(item: Item, method: Method) -> Data:
    """A file, or a mapping with options for reading it."""
    if method.learn is None:
        item.fail(f"{method.name} does not use data; leave this out (data for an alignment belong in `align`)")
    if not isinstance(item.value, dict):
        return Data(item.text())
    words, numbers = ("file", "task", "encoding"), {"limit": 1, "batch_size": 1, "max_length": 2, "seed": 0}
    fields = item.fields((*words, "columns", *numbers, "pooling"))
    columns = fields["columns"].mapping() if "columns" in fields else {}
    options: dict[str, str | int] = {key: fields[key].integer(numbers[key]) for key in numbers if key in fields}
    options |= {"pooling": fields["pooling"].text()} if "pooling" in fields else {}
    texts = {key: fields[key].text() for key in words if key in fields}
    return Data(**texts, columns={role: part.text() for role, part in columns.items()}, options=options)


def _statistics(item: Item, method: Method) -> str:
    if method.statistics is None:
        item.fail(f"{method.name} has no use for saved statistics; leave this out")
    return item.text()


# -- tokenizer and alignment -----------------------------------------------------------------------


def _tokenizer(fields: Mapping[str, Item], models: Sequence[Input]) -> Tokenizer | None:
    present = [fields[key] for key in _TOKENIZERS if key in fields]
    if not present:
        return None
    if len(present) > 1:
        present[1].fail("both tokenizer and tokenizer_source, which mean the same; keep `tokenizer`")
    if "tokenizer_source" in fields:
        return Tokenizer(_vocabulary(fields["tokenizer_source"], models))
    if not isinstance(present[0].value, dict):
        present[0].fail("expected a mapping, such as {source: union}; for a name alone write `tokenizer_source: …`")
    own = present[0].fields(("source", "tokens", "pad_to_multiple_of"))
    tokens = {name: _token(part) for name, part in (own["tokens"].mapping() if "tokens" in own else {}).items()}
    return Tokenizer(
        _vocabulary(own["source"], models) if "source" in own else "union",
        {name: source for name, (source, _) in tokens.items()},
        tuple(ref for _, ref in tokens.values() if ref is not None),
        own["pad_to_multiple_of"].integer(1) if "pad_to_multiple_of" in own else None,
    )


def _vocabulary(item: Item, models: Sequence[Input]) -> Any:
    """ "union", "base" (without a base model, the model that gives the config) or a model, also by number."""
    return item.value if item.value in ("union", "base") else _model_or_number(item, models)


def _token(item: Item) -> tuple[TokenSource, ModelRef | None]:
    """The source of a token's row, and the model that it names."""
    fields = item.fields(("source", "force"))
    force = fields["force"].boolean() if "force" in fields else False
    if "source" not in fields:
        return TokenSource("usual", force=force), None
    source = fields["source"]
    if not isinstance(source.value, dict) or not {"kind", "token", "token_id"} & source.value.keys():
        ref = _model(source)
        return TokenSource("model", str(ref), force=force), ref
    own = source.fields(("kind", "model", "token", "token_id"))
    if _required(source, own, "kind").choice(("model_token", "zero")) == "zero":
        source.fields(("kind",))
        return TokenSource("zero", force=force), None
    by_name = _layout(source, own, ("token", "token_id")) == "token"
    row: dict[str, Any] = {"token": own["token"].text()} if by_name else {"token_id": own["token_id"].integer(0)}
    ref = _model(_required(source, own, "model"))
    return TokenSource("model_token", str(ref), **row, force=force), ref


def _align(item: Item, models: Sequence[Input]) -> Align:
    fields = item.fields(Align.__dataclass_fields__)
    options: dict[str, Any] = {key: part.boolean() for key, part in fields.items() if key in _SWITCHES}
    if "axes" in fields:
        axes = fields["axes"]
        several = isinstance(axes.value, list)
        options["axes"] = tuple(part.text() for part in axes.sequence()) if several else axes.text()
        for part in axes.sequence() if several else [axes]:
            _attempt(part, require_axes, (part.text(),) if several else part.text())
        _attempt(axes, require_axes, options["axes"])
    if "groups" in fields:
        options["groups"] = {axis: part.text() for axis, part in fields["groups"].mapping().items()}
        for axis, part in fields["groups"].mapping().items():
            _attempt(part, require_groups, {axis: part.text()})
    if "anchor" in fields:
        options["anchor"] = _model_or_number(fields["anchor"], models)
    if "source" in fields:
        options["source"] = fields["source"].choice(("weights", "activations", "learned"))
    source = options.get("source", "weights")
    if (source != "weights") != ("data" in fields):
        item.fail(
            "`source: activations` and `source: learned` need `data: FILE`, on which the models are run; `source: "
            "weights` takes none"
        )
    for key, part in fields.items():
        if key in ("one_pass", "biases") and source == "activations":
            part.fail("only for `source: weights`; leave it out, or set that")
        if key in ("steps", "rate", "distil", "validation") and source != "learned":
            part.fail("only for `source: learned`; leave it out, or set that")
    options |= {key: fields[key].text() for key in ("data", "validation") if key in fields}
    if "steps" in fields:
        options["steps"] = fields["steps"].integer(1)
    options |= {key: fields[key].number() for key in ("rate", "distil") if key in fields}
    if "limit" in fields:
        if "data" not in fields:
            fields["limit"].fail("this limits the rows of `data`, which is missing")
        options["limit"] = fields["limit"].integer(1)
    if "layers" in fields:
        options["layers"] = _word_or_number(fields["layers"])
    return Align(**options)


def _attempt(item: Item, check: Callable[[Any], object], value: Any) -> None:
    try:
        check(value)
    except OptionError as error:
        item.fail(str(error))


def _model_or_number(item: Item, models: Sequence[Input]) -> ModelRef:
    """A model, by reference or by its number (from 1) under `models`."""
    if type(item.value) is not int:
        return _model(item)
    if not models:
        item.fail("models are numbered under `models` only; name it by its path")
    if item.integer(1) > len(models):
        item.fail(f"model {item.value}: there are models 1 to {len(models)}")
    return models[item.value - 1].model

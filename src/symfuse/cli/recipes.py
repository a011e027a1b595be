"""The recipes of a merge from the command line: from a file, or from models and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from symfuse.cli.app import groups_of
from symfuse.cli.command import F, grouped
from symfuse.cli.evaluate import columns_of, data_options
from symfuse.errors import OptionError

if TYPE_CHECKING:
    from symfuse.api import Place, Recipe
    from symfuse.merging import Method


reconcile_options = grouped(
    "Models that differ",
    click.option(
        "--foreign",
        type=click.Choice(["refuse", "drop", "keep"]),
        help="Refuse, drop or keep tensors that only some models have. Default: by the recipe, or refuse.",
    ),
    click.option(
        "--missing-bias",
        type=click.Choice(["refuse", "zero"]),
        help="Refuse biases that only some models have, or add zeros. Default: by the recipe, or refuse.",
    ),
    click.option("--force-config", is_flag=True, help="Merge even if configs compute different functions."),
)
_recipe_options = grouped(
    "Merging",
    click.option("--method", help="Merge by this method (see `symfuse methods`). Default: linear."),
    click.option("--weights", help="Weigh the models, in order: 0.3,0.7. Default: equal."),
    click.option("--no-normalize", is_flag=True, help="Do not scale the weights to a sum of 1."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a parameter of the method: density=0.5, or one value per model: density=0.3,0.5.",
    ),
    click.option(
        "--base",
        help="Take config, dtypes and tokenizer from this model (number from 1, or path), and start task vectors "
        "from it. Default: 1, or that of --task-heads; none for methods that need a base.",
    ),
    click.option(
        "--statistics",
        multiple=True,
        metavar="FOLDER",
        help="Use saved statistics (symfuse collect), a folder for each model, instead of data.",
    ),
    click.option(
        "--task-heads",
        "heads",
        help="Keep their average (default), drop them, or keep those of one model (its number).",
    ),
    click.option("--rank", type=click.IntRange(1), help="Of adapters: cut the result to this rank."),
    click.option(
        "--space",
        type=click.Choice(["core", "knots", "full", "factors"]),
        help="Of adapters: merge in these coordinates. Default: full; for linear core, which is the same.",
    ),
    click.option("--seed", type=int, help="Seed random methods. Default: by the recipe, or 0."),
    click.option("--dtype", help="Write float32, bfloat16, … Default: the dtype of each tensor of the base."),
    click.option("--tokenizer", help="Use union, base, shared-rows, or a model's (its path, or number from 1)."),
    click.option("--align", "axes", metavar="AXES", help="Align first: auto, attention, ffn, all, …"),
    click.option(
        "--anchor",
        help="Align to this model (its number, from 1, or path). Default: the base of task vectors, else the model "
        "nearest to the mean.",
    ),
)


def recipe_options(function: F) -> F:
    """The options that stand for a recipe's keys. Models are numbered from 1."""
    return _recipe_options(data_options(function, required=False, several=True))


def recipes_of(models: Sequence[str], options: Mapping[str, Any]) -> tuple[tuple[Recipe, ...], Place | None]:
    """The recipes of these arguments, and the folder to write if one is named; OptionError for arguments that clash."""
    from symfuse import api

    if not is_recipe(models):
        return (_recipe_of_options(models, options),), options["output"]
    names = {"axes": "align", "settings": "set", "columns": "column", "heads": "task_heads"}
    given = {
        "--" + names.get(key, key).replace("_", "-"): place
        for key, place in _OF_RECIPE.items()
        if options.get(key) not in (None, False, ())
    }
    if given:
        raise OptionError(f"{', '.join(given)}: write this in the recipe instead: {', '.join(given.values())}")
    if len(models) > 2 or (len(models) == 2 and options["output"] is not None):
        raise OptionError("expected one recipe and one folder to write: symfuse merge recipe.yml OUT")
    if "" in models:
        raise OptionError("the name of the folder to write is empty; name one: symfuse merge recipe.yml OUT")
    target = api.place_of(models[1]) if len(models) == 2 else options["output"]
    return tuple(_completed(recipe, options) for recipe in api.read_recipes(Path(models[0]))), target


def is_recipe(models: Sequence[str]) -> bool:
    return models[0].endswith((".yml", ".yaml"))


# The options that a recipe has keys for, with those keys.
_OF_RECIPE = {
    "method": "`merge_method: …`",
    "weights": "`parameters: {weight: …}` of each model",
    "no_normalize": "`parameters: {normalize: false}`",
    "settings": "`parameters: {…}`",
    "base": "`base_model: …`",
    "heads": "`heads: …`",
    "dtype": "`dtype: …`",
    "tokenizer": "`tokenizer_source: …`",
    "rank": "`rank: …`",
    "space": "`space: …`",
    "axes": "`align: {axes: …}`",
    "anchor": "`align: {anchor: …}`",
    "layers": "`align: {layers: …}`",
    "no_scaling": "`align: {scaling: false}`",
    "group": "`align: {groups: …}`",
    "one_pass": "`align: {one_pass: true}`",
    "no_biases": "`align: {biases: false}`",
    "data": "`data: …`",
    "statistics": "`statistics: …` of each model",
    **{key: f"`data: {{{key}: …}}`" for key in ("task", "columns", "encoding", "limit", "batch_size", "max_length")},
    "pooling": "`data: {pooling: …}`",
}


def _reconciling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that options may add: the seed, and how models that differ are reconciled."""
    keys = {key: options[key] for key in ("foreign", "missing_bias", "force_config") if options[key]}
    return keys | ({} if options["seed"] is None else {"seed": options["seed"]})


def _completed(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """The recipe with the keys of the options added, in its text too, since that text is recorded."""
    import yaml

    from symfuse import api

    keys = {key: value for key, value in _reconciling(options).items() if getattr(recipe, key) != value}
    if not keys:
        return recipe
    text = f"{recipe.text.rstrip()}\n{yaml.safe_dump(keys)}"
    try:
        api.parse_recipe(text)
    except OptionError:  # in one line of braces, or with one of the keys
        text = yaml.safe_dump(
            {**api.read_value(recipe.text, "the recipe"), **keys}, sort_keys=False, allow_unicode=True
        )
    return replace(recipe, text=text, **keys)


def _recipe_of_options(models: Sequence[str], options: Mapping[str, Any]) -> Recipe:
    from symfuse import api

    method = api.lookup(options["method"] or "linear")
    heads = options["heads"] or "average"
    adapters = all(map(api.is_adapter_folder, models))
    if adapters and options["base"] in map(str, range(len(models) + 1)):
        raise OptionError(f"--base {options['base']}: of adapters, --base is the folder of their base; give its path")
    base = None if adapters else _base(options["base"], heads, models, method)
    if options["axes"] is None:
        unused = ("layers", "no_scaling", "group", "one_pass", "no_biases", "anchor", "no_verify")
        given = ["--" + key.replace("_", "-") for key in unused if options.get(key)]
        if given:
            raise OptionError(f"{', '.join(given)}: without --align nothing is aligned; add --align, or leave it out")
    listed = [model for i, model in enumerate(models) if method.base == "unused" or i != base]
    if method.base != "unused" and base is not None and models[base] in listed:
        raise OptionError(
            f"{models[base]} is both the base and a model that is merged with it; name it once, or another model"
        )
    data, own = _data(options, listed)
    keys = {
        "dtype": options["dtype"],
        "tokenizer_source": _tokenizer(options["tokenizer"], models),
        "data": data,
        "rank": options["rank"],
        "space": options["space"],
        "heads": models[int(heads) - 1] if heads.isdigit() and 0 < int(heads) <= len(models) else heads,
        "align": None if options["axes"] is None else _align(options, models),
        **_reconciling(options),
    }
    if adapters:
        keys |= {"base_model": options["base"], "heads": options["heads"]}
    kind = "adapter" if adapters else "model"
    return api.recipe_of(models, method, base, _parameters(options, method), keys, own, kind=kind)


def _tokenizer(text: str | None, models: Sequence[str]) -> str | None:
    """A word or a path; a number is replaced by the path of that model."""
    return text if text is None or not text.isdecimal() else models[_number("--tokenizer", text, models)]


def _align(options: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    block = {
        "axes": options["axes"].split(",") if "," in options["axes"] else options["axes"],
        "anchor": None if options["anchor"] is None else models[_number("--anchor", options["anchor"], models)],
        "layers": options["layers"],
        "scaling": False if options["no_scaling"] else None,
        "groups": groups_of(options) or None,
        "one_pass": options["one_pass"],
        "biases": not options["no_biases"],
    }
    return {key: value for key, value in block.items() if value is not None}


def _parameters(options: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The parameters of the method: one value for all models, or a list with one for each."""
    settings = [_setting(text, method) for text in options["settings"] or ()]
    given = dict(settings)
    for option, name in (("weights", "weight"), ("no_normalize", "normalize")):
        if options[option] and name in given:
            both = f"--{option.replace('_', '-')} and --set {name}="
            raise OptionError(f"{both} set the same parameter; leave one of them out")
    if len(given) < len(settings):
        names = [name for name, _ in settings]
        twice = next(name for name in names if names.count(name) > 1)
        raise OptionError(f"--set {twice}= is given twice; give it once, with one value per model: {twice}=0.3,0.5")
    more: dict[str, Any] = {"normalize": False} if options["no_normalize"] else {}
    return given | more | ({} if options["weights"] is None else {"weight": _numbers(options["weights"])})


def _data(options: Mapping[str, Any], models: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The keys of --data and --statistics: those of all models, and those of each."""
    keys = ("task", "encoding", "limit", "batch_size", "max_length", "pooling")
    shared = {key: options[key] for key in keys if options.get(key) is not None}
    shared |= {"columns": columns} if (columns := columns_of(options)) else {}
    files, folders = options["data"], options["statistics"]
    for what, paths in (("--data", files if len(files) > 1 else ()), ("--statistics", folders)):
        if paths and len(paths) != len(models):
            raise OptionError(
                f"{what} is given {len(paths)} times for {len(models)} models: {', '.join(models)}; give one for each, "
                "in the same order" + (", or one --data for all" if what == "--data" else " (a recipe may mix both)")
            )
    if shared and not files:
        names = ", ".join("--" + key.replace("columns", "column").replace("_", "-") for key in shared)
        raise OptionError(f"{names}: only with --data, which is missing; add it, or leave this out")
    shared |= {"file": files[0]} if len(files) == 1 else {}
    own = [{"data": file} for file in files] if len(files) > 1 else [{} for _ in models]
    return shared, [block | ({"statistics": folders[i]} if folders else {}) for i, block in enumerate(own)]


def _setting(text: str, method: Method) -> tuple[str, Any]:
    """A parameter and its value; with commas a list with one value per model, unless the parameter is a text."""
    from symfuse import api

    name, equals, value = text.partition("=")
    if not equals or not value:
        raise OptionError(f"--set {text!r}: write NAME=VALUE, such as density=0.5")
    known = method.parameters.get(name)
    if known is not None and known.kind is str and not known.per_model:
        return name, value
    values = [api.read_value(part, f"--set {text[:60]!r}") for part in value.split(",")]
    return name, values if len(values) > 1 else values[0]


def _base(text: str | None, heads: str, models: Sequence[str], method: Method) -> int | None:
    """The index of the base: of the model whose head is kept, if --task-heads names one. None if the method needs a
    base and none is named."""
    head_of = None if heads in ("average", "drop") else _number("--task-heads", heads, models)
    if text is None and method.base == "required":
        return None
    base = head_of if text is None else _number("--base", text, models)
    if head_of is not None and base != head_of:
        raise OptionError(
            f"--base {text} and --task-heads {heads}: the model whose head is kept must be the base, since its config "
            "names the class; leave --base out, or name the same model"
        )
    return base


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--weights {text!r}: write numbers separated by commas, such as 0.3,0.7") from None


def _number(option: str, text: str, models: Sequence[str]) -> int:
    numbers = [i for i, model in enumerate(models) if text in (model, str(i + 1))]
    if len(numbers) != 1:
        listed = ", ".join(f"{i + 1} ({model})" for i, model in enumerate(models))
        raise OptionError(f"{option} {text!r}: write the number or the path of one model: {listed}")
    return numbers[0]

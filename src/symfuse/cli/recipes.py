"""What the command line says of a merge, as recipes: a file of them, or models and options."""

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
        help="Tensors that only some models have. Default: as the recipe says, or refuse.",
    ),
    click.option(
        "--missing-bias",
        type=click.Choice(["refuse", "zero"]),
        help="Biases that only some models have. Default: as the recipe says, or refuse.",
    ),
    click.option("--force-config", is_flag=True, help="Merge although configs compute something else."),
)
_recipe_options = grouped(
    "Merging",
    click.option("--method", help="How tensors are combined. Default: linear. `symfuse methods` lists them."),
    click.option("--weights", help="One per model, in order: 0.3,0.7. Default: equal."),
    click.option("--no-normalize", is_flag=True, help="Take the weights as they are."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="A parameter of the method: density=0.5, or one value per model: density=0.3,0.5.",
    ),
    click.option(
        "--base",
        help="Number (from 1) or path of the model whose config, dtypes and tokenizer it has, and which task "
        "vectors start from (methods that need one have no default). Default: 1, or that of --task-heads.",
    ),
    click.option(
        "--statistics",
        multiple=True,
        metavar="FOLDER",
        help="Saved statistics (symfuse collect) of each model, for methods that look at data.",
    ),
    click.option(
        "--task-heads", "heads", help="Keep their average (default), none (drop), or those of a model (its number)."
    ),
    click.option("--seed", type=int, help="Of random methods. Default: as the recipe says, or 0."),
    click.option("--dtype", help="Of the result: float32, bfloat16, … Default: the base's, by tensor."),
    click.option("--tokenizer", help="union, base, shared-rows, or a model (its path, or number from 1)."),
    click.option("--align", "axes", metavar="AXES", help="Align first: auto, attention, ffn, all, …"),
    click.option(
        "--anchor",
        help="Number (from 1) or path of the model to align to. Default: the base of task "
        "vectors, else that nearest to the mean.",
    ),
)


def recipe_options(function: F) -> F:
    """What a recipe says, for models on the command line. Models are numbered from 1."""
    return _recipe_options(data_options(function, required=False, several=True))


def recipes_of(models: Sequence[str], options: Mapping[str, Any]) -> tuple[tuple[Recipe, ...], Place | None]:
    """The recipes that the arguments mean, and the folder to write if one is named; OptionError for arguments that
    clash."""
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
        raise OptionError(f"{', '.join(given)}: with a recipe, write this in it: {', '.join(given.values())}")
    if len(models) > 2 or (len(models) == 2 and options["output"] is not None):
        raise OptionError("a recipe and one folder to write are expected: symfuse merge recipe.yml OUT")
    if "" in models:
        raise OptionError("the name of the folder to write is empty; name one: symfuse merge recipe.yml OUT")
    target = api.place_of(models[1]) if len(models) == 2 else options["output"]
    return tuple(_completed(recipe, options) for recipe in api.read_recipes(Path(models[0]))), target


def is_recipe(models: Sequence[str]) -> bool:
    return models[0].endswith((".yml", ".yaml"))


# The options that a recipe has keys for, and these.
_OF_RECIPE = {
    "method": "`merge_method: …`",
    "weights": "`parameters: {weight: …}` of each model",
    "no_normalize": "`parameters: {normalize: false}`",
    "settings": "`parameters: {…}`",
    "base": "`base_model: …`",
    "heads": "`heads: …`",
    "dtype": "`dtype: …`",
    "tokenizer": "`tokenizer_source: …`",
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
    """What the options add to a recipe, as its keys: the seed, and what becomes of models that do not fit together."""
    found = {key: options[key] for key in ("foreign", "missing_bias", "force_config") if options[key]}
    return found | ({} if options["seed"] is None else {"seed": options["seed"]})


def _completed(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """The recipe with what the options say besides, in its text too, so that the recorded one is what was run."""
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
    base = _base(options["base"], heads, models, method)
    if options["axes"] is None:
        unused = ("layers", "no_scaling", "group", "one_pass", "no_biases", "anchor", "no_verify")
        given = ["--" + key.replace("_", "-") for key in unused if options.get(key)]
        if given:  # not ignored without a word
            raise OptionError(f"{', '.join(given)}: without --align nothing is aligned; add --align, or leave it out")
    listed = [model for i, model in enumerate(models) if method.base == "unused" or i != base]
    if method.base != "unused" and base is not None and models[base] in listed:
        raise OptionError(
            f"{models[base]} is the base and a model that is merged with it, and does not differ from itself; name it "
            "once, or another model"
        )
    data, own = _data(options, listed)
    keys = {
        "dtype": options["dtype"],
        "tokenizer_source": _tokenizer(options["tokenizer"], models),
        "data": data,
        "heads": models[int(heads) - 1] if heads.isdigit() and 0 < int(heads) <= len(models) else heads,
        "align": None if options["axes"] is None else _align(options, models),
        **_reconciling(options),
    }
    return api.recipe_of(models, method, base, _parameters(options, method), keys, own)


def _tokenizer(text: str | None, models: Sequence[str]) -> str | None:
    """A word or a path, or that of the model with this number."""
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
    """Those of the method: one value for all models, or a list with one for each."""
    settings = [_setting(text, method) for text in options["settings"] or ()]
    given = dict(settings)
    for option, name in (("weights", "weight"), ("no_normalize", "normalize")):
        if options[option] and name in given:
            both = f"--{option.replace('_', '-')} and --set {name}="
            raise OptionError(f"{both} are two spellings of one parameter; give one of them")
    if len(given) < len(settings):
        names = [name for name, _ in settings]
        twice = next(name for name in names if names.count(name) > 1)
        raise OptionError(f"--set {twice}= is given twice; give it once, with one value per model: {twice}=0.3,0.5")
    more: dict[str, Any] = {"normalize": False} if options["no_normalize"] else {}
    return given | more | ({} if options["weights"] is None else {"weight": _numbers(options["weights"])})


def _data(options: Mapping[str, Any], models: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What --data and --statistics say: of all models, and of each."""
    keys = ("task", "encoding", "limit", "batch_size", "max_length", "pooling")
    shared = {key: options[key] for key in keys if options.get(key) is not None}
    shared |= {"columns": columns} if (columns := columns_of(options)) else {}
    files, kept = options["data"], options["statistics"]
    for what, given in (("--data", files if len(files) > 1 else ()), ("--statistics", kept)):
        if given and len(given) != len(models):
            raise OptionError(
                f"{what} is given {len(given)} times for {len(models)} models: {', '.join(models)}; give one for each, "
                "in the same order" + (", or one --data for all" if what == "--data" else " (a recipe may mix both)")
            )
    if shared and not files:
        names = ", ".join("--" + key.replace("columns", "column").replace("_", "-") for key in shared)
        raise OptionError(f"{names}: this is how data are read, and there are none; add --data, or leave it out")
    shared |= {"file": files[0]} if len(files) == 1 else {}
    own = [{"data": file} for file in files] if len(files) > 1 else [{} for _ in models]
    return shared, [block | ({"statistics": kept[i]} if kept else {}) for i, block in enumerate(own)]


def _setting(text: str, method: Method) -> tuple[str, Any]:
    """A parameter and its value, or a list of those of each model: where commas stand, unless it is one text."""
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
    """The number of the model that the result is named and typed after: the one whose head is kept, if that is said;
    what task vectors start from is to be named."""
    kept = None if heads in ("average", "drop") else _number("--task-heads", heads, models)
    if text is None and method.base == "required":
        return None
    base = kept if text is None else _number("--base", text, models)
    if kept is not None and base != kept:
        raise OptionError(
            f"--base {text} and --task-heads {heads}: whose head is kept is also the base, as its config names the "
            "class; leave --base out, or name the same model"
        )
    return base


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"--weights {text!r}: write numbers separated by commas, such as 0.3,0.7") from None


def _number(option: str, text: str, models: Sequence[str]) -> int:
    found = [i for i, model in enumerate(models) if text in (model, str(i + 1))]
    if len(found) != 1:
        listed = ", ".join(f"{i + 1} ({model})" for i, model in enumerate(models))
        raise OptionError(f"{option} {text!r}: write the number or the path of one model: {listed}")
    return found[0]

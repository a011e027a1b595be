"""The stages of a recipe before any alignment: open, reconcile, one vocabulary."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from symfuse import adapters
from symfuse.alignment import Alignment
from symfuse.device import CPU
from symfuse.errors import OptionError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.companions import is_of_tokenizer
from symfuse.messages import some, suggestion
from symfuse.methods import Fitted
from symfuse.model import Model, require_same_shape
from symfuse.model.undeclared import LAYER
from symfuse.recipes.effect import without_effect
from symfuse.recipes.events import Note
from symfuse.recipes.plan import plan_recipe, require_layers, template_of
from symfuse.recipes.schema import COPY, ModelRef, Recipe
from symfuse.rewriting import Reconcile, harmonise, require_same_frame
from symfuse.rewriting.names import Inside
from symfuse.rewriting.vocabulary import Vocabulary, build, has_tokenizer, rewrite, shared_rows, with_chat_template

VOCABULARIES = ("union", "base", "shared-rows")
SHARED_ROWS = "shared-rows"  # of `tokenizer_source`: rows with equal indices mean the same token


@dataclass(frozen=True)
class Stage:
    """A recipe with its models at this stage. models: by reference, in the order of the recipe. opened: the same, as
    they were opened. alignments: of the aligned models. anchor: of the alignments. learned: what the method learned
    from data. kept, config: further tensors and fields of the result. inside: the multimodal model it is a part of."""

    recipe: Recipe
    models: Mapping[ModelRef, Checkpoint]
    opened: Mapping[ModelRef, Checkpoint]
    options: Reconcile = field(default_factory=Reconcile)
    notes: tuple[Note, ...] = ()
    kept: Mapping[str, tuple[Checkpoint, str]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    inside: Inside | None = None
    vocabulary: Vocabulary | None = None
    alignments: Mapping[ModelRef, Alignment] = field(default_factory=dict)
    anchor: ModelRef | None = None
    learned: Fitted | None = None

    @property
    def changed(self) -> bool:
        """Whether it was aligned, or something was learned."""
        return self.anchor is not None or self.learned is not None

    @property
    def template(self) -> int:
        """The index of the model that gives names, config and dtypes, and the tokenizer if the recipe names none."""
        return list(self.models).index(template_of(self.recipe))

    @property
    def before(self) -> list[Checkpoint]:
        """The models as they were opened, the template first."""
        models = list(self.opened.values())
        return [models[self.template], *models]

    @property
    def tokenizer(self) -> str:
        """The origin of the result's tokenizer, in words."""
        template = list(self.models.values())[self.template]
        own = f"tokenizer of {template.name}" if has_tokenizer(template) else "no tokenizer"
        return own if self.vocabulary is None else self.vocabulary.origin


def models_of(recipe: Recipe) -> list[ModelRef]:
    """Every model that a recipe names, those that are used for tokens only last."""
    tokens = () if recipe.tokenizer is None else recipe.tokenizer.models_used()
    return [ref for ref in dict.fromkeys([*recipe.models_used(), *tokens]) if ref.path != SHARED_ROWS]


def open_models(recipe: Recipe, known: Mapping[str, Checkpoint] | None = None) -> dict[ModelRef, Checkpoint]:
    """Open every model that the recipe names; only headers are read. known: models in memory, and results of earlier
    recipes."""
    require_models(recipe)
    return {ref: open_model(recipe, ref, known or {}) for ref in models_of(recipe)}


def require_models(recipe: Recipe) -> None:
    """OptionError for a recipe of adapters."""
    if recipe.of_adapters:
        raise OptionError(
            "a recipe of adapters is merged by `symfuse merge` or symfuse.merge_recipe, alone in its file, and its "
            "result is no model; as models they are written with their base (model: BASE+ADAPTER)"
        )


def open_model(recipe: Recipe, ref: ModelRef, known: Mapping[str, Checkpoint]) -> Checkpoint:
    """Open one of them."""
    try:
        return _open(ref, known)
    except SymfuseError:
        hint = suggestion(str(ref), VOCABULARIES)
        if not hint or recipe.tokenizer is None or ref != recipe.tokenizer.source:
            raise
        error = f"{str(ref)!r} is neither a model nor one of {', '.join(VOCABULARIES)}{hint}"
        recipe.refuse(OptionError(error), "tokenizer_source", "tokenizer.source")


def _open(ref: ModelRef, known: Mapping[str, Checkpoint]) -> Checkpoint:
    if str(ref) in known:
        return known[str(ref)].replace(name=str(ref).partition(COPY)[0])
    # A folder with + or @ in its name. os.path.isdir is false for texts that are not valid paths.
    if os.path.isdir(str(ref)):  # noqa: PTH112
        return _open_folder(str(ref), str(ref))
    if ref.revision is not None and ref.path in known:
        raise OptionError(f"{ref}: {ref.path} is not a model of the hub, and has no revision")
    base = known[ref.path] if ref.path in known else _open_folder(ref.path, ref.path, ref.revision)
    if ref.adapter is None:
        return base
    if ref.adapter.revision is not None:
        raise OptionError(f"{ref}: an adapter is a local folder, which has no revision; leave it out")
    if not os.path.isdir(ref.adapter.path):  # noqa: PTH112
        raise OptionError(f"{ref}: the adapter {ref.adapter} is not a local folder; download it first")
    return adapters.apply(base, ref.adapter.path).replace(name=str(ref))


def _open_folder(path: str, name: str, revision: str | None = None) -> Checkpoint:
    if revision is None and os.path.isdir(path) and adapters.is_adapter(Path(path)):  # noqa: PTH112
        return adapters.open_adapter(Path(path)).replace(name=name)
    return open_checkpoint(path, name=name, revision=revision)


def _module_notes(checkpoints: Sequence[Checkpoint], template: int) -> list[str]:
    """Notes on further modules of sentence-transformers that differ: they are not merged."""
    ours, used = checkpoints[template].module_weights(), checkpoints[template].name
    notes = []
    for checkpoint in checkpoints:
        theirs = checkpoint.module_weights()
        if differ := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
            notes.append(f"{some(differ)} of {checkpoint.name} and {used} differ; those of {used} are copied")
    return notes


def prepare(recipe: Recipe, models: Mapping[ModelRef, Checkpoint], options: Reconcile | None = None) -> Stage:
    """The models with the same tensors, in one vocabulary. options: instead of the recipe's.

    Raises IncompatibleError for differences that the options do not reconcile.
    """
    options = options or reconcile_of(recipe)
    refs = order_of(recipe, models)
    used = {ref: models[ref] for ref in refs}
    stage = Stage(recipe, used, used, options)
    own = [Note(f"{checkpoint.name}: {note}", "model") for checkpoint in used.values() for note in checkpoint.notes]
    done = harmonise(list(used.values()), base=stage.template, options=options)
    checkpoints, vocabulary, notes = done.checkpoints, None, list(done.notes)
    if recipe.tokenizer is not None:
        vocabulary = _vocabulary(recipe, refs, checkpoints, models, stage.template)
        checkpoints = [
            _reading(checkpoint, vocabulary) for checkpoint in rewrite(checkpoints, vocabulary, vocabulary_tensors)
        ]
        notes += vocabulary.report.lines()
    opened = [Model.of(checkpoint, undeclared=True) for checkpoint in checkpoints]
    notes += [note for model in opened for note in model.notes]
    notes += _module_notes(checkpoints, stage.template)
    configs = require_same_shape(opened, force_config=options.force_config, layers=recipe.whole)
    matter = options.force_config or not _same_labels(used.values())
    require_layers(recipe, dict(zip(refs, opened, strict=True)))
    every = [*map(Note, recipe.notes), *own, *map(Note, notes)]
    every += [Note(text, "merge" if matter else "harmless") for text in configs]
    every += map(Note, without_effect(recipe, _names(recipe, opened)))
    first = {note.text: note for note in reversed(every)}  # of several with one text
    return replace(
        stage,
        models=dict(zip(refs, checkpoints, strict=True)),
        notes=tuple(first[text] for text in dict.fromkeys(note.text for note in every)),
        kept=done.kept,
        config=done.config,
        inside=done.inside,
        vocabulary=vocabulary,
    )


def order_of(recipe: Recipe, models: Collection[ModelRef]) -> list[ModelRef]:
    """The models that are merged, those listed under `models` first, since recipes refer to them by number."""
    listed = [entry.model for entry in recipe.models]
    return [ref for ref in dict.fromkeys([*listed, *models]) if ref in recipe.models_used()]


def _same_labels(models: Iterable[Checkpoint]) -> bool:
    """Whether all models name the labels of a classifier alike."""
    fields = [model.config.get("id2label") or {} for model in models]
    names = [{str(k): v for k, v in field.items()} if isinstance(field, Mapping) else field for field in fields]
    return all(one == names[0] for one in names)


def plan(stage: Stage, *, device: str = CPU) -> Checkpoint:
    """The merged checkpoint, with its other files; no tensor is read. device: where blocks are merged."""
    merged = plan_recipe(
        stage.recipe,
        {ref: Model.of(checkpoint, undeclared=True) for ref, checkpoint in stage.models.items()},
        stage.kept,
        fields=stage.config,
        inside=stage.inside,
        before=stage.before,
        device=device,
        learned=stage.learned,
    )
    template = list(stage.models.values())[stage.template]
    files = dict(template.companions()) if stage.vocabulary is None else files_in(stage.vocabulary, template)
    if stage.recipe.chat_template is not None:
        files = with_chat_template(files, stage.recipe.chat_template, list(stage.models.values()))
    return merged.replace(files=files)


def require_one_frame(stage: Stage) -> Stage:
    """The stage with the notes of `require_same_frame`, which reads gains of norms. Skipped for passthrough, which
    copies layers, and with force_config, since gains may be 1 for lack of training."""
    if stage.recipe.merge_method == "passthrough" or stage.options.force_config:
        return stage
    models = [Model.of(checkpoint, undeclared=True) for checkpoint in stage.models.values()]
    return replace(stage, notes=(*stage.notes, *map(Note, require_same_frame(models))))


def _reading(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Checkpoint:
    """A model with the tokenizer of its new vocabulary, for reading data."""
    if not vocabulary.files:
        return checkpoint
    return checkpoint.replace(files=files_in(vocabulary, checkpoint))


def files_in(vocabulary: Vocabulary, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The other files of a model, with the tokenizer of a vocabulary instead of its own."""
    others = {name: data for name, data in checkpoint.companions().items() if not is_of_tokenizer(name)}
    return others | dict(vocabulary.files)


def _names(recipe: Recipe, models: Sequence[Model]) -> set[str]:
    """The names that filters are compared to: those of tensors, with layers at every depth of the output."""
    names = {file for model in models for file in model.spec.files}
    depth = max(
        sum(stop - start for layers in part.slices for start, stop in [layers.sources[0].layer_range or (0, 0)])
        for part in recipe.parts
    )
    ends = {(match[1], name[match.end() :]) for name in names if (match := LAYER.match(name))}
    return names | {f"{start}{at}.{end}" for start, end in ends for at in range(depth)}


def reconcile_of(recipe: Recipe) -> Reconcile:
    """The recipe's options for models that do not fit together."""
    return Reconcile(recipe.foreign, recipe.missing_bias, recipe.force_config)


def vocabulary_tensors(checkpoint: Checkpoint) -> dict[str, int]:
    """The dimension of the vocabulary of each tensor that has one, by name in the files."""
    spec = Model.of(checkpoint, undeclared=True).spec
    out = {}
    for name, declared in spec.tensors.items():
        dims = [str(dim).strip("*|") for dim in declared.layout.dims]
        if "vocab" in dims and spec.file_name(name) in checkpoint:
            out[spec.file_name(name)] = dims.index("vocab")
    return out


def _vocabulary(
    recipe: Recipe,
    refs: Sequence[ModelRef],
    checkpoints: Sequence[Checkpoint],
    models: Mapping[ModelRef, Checkpoint],
    template: int,
) -> Vocabulary:
    assert recipe.tokenizer is not None
    own = recipe.tokenizer
    if isinstance(own.source, ModelRef) and own.source.path == SHARED_ROWS:
        if own.tokens or own.pad_to_multiple_of:
            raise OptionError(f"tokenizer: tokens and pad_to_multiple_of have no meaning with source {SHARED_ROWS}")
        return shared_rows(checkpoints)
    source: Literal["union"] | int | Checkpoint
    if own.source == "union":
        source = "union"
    elif isinstance(own.source, str):  # of the base, or of the first model as in mergekit
        source = template
    else:
        source = refs.index(own.source) if own.source in refs else models[own.source]
    base = template if recipe.base_model is not None else None
    try:
        return build(checkpoints, source, base=base, tokens=own.tokens, pad_to_multiple_of=own.pad_to_multiple_of)
    except OptionError as error:
        recipe.refuse(error, "pad_to_multiple_of" if "pad_to_multiple_of" in str(error) else "tokens")

"""A checkpoint together with its declaration."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from symfuse.architectures.base import ARCHITECTURES, is_declared
from symfuse.architectures.binding import resolve
from symfuse.errors import CheckpointError, IncompatibleError, SpecError
from symfuse.io import Checkpoint
from symfuse.io.installed import on_disk
from symfuse.messages import some
from symfuse.model.config import Difference, differences, rope_theta, text_config
from symfuse.model.stacks import stacked, unstacked
from symfuse.model.undeclared import LAYER_COUNTS, disagreeing_frequencies, head_name, refuse_placeholders, require_head
from symfuse.model.undeclared import undeclared as by_names
from symfuse.spec import Axis, Declared, Spec, anatomy, layer_of

# Sizes in the config whose names are clearer in an error than shapes.
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "intermediate_size", "n_inner", "d_ff")


# By checkpoint that `Model.of` has checked: the option, the family and the config that it had, its Spec, and the notes.
_checked: WeakKeyDictionary[Checkpoint, tuple[tuple[Any, ...], Spec, tuple[str, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Model:
    """A checkpoint and its Spec, which it has been checked against; tensors are read by canonical name.
    notes: messages for the user."""

    checkpoint: Checkpoint
    spec: Spec
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, undeclared: bool = False) -> Model:
        """Resolve the family and check every name and shape, from headers alone.

        undeclared: for a family without a declaration use names and shapes alone, without symmetries, and add a note.
        Raises UnknownArchitectureError, SpecError or LayoutError, each naming what does not fit.
        """
        asked, family = checkpoint, ARCHITECTURES.get(str(checkpoint.config.get("model_type")))
        known = _checked.get(checkpoint)
        if known is not None and known[0] == (undeclared, family, checkpoint.config):
            return cls(checkpoint, *known[1:])
        checkpoint, notes = under_file_names(checkpoint)
        refuse_placeholders(checkpoint)
        if undeclared and not is_declared(checkpoint.config):
            spec = by_names(checkpoint)
            notes += (f"symfuse has no declaration for {spec.family!r}: merged by names and shapes, without alignment",)
        else:
            spec = resolve(checkpoint.config, checkpoint, checkpoint.name)
            if head_name(checkpoint.config, checkpoint) in spec.tensors:
                require_head(checkpoint, checkpoint)
            spec.check({name: checkpoint.info(name).shape for name in checkpoint}, checkpoint.name)
        note = disagreeing_frequencies(checkpoint, spec.buffers, rope_theta(checkpoint.config))
        notes = (*notes, note) if note else notes
        if checkpoint is asked:
            _checked[checkpoint] = (undeclared, family, copy.deepcopy(checkpoint.config)), spec, notes
        return cls(checkpoint, spec, notes)

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def declared(self) -> bool:
        """Whether symfuse has a declaration of the family, so that it can be aligned."""
        return is_declared(self.checkpoint.config)

    def read(self, name: str) -> Tensor:
        """The tensor of that canonical name; CheckpointError if it holds NaN or infinity."""
        return self.whole.read(self.spec.file_name(name))

    def on(self, device: str) -> Model:
        """The same model, read to a device (`Checkpoint.on`)."""
        return replace(self, checkpoint=self.checkpoint.on(device))

    def scanned(self, name: str) -> Tensor:
        """As `read`, in the dtype in which it is stored or computed: for callers that widen it piece by piece."""
        return self.whole.scanned(self.spec.file_name(name))

    def unrounded(self, name: str) -> Tensor:
        """As `scanned`, but not checked for NaN and infinity: for callers that check what they compute from it."""
        return self.whole.wide(self.spec.file_name(name))

    @cached_property
    def whole(self) -> Checkpoint:
        """The checkpoint with every tensor whole, as it is declared, by `spec.file_name`; the file may have it in
        pieces."""
        return stacked(self.checkpoint, self.spec)

    def as_in(self, like: Spec) -> Model:
        """The model with stacks cut into the pieces of that declaration's file. Each piece is declared separately,
        under a name that all models share. For code that treats tensors one by one, such as a merge.
        """
        own = self.spec.stacks
        stacks = {name: own.get(name, pieces) for name, pieces in _stacks_in(like, self.spec).items()}
        if not stacks and not own:
            return self
        spec = replace(self.spec, stacks=stacks)
        tensors, names = {}, dict(spec.names)
        for name, declared in spec.tensors.items():
            if name not in stacks:
                tensors[name] = declared
                continue
            for number, (file, layout) in enumerate(spec.stored(name).items()):
                tensors[f"{name}.{number}"] = Declared(layout, declared.index)
                names[f"{name}.{number}"] = file
        checkpoint = self.checkpoint if stacks == own else unstacked(self.whole, spec)
        return Model(checkpoint, replace(spec, tensors=tensors, names=names, stacks={}), self.notes)


def as_declared(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with every tensor as its family declares it (`Model.whole`); unchanged without a declaration."""
    if not is_declared(checkpoint.config):
        return checkpoint
    return stacked(checkpoint, resolve(checkpoint.config, checkpoint, checkpoint.name))


def under_file_names(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Give a checkpoint of a declared family whose tensors have their names in memory the names of files, as the
    installed `transformers` would save it, with a note; any other checkpoint is returned unchanged."""
    if not is_declared(checkpoint.config):
        return checkpoint, ()
    try:
        spec = resolve(checkpoint.config, checkpoint, checkpoint.name)
    except SpecError:
        return checkpoint, ()  # the error is raised where its declaration is needed
    absent = [file for name in spec.tensors for file in spec.stored(name) if file not in checkpoint]
    unknown = [name for name in checkpoint if name not in spec.files and name not in spec.buffers]
    if not absent or not unknown:
        return checkpoint, ()
    saved = on_disk(checkpoint)
    if saved is checkpoint:
        return checkpoint, ()
    return saved, (
        f"{len(unknown)} tensors have their names in memory, such as {unknown[0]}; they are renamed as in files",
    )


def _stacks_in(like: Spec, spec: Spec) -> dict[str, tuple[str, ...]]:
    """The tensors of a spec that are stacks in the other one's file → the pieces there. Layers that the other one does
    not have get pieces like those of its own layers."""

    def at(name: str, declared: Declared, layer: int | str) -> str:
        own = layer_of(declared.index)
        return name if own is None else name.replace(f".{own}.", f".{layer}.", 1)

    of_any = {at(name, like.tensors[name], "*"): name for name in like.stacks}
    out: dict[str, tuple[str, ...]] = {}
    for name, declared in spec.tensors.items():
        there = name if name in like.tensors else of_any.get(at(name, declared, "*"), "")
        if there in like.stacks:
            layer = layer_of(declared.index)
            out[name] = tuple(at(piece, like.tensors[there], str(layer)) for piece in like.stacks[there])
    return out


def require_same_shape(models: Sequence[Model], *, force_config: bool = False, layers: bool = True) -> tuple[str, ...]:
    """IncompatibleError, with the first difference, unless the base models are of one family and size.

    Task heads may differ; the caller decides how to combine them. force_config: accept configs that compute different
    functions. layers: whether the numbers of layers must agree. Returns notes: the differences that are accepted.
    """
    for model in models:
        for alias, name in model.spec.tied.items():
            require_equal(model.checkpoint, model.spec.file_name(alias), model.spec.file_name(name))
    first = models[0]
    notes: list[str] = []
    for other in models[1:]:
        pair = f"{first.name} and {other.name}"
        if first.spec.family != other.spec.family:
            parts = any(text_config(c) is not c for c in (first.checkpoint.config, other.checkpoint.config))
            way = "; of a model of text and images, a merge aligns the language model alone (--align auto)"
            raise IncompatibleError(
                f"{pair}: one is a {first.spec.family}, the other a {other.spec.family}; only models of one "
                f"family share their symmetries{way if parts else ''}"
            )
        require_same_sizes(first, other, pair, layers, force_config)
        fields = differences(first.checkpoint, other.checkpoint)
        notes += let_pass(fields, pair, force_config, layers)
        require_same_tensors(first, other, pair, layers)
    return tuple(notes)


def require_same_sizes(first: Model, other: Model, pair: str, layers: bool, force_config: bool) -> None:
    ours, theirs = _base_axes(first.spec), _base_axes(other.spec)
    for axis in ours:
        if anatomy(axis) == "l" and not layers:
            continue
        if axis in theirs and ours[axis] != theirs[axis]:
            if force_config and ours[axis].size == theirs[axis].size:
                continue  # the activations differ, and with them the groups
            fields = [d for d in differences(first.checkpoint, other.checkpoint) if d.matters]
            raise IncompatibleError(f"{pair}: {_difference(axis, ours[axis], theirs[axis], fields)}")
    if not first.declared:
        configs = [text_config(model.checkpoint.config) for model in (first, other)]
        for key in WIDTHS:
            sizes = [config.get(key) for config in configs]
            if None not in sizes and sizes[0] != sizes[1]:
                what = "hidden sizes" if key in WIDTHS[:4] else "feed-forward sizes"
                raise IncompatibleError(
                    f"{pair}: the {what} differ: {sizes[0]} and {sizes[1]} ({key}); there is no exact map between them"
                )


def let_pass(fields: Sequence[Difference], pair: str, force_config: bool, layers: bool) -> list[str]:
    """Notes for differences of configs; IncompatibleError for the first that matters, unless `force_config`."""
    if not layers:
        by_layer = (*LAYER_COUNTS, "layer_types", "no_rope_layers", "mlp_only_layers")  # compared layer by layer
        fields = [d for d in fields if d.field.rpartition(".")[2] not in by_layer]
    deciding, others = [d for d in fields if d.matters], [d for d in fields if not d.matters]
    if deciding and not force_config:
        more = f" (and in {some(d.field for d in deciding[1:])})" if deciding[1:] else ""
        d = deciding[0]
        raise IncompatibleError(
            f"{pair}: config.json differs in {d}{more}, so that the same weights compute something else; make them "
            "equal if one of them is wrong; a merge can use the base's nevertheless (--force-config, or "
            "`force_config: true` in a recipe)"
        )
    notes = [
        f"{pair}: config.json differs in {d}; the base's is kept, though the others computed with theirs"
        for d in deciding
    ]
    if others:
        notes.append(f"{pair}: config.json differs in {some(map(str, others))}; the base's is kept")
    return notes


def require_same_tensors(first: Model, other: Model, pair: str, layers: bool) -> None:
    ours, theirs = (_base_shapes(model, layers) for model in (first, other))
    if names := sorted(ours.keys() ^ theirs.keys()):
        raise IncompatibleError(
            f"{pair}: {len(names)} tensors are in one model only: {some(names)}; "
            "leave them out or keep them as they are (--foreign drop or keep, or `foreign: drop` in a recipe)"
        )
    if wrong := [name for name in ours if ours[name] != theirs[name]]:
        shapes = "; ".join(f"{name}: {ours[name]} and {theirs[name]}" for name in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise IncompatibleError(f"{pair}: {len(wrong)} tensors differ in shape: {shapes}{more}")


def _base_shapes(model: Model, layers: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of the base model's tensors; those of a layer once for all layers, unless `layers`."""
    spec = model.spec
    out: dict[str, tuple[int, ...]] = {}
    for name, declared in spec.tensors.items():
        if name in spec.heads or name in spec.tied:
            continue
        shape = declared.layout.shape(spec.sizes)
        layer = layer_of(declared.index)
        if layer is not None and not layers:
            out.setdefault(name.replace(f".{layer}.", ".*.", 1), shape)
        else:
            out[name] = shape
    return out


def require_unread(source: Checkpoint, spec: Spec, axes: Collection[str]) -> None:
    """IncompatibleError if one of these axes is that of the hidden states, and modules of sentence-transformers read
    them: those modules would have to be transformed too, but are copied unchanged."""
    layout = spec.outputs.get("last_hidden_state")
    read = {*layout.names} & set(axes) if layout is not None else set()
    if read and (modules := source.readers()):
        raise IncompatibleError(
            f"{source.name}: {some(modules)} (modules.json) read the units of its hidden states, axis "
            f"{some(sorted(read))}, and would not be transformed with them; match all but that axis (--axes "
            "attention,ffn,heads), or take these modules out of the folder"
        )


def require_floating(model: Model) -> None:
    """CheckpointError if a tensor on which a group acts holds integers, which cannot hold a rotated weight."""
    files = [f for f, name in model.spec.files.items() if model.spec.touched[name] and f in model.checkpoint]
    infos = {file: model.checkpoint.info(file) for file in files}
    if wrong := [f"{file} ({info})" for file, info in infos.items() if not info.dtype.is_floating_point]:
        raise CheckpointError(
            f"{model.name}: expected floating-point weights, found {some(wrong)}; convert the model first"
        )


def require_equal(checkpoint: Checkpoint, alias: str, name: str) -> None:
    """SpecError if a stored tensor is tied to another one, by config.json or its family, and differs from it."""
    if alias not in checkpoint:
        return
    one, other = checkpoint[alias], checkpoint[name]
    if one.dtype != other.dtype or not torch.equal(one, other):
        raise SpecError(
            f"{checkpoint.name}: {alias} is {name} by config.json (tie_word_embeddings) or its family, and the stored "
            "tensors differ; set tie_word_embeddings to false if both are meant, or remove the first"
        )


def _base_axes(spec: Spec) -> dict[str, Axis]:
    used = {key for declared in spec.tensors.values() for key in declared.index}
    for name, declared in spec.tensors.items():
        if name not in spec.heads:
            used.update(declared.layout.names)
    return {name: axis for name, axis in spec.axes.items() if name in used}


def _difference(axis: str, ours: Axis, theirs: Axis, fields: Sequence[Difference]) -> str:
    """fields: of config.json, those that matter and differ."""
    what = {
        "l": "numbers of layers",
        "h": "numbers of attention heads",
        "residual": "hidden sizes (residual stream)",
        "ffn": "feed-forward sizes",
        "e": "numbers of experts",
        "vocab": "vocabulary sizes",
        "positions": "numbers of positions",
    }.get(anatomy(axis))
    part = axis.rpartition("_")[0]
    what = f"sizes of axis {axis!r}" if what is None else f"{what} of the {part}" if part else what
    if ours.size != theirs.size:
        if axis == "vocab":
            return (
                f"the {what} differ: {ours.size} and {theirs.size}; set `tokenizer: {{source: union}}` in the recipe "
                "to match rows by token, or `tokenizer_source: shared-rows` to merge the rows that all have"
            )
        if anatomy(axis) == "l":
            way = "a recipe can take as many of each (`slices`, `layer_range`)"
            return f"the {what} differ: {ours.size} and {theirs.size}; {way}"
        way = "there is no exact map between them"
        if anatomy(axis) in ("residual", "ffn"):
            way = "the narrower can be expanded to the widths of the wider first (align --widen, docs/widths.md)"
        sizes = [str(field) for field in fields if type(field.ours) is int]
        in_config = f" ({some(sizes)} in config.json)" if sizes else ""
        return f"the {what} differ: {ours.size} and {theirs.size}{in_config}; {way}"
    names = [a.group.name if a.group else "none" for a in (ours, theirs)]
    what = some(map(str, fields)) if fields else "something that decides them, such as the activation"
    return f"axis {axis!r} has different symmetries ({names[0]} and {names[1]}): config.json differs in {what}"

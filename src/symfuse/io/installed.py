"""What the installed `transformers` calls a tensor of a file in memory: its own tables say it, and its class, built
without data. Some tensors of a file are several in memory (fused projections), some are one (a stack of experts)."""

from __future__ import annotations

import copy
import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.io.checkpoint import Checkpoint
from symfuse.io.live import as_on_disk
from symfuse.io.tensors import TensorInfo, flat_part

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Installed:
    """The class of a config, on the meta device, with the conversions that loading and saving apply.

    tensors, parts: of the module, by their names in memory. prefix: of the base model in a class with a head.
    """

    def __init__(self, module: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.module = module
        self.tensors: dict[str, Tensor] = module.state_dict()
        self.parts: dict[str, nn.Module] = dict(module.named_modules())
        self.prefix = f"{getattr(module, 'base_model_prefix', '')}."
        transforms = get_model_conversion_mapping(self.module)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]

    def name(self, file: str) -> str:
        """The name in memory of a tensor that is whole there; else, or if the class does not know it, its own."""
        name, pattern = self._converted(file)
        return file if pattern is not None else name

    def _converted(self, file: str) -> tuple[str, str | None]:
        """The name in memory, of the first of several, and the pattern that says that tensors are fused or split."""
        from transformers.core_model_loading import rename_source_key

        if self.spelt(file, self.tensors) == file:
            return file, None
        name, pattern = rename_source_key(file, self._renamings, self._converters)
        found = self.spelt(name, self.tensors)
        return (file, None) if found is None else (found, pattern)

    def spelt(self, name: str, there: Iterable[str]) -> str | None:
        """A name as it is among others, which may have the prefix of the base model, or lack it."""
        tries = (name, self.prefix + name, name.removeprefix(self.prefix))
        return next((one for one in tries if one in there), None)

    def plan(self, files: Iterable[str]) -> tuple[dict[str, str], list[tuple[str, ...]]]:
        """Name in memory → name in the file, of those that are whole in both; and the others, in groups."""
        from transformers.core_model_loading import dot_natural_key

        whole: dict[str, str] = {}
        groups: dict[str, list[str]] = {}
        for file in sorted(files, key=dot_natural_key):
            name, pattern = self._converted(file)
            if pattern is None:
                whole[name if name not in whole else file] = file
            else:
                groups.setdefault(name, []).append(file)
        return whole, [tuple(group) for group in groups.values()]

    def load(self, files: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in memory of one group of a file."""
        pattern_of: dict[str | None, Any] = {p: one for one in self._converters for p in one.source_patterns}
        converter: Any = None
        first = ""
        for file, tensor in files.items():
            first, pattern = self._converted(file)
            converter = copy.deepcopy(pattern_of[pattern]) if converter is None else converter
            converter.add_tensor(first, file, pattern, tensor)
        made = converter.convert(first, model=self.module, config=self.module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def save(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """These tensors under the names and in the form that saving gives them."""
        return as_on_disk(self.module, memory)


def class_config(config: Mapping[str, Any]) -> Any:
    """The config of `transformers` that config.json describes, with infinities as numbers."""
    import transformers

    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    decode = getattr(kind, "_decode_special_floats", dict)
    return kind.from_dict(decode(dict(config)))


def resolved(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config with the values that its class of `transformers` gives to absent fields; None without such a class, or
    if it refuses the config."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    if config.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    return copy.deepcopy(_resolved(json.dumps(dict(config), default=str)))


@lru_cache(maxsize=32)
def _resolved(config: str) -> dict[str, Any] | None:
    try:
        with quiet():
            found: dict[str, Any] = class_config(json.loads(config)).to_dict()
    except Exception:  # whatever a class may raise
        return None
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """No loading bars and no advice from transformers: what matters is in its loading report."""
    from transformers import utils

    logging: Any = utils.logging  # its functions have no type hints
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def installed(config: Mapping[str, Any]) -> Installed | None:
    """The class of this config in the installed `transformers`; None if there is none, or if it cannot be built."""
    return _installed(json.dumps(dict(config), default=str))


@lru_cache(maxsize=8)
def _installed(config: str) -> Installed | None:
    try:
        return _built(config)
    except Exception:  # whatever a class raises for a config that it does not understand
        return None


def _built(config: str) -> Installed | None:
    try:
        import transformers
        from transformers import core_model_loading  # noqa: F401 - before version 5 the names are the same
    except ImportError:
        return None
    values = json.loads(config)
    model_type = values.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        return None
    kind: Any = getattr(transformers, str((values.get("architectures") or [""])[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    with quiet(), torch.device("meta"):
        return Installed(kind._from_config(class_config(values)))


def in_memory(checkpoint: Checkpoint, known: Installed) -> Checkpoint:
    """A checkpoint of a file as its class has it in memory, but for stacks of matrices (experts): these, and what the
    class does not know, as they are in the file. Lazy."""
    whole, groups = _matrices(checkpoint, known)
    return _regrouped(checkpoint, whole, groups, known.load)


def as_saved(checkpoint: Checkpoint, like: Checkpoint, known: Installed) -> Checkpoint:
    """A checkpoint with the names of memory, with those of a file that it is like: the inverse of `in_memory`."""
    files = {name: like.info(name) for name in like}
    return _saved(checkpoint, files, *_matrices(like, known), known)


def on_disk(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose tensors have the names and the form that they have in memory, as saving would write it; any
    other as it is. Lazy."""
    known = installed(checkpoint.config)
    if known is None or any(known.spelt(name, (known.name(name),)) is None for name in checkpoint):
        return checkpoint
    try:
        files = _infos({name: checkpoint.info(name) for name in checkpoint}, known.save)
        return _saved(checkpoint, files, *known.plan(files), known)
    except Exception:  # tensors of other shapes than their class has, which is an error when they are read
        return checkpoint


def _matrices(checkpoint: Checkpoint, known: Installed) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """`plan`, without the groups of which a stack of matrices is made: these are whole, under their own names."""
    whole, groups = known.plan(checkpoint)
    made = [_infos({name: checkpoint.info(name) for name in group}, known.load) for group in groups]
    kept = [all(len(info.shape) <= 2 for info in infos.values()) for infos in made]
    whole |= {name: name for group, keep in zip(groups, kept, strict=True) if not keep for name in group}
    return whole, [group for group, keep in zip(groups, kept, strict=True) if keep]


def _saved(
    checkpoint: Checkpoint,
    files: Mapping[str, TensorInfo],
    whole: Mapping[str, str],
    groups: Iterable[tuple[str, ...]],
    known: Installed,
) -> Checkpoint:
    """A checkpoint with the names of memory as these files of its class, of which `whole` and `groups` are the plan."""

    def there(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(found for name in names if (found := known.spelt(name, checkpoint)) is not None)

    def save(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {known.spelt(name, files) or name: tensor for name, tensor in known.save(tensors).items()}

    renamed = {file: found for name, file in whole.items() for found in there([name])}
    memory = [there(_infos({file: files[file] for file in group}, known.load)) for group in groups]
    return _regrouped(checkpoint, renamed, memory, save)


def _infos(infos: Mapping[str, TensorInfo], convert: Convert) -> dict[str, TensorInfo]:
    """What comes of a conversion, from dtypes and shapes alone."""
    made = convert({name: torch.empty(i.shape, dtype=i.dtype, device="meta") for name, i in infos.items()})
    return {name: TensorInfo.of(tensor) for name, tensor in made.items()}


def _regrouped(
    source: Checkpoint, whole: Mapping[str, str], groups: Iterable[tuple[str, ...]], convert: Convert
) -> Checkpoint:
    infos = {new: source.info(old) for new, old in whole.items()}
    group_of: dict[str, tuple[str, ...]] = {}
    for group in groups:
        made = _infos({name: source.info(name) for name in group}, convert)
        infos |= made
        group_of |= dict.fromkeys(made, group)
    return source.replace(tensors=_Regrouped(source, whole, group_of, convert, infos), infos=infos)


class _Regrouped(Mapping[str, Tensor]):
    """Tensors of a checkpoint under other names, and what is made of groups of them. Of these the last that was made
    is kept, so that all its tensors, read one after the other, are of one conversion."""

    def __init__(
        self,
        source: Checkpoint,
        whole: Mapping[str, str],
        groups: Mapping[str, tuple[str, ...]],
        convert: Convert,
        infos: Mapping[str, TensorInfo],
    ) -> None:
        self.source = source
        self.whole = whole
        self.groups = groups
        self.convert = convert
        self.infos = infos
        self._lock = threading.Lock()
        self._last: tuple[tuple[str, ...], dict[str, Tensor]] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name in self.whole:
            return self.source[self.whole[name]]
        return self.wide(name).to(self.infos[name].dtype)

    def wide(self, name: str) -> Tensor:
        """Not yet rounded, where it is computed."""
        if name in self.whole:
            return self.source.scanned(self.whole[name])
        group = self.groups[name]
        with self._lock:
            if self._last is None or self._last[0] != group:
                self._last = None  # gone before the next is computed
                self._last = (group, self.convert({one: self.source.scanned(one) for one in group}))
            return self._last[1][name].contiguous()

    def part(self, name: str, start: int, stop: int) -> Tensor:
        if name in self.whole:
            return self.source.part(self.whole[name], start, stop)
        return flat_part(self.wide(name), start, stop)

    def blocks(self, name: str) -> Iterator[Tensor]:
        if name in self.whole:
            yield from self.source.blocks(self.whole[name])
        else:
            yield self.wide(name)

    def where(self, name: str) -> str | None:
        """The file that holds the tensor as it is, if one does."""
        return self.source.file_of(self.whole[name]) if name in self.whole else None

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

"""What the installed `transformers` calls a tensor of a file in memory: its own tables say it, and its class, built
without data. Some tensors of a file are several in memory (fused projections), some are one (a stack of experts)."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.io.checkpoint import Checkpoint
from symfuse.io.lazy import Latest, Rewritten, Rule
from symfuse.io.live import as_on_disk, class_prefix, spelt
from symfuse.io.tensors import TensorInfo

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
        self.prefix = class_prefix(module)
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

    def spelt(self, name: str, there: Container[str]) -> str | None:
        """A name as it is among others, which may have the prefix of the base model, or lack it."""
        return spelt(name, self.prefix, there)

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
            result: dict[str, Any] = class_config(json.loads(config)).to_dict()
    except Exception:  # whatever a class may raise
        return None
    return result


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
    values = json.loads(config)
    try:
        import transformers

        kind: Any = getattr(transformers, str((values.get("architectures") or [""])[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            kind = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[values["model_type"]]]
        return Installed(meta_module(kind, config))
    except Exception:  # none is installed, or whatever a class raises for a config that it does not understand
        return None


@lru_cache(maxsize=8)
def meta_module(kind: Any, config: str) -> nn.Module:
    """A module of a class of `transformers` on the meta device: its structure without numbers. config: as JSON. It is
    made once and shared: not to be changed. Raises whatever the class raises."""
    from transformers.initialization import no_init_weights

    with quiet(), no_init_weights(), torch.device("meta"):
        module: Any = kind._from_config(class_config(json.loads(config)))
        module.tie_weights()  # which is part of the initial values that are left out
    found: nn.Module = module
    return found


def in_memory(checkpoint: Checkpoint, known: Installed) -> Checkpoint:
    """A checkpoint of a file as its class has it in memory, but for stacks of matrices (experts): these, and what the
    class does not know, as they are in the file. Lazy."""
    whole, groups = _matrices(checkpoint, known)
    return _regrouped(checkpoint, whole, groups, known.load)


def as_saved(checkpoint: Checkpoint, like: Checkpoint, known: Installed) -> Checkpoint:
    """A checkpoint with the names of memory, with those of a file that it is like: the inverse of `in_memory`."""
    return _saved(checkpoint, like.infos, *_matrices(like, known), known)


def on_disk(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose tensors have the names and the form that they have in memory, as saving would write it; any
    other as it is. Lazy."""
    known = installed(checkpoint.config)
    if known is None or any(known.spelt(name, (known.name(name),)) is None for name in checkpoint):
        return checkpoint
    try:
        files = _infos(checkpoint.infos, known.save)
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
    rules: dict[str, str | Rule] = dict(whole)
    last = Latest[tuple[str, ...], dict[str, Tensor]]()  # read one by one, all tensors of a group are of one conversion

    def wide(group: tuple[str, ...], name: str) -> Tensor:
        def converted() -> dict[str, Tensor]:
            return convert({one: source.scanned(one) for one in group})

        return last.get(group, converted)[name].contiguous()

    for group in groups:
        made = _infos({name: source.info(name) for name in group}, convert)
        rules |= {name: Rule(info, partial(wide, group, name)) for name, info in made.items()}
    return source.replace(tensors=Rewritten(source, rules))

"""The names in memory of the tensors of a file, by the conversion tables of the installed `transformers` and the class,
built without data. A fused projection of a file may be several tensors in memory, or several experts one tensor."""

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
        """The name in memory of a tensor, or its own if it is fused or split there, or unknown to the class."""
        name, pattern = self._converted(file)
        return file if pattern is not None else name

    def _converted(self, file: str) -> tuple[str, str | None]:
        """The name in memory (the first, if split), and the pattern by which tensors are fused or split, if any."""
        from transformers.core_model_loading import rename_source_key

        if self.spelt(file, self.tensors) == file:
            return file, None
        name, pattern = rename_source_key(file, self._renamings, self._converters)
        known = self.spelt(name, self.tensors)
        return (file, None) if known is None else (known, pattern)

    def spelt(self, name: str, names: Container[str]) -> str | None:
        """The spelling of a name among `names`, which may have or lack the prefix of the base model."""
        return spelt(name, self.prefix, names)

    def plan(self, files: Iterable[str]) -> tuple[dict[str, str], list[tuple[str, ...]]]:
        """Name in memory → name in the file of tensors that are whole in both; and groups of the other files' names."""
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
        """These tensors with the names and the form in which they are saved."""
        return as_on_disk(self.module, memory)


def class_config(config: Mapping[str, Any]) -> Any:
    """The config of `transformers` that config.json describes, with infinities as numbers."""
    import transformers

    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    decode = getattr(kind, "_decode_special_floats", dict)
    return kind.from_dict(decode(dict(config)))


def resolved(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config with its class's default values for absent fields; None without such a class, or if it refuses the
    config."""
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
    """Without progress bars and warnings of transformers."""
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
    """The class of this config in the installed `transformers`; None if there is none, or it cannot be built."""
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
    except Exception:  # none is installed, or the class refuses the config, with any error
        return None


@lru_cache(maxsize=8)
def meta_module(kind: Any, config: str) -> nn.Module:
    """A module of a class of `transformers` on the meta device, without data. config: as JSON. The module is cached and
    must not be changed. Raises whatever the class raises."""
    from transformers.initialization import no_init_weights

    with quiet(), no_init_weights(), torch.device("meta"):
        module: Any = kind._from_config(class_config(json.loads(config)))
        module.tie_weights()  # part of the skipped initialisation
    result: nn.Module = module
    return result


def in_memory(checkpoint: Checkpoint, known: Installed) -> Checkpoint:
    """A checkpoint of a file in the form that its class has in memory. Stacks of matrices (experts), and tensors that
    the class does not know, stay as in the file. Lazy."""
    whole, groups = _matrices(checkpoint, known)
    return _regrouped(checkpoint, whole, groups, known.load)


def as_saved(checkpoint: Checkpoint, like: Checkpoint, known: Installed) -> Checkpoint:
    """A checkpoint in the form of memory, back in that of the file `like`: the inverse of `in_memory`."""
    return _saved(checkpoint, like.infos, *_matrices(like, known), known)


def on_disk(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint in the form of memory, converted to the form in which it is saved; any other is returned unchanged.
    Lazy."""
    known = installed(checkpoint.config)
    if known is None or any(known.spelt(name, (known.name(name),)) is None for name in checkpoint):
        return checkpoint
    try:
        files = _infos(checkpoint.infos, known.save)
        return _saved(checkpoint, files, *known.plan(files), known)
    except Exception:  # tensors of other shapes than their class has, which is an error when they are read
        return checkpoint


def _matrices(checkpoint: Checkpoint, known: Installed) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """`plan`, without the groups that form a stack of matrices: their tensors stay whole, under their own names."""
    whole, groups = known.plan(checkpoint)
    made = [_infos({name: checkpoint.info(name) for name in group}, known.load) for group in groups]
    matrices = [all(len(info.shape) <= 2 for info in infos.values()) for infos in made]
    whole |= {name: name for group, yes in zip(groups, matrices, strict=True) if not yes for name in group}
    return whole, [group for group, yes in zip(groups, matrices, strict=True) if yes]


def _saved(
    checkpoint: Checkpoint,
    files: Mapping[str, TensorInfo],
    whole: Mapping[str, str],
    groups: Iterable[tuple[str, ...]],
    known: Installed,
) -> Checkpoint:
    """A checkpoint in the form of memory, converted to these files of its class, with the plan `whole` and `groups`."""

    def present(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(one for name in names if (one := known.spelt(name, checkpoint)) is not None)

    def save(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {known.spelt(name, files) or name: tensor for name, tensor in known.save(tensors).items()}

    renamed = {file: one for name, file in whole.items() for one in present([name])}
    memory = [present(_infos({file: files[file] for file in group}, known.load)) for group in groups]
    return _regrouped(checkpoint, renamed, memory, save)


def _infos(infos: Mapping[str, TensorInfo], convert: Convert) -> dict[str, TensorInfo]:
    """The dtypes and shapes after a conversion, from those before it."""
    made = convert({name: torch.empty(i.shape, dtype=i.dtype, device="meta") for name, i in infos.items()})
    return {name: TensorInfo.of(tensor) for name, tensor in made.items()}


def _regrouped(
    source: Checkpoint, whole: Mapping[str, str], groups: Iterable[tuple[str, ...]], convert: Convert
) -> Checkpoint:
    rules: dict[str, str | Rule] = dict(whole)
    last = Latest[tuple[str, ...], dict[str, Tensor]]()  # one conversion serves all tensors of a group

    def wide(group: tuple[str, ...], name: str) -> Tensor:
        def converted() -> dict[str, Tensor]:
            return convert({one: source.scanned(one) for one in group})

        return last.get(group, converted)[name].contiguous()

    for group in groups:
        made = _infos({name: source.info(name) for name in group}, convert)
        rules |= {name: Rule(info, partial(wide, group, name)) for name, info in made.items()}
    return source.replace(tensors=Rewritten(source, rules))

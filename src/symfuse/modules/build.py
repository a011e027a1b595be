"""Live modules of checkpoints: the real class of `transformers`, or what the family builds."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from symfuse.architectures import ARCHITECTURES
from symfuse.device import CPU
from symfuse.errors import CheckpointError
from symfuse.io import Checkpoint, TensorInfo, scan
from symfuse.io.installed import Installed, class_config, meta_module, quiet
from symfuse.io.live import aliases, class_prefix, names_in_memory
from symfuse.messages import first_line, some
from symfuse.model import Model


def live(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float64, kind: type[torch.nn.Module] | None = None
) -> torch.nn.Module:
    """The real module of a checkpoint, in evaluation mode: of that class of `transformers`, or of the one that its
    config names, or what the family builds. CheckpointError if it cannot be built, or weights would be filled in at
    random. On the processor, wherever the checkpoint is read to."""
    checkpoint = checkpoint.on(CPU)
    architecture = ARCHITECTURES.get(str(checkpoint.config.get("model_type")))
    if architecture is not None:
        Model.of(checkpoint)  # says more clearly what does not fit
    weights = dict(checkpoint)  # as they are written, rounded to their dtypes
    for name, tensor in weights.items():
        scan(name, tensor, checkpoint.name)
    if architecture is not None and architecture.build is not None:
        module = architecture.build(checkpoint.config).to(dtype)
        _load_own(module, {name: tensor.to(dtype) for name, tensor in weights.items()}, checkpoint.name)
        return module.eval()
    return _transformers_module(checkpoint, weights, dtype, kind).eval()


def _load_own(module: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Load weights into a module that its family builds: all of them; other names of one parameter, and buffers, may
    lack. CheckpointError for others."""
    _, unknown = module.load_state_dict(weights, strict=False)
    same = aliases(module)
    there = {same.get(name, name) for name in weights}
    lacking = [n for n, _ in module.named_parameters(remove_duplicate=False) if same.get(n, n) not in there]
    if unknown or lacking:
        what = f"lacks {some(lacking)}" if lacking else f"has {some(unknown)}, which is not there"
        raise CheckpointError(f"{where}: for a {type(module).__name__} it {what}")


def build_module(checkpoint: Checkpoint, dtype: torch.dtype, auto: str | None = None) -> torch.nn.Module:
    """The module that a config describes, in evaluation mode, with whatever weights: for whoever sets them all.

    auto: the class of `transformers` that chooses the module's class, such as AutoModelForMaskedLM; by default it is
    the one that the config names. Of AutoModel the hidden states are wanted: a pooler, which not all checkpoints have,
    is left out. CheckpointError if there is no such class, or it cannot be built.
    """
    architecture = ARCHITECTURES.get(str(checkpoint.config.get("model_type")))
    with torch.random.fork_rng(devices=[]):  # the initial values are nobody's random numbers
        if architecture is not None and architecture.build is not None:
            return architecture.build(checkpoint.config).to(dtype).eval()
        kind = _auto_class(checkpoint, auto) if auto else _named_class(checkpoint)
        bare = auto == "AutoModel" and "add_pooling_layer" in inspect.signature(kind).parameters
        from transformers.initialization import no_init_weights  # drawing them takes seconds for 10⁸ weights

        with _reporting(checkpoint), quiet(), no_init_weights():
            module: Any = kind._from_config(
                class_config(checkpoint.config),
                dtype=dtype,
                **_implementations(kind),
                **({"add_pooling_layer": False} if bare else {}),
            )
            module.tie_weights()  # which is part of what was left out
    result: torch.nn.Module = module.eval()
    return result


def skeleton(checkpoint: Checkpoint) -> torch.nn.Module | None:
    """The module that a config describes, on the meta device: its structure without numbers. None if neither the family
    nor `transformers` has its class; CheckpointError if it cannot be built."""
    architecture = ARCHITECTURES.get(str(checkpoint.config.get("model_type")))
    if architecture is not None and architecture.build is not None:
        with torch.device("meta"):
            return architecture.build(checkpoint.config)
    kind = _installed(checkpoint)
    if kind is None:
        return None
    with _reporting(checkpoint):
        return meta_module(kind, json.dumps(checkpoint.config, default=str))


def unloadable(checkpoint: Checkpoint) -> dict[str, set[str]] | None:
    """What the class that a config names would report when it loads tensors of these names and shapes: names by
    "missing_keys", "unexpected_keys" and "mismatched_keys". None if `transformers` has no such class, or without
    `accelerate`, by which it loads to the meta device; CheckpointError if the class cannot be built."""
    kind = _installed(checkpoint)
    if kind is None or importlib.util.find_spec("accelerate") is None:
        return None
    with _reporting(checkpoint):
        report = _unloadable(kind, json.dumps(checkpoint.config, default=str), tuple(checkpoint.infos.items()))
    return {key: set(names) for key, names in report.items()}


@lru_cache(maxsize=8)
def _unloadable(kind: Any, config: str, infos: tuple[tuple[str, TensorInfo], ...]) -> Mapping[str, frozenset[str]]:
    """config: as JSON."""
    read = json.loads(config)
    empty = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos}
    options: dict[str, Any] = {"device_map": "meta", "ignore_mismatched_sizes": True}
    options |= {"add_pooling_layer": False} if _may_lack_pooler(kind, read) else {}
    with quiet():
        _, report = _load(kind, read, empty, torch.float32, **options)
    return {key: frozenset(str(n[0] if isinstance(n, tuple) else n) for n in report[key]) for key in _PROBLEMS}


def _may_lack_pooler(kind: Any, config: Mapping[str, Any]) -> bool:
    """Whether it is a base model that no class of transformers saved, which need not have a pooler."""
    return not config.get("architectures") and "add_pooling_layer" in inspect.signature(kind).parameters


_PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _installed(checkpoint: Checkpoint) -> Any:
    """The class that the config names, if `transformers` is installed and has it."""
    if importlib.util.find_spec("transformers") is None:
        return None
    try:
        return _named_class(checkpoint)
    except (CheckpointError, KeyError):
        return None


def _named_class(checkpoint: Checkpoint) -> Any:
    """The class of transformers that the config names; the base model's if it names none."""
    import transformers

    model_type = _known_type(checkpoint)
    named = (checkpoint.config.get("architectures") or [None])[0]
    kind: Any = getattr(transformers, str(named), None)
    if named is None:
        return transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[model_type]]
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{checkpoint.name}: architectures in config.json names {named!r}, which is not a model class of "
            f"transformers {transformers.__version__}; write the class of this model, or skip the check"
        )
    return kind


def _auto_class(checkpoint: Checkpoint, auto: str) -> Any:
    """The class that an Auto class of transformers has for this kind of config."""
    import transformers

    model_type = _known_type(checkpoint)
    mapping = getattr(transformers, auto)._model_mapping
    config = transformers.CONFIG_MAPPING[model_type]
    if config not in mapping:
        raise CheckpointError(f"{checkpoint.name}: transformers has no {auto} for a {model_type}; choose another task")
    classes = mapping[config]
    return classes[0] if isinstance(classes, tuple) else classes


def _known_type(checkpoint: Checkpoint) -> str:
    import transformers

    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint.name}: transformers {transformers.__version__} has no model_type {model_type!r}, so "
            "the model cannot be run; install a transformers that has it, leave the proof of align, merge or rewrite "
            "out (--no-verify), or give what runs it from Python: symfuse.verify(before, after, runner=…), "
            "symfuse.suggest(module)"
        )
    return model_type


def _transformers_module(
    checkpoint: Checkpoint, weights: dict[str, Tensor], dtype: torch.dtype, kind: Any = None
) -> torch.nn.Module:
    kind = _named_class(checkpoint) if kind is None else kind
    with _reporting(checkpoint), quiet():
        module, report = _load(kind, checkpoint.config, weights, dtype)
        if report["missing_keys"] and _may_lack_pooler(kind, checkpoint.config):
            module, report = _load(kind, checkpoint.config, weights, dtype, add_pooling_layer=False)
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(map(str, report[problem]))[:5])
            raise CheckpointError(f"{checkpoint.name}: {problem.replace('_', ' ')} for {kind.__name__}: {names}")
    _widen(module, weights, dtype)
    return module


def _widen(module: torch.nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """In float64 also the parameters that a class makes in float32, whatever is asked for (of XLNet; the quantizer of
    wav2vec 2.0; routers of Nemotron-H): their numbers as the file has them."""
    narrow = {name: p for name, p in module.named_parameters() if p.dtype != dtype} if dtype == torch.float64 else {}
    if narrow:
        known = Installed(module)
        for file, tensor in weights.items():
            if (name := known.name(file)) in narrow:
                narrow[name].data = tensor.to(dtype)


@contextmanager
def _reporting(checkpoint: Checkpoint) -> Iterator[None]:
    """CheckpointError for whatever a class of transformers raises while a module is built."""
    import transformers

    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.name}: transformers {transformers.__version__} cannot build the "
            f"{checkpoint.config.get('model_type')} of its config.json: {first_line(error)}"
        ) from error


def _load(
    kind: Any, config: Mapping[str, Any], weights: dict[str, Tensor], dtype: torch.dtype, **options: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A module of that class of transformers, and its loading report."""
    loaded: tuple[torch.nn.Module, dict[str, Any]] = kind.from_pretrained(
        None,
        config=class_config(config),
        state_dict=weights,
        output_loading_info=True,
        dtype=dtype,
        **_implementations(kind),
        **options,
    )
    return loaded


def with_defaults(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the defaults of its class in its config; as it is if transformers does not know its type."""
    import transformers

    if str(checkpoint.config.get("model_type")) not in transformers.CONFIG_MAPPING:
        return checkpoint
    with _reporting(checkpoint), quiet():
        return checkpoint.replace(config=class_config(checkpoint.config).to_dict())


def _implementations(kind: Any) -> dict[str, str]:
    """Which code of the class runs. Some eager attention (ViT) takes the softmax in float32 whatever the dtype: 1e-7 in
    float64. The grouped products by which experts run otherwise refuse float64, and rows of odd lengths."""
    attention = {"attn_implementation": "sdpa" if kind._supports_sdpa else "eager"}
    return attention | ({"experts_implementation": "eager"} if kind._can_set_experts_implementation() else {})


def canonical_names(model: Model, module: torch.nn.Module) -> dict[str, str]:
    """The canonical name of each parameter of a live module of that model, by its name there; of those it declares."""
    in_memory = names_in_memory(module)
    own = dict(module.named_parameters())
    prefix = class_prefix(module)
    result: dict[str, str] = {}
    for name in model.spec.tensors:
        if name in model.spec.tied:
            continue
        for one in (name, model.spec.file_name(name)):
            tries = (one, prefix + one, one.removeprefix(prefix))
            if hit := next((t for t in (*tries, *map(in_memory.get, tries)) if t in own), None):
                result[hit] = name
                break
    return result


def stored_names(module: torch.nn.Module, checkpoint: Checkpoint) -> dict[tuple[int, str], str]:
    """The name on disk of each parameter, and of each buffer that is saved, by its owner's identity and its own name.
    Of tied ones each has its own, if the file has it: it may be another tensor (T5 v1.1), and else that of the others.
    """
    disk = {memory: name for name, memory in names_in_memory(module).items()}
    prefix = class_prefix(module)
    saved = module.state_dict(keep_vars=True)
    owners = {
        f"{at}.{leaf}".lstrip("."): (id(owner), leaf)
        for at, owner in module.named_modules(remove_duplicate=False)
        for leaf in (*owner._parameters, *owner._buffers)
    }
    by_name: dict[str, str] = {}
    of_tied: dict[int, str] = {}
    for name, tensor in saved.items():
        on_disk = disk.get(name, name)
        names = (on_disk, on_disk.removeprefix(prefix), prefix + on_disk)
        file = next((n for n in names if n in checkpoint and checkpoint.info(n).shape == tuple(tensor.shape)), None)
        if file is not None:
            by_name[name] = file
            of_tied.setdefault(id(tensor), file)
    by_name = {name: of_tied[id(tensor)] for name, tensor in saved.items() if id(tensor) in of_tied} | by_name
    return {owners[name]: file for name, file in by_name.items()}


def name_parameters(module: torch.nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Let each parameter of a module know which tensor of the checkpoint it holds; the names of these."""
    files = stored_names(module, checkpoint)
    parameters = {}
    for owner in module.modules():
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if file := files.get((id(owner), leaf)):
                parameters[file] = stored_as(parameter, file)
    return set(parameters)


def stored_as(parameter: torch.nn.Parameter, file: str) -> torch.nn.Parameter:
    """The parameter, which knows that it holds this tensor of the checkpoint (`symfuse.verification`)."""
    names = getattr(parameter, "stored_as", ())
    parameter.stored_as = names if file in names else (*names, file)  # type: ignore[attr-defined]
    return parameter

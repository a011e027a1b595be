"""Names: from the keys of an adapter's file to the tensors of its base that they change, and which layers peft adapts:
the installed class says it; where there is none, their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from symfuse.architectures.base import Config as ModelConfig
from symfuse.architectures.names import CONV1D, CONV1D_FAMILIES, HEADS, LOOKED_UP
from symfuse.errors import CheckpointError, SpecError
from symfuse.io import Checkpoint
from symfuse.io.installed import Installed, in_memory, installed
from symfuse.messages import some

T = TypeVar("T")
WRAPPERS = ("base_model.model.", "_orig_mod.", "module.")
# Classes with a head that may be tied to the input embedding.
VOCABULARY_HEAD = re.compile(r".*(CausalLM|LMHead|DoubleHeads|MaskedLM|PreTraining|ConditionalGeneration).*")
# What peft 0.21 refuses to adapt: kernels of these families read the weights without calling the layers.
REFUSED = re.compile(r"(.*\.)?(out_proj|conv1d)")
REFUSING = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
# Experts are one stack in memory. Of the families whose files `transformers` converts as those of these, peft reads an
# adapter of single experts and routers, of all together; and takes every layer of such a name for one of them.
EXPERTS = {
    "mixtral": re.compile(r"(.*\.)?(gate|w[123])"),
    "qwen2_moe": re.compile(r"(.*\.)?(gate|(gate|up|down)_proj)"),
}


def target_name(key: str) -> str | None:
    """The name that a key of an adapter has in the model that it was trained on; None for what takes no part.

    Beside the layers that it adapts, peft stores whole tensors: of adapted embeddings (`base_layer`), of biases, and
    of modules that were trained as a whole, whose original it may keep.
    """
    while prefix := next((prefix for prefix in WRAPPERS if key.startswith(prefix)), ""):
        key = key.removeprefix(prefix)
    if ".original_module." in key:
        return None
    return key.replace(".base_layer.", ".").replace(".modules_to_save.", ".")


def match(names: Collection[str], base: Checkpoint, adapter: str) -> dict[str, str]:
    """Name in the adapter → tensor of the base: the same names, those that the installed class has in memory, or one
    prefix more or less on all of them.

    CheckpointError that lists the names without a tensor, if no prefix or more than one fits.
    """
    if all(name in base for name in names):
        return {name: name for name in names}
    if (known := installed(base.config)) is not None:
        files = {one: file for name, file in known.plan(base)[0].items() for one in (file, name)}
        result = {name: files[one] for name in names if (one := known.spelt(name, files)) is not None}
        if len(result) == len(names):
            return result
    candidates = [pair for pair in _prefixes(names, base) if all(_renamed(name, *pair) in base for name in names)]
    if len(candidates) == 1:
        return {name: _renamed(name, *candidates[0]) for name in names}
    absent = [name for name in names if name not in base]
    fits = f"{len(candidates)} prefixes fit" if candidates else "no prefix fits"
    raise CheckpointError(
        f"{adapter}: {len(absent)} of {len(names)} tensors that it changes are not in {base.name}: "
        f"{some(absent, 20)}; {fits}. {base.name} has, for example, {some(base, 3)}. "
        f"{_tied_hint(absent, base)}Give the model that the adapter was trained on, with its head."
    )


def _prefixes(names: Iterable[str], base: Checkpoint) -> list[tuple[str, str]]:
    """Pairs (off, on) that turn some absent name into a tensor of the base."""
    name = next(name for name in names if name not in base)
    longer = {("", tensor.removesuffix(name)) for tensor in base if tensor.endswith("." + name)}
    shorter = {(name.removesuffix(tensor), "") for tensor in base if name.endswith("." + tensor)}
    return sorted(longer | shorter)


def _renamed(name: str, off: str, on: str) -> str:
    return on + name.removeprefix(off) if name.startswith(off) else ""


def is_transposed(module: str, config: Mapping[str, Any], fan_in_fan_out: bool) -> bool:
    """Whether a layer stores [in, out]: by its class in the families where transformers has such layers, else as the
    adapter says. For matrices whose shape does not tell."""
    if config.get("model_type") in CONV1D_FAMILIES:
        return CONV1D.fullmatch(module) is not None
    return fan_in_fan_out


def is_tied(base: Checkpoint) -> bool:
    """Whether the model has a head that is its input embedding, so that one stored tensor stands for two."""
    if not VOCABULARY_HEAD.fullmatch(class_name(base)):
        return False
    if "tie_word_embeddings" in base.config:
        return bool(_of_config(base, lambda config: config.get("tie_word_embeddings", False)))
    # Configs leave out what is the default of their family; then a second matrix tells that nothing is tied.
    return sum(is_vocabulary(name, base) for name in base) == 1


def class_name(base: Checkpoint) -> str:
    """The class that config.json names, or nothing. SpecError if what it says there is no list."""
    return _of_config(base, lambda config: config.class_name)


def _of_config(base: Checkpoint, value: Callable[[ModelConfig], T]) -> T:
    try:
        return value(ModelConfig(base.config, "model"))
    except SpecError as error:
        raise SpecError(f"{base.name}: {error}") from error


def is_vocabulary(name: str, base: Checkpoint) -> bool:
    shape = base.info(name).shape
    sizes = [base.config.get("vocab_size"), *(c.get("vocab_size") for c in _inner_configs(base.config))]
    return len(shape) == 2 and shape[0] in sizes


def _inner_configs(config: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
    return [value for value in config.values() if isinstance(value, Mapping)]


def _tied_hint(absent: Iterable[str], base: Checkpoint) -> str:
    heads = [name for name in absent if HEADS.fullmatch(name)]
    if not heads or not is_tied(base):
        return ""
    return f"{heads[0]} is a head that is tied to the embedding here; untie it in the base first. "


@dataclass(frozen=True)
class Layers:
    """The layers of a model with this config. known: its class, if it is installed."""

    config: Mapping[str, Any]
    known: Installed | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layers:
        return cls(config, installed(config))

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with the names of memory; experts, which are one stack there, as in the file."""
        return checkpoint if self.known is None else in_memory(checkpoint, self.known)

    def adapted(self, module: str) -> bool:
        """Whether peft adapts a module with a matrix."""
        if self.config.get("model_type") in REFUSING and REFUSED.fullmatch(module):
            return False
        if self.known is None:
            return not LOOKED_UP.fullmatch(module)
        if self._named_as_expert(module):
            return self.together(module)
        part = self.parts.get(module)
        plain = isinstance(part, nn.Linear) and type(part) is not nn.modules.linear.NonDynamicallyQuantizableLinear
        return plain or type(part).__name__ == "Conv1D"

    def together(self, module: str) -> bool:
        """Whether peft reads an adapter of the module only with those of all of its kind, of one rank."""
        part = self.parts.get(module)
        return self._named_as_expert(module) and not isinstance(part, nn.Linear)

    def mistaken(self, module: str) -> bool:
        """Whether peft takes the module for an expert, which it is not: a dense layer beside experts, or a shared one,
        of whose adapter it makes one of all experts."""
        return self._named_as_expert(module) and isinstance(self.parts.get(module), nn.Linear)

    def transposed(self, module: str) -> bool:
        """Whether the layer stores [in, out]."""
        part = self.parts.get(module)
        return is_transposed(module, self.config, False) if part is None else type(part).__name__ == "Conv1D"

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """All modules of the class by name; none if it is not installed."""
        return {} if self.known is None else self.known.parts

    @property
    def tensors(self) -> Mapping[str, bool]:
        """Whether a tensor of the class is tied to another one, by its name in memory; none if it is not installed."""
        if self.known is None:
            return {}
        tensors = self.known.module.state_dict(keep_vars=True)
        uses = Counter(map(id, tensors.values()))
        return {name: uses[id(tensor)] > 1 for name, tensor in tensors.items()}

    @property
    def translates(self) -> bool:
        """Whether it is an encoder and a decoder of text, which peft's class for these can run."""
        module = None if self.known is None else self.known.module
        return module is not None and module.config.is_encoder_decoder and module.main_input_name == "input_ids"

    def _named_as_expert(self, module: str) -> bool:
        if self.known is None:
            return False
        from transformers import conversion_mapping

        model_type = str(self.config.get("model_type"))
        like: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
        pattern = EXPERTS.get("mixtral" if model_type == "mixtral" else like.get(model_type, ""))
        return pattern is not None and pattern.fullmatch(module) is not None

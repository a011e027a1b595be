"""Which layers of a model peft adapts, and what they are called in memory: the installed class says it; where there is
none, their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from symfuse.adapters.names import is_transposed
from symfuse.architectures.names import LOOKED_UP
from symfuse.io import Checkpoint
from symfuse.io.installed import Installed, in_memory, installed

# What peft 0.21 refuses to adapt: kernels of these families read the weights without calling the layers.
REFUSED = re.compile(r"(.*\.)?(out_proj|conv1d)")
REFUSING = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
# Experts are one stack in memory. Of the families whose files `transformers` converts as those of these, peft reads an
# adapter of single experts and routers, of all together; and takes every layer of such a name for one of them.
EXPERTS = {
    "mixtral": re.compile(r"(.*\.)?(gate|w[123])"),
    "qwen2_moe": re.compile(r"(.*\.)?(gate|(gate|up|down)_proj)"),
}


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

"""Which layers of a model peft adapts, and what they are called in memory: the installed class says it, and where there is
none, names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from symfuse.adapters.names import is_transposed
from symfuse.io import Checkpoint
from symfuse.io.installed import Installed, in_memory, installed

# By the last part of a module's name: tables of vectors, which are looked up and not multiplied with.
EMBEDDING = re.compile(
    r"(.*\.)?(wte|wpe|shared|relative_attention_bias|embeddings?|embed_(in|tokens|positions)\w*|\w+_embeddings?)"
)
# What peft 0.21 refuses to adapt: kernels of these families read the weights without calling the layers.
REFUSED = re.compile(r"(.*\.)?(out_proj|conv1d)")
REFUSING = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
# Experts are one stack in memory. peft reads an adapter of single ones, of all together, in the families for which
# `transformers` converts files as those of these; and then takes every layer of such a name for one of the experts.
EXPERTS = {
    "mixtral": re.compile(r"(.*\.)?(gate|w[123])"),
    "qwen2_moe": re.compile(r"(.*\.)?(gate|(gate|up|down)_proj)"),
}
PIECE = re.compile(r".*\.experts\.\d+\.\w+")


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
        experts = EXPERTS.get(self._experts())
        if self.config.get("model_type") in REFUSING and REFUSED.fullmatch(module):
            return False
        if self.known is None or (experts is not None and experts.fullmatch(module)):
            return not EMBEDDING.fullmatch(module) and (experts is None or self._is_of_experts(module))
        part = self.known.parts.get(module)
        plain = isinstance(part, nn.Linear) and type(part) is not nn.modules.linear.NonDynamicallyQuantizableLinear
        return plain or type(part).__name__ == "Conv1D"

    def stacked(self, module: str) -> bool:
        """Whether the module is one of many that are one stack in memory."""
        return self.known is not None and PIECE.fullmatch(module) is not None

    def transposed(self, module: str) -> bool:
        """Whether the layer stores [in, out]."""
        part = None if self.known is None else self.known.parts.get(module)
        return is_transposed(module, self.config, False) if part is None else type(part).__name__ == "Conv1D"

    @property
    def translates(self) -> bool:
        """Whether it is an encoder and a decoder of text, which peft's class for these can run."""
        module = None if self.known is None else self.known.module
        return module is not None and module.config.is_encoder_decoder and module.main_input_name == "input_ids"

    def _is_of_experts(self, module: str) -> bool:
        part = None if self.known is None else self.known.parts.get(module)
        return self.stacked(module) or not isinstance(part, nn.Linear)

    def _experts(self) -> str:
        if self.known is None:
            return ""
        from transformers import conversion_mapping

        model_type = str(self.config.get("model_type"))
        like: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
        return model_type if model_type == "mixtral" else like.get(model_type, "")

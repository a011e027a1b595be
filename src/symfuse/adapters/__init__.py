"""LoRA adapters in the format of peft: added to a base model as inputs, extracted from a finetuned model as outputs."""

from __future__ import annotations

from symfuse.adapters.config import is_adapter
from symfuse.adapters.extraction import Adapter, extract_lora
from symfuse.adapters.lora import apply, open_adapter

__all__ = ["Adapter", "apply", "extract_lora", "is_adapter", "open_adapter"]

"""Recognising quantised weights, which look like plain integers or 8-bit floats beside separate scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from symfuse.errors import CheckpointError
from symfuse.io.tensors import TensorInfo

# Names of tensors that only the packed form of a scheme has.
PACKED = {
    "bitsandbytes": re.compile(r"(.*\.)?(SCB|weight\.(absmax|quant_map|nested_absmax|quant_state\..*)|.*\.absmax)"),
    "compressed-tensors": re.compile(r".*\.weight_packed"),
    "HQQ": re.compile(r".*\.W_q"),
    "MXFP4": re.compile(r".*_blocks"),
}
SCALE = re.compile(r".*(weight_scale|weight_scale_inv|\.scale|_scale|\.scales)")
FLOAT8 = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)}
WAY_OUT = "Use the original model, or load it dequantised (in transformers: model.dequantize()) and save that."


def refuse_quantised(name: str, config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError, naming the scheme, if the config or the tensors' names and dtypes show one."""
    for where in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key in ("quantization_config", "compression_config"):
            if where.get(key):
                settings = where[key]
                method = settings.get("quant_method") if isinstance(settings, Mapping) else None
                raise CheckpointError(
                    f"{name} is quantised: its config has a {key} ({method or 'method not named'}). {WAY_OUT}"
                )
    for scheme, tensor in _evidence(infos):
        raise CheckpointError(f"{name} is quantised with {scheme}: found {tensor!r} ({infos[tensor]}). {WAY_OUT}")
    small = [tensor for tensor, info in infos.items() if info.dtype in FLOAT8]
    if small:
        scales = [tensor for tensor in infos if SCALE.fullmatch(tensor)]
        kind = f"with separate scales such as {scales[0]!r}" if scales else "without scales"
        way_out = (
            WAY_OUT if scales else "If the values are the weights themselves, convert them to bfloat16 and save that."
        )
        raise CheckpointError(f"{name} holds 8-bit floats {kind}: {small[0]!r} ({infos[small[0]]}). {way_out}")


def _evidence(infos: Mapping[str, TensorInfo]) -> list[tuple[str, str]]:
    result = [(scheme, tensor) for tensor in infos for scheme, names in PACKED.items() if names.fullmatch(tensor)]
    # MXFP4's blocks are bytes that come with scales; a module may well be called "…_blocks".
    result = [(s, t) for s, t in result if s != "MXFP4" or t.removesuffix("_blocks") + "_scales" in infos]
    for tensor in infos:
        if tensor.endswith(".qweight"):
            result.append((_gptq_or_awq(tensor.removesuffix("qweight"), infos), tensor))
    return result


def _gptq_or_awq(prefix: str, infos: Mapping[str, TensorInfo]) -> str:
    """GPTQ packs a weight's rows (its qweight is as wide as its scales), AWQ its columns."""
    scales, packed = infos.get(prefix + "scales"), infos[prefix + "qweight"]
    if prefix + "g_idx" in infos:
        return "GPTQ"
    if scales is None or len(scales.shape) != 2 or len(packed.shape) != 2:
        return "GPTQ or AWQ"
    return "GPTQ" if scales.shape[1] == packed.shape[1] else "AWQ"

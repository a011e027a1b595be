"""Inputs for a module of which nothing is known: the first that it runs on, of those that its parts suggest."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.func import functional_call

LENGTH, SAMPLES = 7, 64


def guessed(module: nn.Module, width: object = None, seed: int = 0) -> dict[str, Tensor] | None:
    """Token ids, an image, sounds or vectors, for the main argument of `forward`; None if it runs on none of these, or
    needs more. width: that of vectors, if it is known."""
    rng = torch.Generator().manual_seed(seed)
    try:
        parameters = inspect.signature(module.forward).parameters
    except ValueError:  # it has none, as that of TorchScript
        return None
    takes = getattr(module, "main_input_name", next(iter(parameters), ""))
    for tensor in _tries(module, takes, width, rng, next(module.parameters()).dtype):
        with suppress(Exception), torch.inference_mode():  # whatever that class raises
            module(**{takes: tensor})
            return {takes: tensor}
    return None


def _fitting(module: nn.Module, takes: str, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those of some tensors on the meta device on which a module runs, by shapes alone: in milliseconds."""
    state = {name: one.to("meta") for name, one in (*module.named_parameters(), *module.named_buffers())}
    for tensor in tensors:
        try:
            with torch.inference_mode():
                functional_call(module, state, (), {takes: tensor})
        except Exception:  # whatever that class raises
            continue
        yield tensor


def _tries(module: nn.Module, takes: str, width: object, rng: torch.Generator, dtype: torch.dtype) -> Iterator[Tensor]:
    parts = list(module.modules())
    if tables := [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]:
        for words in (tables[0], min(tables)):
            yield torch.randint(words, (3, min(LENGTH, *tables)), generator=rng)
    named = [getattr(part, name, None) for name in ("img_size", "image_size") for part in parts]
    for channels in [part.in_channels for part in parts if isinstance(part, nn.Conv2d)][:1]:
        for size in (*named, 32, 224):
            height, width_ = size if isinstance(size, tuple | list) else (size, size)
            if isinstance(height, int) and isinstance(width_, int):
                yield torch.randn(2, channels, height, width_, generator=rng, dtype=dtype)
        sizes = (*range(8, 65), *range(68, 257, 4), *range(1, 8))
        images = (torch.empty(2, channels, size, size, dtype=dtype, device="meta") for size in sizes)
        for image in _fitting(module, takes, images):
            yield torch.randn(image.shape, generator=rng, dtype=dtype)
    for channels in [part.in_channels for part in parts if isinstance(part, nn.Conv1d)][:1]:
        yield torch.randn(2, channels, SAMPLES, generator=rng, dtype=dtype)
        yield torch.randn(2, SAMPLES, channels, generator=rng, dtype=dtype)
    maps = [part.in_features for part in parts if isinstance(part, nn.Linear)][:1]
    for n in (*([width] if isinstance(width, int) else []), *maps):
        yield torch.randn(3, LENGTH, n, generator=rng, dtype=dtype)
        yield torch.randn(3, n, generator=rng, dtype=dtype)

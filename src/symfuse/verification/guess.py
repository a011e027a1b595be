"""Inputs for a module of which nothing is known: the first that it runs on, of those that its parts suggest."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

LENGTH = 7


def guessed(module: nn.Module, width: object, rng: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Token ids, an image, or vectors, for the first argument of `forward`; None if it runs on none of these, or needs
    more. width: that of vectors, if it is known."""
    takes = inspect.signature(module.forward).parameters.values()
    places = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for tensor in _tries(module, width, rng, dtype) if places else ():
        with suppress(Exception), torch.inference_mode():  # whatever that class raises
            module(**{places[0]: tensor})
            return {places[0]: tensor}
    return None


def _tries(module: nn.Module, width: object, rng: torch.Generator, dtype: torch.dtype) -> Iterator[Tensor]:
    parts = list(module.modules())
    tables = [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]
    if tables:
        length = min(LENGTH, *tables)
        yield torch.randint(tables[0], (3, length), generator=rng)
        yield torch.randint(min(tables), (3, length), generator=rng)
    images = [part for part in parts if isinstance(part, nn.Conv2d)]
    for size in _sizes(parts) if images else ():
        yield torch.randn(2, images[0].in_channels, *size, generator=rng, dtype=dtype)
    maps = [part.in_features for part in parts if isinstance(part, nn.Linear)]
    for n in dict.fromkeys([*([width] if isinstance(width, int) else []), *maps[:1]]):
        yield torch.randn(3, LENGTH, n, generator=rng, dtype=dtype)
        yield torch.randn(3, n, generator=rng, dtype=dtype)


def _sizes(parts: list[nn.Module]) -> Iterator[tuple[int, int]]:
    """Sizes of images: what a part calls so, and usual ones."""
    for name in ("img_size", "image_size"):
        for size in (getattr(part, name, None) for part in parts):
            if isinstance(size, int) or (isinstance(size, tuple | list) and len(size) == 2):
                yield (size, size) if isinstance(size, int) else (size[0], size[1])
    yield from ((32, 32), (224, 224))

"""symfuse: align transformers by their symmetries, prove that nothing changed, and merge them.

    import symfuse
    a, b = symfuse.open("a"), symfuse.open("b")
    alignment = symfuse.match(a, to=b, axes=("attention", "ffn"))
    symfuse.merge([alignment(a), b], weights=[0.5, 0.5]).save("out")

Names are imported when they are first used, so that `import symfuse` and `symfuse --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from symfuse.alignment import Alignment
    from symfuse.api import (
        align,
        barrier,
        collect,
        declare,
        distance,
        landscape,
        match,
        merge,
        merge_recipe,
        prove,
        score,
        suggest,
        task,
        to_module,
        transport,
        verify,
    )
    from symfuse.errors import SymfuseError
    from symfuse.io import Checkpoint, open  # noqa: A004

_HOME = {
    "Alignment": "alignment",
    "Checkpoint": "io",
    "SymfuseError": "errors",
    "align": "api",
    "barrier": "api",
    "collect": "api",
    "declare": "api",
    "distance": "api",
    "landscape": "api",
    "match": "api",
    "merge": "api",
    "merge_recipe": "api",
    "open": "io",
    "prove": "api",
    "score": "api",
    "suggest": "api",
    "task": "api",
    "to_module": "api",
    "transport": "api",
    "verify": "api",
}

__all__ = [
    "Alignment",
    "Checkpoint",
    "SymfuseError",
    "align",
    "barrier",
    "collect",
    "declare",
    "distance",
    "landscape",
    "match",
    "merge",
    "merge_recipe",
    "open",
    "prove",
    "score",
    "suggest",
    "task",
    "to_module",
    "transport",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"symfuse.{_HOME[name]}"), name)
    raise AttributeError(f"module 'symfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

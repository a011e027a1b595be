"""symfuse: align transformers by their symmetries, prove that nothing changed, and merge them.

    import symfuse
    a, b = symfuse.open("a"), symfuse.open("b")
    alignment = symfuse.match(a, to=b, axes=("attention", "ffn"))
    symfuse.merge([alignment(a), b], weights=[0.5, 0.5]).save("out")

Names are imported when they are first used, so that `import symfuse` and `symfuse --help` stay quick.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from symfuse.api import (
        Adapter,
        Aligned,
        Alignment,
        Barrier,
        Checkpoint,
        Digest,
        Distance,
        Draft,
        Landscape,
        Learning,
        Proof,
        Rebased,
        Relation,
        Relations,
        Report,
        Score,
        Spec,
        Statistics,
        Task,
        Transported,
        Verification,
        align,
        barrier,
        check,
        collect,
        declare,
        digest,
        evaluate,
        extract_lora,
        landscape,
        match,
        merge,
        merge_recipe,
        open,  # noqa: A004
        prove,
        rebase,
        relate,
        renew_statistics,
        rewrite,
        suggest,
        task,
        to_module,
        transport,
        verify,
        widen,
    )
    from symfuse.errors import SymfuseError
    from symfuse.reports import inspect, report

# Where a name is, unless in symfuse.api.
_HOME = {"SymfuseError": "errors", "inspect": "reports", "report": "reports"}

# Old names, with what each is called now and the options that it stands for.
_OLD: dict[str, tuple[str, dict[str, str]]] = {
    "distance": ("relate", {}),
    "plot": ("report", {"format": "pdf"}),
    "score": ("evaluate", {}),
}

__all__ = [
    "Adapter", "Aligned", "Alignment", "Barrier", "Checkpoint", "Digest", "Distance", "Draft", "Landscape",
    "Learning", "Proof", "Rebased", "Relation", "Relations", "Report", "Score", "Spec", "Statistics",
    "SymfuseError", "Task", "Transported", "Verification", "align", "barrier", "check", "collect", "declare",
    "digest", "evaluate", "extract_lora", "inspect", "landscape", "match", "merge", "merge_recipe", "open", "prove",
    "rebase", "relate", "renew_statistics", "report", "rewrite", "suggest", "task", "to_module", "transport",
    "verify", "widen",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"symfuse.{_HOME.get(name, 'api')}"), name)
    if name in _OLD:
        from symfuse.errors import warn_caller

        now, options = _OLD[name]
        given = "".join(f", {option}={value!r}" for option, value in options.items())
        warn_caller(f"symfuse.{name} is now called symfuse.{now}" + (f"(…{given})" if given else ""))
        return partial(__getattr__(now), **options) if options else __getattr__(now)
    raise AttributeError(f"module 'symfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

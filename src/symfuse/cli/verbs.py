"""Which verbs there are, in which module each is, and what it does in a line: so that a run imports only its own."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

import click

# The line is the first of the verb's docstring, which the tests compare.
VERBS = {
    "align": ("align", "Move SOURCE onto an anchor, and prove that it is the same."),
    "barrier": ("evaluate", "Measure the loss on the straight path from B to A."),
    "check": ("check", "Check whether a merge can be done, and what it takes."),
    "collect": ("collect", "Collect statistics of MODEL on data, for merges."),
    "demo": ("models", "Run all of it on real models, in minutes."),
    "evaluate": ("evaluate", "Measure loss and metrics of MODELS on the same data."),
    "extract-lora": ("adapter", "Extract what FINETUNED changed, as a LoRA adapter."),
    "inspect": ("models", "List what of MODEL can be matched, what not, and why."),
    "landscape": ("evaluate", "Measure the loss on the plane through three models."),
    "merge": ("merge", "Merge as RECIPE.yml or the options say."),
    "methods": ("merge", "List the merge methods, with their parameters and papers."),
    "relate": ("models", "Measure how far A is from B, before and after alignment."),
    "report": ("report", "Show each RUN on one HTML page, or as figures."),
    "rewrite": ("rewrite", "Rewrite MODEL exactly: the same function, in other weights."),
    "suggest": ("models", "Draft a declaration for the family of MODEL."),
    "transport": ("transport", "Move THING, which belongs to a model, to its aligned form."),
    "verify": ("models", "Verify that two models compute the same, by running them."),
}

# Old names of verbs, with the words that each stands for.
OLD_VERBS = {"distance": ("relate",), "plot": ("report", "--format", "pdf")}


class Verbs(MutableMapping[str, click.Command]):
    """The commands by name; the module of one, which registers it, is imported when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._made:
            import_module(f"symfuse.cli.{VERBS[name][0]}")
        return self._made[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)

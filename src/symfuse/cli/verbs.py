"""The module of each verb, and its line of help, so that a run imports only its own verb."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

import click

# The line is the first of the verb's docstring, which the tests compare.
VERBS = {
    "align": ("align", "Align SOURCE to an anchor, and prove its outputs unchanged."),
    "barrier": ("evaluate", "Measure the loss on the straight path from B to A."),
    "check": ("check", "Check whether a merge can be done, and what it takes."),
    "collect": ("collect", "Collect statistics of MODEL on data, for merges."),
    "demo": ("models", "Run the whole pipeline on real models, in minutes."),
    "evaluate": ("evaluate", "Measure loss and metrics of MODELS on the same data."),
    "extract-lora": ("adapter", "Extract what FINETUNED changed, as a LoRA adapter."),
    "inspect": ("models", "List the axes of MODEL, and which of them can be matched."),
    "landscape": ("evaluate", "Measure the loss on the plane through three models."),
    "merge": ("merge", "Merge models, by RECIPE.yml or by options."),
    "methods": ("merge", "List the merge methods, with their parameters and papers."),
    "rebase": ("rebase", "Move what FINETUNE changed of its base onto another base."),
    "relate": ("models", "Say how MODELS are related, by their weights alone."),
    "report": ("report", "Show each RUN on one HTML page, or as figures."),
    "rewrite": ("rewrite", "Rewrite MODEL exactly: the same function, in other weights."),
    "suggest": ("models", "Draft a declaration for the family of MODEL."),
    "transport": ("transport", "Transform THING of a model, to fit the aligned model."),
    "verify": ("models", "Verify that two models compute the same, by running them."),
}

# Old names of verbs, and what replaces each.
OLD_VERBS = {"distance": ("relate",), "plot": ("report", "--format", "pdf")}


class Verbs(MutableMapping[str, click.Command]):
    """The commands by name. The module of a command, which registers it, is imported on first use."""

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

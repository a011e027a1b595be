"""A verb as a command: options in groups in its help, and old names of options, each with a note of the new one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import click

from symfuse.output import note

F = TypeVar("F", bound=Callable[..., Any])

# Old names of options, and the new ones.
OLD_NAMES = {"--heads": "--task-heads"}


class Command(click.Command):
    """Its help lists options by the groups that `grouped` puts them in, and those in no group first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                usual = "Output" if "--help" in param.opts else "Options"
                groups.setdefault(getattr(param, "help_group", usual), []).append(record)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        notes: list[str] = []
        try:
            rest = super().parse_args(ctx, list(self.translated(iter(args), own, notes)))
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        for text in () if ctx.params.get("quiet") else dict.fromkeys(notes):
            note(text)
        return rest

    def translated(self, args: Iterator[str], own: Collection[str], notes: list[str]) -> Iterator[str]:
        """The arguments with new names of options. own: the options of this command. notes: the list that a note for
        each old name is added to."""
        for word in args:
            if word == "--":
                yield from (word, *args)
                return
            name, equals, value = word.partition("=")
            new = OLD_NAMES.get(name)
            if new is None or new not in own or name in own:
                yield word
                continue
            notes.append(f"{name} is now called {new}")
            yield f"{new}{equals}{value}"


def grouped(group: str, *decorators: Callable[[F], F]) -> Callable[[F], F]:
    """The options of these decorators (`click.option`), in this order, under one heading of the help."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
            function.__click_params__[-1].help_group = group  # type: ignore[attr-defined]
        return function

    return apply

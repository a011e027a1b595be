"""The output of a verb: tables for people, one JSON document for machines, progress bars on terminals."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from symfuse.errors import LOGGER, printable

if TYPE_CHECKING:
    from rich.progress import Progress


# Characters of a word that a table never breaks: names of groups and forms. Longer ones are paths and names of tensors.
LONGEST = 16
# How the cells of a column begin that is aligned to the right.
NUMBER = re.compile(r"[-+(]?\d|-?$|nan|inf")


def _started(stack: ExitStack) -> Progress | None:
    """A progress bar; None if the thread that it needs cannot be started."""
    from rich.console import Console
    from rich.progress import Progress

    with suppress(RuntimeError):
        return stack.enter_context(Progress(console=Console(stderr=True), transient=True))
    return None


def warn(text: str, level: int = logging.WARNING) -> None:
    """Print a line on stderr, also with --quiet and --json, and log it at this level."""
    LOGGER.log(level, "%s", printable(text))
    click.echo(f"symfuse: {printable(text)}", err=True)


def note(text: str) -> None:
    """`warn`, for information that is no warning."""
    warn(f"note: {text}", logging.INFO)


class Output:
    """Prints tables for people; with --json one document for machines; with --quiet nothing."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.start = time.perf_counter()
        self._advance: Callable[..., None] | None = None  # the current bar

    def say(self, text: str) -> None:
        if not self.as_json and not self.quiet:
            click.echo(printable(text))

    def note(self, text: str) -> None:
        """Print information, and log it."""
        LOGGER.info("%s", printable(f"note: {text}"))
        self.say(f"note: {text}")

    def warning(self, text: str) -> None:
        """Print a warning, and log it; with --quiet and --json on stderr."""
        if self.quiet or self.as_json:
            warn(f"warning: {text}")
            return
        LOGGER.warning("%s", printable(f"warning: {text}"))
        self.say(f"warning: {text}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        if self.as_json or self.quiet:
            return
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(printable(title), "table.title") if title else None,
            title_justify="left",
            header_style="bold",
            box=SIMPLE_HEAD,
        )
        for i, (column, *cells) in enumerate(zip(columns, *rows, strict=True)):  # column by column
            left = i == 0 or not all(map(NUMBER.match, cells))
            words = " ".join(map(printable, (column, *cells))).split()
            whole = max((len(word) for word in words if len(word) <= LONGEST), default=1)
            table.add_column(
                Text(printable(column)), justify="left" if left else "right", overflow="fold", min_width=whole
            )
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))  # Text, since brackets in a name would be markup
        Console().print(table)

    def cost(self) -> dict[str, float]:
        """For the document of a run: seconds since the verb began, and the peak memory of the process in bytes (not on
        Windows)."""
        spent = {"seconds": time.perf_counter() - self.start}
        with suppress(ImportError):
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            spent["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return spent

    def finish(self, data: dict[str, Any]) -> None:
        if self.as_json:
            click.echo(printable(json.dumps(data, indent=2)))

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[..., None]]:
        """A progress bar on stderr, on terminals only. Yields a function: a call advances the bar by one, with the
        total (or None where it is known); a call with a text only changes the description of the bar."""
        with ExitStack() as stack:
            bar = None if self.quiet or self.as_json or not sys.stderr.isatty() else _started(stack)
            if bar is None:
                yield lambda total=None, text="": None  # noqa: ARG005
                return
            task = bar.add_task(what, total=total)

            def advance(total: int | None = None, text: str = "") -> None:
                if text:
                    bar.update(task, description=text)
                    return
                if total is not None:
                    bar.update(task, total=total)
                bar.advance(task)

            self._advance = advance
            try:
                yield advance
            finally:
                self._advance = None

    def follow(self, text: str) -> None:
        """Change the description of the current bar, if there is one."""
        if self._advance is not None:
            self._advance(text=text)

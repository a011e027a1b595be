"""The command line in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from symfuse.cli import main


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def done(*args: str) -> Result:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result

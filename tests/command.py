"""The command line in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from symfuse.cli import main


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def done(*args: str) -> Result:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result


def data(*args: str) -> dict[str, Any]:
    """The one document that --json prints, which has no NaN in it."""
    value = json.loads(done(*args, "--json").stdout, parse_constant=pytest.fail)
    assert isinstance(value, dict)
    return value


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

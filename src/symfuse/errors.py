"""Every error that symfuse raises on purpose, and the exit code with which the command line ends.

A message says what is wrong, where (file, tensor, key), what was expected and found, and the way out.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import ClassVar

# Notes and warnings also go here; nothing is printed unless the program that imports symfuse configures logging.
LOGGER = logging.getLogger("symfuse")
LOGGER.addHandler(logging.NullHandler())

# The secret parts of URLs: user and password, and the query (tokens, signatures).
SECRETS = re.compile(r"""(://)(?!\*\*\*@)[^\s/?#"'<>]*@|(://[^\s?#"'<>]*\?)[^\s#"'<>),;\]\\]+""")


def masked(text: str) -> str:
    """A text as it may be printed and written: URLs without credentials, names that are not UTF-8 with escapes."""
    for _ in range(2):  # a URL may have both
        text = SECRETS.sub(lambda match: f"{match[1]}***@" if match[1] else f"{match[2]}***", text)
    return text.encode("utf-8", "backslashreplace").decode()


class SymfuseWarning(UserWarning):
    """How models differ, or why a merge is doubtful: the command line prints it."""


def warn_caller(text: str) -> None:
    """Issue a SymfuseWarning at the line that called symfuse."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in (
        "symfuse",
        "beartype",
    ):
        depth, frame = depth + 1, frame.f_back
    LOGGER.warning("%s", printable(text))
    warnings.warn(text, SymfuseWarning, stacklevel=depth)


# Control characters, marks that turn the direction of writing, characters without width, halves of surrogate pairs.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
LONGEST = 3_000  # characters of a message, which may quote a file


def printable(text: str) -> str:
    """Text for a terminal or a page: characters that change their surroundings, or are invisible, are escaped. Names of
    tensors, models and labels come from files, and may contain any. Credentials are masked."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], masked(text))


class SymfuseError(Exception):
    """Base class of all errors raised by symfuse. Its message is printable, and not longer than LONGEST."""

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, exit_code: int = 1) -> None:
        cls.exit_code = exit_code

    def __init__(self, message: str = "") -> None:
        shown = printable(message)
        half = LONGEST // 2
        super().__init__(shown if len(shown) <= LONGEST else f"{shown[: half - 2]} … {shown[1 - half :]}")


class OptionError(SymfuseError, exit_code=2):
    """An option or argument makes no sense, or contradicts another."""


class CheckpointError(SymfuseError, exit_code=3):
    """A file, an index or a config cannot be read as it stands."""


class LayoutError(SymfuseError, exit_code=4):
    """A layout does not parse, or does not fit the tensor that it declares."""


class SpecError(SymfuseError, exit_code=4):
    """The tensors of a checkpoint are not those that its family declares."""


class UnknownArchitectureError(SymfuseError, exit_code=4):
    """symfuse has no declaration for this family of models."""


class IncompatibleError(SymfuseError, exit_code=5):
    """These models cannot be aligned or merged with each other."""


class SymmetryError(SymfuseError, exit_code=6):
    """A symmetry group does not allow this operation."""


class VerificationError(SymfuseError, exit_code=7):
    """Two models that should compute the same thing do not."""


class OutputError(SymfuseError, exit_code=8):
    """The target cannot be written."""


class DataError(SymfuseError, exit_code=9):
    """Texts, tables or images to evaluate on cannot be read, or are not what a task needs."""

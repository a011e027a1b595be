"""Bringing weights into the page cache while the interpreter is still importing what reads them.

That import takes a second or more, in which a disk reads gigabytes. Nothing here is needed for the result, or fails:
what is not read ahead is read later.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

PIECE = 2**23  # bytes of one model, before the next one's: what is read at once meanwhile waits for no more
SHARE = 4  # at most one part in so many of all memory: what comes later must not push out what is not yet used
GROUP = Path("/sys/fs/cgroup/memory.max")  # what this control group may have, which files in the cache are part of
WEIGHTS = ("*.safetensors", "*.bin")  # the second, if there are none of the first
RECIPES = (".yml", ".yaml")
WORDS = re.compile(r"""[^\s"'\[\]{},+]+""")  # of a recipe, among them its models
LONGEST = 2**16  # characters of a recipe that are looked at


def read_ahead(sources: Iterable[str]) -> threading.Thread | None:
    """Begin to read the weights of these folders, and of those that recipes among them name, all at the same pace, as
    a merge will want them. None if there are none."""
    models = [files for folder in dict.fromkeys(_folders(sources)) if (files := _weights(folder))]
    if not models:
        return None
    thread = threading.Thread(target=_read, args=(models,), name="read ahead", daemon=True)
    with suppress(RuntimeError):  # no more threads can be started
        thread.start()
        return thread
    return None


def _folders(sources: Iterable[str]) -> Iterator[str]:
    """What may be a folder; of a model with an adapter both are."""
    for source in sources:
        if not source.endswith(RECIPES):
            yield from source.split("+")
            continue
        with suppress(OSError, ValueError):
            for path in _files([Path(source)]):
                with path.open(encoding="utf-8") as file:
                    yield from WORDS.findall(file.read(LONGEST))


def _weights(folder: str) -> list[Path]:
    with suppress(OSError, ValueError):
        return next(filter(None, (_files(sorted(Path(folder).glob(pattern))) for pattern in WEIGHTS)), [])
    return []


def _files(paths: Iterable[Path]) -> list[Path]:
    """What may be read: to open a pipe waits, and what is read of one is gone."""
    return [path for path in paths if path.is_file()]


def _memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" where there is no limit
        return min(memory, int(GROUP.read_text()))
    return memory


def _read(models: list[list[Path]]) -> None:
    """Piece after piece into nothing: no byte is copied, and the interpreter's lock is free meanwhile."""
    with suppress(OSError, AttributeError, ValueError), ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("wb")).fileno()
        left = _memory() // SHARE
        pieces = [_pieces([stack.enter_context(path.open("rb")).fileno() for path in files]) for files in models]
        while pieces and left > 0:
            for model in list(pieces):
                place = next(model, None)
                if place is None:
                    pieces.remove(model)
                else:
                    left -= os.sendfile(nothing, *place)


def _pieces(files: list[int]) -> Iterator[tuple[int, int, int]]:
    """File, position and length, of one model."""
    for file in files:
        size = os.fstat(file).st_size
        yield from ((file, start, min(PIECE, size - start)) for start in range(0, size, PIECE))

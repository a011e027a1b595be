"""New folders that hold something else than a model: they appear as a whole, or nothing does."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from symfuse.io.direct import Buffer
from symfuse.io.partial import new_folder, partial_of, system_errors
from symfuse.io.remote import Place
from symfuse.io.shards import Layout, Slot, new_file
from symfuse.io.target import check_space, check_target
from symfuse.io.tensors import TensorInfo
from symfuse.signals import interruptible, signals_as_exceptions


@contextmanager
def output_folder(target: str | os.PathLike[str], nbytes: int, inputs: Sequence[Place] = ()) -> Iterator[Path]:
    """A hidden folder to fill, which gets its name if all goes well and is removed if not.

    The target must not exist, nor be, hold or lie inside one of the inputs; nbytes: how much room it needs. OutputError
    if it cannot be written.
    """
    place = Path(os.path.abspath(target))  # noqa: PTH100 - keeps symbolic links, which are refused
    partial = partial_of(place, "")

    check = functools.partial(check_target, place, overwrite=None, inputs=inputs)
    room = functools.partial(check_space, {place: nbytes})
    check()
    with signals_as_exceptions(), new_folder(place, partial, check, room, resume=False), system_errors(place):
        yield partial.folder


def write_tensors(path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> None:
    """One safetensors file; `read` is asked for each tensor once, and one of them is in memory at a time."""
    layout, buffer = Layout.of(infos), Buffer()
    file = new_file(path, layout)
    try:
        for name in infos:
            slot = Slot(file, name, infos[name], layout.starts[name])
            with interruptible():
                tensor = read(name)
            slot.put(tensor, buffer)
            del tensor  # before the next is read
            slot.finish()
        file.sync()
    finally:
        file.close()

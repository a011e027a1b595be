"""Writing a model folder: tensors streamed one at a time; the whole folder appears, or nothing does."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from symfuse.errors import OutputError
from symfuse.io.companions import copy_companions
from symfuse.io.messages import some
from symfuse.io.shards import ShardFile, check_produced, parse_size, plan_shards
from symfuse.io.tensors import DTYPE_NAMES, TensorInfo

INDEX = "model.safetensors.index.json"


def write(
    target: str | os.PathLike[str],
    infos: Mapping[str, TensorInfo],
    tensors: Callable[[str], Tensor],
    *,
    config: Mapping[str, Any],
    copy_from: Path | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    extra: Mapping[str, bytes | str] | None = None,
    progress: Callable[[str, int], None] | None = None,
    inputs: Sequence[Path] = (),
) -> Path:
    """Write a folder that `from_pretrained` loads, and return its path.

    `tensors(name)` is asked for each tensor of `infos` once, in order, and one tensor is held at a time.
    Tokenizer and other companion files come from `copy_from`, `extra` are further files by name; `auto_map`
    is left out of the config since code is not copied. The target must not exist, or is replaced as a whole
    with `overwrite`; it must not be, hold or lie inside one of the `inputs`. After each tensor
    `progress(name, nbytes)` is called.

    Raises OutputError before any tensor is asked for if the target cannot be written, and later if the disk
    fills up or a tensor does not have the dtype and shape announced. Whatever ends the writing early (an
    interrupt or SIGTERM too), no part of the output is left behind.
    """
    place = Path(os.path.abspath(target))  # noqa: PTH100 - keeps symbolic links, which are refused below
    _check_infos(infos)
    shards = plan_shards(infos, parse_size(max_shard_size))
    files = _small_files(config, infos, shards) | _extra_files(extra or {}, shards)
    check_target(place, overwrite=overwrite, inputs=[*inputs, *([copy_from] if copy_from else [])])
    _check_space(place, sum(info.nbytes for info in infos.values()) + sum(map(len, files.values())))
    with _sigterm_as_exception(), _new_folder(place) as folder, ExitStack() as opened:
        with _system_errors(place):
            outputs = {name: opened.enter_context(ShardFile(folder / name, part)) for name, part in shards.items()}
            if copy_from is not None:
                copy_companions(copy_from, folder)
            for name, data in files.items():
                _write_file(folder / name, data)
        for shard, part in shards.items():
            for name, info in part.items():
                _produce(place, outputs[shard], name, info, tensors)
                if progress is not None:
                    progress(name, info.nbytes)
        with _system_errors(place):
            opened.close()
    return place


def _produce(place: Path, output: ShardFile, name: str, info: TensorInfo, tensors: Callable[[str], Tensor]) -> None:
    """A function of its own, so that a tensor is released before the next one is computed."""
    tensor = tensors(name)
    check_produced(name, tensor, info)
    with _system_errors(place):
        output.put(name, tensor)


def _check_infos(infos: Mapping[str, TensorInfo]) -> None:
    if not infos:
        raise OutputError("a model without tensors is not written")
    for name, info in infos.items():
        if name == "__metadata__" or info.dtype not in DTYPE_NAMES:
            raise OutputError(f"safetensors cannot hold {name!r} ({info})")


def _small_files(
    config: Mapping[str, Any], infos: Mapping[str, TensorInfo], shards: Mapping[str, Mapping[str, TensorInfo]]
) -> dict[str, bytes]:
    """config.json and, if there are several shards, their index."""
    files = {"config.json": _json({key: value for key, value in config.items() if key != "auto_map"}, "config")}
    if len(shards) > 1:
        total = sum(info.nbytes for info in infos.values())
        weight_map = {name: shard for shard, part in shards.items() for name in part}
        files[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map}, "index")
    return files


def _extra_files(extra: Mapping[str, bytes | str], shards: Mapping[str, object]) -> dict[str, bytes]:
    for name in extra:
        if name in {"", ".", "..", "config.json", INDEX, *shards} or "/" in name or "\0" in name:
            raise OutputError(
                f"an extra file cannot be called {name!r}; expected a plain name that the model leaves free"
            )
    return {name: data.encode() if isinstance(data, str) else data for name, data in extra.items()}


def _json(value: Mapping[str, Any], what: str) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise OutputError(f"the {what} cannot be written as JSON: {error}") from error


def check_target(target: str | os.PathLike[str], *, overwrite: bool = False, inputs: Sequence[Path] = ()) -> None:
    """OutputError if `write` could not write there: for callers with long work to do before they write."""
    place = Path(os.path.abspath(target))  # noqa: PTH100 - keeps symbolic links, which are refused below
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long a name, for example
        raise OutputError(f"{place} cannot be written: {error}") from error
    real = place.resolve()
    for given in inputs:
        read = given.resolve()
        if real == read or read in real.parents or real in read.parents:
            relation = "is" if real == read else "lies inside" if read in real.parents else "holds"
            raise OutputError(f"the output {place} {relation} the input {given}; choose another output")
    if place.is_symlink():
        raise OutputError(f"{place} is a symbolic link; nothing is written through links. Give the folder itself")
    if place.exists() and not place.is_dir():
        raise OutputError(f"{place} is a file; choose another output")
    if place.exists() and not overwrite:
        raise OutputError(f"{place} exists; choose another output, or allow overwriting it")
    if place.exists() and any(place.iterdir()) and not (place / "config.json").exists():
        raise OutputError(
            f"{place} exists and is not a model folder (it has no config.json), so it is not overwritten: "
            f"it holds {some(sorted(path.name for path in place.iterdir()))}"
        )
    parent = _existing_parent(place)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a folder, so {place} cannot be created")
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise OutputError(f"{parent} is not writable, so {place} cannot be created")


def _existing_parent(place: Path) -> Path:
    return next(parent for parent in place.parents if os.path.lexists(parent))


def _check_space(place: Path, nbytes: int) -> None:
    needed, free = nbytes + nbytes // 100, shutil.disk_usage(_existing_parent(place)).free
    if needed > free:
        raise OutputError(
            f"{place} needs {needed / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; "
            "free some space or choose another disk"
        )


@contextmanager
def _system_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{place} could not be written: {error}. No part of it was left behind") from error


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Let a polite kill unwind the stack, and with it remove what is half written, as an interrupt does."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # handlers belong to the main thread, and another one's is not ours to replace
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _new_folder(place: Path) -> Iterator[Path]:
    """A hidden folder beside the target, renamed to it in the end, or removed."""
    token = secrets.token_hex(4)
    partial = place.with_name(f".{place.name[:50]}.partial-{token}")
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        with _system_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        yield partial
        with _system_errors(place):
            _sync_folder(partial)
            _move_into_place(partial, place, place.with_name(f".{place.name[:50]}.old-{token}"))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def _move_into_place(partial: Path, place: Path, aside: Path) -> None:
    replaced = place.exists()
    if replaced:
        place.rename(aside)
    try:
        partial.rename(place)
    except BaseException:
        if replaced:
            aside.rename(place)
        raise
    _sync_folder(place.parent)
    if replaced:
        shutil.rmtree(aside)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

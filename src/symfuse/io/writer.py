"""Writing a folder, of a model or of something else, tensor by tensor; it appears complete or not at all."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from symfuse.errors import OutputError, masked
from symfuse.executors import Executor, Threads
from symfuse.io.direct import Buffer
from symfuse.io.folder import WEIGHT_SUFFIXES
from symfuse.io.objects import new_objects
from symfuse.io.partial import Partial, new_folder, partial_of, system_errors, together
from symfuse.io.remote import CONFIG, INDEX, Place, Remote
from symfuse.io.shards import Layout, Slot, new_file, parse_size, plan_shards
from symfuse.io.stamp import stamps_of_weights
from symfuse.io.target import check_space, check_target, output_place
from symfuse.io.tensors import DTYPE_NAMES, TensorInfo
from symfuse.io.weights import ByShard, ByTensor, Growing, fill
from symfuse.signals import interruptible, signals_as_exceptions


def write(
    target: str | os.PathLike[str] | Remote,
    infos: Mapping[str, TensorInfo],
    blocks: Callable[[str], Iterable[Tensor]],
    *,
    config: Mapping[str, Any],
    companions: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    extra: Mapping[str, bytes | str] | None = None,
    progress: Callable[[str, int], None] | None = None,
    inputs: Sequence[Place] = (),
    threads: int | None = None,
    direct: bool = True,
    resume: bool = False,
    fingerprint: str = "",
    executor: Executor | None = None,
    stem: str = "model",
) -> Place:
    """Write a folder that `from_pretrained` loads, and return its path; or the same objects in a store, at a URL.

    `blocks(name)` is called once for each tensor of `infos`, in order, by `threads` workers (default: all cores, at
    least two, so that one writes while another computes); one worker makes a tensor. Its blocks, flattened and in
    sequence, are the tensor's values, in any floating dtype, which is rounded here, or in their own if that is not
    floating. A worker holds one block at a time. `companions` are files beside the weights, such as the tokenizer's, by
    relative name, `extra` further ones; `auto_map` is removed from the config since code is not copied. The target must
    not exist, or is replaced with `overwrite`; it must not be, contain or be inside one of the `inputs`.
    `progress(name, nbytes)` is called in this thread for each finished tensor. direct: write past the page cache where
    possible. executor: writes instead of threads; in other processes, and in stores, one worker makes a weight file,
    and `blocks` is pickled. stem: of the names of the weight files.

    Raises OutputError before any tensor is read if the target cannot be written, and later if the disk is full or a
    tensor has another dtype or size than in `infos`. If writing ends early (also by an interrupt, SIGTERM or SIGHUP),
    no part of the output is left behind, unless `resume`: then finished tensors are kept, hidden beside the target, and
    the next run with `resume` and the same `fingerprint` (of all that determines the values), names, shapes and shards
    makes only the others. Any other run to that target starts over.
    """
    place = output_place(target)
    _check_infos(infos)
    shards = plan_shards(infos, parse_size(max_shard_size), stem)
    files = {**(companions or {}), **_small_files(config, infos, shards, stem), **_extra_files(extra or {})}
    executor = executor or Threads(threads or max(2, os.cpu_count() or 1))
    check_target(place, overwrite=overwrite, inputs=inputs, resume=resume, lasting=executor.elsewhere)

    def report(names: Iterable[str]) -> None:
        for name in names:
            if progress is not None:
                progress(name, infos[name].nbytes)

    with signals_as_exceptions(), together(), ExitStack() as stack:
        if isinstance(place, Remote):
            upload = stack.enter_context(new_objects(place, files, shards, overwrite=overwrite))
            output: Growing = ByShard(place, None, shards, blocks, upload=upload)
            stack.enter_context(output.opened)
        else:
            partial = partial_of(place, fingerprint)
            size = sum(info.nbytes for info in infos.values()) + sum(map(len, files.values()))
            stack.enter_context(_new_folder(place, partial, size, inputs, overwrite=overwrite, resume=resume))
            kind, resumable = ByShard if executor.elsewhere else ByTensor, fingerprint if resume else None
            with _saying_what_is_left(place, partial, None), system_errors(place):
                output = kind(place, partial, shards, blocks, direct=direct, fingerprint=resumable)
            stack.enter_context(output.opened)
            stack.enter_context(_saying_what_is_left(place, partial, output))
            with system_errors(place):
                for name, data in files.items():
                    _write_file(partial.folder / name, data)
        fill(output, executor, report)
        with system_errors(place):
            output.finish()
    return place


def _new_folder(
    place: Path, partial: Partial, size: int, inputs: Sequence[Place], *, overwrite: bool, resume: bool
) -> AbstractContextManager[None]:
    """`new_folder` of `size` bytes, renamed only if the weights of the inputs have not changed."""
    stamps = stamps_of_weights(inputs)

    def check() -> None:
        check_target(place, overwrite=overwrite, inputs=inputs)
        for stamp in stamps:
            stamp.require_same()

    return new_folder(place, partial, check, lambda: check_space({place: size - partial.held}), resume=resume)


@contextmanager
def _saying_what_is_left(place: Path, partial: Partial, output: Growing | None) -> Iterator[None]:
    """If the run ends early, keep what can be resumed, and add a message about it. output: None until its files are
    made."""
    try:
        yield
    except BaseException as error:
        if output is not None:
            output.keep()
        left = f"No part of {place} was left behind"
        if partial.keep:
            what = "Finished tensors" if output is None else f"{len(output.done)} of {len(output.names)} tensors"
            left = f"{what} are kept in {partial.folder}: run again with resume to continue, without it to start over"
        if isinstance(error, OutputError):
            error.args = (f"{error}. {left}",)
        elif partial.keep:
            error.add_note(left)
        raise


def _check_infos(infos: Mapping[str, TensorInfo]) -> None:
    if not infos:
        raise OutputError("the model has no tensors")
    for name, info in infos.items():
        if name == "__metadata__" or info.dtype not in DTYPE_NAMES:
            raise OutputError(f"safetensors cannot hold {name!r} ({info})")


def _small_files(
    config: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    shards: Mapping[str, Mapping[str, TensorInfo]],
    stem: str,
) -> dict[str, bytes]:
    """config.json and, if there are several shards, their index."""
    files = {CONFIG: _json({key: value for key, value in config.items() if key != "auto_map"}, "config")}
    if len(shards) > 1:
        total = sum(info.nbytes for info in infos.values())
        weight_map = {name: shard for shard, part in shards.items() for name in part}
        files[f"{stem}{INDEX}"] = _json({"metadata": {"total_size": total}, "weight_map": weight_map}, "index")
    return files


def _extra_files(extra: Mapping[str, bytes | str]) -> dict[str, bytes]:
    """Extra files as bytes. OutputError for names of weight files, since serving engines load every such file."""
    for name in extra:
        if name in {"", ".", "..", CONFIG} or "/" in name or "\0" in name or name.endswith((INDEX, *WEIGHT_SUFFIXES)):
            raise OutputError(
                f"an extra file cannot be called {name!r}; expected a plain name that the model does not use, without "
                f"a suffix of weight files ({', '.join(WEIGHT_SUFFIXES)})"
            )
    return {name: masked(data).encode() if isinstance(data, str) else data for name, data in extra.items()}


def _json(value: Mapping[str, Any], what: str) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise OutputError(f"the {what} cannot be written as JSON: {error}") from error


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def output_folder(target: str | os.PathLike[str], nbytes: int, inputs: Sequence[Place] = ()) -> Iterator[Path]:
    """A hidden folder to fill, which is renamed to the target at the end, or removed on errors.

    The target must not exist, nor be, contain or be inside one of the inputs. nbytes: the space it needs. OutputError
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

"""Writing a model folder: tensors streamed one at a time; the whole folder appears, or nothing does."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from symfuse.errors import OutputError
from symfuse.io.direct import Buffer
from symfuse.io.journal import Journal
from symfuse.io.partial import Partial, new_folder, partial_of, remove_stale, system_errors
from symfuse.io.shards import Layout, ShardFile, Slot, parse_size, plan_shards
from symfuse.io.target import check_space as _check_space
from symfuse.io.target import check_target
from symfuse.io.tensors import DTYPE_NAMES, TensorInfo
from symfuse.io.workers import Workers, one_torch_thread

INDEX = "model.safetensors.index.json"


def write(
    target: str | os.PathLike[str],
    infos: Mapping[str, TensorInfo],
    blocks: Callable[[str], Iterable[Tensor]],
    *,
    config: Mapping[str, Any],
    companions: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    extra: Mapping[str, bytes | str] | None = None,
    progress: Callable[[str, int], None] | None = None,
    inputs: Sequence[Path] = (),
    threads: int | None = None,
    direct: bool = True,
    resume: bool = False,
    fingerprint: str = "",
) -> Path:
    """Write a folder that `from_pretrained` loads, and return its path.

    `blocks(name)` is asked for each tensor of `infos` once, in order, by `threads` workers (default: all cores, and two
    at least, so that one writes while another computes); a tensor is the work of one worker. Its blocks, one after the
    other and each flattened, are the tensor's values: floating ones in any floating dtype, rounded here, others in
    their own. A worker holds one block at a time. `companions` are files beside the weights, such as the tokenizer's,
    by relative name, `extra` further ones; `auto_map` is left out of the config since code is not copied. The target
    must not exist, or is replaced as a whole with `overwrite`; it must not be, hold or lie inside one of the `inputs`.
    As tensors are finished `progress(name, nbytes)` is called, in this thread. direct: write past the page cache where
    possible.

    Raises OutputError before any tensor is asked for if the target cannot be written, and later if the disk fills up or
    a tensor does not have the dtype and size announced. Whatever ends the writing early (an interrupt, SIGTERM or
    SIGHUP too), no part of the output is left behind; unless with `resume`: then what is finished stays, hidden beside
    the target, and the next run with `resume` and the same `fingerprint` (of what makes up the tensors' values), names,
    shapes and shards asks only for the tensors that are not finished. Any other run to that target starts over.
    """
    place = Path(os.path.abspath(target))  # noqa: PTH100 - keeps symbolic links, which are refused below
    _check_infos(infos)
    shards = plan_shards(infos, parse_size(max_shard_size))
    files = _small_files(config, infos, shards) | _extra_files(extra or {}, shards)
    check_target(place, overwrite=overwrite, inputs=inputs)
    partial = partial_of(place, fingerprint)
    with system_errors(place):
        remove_stale(place, partial.folder if resume else None)
        held = partial.held
    _check_space(place, sum(info.nbytes for info in infos.values()) + sum(map(len, files.values())) - held)
    with kills_as_exceptions(), new_folder(place, partial, resume=resume), ExitStack() as opened:
        with system_errors(place):
            output = _Output(partial, shards, opened, direct=direct, fingerprint=fingerprint if resume else None)
            for name, data in {**(companions or {}), **files}.items():
                (partial.folder / name).parent.mkdir(exist_ok=True)
                _write_file(partial.folder / name, data)

        def finished(name: str) -> None:
            with system_errors(place):
                output.note(name)
            if progress is not None:
                progress(name, infos[name].nbytes)

        with _saying_what_is_left(place, output):
            for name in output.done:
                if progress is not None:
                    progress(name, infos[name].nbytes)
            _fill(place, output, blocks, finished, opened, threads)
            with system_errors(place):
                output.finish()
    return place


class _Output:
    """The weight files of a partial folder, and the journal of their tensors if there is a fingerprint."""

    def __init__(
        self,
        partial: Partial,
        shards: Mapping[str, Mapping[str, TensorInfo]],
        opened: ExitStack,
        *,
        direct: bool,
        fingerprint: str | None,
    ) -> None:
        self.partial = partial
        self._place_of = {name: (shard, info) for shard, part in shards.items() for name, info in part.items()}
        layouts = {shard: Layout.of(part) for shard, part in shards.items()}
        self._journal: Journal | None = None
        if fingerprint is not None:
            self._journal = Journal(partial.folder, fingerprint, layouts)
            opened.callback(self._journal.close)
        self._files: dict[str, ShardFile] = {}
        for shard, part in shards.items():
            self._files[shard] = ShardFile(partial.folder / shard, part, layouts[shard], direct=direct)
            opened.callback(self._files[shard].close)

    @property
    def names(self) -> Sequence[str]:
        return list(self._place_of)

    @property
    def done(self) -> Set[str]:
        """The tensors that are noted in the journal."""
        return set() if self._journal is None else self._journal.done

    def slot(self, name: str) -> Slot:
        return self._files[self._place_of[name][0]].slot(name)

    def note(self, name: str) -> None:
        """A tensor is finished."""
        if self._journal is not None:
            shard, info = self._place_of[name]
            self._journal.add(name, shard, info.nbytes, self._sync)

    def keep(self) -> None:
        """The run ends early: note what is finished, and keep the folder if that is anything."""
        if self._journal is not None:
            with suppress(OSError):  # the error that ends the run comes first
                self._journal.flush(self._sync)
            self.partial.keep = bool(self.done)

    def finish(self) -> None:
        """All is written: wait for the disk."""
        for file in self._files.values():
            file.sync()
        if self._journal is not None:
            self._journal.remove()

    def _sync(self, shard: str) -> None:
        self._files[shard].sync()


class _Local(threading.local):
    """What each worker has for itself."""

    def __init__(self) -> None:
        self.buffer = Buffer()


def _fill(
    place: Path,
    output: _Output,
    blocks: Callable[[str], Iterable[Tensor]],
    finished: Callable[[str], None],
    opened: ExitStack,
    threads: int | None,
) -> None:
    """Make and write the tensors that are not done; `finished(name)` is called for each, in this thread.

    `opened` is closed once no worker can write any more, even one that takes long to notice that it should stop.
    A tensor is made by one worker: one that is much larger than the rest, and last, keeps the others waiting.
    """
    local = _Local()

    def produce(name: str, stop: threading.Event) -> None:
        slot = output.slot(name)
        for block in blocks(name):
            if stop.is_set():
                return
            with system_errors(place):
                slot.put(block, local.buffer)
            del block  # before the next one is computed
        slot.finish()

    names = [name for name in output.names if name not in output.done]
    workers = Workers(names, produce, min(len(names), threads or max(2, os.cpu_count() or 1)))
    with one_torch_thread():
        try:
            for name in workers:
                finished(name)
        finally:
            if not workers.stop():
                workers.when_ended(opened.pop_all().close)


@contextmanager
def _saying_what_is_left(place: Path, output: _Output) -> Iterator[None]:
    """If the run ends early, keep what can be resumed, and say how."""
    try:
        yield
    except BaseException as error:
        output.keep()
        left = f"No part of {place} was left behind"
        if output.partial.keep:
            left = (
                f"{len(output.done)} of {len(output.names)} tensors are kept in {output.partial.folder}: "
                "run it again with resume to go on, without to start over"
            )
        if isinstance(error, OutputError):
            error.args = (f"{error}. {left}",)
        elif output.partial.keep:
            error.add_note(left)
        raise


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


@contextmanager
def kills_as_exceptions() -> Iterator[None]:
    """Let a polite kill, or a terminal that is closed, unwind the stack, and with it remove what is half written, as an
    interrupt does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread
        return
    # Another handler is not ours to replace, and nohup ignores SIGHUP on purpose.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]

    def stop(number: int, _frame: FrameType | None) -> None:
        for one in ours:  # often both come, and the second must not interrupt the cleaning up
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

"""Reading parts and writing blocks: the same values and bytes as whole tensors, whatever the way they take."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from symfuse.errors import CheckpointError, OutputError
from symfuse.io import Checkpoint, TensorInfo, lazy, write
from symfuse.io import direct as direct_module
from symfuse.io import open as open_checkpoint
from symfuse.io.lazy import Lazy
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.tensors import DTYPES, flat_part

LARGE = (771, 530)  # of two-byte values: pages, and ends that are none


def model(**more: Tensor) -> Checkpoint:
    rng = torch.Generator().manual_seed(0)
    weights = {f"w{n}": torch.randn(LARGE, generator=rng).to(torch.bfloat16) for n in range(4)}
    weights |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "odd": torch.arange(7)}
    return Checkpoint(weights | more, {"a": 1}, name="model")


class Computed(Lazy):
    """Tensors that are not exact in the dtype that they are announced in."""

    def __init__(self, streams: bool = False) -> None:
        super().__init__({f"c{n}": TensorInfo(torch.bfloat16, (30, 7)) for n in range(3)})
        self.read_names: list[str] = []
        self.streams = streams

    def wide(self, name: str) -> Tensor:
        self.read_names.append(name)
        return torch.randn(30, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(int(name[1:])))

    def blocks(self, name: str) -> Iterator[Tensor]:
        return iter(self.wide(name).split(11)) if self.streams else super().blocks(name)

    def saved(self, name: str) -> Iterator[Tensor]:
        return self.blocks(name) if self.streams else super().saved(name)


def computed(blocks: bool = False) -> tuple[Checkpoint, Computed]:
    tensors = Computed(blocks)
    checkpoint = Checkpoint(tensors, {}, name="computed")
    tensors.read_names.clear()  # the type checks of the tests look at a value
    return checkpoint, tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- parts


def test_parts_of_files_and_of_memory(tmp_path: Path) -> None:
    live = model()
    safe = open_checkpoint(live.save(tmp_path / "safe"))
    (tmp_path / "bin").mkdir()
    torch.save(dict(live) | {"turned": live["w0"].T}, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text("{}")
    for checkpoint in (live, safe, open_checkpoint(tmp_path / "bin")):
        for name in checkpoint:
            flat = checkpoint[name].reshape(-1)
            n = flat.numel()
            for start, stop in {(0, n), (0, 0), (n // 3, n // 2), (max(0, n - 1), n), (n // 2 + 1, n)}:
                part = checkpoint.part(name, start, stop)
                assert part.dtype == flat.dtype
                assert torch.equal(part, flat[start:stop]), (checkpoint.name, name, start, stop)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_parts_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(11).to(dtype)
    out = Checkpoint({"w": whole, "x": whole}, {}, name="x").save(tmp_path / "out")
    stored = read_safetensors(out / "model.safetensors")["x"]
    assert torch.equal(stored.part(3, 9).view(torch.uint8), whole[3:9].view(torch.uint8))


def test_parts_that_start_nowhere_near_a_multiple_of_their_size(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}'
    values = torch.arange(5.0)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    (tmp_path / "config.json").write_text("{}")
    assert len(header) % 4
    assert torch.equal(open_checkpoint(tmp_path).part("w", 1, 4), values[1:4])


def test_changing_a_part_does_not_change_the_file(tmp_path: Path) -> None:
    out = model().save(tmp_path / "out")
    before = contents(out)
    open_checkpoint(out).part("w1", 5, 500).zero_()
    assert contents(out) == before


def test_a_file_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    out = model().save(tmp_path / "out")
    checkpoint = open_checkpoint(out)
    os.truncate(out / "model.safetensors", 4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was opened"):
        checkpoint.part("w3", 0, 100)


def test_a_file_that_is_written_or_gone_after_it_was_opened(tmp_path: Path) -> None:
    """Of the same size too: parts of two versions are never mixed."""
    out = model().save(tmp_path / "out")
    torch.save(dict(model()), tmp_path / "out" / "pytorch_model.bin")
    for prefer_bin, file in ((False, "model.safetensors"), (True, "pytorch_model.bin")):
        checkpoint = open_checkpoint(out, prefer_bin=prefer_bin)
        stat = (out / file).stat()
        os.utime(out / file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
        for read in (lambda one: one["w3"], lambda one: one.part("w3", 0, 9)):
            with pytest.raises(CheckpointError, match=f"{file} has changed since it was opened: it was written to"):
                read(checkpoint)
        checkpoint = open_checkpoint(out, prefer_bin=prefer_bin)
        (out / file).unlink()
        for read in (lambda one: one["w3"], lambda one: one.part("w3", 0, 9)):
            with pytest.raises(CheckpointError, match=f"{file} has changed since it was opened: .*No such file"):
                read(checkpoint)


def test_a_folder_that_is_gone_after_it_was_opened(tmp_path: Path) -> None:
    out = model().save(tmp_path / "out")
    checkpoint = open_checkpoint(out)
    out.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a file beside the weights cannot be read"):
        checkpoint.companions()
    with pytest.raises(CheckpointError, match="out has changed since it was opened"):
        checkpoint.state()


@pytest.mark.parametrize("turned", [False, True])
def test_flat_parts(turned: bool) -> None:
    tensor = torch.arange(2 * 3 * 5).reshape(2, 3, 5)
    tensor = tensor.permute(2, 0, 1) if turned else tensor
    for start in range(31):
        for stop in range(start, 31):
            assert torch.equal(flat_part(tensor, start, stop), tensor.reshape(-1)[start:stop])


def test_computed_parts_are_unrounded_and_computed_once_for_consecutive_ones() -> None:
    checkpoint, tensors = computed()
    parts = [checkpoint.part("c1", start, start + 70) for start in (0, 70, 140)]
    assert tensors.read_names == ["c1"]
    assert torch.equal(torch.cat(parts), tensors.wide("c1").reshape(-1))
    tensors.read_names.clear()
    checkpoint.part("c2", 0, 3)
    checkpoint.part("c1", 0, 3)
    assert tensors.read_names == ["c2", "c1"]  # one is kept, not all


def test_threads_do_not_take_each_others_computed_tensors() -> None:
    checkpoint, tensors = computed()
    expected = {name: tensors.wide(name).reshape(-1) for name in checkpoint}
    wrong: list[str] = []

    def read(name: str) -> None:
        parts = (checkpoint.part(name, 10, 20) for _ in range(50))
        wrong.extend(name for part in parts if not torch.equal(part, expected[name][10:20]))

    threads = [threading.Thread(target=read, args=(name,)) for name in checkpoint]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- blocks


def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = open_checkpoint(model().save(tmp_path / "out"))
    monkeypatch.setattr(lazy, "BLOCK", 1000)
    blocks = list(stored.blocks("w1"))
    assert [block.numel() for block in blocks] == [1000] * 408 + [630]
    assert torch.equal(torch.cat(blocks), stored["w1"].reshape(-1))
    assert list(stored.blocks("empty")) == []
    for streams in (False, True):
        checkpoint, tensors = computed(streams)
        blocks = list(checkpoint.blocks("c0"))
        assert len(blocks) == (3 if streams else 1)
        assert torch.equal(torch.cat(blocks), tensors.wide("c0"))


def test_casting_streams_and_still_refuses_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "BLOCK", 1000)
    stored = open_checkpoint(model().save(tmp_path / "out"))
    cast = stored.to(torch.float32)
    assert len(list(cast.blocks("w1"))) == 409
    assert torch.equal(cast.part("w1", 5, 99), stored["w1"].float().reshape(-1)[5:99])
    again = open_checkpoint(cast.save(tmp_path / "cast"))
    assert all(torch.equal(again[name], cast[name]) for name in cast)
    broken = model(w3=torch.full(LARGE, torch.nan)).to(torch.bfloat16)
    with pytest.raises(CheckpointError, match="'w3' of model holds 408630 NaN"):
        broken.save(tmp_path / "broken")
    with pytest.raises(CheckpointError, match="'w3' of model holds 408630 NaN"):
        broken.part("w3", 0, 10)


def test_computed_blocks_are_rounded_once_when_they_are_written(tmp_path: Path) -> None:
    for streams in (False, True):
        checkpoint, tensors = computed(streams)
        out = open_checkpoint(checkpoint.save(tmp_path / str(streams)))
        half = open_checkpoint(checkpoint.to(torch.float16).save(tmp_path / f"half {streams}"))
        for name in checkpoint:
            assert torch.equal(out[name], tensors.wide(name).to(torch.bfloat16))
            assert torch.equal(half[name], tensors.wide(name).to(torch.float16))


def test_a_computed_tensor_of_another_shape_than_announced(tmp_path: Path) -> None:
    infos = {"w": TensorInfo(torch.float32, (2, 3))}
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16)):
        with pytest.raises(OutputError, match=r"'w' was announced as float32\[2, 3\] and came as float"):
            Checkpoint({"w": wrong}, {}, name="x", infos=infos).save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- bytes


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("direct", [False, True])
def test_the_bytes_do_not_depend_on_the_way(
    tmp_path: Path, threads: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(model().save(tmp_path / "expected", threads=1, direct=False, max_shard_size="2MB"))
    monkeypatch.setattr(direct_module, "LEAST", 4096)
    stored = open_checkpoint(tmp_path / "expected")
    for block in (997, 2**21):
        monkeypatch.setattr(lazy, "BLOCK", block)
        options = {"threads": threads, "direct": direct, "max_shard_size": "2MB"}
        assert contents(stored.save(tmp_path / f"out {block}", **options)) == expected  # type: ignore[arg-type]


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(model().save(tmp_path / "expected"))
    monkeypatch.setattr("symfuse.io.shards.PIECE", 10_000)
    assert contents(model().save(tmp_path / "out")) == expected


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_file_systems_without_direct_writes(
    tmp_path: Path, call: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(model().save(tmp_path / "expected"))
    system_open, pwrite, refused = os.open, os.pwrite, []  # type: ignore[var-annotated]

    def refuse_open(path: object, flags: int, *rest: object, **more: object) -> int:
        if flags & os.O_DIRECT and call == "open":
            refused.append(path)
            raise OSError(error, "no")
        return system_open(path, flags, *rest, **more)  # type: ignore[arg-type]

    def refuse_write(file: int, data: bytes, position: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
            raise OSError(error, "no")
        return pwrite(file, data, position)

    monkeypatch.setattr(os, "open", refuse_open)
    if call == "pwrite":
        monkeypatch.setattr(os, "pwrite", refuse_write)
    assert contents(model().save(tmp_path / "out", threads=1)) == expected
    assert len(refused) == 1


def test_direct_writes_that_take_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(model().save(tmp_path / "expected"))
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, position: pwrite(file, data[: max(1, len(data) // 2)], position)
    )
    assert contents(model().save(tmp_path / "out")) == expected


# ---- threads


INFOS = {f"w{n}": TensorInfo(torch.float32, (1000,)) for n in range(40)}


def test_one_error_stops_the_others(tmp_path: Path) -> None:
    asked: list[str] = []
    together = threading.Barrier(4)

    def blocks(name: str) -> Iterator[Tensor]:
        asked.append(name)
        together.wait(60)
        if name == "w3":
            raise ValueError("of w3")
        for _ in range(1000):
            time.sleep(0.01)
            yield torch.ones(1)

    with pytest.raises(ValueError, match="of w3"):
        write(tmp_path / "out", INFOS, blocks, config={}, threads=4)
    assert sorted(asked) == ["w0", "w1", "w2", "w3"]
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_progress_stops_all(tmp_path: Path) -> None:
    def stop(name: str, nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", INFOS, lambda _: iter([torch.ones(1000)]), config={}, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_in_the_callers_thread_of_every_tensor(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    write(
        tmp_path / "out",
        INFOS,
        lambda _: iter([torch.ones(1000)]),
        config={},
        threads=3,
        progress=lambda name, nbytes: told.append((name, nbytes, threading.get_ident())),
    )
    assert sorted(told) == sorted((name, 4000, threading.get_ident()) for name in INFOS)


def test_a_worker_that_does_not_stop_cannot_write_into_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("symfuse.executors.threads.GRACE", 0.1)
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def blocks(name: str) -> Iterator[Tensor]:
        if name == "w1":
            started.wait(60)
            raise ValueError("of w1")
        started.set()
        go_on.wait(60)  # a long computation
        try:
            yield torch.full((1000,), 7.0)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="of w1"):
        write(tmp_path / "out", {name: INFOS[name] for name in ("w0", "w1")}, blocks, config={}, threads=2)
    assert list(tmp_path.iterdir()) == []
    files = [(tmp_path / f"{n}").open("w+b") for n in range(8)]  # would get the descriptors that were closed too early
    go_on.set()
    assert ended.wait(60)
    assert all(Path(file.name).stat().st_size == 0 for file in files)
    for file in files:
        file.close()


def test_torch_has_one_thread_in_the_work_and_its_own_after(tmp_path: Path) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:

        def blocks(name: str) -> Iterator[Tensor]:
            seen.append(torch.get_num_threads())
            return iter([torch.ones(1000)])

        write(tmp_path / "out", INFOS, blocks, config={})
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_worker_holds_one_block(tmp_path: Path, threads: int) -> None:
    alive: list[int] = []
    most: list[int] = []

    def blocks(name: str) -> Iterator[Tensor]:
        for n in range(10):
            data = np.ones(100, dtype=np.float32)
            weakref.finalize(data, alive.remove, n)
            alive.append(n)
            most.append(len(alive))
            tensor = torch.from_numpy(data)
            del data
            yield tensor
            del tensor

    write(tmp_path / "out", INFOS, blocks, config={}, threads=threads)
    assert max(most) <= threads
    assert alive == []

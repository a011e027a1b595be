"""Writing: what the files look like byte by byte, and that nothing half written ever stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from symfuse.errors import OptionError, OutputError
from symfuse.io import Checkpoint, TensorInfo, write
from symfuse.io import open as open_checkpoint
from symfuse.io.opening import PACKED
from symfuse.io.shards import parse_size, plan_shards
from symfuse.io.target import check_target, existing_parent
from symfuse.io.tensors import DTYPES

CONFIG = {"model_type": "tiny", "width": 5}


def tensors() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5, generator=rng),
        "a.bias": torch.randn(7, generator=rng).to(torch.bfloat16),
        "positions": torch.arange(4),
        "é": torch.tensor([True, False, True]),
        "scalar": torch.tensor(0.5, dtype=torch.float16),
        "empty": torch.zeros(0, 4),
    }


def whole(read: Callable[[str], Tensor]) -> Callable[[str], Iterator[Tensor]]:
    """Each tensor in one block."""

    def blocks(name: str) -> Iterator[Tensor]:
        yield read(name)

    return blocks


def save(target: Path, weights: dict[str, Tensor], **options: object) -> Path:
    infos = {name: TensorInfo.of(tensor) for name, tensor in weights.items()}
    return write(target, infos, whole(weights.__getitem__), config=CONFIG, **options)  # type: ignore[arg-type]


def no_leftovers(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == []


def test_file_is_byte_for_byte_that_of_the_safetensors_library(tmp_path: Path) -> None:
    save(tmp_path / "out", tensors())
    save_file(tensors(), tmp_path / "reference.safetensors", metadata={"format": "pt"})
    ours, theirs = tmp_path / "out" / "model.safetensors", tmp_path / "reference.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()


def test_golden_bytes(tmp_path: Path) -> None:
    save(tmp_path / "out", {"w": torch.tensor([[1.0, -2.0]])})
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    data = b"\x00\x00\x80\x3f\x00\x00\x00\xc0"
    expected = len(header).to_bytes(8, "little") + header + data
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected


def test_every_dtype_is_sorted_as_the_library_does(tmp_path: Path) -> None:
    weights = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        weights[name] = torch.arange(3 + i % 3).to(dtype)
    save(tmp_path / "out", weights)
    save_file(weights, tmp_path / "reference.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "reference.safetensors").read_bytes()


def test_shards_and_index(tmp_path: Path) -> None:
    weights = {f"w{i}": torch.full((10,), float(i)) for i in range(5)} | {"large": torch.ones(50)}
    calls: list[tuple[str, int]] = []
    out = save(
        tmp_path / "out", weights, max_shard_size=80, threads=1, progress=lambda name, n: calls.append((name, n))
    )
    assert calls == [(name, tensor.nbytes) for name, tensor in weights.items()]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 400}
    assert sorted(set(index["weight_map"].values())) == [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert [path.name for path in sorted(out.iterdir())] == [
        "config.json",
        *sorted(set(index["weight_map"].values())),
        "model.safetensors.index.json",
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], weights[name])


def test_one_file_has_no_index(tmp_path: Path) -> None:
    out = save(tmp_path / "out", tensors(), extra={"symfuse.json": "{}", "README.md": "é".encode()})
    names = ["README.md", "config.json", "model.safetensors", "symfuse.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert (out / "README.md").read_text(encoding="utf-8") == "é"


@pytest.mark.parametrize(
    ("size", "expected"), [("5GB", 5 * 10**9), ("200MB", 2 * 10**8), ("1.5 kib", 1536), (7, 7), ("12", 12)]
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "-1", "0", "5 apples", 0, -5])
def test_sizes_that_make_no_sense(size: int | str) -> None:
    with pytest.raises(OptionError, match=r"^--max-shard-size \(in Python max_shard_size\) "):
        parse_size(size)


def test_config_and_extra_files(tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    infos = {"w": TensorInfo.of(weights["w"])}
    config = {"b": 1, "a": "é", "auto_map": {"AutoModel": "code.Model"}}
    out = write(tmp_path / "out", infos, whole(weights.__getitem__), config=config)
    assert list(json.loads((out / "config.json").read_text(encoding="utf-8")).items()) == [
        ("b", 1),
        ("a", "é"),
    ]
    with pytest.raises(OutputError, match="JSON"):
        write(tmp_path / "no", infos, whole(weights.__getitem__), config={"x": object()})
    for name in ("config.json", "model.safetensors", "../escape", "", ".."):
        with pytest.raises(OutputError, match="extra file"):
            save(tmp_path / "no", weights, extra={name: "x"})
    assert not (tmp_path / "no").exists()


def test_modes_are_those_of_ordinary_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        out = save(tmp_path / "out", tensors())
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o644}


def test_existing_target(tmp_path: Path) -> None:
    out = save(tmp_path / "out", {"w": torch.zeros(3), "old": torch.ones(1)}, extra={"old.txt": "old"})
    with pytest.raises(OutputError, match="exists; choose another output, or replace it"):
        save(out, {"w": torch.ones(3)})
    assert set(load_file(out / "model.safetensors")) == {"w", "old"}
    with pytest.raises(OutputError, match=r"not part of a model: old\.txt\. Move them elsewhere"):
        save(out, {"w": torch.ones(3)}, overwrite=True)
    (out / "old.txt").rename(out / "symfuse.json")
    save(out, {"w": torch.ones(3)}, overwrite=True)
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.ones(3))
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwriting_something_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    with pytest.raises(OutputError, match="not a model folder"):
        save(tmp_path / "home", {"w": torch.ones(3)}, overwrite=True)
    assert (tmp_path / "home" / "letters.txt").read_text() == "dear"


def test_failed_overwrite_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = save(tmp_path / "out", {"w": torch.zeros(3)})
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OutputError, match="could not be written"):
        save(out, {"w": torch.ones(3)}, overwrite=True)
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.zeros(3))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_whatever_stops_the_writing_nothing_is_left(tmp_path: Path, kind: type[BaseException]) -> None:
    weights = {f"w{i}": torch.ones(1000) for i in range(4)}
    infos = {name: TensorInfo.of(tensor) for name, tensor in weights.items()}

    def read(name: str) -> Tensor:
        if name == "w2":
            raise kind("stop")
        return weights[name]

    with pytest.raises(kind, match="stop"):
        write(tmp_path / "new" / "parents" / "out", infos, whole(read), config=CONFIG, max_shard_size=5000)
    no_leftovers(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_kill_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    script = textwrap.dedent("""
        import sys, time, torch
        from symfuse.executors import threads
        from symfuse.io import TensorInfo, write
        threads.GRACE = 0.5
        def read(name):
            if name == "second":
                print("half", flush=True)
                time.sleep(600)
            yield torch.ones(9)
        infos = dict.fromkeys(("first", "second"), TensorInfo(torch.float32, (9,)))
        write(sys.argv[1], infos, read, config={})
    """)
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "half\n"
        assert len(list(tmp_path.iterdir())) == 1  # the hidden folder
        run.send_signal(number)
        assert run.wait(60) == 128 + number
    no_leftovers(tmp_path)


def test_handlers_of_signals_are_put_back(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    assert list(map(signal.getsignal, numbers)) == [signal.SIG_DFL] * 2
    save(tmp_path / "a", tensors())
    assert list(map(signal.getsignal, numbers)) == [signal.SIG_DFL] * 2


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    found = []

    def read(_name: str) -> Iterator[Tensor]:
        found.append(signal.getsignal(signal.SIGHUP))
        return iter([torch.ones(3)])

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    write(tmp_path / "a", {"w": TensorInfo(torch.float32, (3,))}, read, config=CONFIG)
    found.append(signal.getsignal(signal.SIGHUP))
    assert found == [signal.SIG_IGN] * 2


@pytest.mark.parametrize("produced", [torch.zeros(7), torch.zeros(5), torch.zeros(2, 3, dtype=torch.int32)])
def test_a_tensor_that_is_not_as_announced(tmp_path: Path, produced: Tensor) -> None:
    with pytest.raises(OutputError, match=r"'w' was announced as float32\[2, 3\] and came as"):
        write(tmp_path / "out", {"w": TensorInfo(torch.float32, (2, 3))}, whole(lambda _: produced), config=CONFIG)
    no_leftovers(tmp_path)


def test_no_tensors_or_not_storable(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no tensors"):
        save(tmp_path / "out", {})
    for name, dtype in (("w", torch.complex128), ("__metadata__", torch.float32)):
        with pytest.raises(OutputError, match=f"cannot hold '{name}'"):
            save(tmp_path / "out", {name: torch.zeros(1, dtype=dtype)})
    no_leftovers(tmp_path)


def test_space_is_checked_before_any_tensor_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 0, 400_000))

    def read(name: str) -> Tensor:
        raise AssertionError("asked for a tensor")

    with pytest.raises(OutputError, match=r"needs 0\.4 MB and its disk has 0\.4 MB free"):
        write(tmp_path / "out", {"w": TensorInfo(torch.float32, (100_000,))}, whole(read), config=CONFIG)
    no_leftovers(tmp_path)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_disk_that_fills_up_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"No space left on device\. No part of .*/out was left behind"):
        save(tmp_path / "out", tensors())
    no_leftovers(tmp_path)


@pytest.mark.parametrize(
    ("number", "way"), [(errno.EFBIG, r"smaller --max-shard-size .*ulimit -f"), (errno.EMFILE, r"larger .*ulimit -n")]
)
def test_limits_of_the_shell_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, way: str
) -> None:
    def limited(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(OutputError, match=rf"{way}\)\. No part of .*/out was left behind"):
        save(tmp_path / "out", tensors())
    no_leftovers(tmp_path)


def test_file_systems_without_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    out = save(tmp_path / "out", tensors())
    assert torch.equal(load_file(out / "model.safetensors")["b.weight"], tensors()["b.weight"])


def test_an_error_of_the_source_is_not_called_one_of_the_output(tmp_path: Path) -> None:
    def read(name: str) -> Tensor:
        raise OSError(errno.EIO, "the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        write(tmp_path / "out", {"w": TensorInfo(torch.float32, (2,))}, whole(read), config=CONFIG)
    no_leftovers(tmp_path)


def test_shared_inputs_are_protected(tmp_path: Path) -> None:
    model = save(tmp_path / "models" / "a", tensors())
    for target, relation in ((model, "is"), (model / "out", "lies inside"), (tmp_path / "models", "holds")):
        with pytest.raises(OutputError, match=f"{relation} the input"):
            save(target, tensors(), inputs=[model], overwrite=True)
        with pytest.raises(OutputError, match=f"{relation} the input"):
            save(target, tensors(), inputs=[model], overwrite=True)
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]


def test_a_link_to_itself(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    model = save(tmp_path / "a", tensors())
    for target in (loop, loop / "out"):
        with pytest.raises(OutputError, match="symbolic link"):
            save(target, tensors(), inputs=[model])


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is not a folder"):
        save(tmp_path / "file" / "out", tensors())
    with pytest.raises(OutputError, match="is a file"):
        save(tmp_path / "file", tensors(), overwrite=True)


def test_the_root_and_names_that_are_too_long(tmp_path: Path) -> None:
    for name in ("n" * 300, "new/" + "n" * 256):
        with pytest.raises(OutputError, match=r"cannot be written: \[Errno 36\] File name too long"):
            check_target(tmp_path / name)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="/ is the root of the file system; choose a folder in it"):
            check_target("/", overwrite=overwrite)
    assert existing_parent(Path("/")) == Path("/")
    no_leftovers(tmp_path)


def test_odd_strides_and_lazy_conjugates_are_packed(tmp_path: Path) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    odd = {
        "transposed": base.T,
        "conjugate": base.conj(),
        "imaginary of conjugate": base.conj().imag,
        "lazily negated": torch._neg_view(torch.ones(3)),
        "strided": base.real[::2, 1::3],
        "expanded": torch.tensor([1.5]).expand(3),
    }
    out = save(tmp_path / "out", odd)
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, odd[name]), name


def test_only_one_tensor_is_held(tmp_path: Path) -> None:
    alive: list[str] = []
    most = 0

    def read(name: str) -> Tensor:
        nonlocal most
        data = np.ones(5, dtype=np.float32)
        weakref.finalize(data, alive.remove, name)
        alive.append(name)
        most = max(most, len(alive))
        return torch.from_numpy(data)

    write(
        tmp_path / "out",
        {f"w{i}": TensorInfo(torch.float32, (5,)) for i in range(4)},
        whole(read),
        config=CONFIG,
        threads=1,
    )
    assert (most, alive) == (1, [])


def packed(name: str) -> bool:
    """Whether only quantised models have such a tensor: hypothesis finds these names in the code."""
    return name.endswith(".qweight") or any(names.fullmatch(name) for names in PACKED.values())


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from([dtype for name, dtype in DTYPES.items() if not name.startswith("F8")])
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: not name.startswith(("_orig_mod.", "module.", "__metadata__")) and not packed(name)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.dictionaries(names, st.tuples(shapes, dtypes), min_size=1, max_size=6),
    limit=st.integers(1, 300),
    seed=st.integers(0, 2**16),
)
def test_any_model_survives_the_round_trip(
    tmp_path: Path, specs: dict[str, tuple[tuple[int, ...], torch.dtype]], limit: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    weights = {name: (torch.randn(shape, generator=rng) * 9).abs().to(dtype) for name, (shape, dtype) in specs.items()}
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    Checkpoint(weights, CONFIG, name="random").save(out, max_shard_size=limit)
    again = open_checkpoint(out)
    assert set(again) == set(weights)
    assert again.config == CONFIG
    for name, tensor in weights.items():
        assert again.info(name) == TensorInfo.of(tensor)
        assert torch.equal(again[name], tensor), name
    for shard, part in plan_shards({name: again.info(name) for name in weights}, limit).items():
        assert len(part) == 1 or sum(info.nbytes for info in part.values()) <= limit, shard

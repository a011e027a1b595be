"""What a run that was cut off leaves, and what the next one makes of it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symfuse.errors import OutputError
from symfuse.io import TensorInfo, weights, write
from symfuse.io.direct import DirectFile
from symfuse.io.shards import Layout

NAMES = [f"layer.{n}" for n in range(6)]
INFOS = {name: TensorInfo(torch.bfloat16, (300, 171)) for name in NAMES}
SHARD = 250_000  # two tensors


def value(name: str, seed: int = 0) -> Tensor:
    return torch.randn(300, 171, generator=torch.Generator().manual_seed(100 * seed + NAMES.index(name)))


class Source:
    """Counts what it is asked for; fails at one tensor if it should."""

    def __init__(self, fails: str | None = None, seed: int = 0, error: BaseException | None = None) -> None:
        self.fails, self.seed, self.asked = fails, seed, []  # type: str | None, int, list[str]
        self.error = error or RuntimeError("stop")

    def __call__(self, name: str) -> Iterator[Tensor]:
        self.asked.append(name)
        if name == self.fails:
            raise self.error
        yield from value(name, self.seed).split(70)


def run(target: Path, source: Callable[[str], Iterator[Tensor]], **options: object) -> Path:
    options = {"config": {"a": 1}, "max_shard_size": SHARD, "threads": 1, "resume": True, **options}
    return write(target, INFOS, source, **options)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def partials(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".out.partial-")]


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    return contents(run(tmp_path / "reference" / "model", Source(), resume=False))


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt("stop"), SystemExit("stop")])
def test_what_is_finished_is_not_made_again(tmp_path: Path, expected: dict[str, bytes], error: BaseException) -> None:
    with pytest.raises(type(error), match="stop") as caught:
        run(tmp_path / "out", Source("layer.3", error=error))
    [folder] = partials(tmp_path)
    assert caught.value.__notes__ == [
        f"3 of 6 tensors are kept in {folder}: run again with resume to continue, without it to start over"
    ]
    source, told = Source(), []  # type: Source, list[str]
    out = run(tmp_path / "out", source, progress=lambda name, _: told.append(name))
    assert source.asked == NAMES[3:]
    assert sorted(told) == NAMES
    assert contents(out) == expected
    assert partials(tmp_path) == []


def test_an_output_error_says_how_to_go_on(tmp_path: Path) -> None:
    def wrong(name: str) -> Iterator[Tensor]:
        return iter([value(name)[: 299 if name == "layer.1" else 300]])

    with pytest.raises(
        OutputError, match=r"came as 51129 values\. 1 of 6 tensors are kept in .* with resume to continue"
    ):
        run(tmp_path / "out", wrong)
    with pytest.raises(OutputError, match=r"came as 51129 values\. No part of .* was left behind"):
        run(tmp_path / "out", wrong, resume=False)
    assert partials(tmp_path) == []


KILLED = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from io_resume import Source, run
    class Slow(Source):
        def __call__(self, name):
            if name == "layer.4":
                while len(list(Path(sys.argv[1]).parent.glob(".out.partial-*/.journal"))[0].read_text().split()) < 5:
                    time.sleep(0.01)
                print("here", flush=True)
                time.sleep(600)
            yield from super().__call__(name)
    from symfuse.executors import threads
    from symfuse.io import weights
    weights.BATCH, threads.GRACE = 1, 0.5
    run(Path(sys.argv[1]), Slow(), **eval(sys.argv[2]))
""")


def killed(target: Path, number: int = signal.SIGKILL, **options: object) -> None:
    """A run in a process of its own that is killed when four of the six tensors are noted."""
    link = target.parent / "modules" / "io_resume.py"
    link.parent.mkdir(exist_ok=True)
    link.write_text(Path(__file__).read_text())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(link.parent), *sys.path])}
    command = [sys.executable, "-c", KILLED, str(target), repr(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        process.wait(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_kill(tmp_path: Path, expected: dict[str, bytes], number: int) -> None:
    killed(tmp_path / "out", number)
    assert len(partials(tmp_path)) == 1
    source = Source()
    assert contents(run(tmp_path / "out", source)) == expected
    assert source.asked == NAMES[4:]
    assert partials(tmp_path) == []


def test_what_a_killed_run_left_is_removed_by_another(tmp_path: Path, expected: dict[str, bytes]) -> None:
    killed(tmp_path / "out", fingerprint="another")
    [left] = partials(tmp_path)
    source = Source()
    assert contents(run(tmp_path / "out", source, resume=False)) == expected
    assert source.asked == NAMES
    assert not left.exists()


@pytest.mark.parametrize("change", ["fingerprint", "infos", "shards", "journal damaged"])
def test_what_differs_starts_over(
    tmp_path: Path, expected: dict[str, bytes], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", Source("layer.3"))
    [folder] = partials(tmp_path)
    options: dict[str, object] = {}
    if change == "fingerprint":
        options["fingerprint"] = "other"
    elif change == "infos":
        monkeypatch.setitem(INFOS, "layer.5", TensorInfo(torch.float32, (300, 171)))
    elif change == "shards":
        options["max_shard_size"] = "5GB"
    else:
        (folder / ".journal").write_bytes(b"\xff\n")
    source = Source()
    out = run(tmp_path / "out", source, **options)
    assert source.asked == NAMES
    assert partials(tmp_path) == []
    if change not in ("infos", "shards"):
        assert contents(out) == expected


@pytest.mark.parametrize("change", ["gone", "cut"])
def test_a_file_that_is_not_whole_is_made_again(tmp_path: Path, expected: dict[str, bytes], change: str) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", Source("layer.3"))
    [folder] = partials(tmp_path)
    shard = folder / "model-00001-of-00003.safetensors"
    shard.unlink() if change == "gone" else os.truncate(shard, 1000)
    source = Source()
    assert contents(run(tmp_path / "out", source)) == expected
    assert source.asked == [name for name in NAMES if name != "layer.2"]


def test_a_line_cut_short_is_not_believed(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", Source("layer.3"))
    [folder] = partials(tmp_path)
    with (folder / ".journal").open("ab") as file:
        file.write(b'"layer.4"')
    source = Source()
    assert contents(run(tmp_path / "out", source)) == expected
    assert source.asked == NAMES[3:]


def test_companions_and_config_are_those_of_the_last_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", Source("layer.3"), extra={"old.txt": "old"})
    out = run(tmp_path / "out", Source(), extra={"new.txt": "new"}, config={"a": 2})
    assert json.loads((out / "config.json").read_text()) == {"a": 2}
    assert (out / "new.txt").exists()
    assert not (out / "old.txt").exists()


def test_a_tensor_is_noted_only_after_its_data_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    append, sync = weights.Journal._append, os.fsync
    monkeypatch.setattr(weights, "BATCH", 1)

    def noted(self: weights.Journal, words: object) -> None:
        events.extend(w for w in list(words) if w in NAMES)  # type: ignore[call-overload]
        append(self, list(words))  # type: ignore[call-overload]

    def synced(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().suffix == ".safetensors":
            events.append("data")
        sync(file)

    monkeypatch.setattr(weights.Journal, "_append", noted)
    monkeypatch.setattr(os, "fsync", synced)
    run(tmp_path / "out", Source())
    assert events[:12] == [event for name in NAMES for event in ("data", name)]


@pytest.mark.parametrize("fingerprint", ["", "other"])
@pytest.mark.parametrize("resume", [False, True])
def test_two_at_once(tmp_path: Path, expected: dict[str, bytes], fingerprint: str, resume: bool) -> None:
    refused: list[str] = []

    def blocks(name: str) -> Iterator[Tensor]:
        if name == "layer.2":
            with pytest.raises(
                OutputError, match=r"another run is writing this output: .* lock of .*\.out\.partial-"
            ) as e:
                run(tmp_path / "out", Source(), resume=resume, fingerprint=fingerprint)
            refused.append(str(e.value))
        yield value(name)

    assert contents(run(tmp_path / "out", blocks)) == expected
    assert len(refused) == 1
    assert partials(tmp_path) == []


def test_a_file_system_without_locks(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", Source("layer.3"))
    source = Source()
    assert contents(run(tmp_path / "out", source)) == expected
    assert source.asked == NAMES[3:]


def test_overwriting_leaves_no_old_shards(tmp_path: Path) -> None:
    out = run(tmp_path / "out", Source(), max_shard_size=100_000)
    assert len(list(out.glob("*.safetensors"))) == 6
    (out / "model-00009-of-00009.safetensors").write_bytes(b"stale")
    run(tmp_path / "out", Source(), overwrite=True)
    assert sorted(path.name for path in out.glob("*.safetensors")) == [
        f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)
    ]


def test_partials_of_other_targets_stay(tmp_path: Path) -> None:
    for name in ("out2", "x" * 60 + "a"):
        with pytest.raises(RuntimeError):
            run(tmp_path / name, Source("layer.3"))
    run(tmp_path / "out", Source())
    run(tmp_path / ("x" * 60 + "b"), Source())
    for name in ("out2", "x" * 60 + "a"):
        source = Source()
        run(tmp_path / name, source)
        assert source.asked == NAMES[3:], name


def test_after_a_failure_the_journal_waits_for_the_disk_as_before(tmp_path: Path) -> None:
    """Not at each tensor: what failed is not counted any more."""
    journal, synced = weights.Journal(tmp_path, "f", {"file": Layout.of(INFOS)}), []

    def fails(_file: str) -> None:
        raise OSError("input/output error")

    with pytest.raises(OSError, match="input/output error"):
        journal.add(NAMES[0], "file", weights.BATCH, fails)
    journal.add(NAMES[1], "file", 1, synced.append)
    assert synced == []
    assert journal.done == set()
    journal.add(NAMES[2], "file", weights.BATCH - 1, synced.append)
    assert synced == ["file"]
    assert journal.done == {NAMES[1], NAMES[2]}
    journal.close()


def cut_off(folder: Path) -> Path:
    """The partial folder of a run that stopped at the fourth of six tensors."""
    with pytest.raises(RuntimeError):
        run(folder / "out", Source("layer.3"))
    [found] = partials(folder)
    return found


@pytest.mark.parametrize("what", ["link", "hard link", "folder", "link to a folder", "link to nothing"])
@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", ".journal"])
def test_what_is_no_file_of_its_own_is_made_again(
    tmp_path: Path, expected: dict[str, bytes], name: str, what: str
) -> None:
    """An input's file, of the right size, and what else may lie there: nothing is written through it."""
    path, mine = cut_off(tmp_path) / name, tmp_path / "mine"
    data = path.read_bytes()
    path.unlink()
    (mine / "folder").mkdir(parents=True)
    (mine / "file").write_bytes(data)
    if what == "folder":
        path.mkdir()
    elif what == "hard link":
        path.hardlink_to(mine / "file")
    else:
        path.symlink_to(mine / {"link": "file", "link to a folder": "folder", "link to nothing": "none"}[what])
    assert contents(run(tmp_path / "out", Source())) == expected
    assert (mine / "file").read_bytes() == data
    assert sorted(found.name for found in mine.iterdir()) == ["file", "folder"]
    assert partials(tmp_path) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_partial_folder_that_is_a_link_is_refused(tmp_path: Path, resume: bool) -> None:
    folder, mine = cut_off(tmp_path), tmp_path / "mine"
    folder.rename(mine)
    folder.symlink_to(mine)
    before = contents(mine)
    with pytest.raises(OutputError, match=rf"could not be written: .*{folder.name}"):
        run(tmp_path / "out", Source(), resume=resume)
    assert contents(mine) == before


@pytest.mark.parametrize("line", [b"[1, 2]", b"[" * 100_000, b"{}", b"7"])
def test_a_line_that_names_no_tensor(tmp_path: Path, expected: dict[str, bytes], line: bytes) -> None:
    with (cut_off(tmp_path) / ".journal").open("ab") as file:
        file.write(line + b"\n")
    assert contents(run(tmp_path / "out", Source())) == expected


def test_files_are_not_opened_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        DirectFile(tmp_path / "link")


def test_an_output_that_cannot_be_begun_again_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_off(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutputError, match=r"Finished tensors are kept in .* with resume to continue"):
            run(tmp_path / "out", Source())
    assert partials(tmp_path) == [folder]
    source = Source()
    run(tmp_path / "out", source)
    assert source.asked == NAMES[3:]

"""Reading ahead: every byte of the inputs, all models at one pace, within bounds; where it cannot be, no word."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from symfuse import readahead

Read = list[tuple[str, int, int]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """What is asked for: file, position, length."""
    asked: Read = []

    def sendfile(_out: int, file: int, start: int, count: int) -> int:
        asked.append((str(Path(f"/proc/self/fd/{file}").readlink()), start, count))
        return count

    monkeypatch.setattr(os, "sendfile", sendfile)
    monkeypatch.setattr(readahead, "PIECE", 10)
    return asked


def model(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name.replace("_", ".")).write_bytes(bytes(size))
    return folder


def begin(*sources: str | Path) -> None:
    thread = readahead.read_ahead(map(str, sources))
    assert thread is not None
    thread.join()


def test_every_byte_once_and_models_in_turns(tmp_path: Path, read: Read) -> None:
    a = model(tmp_path / "a", one_safetensors=25, two_safetensors=5, config_json=3)
    b = model(tmp_path / "b", x_safetensors=12, x_bin=99)
    begin(a, b, a)
    one, two, x = str(a / "one.safetensors"), str(a / "two.safetensors"), str(b / "x.safetensors")
    assert read == [(one, 0, 10), (x, 0, 10), (one, 10, 10), (x, 10, 2), (one, 20, 5), (two, 0, 5)]


def test_no_more_than_a_share_of_memory(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    a = model(tmp_path / "a", x_safetensors=1000)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 40, "SC_PAGE_SIZE": 10}.__getitem__)
    begin(a)
    assert sum(count for _, _, count in read) == 400 // readahead.SHARE


@pytest.mark.parametrize(("limit", "most"), [("200\n", 200), ("800\n", 400), ("max\n", 400)])
def test_nor_of_what_the_control_group_may_have(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    a = model(tmp_path / "a", x_safetensors=1000)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 40, "SC_PAGE_SIZE": 10}.__getitem__)
    monkeypatch.setattr(readahead, "GROUP", tmp_path / "memory.max")
    readahead.GROUP.write_text(limit)
    begin(a)
    assert sum(count for _, _, count in read) == most // readahead.SHARE


def test_the_system_does_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = model(tmp_path / "a", one_safetensors=25, two_safetensors=2**20)
    sendfile, read = os.sendfile, list[int]()

    def counted(*place: int) -> int:
        read.append(sendfile(*place))
        return read[-1]

    monkeypatch.setattr(os, "sendfile", counted)
    begin(a)
    assert read == ([25, 2**20] if sys.platform == "linux" else [])  # elsewhere only into sockets


def test_pipes_are_left_to_who_reads_them(tmp_path: Path, read: Read) -> None:
    """To open one waits until somebody writes into it."""
    a = model(tmp_path / "a", x_safetensors=1)
    os.mkfifo(a / "y.safetensors")
    os.mkfifo(tmp_path / "r.yml")
    done = threading.Event()

    def look() -> None:
        begin(a, tmp_path / "r.yml")
        done.set()

    threading.Thread(target=look, daemon=True).start()
    assert done.wait(60)
    assert [Path(file).name for file, _, _ in read] == ["x.safetensors"]


def test_the_models_of_a_recipe_and_adapters(tmp_path: Path, read: Read) -> None:
    names = [model(tmp_path / name, x_bin=1) for name in "abc"]
    recipe = tmp_path / "r.yml"
    recipe.write_text(f"models: [{{model: '{names[0]}'}}, {{model: {names[1]}+{names[2]}}}]\nt: 0.5\n")
    begin(recipe)
    assert [Path(file).parent for file, _, _ in read] == names


def test_nothing_to_read(tmp_path: Path) -> None:
    assert readahead.read_ahead(["no/such", "", "a\0b", str(tmp_path), str(tmp_path / "r.yml")]) is None


def test_systems_that_cannot_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: int) -> int:
        raise OSError(88, "not a socket")

    monkeypatch.setattr(os, "sendfile", refuse)
    begin(model(tmp_path / "a", x_safetensors=1))

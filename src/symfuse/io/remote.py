"""Files and folders by URL, through fsspec, with the methods of `Path` that reading and writing a model needs.

Credentials and settings are those of the store's own package, from its files and environment variables.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import unquote, urljoin

from symfuse.errors import OptionError, masked
from symfuse.messages import first_line

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")  # chained URLs of fsspec (zip::s3) are not supported
CONFIG = "config.json"
LARGEST = 256_000_000  # bytes of a file that is read whole: configs, indices, tokenizers
_BLOCK = 1 << 20
_LINK = re.compile(r"""<a\s[^<>]*?href=["']([^"'<>?#]+)["']""", re.IGNORECASE)  # in a page that lists a folder
SILENCE = 60  # seconds that a web server may send nothing
INDEX = ".safetensors.index.json"  # after the stem of the weight files
# Requested from a server that lists nothing.
USUAL = (
    CONFIG, f"model{INDEX}", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "spiece.model", "chat_template.jinja", "preprocessor_config.json", "processor_config.json", "modules.json",
    "adapter_config.json", "adapter_model.safetensors", "LICENSE",
)  # fmt: skip
# Fields of a store's information on an object that change with its content; fsspec's memory has only `created`.
_MARKS = (
    "Last-Modified", "ETag", "etag", "generation", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified",
    "created",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Remote:
    """A file or a folder by its URL. Errors of its store are raised as OSError. Its text hides credentials."""

    url: str

    @property
    def name(self) -> str:
        return self.as_posix().rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        return masked(self.url)

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    def __truediv__(self, name: str | PurePath) -> Remote:
        return Remote(f"{self.as_posix()}/{name}{self.url.removeprefix(self.as_posix())}")

    def as_posix(self) -> str:
        """The URL, for web servers without the query."""
        return self.url.partition("?")[0] if self.of_web else self.url

    @property
    def of_web(self) -> bool:
        return self.url.lower().startswith(("http://", "https://"))

    def resolve(self) -> Remote:
        """A normal form for comparisons, not for opening: the store's first name, its host, and the path as the store
        reads it. Unchanged if the store cannot be opened."""
        try:
            with self._store() as (store, path):
                kind = store.protocol if isinstance(store.protocol, str) else store.protocol[0]
                host = store.storage_options.get("host") or ""
        except OptionError:
            return self
        return Remote(f"{kind}://{host}{posixpath.normpath('/' + path.lstrip('/'))}")

    @property
    def of_process(self) -> bool:
        """Whether it is in the memory of this process, and is lost with it."""
        return self.resolve().url.startswith("memory://")

    def iterdir(self) -> Iterator[Remote]:
        """The current entries of the folder, without fsspec's cache."""
        with self._store() as (store, path):
            store.invalidate_cache(path)
            listing = _listed_by_web(self, store) if self.of_web else store.ls(path, detail=True)
            listed = [str(entry["name"]).rstrip("/") for entry in listing]
        # Some stores list the folder itself.
        yield from (self / name.rpartition("/")[2] for name in listed if name.strip("/") != path.strip("/"))

    def glob(self, pattern: str) -> Iterator[Remote]:
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str) -> Iterator[Remote]:
        for path in self.iterdir():
            yield from (path,) if fnmatchcase(path.name, pattern) else ()
            yield from path.rglob(pattern) if path.is_dir() else ()

    def exists(self) -> bool:
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        return False

    def _kind(self) -> str | None:
        with self._store() as (store, path):
            try:
                if self.of_web and _serves(store, (self / CONFIG).url):
                    return "directory"
                return str(store.info(path)["type"])
            except FileNotFoundError as error:
                if self.of_web and error.__cause__ is not None and not _absent(error.__cause__):
                    raise error.__cause__ from None  # fsspec raises it for servers that fail or do not answer too
                return None

    def mark(self) -> tuple[int, str]:
        """The current size of the object, and a text that changes with its content."""
        with self._store() as (store, path):
            store.invalidate_cache(path)
            info = store.info(path)
        if info["size"] is None:
            raise OSError(f"{self}: the server does not say how large it is; download it first")
        return int(info["size"]), " ".join(str(info[key]) for key in _MARKS if info.get(key))

    def read_bytes(self) -> bytes:
        """The whole file. OSError if it has more than LARGEST bytes; no more are read, whatever size the store
        reports."""
        blocks: list[bytes] = []
        length = 0
        with self._store() as (store, path):
            how = {"block_size": 0, "size": 1} if self.of_web else {}  # as a stream, without asking for the size
            with store.open(path, **how) as file:
                while length <= LARGEST and (block := file.read(_BLOCK)):
                    blocks.append(block)
                    length += len(block)
        if length > LARGEST:
            raise OSError(f"{self} has more than {LARGEST / 1e6:,.0f} MB, too many for such a file; download it first")
        return b"".join(blocks)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read(self, start: int, stop: int) -> bytes:
        """A range of the bytes; only these are requested. OSError if the store sends others."""
        try:
            with self._store() as (store, path):
                if start == stop or not self.of_web:
                    data: bytes = store.cat_file(path, start=start, end=stop)
                else:  # not all of a large file, from a server that ignores ranges
                    with store.open(path, size=stop, block_size=stop - start, cache_type="none") as file:
                        file.seek(start)
                        data = file.read(stop - start)
        except OSError as error:
            if self.of_web and isinstance(error.__cause__, ValueError):  # fsspec's own message is for programmers
                raise OSError(f"{self}: the server does not support ranges; download it first") from error
            raise
        if len(data) > stop - start:
            raise OSError(f"{self}: the store sent {len(data)} bytes when asked for {stop - start}; download it first")
        return data

    def write_bytes(self, data: bytes) -> None:
        with self._store() as (store, path):
            store.pipe_file(path, data)

    def remove(self) -> None:
        with self._store() as (store, path):
            store.rm_file(path)

    @contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        """The file system of the URL, and the path in it. OptionError if it cannot be opened: its package is missing,
        it needs more than a URL, or it denies access."""
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            store, path = url_to_fs(self.url, **(_web_options() if self.of_web else {}))
        except ImportError as error:
            raise OptionError(f"{self.url} cannot be opened: {first_line(error)}{_package(self)}") from error
        except Exception as error:
            raise OptionError(
                f"{self.url} cannot be opened: {first_line(error)}; expected one such as s3://…"
            ) from error
        with _as_os_error(self.url):
            yield store, path


class RemoteFile:
    """A new object, uploaded while it is written, in order. head: its first bytes, sent with the next ones. before:
    called before anything is sent."""

    def __init__(self, place: Remote, head: bytes = b"", before: Callable[[], None] | None = None) -> None:
        self._place = place
        self._head = head
        self._before = before
        self._position = len(head)
        self._file: Any = None
        self._closed = False

    def write(self, position: int, data: memoryview) -> None:
        """Write the next bytes. position: the number of bytes before them."""
        assert position == self._position, "objects are written in order"
        file = self._opened()
        with _as_os_error(self._place.url):
            file.write(data)
        self._position += len(data)

    def _opened(self) -> Any:
        if self._file is None:
            if self._before is not None:
                self._before()
            with self._place._store() as (store, path):
                self._file = store.open(path, "wb")
                self._file.write(self._head)
        return self._file

    def close(self) -> None:
        """Wait until the upload is complete."""
        file = self._opened()
        with _as_os_error(self._place.url):
            file.close()
        self._closed = True

    def discard(self) -> None:
        """Remove it, if the store allows that. An upload that is not closed is aborted, so that another run's object of
        the same name stays; but some stores (memory, sftp) create the object as soon as it is opened."""
        from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

        with suppress(OSError), _as_os_error(self._place.url):
            if isinstance(self._file, AbstractBufferedFile) and not self._closed:
                try:
                    if self._file.offset is not None:  # something was sent
                        self._file.discard()
                finally:
                    self._file.closed = True  # else it is uploaded when it is garbage-collected
            elif self._file is not None:
                self._file.close()
                self._place.remove()


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Raise any error of a store's package as OSError, with the URL."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(masked(f"{url} does not exist")) from error
    except Exception as error:
        raise OSError(masked(f"{url}: {type(error).__name__}: {first_line(error)}")) from error


def _web_options() -> dict[str, Any]:
    """Timeouts for web servers."""
    from aiohttp import ClientTimeout

    return {"client_kwargs": {"timeout": ClientTimeout(total=300, sock_connect=SILENCE, sock_read=SILENCE)}}


def _package(place: Remote) -> str:
    return "; pip install 'symfuse[http]'" if place.of_web else ""


def _listed_by_web(folder: Remote, store: Any) -> list[dict[str, Any]]:
    """The files that a server lists; or, since most list nothing, the usual files that exist there."""
    base = f"{folder.as_posix()}/"
    with suppress(OSError, ValueError):
        links = (urljoin(base, link) for link in _LINK.findall(Remote(base).read_text()))
        inside = {link.rstrip("/") for link in links if link.startswith(base)}
        listed = sorted(link for link in inside if "/" not in link.removeprefix(base) and link != folder.as_posix())
        if f"{base}{CONFIG}" in listed:
            return [{"name": link} for link in listed]
    names = list(USUAL)
    with suppress(OSError, ValueError, AttributeError):
        names += sorted(set(json.loads((folder / f"model{INDEX}").read_bytes())["weight_map"].values()))
    return [{"name": f"{base}{name}"} for name in names if _serves(store, (folder / name).url)]


def _serves(store: Any, url: str) -> bool:
    """Whether a web server has a file and allows access to it. Other answers, such as a failure, are raised."""
    try:
        return bool(store.exists(url, strict=True))
    except Exception as error:
        if _absent(error):
            return False
        raise


def _absent(error: BaseException | None) -> bool:
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS


Place = Path | Remote  # where a file or folder is


def place_of(source: str | os.PathLike[str] | Remote) -> Place:
    """The place of a path or a URL; `file:///…` is a path, with %20 for a space. OptionError for a chained URL, and for
    files of other machines."""
    if not isinstance(source, str) or "://" not in source:
        return source if isinstance(source, Remote) else Path(source)
    scheme, _, path = source.partition("://")
    local = scheme.lower() in ("file", "local")
    if local:
        host, _, path = path.partition("/")
        if host.lower() not in ("", "localhost"):
            raise OptionError(
                f"{source} is on a machine {host}; expected a file of this one, such as file:///data/model"
            )
    if not _SCHEME.fullmatch(scheme) or not path.strip("/"):
        raise OptionError(f"{source} is not the URL of a folder; expected one such as s3://bucket/model")
    return Path(f"/{unquote(path).lstrip('/')}") if local else Remote(source.rstrip("/"))


def entries(folder: Place) -> list[Place]:
    """The entries of a folder, by name."""
    listed: list[Place] = [*folder.iterdir()]
    return sorted(listed, key=lambda path: path.name)


def below(folder: Place, path: Place) -> PurePosixPath:
    """The path of a file relative to a folder that contains it."""
    return PurePosixPath(path.as_posix().removeprefix(f"{folder.as_posix()}/"))


def read_range(path: Place, start: int, stop: int) -> bytes:
    """Bytes of a file; fewer if it ends before."""
    if isinstance(path, Remote):
        return path.read(start, stop)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)

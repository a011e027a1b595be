"""Models at URLs: read by ranges of bytes, written without renaming, and never half there."""

from __future__ import annotations

import gc
import json
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from torch import Tensor

import symfuse
from command import data, done, everything, run
from contract.tiny import MODELS
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, OutputError
from symfuse.executors import Threads
from symfuse.executors import threads as executor_module
from symfuse.io import Checkpoint, check_target
from symfuse.io.lazy import Held
from symfuse.io.objects import UNFINISHED, Old
from symfuse.io.remote import Remote, RemoteFile, place_of
from symfuse.io.safetensors_file import read_safetensors
from symfuse.io.target import overlap

SHARD = 8_000
COMPANIONS = {"tokenizer_config.json": b"{}\n", "1_Pooling/config.json": b'{"word_embedding_dimension": 20}\n'}


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    """The memory of fsspec, emptied."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    yield found
    found.store.clear()


class Uploads(MemoryFileSystem):
    """What real stores do: an object is there, as a whole, when its upload is closed. Under two names, on any host."""

    protocol = ("upload", "upload2")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    aborted: ClassVar[list[str]] = []
    before_it_is_there: ClassVar[dict[str, Any]] = {}  # by object: is called

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.rpartition("://")[2].rpartition("@")[2])
        return found

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, str]:
        return {"host": url.partition("://")[2].partition("@")[0]} if "@" in url else {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return UploadedFile(self, path, mode, block_size=1000) if mode == "wb" else super()._open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        MemoryFile(self, self._strip_protocol(path), value).commit()


class UploadedFile(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.sent = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += self.buffer.getvalue()
        if final:
            self.fs.before_it_is_there.get(self.path, lambda: None)()
            MemoryFile(self.fs, self.path, self.sent).commit()
        return True

    def discard(self) -> None:
        self.fs.aborted.append(self.path)


@pytest.fixture
def uploads() -> Uploads:
    for name in Uploads.protocol:
        fsspec.register_implementation(name, Uploads, clobber=True)
    for kept in (Uploads.store, Uploads.aborted, Uploads.before_it_is_there):
        kept.clear()
    return Uploads()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of several files, with others beside them, here."""
    place = MODELS["bert"]().to(torch.float32).replace(files=COMPANIONS).save(tmp_path / "model", max_shard_size=SHARD)
    assert isinstance(place, Path)
    return place


@pytest.fixture
def url(store: MemoryFileSystem, folder: Path) -> str:
    """The same model, there."""
    symfuse.open(folder).save("memory://models/a", max_shard_size=SHARD)
    return "memory://models/a"


def objects(store: MemoryFileSystem, url: str) -> dict[str, bytes]:
    path = "/" + url.partition("://")[2]
    return {name.removeprefix(f"{path}/"): store.cat_file(name) for name in store.find(path)}


def put(store: MemoryFileSystem, folder: Path, url: str, changes: Mapping[str, bytes] | None = None) -> str:
    for name, content in {**everything(folder), **(changes or {})}.items():
        store.pipe_file(f"{url}/{name}", content)
    return url


# -- there and back --------------------------------------------------------------------------------


def test_a_model_there_is_the_same_bytes(store: MemoryFileSystem, folder: Path, url: str, tmp_path: Path) -> None:
    assert objects(store, url) == everything(folder)
    assert sum(name.endswith(".safetensors") for name in objects(store, url)) > 2
    opened = symfuse.open(url)
    assert opened.name == "a"
    assert str(opened.folder) == url
    assert opened.companions() == COMPANIONS
    back = opened.save(tmp_path / "back", max_shard_size=SHARD)
    assert isinstance(back, Path)
    assert everything(back) == everything(folder)
    assert opened.lineage()["sha256"] == symfuse.open(folder).replace(name="a").lineage()["sha256"]
    assert opened.state() == symfuse.open(url).state()


def test_a_file_url_is_a_path(folder: Path, tmp_path: Path) -> None:
    opened = symfuse.open(f"file://{folder}")
    assert opened.folder == folder
    assert opened.save(f"file://{tmp_path}/out", max_shard_size=SHARD) == tmp_path / "out"
    assert everything(tmp_path / "out") == everything(folder)


def test_only_what_is_asked_for_is_read(store: MemoryFileSystem, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers at first, then a tensor as one range, and a part as its own."""
    place = Remote(f"{url}/{next(name for name in objects(store, url) if name.endswith('.safetensors'))}")
    read: list[int] = []
    whole = store.cat_file

    def spy(path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        found: bytes = whole(path, start=start, end=end, **kwargs)
        read.append(len(found))
        return found

    monkeypatch.setattr(store, "cat_file", spy)
    stored = read_safetensors(place)
    assert sum(read) == store.size(place.url) - sum(one.info.nbytes for one in stored.values())
    read.clear()
    one = max(stored.values(), key=lambda one: one.info.nbytes)
    tensor = one.read()
    assert read == [one.info.nbytes]
    read.clear()
    torch.testing.assert_close(one.part(3, 10), tensor.flatten()[3:10], rtol=0, atol=0)
    assert read == [7 * tensor.dtype.itemsize]


def test_recipes_may_name_urls(
    url: str, store: MemoryFileSystem, uploads: Uploads, tmp_path: Path, folder: Path
) -> None:
    """With signs in them that elsewhere begin a revision."""
    other = put(store, folder, "memory://user@host/b")
    (tmp_path / "recipe.yml").write_text(
        f"merge_method: linear\nmodels:\n- model: {url}\n  parameters: {{weight: 0.3}}\n"
        f"- model: {other}\n  parameters: {{weight: 0.7}}\n"
    )
    checked = data("check", str(tmp_path / "recipe.yml"), "-o", "upload://out/merged")
    assert checked["recipes"][0]["problems"] == []
    document = data("merge", str(tmp_path / "recipe.yml"), "upload://out/merged")
    assert document["output"] == "upload://out/merged"
    assert document["models"] == [url, "memory://***@host/b"]
    merged, same = symfuse.open("upload://out/merged"), symfuse.open(folder)
    for name in same:
        torch.testing.assert_close(merged[name], same[name])
    written = json.loads(objects(uploads, "upload://out/merged")["symfuse.json"])
    assert [one["folder"] for one in written["inputs"]] == [url, "memory://***@host/b"]  # no credentials


def test_seeds_do_not_depend_on_where_a_model_is(url: str, folder: Path, tmp_path: Path) -> None:
    """A folder's own name seeds random masks."""
    names = {"here": str(folder.rename(folder.with_name("a"))), "there": url}
    base = MODELS["bert"]().to(torch.float32)
    changed = {n: t * 2 if t.is_floating_point() else t for n, t in base.items()}
    start = symfuse.open(changed, config=base.config, name="base")
    here, there = (
        symfuse.merge([start, symfuse.open(name, name=name)], method="dare_linear", base=0, parameters={"density": 0.5})
        for name in names.values()
    )
    for name in here:
        assert torch.equal(here[name], there[name])


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nosuch://x/y", r"nosuch://x/y cannot be opened: Protocol not known: nosuch"),
        ("memory://models/none", "memory://models/none does not exist"),
        ("simplecache::memory://models/a", "is not the URL of a folder"),
        ("memory://", "is not the URL of a folder"),
        ("memory://models/a/config.json", "is a file; give the folder"),
    ],
)
def test_urls_that_are_no_models(url: str, source: str, message: str) -> None:
    with pytest.raises((CheckpointError, OptionError), match=message):
        symfuse.open(source)


def test_a_package_that_a_store_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(OptionError, match=r"s3://bucket/model cannot be opened: .*s3fs"):
        symfuse.open("s3://bucket/model")


def test_what_a_store_raises_is_said_as_an_error_of_ours(url: str, store: MemoryFileSystem, monkeypatch: Any) -> None:
    def denied(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(store, "info", denied)
    with pytest.raises(CheckpointError, match=r"memory://models/a cannot be read: .*RuntimeError: no credentials"):
        symfuse.open(url)


def test_a_revision_is_of_hub_ids(url: str) -> None:
    with pytest.raises(OptionError, match="is a URL"):
        symfuse.open(url, revision="main")


def test_torch_files_are_refused(store: MemoryFileSystem, folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: only safetensors can be read"):
        symfuse.open(put(store, folder, "memory://bin"))


def header(entries: Mapping[str, Any], size: int) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "is cut short: expected at least 8 bytes, found 3"),
        (struct.pack("<Q", 100) + b"{}", "is cut short inside its header"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 7), "is cut short: expected"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 9), "is longer than its header says"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12), "tensors leave a gap at byte 4"),
        (
            header(
                {
                    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
                },
                12,
            ),
            "tensors overlap at byte 4",
        ),
    ],
)
def test_damaged_files(store: MemoryFileSystem, content: bytes, message: str) -> None:
    store.pipe_file("memory://bad/model.safetensors", content)
    store.pipe_file("memory://bad/config.json", b'{"model_type": "none"}')
    with pytest.raises(CheckpointError, match=message):
        symfuse.open("memory://bad")


@pytest.mark.parametrize("change", ["size", "content", "gone", "cut"])
def test_an_object_that_has_changed_is_noticed(
    store: MemoryFileSystem, folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = symfuse.open(put(store, folder, "memory://models/c"))
    name = next(iter(opened))
    path = f"memory://models/c/{opened.file_of(name)}"
    content = store.cat_file(path)
    if change == "size":
        store.pipe_file(path, content + b" ")
    elif change == "content":
        store.pipe_file(path, content)
        written = store.store[path.removeprefix("memory:/")]
        written.created = datetime.now(UTC) + timedelta(seconds=1)
    elif change == "gone":
        store.rm_file(path)
    else:
        monkeypatch.setattr(store, "cat_file", lambda *_, **__: content[:5])
    message = {
        "size": f"it had {len(content)} bytes and has {len(content) + 1}",
        "content": "it was written to",
        "gone": "does not exist",
        "cut": "came as 5",
    }[change]
    what = "cannot be read" if change == "cut" else "has changed since it was opened"
    with pytest.raises(CheckpointError, match=f"{what}: .*{message}"):
        opened[name]


# -- what cannot be written, and what is left ------------------------------------------------------


def test_what_is_there_is_replaced_only_if_asked(store: MemoryFileSystem, folder: Path, url: str) -> None:
    model, before = symfuse.open(folder), objects(store, url)
    with pytest.raises(OutputError, match="memory://models/a exists; choose another output, or replace it"):
        model.save(url)
    assert objects(store, url) == before
    store.pipe_file(f"{url}/old.txt", b"old")
    with pytest.raises(OutputError, match=r"not part of a model: old\.txt"):
        model.save(url, overwrite=True)
    store.mv(f"{url}/old.txt", f"{url}/symfuse.json")
    model.save(url, overwrite=True)
    assert objects(store, url).keys() == {*COMPANIONS, "config.json", "model.safetensors"}
    store.pipe_file("memory://notes/notes.txt", b"mine")
    with pytest.raises(OutputError, match=r"is not a model folder .* it holds notes\.txt"):
        model.save("memory://notes", overwrite=True)
    with pytest.raises(OutputError, match=r"notes\.txt is a file"):
        model.save("memory://notes/notes.txt", overwrite=True)


def test_an_input_is_never_written_over(url: str) -> None:
    for target, relation in ((url, "is"), (f"{url}/x", "lies inside"), ("memory://models", "holds")):
        with pytest.raises(OutputError, match=f"the output {target} {relation} the input {url}"):
            symfuse.open(url).save(target, overwrite=True)


def test_places_touch_or_not(tmp_path: Path) -> None:
    assert overlap(Remote("s3://b/x"), Remote("s3://b/xy")) == ""
    assert overlap(tmp_path, Remote(f"memory://{tmp_path}")) == ""
    assert overlap(tmp_path, Path(tmp_path.root)) == "lies inside"
    assert place_of("s3://b/x/") == Remote("s3://b/x")
    assert place_of("a/b") == Path("a/b")


def test_one_place_by_several_urls(uploads: Uploads) -> None:
    for one, two, relation in (
        ("memory:///q/m", "memory://q/m", "is"),
        ("memory://q//m", "memory://q/m", "is"),
        ("memory://q/./m/x", "memory://q/m", "lies inside"),
        ("upload://q/m", "upload2://q/m", "is"),
        ("upload2://q", "upload:///q/m", "holds"),
        ("upload2://q/m", "memory://q/m", ""),
        ("upload://host@q/m", "upload2://host@/q/m", "is"),
        ("upload://host@q/m", "upload://other@q/m", ""),
    ):
        assert overlap(Remote(one), Remote(two)) == relation, (one, two)


def test_an_input_by_another_url_is_never_written_over(store: MemoryFileSystem, url: str) -> None:
    before = objects(store, url)
    with pytest.raises(OutputError, match="the output memory://models/a is the input memory:///models/a"):
        symfuse.open("memory:///models/a").save(url, overwrite=True)
    assert objects(store, url) == before


def test_urls_of_files(tmp_path: Path) -> None:
    for source in ("file:///a%20b/c", "file://localhost/a%20b/c", "local:///a b/c", "FILE://LOCALHOST//a b/c"):
        assert place_of(source) == Path("/a b/c")
    for source in ("file://host/a", "file://a", "file://~/a"):
        with pytest.raises(OptionError, match=r"is on a machine .*; expected a file of this one"):
            place_of(source)
    for source in ("file://", "file:///", "file://localhost", "file://localhost/"):
        with pytest.raises(OptionError, match="is not the URL of a folder"):
            place_of(source)


class Failing(Held):
    """Fails when the last of its tensors is asked for, or another."""

    def saved(self, name: str) -> Iterator[Tensor]:
        if name == list(self)[self.at]:
            raise self.error
        yield self[name]

    error: BaseException
    at = -1


@pytest.mark.parametrize("kind", [CheckpointError, KeyboardInterrupt])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_nothing(
    store: MemoryFileSystem, url: str, kind: type[BaseException], overwrite: bool
) -> None:
    tensors = Failing({f"t{n}": torch.ones(1000) for n in range(5)})
    tensors.error = error = kind("stop")
    target = url if overwrite else "memory://out/x"
    with pytest.raises(kind) as caught:
        Checkpoint(tensors, {}, name="x").save(target, max_shard_size=4000, overwrite=overwrite, threads=1)
    assert caught.value is error
    assert caught.value.__notes__ == [f"No part of {target} was left behind"]
    assert objects(store, target) == {}


@pytest.mark.parametrize("kind", [CheckpointError, KeyboardInterrupt])
def test_what_is_there_stays_until_the_first_of_the_new_is_put(
    store: MemoryFileSystem, url: str, kind: type[BaseException]
) -> None:
    tensors, before = Failing({f"t{n}": torch.ones(1000) for n in range(5)}), objects(store, url)
    tensors.error, tensors.at = kind("stop"), 0
    with pytest.raises(kind) as caught:
        Checkpoint(tensors, {}, name="x").save(url, max_shard_size=4000, overwrite=True, threads=1)
    assert caught.value.__notes__ == [f"{url} is unchanged"]
    assert objects(store, url) == before


def test_a_failure_in_an_upload_leaves_nothing(uploads: Uploads, folder: Path) -> None:
    assert objects(uploads, put(uploads, folder, "upload://models/a")) == everything(folder)
    tensors = Failing({f"t{n}": torch.ones(1000) for n in range(2)})
    tensors.error = CheckpointError("stop")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tensors, {}, name="x").save("upload://models/a", overwrite=True, threads=1)
    assert caught.value.__notes__ == ["No part of upload://models/a was left behind"]
    assert objects(uploads, "upload://models/a") == {}
    assert uploads.aborted == ["/models/a/model.safetensors"]


@pytest.mark.parametrize("kind", [OptionError, TypeError])
@pytest.mark.parametrize("there", [True, False])
def test_work_that_cannot_begin_changes_nothing(
    uploads: Uploads, folder: Path, kind: type[Exception], there: bool
) -> None:
    """There is no cluster, or the work cannot be pickled."""

    class Refuses(Threads):
        elsewhere = True

        def start(self, *_: Any, **__: Any) -> Any:
            raise kind("cannot begin")

    url = put(uploads, folder, "upload://models/a")
    target = url if there else "upload://out/x"
    before = objects(uploads, target)
    with pytest.raises(kind, match="cannot begin") as caught:
        symfuse.open(folder).save(target, overwrite=True, executor=Refuses(1))
    assert caught.value.__notes__ == [f"{url} is unchanged" if there else f"No part of {target} was left behind"]
    assert objects(uploads, target) == before


def test_a_store_that_does_not_answer_loses_nothing(
    store: MemoryFileSystem, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment at which it is asked what is there."""
    before, model = objects(store, url), symfuse.open(folder)
    answers = Remote.mark

    def none(place: Remote) -> tuple[int, str]:
        monkeypatch.setattr(Remote, "mark", answers)  # for the next
        raise OSError("no answer")

    monkeypatch.setattr(Remote, "mark", none)
    with pytest.raises(OutputError, match="no answer"):
        model.save(url, overwrite=True)
    assert objects(store, url) == before


def test_who_is_late_retires_no_new_model(store: MemoryFileSystem, url: str, folder: Path) -> None:
    old = Old.at(Remote(url))
    symfuse.open(folder).save(url, overwrite=True)
    written = objects(store, url)
    old.retire()
    assert objects(store, url) == written
    Old.at(Remote(url)).retire()
    assert written.keys() - objects(store, url).keys() == {"config.json"}


@pytest.mark.parametrize("there", [True, False])
def test_what_a_killed_run_has_left_is_replaced_if_asked(
    store: MemoryFileSystem, url: str, folder: Path, there: bool
) -> None:
    model, left = symfuse.open(folder), {}  # type: Checkpoint, dict[str, bytes]
    target = url if there else "memory://out"

    class Watched(Held):
        def saved(self, name: str) -> Iterator[Tensor]:
            if name == list(self)[-1]:
                left.update(objects(store, target))
            yield self[name]

    Checkpoint(Watched(model), {}, name="x").save(target, overwrite=True, max_shard_size=SHARD, threads=1)
    assert "config.json" not in left
    assert len(left) > 2
    assert UNFINISHED not in objects(store, target)
    for name, content in left.items():
        store.pipe_file(f"memory://killed/{name}", content)
    with pytest.raises(OutputError, match="memory://killed exists; choose another output, or replace it"):
        model.save("memory://killed")
    model.save("memory://killed", overwrite=True, max_shard_size=SHARD)
    assert objects(store, "memory://killed") == everything(folder)


def test_config_comes_last_and_goes_first(store: MemoryFileSystem, url: str, folder: Path, monkeypatch: Any) -> None:
    """At no time is there a config beside files that are not all of one model."""
    order: list[str] = []

    def noting(what: str) -> None:
        plain = getattr(MemoryFileSystem, what)

        def call(self: MemoryFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
            order.append(f"{what} {path.removeprefix('/models/a/')}")
            return plain(self, path, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, what, call)  # each thread has its own

    for what in ("pipe_file", "rm_file", "open"):
        noting(what)
    symfuse.open(folder).save(url, overwrite=True, max_shard_size=SHARD)
    assert order[:3] == [f"pipe_file {UNFINISHED}", f"open {UNFINISHED}", "rm_file config.json"]
    assert order[-1] == f"rm_file {UNFINISHED}"
    written = [step for step in order if step.startswith(("pipe_file", "open model-"))]
    assert sum(step.startswith("open model-") for step in written) > 2
    assert written[-1] == "pipe_file config.json"
    assert written.count("pipe_file config.json") == 1


def test_a_store_that_refuses(store: MemoryFileSystem, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise RuntimeError("quota exceeded")

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(OutputError, match=r"out could not be written: .*quota exceeded.*\. No part of .*out was left"):
        symfuse.open(folder).save("memory://out")
    assert objects(store, "memory://out") == {}


def test_what_could_not_be_removed_is_said(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError("denied")

    tensors = Failing({"t0": torch.ones(1000), "t1": torch.ones(1000)})
    tensors.error = CheckpointError("damaged")
    monkeypatch.setattr(store, "rm_file", denied)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tensors, {}, name="x").save("memory://out", max_shard_size=4000, threads=1)
    assert "could not be removed" in caught.value.__notes__[0]
    with pytest.raises(CheckpointError, match=r"memory://out holds 1 of 2 shards; absent: model-00002-of-00002"):
        symfuse.open("memory://out")


def test_values_that_do_not_fit_are_refused_there_too(store: MemoryFileSystem) -> None:
    wide = Checkpoint({"t": torch.full((10,), 1e30)}, {}, name="x").to(torch.float16)
    with pytest.raises(IncompatibleError, match="do not fit in float16"):
        wide.save("memory://out")
    assert objects(store, "memory://out") == {}


def test_nothing_is_resumed_at_a_url(folder: Path, store: MemoryFileSystem) -> None:
    with pytest.raises(OptionError, match="leave resume out"):
        symfuse.open(folder).save("memory://out", resume=True, fingerprint="x")
    with pytest.raises(OptionError, match="memory://out: an unfinished output at a URL is not kept"):
        check_target("memory://out", resume=True)
    check_target(folder.with_name("out"), resume=True)


def test_objects_are_written_in_order(store: MemoryFileSystem) -> None:
    file = RemoteFile(Remote("memory://out/x"))
    file.write(0, memoryview(b"ab"))
    with pytest.raises(AssertionError, match="in order"):
        file.write(5, memoryview(b"c"))
    file.discard()
    assert objects(store, "memory://out") == {}


@pytest.mark.parametrize("size", [0, 100, 5000])
@pytest.mark.parametrize("good", [b"good", None])
def test_an_upload_that_is_given_up_touches_nothing(uploads: Uploads, good: bytes | None, size: int) -> None:
    """Before it was begun, before anything was sent, and after."""
    if good is not None:
        uploads.pipe_file("upload://out/x", good)
    file = RemoteFile(Remote("upload://out/x"), b"head")
    if size:
        file.write(4, memoryview(bytes(size)))
    file.discard()
    del file
    gc.collect()  # what is forgotten is closed
    assert objects(uploads, "upload://out") == ({} if good is None else {"x": good})
    assert uploads.aborted == ["/out/x"] * (size > 1000)


def test_an_upload_that_is_closed_and_not_wanted_any_more(uploads: Uploads) -> None:
    file = RemoteFile(Remote("upload://out/x"), b"head", lambda: uploads.pipe_file("upload://out/before", b""))
    assert objects(uploads, "upload://out") == {}
    file.write(4, memoryview(b"tail"))
    assert objects(uploads, "upload://out") == {"before": b""}
    file.close()
    assert objects(uploads, "upload://out") == {"before": b"", "x": b"headtail"}
    file.discard()
    assert objects(uploads, "upload://out") == {"before": b""}


def test_an_upload_that_cannot_be_stopped_is_removed_when_it_ends(
    uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "GRACE", 0.1)
    reached, goes_on = threading.Event(), threading.Event()

    def last() -> None:
        reached.set()
        assert goes_on.wait(60)

    uploads.before_it_is_there["/out/model-00001-of-00002.safetensors"] = last

    class Two(Held):
        def saved(self, name: str) -> Iterator[Tensor]:
            if name == "t1":
                assert reached.wait(60)
                raise CheckpointError("damaged")
            yield self[name]

    others = set(threading.enumerate())
    model = Checkpoint(Two({"t0": torch.ones(1000), "t1": torch.ones(1000)}), {}, name="x")
    with pytest.raises(CheckpointError, match="damaged") as caught:
        model.save("upload://out", max_shard_size=4000, threads=2)
    late = [thread for thread in threading.enumerate() if thread not in others]
    assert late
    assert caught.value.__notes__ == [
        "An upload to upload://out could not be stopped: it is removed when it ends, if this process still runs"
    ]
    assert objects(uploads, "upload://out") == {}
    goes_on.set()
    for thread in late:
        thread.join(60)
    assert objects(uploads, "upload://out") == {}


# -- the command line ------------------------------------------------------------------------------


def test_an_alignment_at_a_url(uploads: Uploads, url: str, folder: Path) -> None:
    document = data("align", url, "--to", str(folder), "-o", "upload://out/moved", "--axes", "ffn", "--no-verify")
    assert document["output"] == "upload://out/moved"
    assert {"alignment.symfuse", "symfuse.json", "README.md"} <= objects(uploads, "upload://out/moved").keys()


def test_verbs_that_write_here_only_say_so(url: str) -> None:
    result = run("collect", url, "--data", "x.csv", "-o", "memory://out/statistics")
    assert result.exit_code == 2
    assert "memory://out/statistics is a URL; name a folder" in result.output


def test_a_target_is_checked_before_the_work(uploads: Uploads, folder: Path) -> None:
    url = put(uploads, folder, "upload://models/a")
    check_target("upload://new")
    with pytest.raises(OutputError, match="exists"):
        check_target(url)
    result = run("merge", url, url, "-o", url)
    assert result.exit_code == 8
    assert "is the input" in result.output


@pytest.mark.parametrize("verb", [["merge", "URL"], ["align", "URL", "--to", "URL", "--axes", "ffn"]])
def test_no_command_writes_to_what_ends_with_it(verb: list[str], url: str, store: MemoryFileSystem) -> None:
    """Nor does work in other processes, each of which has a memory of its own."""
    for place in ("memory://out", "memory:///out/x"):
        result = run(*(url if word == "URL" else word for word in verb), "-o", place)
        assert result.exit_code == 2
        assert f"{place} is in the memory of this process" in result.stderr

    class Elsewhere(Threads):
        elsewhere = True

    with pytest.raises(OptionError, match="memory://out is in the memory of this process"):
        symfuse.open(url).save("memory://out", executor=Elsewhere(1))
    assert objects(store, "memory://out") == {}
    assert symfuse.open(url).save("memory://out") == Remote("memory://out")


@pytest.mark.parametrize("url", ["dir://x", "dbfs://a/b", "reference://x", "generic:///p", "asyncwrapper:///p"])
def test_stores_that_need_more_than_a_url_are_refused(url: str, tmp_path: Path) -> None:
    MODELS["bert"]().save(tmp_path / "a")
    for words in (["inspect", url], ["merge", str(tmp_path / "a"), "-o", url]):
        result = run(*words)
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code in {2, 3}
        assert f"symfuse: {url} cannot be opened: " in result.stderr


def test_inspect_reads_a_url(url: str, folder: Path) -> None:
    ours, theirs = done("inspect", url).output, done("inspect", str(folder)).output
    assert ours.replace(url, "A") == theirs.replace(str(folder), "A")

"""Merging and matching on a real Ray cluster of several processes: the same bits, whatever happens to its workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import symfuse
from command import data, everything, run
from contract.tiny import MODELS, moving
from symfuse.architectures import ARCHITECTURES
from symfuse.errors import CheckpointError, OptionError, OutputError, SymfuseError
from symfuse.executors import Ray
from symfuse.executors import ray as module
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.lazy import Lazy
from symfuse.model import Model

Ray()  # which tells Ray, before it is imported, what not to print

import ray as package  # noqa: E402
from ray import exceptions  # noqa: E402

# Classes of this file travel as their code: no worker can import it.
package.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHARD = 8_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    """Three worker processes, until the tests of this file are over."""
    before = signal.getsignal(signal.SIGTERM)
    with Ray(workers=3) as ray:
        ray.connect()
        assert signal.getsignal(signal.SIGTERM) is before
        yield ray


@pytest.fixture
def ray(cluster: Ray) -> Ray:
    """What one test did is counted alone."""
    return Ray()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, of which the second is the first moved, and a little noise."""
    place = tmp_path_factory.mktemp("models")
    a = MODELS["bert"]().to(torch.float32)
    a.save(place / "a", max_shard_size=SHARD)
    b = moving(Model.of(a).spec, 1)(symfuse.open(place / "a"))
    noisy = {name: t + 0.01 * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)) for name, t in b.items()}
    torch.save(noisy, place / "b.bin")
    (place / "b").mkdir()
    (place / "b.bin").rename(place / "b" / "pytorch_model.bin")
    (place / "b" / "config.json").write_bytes((place / "a" / "config.json").read_bytes())
    return {name: place / name for name in "ab"}


INFOS = {f"t{n}": TensorInfo(torch.float32, (50, 40)) for n in range(6)}


class Slow(Lazy):
    """Tensors that take their time, and note in a folder who made them; at one of them something happens."""

    size = 50 * 40 * 4  # bytes of a tensor, which is a shard

    def __init__(
        self, notes: Path, seconds: float = 0.2, at: str = "", happens: Callable[[Path], Any] | None = None
    ) -> None:
        super().__init__(INFOS)
        self.notes, self.seconds, self.at, self.happens = notes, seconds, at, happens

    def wide(self, name: str) -> Tensor:
        return torch.randn(50, 40, generator=torch.Generator().manual_seed(int(name[1:])))

    def saved(self, name: str) -> Iterator[Tensor]:
        with (self.notes / name).open("a") as file:
            file.write(f"{os.getpid()}\n")
        first, second = self[name].split(25)
        yield first
        if name == self.at and self.happens is not None:
            self.happens(self.notes)
        time.sleep(self.seconds)
        yield second

    def made(self) -> dict[str, list[int]]:
        """By tensor, the processes that began it."""
        return {path.name: [int(line) for line in path.read_text().split()] for path in sorted(self.notes.iterdir())}


def slow(place: Path, **how: Any) -> tuple[Slow, Checkpoint]:
    place.mkdir()
    tensors = Slow(place, **how)
    return tensors, Checkpoint(tensors, {"model_type": "none"}, name="slow")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    place = tmp_path_factory.mktemp("expected")
    _, checkpoint = slow(place / "notes", seconds=0.0)
    return everything(checkpoint.save(place / "out", max_shard_size=Slow.size))  # type: ignore[arg-type]


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
def test_merges_are_the_same_bytes(ray: Ray, folders: Mapping[str, Path], tmp_path: Path, method: str) -> None:
    a, b = (symfuse.open(folders[name]) for name in "ab")
    aligned = moving(Model.of(b).spec, 2)(b)
    how: dict[str, Any] = {} if method == "linear" else {"base": 0, "parameters": {"density": 0.5}, "seed": 3}
    merged = symfuse.merge([a, b, aligned], method=method, **how)
    local = everything(merged.save(tmp_path / "local", max_shard_size=SHARD))  # type: ignore[arg-type]
    assert everything(merged.save(tmp_path / "ray", max_shard_size=SHARD, executor=ray)) == local  # type: ignore[arg-type]
    shards = sum(name.endswith(".safetensors") for name in local)
    assert shards > 2
    assert ray.summary()["tasks"] == shards
    assert ray.summary()["retried"] == 0


@pytest.mark.parametrize("axes", [("attention", "ffn"), "all"])
def test_alignments_are_the_same_bytes(ray: Ray, folders: Mapping[str, Path], axes: Any) -> None:
    """Axes that meet are matched here, and what is inside of layers there."""
    a, b = (symfuse.open(folders[name]) for name in "ab")
    steps: list[str] = []
    found = symfuse.match(a, to=b, axes=axes, executor=ray, progress=lambda step, _: steps.append(step.instance))
    assert found.to_bytes() == symfuse.match(a, to=b, axes=axes).to_bytes()
    assert found.elements
    assert len(steps) == len(set(steps)) > 0
    assert ray.summary()["tasks"] >= len(steps)


def test_paths_and_models_in_memory_travel(
    ray: Ray, folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are in another folder than this process; a state dictionary goes with the work."""
    monkeypatch.chdir(folders["a"].parent)
    a = symfuse.open("a")
    held = symfuse.open({name: t + 1 for name, t in symfuse.open("b").items()}, config=a.config, name="held")
    merged = symfuse.merge([a, held])
    local = everything(merged.save(tmp_path / "local"))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    monkeypatch.chdir(folders["a"].parent)
    assert everything(merged.save(tmp_path / "ray", executor=ray)) == local  # type: ignore[arg-type]


def test_a_family_that_only_this_process_has_declared(
    ray: Ray, folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts go with the work: no worker looks up the declaration."""
    monkeypatch.setitem(ARCHITECTURES, "mine", ARCHITECTURES["bert"])
    opened = (symfuse.open(folders[name]) for name in "ab")
    a, b = (one.replace(config={**one.config, "model_type": "mine"}) for one in opened)
    found = symfuse.match(a, to=b, executor=ray)
    assert found.to_bytes() == symfuse.match(a, to=b).to_bytes()
    merged = symfuse.merge([found(a), b])
    local = everything(merged.save(tmp_path / "local"))  # type: ignore[arg-type]
    assert everything(merged.save(tmp_path / "ray", executor=ray)) == local  # type: ignore[arg-type]


def test_the_command_line(cluster: Ray, folders: Mapping[str, Path], tmp_path: Path) -> None:
    names = [str(folders[name]) for name in "ab"]
    for executor in ("local", "ray"):
        more = ("--executor", executor, "--no-verify", "--max-shard-size", str(SHARD))
        merged = data("merge", *names, "-o", str(tmp_path / f"{executor}-merged"), "--align", "attention,ffn", *more)
        moved = data("align", names[0], "--to", names[1], "-o", str(tmp_path / f"{executor}-moved"), *more)
        assert ("executor" in merged) == ("executor" in moved) == (executor == "ray")
    for document in (merged, moved):
        summary = document["executor"]
        assert summary["name"] == "ray"
        assert summary["workers"] >= summary["machines"] == 1
        assert summary["tasks"] > 2
        assert summary["retried"] == 0
    for kind in ("merged", "moved"):
        ours, theirs = (everything(tmp_path / f"{executor}-{kind}") for executor in ("local", "ray"))
        own = {"symfuse.json", "README.md"}  # which say how long it took
        assert {n: d for n, d in ours.items() if n not in own} == {n: d for n, d in theirs.items() if n not in own}


# -- workers that are lost -------------------------------------------------------------------------


def test_a_worker_that_is_killed_in_the_middle_changes_nothing(
    cluster: Ray, tmp_path: Path, expected: Mapping[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """The process that finished first is killed from outside, with SIGKILL, while it makes its next file. Nothing is
    printed, as standard output may be a document."""
    tensors, checkpoint = slow(tmp_path / "notes", seconds=0.6)
    said: list[str] = []
    killed: list[int] = []

    def kill(text: str) -> None:
        if killed:
            return
        pid = int(text.rpartition(" ")[2])
        begun = [name for name, by in tensors.made().items() if pid in by]
        while len(busy := [name for name, by in tensors.made().items() if pid in by]) == len(begun):
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        killed.extend([pid, len(busy)])

    ray = Ray(say=said.append, follow=kill)
    out = checkpoint.save(tmp_path / "out", max_shard_size=Slow.size, executor=ray)
    assert everything(out) == expected  # type: ignore[arg-type]
    assert hidden(tmp_path) == []
    [again] = [name for name, by in tensors.made().items() if len(by) == 2]
    assert tensors.made()[again][0] == killed[0] != tensors.made()[again][1]
    summary = ray.summary()
    assert (summary["tasks"], summary["retried"]) == (6, 1)
    assert capfd.readouterr().out == ""
    [line] = said
    assert "a worker was lost" in line
    assert f"model-0000{int(again[1:]) + 1}-of-00006.safetensors, is done again" in line


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["ray", "threads"])
def test_what_is_finished_is_not_made_again(
    ray: Ray, tmp_path: Path, expected: Mapping[str, bytes], first: str
) -> None:
    """Whoever made it: threads go on from what the cluster made, and the other way round."""

    def fail(_notes: Path) -> None:
        time.sleep(0.3)
        raise RuntimeError("stop")

    how: dict[str, Any] = {"max_shard_size": Slow.size, "resume": True, "fingerprint": "x", "threads": 1}
    _, checkpoint = slow(tmp_path / "first", seconds=0.0, at="t3", happens=fail)
    with pytest.raises(RuntimeError, match="stop"):
        checkpoint.save(tmp_path / "out", executor=ray if first == "ray" else None, **how)
    [folder] = hidden(tmp_path)
    done = set((tmp_path / folder / ".journal").read_text().replace('"', "").split()[1:])
    assert set() < done <= set(INFOS) - {"t3"}  # it began when one of the first three had ended
    rest, checkpoint = slow(tmp_path / "rest", seconds=0.0)
    out = checkpoint.save(tmp_path / "out", executor=None if first == "ray" else ray, **how)
    assert everything(out) == expected  # type: ignore[arg-type]
    assert rest.made().keys() == INFOS.keys() - done
    assert hidden(tmp_path) == []


def test_a_file_that_has_changed_is_noticed_by_whoever_reads_it(
    ray: Ray, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    a = symfuse.open(folders["a"])
    a.save(tmp_path / "a")
    opened = symfuse.open(tmp_path / "a")
    os.utime(tmp_path / "a" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was opened: it was written to"):
        opened.save(tmp_path / "out", executor=ray)
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"has changed .* No such file .* on {module._worker().machine}"):
        opened.save(tmp_path / "out", executor=ray)


def test_a_worker_with_other_versions_is_refused(
    ray: Ray, folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = dict(module.versions())
    monkeypatch.setattr(module, "versions", lambda: ours | {"torch": "1.0"})
    with pytest.raises(
        OptionError, match=rf"has torch {torch.__version__.replace('+', '.')} \(here 1\.0\).*the same on"
    ):
        symfuse.open(folders["a"]).save(tmp_path / "out", executor=ray)
    assert list(tmp_path.iterdir()) == []


def until(place: Path, _stop: threading.Event) -> None:
    while not (place / "go").exists():
        time.sleep(0.01)
    (place / "gone").touch()


FAILURES = (
    exceptions.LocalRayletDiedError(),
    exceptions.RaySystemError("a socket was closed"),
    exceptions.OutOfDiskError("no space"),
    exceptions.TaskUnschedulableError("no such machine"),
)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_cluster_that_fails_says_so(
    ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Not a task of it, which is neither done again nor raised as it is, and what cannot be stopped any more does not
    hide it."""

    def refuse(*_args: object, **_options: object) -> None:
        raise exceptions.RaySystemError("nobody is there")

    def fail(tasks: Any, number: int) -> None:
        tasks._pending[number] = package.put(number)
        future: Future[Any] = Future()
        future.set_exception(error)
        tasks._ended.put((number, future))

    monkeypatch.setattr(module._Tasks, "_submit", fail)
    monkeypatch.setattr(package, "cancel", refuse)
    _, checkpoint = slow(tmp_path / "notes")
    with pytest.raises(
        SymfuseError, match=rf"cluster has failed \({type(error).__name__}: .*--executor local"
    ) as caught:
        checkpoint.save(tmp_path / "out", max_shard_size=Slow.size, executor=ray)
    assert caught.value.__cause__ is error
    assert ray.summary()["retried"] == 0


def test_a_cluster_that_does_not_take_the_work_says_so(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_value: object) -> None:
        raise exceptions.ObjectStoreFullError("10 GB are taken")

    monkeypatch.setattr(package, "put", refuse)
    with pytest.raises(SymfuseError, match=r"cluster has failed \(ObjectStoreFullError: .*10 GB"):
        ray.start(until, [])


def test_what_is_stopped_and_goes_on_is_waited_for(ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
    (first / "go").touch()
    running = ray.start(until, [first, second])
    assert next(iter(running)).item == first
    monkeypatch.setattr(package, "cancel", lambda *_args, **_options: None)
    monkeypatch.setattr(module, "GRACE", 0.01)
    assert not running.stop()
    ended = threading.Event()
    running.when_ended(ended.set)
    assert not ended.wait(0.2)
    (second / "go").touch()
    assert ended.wait(60)
    assert (second / "gone").exists()


def test_a_worker_without_symfuse_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that Ray is given is code, not a name in a module of ours."""
    task = package.cloudpickle.loads(package.cloudpickle.dumps(module._task()))
    monkeypatch.setitem(sys.modules, "symfuse.executors.ray", None)
    worker, why = task([None], 0, {})
    assert worker is None
    assert "symfuse.executors.ray" in why


def test_a_folder_that_a_worker_does_not_see(tmp_path: Path) -> None:
    from symfuse.io.weights import WriteShard

    infos = {"a": TensorInfo(torch.float32, (2,))}
    work = WriteShard(tmp_path / "out", tmp_path / "elsewhere", {"model.safetensors": infos}, lambda _: [], False)
    with pytest.raises(OutputError, match=r"does not see .*elsewhere: all machines must share the folder"):
        work("model.safetensors", threading.Event())


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'symfuse\[ray\]'"):
        Ray()


def test_an_address_without_ray(tmp_path: Path) -> None:
    result = run("merge", "a", "b", "-o", str(tmp_path / "out"), "--address", "auto")
    assert result.exit_code == 2
    assert "needs --executor ray" in result.output


# -- what stops, last in the file: workers that are cancelled end, and new ones take their time ------


def test_an_error_of_the_work_comes_here_once_and_ends_the_rest(ray: Ray, tmp_path: Path) -> None:
    def fail(_notes: Path) -> None:
        raise CheckpointError("this tensor is damaged")

    tensors, checkpoint = slow(tmp_path / "notes", at="t1", happens=fail)
    with pytest.raises(CheckpointError, match=r"^this tensor is damaged$"):
        checkpoint.save(tmp_path / "out", max_shard_size=Slow.size, executor=ray)
    assert tensors.made()["t1"] == tensors.made()["t1"][:1]
    assert ray.summary()["retried"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]


def test_an_interrupt_ends_the_workers_and_leaves_nothing(ray: Ray, tmp_path: Path) -> None:
    tensors, checkpoint = slow(tmp_path / "notes", seconds=0.5)

    def interrupt(_name: str, _nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "out", max_shard_size=Slow.size, executor=ray, progress=interrupt)
    begun = tensors.made()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]
    time.sleep(0.7)
    assert tensors.made() == begun
    assert len(begun) < 6


@pytest.mark.slow  # each loss costs the start of a process
def test_an_item_that_kills_its_workers_is_given_up(cluster: Ray, tmp_path: Path) -> None:
    def die(_notes: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    tensors, checkpoint = slow(tmp_path / "notes", seconds=0.0, at="t2", happens=die)
    ray = Ray()
    with pytest.raises(SymfuseError, match=r"model-00003-of-00006.safetensors was given to 4 workers .* all were lost"):
        checkpoint.save(tmp_path / "out", max_shard_size=Slow.size, executor=ray)
    assert len(tensors.made()["t2"]) == 4
    assert ray.summary()["retried"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]

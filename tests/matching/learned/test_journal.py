"""Learning that was stopped goes on as if it had not been; a journal of something else is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from matching.learned.learning_cases import history, learning, model, planted, same, task
from symfuse import api
from symfuse.alignment import Alignment
from symfuse.errors import OutputError
from symfuse.matching.learned import Progress

LABEL = "llama"


class StoppedError(Exception):
    """What the callback raises."""


def stopping(at: int) -> Any:
    """A progress callback that raises at that step."""

    def look(progress: Progress) -> None:
        if progress.step == at:
            raise StoppedError

    return look


def found(journal: Path | str | None = None, **options: Any) -> Alignment:
    own = {"steps": 9, "every": 3, "rate": 0.02, "journal": journal} | options
    return api.match(planted(LABEL), model(LABEL), axes="attention", learn=learning(LABEL, **own))


@pytest.mark.parametrize("at", [6, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 3, 9))])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(at: int, tmp_path: Path) -> None:
    journal = tmp_path / "deep" / "run.pt"
    with pytest.raises(StoppedError):
        found(journal, progress=stopping(at))
    assert journal.exists() == (at > 0)  # what was reached before
    seen: list[int] = []
    again = found(journal, progress=lambda progress: seen.append(progress.step))
    assert seen == [step for step in (0, 3, 6, 9) if step >= at]
    whole = found()
    assert history(again) == history(whole)
    assert again.provenance["learning"] == whole.provenance["learning"]
    assert same(again, whole)
    assert [path.name for path in journal.parent.iterdir()] == ["run.pt"]


@pytest.mark.slow
def test_of_two_models_that_both_move(tmp_path: Path) -> None:
    def both(**options: Any) -> list[Alignment | None]:
        own = learning(LABEL, steps=6, every=3, rate=0.02, permutations="straight-through", **options)
        pair = [planted(LABEL), model(LABEL)]
        return list(api.align(pair, anchor="universe", axes="attention,heads", learn=own).alignments)

    with pytest.raises(StoppedError):
        both(journal=tmp_path / "run.pt", progress=stopping(6))
    for again, whole in zip(both(journal=tmp_path / "run.pt"), both(), strict=True):
        assert again is not None
        assert whole is not None
        assert same(again, whole)


@pytest.mark.slow
def test_one_that_is_done_is_read_off(tmp_path: Path) -> None:
    one = found(tmp_path / "run.pt")
    before = (tmp_path / "run.pt").read_bytes()
    seen: list[Progress] = []
    assert same(found(str(tmp_path / "run.pt"), progress=seen.append), one)
    assert seen == []
    assert (tmp_path / "run.pt").read_bytes() == before


def some(cases: dict[str, Any], fast: str) -> list[Any]:
    """All of them, but one as slow ones."""
    return [pytest.param(name, marks=[] if name == fast else [pytest.mark.slow]) for name in cases]


OTHERS: dict[str, dict[str, Any]] = {
    "steps": {"steps": 12},
    "rate": {"rate": 0.021},
    "spread": {"spread": 0.5},
    "distil": {"distil": 0.5},
    "permutations": {"permutations": "straight-through"},
    "every": {"every": 2},
    "patience": {"patience": 3},
    "points": {"points": 4},
    "seed": {"seed": 1},
    "data": {"task": task(LABEL, seed=1)},
    "validation": {"validation": task(LABEL, seed=1)},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The journal of a run that is done."""
    path = tmp_path_factory.mktemp("kept") / "run.pt"
    found(path)
    return path.read_bytes()


def refused(path: Path, what: str, **options: Any) -> None:
    """With an OutputError that names the file, which stays as it is."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(OutputError, match=what) as caught:
        found(path, **options)
    assert str(caught.value).startswith(f"{path}: ")
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("what", some(OTHERS, "validation"))
def test_that_of_other_options_is_refused(what: str, kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(kept)
    refused(path, "the journal of another learning", **OTHERS[what])


@pytest.mark.slow
def test_that_of_other_models_or_starts_is_refused(kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(kept)
    own = learning(LABEL, steps=9, every=3, rate=0.02, journal=path)
    a, b = planted(LABEL), model(LABEL)
    name = next(name for name in b if name.endswith("gate_proj.weight"))
    rolled = b.replace(tensors={**b, name: b[name].roll(1, 1)})  # the same numbers, in another order
    for pair in ((b, a), (a, rolled), (a, model(LABEL, 1).replace(name=b.name))):
        with pytest.raises(OutputError, match="the journal of another learning"):
            api.match(pair[0], to=pair[1], axes="attention", learn=own)
    with pytest.raises(OutputError, match="the journal of another learning"):
        api.match(a, b, axes="attention", groups={"v": "orthogonal"}, learn=own)
    with pytest.raises(OutputError, match="the journal of another learning"):
        api.match(a, b, axes="attention", layers=0, learn=own)


def write(path: Path, change: Any, kept: bytes) -> None:
    path.write_bytes(kept)
    state = torch.load(path, weights_only=True)
    torch.save(change(state), path)


def without(key: str) -> Any:
    return lambda state: {name: value for name, value in state.items() if name != key}


DAMAGED: dict[str, Any] = {
    "a list": lambda state: [state],
    "a tensor": lambda _: torch.zeros(3),
    "no step": without("step"),
    "no leaves": without("leaves"),
    "no optimizer": without("optimizer"),
    "no history": without("history"),
    "no best": without("best"),
    "leaves of no model": lambda state: state | {"leaves": []},
    "leaves of other names": lambda state: state | {"leaves": [{"x": torch.zeros(1)}, {}]},
    "leaves of other shapes": lambda state: (
        state | {"leaves": [{name: torch.zeros(7, 5, 3) for name in one} for one in state["leaves"]]}
    ),
    "an optimizer of other shapes": lambda state: state | {"optimizer": {"state": {}, "param_groups": []}},
    "history of numbers": lambda state: state | {"history": [1, 2]},
}


@pytest.mark.parametrize("how", some(DAMAGED, "leaves of other shapes"))
def test_a_damaged_one_is_refused(how: str, kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    write(path, DAMAGED[how], kept)
    refused(path, "no journal of a learning, or a damaged one")


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1, 100, -1, -200])
def test_a_truncated_one_is_refused(length: int, kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(kept[:length])
    refused(path, "no journal of a learning, or a damaged one")


class Payload:
    """What a pickle may call."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("called"),))


@pytest.mark.slow
def test_what_a_pickle_calls_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.pt"
    for data in (pickle.dumps(Payload()), b"no journal"):
        path.write_bytes(data)
        refused(path, "no journal of a learning, or a damaged one")
    torch.save({"about": Payload()}, path)
    refused(path, "no journal of a learning, or a damaged one")
    assert not (tmp_path / "called").exists()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, "no journal of a learning")
    file = tmp_path / "file"
    file.write_text("x")
    refused(file / "run.pt", "the journal cannot be written there")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays, and nothing half-written beside it."""
    path = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        found(path, progress=stopping(3))
    before = path.read_bytes()

    def full(state: Any, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OutputError, match="the journal cannot be written there"):
            found(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["run.pt"]

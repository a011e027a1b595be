"""D19, D21, D22, D23, D30: nothing of the user's is lost, whatever an output replaces and wherever it lies."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import symfuse
from cases.disks import small_disk
from command import done, everything, run
from symfuse.errors import CheckpointError, OutputError
from symfuse.evaluation.landscape import _Journal
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.io.partial import together
from symfuse.io.target import check_target, overlap, write_text
from symfuse.reports import check_result

ALIGN = ("align", "a", "--to", "b", "-o", "out", "--axes", "residual", "--anchor-output", "framed", "--no-verify", "-q")


def model(value: float = 1.0, rows: int = 3) -> Checkpoint:
    return Checkpoint({f"w{i}": torch.full((rows, 5), value + i) for i in range(4)}, {"model_type": "x"}, name="x")


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def bound(folder: Path, at: Path) -> Iterator[Path]:
    """A folder mounted at a second place."""
    at.mkdir()
    if subprocess.run(["mount", "--bind", folder, at], capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


# ---- D21: several outputs


class StopError(Exception):
    pass


def failing(at: str) -> Checkpoint:
    """A model one of whose tensors cannot be made."""

    class Failing(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if name == at:
                raise StopError(name)
            return super().__getitem__(name)

    whole = model(9)
    return Checkpoint(Failing(whole), {}, name="f", infos={name: whole.info(name) for name in whole})


def both(folder: Path, one: Checkpoint, two: Checkpoint) -> None:
    """Replace two models; the first is whole, and not yet in its place, when the second is written."""
    before = everything(folder / "one")
    with together():
        one.save(folder / "one", overwrite=True)
        assert everything(folder / "one") == before
        two.save(folder / "two", overwrite=True)


def test_d21_the_first_output_stays_until_the_second_is_whole(tmp_path: Path) -> None:
    """Alone, the first is replaced: else this would say nothing."""
    for name in ("one", "two"):
        model().save(tmp_path / name)
    before = everything(tmp_path)
    with pytest.raises(StopError):
        both(tmp_path, model(2), failing("w3"))
    assert everything(tmp_path) == before
    both(tmp_path, model(2), model(3))
    assert float(open_checkpoint(tmp_path / "one")["w0"][0, 0]) == 2
    assert float(open_checkpoint(tmp_path / "two")["w0"][0, 0]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("number", range(4))
def test_d21_a_failure_between_the_renames_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Four renames: each old one aside, each new one into its place."""
    for name in ("one", "two"):
        model().save(tmp_path / name)
    before, rename, calls = everything(tmp_path), Path.rename, []

    def sometimes(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == number + 1:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", sometimes)
    with pytest.raises(OutputError, match="Input/output error"):
        both(tmp_path, model(2), model(3))
    assert len(calls) > number
    assert everything(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_d21_an_output_that_failed_is_not_published_with_the_others(tmp_path: Path) -> None:
    with together():
        with pytest.raises(StopError):
            failing("w3").save(tmp_path / "two")
        model(2).save(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_d21_both_outputs_of_align_or_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is too small for both: known before the first is filled, and both old ones are what they were."""
    for name in ("out", "framed"):
        shutil.copytree("a", name)
    before, size = everything(place), (place / "a" / "model.safetensors").stat().st_size
    usage = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(1.5 * size)))
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "save", lambda *_, **__: pytest.fail("was filled"))
        result = run(*ALIGN, "--overwrite")
    assert result.exit_code == 8, result.output
    assert "out and framed need" in result.stderr
    assert everything(place) == before
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert run(*ALIGN, "--overwrite").exit_code == 0
    assert everything(place / "out") != {k[4:]: v for k, v in before.items() if k.startswith("out/")}


@pytest.mark.skipif(shutil.which("mount") is None, reason="needs mount")
def test_d21_on_a_disk_that_is_full() -> None:
    """A file system of 22 MB, on which each fits alone beside the old ones, and both do not."""
    with small_disk("22m") as disk:
        old, new = model(rows=200_000), model(2, rows=200_000)  # 16 MB each
        small = model(3)
        small.save(disk / "one")
        old.save(disk / "two")
        before = everything(disk)
        with pytest.raises(OutputError, match="free some space"):
            both(disk, small, new)
        assert everything(disk) == before
        assert sorted(path.name for path in disk.iterdir() if path.name != "lost+found") == ["one", "two"]


# ---- D22: what is no part of a model


def git(out: Path) -> str:
    (out / ".git" / "objects").mkdir(parents=True)
    (out / ".git" / "HEAD").write_text("ref: refs/heads/main")
    return ".git"


def notes(out: Path) -> str:
    (out / "notes.md").write_text("mine")
    return "notes.md"


def folder(out: Path) -> str:
    (out / "plots" / "2026").mkdir(parents=True)
    (out / "plots" / "2026" / "a.png").write_bytes(b"png")
    return "plots"


def empty(out: Path) -> str:
    (out / "later").mkdir()
    return "later"


def beside_the_pooling(out: Path) -> str:
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text("{}")
    (out / "1_Pooling" / "mine.txt").write_text("mine")
    return "1_Pooling"


def optimizer(out: Path) -> str:
    torch.save({}, out / "optimizer.pt")
    return "optimizer.pt"


def other_weights(out: Path) -> str:
    (out / "lora.safetensors").write_bytes(b"weights")
    return "lora.safetensors"


def hidden(out: Path) -> str:
    (out / ".env").write_text("KEY=1")
    return ".env"


def linked(out: Path) -> str:
    (out / "data").symlink_to(out.parent)
    return "data"


MINE = (git, notes, folder, empty, beside_the_pooling, optimizer, other_weights, hidden, linked)


@pytest.mark.parametrize("mine", MINE, ids=lambda one: one.__name__)
def test_d22_overwrite_names_what_is_no_part_of_a_model(tmp_path: Path, mine: Callable[[Path], str]) -> None:
    out = model().save(tmp_path / "out")
    assert isinstance(out, Path)
    name = mine(out)
    before = everything(out)
    with pytest.raises(OutputError, match=rf"files that are not part of a model: {name}\. Move them elsewhere"):
        model(2).save(out, overwrite=True)
    assert everything(out) == before
    assert (out / name).exists()


def test_d22_what_comes_while_the_run_works_is_kept_too(tmp_path: Path) -> None:
    out = model().save(tmp_path / "out")
    assert isinstance(out, Path)
    with pytest.raises(OutputError, match=r"notes\.md"):
        model(2).save(out, overwrite=True, progress=lambda *_: notes(out) and None)
    assert (out / "notes.md").read_text() == "mine"
    assert float(open_checkpoint(out)["w0"][0, 0]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_d22_what_libraries_write_is_replaced(tmp_path: Path) -> None:
    """The control: a folder with all kinds of files that belong to a model."""
    out = model().save(tmp_path / "out", extra={"symfuse.json": "{}", "alignment-1.symfuse": ""})
    assert isinstance(out, Path)
    names = (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
    )
    names += (
        "merges.txt",
        "spiece.model",
        "chat_template.jinja",
        "preprocessor_config.json",
        "LICENSE",
        "modules.json",
    )
    names += ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.safetensors.index.json")
    names += ("1_Pooling/config.json", "2_Dense/model.safetensors", "additional_chat_templates/tool.jinja")
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("{}")
    model(2).save(out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_d22_a_card_that_somebody_changed_is_not_replaced(place: Path) -> None:
    done("merge", "a", "b", "-o", "out")
    done("merge", "a", "b", "-o", "out", "--overwrite")
    card = place / "out" / "README.md"
    card.write_text(card.read_text("utf-8") + "\nWhat I found out about it.\n", "utf-8")
    before = everything(place)
    result = run("merge", "a", "b", "-o", "out", "--overwrite")
    assert (result.exit_code, "not part of a model: README.md" in result.stderr) == (8, True)
    (place / "out" / "symfuse.json").unlink()  # a card that somebody else wrote
    assert run("merge", "a", "b", "-o", "out", "--overwrite").exit_code == 8
    del before["out/symfuse.json"]
    assert everything(place) == before


def test_d22_on_the_command_line(place: Path) -> None:
    shutil.copytree("a", "out")
    git(place / "out")
    before = everything(place)
    for args in (("merge", "a", "b", "-o", "out"), ("align", "a", "--to", "b", "-o", "out")):
        result = run(*args, "--overwrite")
        assert result.exit_code == 8, result.output
        assert ".git" in result.stderr
    assert everything(place) == before


def test_d22_single_files_of_others_are_not_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, results, figures, alignments: each again, which replaces its own; and where somebody else's file is."""
    assert run("relate", "a", "b", "--axes", "ffn", "-o", "run", "-q").exit_code == 0
    monkeypatch.setattr("symfuse.reports.page._library", lambda: "")
    alignment = symfuse.match(open_checkpoint("a"), open_checkpoint("b"), axes="ffn")
    commands = {
        "page.html": lambda: run("report", "run", "-o", "page.html", "-q").exit_code,
        "run/distance.json": lambda: run("relate", "a", "b", "--axes", "ffn", "-o", "run", "-q").exit_code,
        "figures/distance-by-axis.svg": lambda: run("report", "run", "-o", "figures", "--format", "svg").exit_code,
        "a.alignment": lambda: 0 if alignment.save("a.alignment") else 1,
    }
    for name, command in commands.items():
        assert command() == command() == 0, name
        mine = place / name
        document = mine.read_bytes()
        mine.write_text("mine")
        try:
            code = command()
        except OutputError as error:
            code = error.exit_code
        assert code == 8, name
        assert mine.read_text() == "mine"
        mine.write_bytes(document)


@pytest.mark.parametrize("kind", ["distance", "barrier", "evaluation", "landscape"])
def test_d22_a_result_of_somebody_else_is_refused_before_the_work(tmp_path: Path, kind: str) -> None:
    """One of the same kind is replaced, and what has another name stays beside it."""
    path = tmp_path / f"{kind}.json"
    for mine in ("mine", '{"kind": "mine"}'):
        path.write_text(mine)
        with pytest.raises(OutputError, match=f"{kind}.json exists, and symfuse did not write it"):
            check_result(tmp_path, kind, ())
    path.write_text(json.dumps({"kind": kind}, indent=2))
    (tmp_path / "other.json").write_text("mine")
    check_result(tmp_path, kind, ())
    path.unlink()
    path.mkdir()
    with pytest.raises(OutputError, match="is a folder; choose another name"):
        check_result(tmp_path, kind, ())


def test_d22_the_work_of_distance_does_not_begin(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "run").mkdir()
    (place / "run" / "distance.json").write_text("mine")
    monkeypatch.setattr("symfuse.cli.models.open_model", lambda *_, **__: pytest.fail("was computed"))
    result = run("relate", "a", "b", "--axes", "ffn", "-o", "run", "-q")
    assert result.exit_code == 8, result.output
    assert "distance.json exists, and symfuse did not write it" in result.stderr


def test_d22_all_figures_or_none(place: Path) -> None:
    assert run("relate", "a", "b", "--axes", "ffn", "-o", "run", "-q").exit_code == 0
    assert run("report", "run", "-o", "figures", "--format", "svg").exit_code == 0
    names = sorted(path.name for path in (place / "figures").iterdir())
    assert len(names) > 1
    for path in (place / "figures").iterdir():
        path.unlink()
    for mine in names:  # one of them is written first
        (place / "figures" / mine).write_text("mine")
        assert run("report", "run", "-o", "figures", "--format", "svg").exit_code == 8
        assert everything(place / "figures") == {mine: b"mine"}
        (place / "figures" / mine).unlink()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("mine")


def dangling(path: Path) -> None:
    path.symlink_to("nothing")


def null(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("may not make devices")


@pytest.mark.parametrize(
    ("make", "what"), [(pipe, "pipe"), (link, "symbolic link"), (dangling, "symbolic link"), (null, "device")]
)
def test_d22_what_is_no_regular_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None], what: str) -> None:
    path = tmp_path / "page.html"
    write_text(path, "page", "the page", mark="page")
    write_text(path, "another page", "the page", mark="page")
    (tmp_path / "mine").write_text("page")
    path.unlink()
    make(path)
    before = path.lstat()
    with pytest.raises(OutputError, match=f"is a {what}; choose another name"):
        write_text(path, "page", "the page", mark="page")
    after = path.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine", "page.html"]


def test_d22_a_journal_is_not_written_over_a_text(place: Path) -> None:
    """One line of text, which no newline ends."""
    (place / "mine").write_text("mine")
    with pytest.raises(OutputError, match="is of other models, data or grid"):
        _Journal(place / "mine", {"places": []})
    assert (place / "mine").read_text() == "mine"


# ---- D19, D23: which file, which folder


@pytest.mark.skipif(shutil.which("mount") is None, reason="needs mount")
def test_d23_a_bind_mount_of_an_input(tmp_path: Path) -> None:
    a = model().save(tmp_path / "a")
    assert isinstance(a, Path)
    (a / "1_Pooling").mkdir()
    (a / "1_Pooling" / "config.json").write_text("{}")
    with bound(a, tmp_path / "mounted") as mounted:
        for target, relation in ((mounted / "out", "lies inside"), (mounted, "is")):
            assert not str(target.resolve()).startswith(str(a))
            with pytest.raises(OutputError, match=f"{relation} the input"):
                check_target(target, overwrite=True, inputs=[a])
        assert overlap(a, mounted) == "is"
    with bound(a / "1_Pooling", tmp_path / "part") as part:
        assert overlap(part / "out", a) == "lies inside"
    assert overlap(tmp_path / "part" / "out", a) == ""


def test_d23_what_an_input_links_to_is_not_replaced(tmp_path: Path) -> None:
    """The input is a folder of links into the folder that would be replaced."""
    real = model().save(tmp_path / "real")
    assert isinstance(real, Path)
    (tmp_path / "links").mkdir()
    for path in real.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    with pytest.raises(OutputError, match=r"the input links to .*; choose another output"):
        open_checkpoint(tmp_path / "links").save(real, overwrite=True)
    open_checkpoint(tmp_path / "links").save(tmp_path / "real-2")


def test_d23_hard_links_are_not_written_through(tmp_path: Path) -> None:
    a = model().save(tmp_path / "a")
    assert isinstance(a, Path)
    shutil.copytree(a, tmp_path / "out", copy_function=os.link)
    before = everything(a)
    model(2).save(tmp_path / "out", overwrite=True)
    assert everything(a) == before
    assert everything(tmp_path / "out") != before


def swap(path: Path) -> None:
    """Another file under the name, of the same size and time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def rewrite(path: Path) -> None:
    """The same file with other bytes, of the same size and time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [swap, rewrite])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_d19_an_input_replaced_with_equal_size_and_time(
    tmp_path: Path, file: str, change: Callable[[Path], None]
) -> None:
    a = model().save(tmp_path / "a")
    assert isinstance(a, Path)
    torch.save(dict(model()), a / "pytorch_model.bin")
    opened = open_checkpoint(a, prefer_bin=file.endswith(".bin"))
    stat, state = (a / file).stat(), opened.state()
    opened["w0"]
    change(a / file)
    assert ((a / file).stat().st_size, (a / file).stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    for read in (lambda: opened["w1"], lambda: opened.part("w1", 0, 3)):
        with pytest.raises(CheckpointError, match=f"{file} has changed since it was opened"):
            read()
    assert opened.state() != state  # what a run with --resume compares


@pytest.mark.parametrize("after", ["w1", "w3"])
def test_d19_changed_while_it_is_written(tmp_path: Path, after: str) -> None:
    """Also once all of it was read: the pages of a file may be read late."""
    a = model().save(tmp_path / "a")
    assert isinstance(a, Path)

    def progress(name: str, _nbytes: int) -> None:
        if name == after:
            swap(a / "model.safetensors")

    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        open_checkpoint(a).save(tmp_path / "out", threads=1, progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# ---- D30: names


def test_d30_an_output_whose_name_is_not_utf8(place: Path) -> None:
    name = os.fsdecode(b"out\xff")
    for args in (
        ("merge", "a", "b", "-o", name),
        ("align", "a", "--to", "b", "-o", name),
        ("extract-lora", "a", "--base", "b", "--rank", "2", "-o", name),
        ("relate", "a", "b", "-o", name),
        ("check", "a", "b", "-o", name),
    ):
        result = run(*args)
        assert result.exit_code in (2, 8), (args, result.output)
        assert "not UTF-8" in result.output, (args, result.output)
        assert "Traceback" not in result.output
    assert not os.path.lexists(name)


def test_d30_an_input_whose_name_is_not_utf8(place: Path) -> None:
    name = os.fsdecode(b"in\xff")
    Path("a").rename(name)
    before = everything(place)
    for args in (("merge", name, "b", "-o", "out"), ("inspect", name)):
        result = run(*args)
        assert result.exit_code == 3, (args, result.output)
        assert "not UTF-8" in result.stderr, (args, result.output)
    assert everything(place) == before

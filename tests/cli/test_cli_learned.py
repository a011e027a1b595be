"""`align --from learned` and `align --widen`: what they print and write, and how they fail (leaving nothing)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from command import data, done, everything, run
from contract.tiny import TEXT, of
from evaluation.task_cases import table, wordpiece
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.io import open as open_checkpoint
from symfuse.matching.learned import Learning
from symfuse.matching.learned.journal import Journal

MASKED = transformers.BertForMaskedLM
NARROW = {"hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 29}
LEARNED = ("--from", "learned", "--data", "t.txt", "--batch-size", "6", "--limit", "18", "--steps", "2")
PAIR = ("align", "p", "--to", "a", "--axes", "attention,ffn")


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a; p, which is a moved; wide, which is twice as wide. Texts to learn and to validate on."""
    root = tmp_path_factory.mktemp("learned")
    a = of("BertForMaskedLM", "BertConfig", TEXT)(0).replace(files=wordpiece())
    a.save(root / "a")
    random_alignment(api.declare(a), 3, axes=("qk", "v"))(a).replace(files=wordpiece()).save(root / "p")
    wide = of("BertForMaskedLM", "BertConfig", TEXT | {key: 2 * size for key, size in NARROW.items()})(1)
    wide.replace(files=wordpiece()).save(root / "wide")
    texts = [row["text"] for row in table().rows]
    (root / "t.txt").write_text("\n".join(texts), "utf-8")
    (root / "v.txt").write_text("\n".join(texts[:4]), "utf-8")
    return root


def written(folder: str) -> dict[str, Any]:
    value = json.loads(Path(folder, "symfuse.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert isinstance(value, dict)
    return value


def refused(folder: Path, code: int, message: str, *args: str) -> None:
    """The command ends with that code and one message, and leaves the working folder as it was."""
    before, names = everything(folder), sorted(folder.rglob("*"))
    result = run(*args)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert message in result.stderr
    assert result.stdout == ""
    assert everything(folder) == before
    assert sorted(folder.rglob("*")) == names


def complete(folder: str) -> Any:
    """Loaded by the real class, with no weight missing or left."""
    module, info = MASKED.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    return module.eval()


def logits(folder: str) -> Tensor:
    with torch.no_grad():
        return complete(folder)(input_ids=torch.arange(5, 17)[None]).logits


def compute_the_same(one: str, other: str) -> None:
    torch.testing.assert_close(logits(one), logits(other), rtol=1e-9, atol=1e-9)


# ---- learned


def test_learned(place: Path) -> None:
    before = everything(place)
    found = data(*PAIR, *LEARNED, "-o", "out", "--validation", "v.txt", "--rate", "0.02")
    learned = found["learning"]
    assert (learned["steps"], learned["rate"], learned["permutations"], learned["distil"]) == (2, 0.02, "kept", 0.0)
    assert [one["step"] for one in learned["history"]] == [0, 2]
    assert learned["history"][0]["loss"] is None  # before any step there is none
    assert learned["history"][1]["loss"] > 0
    assert found["verified"]["equal"] is True
    assert found["options"]["groups"]["v"] == "invertible"
    assert "inexact" not in found
    assert {key: value for key, value in everything(place).items() if not key.startswith("out/")} == before
    assert written("out")["learning"] == learned
    compute_the_same("out", "p")
    task = api.task(None, "t.txt", "a", batch_size=6, limit=18)
    validation = api.task(None, "v.txt", "a", batch_size=6, limit=18)
    own = Learning(task, validation, steps=2, rate=0.02)
    same = api.match("p", "a", axes="attention,ffn", learn=own)
    assert Alignment.load("out/alignment.symfuse").to_bytes() == same.to_bytes()
    assert learned["ends"] == same.provenance["learning"]["ends"]

    page = data("report", "out", "-o", "page.html")
    text = Path("page.html").read_text("utf-8")
    assert page["bytes"] == len(text.encode())
    assert "The barrier, while it was learned away" in text
    assert "loss on the path" in text


@pytest.mark.slow
def test_what_is_said_of_it(place: Path) -> None:
    text = done(*PAIR, *LEARNED, "-o", "out").stdout
    history = written("out")["learning"]["history"]
    assert f"learned: barrier on the validation data {history[0]['barrier']:.4g} -> " in text
    assert "proved: outputs equal to" in text
    quiet = done(*PAIR, *LEARNED, "-o", "quiet", "--quiet")
    assert quiet.output == ""
    assert Path("quiet/alignment.symfuse").read_bytes() == Path("out/alignment.symfuse").read_bytes()
    assert done(*PAIR, *LEARNED, "-o", "both", "--quiet", "--json").stdout.startswith("{")


@pytest.mark.slow
def test_options_are_those_of_learning(place: Path) -> None:
    found = data(
        *PAIR, *LEARNED, "-o", "out", "--spread", "0.2", "--permutations", "annealed", "--device", "cpu", "--seed", "3",
        "--layers", "0", "--no-biases", "--group", "qk=orthogonal",
    )  # fmt: skip
    learned = found["learning"]
    assert (learned["spread"], learned["permutations"], learned["seed"]) == (0.2, "annealed", 3)
    g = Alignment.load("out/alignment.symfuse")
    assert {i.index[0] for i in g.elements} <= {0}
    assert dict(g.shifts) == dict(g.gauges) == {}
    assert found["options"]["groups"] == {"ffn": "permutation", "qk": "orthogonal", "v": "invertible"}
    compute_the_same("out", "p")


def test_keep_and_teacher_are_those_of_learning(place: Path) -> None:
    found = data(*PAIR, *LEARNED, "-o", "out", "--keep", "0.3", "--teacher", "2", "--distil", "1")["learning"]
    assert (found["keep"], found["distil"]) == (0.3, 1.0)
    assert Path(found["teacher"]).name == "a"
    task = api.task(None, "t.txt", "a", batch_size=6, limit=18)
    own = Learning(task, steps=2, keep=0.3, teacher=1, distil=1.0)
    same = api.match("p", "a", axes="attention,ffn", learn=own)
    assert Alignment.load("out/alignment.symfuse").to_bytes() == same.to_bytes()
    other = data(*PAIR, *LEARNED, "-o", "other", "--teacher", "a", "--distil", "1")["learning"]
    assert Path(other["teacher"]).name == "a"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--teacher", "0", "--teacher is 0, expected 1 (SOURCE), 2 (the anchor) or another model"),
        ("--teacher", "3", "--teacher is 3, expected 1 (SOURCE), 2 (the anchor) or another model"),
        ("--keep", "2", 'learning: keep is 2.0; expected "barrier", "midpoint"'),
        ("--keep", "best", "learning: keep is 'best'; expected"),
    ],
)
def test_keep_and_teacher_are_checked(place: Path, option: str, value: str, message: str) -> None:
    refused(place, 2, message, *PAIR, *LEARNED, "-o", "out", option, value)


@pytest.mark.slow
def test_it_goes_on_from_its_journal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = Journal.save, []

    def once(self: Journal, run: Any) -> None:
        calls.append(run.step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(self, run)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "save", once)
        stopped = run(*PAIR, *LEARNED, "-o", "out", "--journal", "kept/j.pt")
    assert stopped.exit_code == 130
    assert not Path("out").exists()
    assert calls == [0, 2]
    assert [path.name for path in Path("kept").iterdir()] == ["j.pt"]
    done(*PAIR, *LEARNED, "-o", "out", "--journal", "kept/j.pt", "-q")
    done(*PAIR, *LEARNED, "-o", "again", "--journal", "kept/j.pt", "-q")  # it is done: read off
    done(*PAIR, *LEARNED, "-o", "whole", "-q")
    for name in ("alignment.symfuse", "model.safetensors"):
        assert len({Path(folder, name).read_bytes() for folder in ("out", "again", "whole")}) == 1
    refused(
        place, 8, "the journal of another learning",
        *PAIR, *LEARNED, "-o", "other", "--journal", "kept/j.pt", "--rate", "0.5",
    )  # fmt: skip


@pytest.mark.slow
def test_both_are_moved(place: Path) -> None:
    found = data(*PAIR, *LEARNED, "-o", "out", "--both", "--anchor-output", "anchor", "--rate", "0.02")
    for folder, original in (("out", "p"), ("anchor", "a")):
        compute_the_same(folder, original)
        document = written(folder)
        assert document["verified"]["equal"] is True
        assert document["learning"] == found["learning"]
        assert document["source"]["name"] == original
        g = Alignment.load(f"{folder}/alignment.symfuse")
        moved, files = open_checkpoint(folder), g(open_checkpoint(original))
        torch.testing.assert_close(dict(moved), dict(files), rtol=1e-12, atol=1e-15)
    assert Alignment.load("anchor/alignment.symfuse").elements
    text = Path("anchor/README.md").read_text("utf-8")
    assert "`a` moved onto `p`" in text
    done("merge", "out", "anchor", "-o", "merged", "-q")
    complete("merged")


@pytest.mark.slow
def test_neither_is_left_where_one_cannot_be_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from symfuse.cli import align as verb

    save, calls = verb.save, []

    def second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(*args)

    monkeypatch.setattr(verb, "save", second)
    assert run(*PAIR, *LEARNED, "-o", "out", "--both", "--anchor-output", "anchor").exit_code == 130
    assert not Path("out").exists()
    assert not Path("anchor").exists()


@pytest.mark.slow
def test_soft_permutations_are_labelled(place: Path) -> None:
    args = ("align", "p", "--to", "a", "--axes", "ffn", *LEARNED, "--permutations", "soft", "--rate", "0.1")
    result = done(*args, "-o", "out")
    assert "inexact: transport: the result computes another function" in result.stdout
    assert "proved: outputs equal" not in result.stdout
    document = written("out")
    assert document["inexact"] == ["transport"]
    assert document["verified"] is None or document["verified"]["equal"] is False
    assert "inexact: transport." in Path("out/README.md").read_text("utf-8")
    assert float((logits("out") - logits("p")).abs().max()) > 1e-4
    assert data("inspect", "out")["notes"] == ["inexact: transport: the result computes another function"]


REFUSED: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "steps": (2, "--steps: only for --from learned", ("--steps", "3")),
    "journal": (2, "--journal: only for --from learned", ("--journal", "j.pt")),
    "permutations": (2, "--permutations: only for --from learned", ("--permutations", "kept")),
    "validation": (2, "--validation: only for --from learned", ("--validation", "v.txt")),
    "activations with steps": (
        2, "--steps: only for --from", ("--from", "activations", "--data", "t.txt", "--steps", "3"),
    ),
    "both alone": (2, "--both", ("--both",)),
    "both": (2, "--both moves the anchor too: name a folder for it (--anchor-output)", (*LEARNED, "--both")),
    "no data": (2, "--from learned need --data", ("--from", "learned")),
    "no steps": (2, "--steps", (*LEARNED, "--steps", "0")),
    "rate": (2, "learning: rate is -1.0", (*LEARNED, "--rate", "-1")),
    "not a rate": (2, "learning: rate is nan", (*LEARNED, "--rate", "nan")),
    "spread": (2, "learning: spread is 2.0", (*LEARNED, "--spread", "2")),
    "other device": (2, "device 'foo' cannot be used", (*LEARNED, "--device", "foo")),
    "inexact": (2, "--inexact: only for --from weights", (*LEARNED, "--inexact", "heads-ignored")),
    "widen both": (
        2, "--widen goes with --from weights and --from learned, without --both, --inexact",
        (*LEARNED, "--widen", "--both", "--anchor-output", "x"),
    ),
    "widen activations": (2, "--widen goes with", ("--from", "activations", "--data", "t.txt", "--widen")),
    "widen inexact": (2, "--widen goes with", ("--inexact", "heads-ignored", "--widen")),
    "no such data": (9, "nowhere.txt", ("--from", "learned", "--data", "nowhere.txt")),
    "no such validation": (9, "nowhere.txt", (*LEARNED, "--validation", "nowhere.txt")),
    "the same place": (8, "--anchor-output out is the output out", (*LEARNED, "--both", "--anchor-output", "out")),
    "one batch": (2, "name validation data, or take smaller batches", (*LEARNED, "--limit", "4")),
}  # fmt: skip


FAST = {"steps", "validation", "both alone", "both", "no data", "inexact", "widen both"}


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[] if one in FAST else [pytest.mark.slow]) for one in REFUSED]
)
def test_refused(what: str, place: Path) -> None:
    code, message, args = REFUSED[what]
    refused(place, code, message, *PAIR, "-o", "out", *args)


# ---- widened


@pytest.mark.slow
def test_widen(place: Path) -> None:
    result = done("align", "a", "--to", "wide", "--widen", "-o", "out")
    assert "widened; proved: outputs equal to" in result.stdout
    assert open_checkpoint("out").config["hidden_size"] == 40
    compute_the_same("out", "a")
    document = written("out")
    assert document["verified"]["equal"] is True
    assert document["source"]["name"].startswith("a")
    done("merge", "out", "wide", "-o", "merged", "-q")
    middle, ends = complete("merged").state_dict(), [complete(one).state_dict() for one in ("out", "wide")]
    for name, tensor in middle.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (ends[0][name] + ends[1][name]) / 2, rtol=1e-6, atol=1e-7)


def test_without_it_the_error_names_it(place: Path) -> None:
    refused(place, 5, "--widen", "align", "a", "--to", "wide", "-o", "out")


@pytest.mark.slow
def test_the_wider_one_is_not_made_narrow(place: Path) -> None:
    result = run("align", "wide", "--to", "a", "--widen", "-o", "out")
    assert result.exit_code not in (0, 1), result.output
    assert not Path("out").exists()


@pytest.mark.slow
def test_widen_and_learn(place: Path) -> None:
    found = data("align", "a", "--to", "wide", "--widen", *LEARNED, "-o", "out", "--rate", "0.02")
    assert found["learning"]["history"]
    compute_the_same("out", "a")
    text = done("align", "p", "--to", "wide", "--widen", "--no-verify", "-o", "unproved").stdout
    assert "proved:" not in text
    compute_the_same("unproved", "p")


@pytest.mark.slow
def test_models_of_one_width_are_widened_by_nothing(place: Path) -> None:
    done("align", "p", "--to", "a", "--widen", "-o", "out", "-q")
    compute_the_same("out", "p")

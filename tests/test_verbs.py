"""The verbs are alike in Python and on the command line, and say all that they take."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import symfuse
from command import data, done, run
from contract.tiny import MODELS
from symfuse import api
from symfuse.cli.verbs import OLD_VERBS, VERBS
from symfuse.errors import OptionError, SymfuseWarning
from symfuse.messages import with_current_keys
from symfuse.rewriting import REWRITES

ROOT = Path(__file__).parents[1]
PACKAGES = {path.stem for path in (ROOT / "src" / "symfuse").iterdir() if path.name != "__init__.py"}
PYTHON = {name for name in symfuse.__all__ if not isinstance(getattr(symfuse, name), type)}
COMMANDS = {name.replace("-", "_") for name in VERBS}

# Verbs that exist in one only, and why.
ONLY_COMMANDS = {
    "demo": "it downloads models, and prints as it goes",
    "methods": "in Python symfuse.methods.METHODS has them",
}
ONLY_PYTHON = {
    "declare": "the declaration as an object; inspect is what there is to read of it",
    "digest": "relate --digest",
    "match": "align without applying it",
    "merge_recipe": "merge takes recipe.yml on the command line",
    "open": "on the command line a model is its folder",
    "prove": "align proves what it writes",
    "renew_statistics": "its data are batches of what the module takes",
    "task": "--data and --task of the verbs that take data",
    "to_module": "there are no live modules on the command line",
    "widen": "align --widen",
}


def test_python_and_the_command_line_have_the_same_verbs() -> None:
    assert ONLY_COMMANDS.keys() == COMMANDS - PYTHON
    assert ONLY_PYTHON.keys() == PYTHON - COMMANDS


def test_the_table_of_verbs_is_whole() -> None:
    text = (ROOT / "docs" / "verbs.md").read_text("utf-8")
    rows = re.findall(r"^\| (?:`symfuse\.(\w+)[^`]*`|–) \| (?:`symfuse ([\w-]+)[^`]*`|–) \|", text, re.MULTILINE)
    assert {python for python, _ in rows if python} - {"methods"} == PYTHON
    assert {command.replace("-", "_") for _, command in rows if command} == COMMANDS
    assert all(python == command.replace("-", "_") for python, command in rows if python and command)


def test_no_verb_is_hidden_by_a_package() -> None:
    assert not PYTHON & PACKAGES
    import symfuse.evaluation
    import symfuse.reports
    import symfuse.rewriting

    assert symfuse.rewrite is api.rewrite
    assert symfuse.evaluate is api.evaluate
    assert symfuse.report is symfuse.reports.report


@pytest.mark.parametrize("name", [*symfuse.__all__, *(f"api.{name}" for name in api.__all__)])
def test_every_option_stands_in_its_signature(name: str) -> None:
    owner = getattr(api, name[4:]) if name.startswith("api.") else getattr(symfuse, name)
    functions = [owner] if inspect.isfunction(owner) else []
    if inspect.isclass(owner) and owner.__module__.startswith("symfuse."):
        functions += [one for key, one in vars(owner).items() if not key.startswith("_") and inspect.isfunction(one)]
    for function in functions:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, function


def test_the_contract_of_the_command_line_names_every_other_module() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    contract = next(one for one in linter["contracts"] if one["type"] == "forbidden")
    allowed = {
        "__main__", "api", "cli", "demo", "errors", "files", "messages", "output", "readahead", "reports", "runs",
        "signals",
    }  # fmt: skip
    modules = {name for name in PACKAGES if not name.startswith("__py") and name != "py"}
    assert contract["source_modules"] == ["symfuse.cli"]
    assert set(contract["forbidden_modules"]) == {f"symfuse.{name}" for name in modules - allowed}


# ---- old names


@pytest.mark.parametrize(("old", "now"), [("distance", "relate"), ("score", "evaluate"), ("plot", "report")])
def test_old_names_in_python_say_the_new_one(old: str, now: str) -> None:
    with pytest.warns(SymfuseWarning, match=rf"symfuse\.{old} is now called symfuse\.{now}"):
        found = getattr(symfuse, old)
    assert getattr(found, "func", found) is getattr(symfuse, now)
    assert old not in symfuse.__all__


@pytest.mark.parametrize("old", OLD_VERBS)
def test_old_names_on_the_command_line_say_the_new_one(old: str) -> None:
    words = [old, "none", "none"] if old == "distance" else [old, "none", "-o", "figures"]
    result = run(*words)
    assert result.exit_code == 3
    assert f"note: symfuse {old} is now called symfuse {' '.join(OLD_VERBS[old])}" in result.stderr
    assert "is now called" not in run(*words, "-q").stderr


# ---- relate and rewrite


def test_relate_measures_what_an_alignment_leaves() -> None:
    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    alignment = symfuse.match(a, to=b, axes="all")
    found = symfuse.relate(a, b, alignment).distance
    assert found.after is not None
    assert found.after.euclidean < found.euclidean
    assert found.pieces == symfuse.relate(alignment.in_frame(a), alignment.in_frame(b)).distance.pieces
    assert found.after == symfuse.relate(alignment(a), alignment.in_frame(b)).distance
    assert symfuse.relate(a, b).distance.after is None
    assert json.loads(json.dumps(found.to_dict()))["after"]["euclidean"] == found.after.euclidean


@pytest.mark.parametrize("rewrites", [["untie", "fold_norms"], ["fold_norms", "centre", "untie"], ["balance"]], ids=str)
def test_rewrites_are_exact_and_recorded(rewrites: list[str], tmp_path: Path) -> None:
    model = MODELS["gpt2-lm"](0).to(torch.float64)
    new = symfuse.rewrite(model, rewrites)
    assert any(name not in model or not torch.equal(new[name], model[name]) for name in new)
    assert symfuse.verify(model, new).worst < 1e-12
    name = next(name for name in new if name.endswith("mlp.c_proj.weight"))
    wrong = new.replace(tensors={**dict(new), name: new[name] * 1.01})
    assert not symfuse.verify(model, wrong).equal
    run_ = json.loads((new.save(tmp_path / "new") / "symfuse.json").read_text("utf-8"))  # type: ignore[operator]
    assert (run_["kind"], run_["frame"]) == ("frame", rewrites)
    with pytest.raises(OptionError, match=r"no rewrite is called 'fold_norm' \(did you mean 'fold_norms'\?\)"):
        symfuse.rewrite(model, ["fold_norm"])
    assert all(f'"{name}"' in (symfuse.rewrite.__doc__ or "") for name in REWRITES)


def test_the_command_writes_what_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MODELS["gpt2-lm"](0).save("a")
    run_ = data("rewrite", "a", "fold_norms", "untie", "-o", "new")
    written = json.loads(Path("new/symfuse.json").read_text("utf-8"))
    assert written["frame"] == ["fold_norms", "untie"]
    assert written["verified"] == run_["verified"]
    assert written["verified"]["equal"]
    assert "moving changed no output is proved" in Path("new/README.md").read_text("utf-8")
    other = symfuse.rewrite("a", ["untie", "fold_norms"])
    new = symfuse.open("new")
    assert new.keys() == other.keys()
    assert all(torch.equal(new[name], other[name]) for name in other)
    assert "did you mean 'fold_norms'?" in run("rewrite", "a", "fold_norm", "-o", "other").output
    assert not Path("other").exists()


# ---- keys


def blank(data: object) -> set[str]:
    """Keys with blanks, of all objects in JSON data but those of tables by name."""
    if isinstance(data, dict):
        inner = [value for key, value in data.items() if key != "descents"]
        return {key for key in data if " " in key} | {key for value in inner for key in blank(value)}
    return {key for value in data for key in blank(value)} if isinstance(data, list) else set()


def test_keys_have_no_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        MODELS["gpt2-lm"](seed).save(name)
    documents = [
        done("align", "a", "--to", "b", "-o", "out", "--json").stdout,
        done("merge", "out", "b", "-o", "merged", "--force-config", "--json").stdout,
        done("relate", "a", "b", "--json").stdout,
        done("inspect", "a", "--json").stdout,
        done("suggest", "a", "--no-run", "--json").stdout,
        done("check", "a", "b", "--json").stdout,
        done("inspect", "--families", "--json").stdout,
        json.dumps(dict(symfuse.match("a", "b").inverse().provenance)),
        (tmp_path / "out/symfuse.json").read_text("utf-8"),
    ]
    assert [blank(json.loads(text)) for text in documents] == [set()] * len(documents)


def test_keys_of_earlier_versions_are_read() -> None:
    earlier = {"options": {"same basis": 1, "groups": {"qk": "x"}}, "steps": [{"sha256 of": "a"}], "kind": "y"}
    now = {"options": {"same_basis": 1, "groups": {"qk": "x"}}, "steps": [{"sha256_of": "a"}], "kind": "y"}
    assert with_current_keys(earlier) == now


def test_an_alignment_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    from dataclasses import replace

    a, b = MODELS["gpt2-lm"](0), MODELS["gpt2-lm"](1)
    alignment = symfuse.match(a, b, axes="ffn")
    earlier = replace(alignment, provenance={**alignment.provenance, "together with": ["b"]})
    found = symfuse.Alignment.load(earlier.save(tmp_path / "old.symfuse"))
    assert found.provenance == {**alignment.provenance, "together_with": ["b"]}

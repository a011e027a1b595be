"""Rules of the house that no other tool checks: tests that can fail, skips that are accounted for, a small
public API, and no trace of the machine that a file was written on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, jaxtyped
from torch import Tensor

import symfuse
from symfuse.groups import Moments
from symfuse.groups.assignment import assign
from symfuse.methods import METHODS

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
TEST_FILES = sorted(TESTS.rglob("*.py"))

# Comparisons that return their answer: as a statement they check nothing.
ANSWERS = re.compile(r"(all|is)_?close\w*|equal\w*|array_equ\w+|eq|is_\w+|has_\w+|contains|startswith|endswith")
# What fails by itself.
CHECKS = re.compile(r"assert\w*|raises|warns|fail|raise_if_different")
# What differs from machine to machine and with its load: tests/allocations.py counts memory, benchmarks/ measure.
MACHINE = re.compile(
    r"maxrss|getrusage|Vm(RSS|HWM)|RssAnon|mallinfo|perf_counter|process_time|cpu_count|getaffinity|getloadavg|psutil"
)
SKIPS = {"skip", "skipif", "xfail", "importorskip", "skipTest", "skipUnless"}


def called(node: ast.AST) -> str:
    """The last name of what is called, or an empty text."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, wherever in it, without the expressions in them, which are ten times as many."""
    ahead = [tree]
    while ahead:
        yield (node := ahead.pop())
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):
            ahead += getattr(node, block, [])


def bare_comparisons(tree: ast.AST) -> Iterator[int]:
    for node in statements(tree):
        if isinstance(node, ast.Expr) and (
            isinstance(node.value, ast.Compare) or ANSWERS.fullmatch(called(node.value))
        ):
            yield node.lineno


def without_assertion(tree: ast.AST) -> Iterator[str]:
    """Tests in which nothing can fail: neither in themselves nor in functions of the file that they call."""
    functions = {node.name: node for node in statements(tree) if isinstance(node, ast.FunctionDef)}

    def checks(node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Assert) or CHECKS.fullmatch(called(part)):
                return True
            name = called(part)
            if name in functions and name not in seen and checks(functions[name], seen | {name}):
                return True
        return False

    return (name for name, node in functions.items() if name.startswith("test") and not checks(node))


def skips(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Line and reason of every skip; None for a reason that is put together while the test runs."""
    for node in ast.walk(tree):
        name = called(node)
        if isinstance(node, ast.Call) and name in SKIPS:
            named = [word.value for word in node.keywords if word.arg in ("reason", "msg")]
            reason = (named or node.args or [None])[-1]
            yield node.lineno, reason.value if isinstance(reason, ast.Constant) else None
        elif isinstance(node, ast.Attribute) and node.attr in SKIPS - {"skip"}:
            parents = (p for p in ast.walk(tree) if isinstance(p, ast.Call) and p.func is node)
            if not any(parents):  # a mark without a reason
                yield node.lineno, None


@cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- the rules -------------------------------------------------------------------------------------


def test_no_comparison_stands_as_a_statement() -> None:
    found = [f"{name_of(path)}:{line}" for path in TEST_FILES for line in bare_comparisons(parsed(path))]
    assert not found, f"these compare and drop the answer; write `assert`: {', '.join(found)}"


def test_every_test_can_fail() -> None:
    found = [f"{name_of(path)}::{test}" for path in TEST_FILES for test in without_assertion(parsed(path))]
    assert not found, f"these assert nothing: {', '.join(found)}"


def test_every_skip_is_in_the_quarantine_list_and_nothing_else_is() -> None:
    listed = re.findall(r"^- `([^`]+)`: (.+)$", (TESTS / "QUARANTINE.md").read_text("utf-8"), re.MULTILINE)
    used = set()
    for path in TEST_FILES:
        file, text = name_of(path), path.read_text("utf-8")
        for line, reason in skips(parsed(path)) if any(word in text for word in SKIPS) else ():
            entries = [e for e in listed if e[0] == file and (reason in e[1] if reason else e[1][0] == "(")]
            assert entries, f"{file}:{line}: this skip ({reason or 'its reason is made at run time'}) is not listed"
            used.update(entries)
    stale = [file for file, reason in listed if (file, reason) not in used]
    assert not stale, f"listed, but no longer skipped: {', '.join(stale)}"


def test_the_public_api_is_small_and_documented() -> None:
    public = getattr(symfuse, "__all__", [])
    verbs = [name for name in public if not isinstance(getattr(symfuse, name), type)]
    assert len(verbs) <= 26, f"{len(verbs)} verbs; 26 are enough"
    assert len(set(public)) == len(public)
    for name in public:
        text = getattr(symfuse, name).__doc__ or ""
        generated = text.startswith(f"{name}(")  # what a dataclass writes where nobody did
        assert text.strip(), f"symfuse.{name} has no docstring"
        assert not generated, f"symfuse.{name} has no docstring of its own"


def test_no_file_names_a_path_of_one_machine() -> None:
    # Written so that this line is none itself. Tests that say what a path should be use tmp_path.
    machine = re.compile(r"(?<![\w.~}])/(?:work|tmp|root)/")
    built = {"dist", "build", "runs", "__pycache__"}
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".github", ".gitignore") for part in parts)
        if hidden or built & set(parts) or not path.is_file() or path.stat().st_size > 2**20:
            continue
        for i, line in enumerate(path.read_bytes().decode("utf-8", errors="ignore").splitlines(), 1):
            if machine.search(line):
                found.append(f"{name_of(path)}:{i}")
    assert not found, f"absolute paths of a machine: {', '.join(found)}"


def test_no_test_measures_the_machine() -> None:
    """test_benchmarks.py sets clocks of its own in the place of these."""
    others = [path for path in TEST_FILES if path.name not in ("test_house.py", "test_benchmarks.py")]
    found = [name_of(path) for path in others if MACHINE.search(path.read_text("utf-8"))]
    assert not found, f"these measure the machine: {', '.join(found)}"


# Names of tensors and of classes of families, as declarations have them.
OF_FAMILIES = re.compile(
    r"(?<!tie_)word_embeddings|embed_(tokens|in|out|positions)\b|\bw[tp]e\b|lm_head|\b[qkvo]_proj\b|\bc_(attn|fc|proj)\b|"
    r"query_key_value|self_attn|\bln_f\b|block_sparse_moe|LayerNorm\.|(encoder|decoder)\.(block|embed)|"
    r"\b(shared|score|classifier)\.weight|(?<!nn\.)\b[A-Z]\w+(Attention|LayerNorm|RMSNorm)\b"
)
# Where such names may stand outside of architectures/, and why.
MAY_NAME_TENSORS = {
    "src/symfuse/drafts/facts.py": "a draft guesses from the words in names what a tensor is for",
    "src/symfuse/rewriting/names.py": "prefixes of models of several modalities, by release",
}


def test_names_of_tensors_are_in_declarations_alone() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src/symfuse").rglob("*.py")):
        if "architectures" not in path.parts:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines() if OF_FAMILIES.search(line)]
            found |= {name_of(path): lines} if lines else {}
    wrong = {file: lines for file, lines in found.items() if file not in MAY_NAME_TENSORS}
    assert not wrong, f"names of families' tensors or classes; make them fields of Family or Architecture: {wrong}"
    assert MAY_NAME_TENSORS.keys() == found.keys(), "excepted, but names none"


def imported(path: Path) -> set[str]:
    """All dotted names that a file imports, wherever in it."""
    names = set()
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def on_a_circle(files: Mapping[str, Path]) -> list[str]:
    """The modules that import themselves by way of others."""
    imports = {name: {one for one in imported(path) if one in files and one != name} for name, path in files.items()}

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            new = imports[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    return [name for name in files if name in reached(name)]


@pytest.mark.parametrize(
    "folder", ["experiments", "benchmarks", *(f"src/symfuse/{name}" for name in ("drafts", "demo"))]
)
def test_no_modules_import_each_other(folder: str) -> None:
    """Those of the packages of symfuse as wholes are in the contract of pyproject.toml."""
    package = folder.removeprefix("src/").replace("/", ".") + "." if folder.startswith("src") else ""
    files = {f"{package}{path.stem}": path for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"}
    assert not on_a_circle(files)


@pytest.mark.parametrize("folder", ["experiments", "benchmarks"])
def test_nothing_imports_scripts_but_scripts_of_their_folder(folder: str) -> None:
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    others = {"experiments", "benchmarks", "src/symfuse"} - {folder}
    for other in others:
        wrong = names - {path.stem for path in (ROOT / other).glob("*.py")}
        named = re.compile(rf"^\s*(?:from|import)\s.*\b(?:{'|'.join(wrong)})\b", re.MULTILINE)
        for path in (ROOT / other).rglob("*.py"):
            used = wrong & {name.partition(".")[0] for name in imported(path)} if named.search(path.read_text()) else ()
            assert not used, f"{name_of(path)} imports {used} of {folder}"


# -- the rules must be able to fail ----------------------------------------------------------------

GOOD = """
def helper(x): assert x
def test_a(): assert torch.equal(a, b)
def test_b(): torch.testing.assert_close(a, b)
def test_c():
    with pytest.raises(ValueError): f()
def test_d(): helper(1)
def test_e(): verify(a, b).raise_if_different("a")
"""
BAD = """
def test_a(): torch.allclose(a, b)
def test_b(): a == b
def test_c(): x.equal(y)
def test_d(): np.array_equal(a, b)
def test_e(): f()
def test_f():
    for x in y: torch.isclose(x, y)
"""


def test_the_rules_tell_good_from_bad() -> None:
    good, bad = ast.parse(GOOD), ast.parse(BAD)
    assert not list(bare_comparisons(good))
    assert not list(without_assertion(good))
    assert sorted(bare_comparisons(bad)) == [2, 3, 4, 5, 8]
    assert sorted(without_assertion(bad)) == ["test_a", "test_b", "test_c", "test_d", "test_e", "test_f"]


def test_names_and_circles_are_found(tmp_path: Path) -> None:
    for name in ("layers.0.self_attn.q_proj.weight", "word_embeddings.weight", "class BloomAttention", "h.0.ln_f"):
        assert OF_FAMILIES.search(name), name
    for name in ("tie_word_embeddings", "nn.MultiheadAttention", "residual", "heads", "F.layer_norm"):
        assert not OF_FAMILIES.search(name), name
    files = {name: tmp_path / f"{name}.py" for name in "abcd"}
    for path, text in zip(
        files.values(), ("import b", "def f():\n    from c import x", "import a", "import a"), strict=True
    ):
        path.write_text(text, "utf-8")
    assert on_a_circle(files) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "text",
    ["usage.ru_maxrss", "'RssAnon: 3 kB'", "time.perf_counter()", "os.cpu_count()", "ctypes.CDLL(None).mallinfo2"],
)
def test_what_measures_the_machine_is_found(text: str) -> None:
    assert MACHINE.search(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pytest.skip('no data')", "no data"),
        ("pytest.skip(reason)", None),
        ("pytest.skip(f'no {x}')", None),
        ("@pytest.mark.skipif(x, reason='no mount')\ndef test(): assert f()", "no mount"),
        ("@pytest.mark.xfail\ndef test(): assert f()", None),
        ("@pytest.mark.xfail(reason='known')\ndef test(): assert f()", "known"),
        ("pytest.importorskip('lap', reason='optional')", "optional"),
    ],
)
def test_skips_are_found_with_their_reasons(text: str, reason: str | None) -> None:
    assert [found for _, found in skips(ast.parse(text))] == [reason]


def test_shapes_are_checked_while_tests_run() -> None:
    """By the hook of conftest.py, in the first calls of each function."""
    assert all(hasattr(function, "__wrapped__") for function in (Moments.__init__, assign))


def test_a_letter_of_shapes_means_the_same_in_what_is_returned() -> None:
    """In the place of jaxtyping's own decorator, as the hook of conftest.py puts it on functions."""

    @jaxtyped(typechecker=beartype)
    def cut(x: Float[Tensor, " n"], by: int) -> Float[Tensor, " n"]:
        return x[by:]

    assert [len(cut(torch.ones(n), by=0)) for n in (2, 3)] == [2, 3]
    with pytest.raises(BeartypeCallHintViolation):
        cut(torch.ones(2), 1)


def test_every_merge_method_is_in_the_docs() -> None:
    text = (ROOT / "docs/merging.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*?\|.*?\|.*?\|(.*?)\|", text, re.MULTILINE)
    assert {name for name, _ in rows} == set(METHODS)
    for name, parameters in rows:
        assert set(re.findall(r"`(\w+)`", parameters)) == METHODS[name].parameters.keys() - {"int8_mask"}

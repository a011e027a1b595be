"""Sixty slips of source code that the tests must catch: 20 of declarations, 20 of solvers and their application, 20 of
merging, recipes and files.

    python tests/mutation/sixty.py               all of them
    python tests/mutation/sixty.py gpt2 slerp    those whose names hold one of these words

Each is a snippet of text that occurs once under src/, what stands in its place, and the tests that must then fail. The
source is copied to a temporary folder, where one slip at a time is made. All tests run in forks of one process that has
imported what takes long (torch, transformers), so that a slip costs a few seconds. Run it before and after the tests
are made faster: the same slips must be caught. Where a snippet has been rewritten, its slip is adapted here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SECONDS = 600  # after which a run of tests counts as hung, and a slip that hangs as caught


@dataclass(frozen=True)
class Slip:
    """name: of the slip. old: a text that occurs once in the source. tests: files of tests by their names, each with a
    `::` and a test perhaps, or with a space and an expression of pytest's -k."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


def model(*labels: str, of: str = "test_all_symmetries_at_once_leave_the_function") -> tuple[str, ...]:
    """The contract test of tiny models."""
    return tuple(f"test_architectures.py::{of}[{label}]" for label in labels)


DECLARATIONS = (
    Slip("bert: a key is moved as a query", '"k": (f"({h} {qk}*)", f"{memory}*")',
         '"k": (f"({h} {qk})", f"{memory}*")', model("bert-token")),
    Slip("bert: the space of an untied decoder is signed", '"lm": Axis(c.hidden_size, Permutation()),  # of a decoder',
         '"lm": Axis(c.hidden_size, Signed()),  # of a decoder', model("bert-mlm-untied")),
    Slip("gpt2: a key is moved as a query", 'transposed(ATTENTION, "(h qk + h qk* + h v)"',
         'transposed(ATTENTION, "(h qk + h qk + h v)"', model("gpt2-lm")),
    Slip("gpt2: positions are not in the stream",
         '"positions residual",\n            **norm(LAYER + "ln_1"),\n            **heads',
         '"positions 20",\n            **norm(LAYER + "ln_1"),\n            **heads',
         model("gpt2-lm")),
    Slip("rotary: planes of neighbours in the place of halves", 'ATTENTION + "k_proj.weight": "(kv c* f) residual*"',
         'ATTENTION + "k_proj.weight": "(kv f c*) residual*"', model("llama-lm")),
    Slip("grouped: heads of the output in the other order",
         '"(kv v) residual*",\n    ATTENTION + "o_proj.weight": "residual (kv q v*)"',
         '"(kv v) residual*",\n    ATTENTION + "o_proj.weight": "residual (q kv v*)"', model("llama-lm")),
    Slip("gated: the gate follows signs", 'MLP + "gate_proj.weight": "|ffn| residual*"',
         'MLP + "gate_proj.weight": "ffn residual*"', model("llama-lm")),
    Slip("qwen3: planes behind a norm turn", "_family(c, Sign(), size=128)", "_family(c, size=128)", model("qwen3-lm")),
    Slip("phi3: gate and up in the other order", 'MLP + "gate_up_proj.weight": "(|ffn| + ffn) residual*"',
         'MLP + "gate_up_proj.weight": "(ffn + |ffn|) residual*"', model("phi3-partly")),
    Slip("gemma: gains without the one that is added", 'decoder.READS, "rms+1")', 'decoder.READS, "rms")',
         ("test_rewrites.py gemma",)),
    Slip("neox: a key's planes are moved as a query's", '"(h (c f + p + c* f + p* + v))"',
         '"(h (c f + p + c f + p* + v))"', model("neox-lm")),
    Slip("falcon: query heads before their groups", '"(kv q v*)"\n    if c.get("multi_query"',
         '"(q kv v*)"\n    if c.get("multi_query"', model("falcon-grouped")),
    Slip("falcon: heads with ALiBi are reordered", '(None, "qk", "qk*") if alibi',
         '(Permutation(), "qk", "qk*") if alibi', model("falcon-alibi")),
    Slip("experts: the router stays", '"e residual*",  # the router', '"9 residual*",  # the router',
         model("mixtral-lm")),
    Slip("t5: each layer orders its heads", 'order = (layers,) if part == "cross" or biases_in_all else ()',
         "order = (layers,)", model("t5-lm")),
    Slip("whisper: keys of cross-attention read the decoder",
         '"k": (f"({h} {qk}*)", f"{memory}*")', '"k": (f"({h} {qk}*)", f"{stream}*")', model("whisper-lm")),
    Slip("opt: positions are in the embedding's space", '"decoder.embed_positions.weight": "positions residual"',
         '"decoder.embed_positions.weight": f"positions {c.hidden_size}"', model("opt-lm")),
    Slip("bloom: heads with ALiBi are reordered", ' | {"h": Axis(heads, why=ALIBI)}', "", model("bloom-lm")),
    Slip("deberta: the key's bias is free although positions read it",
         '([] if "p2c" in position else [key_shift(SELF + "key_proj")])', '[key_shift(SELF + "key_proj")]',
         model("deberta-mlm", of="test_translated_biases_alone_leave_the_function")),
    Slip("reads: the norm before the feed-forward is not folded into up",
         'BEFORE_MLP: (MLP + "gate_proj.weight", MLP + "up_proj.weight"),', 'BEFORE_MLP: (MLP + "gate_proj.weight",),',
         ("test_rewrites.py llama",)),
)  # fmt: skip

SOLVERS = (
    Slip("assignment: the least of each row", "indices = matrices.argmax(-1)", "indices = matrices.argmin(-1)",
         ("test_assignment.py",)),
    Slip("assignment: costs are scores", "costs.neg_().add_(prices.cpu().double())",
         "costs.add_(prices.cpu().double())", ("test_assignment.py",)),
    Slip("monomial: the dual keeps its scale", "Monomial(self.index, None if self.scale is None else 1 / self.scale)",
         "Monomial(self.index, self.scale)", ("test_groups.py variances_are",)),
    Slip("monomial: scales of the inverse in the old order", "1 / torch.take_along_dim(self.scale, inverse, -1)",
         "1 / self.scale", ("test_groups.py group_laws",)),
    Slip("monomial: composed in the other order", "index = torch.take_along_dim(other.index, self.index, -1)",
         "index = torch.take_along_dim(self.index, other.index, -1)", ("test_groups.py group_laws",)),
    Slip("signed: assigned by scores with their signs", "index = assign_batch(c.abs() + plain)",
         "index = assign_batch(c + plain)", ("test_groups.py signed_permutation_against",)),
    Slip("sign: of zero", "torch.where(t < 0, -1.0, 1.0).double()", "torch.where(t <= 0, -1.0, 1.0).double()",
         ("test_groups.py neither_sign",)),
    Slip("polar: transposed", "q: Tensor = u @ vt", "q: Tensor = (u @ vt).mT", ("test_groups.py orthogonal_against",)),
    Slip("scale: the quartic's sign", "(3, 1, 0), (1, -1, 1)", "(3, 1, 0), (1, 1, 1)", ("test_scale.py",)),
    Slip("signed monomial: the worse sign", "scale_cost(flipped, p, -q, r, -s) < scale_cost(kept, p, q, r, s)",
         "scale_cost(flipped, p, -q, r, -s) > scale_cost(kept, p, q, r, s)",
         ("test_groups.py signed_monomial_against",)),
    Slip("monomial: plain scores count against", 'cost -= 2 * cross["plain"]', 'cost += 2 * cross["plain"]',
         ("test_groups.py signed_monomial_against",)),
    Slip("rotary: turned the other way", "c[..., 1, 0] - c[..., 0, 1])", "c[..., 0, 1] - c[..., 1, 0])",
         ("test_groups.py phase_against or rotary_against",)),
    Slip("centred: a sign of what is felt", "felt = along < -ROUNDING", "felt = along > -ROUNDING",
         ("test_centred.py",)),
    Slip("apply: a value's translation is added to the output", "out = out - _through(", "out = out + _through(",
         model("bert-token", of="test_translated_biases_alone_leave_the_function")),
    Slip("apply: a gauge's constant is added", "out = out - v.to(dtype) * (", "out = out + v.to(dtype) * (",
         ("test_gauges.py",)),
    Slip("alignment: the inverse is not re-indexed",
         "reindexed(spec, instance, element.inverse(), elements.get)", "element.inverse()",
         model("bert-token", of="test_the_inverse_restores_the_weights")),
    Slip("alignment: composed in the other order", "compose(element, out[instance])",
         "compose(out[instance], element)", model("llama-lm", of="test_composing_is_applying_in_turn")),
    Slip("matching: long translations are kept", "t.copy_(wanted * (over(wanted) <= 1)[..., None])", "t.copy_(wanted)",
         ("test_overflow.py", "test_matching_cases.py")),
    Slip("matching: the dearest candidate", "cost, best, shifts, changed_units = min(candidates, key=_cost)",
         "cost, best, shifts, changed_units = max(candidates, key=_cost)", ("test_matching.py large_value_biases",)),
    Slip("moments: norms for squared norms", "moment.addcmul_(norms, norms)", "moment.add_(norms)",
         ("test_matching.py steps_report or no_scaled_permutation",)),
)  # fmt: skip

MERGING = (
    Slip("slerp: from the other end", "torch.sin((1 - t) * angle), torch.sin(t * angle)",
         "torch.sin(t * angle), torch.sin((1 - t) * angle)", ("test_spherical.py slerp",)),
    Slip("model stock: one delta too many", "denominator = 1 + (count - 1) * cosine",
         "denominator = 1 + count * cosine", ("test_spherical.py stock",)),
    Slip("nuslerp: the other weight", "else weight[1] / total", "else weight[0] / total",
         ("test_spherical.py nuslerp",)),
    Slip("ties: entries of the other sign", "vector.mul_(sign).clamp_(min=0)", "vector.mul_(sign).clamp_(max=0)",
         ("test_task_vectors.py ties",)),
    Slip("ties: the vote overwrites the first vector", "added([votes[0].clone(), *votes[1:]])", "added([*votes])",
         ("test_task_vectors.py ties",)),
    Slip("ties: one entry more", "kept = [max(1, int(share * size)) for share in densities]",
         "kept = [max(1, int(share * size) + 1) for share in densities]", ("test_task_vectors.py ties",)),
    Slip("trim: the last of equal entries", ".nonzero().squeeze(1)[self.left :]",
         ".nonzero().squeeze(1)[: found - self.left]", ("test_task_vectors.py",)),
    Slip("dare: rescaled the other way", "delta.mul_(STEPS / steps)", "delta.mul_(steps / STEPS)",
         ("test_task_vectors.py dare",)),
    Slip("breadcrumbs: outliers stay", "kept.sub_(dropped[0]) if dropped else kept", "kept",
         ("test_task_vectors.py breadcrumbs",)),
    Slip("mean: shares of the whole", "out.append((number, shares[number] / total))",
         "out.append((number, shares[number]))", ("test_mean.py",)),
    Slip("random: twins draw the same", r"{self.name}\0{name}\0{twin}\0{block}", r"{self.name}\0{name}\0{block}",
         ("test_task_vectors.py masks",)),
    Slip("regmean: the diagonal without its share", "shrunk.diagonal().copy_(c * gram.diagonal())",
         "shrunk.diagonal().copy_(gram.diagonal())", ("test_regmean.py",)),
    Slip("fisher: the floor is a ceiling", ".clamp_(min=least).mul_(share)", ".clamp_(max=least).mul_(share)",
         ("test_fisher_merge.py",)),
    Slip("settings: interpolated from the other end", "(1 - part) * a + part * b", "part * a + (1 - part) * b",
         ("test_settings.py",)),
    Slip("settings: filters are whole names", "self.filter is None or self.of_all or self.filter in tensor",
         "self.filter is None or self.of_all or self.filter == tensor",
         ("test_settings.py", "test_run_recipes.py filter")),
    Slip("recipes: heads that are to be dropped stay", 'spec.heads if recipe.heads == "drop" else frozenset()',
         "frozenset()", ("test_run_recipes.py test_align",)),
    Slip("files: narrow dtypes first", "(-RANK[infos[name].dtype], name)", "(RANK[infos[name].dtype], name)",
         ("test_writer.py", "test_files.py")),
    Slip("files: a shard that is full is cut", "filled + info.nbytes > max_shard_size",
         "filled + info.nbytes >= max_shard_size", ("test_writer.py",)),
    Slip("files: bytes behind the last tensor", "if actual != expected:", "if actual < expected:",
         ("test_files.py truncated_or_extended",)),
    Slip("vocabulary: rows that are missing are summed", "return total / count.reshape(-1, *[1] * len(self.rest))",
         "return total", ("test_vocabulary.py",)),
)  # fmt: skip

SLIPS = DECLARATIONS + SOLVERS + MERGING


class MissingError(Exception):
    """A snippet that does not occur once, or a test that is not there."""


def source_of(slip: Slip, src: Path) -> Path:
    """The file under src that has the snippet."""
    found = {path: text.count(slip.old) for path in src.rglob("*.py") if slip.old in (text := path.read_text("utf-8"))}
    if sum(found.values()) != 1:
        places = ", ".join(f"{path.relative_to(src)} ({count})" for path, count in found.items()) or "nowhere"
        raise MissingError(f"{slip.name}: its snippet must occur once, and occurs in {places}")
    return next(iter(found))


def arguments(test: str) -> list[str]:
    """What pytest is started with for one entry of `Slip.tests`."""
    where, _, words = test.partition(" ") if "::" not in test else (test, "", "")
    name, sign, one = where.partition("::")
    files = list(TESTS.rglob(name))
    if len(files) != 1:
        raise MissingError(f"{len(files)} files of tests are called {name}")
    return [f"{files[0]}{sign}{one}", *(["-k", words] if words else [])]


def in_fork(work: Callable[[], int], log: Path) -> int:
    """The number that the work returns in a process of its own, whose output goes to a file; 9 if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 8
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return 9


def run_tests(slip: Slip, src: Path, log: Path) -> str:
    """Whether the slip is caught or missed, or what else happened."""

    def work(tests: Sequence[str]) -> Callable[[], int]:
        def pytest_in_source() -> int:
            import pytest

            sys.path.insert(0, str(src))
            os.environ["PYTHONPATH"] = str(src)
            quiet = ["-q", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            options = [*quiet, "-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
            return int(pytest.main([*options, "--rootdir", str(ROOT), *(a for test in tests for a in arguments(test))]))

        return pytest_in_source

    ran = 0
    single = [test for test in slip.tests if " " not in test]
    runs = [[test] for test in slip.tests if test not in single] + ([single] if single else [])
    for tests in runs:
        code = in_fork(work(tests), log)
        if code in (1, 2, 9):  # a failure; an import that fails; a hang
            return "caught"
        if code not in (0, 5):
            return f"pytest ended with {code}"
        ran += code == 0
    return "missed" if ran else "no test was run"


def report(slips: Sequence[Slip], log: Path) -> int:
    """Try each, print what became of it, and return how many were not caught."""
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src)
        for number, slip in enumerate(slips, 1):
            begin = time.monotonic()
            try:
                path = source_of(slip, src)
                text, times = path.read_text("utf-8"), path.stat()
                path.write_text(text.replace(slip.old, slip.new), "utf-8")
                os.utime(path, (times.st_atime, times.st_mtime - 1000 * number))  # no compiled file of another slip
                try:
                    with log.open("a") as file:
                        file.write(f"\n===== {slip.name}\n")
                    result = run_tests(slip, src, log)
                finally:
                    path.write_text(text, "utf-8")
                    os.utime(path, (times.st_atime, times.st_mtime))
            except MissingError as error:
                result = str(error)
            bad += result != "caught"
            print(f"{result}: {slip.name} ({time.monotonic() - begin:.0f} s)", flush=True)
    used = os.times()
    print(f"{len(slips) - bad} of {len(slips)} caught; {used.children_user + used.user:.0f} s of processor time")
    return bad


def unharmed(slips: Sequence[Slip], log: Path) -> bool:
    """Whether all of these tests pass while there is no slip: else nothing that fails is caught."""
    tests = sorted({test for slip in slips for test in slip.tests})
    return run_tests(Slip("none", "", "", tuple(tests)), ROOT / "src", log) == "missed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="of the names of slips; default: all")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "sixty.log", help="pytest's output")
    parser.add_argument("--no-base", action="store_true", help="do not run the tests without a slip first")
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    for name in ("torch", "transformers", "hypothesis", "beartype", "jaxtyping", "scipy.optimize", "pytest", "yaml"):
        with contextlib.suppress(ImportError):
            __import__(name)
    slips = [slip for slip in SLIPS if not given.words or any(word in slip.name for word in given.words)]
    if not given.no_base and not unharmed(slips, given.log):
        print(f"without any slip the tests fail: {given.log}")
        return 1
    return 1 if report(slips, given.log) else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Shape and type checks (jaxtyping, beartype) are on in tests, nothing reaches for the network, and what is tested does
not depend on how busy the machine is or how the tests were started."""

from __future__ import annotations

import functools
import gc
import os
import re

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

one_meaning = jaxtyping.jaxtyped("context")  # in it each letter of shapes stands for one size
CALLS = 200  # of each function in each worker, in which shapes are checked
COMPILED = ["symfuse.groups.auction"]  # numba takes functions as they are written


def meaning(annotation: object, scope: dict[str, Any]) -> object:
    """What a written annotation stands for; Any if it has names that are imported for mypy alone."""

    def holder(_: Any) -> None: ...

    holder.__annotations__ = {"_": annotation}
    try:
        return get_type_hints(holder, scope, include_extras=True)["_"]
    except Exception:
        return Any


def named_by_jaxtyping(annotation: object, scope: dict[str, Any]) -> bool:
    """Whether a written annotation names one of its types, such as Float, or one that was made of it."""
    named = (scope.get(word) for word in re.findall(r"\w+", str(annotation)))
    return any(getattr(one, "__module__", None) == "jaxtyping" for one in named)


def checked(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What the import hook puts on every function and class, in the place of jaxtyping's own decorator.

    That one binds the arguments of each call, and checks them once before it and once after it, which made up half of
    the time of all tests. Here the type checker takes the functions that have shapes in their signatures, which run
    where these mean the same in the arguments and in what is returned. Types without shapes are
    checked by mypy.
    """

    def decorate(made: Any) -> Any:
        if made.__module__ in COMPILED:
            return made
        if isinstance(made, type):
            if is_dataclass(made) and not hasattr(made.__init__, "__wrapped__"):
                made.__init__ = decorate(made.__init__)  # type: ignore[misc]
            return made
        written = made.__annotations__
        if not any(named_by_jaxtyping(annotation, made.__globals__) for annotation in written.values()):
            return made
        hints = {name: meaning(annotation, made.__globals__) for name, annotation in written.items()}
        made.__annotations__ = hints
        out = typechecker(made)
        made.__annotations__ = out.__annotations__ = written
        return with_shapes(out, made)

    return decorate


def with_shapes(checks: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(CALLS))

    @functools.wraps(checks)
    def within(*args: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            return plain(*args, **options)
        with one_meaning:
            return checks(*args, **options)

    return within


jaxtyping.jaxtyped = checked  # type: ignore[assignment]
jaxtyping.install_import_hook("symfuse", "beartype.beartype")

for name in ("CI", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)  # of the terminal, or of who started the tests: they change what is printed

# The same examples in every run, whatever the time they take. Other ones: --hypothesis-profile=default
settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")


# Nothing that tests write is forced to the disk, which takes milliseconds for each file: none turns the power off.
os.fsync = lambda _file: None


# Names are converted by patterns, of which transformers compiles more for each model than are kept by default.
re._MAXCACHE = 10_000  # type: ignore[attr-defined]


gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """What is imported and collected stays: no run of the collector goes through it, now or in a test."""
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # else a full collection, of all models that tests share, takes 5 % of the time
    gc.enable()
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> Iterator[None]:
    """Signals have their default handlers, also where the tests were started by nohup, which ignores SIGHUP, or in the
    background of a script, which ignores SIGINT: processes inherit that."""
    default = {signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

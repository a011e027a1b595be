"""Studies: a table or figure of a paper as work that is done piece by piece, kept, and gone on with after a stop.

Every study is a class in a file of its own, with its name. `run.py` runs them; `results.py` writes the page.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from config import Config

import symfuse
from symfuse.errors import OptionError

ROOT = Path(__file__).parent
DATA = ROOT / "data"
STUDIES = (
    "zhang_table1", "zhang_table2", "zhang_table3", "zhang_figure3", "zhang_figure4", "zhang_figure5", "zhang_layers",
    "theus_table2", "theus_simplex", "theus_widths", "theus_iterations",
    "verma_table1", "verma_table2", "verma_table3", "verma_data", "rebase", "relations", "rounding",
)  # fmt: skip
LEVEL = 0.05  # at which a gain is decided

Row = dict[str, Any]
Key = tuple[Any, ...]
Part = tuple[Any, ...]


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what our rows say. holds: None if they do not decide it."""

    says: str
    here: str
    holds: bool | None


@dataclass(eq=False)
class Study(ABC):
    """A table or figure. config: with options of this study.

    paper: a key of `results.PAPERS`. title: of which table or figure. keys: by which a row is known, among all rows of
    the study. about: Markdown, what was done here, and how that differs from the paper. known: names of its options,
    and of those of each of its families or models. Raises OptionError for another, and for pairs that are none.
    """

    config: Config
    options: Mapping[str, Any] = field(init=False)

    name: ClassVar[str]
    paper: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    known: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        self.options = self.config.studies[self.name]
        where = f"{self.config.path}: studies: {self.name}"
        inner = {**self.options.get("families", {}), **self.options.get("models", {})}
        for place, options in [(where, self.options), *((f"{where}: {name}", its) for name, its in inner.items())]:
            if strange := [key for key in options if key not in self.known]:
                raise OptionError(f"{place}: {strange[0]!r} is no option; there are {', '.join(self.known)}")
            for pair in options.get("pairs", []):
                if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1]:
                    raise OptionError(f"{place}: pairs: expected two different seeds, found {pair!r}")

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Pieces of work that do not need each other, which may run at one time; JSON's scalars."""

    @abstractmethod
    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        """The rows of a part, measured one by one, but those whose key is done."""

    def models(self) -> Iterator[tuple[str, Any]]:
        """Names of families, or of what is fine-tuned, with the seed of each model that the parts share, so that none
        is trained twice at one time."""
        return iter(())

    @abstractmethod
    def tables(self, rows: Sequence[Row]) -> str:
        """Markdown, our figures beside the paper's."""

    @abstractmethod
    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """What the paper says, and whether it is so here, decided by the rows."""

    @property
    def made_from(self) -> Row:
        """On what the rows depend, beside the code, in JSON's types: the options, and how the models are made."""
        models = {name: self.config.described(name) for name in dict.fromkeys(name for name, _ in self.models())}
        data: Row = json.loads(json.dumps({"options": self.options, "models": models}))
        return data

    def draw(self, rows: Sequence[Row], file: Path) -> None:  # noqa: B027 - most tables have no figure
        """The figure, if there is one, as SVG."""

    def key(self, row: Mapping[str, Any]) -> Key:
        """By which a row is known: lists as tuples."""
        return tuple(tuple(v) if isinstance(v := row[name], list) else v for name in self.keys)


@dataclass(frozen=True)
class Store:
    """The rows of a study in a JSON file, to which several processes may add."""

    file: Path
    study: Study

    @classmethod
    def of(cls, study: Study, folder: Path = DATA) -> Store:
        return cls(folder / study.config.name / f"{study.name}.json", study)

    def rows(self) -> list[Row]:
        """Raises OptionError if they were made with other options or models than the config has now, or if no run wrote
        the file."""
        rows: list[Row] = self._read()["rows"]
        return rows

    def unfinished(self) -> list[Part]:
        """The parts whose rows are not all there."""
        finished = {tuple(part) for part in self._read()["finished"]}
        return [part for part in self.study.parts() if part not in finished]

    def require_writable(self) -> None:
        """Raises OptionError if rows cannot be kept: better before hours than after."""
        self._read()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"rows cannot be kept in {self.file.parent} ({error}); choose another --data") from error
        if not os.access(self.file.parent, os.W_OK):
            raise OptionError(f"rows cannot be kept in {self.file.parent}, which is read-only; choose another --data")

    def _read(self) -> Row:
        if not self.file.exists():
            return {"rows": [], "finished": []}
        try:
            data: Row = json.loads(self.file.read_text("utf-8"))
            same = {key: data[key] for key in ("options", "models")} == self.study.made_from
            keys = [self.study.key(row) for row in data["rows"]]
            list(data["finished"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OptionError(
                f"{self.file} is not what a run of {self.study.name} wrote ({type(error).__name__}: {error}); "
                "restore it, or delete it to make its rows anew"
            ) from error
        if not same or len(set(keys)) < len(keys):
            raise OptionError(
                f"{self.file} was made with other options or models of {self.study.name} than "
                f"{self.study.config.path} has; delete it to make its rows anew, or restore the config"
            )
        return data

    def done(self) -> set[Key]:
        return {self.study.key(row) for row in self.rows()}

    def add(self, row: Row | None, command: str, finished: Part | None = None) -> None:
        """Put a row in the file, in place of the one with its key, and a part among those that are finished; all is
        written anew. Raises OptionError if it cannot be."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.file.parent):
            data = self._read()
            rows = [one for one in data["rows"] if row is None or self.study.key(one) != self.study.key(row)]
            parts = dict.fromkeys(map(tuple, [*data["finished"], *([finished] if finished else [])]))
            about = provenance(command) | {"config": self.study.config.name} | self.study.made_from
            scratch = self.file.with_suffix(".new")
            try:
                rows += [row] if row else []
                scratch.write_text(written(about | {"finished": list(parts)}, rows), "utf-8")
                scratch.replace(self.file)
            except OSError as error:
                scratch.unlink(missing_ok=True)
                raise OptionError(f"{self.file} cannot be written ({error}); its rows so far are kept") from error

    def run(self, part: Part, command: str) -> int:
        """Make and keep the rows of a part that are not there yet; how many those were."""
        made, start = 0, (time.process_time(), time.perf_counter())
        for row in self.study.rows(part, self.done()):
            spent = time.process_time() - start[0], time.perf_counter() - start[1]
            cost = {"cpu seconds": round(spent[0], 2), "wall seconds": round(spent[1], 2), "commit": commit()}
            self.add({**row, **cost}, command)
            print(f"{self.study.name} {' '.join(map(str, self.study.key(row)))}: {spent[1]:.1f} s", flush=True)
            made, start = made + 1, (time.process_time(), time.perf_counter())
        if part in self.unfinished():
            self.add(None, command, finished=part)
        return made


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time is in here; the lock goes with it, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def written(about: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """JSON with a line for each row."""
    head = "".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)},\n" for key, value in about.items())
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{\n{head} "rows": [\n{lines}\n]}}\n'


def provenance(command: str) -> Row:
    """Of what versions and machine figures are, and what made them."""
    import transformers

    return {
        "command": command,
        "symfuse": symfuse.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {torch.get_num_threads()} thread a process",
    }


@functools.cache
def commit() -> str:
    """Of the code that runs, with "-dirty" if it was changed since; "unknown" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def mean_error(values: Iterable[float], digits: int = 2, scale: float = 1.0, sign: str = "") -> str:
    """Mean ± standard error of the mean; of one value that alone; of none a dash."""
    scaled = [scale * value for value in values]
    if not scaled:
        return "–"
    text = f"{statistics.fmean(scaled):{sign}.{digits}f}"
    if len(scaled) == 1:
        return text
    return f"{text} ± {statistics.stdev(scaled) / math.sqrt(len(scaled)):.{digits}f}"


def better(gains: Sequence[float], least: float = 0.0) -> bool | None:
    """Whether the mean gain is above nothing (True), or below nothing or `least`, what is called a gain (False; also if
    there is none at all), by Student's one-sided test at 5 %; None if that does not decide it."""
    from scipy.stats import t

    if not any(gains):
        return False
    if len(gains) < 2:
        return None
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    most = float(t.ppf(1 - LEVEL, len(gains) - 1)) * error
    mean = statistics.fmean(gains)
    return True if mean > most else False if mean < max(-most, least - most) else None


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def study_named(name: str, config: Config) -> Study:
    """The one class of a study's file that has its name."""
    module = importlib.import_module(name)
    (study,) = (x for x in vars(module).values() if isinstance(x, type) and getattr(x, "name", None) == name)
    made: Study = study(config)
    return made

"""Studies: a table or figure of a paper as work that is done piece by piece, kept, and gone on with after a stop.

Every study is a class in a file of its own, with its name. `run.py` runs them; `results.py` writes the page.
"""

from __future__ import annotations

import fcntl
import functools
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

import families
import finetune
import torch
import yaml

import symfuse
from symfuse.errors import OptionError

ROOT = Path(__file__).parent
CONFIGS, DATA = ROOT / "configs", ROOT / "data"
LEVEL = 0.05  # at which a gain is decided

Row = dict[str, Any]
Key = tuple[Any, ...]
Part = tuple[Any, ...]


@dataclass(frozen=True)
class Config:
    """What a config file says. name: of the file. families, tuned: how to come by models. studies: the options of each
    that it has."""

    name: str
    path: Path
    device: str
    families: Mapping[str, Any]
    tuned: Mapping[str, Any]
    studies: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, which: str) -> Config:
        """By the name of a file in configs/, or by its path. One that `extends` another has its device, families and
        tuned, but what it says itself. Raises OptionError if there is no such file, or a key in it is unknown."""
        path = Path(which) if which.endswith((".yml", ".yaml")) else CONFIGS / f"{which}.yml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yml")))
            raise OptionError(f"there is no config {which!r}: expected {known}, or the path of a file")
        found = yaml.safe_load(path.read_text("utf-8"))
        keys = ("extends", "device", "families", "tuned", "studies")
        if strange := sorted(set(found) - set(keys)):
            raise OptionError(f"{path}: {strange[0]!r} is no key; there are {', '.join(keys)}")
        base = cls.read(found["extends"]) if "extends" in found else cls("", path, "cpu", {}, {}, {})
        known, tuned = ({**getattr(base, key), **found.get(key, {})} for key in ("families", "tuned"))
        return cls(path.stem, path, found.get("device", base.device), known, tuned, found.get("studies", {}))

    def family(self, name: str) -> families.Family:
        return families.family(name, self.families, self.device)

    def tune(self, name: str) -> finetune.Tuned:
        return finetune.tuned(name, self.tuned, self.device, self.families)

    def described(self, name: str) -> Mapping[str, Any]:
        """What it says of a family or of what is fine-tuned, and of the family that this starts from."""
        about = self.tuned.get(name) or self.families.get(name, {})
        base = about.get("base")
        return {**about, "base": self.families[base]} if base in self.families else about

    def prepare(self, name: str, seed: Any) -> None:
        """Have a model there: of a family by its seed, of what is fine-tuned by domain and seed."""
        if name in self.tuned:
            self.tune(name).model(*seed)
        else:
            self.family(name).model(seed)


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what our rows say. holds: None if they do not decide it."""

    says: str
    here: str
    holds: bool | None


@dataclass(eq=False)
class Study(ABC):
    """A table or figure. config: with options of this study.

    paper: "zhang", "theus" or "verma". title: of which table or figure. keys: by which a row is known, among all rows
    of the study. about: Markdown, what was done here, and how that differs from the paper.
    """

    config: Config
    options: Mapping[str, Any] = field(init=False)

    name: ClassVar[str]
    paper: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        self.options = self.config.studies[self.name]

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
        found: Row = json.loads(json.dumps({"options": self.options, "models": models}))
        return found

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
        """Raises OptionError if they were made with other options or models than the config has now."""
        if not self.file.exists():
            return []
        found = json.loads(self.file.read_text("utf-8"))
        if {key: found.get(key) for key in ("options", "models")} != self.study.made_from:
            raise OptionError(
                f"{self.file} was made with other options or models of {self.study.name} than "
                f"{self.study.config.path} has; delete it to make its rows anew, or restore the config"
            )
        rows: list[Row] = found["rows"]
        return rows

    def done(self) -> set[Key]:
        return {self.study.key(row) for row in self.rows()}

    def add(self, row: Row, command: str) -> None:
        """Put a row in the file, in place of the one with its key; all rows are written anew."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.file.parent):
            rows = [one for one in self.rows() if self.study.key(one) != self.study.key(row)]
            about = provenance(command) | {"config": self.study.config.name} | self.study.made_from
            scratch = self.file.with_suffix(".new")
            scratch.write_text(written(about, [*rows, row]), "utf-8")
            scratch.replace(self.file)

    def run(self, part: Part, command: str) -> int:
        """Make and keep the rows of a part that are not there yet; how many those were."""
        made, start = 0, (time.process_time(), time.perf_counter())
        for row in self.study.rows(part, self.done()):
            spent = time.process_time() - start[0], time.perf_counter() - start[1]
            cost = {"cpu seconds": round(spent[0], 2), "wall seconds": round(spent[1], 2), "commit": commit()}
            self.add({**row, **cost}, command)
            print(f"{self.study.name} {' '.join(map(str, self.study.key(row)))}: {spent[1]:.1f} s", flush=True)
            made, start = made + 1, (time.process_time(), time.perf_counter())
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
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def mean_error(values: Iterable[float], digits: int = 2, scale: float = 1.0, sign: str = "") -> str:
    """Mean ± standard error of the mean; of one value that alone; of none a dash."""
    found = [scale * value for value in values]
    if not found:
        return "–"
    text = f"{statistics.fmean(found):{sign}.{digits}f}"
    if len(found) == 1:
        return text
    return f"{text} ± {statistics.stdev(found) / math.sqrt(len(found)):.{digits}f}"


def better(gains: Sequence[float]) -> bool | None:
    """Whether the mean gain is above nothing (True) or below (False; also if there is none at all), by Student's
    one-sided test at 5 %; None if that does not decide it."""
    from scipy.stats import t

    if not any(gains):
        return False
    if len(gains) < 2:
        return None
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    most = float(t.ppf(1 - LEVEL, len(gains) - 1)) * error
    mean = statistics.fmean(gains)
    return True if mean > most else False if mean < -most else None


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])

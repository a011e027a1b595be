"""How vocabularies differ: in size, and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symfuse.errors import IncompatibleError
from symfuse.io import Checkpoint
from symfuse.messages import some
from symfuse.rewriting.vocabulary.tokenizer import Tokenizer, has_tokenizer, read_tokenizer, rows


def require_one_size(checkpoints: Sequence[Checkpoint]) -> None:
    """IncompatibleError, naming the sizes and the ways out, if vocabularies have different numbers of rows."""
    sizes = {checkpoint.name: rows(checkpoint) for checkpoint in checkpoints}
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise IncompatibleError(
            f"vocabulary sizes differ: {' and '.join(map(str, dict.fromkeys(sizes.values())))} rows ({words}). Say how "
            "to merge them: `tokenizer_source: union` (or base, or a model) matches the rows by the models' "
            "tokenizers; `tokenizer_source: shared-rows` merges the rows that all have as they stand and copies the "
            "others from the largest."
        )


@dataclass(frozen=True)
class Difference:
    """The difference between the tokenizers of `other` and `model`: the number of tokens with the same id; tokens with
    another id (token, id, other id); tokens in one only; and ids of different tokens (id, token, other token), whose
    rows a merge by number would mix."""

    model: str
    other: str
    same: int
    renumbered: tuple[tuple[str, int, int], ...]
    only_model: tuple[str, ...]
    only_other: tuple[str, ...]
    mixed: tuple[tuple[int, str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.renumbered or self.only_model or self.only_other)

    def __str__(self) -> str:
        parts = [f"{self.same} tokens with the same id"]
        if self.renumbered:
            examples = some((f"{token!r} ({a} and {b})" for token, a, b in self.renumbered), 3)
            parts.append(f"{len(self.renumbered)} with another: {examples}")
        for name, tokens in ((self.model, self.only_model), (self.other, self.only_other)):
            if tokens:
                parts.append(f"{len(tokens)} only in {name}: {some(map(repr, tokens), 3)}")
        if self.mixed:
            examples = some((f"{number} ({a!r} and {b!r})" for number, a, b in self.mixed), 3)
            parts.append(f"{len(self.mixed)} ids hold different tokens: {examples}")
        return f"tokenizers of {self.model} and {self.other}: {'; '.join(parts)}"

    @property
    def warning(self) -> str | None:
        """The effect of a merge by number on these tokens, and the way out; None if no rows of different tokens are
        mixed."""
        if not self.mixed:
            return None
        return (
            f"{self}; rows are merged by number, so that these tokens' rows are mixed: set `tokenizer_source: union` "
            "(or base, or a model; --tokenizer union) to match rows by token"
        )


def compare(checkpoints: Sequence[Checkpoint]) -> list[Difference]:
    """The difference of each model's tokenizer from that of the first model that has one, token by token; false if
    there is none. Models without a tokenizer are left out."""
    return compare_tokenizers([read_tokenizer(checkpoint) for checkpoint in checkpoints if has_tokenizer(checkpoint)])


def compare_tokenizers(theirs: Sequence[Tokenizer]) -> list[Difference]:
    """`compare`, for tokenizers that are read already."""
    out = []
    for other in theirs[1:]:
        a, b = theirs[0].tokens, other.tokens
        renumbered = tuple((token, a[token], b[token]) for token in a if token in b and a[token] != b[token])
        gone, new = tuple(t for t in a if t not in b), tuple(t for t in b if t not in a)
        there = {number: token for token, number in b.items()}
        mixed = tuple((n, t, there[n]) for t, n in a.items() if n in there and there[n] != t and b.get(t) != n)
        out.append(
            Difference(theirs[0].name, other.name, len(a) - len(gone) - len(renumbered), renumbered, gone, new, mixed)
        )
    return out

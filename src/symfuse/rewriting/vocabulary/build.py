"""The output's vocabulary: its tokens, and the source of each row in each model.

The rule is mergekit's. A model's own row, if it has the token; else the row that the recipe names; else the row of the
only model that has it; else the base's; else the mean of those that have it; if no model has it, zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from symfuse.errors import OptionError
from symfuse.io import Checkpoint
from symfuse.messages import some, suggestion
from symfuse.rewriting.vocabulary.tokenizer import PLAIN, Tokenizer, has_tokenizer, read_tokenizer, require_rows, rows

MOST_PADDING = 2**16  # larger than the blocks of any hardware
# What fills a row that a model lacks, if it is not a row of one model (whose number is then in Vocabulary.donors).
MEAN, ZERO, CENTRE = -1, -2, -3  # the mean of the models that have it; zeros; the mean of the model's other rows


@dataclass(frozen=True)
class TokenSource:
    """The source of a token's row in models that lack it; with `force`, in all models.

    kind: "model" (that model's row of the token), "model_token" (its row of another token, or of an id), "zero",
    "usual" (the rule for tokens that the recipe does not name; a missing token is added).
    """

    kind: Literal["model", "model_token", "zero", "usual"]
    model: str | None = None
    token: str | None = None
    token_id: int | None = None
    force: bool = False


@dataclass(frozen=True)
class Report:
    """shared: tokens (or rows) that all models have. added: those beyond the base's. filled: for each model, the number
    of rows by source. nowhere: tokens that no model has, whose rows are zero."""

    shared: int
    added: int
    filled: Mapping[str, Mapping[str, int]]
    nowhere: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the summary of a merge."""
        out = [f"vocabulary: {self.shared} rows in all models, {self.added} added"]
        for model, origins in self.filled.items():
            words = ", ".join(f"{count} {origin}" for origin, count in origins.items())
            out += [f"vocabulary: rows that {model} lacks: {words}"] if words else []
        if self.nowhere:
            out.append(f"vocabulary: no model has {some(map(repr, self.nowhere))}: rows of zeros")
        return out


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The output's vocabulary.

    tokens: token -> row. size: rows, padding included. rows: for each model, int64 of that size: the row that it has
    for each output row, or -1. donors, donor_rows: what fills the rows that are -1: a row of a model, or MEAN, ZERO or
    CENTRE. sizes: rows of each model. special: ids for the config (`bos_token_id`, …). files: the tokenizer's files.
    origin: whose tokenizer it is, in words.
    """

    tokens: Mapping[str, int]
    size: int
    rows: Mapping[int, Tensor]
    donors: Tensor
    donor_rows: Tensor
    sizes: tuple[int, ...]
    special: Mapping[str, Any]
    files: Mapping[str, bytes]
    report: Report
    origin: str

    def unchanged(self, model: int) -> bool:
        """Whether this model's rows are already the output's rows."""
        return self.sizes[model] == self.size and bool((self.rows[model] == torch.arange(self.size)).all())


def build(
    checkpoints: Sequence[Checkpoint],
    source: Literal["union", "base"] | int | Checkpoint,
    *,
    base: int | None,
    tokens: Mapping[str, TokenSource] | None = None,
    pad_to_multiple_of: int | None = None,
) -> Vocabulary:
    """The vocabulary of a merge of `checkpoints`.

    source: "base" (the base's tokenizer, or the first model's if base is None), "union" (that one, and what it lacks
    of the others' tokens, in order, with new ids), or a model (by number, or one that is not merged). base: whose rows
    fill the gaps first; None: no model's. tokens: where rows of single tokens come from; those that the tokenizer lacks
    are added. pad_to_multiple_of: the number of rows is rounded up.

    Rows: a union has one per token. Otherwise those of the model that the tokenizer comes from, padding rows included
    (they merge like the others), and more only if tokens are added. New padding rows are the mean of the others
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).

    CheckpointError if a tokenizer is absent, damaged or has tokens without a row, OptionError if `tokens` names a
    model or token that is not there, IncompatibleError if a tokenizer cannot take further tokens.
    """
    if pad_to_multiple_of is not None and not 1 <= pad_to_multiple_of <= MOST_PADDING:
        raise OptionError(
            f"pad_to_multiple_of is {pad_to_multiple_of}, expected a whole number from 1 to {MOST_PADDING}"
        )
    theirs = [_checked(checkpoint) for checkpoint in checkpoints]
    first = 0 if base is None else base
    own = first if isinstance(source, str) else source
    giver, start = (checkpoints[own], theirs[own]) if isinstance(own, int) else (own, _checked(own))
    new = _missing(start, theirs if source == "union" else [], tokens or {})
    out = start.extended(new)
    need = max(out.tokens.values(), default=-1) + 1
    kept = 0 if source == "union" else rows(giver)
    size = -(-max(need, kept) // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
    plan = _Plan(checkpoints, theirs, out.tokens, size)
    plan.padding(kept, own if isinstance(own, int) else None)
    plan.fill(base, tokens or {})
    special = {key: value for key, value in giver.config.items() if key.endswith("_token_id")}
    added = len(out.tokens.keys() - theirs[first].tokens.keys())
    shared = sum(all(token in tokenizer.tokens for tokenizer in theirs) for token in theirs[first].tokens)
    origin = f"tokenizer of {giver.name}" + (f" with {len(new)} tokens added" if new else "")
    return plan.vocabulary(special, out.files, Report(shared, added, plan.filled(), tuple(plan.nowhere)), origin)


def shared_rows(checkpoints: Sequence[Checkpoint]) -> Vocabulary:
    """The vocabulary of models whose rows agree as far as they go: rows that all have are merged, the others are copied
    from the model with the most rows, with its tokenizer files and special ids. Tokens are not compared.
    CheckpointError if the tokenizer that is used is damaged or has tokens without a row."""
    sizes = [rows(checkpoint) for checkpoint in checkpoints]
    size, fewest, largest = max(sizes), min(sizes), sizes.index(max(sizes))
    plan = _Plan(checkpoints, [], {}, size)
    plan.donors[fewest:] = largest
    plan.donor_rows[fewest:] = torch.arange(fewest, size)
    for model in range(len(checkpoints)):
        plan.rows[model][: size if model == largest else fewest] = torch.arange(size if model == largest else fewest)
    giver = checkpoints[largest]
    files = _checked(giver).files if has_tokenizer(giver) else {}
    special = {key: value for key, value in giver.config.items() if key.endswith("_token_id")}
    origin = f"tokenizer of {giver.name}" if files else "no tokenizer"
    return plan.vocabulary(special, files, Report(fewest, size - fewest, plan.filled(), ()), origin)


def _checked(checkpoint: Checkpoint) -> Tokenizer:
    tokenizer = read_tokenizer(checkpoint)
    require_rows(tokenizer, rows(checkpoint))
    return tokenizer


def _missing(
    start: Tokenizer, theirs: Sequence[Tokenizer], tokens: Mapping[str, TokenSource]
) -> dict[str, Mapping[str, Any]]:
    """The tokens that `start` lacks, with their attributes, in order: those of the other tokenizers, then those of the
    recipe."""
    new: dict[str, Mapping[str, Any]] = {}
    for tokenizer in theirs:
        for token in tokenizer.tokens:
            if token not in start.tokens and (token not in new or new[token] is PLAIN):
                new[token] = tokenizer.added.get(token, PLAIN)
    return new | {token: PLAIN for token in tokens if token not in start.tokens and token not in new}


class _Plan:
    """The index arrays of a vocabulary while they are built."""

    def __init__(
        self, models: Sequence[Checkpoint], theirs: Sequence[Tokenizer], tokens: Mapping[str, int], size: int
    ) -> None:
        self.models = models
        self.theirs = theirs
        self.tokens = tokens
        self.size = size
        self.rows = [torch.full((size,), -1, dtype=torch.int64) for _ in models]
        self.donors = torch.full((size,), CENTRE, dtype=torch.int64)
        self.donor_rows = torch.full((size,), -1, dtype=torch.int64)
        self.nowhere: list[str] = []
        new = torch.tensor(list(tokens.values()), dtype=torch.int64)
        for index, tokenizer in zip(self.rows, theirs, strict=False):  # shared rows need no tokenizer
            index[new] = torch.tensor([tokenizer.tokens.get(token, -1) for token in tokens], dtype=torch.int64)

    def padding(self, kept: int, giver: int | None) -> None:
        """Rows below `kept` that are no token's stay what they are where they are padding too, else the giver's."""
        free = torch.ones(self.size, dtype=torch.bool)
        free[torch.tensor(list(self.tokens.values()), dtype=torch.int64)] = False
        free[kept:] = False
        for model, (index, tokenizer) in enumerate(zip(self.rows, self.theirs, strict=True)):
            here = free.clone()
            here[rows(self.models[model]) :] = False
            here[[number for number in tokenizer.tokens.values() if number < self.size]] = False
            index[here] = here.nonzero().flatten()
        for model in [m for m in range(len(self.rows)) if m != giver] + ([] if giver is None else [giver]):
            has = free & (self.rows[model] >= 0)  # the last one wins
            self.donors[has], self.donor_rows[has] = model, self.rows[model][has]

    def fill(self, base: int | None, sources: Mapping[str, TokenSource]) -> None:
        """Fill the row of each token in models that lack it."""
        self._fill_usual(base)
        named = {token: source for token, source in sources.items() if source.kind != "usual" or source.force}
        zero = (self.donors == ZERO).tolist()
        self.nowhere = [token for token, row in self.tokens.items() if zero[row] and token not in named]
        for token, source in named.items():
            row = self.tokens[token]
            if source.kind == "usual":
                raise OptionError(f"tokens: {token!r}: force says that a source replaces all rows, but none is given")
            self.donors[row], self.donor_rows[row] = self._row_of(token, source)
            for index in self.rows if source.force else ():
                index[row] = -1

    def _fill_usual(self, base: int | None) -> None:
        """The rule for tokens that the recipe does not name, applied to all rows at once, as there are many."""
        rows = torch.stack(self.rows)
        has = rows >= 0
        first = has.int().argmax(0)
        in_base = has[base] if base is not None else torch.zeros_like(has[0])
        donors = torch.where(in_base, 0 if base is None else base, first)
        donors[has.sum(0).gt(1) & ~in_base] = MEAN
        donors[~has.any(0)] = ZERO
        lacked = torch.zeros_like(in_base)
        lacked[torch.tensor(list(self.tokens.values()), dtype=torch.int64)] = True
        lacked &= ~has.all(0)
        self.donors[lacked] = donors[lacked]
        single = lacked & (donors >= 0)
        self.donor_rows[single] = rows[donors[single], single.nonzero().flatten()]

    def _row_of(self, token: str, source: TokenSource) -> tuple[int, int]:
        """The model and row that the recipe names for a token."""
        if source.kind == "zero":
            return ZERO, -1
        model = self._model(token, source.model or "")
        wanted = token if source.kind == "model" else source.token
        if (wanted is None) == (source.token_id is None):
            raise OptionError(f"tokens: {token!r}: give the token or the token_id in {source.model!r}, one of them")
        if wanted is not None:
            row = self.theirs[model].tokens.get(wanted, -1)
            if row < 0:
                raise OptionError(f"tokens: {token!r}: the tokenizer of {source.model!r} has no token {wanted!r}")
            return model, row
        row, count = int(source.token_id or 0), rows(self.models[model])
        if not 0 <= row < count:
            raise OptionError(f"tokens: {token!r}: token_id is {row}, but {source.model!r} has {count} rows")
        return model, row

    def _model(self, token: str, name: str) -> int:
        names = [model.name for model in self.models]
        folders = [str(model.folder) for model in self.models]
        for known in (names, folders):
            if name in known:
                return known.index(name)
        raise OptionError(
            f"tokens: {token!r}: {name!r} is not one of the models {some(names)}{suggestion(name, names)}"
        )

    def filled(self) -> dict[str, dict[str, int]]:
        """For the report: for each model, the number of rows by source."""
        names = {MEAN: "the mean of the models that have it", ZERO: "zero", CENTRE: "the mean of the other rows"}
        names |= {number: f"from {model.name}" for number, model in enumerate(self.models)}
        out = {}
        for model, index in zip(self.models, self.rows, strict=True):
            counts = Counter(self.donors[index < 0].tolist())
            out[model.name] = {names[donor]: count for donor, count in sorted(counts.items(), reverse=True)}
        return out

    def vocabulary(
        self, special: Mapping[str, Any], files: Mapping[str, bytes], report: Report, origin: str
    ) -> Vocabulary:
        sizes = tuple(rows(model) for model in self.models)
        index_arrays = dict(enumerate(self.rows))
        return Vocabulary(
            self.tokens, self.size, index_arrays, self.donors, self.donor_rows, sizes, special, files, report, origin
        )

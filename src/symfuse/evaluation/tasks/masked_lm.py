"""Masked tokens, predicted from their context."""

from __future__ import annotations

import random
from collections.abc import Sequence

from symfuse.errors import CheckpointError, DataError
from symfuse.evaluation.tasks.base import IGNORED, OF_TEXTS, Data, Predicting
from symfuse.evaluation.tasks.text import Encoder, Example

# Devlin et al. 2019, Section 3.1: the share of tokens to predict; of these, masked, and replaced by random ones.
_PREDICTED, _MASKED, _RANDOM = 0.15, 0.8, 0.1


class MaskedLM(Predicting):
    """Cross entropy and accuracy of masked tokens; the masks are drawn once, from the seed and the number of the row,
    so that they depend neither on batches nor on the other rows."""

    name = "masked-lm"
    auto = "AutoModelForMaskedLM"

    options = {"text_column": "text"} | OF_TEXTS

    @classmethod
    def prepare(cls, data: Data) -> MaskedLM:
        """CheckpointError if the tokenizer has no mask; DataError if all is special."""
        data.require("text_column")
        source, name = data.records.source, data.checkpoint.name
        encoder = Encoder.of(data.checkpoint, data.max_length)
        mask = encoder.tokenizer.mask_token_id
        if mask is None:
            raise CheckpointError(f"{name}: its tokenizer has no mask token; is this a causal-lm?")
        special = encoder.special
        ordinary = [i for i in range(min(len(encoder.tokenizer), encoder.config.vocab_size)) if i not in special]
        examples = [
            _mask(example, mask, ordinary, special, random.Random(f"mask {data.seed} {row}"))
            for row, example in zip(data.rows, encoder(data.texts(data.text_column)), strict=True)
        ]
        examples = [example for example in examples if any(label != IGNORED for label in example["labels"])]
        if not examples:
            raise DataError(f"{source}: no token in it could be masked; is it text in the language of {name}?")
        return cls(encoder.batches(examples, data.batch_size), source)


def _mask(example: Example, mask: int, ordinary: Sequence[int], special: frozenset[int], rng: random.Random) -> Example:
    """One example with some tokens hidden, at least one; the originals are its labels."""
    ids = list(example["input_ids"])
    labels = [IGNORED] * len(ids)
    places = [i for i, token in enumerate(ids) if token not in special]
    for i in rng.sample(places, min(len(places), max(1, round(_PREDICTED * len(places))))):
        labels[i], draw, other = ids[i], rng.random(), rng.choice(ordinary)
        if draw < _MASKED + _RANDOM:
            ids[i] = mask if draw < _MASKED else other
    return example | {"input_ids": ids, "labels": labels}

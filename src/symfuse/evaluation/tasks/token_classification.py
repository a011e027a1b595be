"""The tag of each word of a text."""

from __future__ import annotations

from collections.abc import Sequence

from symfuse.errors import CheckpointError, DataError
from symfuse.evaluation.tasks.base import IGNORED, OF_TEXTS, UNKNOWN, UNLABELLED, Data, Predicting
from symfuse.evaluation.tasks.labels import Labels
from symfuse.evaluation.tasks.text import Encoder


class TokenClassification(Predicting):
    """Cross entropy and accuracy by word; the first token of a word carries its tag."""

    name = "token-classification"
    auto = "AutoModelForTokenClassification"

    options = {"tokens_column": "tokens", "tags_column": "tags"} | OF_TEXTS | UNLABELLED

    @classmethod
    def prepare(cls, data: Data) -> TokenClassification:
        """tokens_column, tags_column: of lists of words, and of their tags: names of the config's label2id, or
        integers. unlabelled: tags are not read. CheckpointError if the tokenizer cannot tell which token is of which
        word."""
        data.require("tokens_column", labels="tags_column")
        records, name = data.records, data.checkpoint.name
        encoder = Encoder.of(
            data.checkpoint, data.max_length, add_prefix_space=True
        )  # byte-level BPE needs this to see words
        if not encoder.tokenizer.is_fast:
            raise CheckpointError(
                f"{name}: its tokenizer does not say which token is of which word; convert it to a tokenizer.json"
            )
        labels = Labels(encoder.config, name)
        words, tags = [], []
        for i in data.rows:
            words.append([_word(word, records.where(i)) for word in records.sequence(i, data.tokens_column)])
            if data.unlabelled:
                tags.append([UNKNOWN] * len(words[-1]))
                continue
            tags.append([labels.number(tag, records.where(i)) for tag in records.sequence(i, data.tags_column)])
            if len(words[-1]) != len(tags[-1]):
                raise DataError(
                    f"{records.where(i)}: {len(words[-1])} words in {data.tokens_column!r} and {len(tags[-1])} tags in "
                    f"{data.tags_column!r}; expected one for each"
                )
        encoding = encoder.encode(words, is_split_into_words=True, truncation=True, max_length=encoder.length)
        examples = [
            {field: values[n] for field, values in encoding.items()} | {"labels": _first(encoding.word_ids(n), tags[n])}
            for n in range(len(words))
        ]
        examples = [example for example in examples if any(label != IGNORED for label in example["labels"])]
        if not examples:
            raise DataError(f"{records.source}: there are no words in {data.tokens_column!r}; give data to evaluate on")
        return cls(encoder.batches(examples, data.batch_size), records.source)


def _word(word: object, where: str) -> str:
    if not isinstance(word, str):
        raise DataError(f"{where}: a word of type {type(word).__name__}, expected text")
    return word


def _first(words: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """The tag of each token that is the first of its word."""
    before = [None, *words[:-1]]
    return [IGNORED if word is None or word == last else tags[word] for word, last in zip(words, before, strict=True)]

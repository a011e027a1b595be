"""Texts as batches: by the checkpoint's own tokenizer, cut to what the model can read, padded and masked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError, OptionError
from symfuse.evaluation.task import Batch
from symfuse.evaluation.tasks.base import IGNORED, checked, config_of, from_companions
from symfuse.io import Checkpoint
from symfuse.messages import first_line

# One text: token ids, their mask and types, and labels; a list for each, or one number for the whole text.
Example = dict[str, Any]

# Tokens a text, unless max_length says otherwise; more cost much memory where each gives logits over a vocabulary.
USUAL_LENGTH = 256

# Families whose positions are counted from behind the padding's id, so that the table has more rows than positions.
_COUNTED_FROM_PADDING = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "longformer",
    "mpnet", "ibert", "luke", "mluke", "xmod", "esm",
)  # fmt: skip


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the limits of its model. length: the most tokens of a text. fields: what the model takes."""

    name: str
    tokenizer: Any
    config: Any
    length: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_length: int | None, **options: object) -> Encoder:
        """The tokenizer beside a checkpoint's weights, without running code of it. options: for the tokenizer.

        CheckpointError if there is none that can be read; OptionError if the model has fewer positions than requested.
        """
        config = config_of(checkpoint)
        # Without files of its own, transformers makes up an empty tokenizer that knows no word.
        if not any(re.match(r"tokenizer\.|vocab|.*\.model$", name) for name in checkpoint.companions()):
            raise CheckpointError(
                f"{checkpoint.name}: there is no tokenizer beside its weights; copy the files of the model it was "
                "trained from (tokenizer.json, tokenizer_config.json) into its folder"
            )
        tokenizer = from_companions(checkpoint, "AutoTokenizer", "tokenizer", **options)
        most = min(_positions(checkpoint, config), tokenizer.model_max_length)
        if max_length is not None and not 2 <= max_length <= most:
            raise OptionError(f"max_length is {max_length}; {checkpoint.name} reads 2 to {most} tokens")
        return cls(checkpoint.name, tokenizer, config, max_length or min(most, USUAL_LENGTH))

    def __call__(self, texts: Sequence[Any], pairs: Sequence[str] | None = None, **options: object) -> list[Example]:
        """Each text, or pair of texts: cut at `length`, not padded."""
        encoding = self.encode(texts, pairs, truncation=True, max_length=self.length, **options)
        return [{name: values[i] for name, values in encoding.items()} for i in range(len(texts))]

    def encode(self, texts: Any, pairs: Any = None, **options: object) -> Any:
        """The tokenizer's result for a text, or for many. CheckpointError if it fails, or returns ids for which the
        model has no embedding."""
        types = getattr(self.config, "type_vocab_size", 0) > 1  # some tokenizers give types to models that have none
        try:
            result = self.tokenizer(texts, pairs, verbose=False, return_token_type_ids=types, **options)
        except Exception as error:  # whatever the tokenizers' classes raise
            raise CheckpointError(f"{self.name}: its tokenizer cannot read the text ({first_line(error)})") from error
        ids = result["input_ids"]
        largest = max((i for text in ids for i in (text if isinstance(text, list) else [text])), default=0)
        if largest >= self.config.vocab_size:
            raise CheckpointError(
                f"{self.name}: its tokenizer gives id {largest}, and its embedding has {self.config.vocab_size} rows "
                "(vocab_size); put the tokenizer of this model beside it"
            )
        return result

    @property
    def special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @property
    def padding(self) -> int:
        """The padding id of the config, where heads look for the last token that is no padding; its value does not
        matter otherwise."""
        ids = (self.config.pad_token_id, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(i for i in ids if i is not None and 0 <= i < self.config.vocab_size)

    def batches(self, examples: Sequence[Example], batch_size: int) -> list[Batch]:
        """Examples sorted by length, so that there is little padding."""
        ordered = sorted(examples, key=lambda example: len(example["input_ids"]))
        return [self.batch(ordered[i : i + batch_size]) for i in range(0, len(ordered), checked(batch_size))]

    def batch(self, examples: Sequence[Example]) -> Batch:
        """One batch, padded at the right to its longest example."""
        fill = {"input_ids": self.padding, "labels": IGNORED}
        return {name: _stacked([example[name] for example in examples], fill.get(name, 0)) for name in examples[0]}


def _positions(checkpoint: Checkpoint, config: Any) -> int:
    """The number of positions of the model; 10⁹ if it is not limited."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return 10**9
    before = (config.pad_token_id or 0) + 1 if checkpoint.config["model_type"] in _COUNTED_FROM_PADDING else 0
    return positions - before


def _stacked(values: Sequence[Any], fill: int) -> Tensor:
    if not isinstance(values[0], list):
        return torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else torch.long)
    width = max(map(len, values))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], dtype=torch.long)

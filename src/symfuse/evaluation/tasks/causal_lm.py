"""The next token of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from symfuse.errors import DataError
from symfuse.evaluation.data import Records
from symfuse.evaluation.task import Batch
from symfuse.evaluation.tasks.base import IGNORED, at, chosen, output_of
from symfuse.evaluation.tasks.predicting import Predicting
from symfuse.evaluation.tasks.text import Encoder, Example
from symfuse.io import Checkpoint


class CausalLM(Predicting):
    """Cross entropy and accuracy of each token but the first, given those before it.

    Of a text file all lines are joined and cut into windows of max_length tokens, without padding; of a table each row
    is an example, cut at max_length.
    """

    name = "causal-lm"
    auto = "AutoModelForCausalLM"

    @classmethod
    def prepare(
        cls,
        records: Records,
        checkpoint: Checkpoint,
        *,
        text_column: str = "text",
        batch_size: int = 16,
        max_length: int | None = None,
        seed: int = 0,
        limit: int | None = None,
    ) -> CausalLM:
        """limit: rows, or windows, drawn by the seed. DataError if no text has two tokens."""
        records.require(text_column=text_column)
        encoder = Encoder.of(checkpoint, max_length)
        texts = [records.text(i, text_column) for i in range(len(records))]
        if records.format == "text":
            groups = _windows(encoder, "\n".join(texts), limit, seed)
        else:
            groups = [encoder([texts[i] for i in chosen(len(texts), limit, seed)])]
        batches: list[Batch] = []
        for group in groups:
            examples = [one | {"labels": one["input_ids"]} for one in group if len(one["input_ids"]) > 1]
            batches += encoder.batches(examples, batch_size)
        if not batches:
            raise DataError(
                f"{records.source}: no text in it has two tokens, so that none is predicted; give more text"
            )
        return cls(batches, records.source)

    def predicted(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = output_of(module, batch, "logits")
        labels = batch if "labels" in batch else {"labels": _next_tokens(batch)}
        return logits[:, :-1], at(module, labels["labels"])[:, 1:]


def _next_tokens(batch: Batch) -> Tensor:
    """The labels of a batch that has none: its own tokens, without padding."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    return ids if mask is None else ids.where(mask.bool(), IGNORED)


def _windows(encoder: Encoder, text: str, limit: int | None, seed: int) -> Sequence[list[Example]]:
    """The windows of full length, and by itself the shorter one at the end."""
    encoding = encoder.encode(text)
    starts = range(0, len(encoding["input_ids"]), encoder.length)
    windows = [
        {name: values[start : start + encoder.length] for name, values in encoding.items()}
        for start in (starts[i] for i in chosen(len(starts), limit, seed))
    ]
    full = [window for window in windows if len(window["input_ids"]) == encoder.length]
    return [full, windows[len(full) :]]

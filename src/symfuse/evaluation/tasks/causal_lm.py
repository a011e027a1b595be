"""The next token of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from symfuse.errors import DataError
from symfuse.evaluation.task import Batch
from symfuse.evaluation.tasks.base import IGNORED, OF_TEXTS, Data, Predicting, at, output_of
from symfuse.evaluation.tasks.text import Encoder, Example


class CausalLM(Predicting):
    """Cross entropy and accuracy of each token but the first, predicted from those before it.

    Of a text file all lines are joined and cut into windows of max_length tokens, without padding; of a table each row
    is an example, cut at max_length. limit: rows, or windows.
    """

    name = "causal-lm"
    auto = "AutoModelForCausalLM"

    options = {"text_column": "text"} | OF_TEXTS

    @classmethod
    def prepare(cls, data: Data) -> CausalLM:
        """DataError if no text has two tokens."""
        data.require("text_column")
        encoder = Encoder.of(data.checkpoint, data.max_length)
        texts = [data.records.text(i, data.text_column) for i in range(len(data.records))]
        if data.records.format == "text":
            groups = _windows(encoder, "\n".join(texts), data)
        else:
            groups = [encoder([texts[i] for i in data.rows])]
        batches: list[Batch] = []
        for group in groups:
            examples = [one | {"labels": one["input_ids"]} for one in group if len(one["input_ids"]) > 1]
            batches += encoder.batches(examples, data.batch_size)
        if not batches:
            raise DataError(
                f"{data.records.source}: no text in it has two tokens, so that none is predicted; give more text"
            )
        return cls(batches, data.records.source)

    def predicted(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = output_of(module, batch, "logits")
        labels = batch if "labels" in batch else {"labels": _next_tokens(batch)}
        return logits[:, :-1], at(module, labels["labels"])[:, 1:]


def _next_tokens(batch: Batch) -> Tensor:
    """The labels of a batch that has none: its own tokens, without padding."""
    if "input_ids" not in batch:
        raise DataError(f"a batch of {', '.join(batch)} has neither labels nor input_ids; add labels, its tokens")
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    return ids if mask is None else ids.where(mask.bool(), IGNORED)


def _windows(encoder: Encoder, text: str, data: Data) -> Sequence[list[Example]]:
    """The windows of full length, and the shorter one at the end as a batch of its own."""
    encoding = encoder.encode(text)
    starts = range(0, len(encoding["input_ids"]), encoder.length)
    windows = [
        {name: values[start : start + encoder.length] for name, values in encoding.items()}
        for start in (starts[i] for i in data.drawn(len(starts)))
    ]
    full = [window for window in windows if len(window["input_ids"]) == encoder.length]
    return [full, windows[len(full) :]]

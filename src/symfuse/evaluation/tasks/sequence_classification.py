"""The class of a text, or of a pair of texts; or a number that is to be predicted of it."""

from __future__ import annotations

from torch import nn

from symfuse.errors import DataError
from symfuse.evaluation.task import Batch, Totals
from symfuse.evaluation.tasks.base import OF_TEXTS, UNLABELLED, Data, Predicting, output_of
from symfuse.evaluation.tasks.labels import Labels
from symfuse.evaluation.tasks.text import Encoder


class SequenceClassification(Predicting):
    """Cross entropy and accuracy by text; of a model with one output (num_labels 1) the squared error."""

    name = "sequence-classification"
    auto = "AutoModelForSequenceClassification"

    options = {"text_column": "text", "pair_column": None, "label_column": "label"} | OF_TEXTS | UNLABELLED

    @classmethod
    def prepare(cls, data: Data) -> SequenceClassification:
        """pair_column: of the second text, if there is one. Labels are names of the config's label2id, or integers.
        unlabelled: labels are not read."""
        data.require("text_column", "pair_column", labels="label_column")
        encoder = Encoder.of(data.checkpoint, data.max_length)
        labels = Labels(encoder.config, data.checkpoint.name)
        seconds = None if data.pair_column is None else data.texts(data.pair_column)
        examples = encoder(data.texts(data.text_column), seconds)
        for i, example in zip(data.rows, examples, strict=True):
            if not example["input_ids"]:
                raise DataError(
                    f"{data.records.where(i)}: the text has no tokens, so that it has no class; take it out"
                )
            example["labels"] = labels.of_row(data, i, data.label_column)
        padded = encoder.config.pad_token_id is not None  # else decoders could not tell the last token from padding
        return cls(encoder.batches(examples, data.batch_size if padded else 1), data.records.source)

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        labels = batch.get("labels")
        if labels is None or not labels.is_floating_point():
            return super().totals(module, batch)
        logits = output_of(module, batch, "logits")
        return Totals((logits.squeeze(-1) - labels.to(logits)).square().sum(), labels.numel())

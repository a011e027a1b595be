"""The class of a text, or of a pair of texts; or a number that is to be predicted of it."""

from __future__ import annotations

from torch import nn

from symfuse.errors import DataError
from symfuse.evaluation.data import Records
from symfuse.evaluation.task import Batch, Totals
from symfuse.evaluation.tasks.base import UNKNOWN, chosen, output_of
from symfuse.evaluation.tasks.labels import Labels
from symfuse.evaluation.tasks.predicting import Predicting
from symfuse.evaluation.tasks.text import Encoder
from symfuse.io import Checkpoint


class SequenceClassification(Predicting):
    """Cross entropy and accuracy by text; of a model with one output (num_labels 1) the squared error."""

    name = "sequence-classification"
    auto = "AutoModelForSequenceClassification"

    @classmethod
    def prepare(
        cls,
        records: Records,
        checkpoint: Checkpoint,
        *,
        text_column: str = "text",
        pair_column: str | None = None,
        label_column: str = "label",
        batch_size: int = 16,
        max_length: int | None = None,
        seed: int = 0,
        limit: int | None = None,
        unlabelled: bool = False,
    ) -> SequenceClassification:
        """pair_column: of the second text, if there is one. Labels are names of the config's label2id, or integers.
        limit: rows, drawn by the seed. unlabelled: labels are not read."""
        columns = {} if pair_column is None else {"pair_column": pair_column}
        columns |= {} if unlabelled else {"label_column": label_column}
        records.require(text_column=text_column, **columns)
        encoder = Encoder.of(checkpoint, max_length)
        labels = Labels(encoder.config, checkpoint.name)
        rows = chosen(len(records), limit, seed)
        seconds = None if pair_column is None else [records.text(i, pair_column) for i in rows]
        examples = encoder([records.text(i, text_column) for i in rows], seconds)
        for i, example in zip(rows, examples, strict=True):
            if not example["input_ids"]:
                raise DataError(f"{records.where(i)}: the text has no tokens, so that it has no class; take it out")
            example["labels"] = UNKNOWN if unlabelled else labels.of_row(records, i, label_column)
        if encoder.config.pad_token_id is None:  # decoders could not tell the last token from padding
            batch_size = 1
        return cls(encoder.batches(examples, batch_size), records.source)

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        labels = batch.get("labels")
        if labels is None or not labels.is_floating_point():
            return super().totals(module, batch)
        logits = output_of(module, batch, "logits")
        return Totals((logits.squeeze(-1) - labels.to(logits)).square().sum(), labels.numel())

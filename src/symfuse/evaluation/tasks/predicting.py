"""Tasks whose model predicts classes: what gradients of likelihoods, entropies and ensembles are made of."""

from __future__ import annotations

from torch import Tensor, nn

from symfuse.evaluation.task import Batch, Task, Totals
from symfuse.evaluation.tasks.base import classified, labels_of, output_of


class Predicting(Task):
    """Classes of examples or of positions in them. Each example of a batch (a row of every field) stands alone."""

    def predicted(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [examples, …, classes] with their graph, and labels [examples, …]: IGNORED where nothing is asked,
        UNKNOWN where the data do not tell."""
        logits = output_of(module, batch, "logits")
        return logits, labels_of(module, batch, logits.shape[:-1])

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        return classified(*self.predicted(module, batch))

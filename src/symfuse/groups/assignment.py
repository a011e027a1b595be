from __future__ import annotations
import torch
from torch import Tensor
def assign(scores: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment
    return torch.as_tensor(linear_sum_assignment(scores.double().numpy(), maximize=True)[1])
def assign_batch(scores: Tensor) -> Tensor:
    flat = scores.reshape(-1, *scores.shape[-2:])
    return torch.stack([assign(s) for s in flat]).reshape(scores.shape[:-1])

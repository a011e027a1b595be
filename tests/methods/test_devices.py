"""C75: the processor and the accelerator give the same merge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symfuse.merging import Source, Stream
from symfuse.methods import METHODS

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# Methods whose entries depend on that entry of each input, and on counts, only.
ELEMENTWISE = {
    "linear", "soup", "passthrough", "task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs",
    "breadcrumbs_ties", "nearswap", "ram",
}  # fmt: skip
GIVEN = {"density": [0.5], "t": 0.3, "weight": [0.4]}


def merged(name: str, device: str, dtype: torch.dtype) -> Tensor:
    method = METHODS[name]
    least, most = method.models
    count = max(least, 2 if most is None else min(2, most))
    rng = torch.Generator().manual_seed(0)
    base = torch.randn(37, 53, generator=rng).to(dtype)
    tensors = [(base + 0.1 * torch.randn(37, 53, generator=rng)).to(dtype) for _ in range(count)]
    stream = Stream(
        "w",
        (37, 53),
        [Source.of(tensor, f"m{i}") for i, tensor in enumerate(tensors)],
        None if method.base == "unused" else Source.of(base, "base"),
        seed=3,
        block=200,
        device=device,
    )
    parameters = {}
    for parameter in method.parameters.values():
        value = GIVEN.get(parameter.name)
        if value is None:
            value = [parameter.default] if parameter.per_model else parameter.default
        parameters[parameter.name] = value * count if parameter.per_model else value
    return torch.cat([block.cpu() for block in method(stream, parameters)])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_as_it_is_called_here(name: str) -> None:
    assert merged(name, "cpu", torch.float16).isfinite().all()


@CUDA
@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c75_the_processor_and_the_accelerator_agree(name: str, dtype: torch.dtype) -> None:
    ours, theirs = merged(name, "cpu", dtype), merged(name, "cuda", dtype)
    if name in ELEMENTWISE:
        assert torch.equal(ours.to(dtype), theirs.to(dtype))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)

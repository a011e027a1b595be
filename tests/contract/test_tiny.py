"""The live module that a tiny model shares with others of its form computes what one of its own does."""

from __future__ import annotations

import pytest
import torch

from contract.tiny import case, loaded, moving, real, seen
from symfuse.verification import run


@pytest.mark.parametrize("label", ["bert-mlm", "mixtral-lm", "t5-lm", "marian-lm"])
def test_a_filled_module_computes_what_a_loaded_one_does(label: str) -> None:
    this = case(label)
    before = {name: tensor.clone() for name, tensor in this.checkpoint.items()}
    moved = moving(this.spec, 1)(this.checkpoint)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in before.items())
    expected = run(loaded(moved), this.inputs)
    for module in (seen(moved), real(moved)):
        torch.testing.assert_close(run(module, this.inputs), expected, rtol=0, atol=0)
    own = real(moved)
    assert this.error(this.checkpoint) == 0  # the shared one has other weights now
    torch.testing.assert_close(run(own, this.inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(dict(this.checkpoint), before, rtol=0, atol=0)

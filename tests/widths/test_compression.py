"""A narrower model: what was expanded comes back, of anything else a note says how much is lost."""

from __future__ import annotations

import re

import pytest
import torch

from contract.tiny import GPT2, MODELS, TEXT, case, of, real
from symfuse.errors import IncompatibleError, SymfuseError
from symfuse.matching.problem import rotatable
from symfuse.model import Model
from symfuse.rewriting import canonical
from symfuse.spec import Instance
from symfuse.widths import Duplication, Isometry, compress, expand
from symfuse.widths.compression import _clusters, _equal_groups, _principal
from symfuse.widths.maps import keeping_mean
from widths.wider import double, framed, half, inside, like, narrow

WAYS = {"double": (narrow, double), "inside": (narrow, inside), "half": (framed, half)}
FIRST = [("double", "bert-mlm"), ("double", "llama-lm"), ("inside", "gpt2-lm"), ("half", "gpt2-lm")]


def comes_back(way: str, label: str) -> bool:
    """Whether there is a wider model, which then must come back."""
    make, sizes = WAYS[way]
    try:
        wide = expand(make(label), like(narrow(label), sizes))
        real(wide.checkpoint)
    except SymfuseError:  # see the tests of expansion
        return False
    if wide.spec.sizes == narrow(label).spec.sizes:  # none of its fields is among those that grow
        assert compress(wide, narrow(label)) == wide
        return False
    found = compress(wide, narrow(label))
    assert case(label).error(found.checkpoint) < 100 * case(label).exact, label
    assert found.notes[-1].endswith("inexact: 0.00% of the squared norm of the weights is lost")
    return True


@pytest.mark.parametrize(("way", "label"), FIRST)
def test_what_was_expanded_comes_back(way: str, label: str) -> None:
    assert comes_back(way, label)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "least"), [("double", len(MODELS) - 45), ("inside", 180), ("half", 80)])
def test_whatever_was_expanded_comes_back(way: str, least: int) -> None:
    assert sum(comes_back(way, label) for label in MODELS) >= least


def test_uneven_copies_come_back_too() -> None:
    model = narrow("bert-sequence")
    wide = like(model, lambda key, size: size + 12 if key == "intermediate_size" else size)
    index = torch.cat([torch.arange(29), torch.full((12,), 7)]).flip(0)
    share = torch.rand(41, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = torch.zeros(29, dtype=torch.float64).scatter_add(0, index, share)
    copies = {Instance("ffn", (0,)): Duplication(29, index, share / sums[index])}
    found = compress(expand(model, wide, copies), model)
    assert case("bert-sequence").error(found.checkpoint) < 1e-12


@pytest.mark.parametrize("label", ["bert", "gpt2"])
def test_of_any_other_model_something_is_lost_and_said(label: str) -> None:
    make = {
        "bert": of("BertForMaskedLM", "BertConfig", TEXT | {"hidden_size": 40, "num_attention_heads": 8}),
        "gpt2": of("GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_embd": 30, "n_head": 6, "n_inner": 41}),
    }[label]
    wide, small = Model.of(make(1)), narrow({"bert": "bert-mlm", "gpt2": "gpt2-lm"}[label])
    if label == "gpt2":
        with pytest.raises(IncompatibleError, match="no multiple of them"):
            compress(wide, small)
        wide = canonical(wide, rotatable(wide.spec))
    found = compress(wide, small)
    lost = re.search(r"inexact: ([\d.]+)% of the squared norm", found.notes[-1])
    assert lost is not None
    assert 10 < float(lost[1]) < 90
    assert "inexact" in found.checkpoint.name
    assert Model.of(found.checkpoint).spec.sizes["residual"] == 20
    real(found.checkpoint)


def test_what_is_wider_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="what `compress` makes nowhere wider"):
        compress(narrow("bert"), like(narrow("bert"), double))


def test_the_principal_components_are_those_of_least_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 40, generator=rng, dtype=torch.float64) * torch.arange(1, 10)[:, None]
    start = Isometry.padding(4, 9).matrix
    found = _principal(rows, start, centred=False)
    singular = torch.linalg.svdvals(rows)
    lost = (rows - found @ found.mT @ rows).square().sum()
    torch.testing.assert_close(lost, singular[4:].square().sum())
    mean = keeping_mean(torch.linalg.qr(torch.randn(9, 8, generator=rng, dtype=torch.float64)).Q[:, :0])
    assert mean.shape == (9, 1)
    ones = torch.ones(9, 1, dtype=torch.float64)
    centred = _principal(rows, ones / 3, centred=True)
    torch.testing.assert_close(centred, ones / 3)


def test_groups_of_units_are_of_the_sizes_that_are_asked_for() -> None:
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert _equal_groups(rows, 4).bincount().tolist() == [3, 3, 3, 3]
    assert len(_clusters(rows, 5).unique()) == 5
    assert len(_clusters(torch.zeros(6, 2, dtype=torch.float64), 4).unique()) == 4  # though all are equal
    assert _equal_groups(rows[:4].repeat(3, 1), 4).tolist() == [0, 1, 2, 3] * 3

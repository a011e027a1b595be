"""SCEPTR: conversion, strict loading, tokens, masks, and the accuracies that the demo starts from."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from symfuse.demo import packages, receptors
from symfuse.errors import CheckpointError, SpecError

DATA = Path(receptors.__file__).parent / "data"


@pytest.fixture(scope="module")
def sceptr() -> None:
    if reason := packages.available(*receptors.PACKAGES):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def checkpoint(sceptr: None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return read("SCEPTR")


def read(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder = receptors.convert(name)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def test_the_two_files_of_receptors_are_whole_and_share_no_receptor() -> None:
    rows = {}
    for name in ("receptors.csv", "receptors_match.csv"):
        with (DATA / name).open(newline="") as lines:
            rows[name] = [(r["TRAV"], r["CDR3A"], r["TRBV"], r["CDR3B"]) for r in csv.DictReader(lines)]
    assert [len(set(found)) for found in rows.values()] == [400, 1200]
    assert set(rows["receptors.csv"]).isdisjoint(rows["receptors_match.csv"])
    assert {c for found in rows.values() for r in found for c in r[1] + r[3]} <= set("ACDEFGHIKLMNPQRSTVWY")


def test_masks_hide_a_fixed_fraction_of_the_amino_acids_only() -> None:
    tokens = torch.randint(3, 23, (50, 40, 4), generator=torch.Generator().manual_seed(1))
    tokens[:, 0, 0] = 2  # CLS
    tokens[:, 30:, 0] = 0  # padding
    before = tokens.clone()
    masked, targets = receptors.mask(tokens, seed=3)
    hidden = targets != -100
    assert torch.equal(tokens, before)
    assert not hidden[:, 0].any()
    assert not hidden[:, 30:].any()
    assert 0.12 < hidden[:, 1:30].double().mean().item() < 0.18
    assert torch.equal(masked[..., 0], torch.where(hidden, 1, tokens[..., 0]))
    assert torch.equal(masked[..., 1:], tokens[..., 1:])
    assert torch.equal(targets[hidden], tokens[..., 0][hidden] - 3)
    assert torch.equal(receptors.mask(tokens, seed=3)[0], masked)
    assert not torch.equal(receptors.mask(tokens, seed=4)[0], masked)


@pytest.mark.data
def test_a_converted_folder_has_the_original_tensors(
    checkpoint: tuple[dict[str, Tensor], dict[str, Any]],
) -> None:
    weights, config = checkpoint
    file = packages.fetch(packages.SCEPTR) / "sceptr/_model_saves/SCEPTR/state_dict.pt"
    original = torch.load(file, map_location="cpu", weights_only=True)
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)
    assert sum(w.numel() for w in weights.values()) == 153_656
    own = config.pop("sceptr")
    assert own["model"]["name"] == "SCEPTR"
    assert config == {
        "model_type": "sceptr",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "hidden_act": "relu",
        "activation": "relu",
        "norm_first": False,
        "layer_norm_eps": 1e-5,
        "vocab_size": 23,
        "compartment_vocab_size": 7,
        "embedding_size": 29,
        "output_vocab_size": 20,
    }
    config["sceptr"] = own  # the fixture is shared


@pytest.mark.data
@pytest.mark.usefixtures("sceptr")
def test_a_checkpoint_that_is_not_there_or_has_no_one_hot_tokens_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint 'SCEPTER'; it has A_SCEPTR, .*SCEPTR_tiny"):
        receptors.convert("SCEPTER")
    with pytest.raises(CheckpointError, match="SCEPTR_left_aligned embeds its tokens by CdrEmbedder"):
        receptors.convert("SCEPTR_left_aligned")


@pytest.mark.data
def test_loading_is_strict(checkpoint: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    weights, config = checkpoint
    head = "_mlm_token_prediction_projector.projector.bias"
    with pytest.raises(SpecError, match=f"not the tensors of SCEPTR: .*Missing key.*{head}"):
        receptors.load({name: w for name, w in weights.items() if name != head}, config)
    with pytest.raises(SpecError, match=r"Unexpected key.*extra"):
        receptors.load({**weights, "extra": torch.zeros(1)}, config)
    with pytest.raises(SpecError, match=r"size mismatch.*projector\.bias"):
        receptors.load({**weights, head: torch.zeros(21)}, config)
    with pytest.raises(CheckpointError, match='under "sceptr"'):
        receptors.load(weights, {"model_type": "sceptr"})


@pytest.mark.data
def test_loading_copies_and_leaves_no_trace(checkpoint: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    weights, config = checkpoint
    path, state = list(sys.path), torch.get_rng_state()
    module = receptors.load(weights, config)
    assert sys.path == path
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.training
    before = {name: w.clone() for name, w in weights.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(weights[name], before[name]) for name in before)


@pytest.mark.data
def test_float64_weights_compute_in_float64(checkpoint: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    weights, config = checkpoint
    tokens = receptors.tokens(config)[:8]
    single: Any = receptors.load(weights, config)
    double: Any = receptors.load({name: w.double() for name, w in weights.items()}, config)
    with torch.no_grad():
        exact = double.get_mlm_token_predictions_for(tokens)
        assert exact.dtype == torch.float64
        assert_close(single.get_mlm_token_predictions_for(tokens).double(), exact, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.data
def test_single_models_and_their_averages_score_as_published(
    checkpoint: tuple[dict[str, Tensor], dict[str, Any]],
) -> None:
    _, config = checkpoint
    tokens = receptors.tokens(config)
    assert tokens.shape == (400, 68, 4)
    weights = {name: read(name)[0] for name in receptors.SAME_SHAPE}

    def score(parts: list[str]) -> receptors.MaskedScore:
        mean = {k: sum(weights[p][k] for p in parts) / len(parts) for k in weights[parts[0]]}
        return receptors.masked_accuracy(receptors.load(mean, config), tokens)

    for name in receptors.SAME_SHAPE:
        single = score([name])
        assert 0.55 < single.loss < 0.70
        assert 0.81 < single.accuracy < 0.87
    assert score(["SCEPTR", "SCEPTR_finetuned"]).accuracy > 0.82
    for other in ("SCEPTR_shuffled_data", "SCEPTR_MLM_only"):
        independent = score(["SCEPTR", other])
        assert independent.loss > 2.9
        assert independent.accuracy < 0.17


@pytest.mark.data
@pytest.mark.usefixtures("sceptr")
@pytest.mark.parametrize("name", ["SCEPTR_tiny", "A_SCEPTR", "SCEPTR_CDR3_only"])
def test_the_other_shapes_load_with_their_own_tokens(name: str) -> None:
    weights, config = read(name)
    score = receptors.masked_accuracy(receptors.load(weights, config), receptors.tokens(config))
    assert score.accuracy > 0.55  # one of twenty amino acids; always the commonest: below 0.15

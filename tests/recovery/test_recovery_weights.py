"""From weights: a model that was moved by random elements of all its axes at once is found again."""

from __future__ import annotations

import pytest
import torch

from contract.tiny import MODELS, model_of
from recovery.planted import EVERYTHING, planted, runner, size, squared
from symfuse import api
from symfuse.matching import choose_axes, match_models
from symfuse.model import Model
from symfuse.verification import prove, verify

# One of each kind of body and head; the rest are slow.
QUICK = [
    "torch-relu-post", "bert-pretraining", "distilbert-sequence", "electra-discriminator", "deberta-mlm", "gpt2-lm",
    "falcon-h1-plain", "exaone4-lm", "codegen-lm",
]  # fmt: skip
NOISY = ["torch-relu-post", "bert-pretraining", "gpt2-lm"]


# Exact, and not found again in full by one descent from the weights: of the first three something is left (layers that
# share keys and values have fewer weights to tell them by); decays of the last magnify rounding to 1e-8.
NOT_FOUND = ("gemma3n-lm", "gemma4-lm", "longcat-lm", "kimi-linear-")


def models(quick: list[str]) -> pytest.MarkDecorator:
    labels = [label for label in MODELS if not label.startswith(NOT_FOUND)]
    marked = [pytest.param(label, marks=[] if label in quick else pytest.mark.slow) for label in labels]
    return pytest.mark.parametrize("label", marked)


@pytest.mark.parametrize("label", MODELS)
def test_every_axis_on_which_a_group_acts_has_a_word(label: str) -> None:
    spec = model_of(label).spec
    assert set(choose_axes(EVERYTHING, spec)) >= {instance.axis for instance in spec.movable}


@models(QUICK)
def test_all_axes_at_once(label: str) -> None:
    plant = planted(label)
    alignment = plant.match()
    assert squared(plant.moved, plant.home.checkpoint) > 0.5 * size(plant.home.checkpoint)
    assert plant.left(alignment) < 1e-12 * size(plant.home.checkpoint)
    assert alignment.frame == plant.frame
    how = runner(plant.case)
    assert prove(plant.moved, alignment, runner=how).exact.equal  # the source computes what it did
    back, anchor = alignment(plant.moved), alignment.in_frame(plant.case.checkpoint)
    merged = api.merge([back, anchor])
    assert verify(plant.case.checkpoint, merged, runner=how, tolerance=max(1e-6, 3 * plant.case.exact)).equal


@models(NOISY)
def test_with_noise_no_more_than_the_noise_is_left(label: str) -> None:
    plant = planted(label, noise=1e-3)
    alignment = plant.match()
    assert plant.own > 0
    assert plant.left(alignment) <= 1.05**2 * plant.own
    assert prove(plant.moved, alignment, runner=runner(plant.case)).exact.equal


@pytest.mark.parametrize("label", ["gpt2-lm"])
def test_a_pre_norm_stream_as_it_is_is_permuted(label: str) -> None:
    plant = planted(label, frame=())
    alignment = plant.match()
    assert alignment.frame == ()
    assert plant.left(alignment) < 1e-12 * size(plant.home.checkpoint)


@pytest.mark.parametrize("label", ["bert-pretraining", "gpt2-lm"])
def test_in_float32(label: str) -> None:
    """Weights are rounded once, when the moved model is written."""
    plant = planted(label)
    half = plant.moved.to(torch.float32)
    anchor = plant.case.checkpoint.to(torch.float32)
    alignment = match_models(Model.of(half), Model.of(anchor), axes=EVERYTHING, frame=plant.frame, threads=1)
    assert plant.left(alignment) < 1e-11 * size(plant.home.checkpoint)

"""What learning can be told, and what it refuses, with what message."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import symfuse
from contract.tiny import DECODER, of
from matching.learned.learning_cases import groups_of, learning, model, planted, task
from symfuse import api
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SpecError, UnknownArchitectureError
from symfuse.groups import SignedMonomial
from symfuse.matching.learned import Learning
from symfuse.model import Model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "learning: steps is 0; expected a whole number, 1 or more"),
        ({"every": 0}, "learning: every is 0; expected a whole number, 1 or more"),
        ({"patience": -1}, "learning: patience is -1; expected a whole number, 1 or more"),
        ({"points": 0}, "learning: points is 0; expected a whole number, 1 or more"),
        ({"rate": 0.0}, "learning: rate is 0.0; expected a number above 0"),
        ({"rate": -1.0}, "learning: rate is -1.0; expected a number above 0"),
        ({"rate": math.nan}, "learning: rate is nan; expected a number above 0"),
        ({"rate": math.inf}, "learning: rate is inf; expected a number above 0"),
        ({"spread": -0.1}, "learning: spread is -0.1; expected 0 (the middle only) to 1 (the whole path)"),
        ({"spread": 1.1}, "learning: spread is 1.1; expected"),
        ({"spread": math.nan}, "learning: spread is nan; expected"),
        ({"distil": -0.1}, "learning: distil is -0.1; expected 0 (labels only) to 1 (no labels)"),
        ({"distil": math.nan}, "learning: distil is nan; expected"),
    ],
    ids=str,
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        learning("bert", **options)


def test_unknown_permutations_are_refused() -> None:
    made = object.__new__(Learning)  # past the type checker of the tests
    for name, value in vars(learning("bert")).items():
        object.__setattr__(made, name, value)
    object.__setattr__(made, "permutations", "sinkhorn")
    with pytest.raises(
        OptionError, match="permutations 'sinkhorn'; choose from kept, straight-through, annealed, soft"
    ):
        made.__post_init__()


def test_one_batch_cannot_be_held_out() -> None:
    one = task("bert").part(task("bert").batches[:1])
    with pytest.raises(OptionError, match=r"random tokens 0 is one batch, .* name validation data, or take smaller"):
        Learning(one)
    with pytest.raises(OptionError, match="is one batch"):
        api.match(model("bert", 1), model("bert"), learn=one)
    assert Learning(one, validation=one).task is one
    assert len(Learning(task("bert").part(task("bert").batches[:2])).task.batches) == 2


@pytest.mark.parametrize("given", ["causal-lm", 3, [task("bert")]], ids=["a name", "a number", "a list"])
def test_what_is_no_task_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match=r"match: learn is .*; expected a task \(symfuse\.task\)"):
        api.match(model("bert", 1), model("bert"), learn=given)


@pytest.mark.slow
def test_a_task_for_another_head_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"has weights that this model lacks: score\.weight"):
        api.match(model("llama", 1), model("llama"), axes="attention", learn=learning("bert"))
    with pytest.raises((IncompatibleError, CheckpointError), match=r"bert"):
        api.match(model("bert", 1), model("bert"), axes="attention", learn=learning("gpt2"))


def test_models_of_different_shapes_are_refused() -> None:
    other = of("LlamaForCausalLM", "LlamaConfig", DECODER | {"intermediate_size": 31})(0)
    with pytest.raises(IncompatibleError, match="the feed-forward sizes differ: 31 and 29"):
        api.match(other, model("llama"), learn=learning("llama"))
    with pytest.raises((IncompatibleError, SpecError)):
        api.match(model("gpt2"), model("llama"), learn=learning("llama"))


def test_models_without_declarations_are_refused() -> None:
    strange = dict(list(model("bert").items())[:3])
    one, other = (symfuse.open(strange, config={"model_type": "unheard-of"}) for _ in range(2))
    with pytest.raises(UnknownArchitectureError, match="unheard-of"):
        api.match(one, other, learn=learning("bert"))


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("gpt2", {"axes": "residual", "groups": {"residual": "permutation"}}),
        ("llama", {"axes": "ffn", "scaling": False}),
    ],
    ids=str,
)
def test_nothing_to_learn_is_refused(label: str, options: dict[str, Any]) -> None:
    axis = options["axes"]
    with pytest.raises(OptionError, match=f"nothing that moves {axis} can be learned while permutations are kept"):
        api.match(model(label, 1), model(label), learn=learning(label), **options)


@pytest.mark.slow
def test_soft_permutations_follow_permutations_only() -> None:
    own = learning("llama", permutations="soft")
    assert SignedMonomial() in groups_of(Model.of(model("llama")).spec).values()
    with pytest.raises(OptionError, match=r'ffn starts with scales or signs, .*groups=\{"ffn": "permutation"\}'):
        api.match(model("llama", 1), model("llama"), axes="ffn", learn=own)
    with pytest.raises(OptionError, match="pool starts with scales or signs"):
        api.match(model("bert", 1), model("bert"), axes="all", learn=learning("bert", permutations="soft"))
    g = api.match(model("llama", 1), model("llama"), axes="ffn", groups={"ffn": "permutation"}, learn=own)
    assert g.variants == ("transport",)


@pytest.mark.parametrize("variant", ["heads-ignored", "separate-qk", "transport"])
def test_inexact_variants_are_refused(variant: str) -> None:
    with pytest.raises(OptionError, match=f"variants {variant}: what is learned keeps the function"):
        api.match(model("bert", 1), model("bert"), axes="attention", variants=(variant,), learn=learning("bert"))


def test_what_moves_is_chosen_as_without_learning() -> None:
    with pytest.raises(OptionError, match="axis 'nonsense' is not known"):
        api.match(planted("bert"), model("bert"), axes="nonsense", learn=learning("bert"))
    with pytest.raises(OptionError, match="layers"):
        api.match(planted("bert"), model("bert"), axes="attention", layers=9, learn=learning("bert"))

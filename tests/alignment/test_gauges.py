"""Gauges on the real classes: of other heads, of norms that are before the maps, composed, undone, in files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from contract.tiny import MODELS, encoder
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.spec import Spec, bias_of

HEADS = ("bert", "bert-mlm", "bert-sequence", "bert-token")
FAST = {("bert-mlm", "bert-sequence"), ("bert-sequence", "bert-token"), ("bert-token", "bert")}
QUERY = "encoder.layer.0.attention.self.query.weight"


def pairs(names: str) -> pytest.MarkDecorator:
    """All pairs of heads, most of them as slow ones."""
    both = itertools.product(HEADS, HEADS)
    return pytest.mark.parametrize(
        names, [pytest.param(*one, marks=[] if one in FAST else [pytest.mark.slow]) for one in both]
    )


@cache
def model(label: str) -> Model:
    return Model.of(MODELS[label]())


@cache
def element(label: str, seed: int = 1) -> Alignment:
    """Of all that may act, gauges too."""
    return random_alignment(model(label).spec, seed, largest=True)


def alone(spec: Spec, seed: int = 1) -> Alignment:
    """Gauges, and nothing else."""
    return replace(random_alignment(spec, seed, largest=True), elements={}, shifts={})


def off(before: Checkpoint, after: Checkpoint, by: Alignment) -> float:
    """How far outputs of the real class are from each other, over the largest."""
    return api.verify(before, after, by.bound(Model.of(before)), tolerance=1.0).worst


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-11)


def differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pairs("made, there")
def test_of_another_head_they_are_exact(made: str, there: str) -> None:
    """Those of what the other has not are left out, those of the body stay."""
    by, other = element(made), model(there)
    assert off(other.checkpoint, by(other.checkpoint), by) < 1e-12
    only = alone(model(made).spec)
    moved = only(other.checkpoint)
    shared = [name for name in only.gauges if name in other.spec.gauges]
    assert len(shared) >= 8
    files = {other.spec.file_name(name) for reader in shared for name in (reader, bias_of(reader))}
    assert set(differ(moved, other.checkpoint)) == files


def test_of_a_norm_that_comes_before_they_are_dropped() -> None:
    """The post-norm and the pre-norm encoder have the same tensors, and only what reads the former has gauges."""
    post = encoder(0)
    by = random_alignment(Model.of(post).spec, 1, largest=True)
    assert len(by.gauges) == 3
    assert off(post, by(post), by) < 1e-12
    for final in (False, True):
        pre = encoder(1, norm_first=True, final_norm=final)
        assert by.bound(Model.of(pre)).gauges == {}
        assert off(pre, by(pre), by) < 1e-12
        only = alone(Model.of(post).spec)
        assert differ(only(pre), pre) == []
        assert len(differ(only(post), post)) == 6
        back = random_alignment(Model.of(pre).spec, 2, largest=True)
        if not final:  # a final norm is no tensor of the other
            assert off(post, back(post), back) < 1e-12
    # What it would do there, were it not dropped: the streams of a pre-norm model are no constant along it.
    pre = encoder(1, norm_first=True)
    wrong = pre.replace(tensors={**pre, **{n: only(post)[n] - post[n] + pre[n] for n in differ(only(post), post)}})
    assert api.verify(pre, wrong, tolerance=1.0).worst > 1e-3


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from(["bert-sequence", "torch-relu-post"]))
def test_composed_and_undone(one: int, two: int, label: str) -> None:
    composed(one, two, label)


def test_composed_and_undone_once() -> None:
    composed(1, 2, "torch-relu-post")


def composed(one: int, two: int, label: str) -> None:
    source = model(label).checkpoint
    g, h = (random_alignment(model(label).spec, seed, largest=True) for seed in (one, two))
    there = dict(h(g(source)))
    same(there, dict((h @ g)(source)))
    same(g.inverse()(g(source)), source)
    same((g.inverse() @ g)(source), source)
    same((h @ g).inverse()(source), (g.inverse() @ h.inverse())(source))
    wrong = dict(replace(h @ g, gauges={**g.gauges, **h.gauges})(source))
    assert max(float((wrong[n] - t).abs().max()) for n, t in there.items()) > 1e-3


def test_composed_with_those_of_files_that_have_none(tmp_path: Path) -> None:
    """As of versions before there were gauges: the declaration in the file has none."""
    source, g = model("bert-sequence").checkpoint, element("bert-sequence")
    old = element("bert-sequence", 2)
    old = replace(old, spec=replace(old.spec, gauges={}), gauges={})
    old = Alignment.load(old.save(tmp_path / "old.safetensors"))
    assert old.spec.gauges == {}
    for first, then in ((g, old), (old, g), (old, old)):
        both = then @ first
        same(both(source), then(first(source)))
        assert off(source, both(source), both) < 1e-12
        loaded = Alignment.load(both.save(tmp_path / f"{len(both.gauges)}.safetensors"))
        assert loaded.to_bytes() == both.to_bytes()
        same(loaded.inverse()(both(source)), source)
    assert (old @ g).gauges.keys() == (g @ old).gauges.keys() == g.gauges.keys()


@pairs("first, then")
def test_composed_over_heads(first: str, then: str, tmp_path: Path) -> None:
    """What the first is of has the weights that count; the result is a file like any other."""
    g, h = element(first), element(then, 2)
    both, source = h @ g, model(first).checkpoint
    same(both(source), h(g(source)))
    assert off(source, both(source), both) < 1e-12
    loaded = Alignment.load(both.save(tmp_path / "both.safetensors"))
    assert loaded.to_bytes() == both.to_bytes()
    same(loaded.inverse()(both(source)), source)


@pairs("made, there")
def test_bound_to_another_head_it_is_saved_and_loaded(made: str, there: str, tmp_path: Path) -> None:
    other = model(there)
    bound = element(made).bound(other)
    loaded = Alignment.load(bound.save(tmp_path / "bound.safetensors"))
    assert loaded.to_bytes() == bound.to_bytes()
    assert loaded.spec.gauges == other.spec.gauges
    assert differ(loaded(other.checkpoint), element(made)(other.checkpoint)) == []


DAMAGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "longer": lambda t: t.update({f"gauge/{QUERY}": torch.zeros(21)}),
    "a matrix": lambda t: t.update({f"gauge/{QUERY}": torch.zeros(20, 1)}),
    "no numbers": lambda t: t.update({f"gauge/{QUERY}": torch.full((20,), torch.nan)}),
    "infinite": lambda t: t.update({f"gauge/{QUERY}": torch.full((20,), torch.inf)}),
    "whole numbers": lambda t: t.update({f"gauge/{QUERY}": torch.zeros(20, dtype=torch.int64)}),
    "unknown": lambda t: t.update({"gauge/encoder.layer.7.output.dense.weight": torch.zeros(20)}),
    "no reader": lambda t: t.update({"gauge/encoder.layer.0.output.dense.weight": torch.zeros(20)}),
    "a bias": lambda t: t.update({f"gauge/{QUERY.replace('weight', 'bias')}": torch.zeros(20)}),
    "a norm": lambda t: t.update({"gauge/embeddings.LayerNorm.weight": torch.zeros(20)}),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_ones_are_refused(how: str, tmp_path: Path) -> None:
    path = element("bert-sequence").save(tmp_path / "g.safetensors")
    assert len(Alignment.load(path).gauges) == 9
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        meta = {key: value for key, value in file.metadata().items() if key != "sha256"}  # as before checksums
    DAMAGES[how](tensors)
    save_file(tensors, tmp_path / "bad.safetensors", meta)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: says that it is an alignment, but is damaged"):
        Alignment.load(tmp_path / "bad.safetensors")


def test_which_gains_they_need() -> None:
    """By norm one weight; a gauge of zeros needs none."""
    g = element("bert-sequence")
    assert set(g.gauged) == set(model("bert-sequence").spec.gauges.values())
    assert all(model("bert-sequence").spec.gauges[reader] == gain for gain, reader in g.gauged.items())
    nothing = replace(g, gauges={name: torch.zeros_like(v) for name, v in g.gauges.items()})
    assert nothing.gauged == {}

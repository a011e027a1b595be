"""Matching in bounded memory: the same result, bit by bit, and never more at once than was said."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.tiny import MODELS
from symfuse import api
from symfuse.architectures import resolve
from symfuse.executors import Budget
from symfuse.groups import SignedMonomial, objective
from symfuse.matching import coordinate
from symfuse.model import Model
from symfuse.spec import Instance
from symfuse.stats import weight_moments, workspace

FFN = Instance("ffn", (0,))
STREAMING = SignedMonomial(largest_exact=5)  # of 29 neurons
EIGHT_BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def moments(group: SignedMonomial) -> Any:
    anchor, source = (Model.of(MODELS["llama"](seed)) for seed in (0, 1))
    return weight_moments(source.spec, FFN, anchor.read, source.read, group)


def test_moments_that_are_not_kept_are_the_moments() -> None:
    kept, formed = moments(SignedMonomial()), moments(STREAMING)
    assert kept.keys() == formed.keys() == {"plain", "primal", "dual"}
    index = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    for part, m in kept.items():
        f = formed[part]
        assert not isinstance(getattr(f, "__dict__", {}).get("xy"), Tensor)
        torch.testing.assert_close((f.xy, f.x_norms, f.y_norms), (m.xy, m.x_norms, m.y_norms))
        torch.testing.assert_close(f.picked(index), m.picked(index))
        torch.testing.assert_close(torch.cat(list(f.rows(torch.float32, 4))), m.xy.float())
        twice = f + f
        torch.testing.assert_close((twice.xy, twice.x_norms), (2 * m.xy, 2 * m.x_norms))
        torch.testing.assert_close((f + m).xy, 2 * m.xy)


def test_the_best_element_is_that_of_moments_that_are_kept() -> None:
    kept, formed = moments(SignedMonomial()), moments(STREAMING)
    one, other = STREAMING.best(formed), STREAMING.best(kept)
    assert torch.equal(one.index, other.index)
    torch.testing.assert_close(one.scale, other.scale)
    torch.testing.assert_close(objective(one, formed), objective(other, kept))


def test_a_budget_is_kept_but_for_one_alone() -> None:
    budget, lock, together = Budget(10), threading.Lock(), threading.Barrier(2)
    held: list[int] = []
    seen: list[tuple[int, ...]] = []

    def work(nbytes: int) -> None:
        with budget.hold(nbytes):
            with lock:
                held.append(nbytes)
                seen.append(tuple(held))
            if nbytes == 5:  # which two hold at the same time, or never end
                together.wait(60)
            with lock:
                held.remove(nbytes)

    sizes = [3, 4, 12, 1, 6, 2, 30, 5, 5, 4, 3] * 3
    with ThreadPoolExecutor(len(sizes)) as pool:  # a thread for each: those that wait must not keep a second 5 out
        list(pool.map(work, sizes))
    assert len(seen) == len(sizes)
    assert all(sum(one) <= 10 or len(one) == 1 for one in seen)
    assert any(len(one) > 1 for one in seen)


def test_what_fails_gives_its_share_back() -> None:
    budget = Budget(10)
    with pytest.raises(ValueError, match="no"), budget.hold(10):
        raise ValueError("no")
    with budget.hold(10):
        pass


@pytest.mark.parametrize("label", ["llama", "bert"])
def test_the_result_does_not_depend_on_the_memory(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, anchor = (MODELS[label](seed) for seed in (0, 1))
    at_once, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(2)
    solve = coordinate._Pair.solve

    def counted(*args: Any) -> Any:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            waits = overlap.pop() if overlap else False
        if waits:
            together.wait(60)
        try:
            return solve(*args)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(coordinate._Pair, "solve", counted)
    found = {}
    overlap: list[bool] = []  # the first two wait for each other
    for memory, threads in ((1, 4), (2**40, 4), (2**40, 1)):
        most, overlap = 0, [True, True] if (memory, threads) == (2**40, 4) else []
        g = api.match(source, anchor, axes=("attention", "ffn"), memory=memory, threads=threads)
        found[memory, threads] = g.to_bytes()
        assert (most == 1) == ((memory, threads) != (2**40, 4))
    assert len(set(found.values())) == 1


def test_two_feed_forwards_of_eight_billion_weights_fit_into_six_gigabytes() -> None:
    spec = resolve(EIGHT_BILLION, [])
    takes = {i.axis: workspace(spec, i, g.usual()) for i in spec.movable if (g := spec.axes[i.axis].group) and i.index}
    assert 2e9 < takes["ffn"] < 3e9
    assert max(takes["c"], takes["v"]) < 4e8
    kept = SignedMonomial(largest_exact=2**20)
    assert workspace(spec, FFN, kept) > 6e9

"""The pretended device itself: what a device would refuse or get wrong is caught, and what it allows is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from device.pretend import CUDA, DeviceError, There, pretended


def moved(*shape: int) -> Tensor:
    return torch.ones(shape).to("cuda")


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t + torch.zeros(3),
    "product": lambda t: t @ torch.eye(3),
    "stacked": lambda t: torch.stack([t, torch.zeros(3, 3)]),
    "compared": lambda t: torch.equal(t, torch.ones(3, 3)),
    "index": lambda t: t[torch.tensor([0, 2])],
    "assigned": lambda t: t.__setitem__(0, torch.zeros(3)),
    "in place": lambda t: t.add_(torch.zeros(3, 3)),
    "other way round": lambda t: torch.zeros(3, 3).add_(t),
    "result": lambda t: torch.add(t, 1, out=torch.zeros(3, 3)),
    "chosen": lambda t: torch.where(t > 0, t, torch.zeros(3, 3)),
    "gathered": lambda t: t.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    "factory": lambda t: torch.zeros_like(t, device="cpu") + t,
    "module": lambda t: nn.Linear(3, 2)(t),
}


@pytest.mark.parametrize("what", MIXED)
def test_tensors_of_both_sides_do_not_meet(what: str) -> None:
    with pretended(), pytest.raises(DeviceError, match="is on the processor, others on the device"):
        MIXED[what](moved(3, 3))


def test_but_numbers_do_and_copies_go_both_ways() -> None:
    with pretended() as device:
        t = moved(3, 3)
        out = t * torch.tensor(2.0) + 1
        target = torch.zeros(3, 3)
        target.copy_(out)
        t[0] = 5.0
        t.copy_(target)
    assert torch.equal(target, torch.full((3, 3), 3.0))
    assert device.moves.there == [9, 9]
    assert device.moves.back == [9]


def test_it_says_where_it_is() -> None:
    with pretended():
        t = moved(2, 3)
        made = [t, t.T, t[:, 0], t.double(), t.new_zeros(2), torch.zeros_like(t), torch.arange(3, device=t.device),
                torch.linalg.svd(t)[1], t.clone(), t.to("cuda"), t.unbind()[1], torch.zeros(2).to(t)]  # fmt: skip
        assert all(one.device == CUDA and one.is_cuda and not one.is_cpu for one in made)
        assert t.to("cuda") is t
        back = t.cpu()
        assert (back.device.type, back.is_cuda) == ("cpu", False)
        back[:] = 7  # of its own memory
        assert t.sum().item() == 6
    assert type(t) is There
    with pytest.raises(DeviceError, match="a device that is gone"):
        t + 1


NUMPY: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy(), "array": np.asarray, "pinned": lambda t: t.pin_memory(),
    "random": lambda t: torch.randn(3, device=t.device, generator=torch.Generator()),
}  # fmt: skip


@pytest.mark.parametrize("what", NUMPY)
def test_what_only_the_processor_has(what: str) -> None:
    with pretended(), pytest.raises(DeviceError):
        NUMPY[what](moved(3))


def test_gradients_and_modules_are_there_too() -> None:
    with pretended():
        module = nn.Linear(3, 2).to("cuda")
        module(moved(4, 3)).square().sum().backward()
        assert all(p.device == CUDA and p.grad is not None and p.grad.device == CUDA for p in module.parameters())


def test_threads_that_are_started_see_the_device() -> None:
    found: list[torch.device] = []
    with pretended():
        t = moved(3)
        thread = threading.Thread(target=lambda: found.append((torch.zeros(3, device=t.device) + t).device))
        thread.start()
        thread.join()
    assert found == [CUDA]


def sent(stream: Any, size: int = 3) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.ones(size).pin_memory().to("cuda", non_blocking=True)


def test_a_stream_has_to_wait_for_another() -> None:
    with pretended():
        side = torch.cuda.Stream()
        t = sent(side)
        with pytest.raises(DeviceError, match="was not waited for"):
            t + 1
        early = side.record_event()
        late = sent(side)
        torch.cuda.current_stream().wait_event(early)
        t.record_stream(torch.cuda.current_stream())
        late.record_stream(torch.cuda.current_stream())
        assert (t + 1).sum().item() == 6
        with pytest.raises(DeviceError, match="was not waited for"):
            late + 1


def test_memory_of_another_stream_is_recorded() -> None:
    with pretended():
        side = torch.cuda.Stream()
        t = sent(side)
        torch.cuda.current_stream().wait_stream(side)
        with pytest.raises(DeviceError, match="not recorded"):
            t + 1


def test_what_another_stream_reads_is_not_overwritten() -> None:
    with pretended():
        side, t, host = torch.cuda.Stream(), moved(3), torch.empty(3, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        t.record_stream(side)
        with torch.cuda.stream(side):
            host.copy_(t, non_blocking=True)
        with pytest.raises(DeviceError, match="is overwritten, and another stream reads it"):
            t.zero_()
        torch.cuda.current_stream().wait_stream(side)
        t.zero_()
        assert t.sum().item() == 0


def test_a_copy_that_does_not_block_comes_when_it_is_waited_for() -> None:
    with pretended():
        t, host = moved(3), torch.empty(3, pin_memory=True)
        host.copy_(t, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        assert bool(host.isnan().all())
        event.synchronize()
        assert torch.equal(host, torch.ones(3))

"""A pretended CUDA device, to try the code for one where there is none: the numbers are the processor's, the rules are
the device's.

Within `pretended()`, torch sees a device cuda:0. Its tensors say that they are there, are computed as on the processor,
bit for bit, and what the hardware would refuse, or get wrong without a word, is a `DeviceError`:

- an operation on tensors of both sides, but for numbers without dimensions, and copies;
- numpy on a tensor that is there, and random numbers drawn there by a generator of the processor;
- on a stream, a tensor that another stream is still to write, or to read what is overwritten (no wait: a race), or that
  was allocated there and not recorded here, so that its memory may go to others while it is in use.

A copy to the host that does not block has its numbers when it is waited for, and NaN until then. What is not pretended:
the device's own rounding, its memory and its speed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")


class DeviceError(RuntimeError):
    """What a device would refuse, or get wrong."""


class There(Tensor):
    """A tensor that says that it is on the device."""

    # Where the mode is not on, as in a thread that was started before it, it runs all the same.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Pretended.current is None:
            raise DeviceError(f"{func.__name__} of a tensor of a device that is gone")
        return Pretended.current.run(func, args, kwargs or {})


@dataclass
class Moves:
    """Copies of tensors with dimensions from one side to the other: their numbers of elements."""

    there: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)


class Stream:
    """A queue of work. done: how many works it was given. known: of each other stream, up to which work of it this one
    waits for. late: copies to the host, which come when somebody waits for them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.done = 0
        self.known: dict[Stream, int] = {}
        self.late: list[Callable[[], object]] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        for stream, done in event.known.items():
            self.known[stream] = max(self.known.get(stream, 0), done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def sees(self, stream: Stream, done: int) -> bool:
        """Whether that work of that stream is over when this one goes on."""
        return stream is self or self.known.get(stream, 0) >= done


class Event:
    """A point in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.known: dict[Stream, int] = {}
        self.late: list[Callable[[], object]] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.known = stream.known | {stream: stream.done}
        self.late, stream.late = stream.late, []

    def synchronize(self) -> None:
        while self.late:
            self.late.pop()()


_default = Stream()
_of_thread = threading.local()


def current_stream(_device: Any = None) -> Stream:
    found: Stream = getattr(_of_thread, "stream", _default)
    return found


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, _of_thread.stream = current_stream(), stream
    try:
        yield
    finally:
        _of_thread.stream = before


@dataclass
class Memory:
    """What is known of an allocation there: for which stream it was made, where and when it was written and read last,
    and for which others it is recorded."""

    home: Stream
    written: tuple[Stream, int]
    read: dict[Stream, int] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)


# What looks at the description of a tensor, which is on the host.
_LOOKS = {
    "shape", "dtype", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "names", "stride", "size", "dim",
    "numel", "is_contiguous", "storage_offset", "untyped_storage", "is_floating_point", "is_complex", "nelement",
    "__len__", "element_size", "__hash__", "itemsize", "nbytes", "_version", "is_sparse", "is_meta", "is_quantized",
    "is_nested", "is_mkldnn", "is_shared", "is_pinned", "_is_view", "_base", "retain_grad", "requires_grad_",
    "register_hook", "is_inference",
}  # fmt: skip
_COPIES = (Tensor.to, Tensor.cpu, Tensor.cuda)
_NUMPY = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr)
_DEVICE: dict[Any, Any] = {
    Tensor.device.__get__: CUDA,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}


class Pretended(TorchFunctionMode):
    """While it is on, torch has a device cuda:0."""

    current: Pretended | None = None

    def __init__(self) -> None:
        super().__init__()
        self.moves = Moves()
        self.lock = threading.RLock()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DEVICE:
                return _DEVICE[func] if isinstance(args[0], There) else func(*args)
            if func is torch._has_compatible_shallow_copy_type:  # by which modules see if they keep their parameters
                return isinstance(args[0], There) == isinstance(args[1], There)
            if func in _COPIES:
                return self._copied(func, args, kwargs)
            if func is Tensor.copy_:
                return self._written(*args, **kwargs)
            if func is Tensor.pin_memory:
                return self._pinned(*args)
            return self._computed(func, args, kwargs)

    def recorded(self, tensor: Tensor, stream: Stream) -> None:
        """tensor.record_stream(stream)"""
        if not isinstance(tensor, There):
            raise DeviceError("record_stream of a tensor that is on the processor")
        with torch._C.DisableTorchFunctionSubclass():
            _memory(tensor).recorded.add(stream)

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        there = [t for t in tensors if isinstance(t, There)]
        device = kwargs.get("device")
        kwargs = {key: HOST if _is_cuda(one) else one for key, one in kwargs.items() if key != "pin_memory"}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if not there and not _is_cuda(device):
            return func(*args, **kwargs)
        if name in _LOOKS:
            return func(*args, **kwargs)
        if func in _NUMPY:
            raise DeviceError(f"{name} of a tensor that is on the device")
        if kwargs.get("generator") is not None:
            raise DeviceError(f"{name} on the device by a generator of the processor")
        stray = [t for t in tensors if not isinstance(t, There) and t.ndim]
        if stray and there:
            raise DeviceError(f"{name}: a tensor {list(stray[0].shape)} is on the processor, others on the device")
        self._reads(name, there)
        out = func(*args, **kwargs)
        if name == "__setitem__":
            self._writes(name, args[0])
        return self._taken(name, out, there) if device is None or _is_cuda(device) else out

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """to, cpu, cuda."""
        tensor: Tensor = args[0]
        before = CUDA if isinstance(tensor, There) else HOST
        found = [*args[1:], kwargs.get("device"), kwargs.get("other")]
        asked = [t for t in map(_side, found) if t is not None]
        after = CUDA if func is Tensor.cuda else HOST if func is Tensor.cpu else asked[0] if asked else before
        late = kwargs.pop("non_blocking", False) and before == CUDA and after == HOST
        args = [HOST if _is_cuda(one) else one for one in args]
        kwargs = {key: HOST if _is_cuda(one) else one for key, one in kwargs.items()}
        if before == CUDA:
            self._reads("to", [tensor])
        out: Tensor = tensor if func is not Tensor.to else func(*args, **kwargs)
        if before == after:
            return out if out is tensor or before == HOST else self._taken("to", out, [])
        out = (out.clone() if out.untyped_storage()._cdata == tensor.untyped_storage()._cdata else out).as_subclass(
            Tensor
        )
        if out.ndim:
            (self.moves.there if after == CUDA else self.moves.back).append(out.numel())
        if late:
            self._late(out)
        return self._taken("to", out, []) if after == CUDA else out

    def _written(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """target.copy_(source), from any side to any."""
        if isinstance(source, There):
            self._reads("copy_", [source])
        if isinstance(target, There):
            self._reads("copy_", [target])
        if source.ndim and isinstance(target, There) != isinstance(source, There):
            (self.moves.there if isinstance(target, There) else self.moves.back).append(source.numel())
        target.copy_(source)
        if isinstance(target, There):
            self._writes("copy_", target)
        elif isinstance(source, There) and non_blocking:
            self._late(target)
        return target

    def _pinned(self, tensor: Tensor, *_: Any) -> Tensor:
        if isinstance(tensor, There):
            raise DeviceError("pin_memory of a tensor that is on the device")
        return tensor.clone()

    def _taken(self, name: str, out: Any, given: list[There]) -> Any:
        """Results, which are there. given: what they were made of; what is given back was written."""
        if isinstance(out, Tensor):
            if any(out is one for one in given):
                self._writes(name, out)
                return out
            found = out if isinstance(out, There) else out.as_subclass(There)
            storage: Any = out.untyped_storage()  # one object, as long as the memory lives
            with self.lock:
                stream = current_stream()
                stream.done += 1
                if not hasattr(storage, "memory"):
                    storage.memory = Memory(stream, (stream, stream.done))
            return found
        if isinstance(out, tuple | list):
            values = [self._taken(name, one, given) for one in out]
            return type(out)(*values) if hasattr(out, "_fields") else type(out)(values)
        return out

    def _reads(self, name: str, tensors: Iterable[Tensor]) -> None:
        """DeviceError if what the current stream reads may not be there yet, or not any more."""
        stream = current_stream()
        for t in tensors:
            memory = _memory(t)
            if not stream.sees(*memory.written):
                raise DeviceError(f"{name}: a tensor {list(t.shape)} of another stream, which was not waited for")
            if memory.home is not stream and stream not in memory.recorded:
                raise DeviceError(f"{name}: a tensor {list(t.shape)} allocated for another stream, and not recorded")
            with self.lock:
                stream.done += 1
                memory.read[stream] = stream.done

    def _writes(self, name: str, tensor: Tensor) -> None:
        """DeviceError if another stream may still read what the current one overwrites."""
        stream, memory = current_stream(), _memory(tensor)
        if not all(stream.sees(other, done) for other, done in memory.read.items()):
            raise DeviceError(f"{name}: a tensor {list(tensor.shape)} is overwritten, and another stream reads it")
        with self.lock:
            stream.done += 1
            memory.written = (stream, stream.done)

    def _late(self, target: Tensor) -> None:
        """What came to the host comes when it is waited for."""
        values = target.clone()
        target.fill_(torch.nan if target.is_floating_point() else 0)
        current_stream().late.append(partial(target.copy_, values))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple | list):
            yield from _tensors(one)
        elif isinstance(one, dict):
            yield from _tensors(one.values())


def _memory(tensor: Tensor) -> Memory:
    found: Memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    return found


def _is_cuda(one: Any) -> bool:
    return isinstance(one, torch.device | str) and str(one).partition(":")[0] == "cuda"


def _side(one: Any) -> torch.device | None:
    """Of an argument of `to` that is a device, or a tensor that is on one."""
    if isinstance(one, Tensor):
        return CUDA if isinstance(one, There) else HOST
    return (CUDA if _is_cuda(one) else HOST) if isinstance(one, torch.device | str) else None


@contextlib.contextmanager
def pretended() -> Iterator[Pretended]:
    """torch with a device cuda:0, in this thread and those that are started meanwhile."""
    mode = Pretended()
    run = threading.Thread.run

    @wraps(run)
    def within(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    cuda: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "mem_get_info": lambda _device=None: (2**34, 2**34), "Stream": Stream, "Event": Event, "stream": on_stream,
        "current_stream": current_stream, "synchronize": lambda _device=None: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "run", within))
        for name, one in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, one))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda t, stream: mode.recorded(t, stream)))
        stack.enter_context(mock.patch.object(Pretended, "current", mode))
        stack.enter_context(mode)
        yield mode


def on_both(make: Callable[[str], T]) -> tuple[T, T, Moves]:
    """What is made on the processor and on the pretended device, and what was copied for it."""
    plain = make("cpu")
    with pretended() as device:
        there = make("cuda")
    return plain, there, device.moves

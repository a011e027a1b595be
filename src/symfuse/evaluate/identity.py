"""What tells one model, or one loss, from another of the same name: a sha256 that is the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import unwrap
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_EMPTY = CellType()


def identity(source: object) -> str:
    """A sha256 over what something is made of.

    Of tensors, and of mappings and lists of them, every number; of a function its module, qualified name, code,
    constants, defaults and what it closes over; of a class the code of its methods; of a bound method or a partial also
    what is bound; of another object its class and its attributes. Objects inside these count by their class, modules
    there with their weights. What code calls by a global name is not looked into.
    """
    digest = hashlib.sha256()
    for part in _parts(source, True, set()):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _parts(value: object, own: bool, seen: set[int]) -> Iterator[bytes | memoryview]:
    """own: whether an object is the source itself, so that its attributes count. seen: functions that were looked
    into, since one may close over itself."""
    yield _name(type(value))
    match value:
        case Tensor():
            yield f"{value.dtype} {tuple(value.shape)}".encode()
            yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        case None | bool() | int() | float() | complex() | str() | bytes():
            yield repr(value).encode("utf-8", "backslashreplace")
        case ModuleType():
            yield value.__name__.encode()
        case MethodType():
            yield from _parts(value.__func__, False, seen)
            yield from _parts(value.__self__, own, seen)
        case FunctionType() if id(value) in seen:
            yield value.__qualname__.encode()
        case _:
            if isinstance(value, FunctionType):
                seen.add(id(value))
            for part in _inside(value, own):
                yield from _parts(part, False, seen)


def _inside(value: Any, own: bool) -> Iterator[object]:
    match value:
        case Mapping():
            for key in sorted(value, key=repr):
                yield key
                yield value[key]
        case set() | frozenset():
            yield from sorted(value, key=repr)
        case tuple() | list():
            yield len(value)
            yield from value
        case np.ndarray():
            yield from (str(value.dtype), value.shape, value.tolist())
        case CodeType():
            yield from (value.co_code, value.co_consts, value.co_names)
        case FunctionType():
            yield from (value.__module__, value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
        case partial():
            yield from (value.func, value.args, value.keywords)
        case type():
            yield _name(value).decode()
            for base in value.__mro__:
                methods = {name: unwrap(getattr(one, "__func__", one)) for name, one in vars(base).items()}
                yield {name: one.__code__ for name, one in methods.items() if isinstance(one, FunctionType)}
        case _ if own:
            yield from (type(value), getattr(value, "__dict__", None))
        case nn.Module():
            yield value.state_dict()


def _name(cls: type) -> bytes:
    return f"{cls.__module__}.{cls.__qualname__}".encode()

"""The identity of a model or a loss, beyond its name: a sha256 that is the same in every process."""

from __future__ import annotations

import copyreg
import hashlib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import Enum
from functools import partial
from inspect import unwrap
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from symfuse.errors import OutputError

_EMPTY = CellType()

# Types whose repr is all of the value.
_Written = (
    None | bool | int | float | complex | str | bytes | bytearray | range | slice | PurePath | Decimal | Enum
    | torch.dtype | torch.device | np.ufunc
)  # fmt: skip


def identity(source: object) -> str:
    """A sha256 over the contents of a value.

    Tensors, mappings and lists: every number. Functions: module, qualified name, code, constants, defaults, and the
    variables of the closure. Classes: the code of the methods. Bound methods and partials: also the bound values.
    Modules: weights, and the public attributes of all submodules. Other objects: the class, and the state from which
    `copy` makes a copy, as a rule the attributes. Values that code refers to by a global name are not followed.
    OutputError for an object whose state cannot be determined.
    """
    try:
        return _Digests(deep=True).of(source).hex()
    except RecursionError as error:
        raise _unknown(source, "is nested too deeply") from error


def setting(value: object) -> str:
    """As `identity`, for an attribute of a module. The values of weights and the names of functions are ignored; of
    other objects only the class counts. Equal numbers of different types are the same, and so are lists and tuples."""
    return _Digests(deep=False).of(value).hex()


def attributes(part: nn.Module) -> dict[str, Any]:
    """What determines the function of a submodule besides its weights: its public attributes, and the buffers that are
    not in its state dict."""
    buffers = {name: part._buffers[name] for name in sorted(part._non_persistent_buffers_set)}
    result = {**vars(part), **buffers}
    return {key: value for key, value in result.items() if not key.startswith("_") and key != "training"}


class _Digests:
    """deep: as in `identity`, else as in `setting`."""

    def __init__(self, deep: bool) -> None:
        self.deep = deep
        self.done: dict[int, tuple[object, bytes]] = {}  # by id; the objects are kept, so that no other gets their ids
        self.open: list[int] = []  # ids of the objects that contain the current one

    def of(self, value: object) -> bytes:
        if isinstance(value, _Written) and not isinstance(value, np.generic):
            return self._joined(value, [repr(self._number(value)).encode("utf-8", "backslashreplace")])
        if id(value) in self.done:
            return self.done[id(value)][1]
        if id(value) in self.open:  # it contains itself: so many steps up
            return hashlib.sha256(str(self.open[::-1].index(id(value))).encode()).digest()
        self.open.append(id(value))
        parts = (part if isinstance(part, memoryview) else self.of(part) for part in self._parts(value))
        digest = self._joined(value, parts)
        self.open.pop()
        if not isinstance(value, Tensor | np.ndarray):  # of which memory may hold one at a time only
            self.done[id(value)] = value, digest
        return digest

    def _joined(self, value: object, parts: Any) -> bytes:
        digest = hashlib.sha256(self._kind(value))
        for part in parts:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    def _kind(self, value: object) -> bytes:
        if not self.deep:
            value = self._number(value)
            for kind in (tuple, dict):
                if isinstance(value, list if kind is tuple else Mapping):
                    return _name(kind)
        return _name(type(value))

    def _number(self, value: object) -> object:
        if self.deep or not isinstance(value, bool | int | float):
            return value
        return int(value) if float(value).is_integer() else value

    def _parts(self, value: Any) -> Iterator[object]:
        """memoryviews are bytes; all else is looked into."""
        match value:
            case Tensor():
                yield from self._tensor(value)
            case np.ndarray() | np.generic():
                array = np.asarray(value)
                yield from (str(array.dtype), array.shape)
                yield array.tolist() if array.dtype.hasobject else memoryview(array.tobytes())
            case ModuleType():
                yield value.__name__
            case Mapping():
                for key in sorted(value, key=repr):
                    yield from (key, value[key])
            case set() | frozenset():
                yield from sorted(value, key=repr)
            case tuple() | list():
                yield from value
            case nn.Module():
                if self.deep:
                    yield value.state_dict()
                    yield [(path, type(part), attributes(part)) for path, part in value.named_modules()]
            case type():
                yield from _methods(value)
            case FunctionType():
                yield from (value.__module__, value.__qualname__ if self.deep else "")
                yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
                yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
            case CodeType():
                yield from (value.co_code, value.co_consts, value.co_names)
            case MethodType():
                yield from (value.__func__, value.__self__)
            case BuiltinFunctionType() | MethodWrapperType() | MethodDescriptorType() | WrapperDescriptorType():
                yield from (value.__qualname__, getattr(value, "__self__", None))
            case partial():
                yield from (value.func, value.args, value.keywords)
            case _ if self.deep:
                yield from (type(value), *_reduced(value))

    def _tensor(self, value: Tensor) -> Iterator[object]:
        if not self.deep and value.is_floating_point():  # equal in any dtype; a weight is of any value
            value = value.new_zeros(value.shape) if isinstance(value, nn.Parameter) else value
            value = value.double()
        yield from (str(value.dtype), tuple(value.shape))
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _methods(cls: type) -> Iterator[object]:
    yield _name(cls)
    for base in cls.__mro__:
        methods = {name: unwrap(getattr(one, "__func__", one)) for name, one in vars(base).items()}
        yield {name: one.__code__ for name, one in methods.items() if isinstance(one, FunctionType)}


def _reduced(value: object) -> Iterator[object]:
    """What `copy` and `pickle` make an object of: how, from what, its state, and what it holds."""
    reducer = copyreg.dispatch_table.get(type(value))
    try:
        made = reducer(value) if reducer is not None else value.__reduce_ex__(4)
    except Exception as error:  # whatever its class raises
        raise _unknown(value, "does not say what it is made of") from error
    if isinstance(made, str):  # a global name
        yield made
        return
    how, start, *rest = made
    yield from (how, start, *rest[:1])
    yield from (list(items) for items in rest[1:3] if items is not None)


def _unknown(value: object, why: str) -> OutputError:
    return OutputError(
        f"cannot tell this loss from another: a {_name(type(value)).decode()} in it {why}; leave journal out, or give "
        "a loss that is made of tensors, numbers and functions"
    )


def _name(cls: type) -> bytes:
    return f"{cls.__module__}.{cls.__qualname__}".encode()

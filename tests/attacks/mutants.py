"""Seeded mutations of documents (JSON, YAML), of texts and of files with a safetensors header.

Most keep the form and change one value, so that what reads the input gets past its first check.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]

DEEP: Any = 0
for _ in range(60):
    DEEP = [DEEP]

# Values of every kind that JSON has, most of them at an edge.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63), 10**12, 10**20, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-400, 1e308, 1e20, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "-1",
        "1e9",
        "nan",
        "null",
        "true",
        "a/b",
        "../a",
        "/etc",
        ".",
        "..",
        "{l}",
        "%s",
        "\\d+",
    ),
    *("F32", "I64", "float32", "linear", "a", "b", "auto", "all", "weights", "gelu", "bert", "llama", "\ud83d\ude00"),
    *(
        "\u202egnp.exe",
        "a\u2066b",
        "\x1b[2J",
        "a\nb",
        "a\x00b",
        "a\rb",
        "\u200b",
        "e\u0301",
        "ß",
        "x" * 300,
        "y" * 70_000,
    ),
    *("(a+)+$", "(?:(?:x?)*)*$", "((a|a)*)*b", "(", "[", "*", "(?P<n>a)(?P=n)", ".*.*.*.*.*.*.*x", "a{1,99999}"),
    *([], [[]], {}, {"": ""}, [None], [0], [1, 2], [0, 1_000_000], [0, 10**12], ["a", "b"], ["F32"], {"a": {"a": 1}}),
    *({"model": "a"}, {"0": "x"}, [{}], [{"model": "a"}], [[0, 1]], list(range(2_000)), DEEP),
)


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The paths of everything inside a document."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in parts:
        yield (*at, key)
        yield from paths(one, (*at, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def document(given: Any, rng: random.Random) -> Any:
    """A document with one to three changes."""
    out = copy.deepcopy(given)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        where = list(paths(out))
        if not where:
            return rng.choice(VALUES)
        path = rng.choice(where)
        rng.choice(CHANGES)(out, path, where, rng)
    return rng.choice(VALUES) if rng.random() < 0.01 else out


def _replace(out: Any, path: Path, where: list[Path], rng: random.Random) -> None:
    at(out, path[:-1])[path[-1]] = copy.deepcopy(rng.choice(VALUES))


def _remove(out: Any, path: Path, where: list[Path], rng: random.Random) -> None:
    del at(out, path[:-1])[path[-1]]


def _swap(out: Any, path: Path, where: list[Path], rng: random.Random) -> None:
    """What is elsewhere in the document."""
    at(out, path[:-1])[path[-1]] = copy.deepcopy(at(out, rng.choice(where)))


def _wrap(out: Any, path: Path, where: list[Path], rng: random.Random) -> None:
    value = at(out, path)
    wrapped = [[value], {"a": value}, [value, value], str(value)[:1000], [value] * 500]
    at(out, path[:-1])[path[-1]] = copy.deepcopy(rng.choice(wrapped))


def _nudge(out: Any, path: Path, where: list[Path], rng: random.Random) -> None:
    value = at(out, path)
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int):
        value = rng.choice(
            (value + 1, value - 1, -value, value * 2, value * 10**9, float(value), str(value), value // 2)
        )
    elif isinstance(value, float):
        value = rng.choice((-value, value * 1e300, value * 1e-300, str(value), value + 1))
    elif isinstance(value, str):
        value = text(value, rng)
    at(out, path[:-1])[path[-1]] = value


def _rename(out: Any, path: Path, where: list[Path], rng: random.Random) -> None:
    """A key under another name, or one more item of a list."""
    holder = at(out, path[:-1])
    if isinstance(holder, dict):
        name = rng.choice((text(str(path[-1]), rng), str(rng.choice([p[-1] for p in where]))))
        holder[name] = holder.pop(path[-1])
    else:
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(VALUES)))


CHANGES: tuple[Callable[[Any, Path, list[Path], random.Random], None], ...] = (
    *(_replace, _replace, _replace, _remove, _swap, _wrap, _nudge, _nudge, _rename),
)

SIGNS = "\x00\x1b\u202e\u2066\u200b\ud83d\n\t\"'\\/{}[]()*+?|.,:;@%&#=<>~ é😀0"


def text(given: str, rng: random.Random) -> str:
    """A text with a few characters changed, a part twice, or cut."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        i, j = sorted(rng.randrange(len(given) + 1) for _ in range(2))
        sign = rng.choice(SIGNS)
        ways = (
            *(given[:i] + sign + given[i:], given[:i] + given[j:], given[:i], given[i:], given[:j] + given[i:]),
            *(
                given[:i] + sign * rng.choice((2, 50)) + given[j:],
                given[:i] + given[i:j].swapcase() + given[j:],
                given + given,
            ),
        )
        given = rng.choice(ways)[:200_000]
    return given


def raw(given: bytes, rng: random.Random) -> bytes:
    """Bytes with a few changed, a part missing, twice or cut off."""
    out = bytearray(given)
    for _ in range(rng.choice((1, 1, 2, 8))):
        i, j = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        way = rng.randrange(6)
        if way == 0 and i < len(out):
            out[i] ^= 1 << rng.randrange(8)
        elif way == 1 and i < len(out):
            out[i] = rng.choice((0, 255, 0x22, 0x7B, rng.randrange(256)))
        elif way == 2:
            del out[j:]
        elif way == 3:
            del out[i : min(j, i + 16)]
        elif way == 4:
            out[i:i] = out[i : min(j, i + 64)]
        else:
            out += bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 100))))
    return bytes(out)


def as_json(value: Any, rng: random.Random) -> str:
    """JSON as Python writes it (NaN too), now and then with a key that occurs twice, or a tower of brackets."""
    written = json.dumps(value, ensure_ascii=rng.random() < 0.7)
    way = rng.random()
    if way < 0.02 and written.startswith("{") and len(written) > 2:
        return f"{written[:-1]}, {written[1:]}"
    if way < 0.03:
        return "[" * 100_000
    return text(written, rng) if way < 0.15 else written


def json_bytes(given: Any, rng: random.Random) -> bytes:
    """A mutant of a document as a file has it."""
    return as_json(document(given, rng), rng).encode("utf-8", "surrogatepass")


def safetensors(given: bytes, rng: random.Random) -> bytes:
    """A mutant of a file with a safetensors header: of the header's entries, its length, or any bytes."""
    length = int.from_bytes(given[:8], "little")
    header, data = given[8 : 8 + length], given[8 + length :]
    way = rng.random()
    if way < 0.7:
        entries = json.loads(header)
        names = [name for name in entries if name != "__metadata__"]
        if way < 0.35 and len(names) > 1:  # in one entry: places that overlap, leave gaps, or are another's
            entry, other = (entries[name] for name in rng.sample(names, 2))
            start, stop = entry["data_offsets"]
            entry |= rng.choice(
                (
                    *(
                        {"data_offsets": other["data_offsets"]},
                        {"data_offsets": [stop, start]},
                        {"shape": other["shape"]},
                    ),
                    *(
                        {"data_offsets": [start + 1, stop + 1]},
                        {"data_offsets": [start, start]},
                        {"data_offsets": [start, 2**63]},
                    ),
                    *(
                        {"shape": [*entry["shape"], 0]},
                        {"shape": [-1, -1]},
                        {"shape": [2**62, 4]},
                        {"shape": [*entry["shape"], 1]},
                    ),
                    *({"dtype": dtype} for dtype in ("F16", "I32", "F64", "C64", "F8_E4M3", "BOOL", "F4", "U64")),
                    *({key: value} for key in entry for value in rng.sample(VALUES, 2)),
                )
            )
        else:
            entries = document(entries, rng)
        header = as_json(entries, rng).encode("utf-8", "surrogatepass")
        length = len(header)
    elif way < 0.8:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, 10**8, 10**8 + 1))
    else:
        return raw(given, rng)
    return length.to_bytes(8, "little") + header + data


def values(given: bytes, rng: random.Random) -> bytes:
    """A mutant of the numbers behind a safetensors header: NaN, infinity, the largest, zeros, or noise."""
    start = 8 + int.from_bytes(given[:8], "little")
    out = bytearray(given)
    span = rng.choice((4, 8, 64, len(out)))
    i = start + 4 * rng.randrange(max(1, (len(out) - start) // 4))
    word = rng.choice(
        (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", b"\xff\xff\x7f\x7f", b"\x00\x00\x00\x00", rng.randbytes(4))
    )
    part = out[i : i + span]
    out[i : i + span] = (word * (len(part) // 4 + 1))[: len(part)]
    return bytes(out)

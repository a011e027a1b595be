"""How complete a comparison of two models is: which stored tensors differ, inputs that reach every kind of token and
position, and the rows of tensors that a run reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from symfuse.io import Checkpoint
from symfuse.io.tensors import BLOCK
from symfuse.verification.images import PLACEHOLDER, image_token


class Reads(TorchFunctionMode):
    """Records, while it is active, which rows of its parameters a module reads, for parameters whose tensor in the
    checkpoint is known (`symfuse.modules.build.stored_as`).

    rows: by tensor, whether each row was read. A lookup, by `embedding` or by an index (experts), reads single rows;
    any other operation reads all of them. tables: the tensors in which rows were looked up.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__()
        self.rows = {name: torch.zeros(count, dtype=torch.bool) for name, count in counts.items()}
        self.tables: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, (Tensor, tuple)):  # no shape, no dtype
            for parameter in _parameters((*args, *(kwargs or {}).values())):
                self._read(getattr(parameter, "stored_as", ()), _index(func, parameter, args))
        return out

    def _read(self, names: tuple[str, ...], index: Any) -> None:
        for name in names:
            self.rows[name][slice(None) if index is None else index] = True
            if index is not None:
                self.tables.add(name)

    def counts(self) -> dict[str, tuple[int, int]]:
        """The number of rows read, and of all rows: of tables, and of parameters that were not read."""
        return {
            name: (int(rows.sum()), len(rows))
            for name, rows in self.rows.items()
            if name in self.tables or not bool(rows.any())
        }


def _parameters(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parameters(value)


def _index(func: Any, parameter: Tensor, args: tuple[Any, ...]) -> Any:
    """The rows of a parameter that a call looks up; None if it is no lookup."""
    if func is torch.nn.functional.embedding and args[1] is parameter:
        return args[0].reshape(-1)
    if func is Tensor.__getitem__ and args[0] is parameter:
        first = args[1][0] if isinstance(args[1], tuple) else args[1]
        return first if isinstance(first, (int, slice, Tensor)) else None
    return None


@dataclass(frozen=True)
class Changed:
    """How one tensor differs between two checkpoints. rows: for each row the largest difference, relative to the row's
    largest entry in either (a vector is one row). nonzero: which rows have entries other than 0."""

    rows: Tensor
    nonzero: Tensor
    dtypes: frozenset[torch.dtype] = field(default_factory=frozenset)

    def edited(self, tolerance: float) -> Tensor:
        """The rows that differ by more than rounding while other rows do not: none where all do, as for a model in
        another basis."""
        beyond = self.rows > tolerance
        return beyond if bool((~beyond & self.nonzero).any()) else torch.zeros_like(beyond)


def changes(one: Checkpoint, other: Checkpoint) -> dict[str, Changed]:
    """The tensors with equal names and shapes whose entries differ, compared in blocks of rows."""
    changed_tensors = {}
    for name in one:
        if name not in other or one.info(name).shape != other.info(name).shape:
            continue
        info = one.info(name)
        if info.dtype.is_floating_point and (changed := _changed(one, other, name)) is not None:
            changed_tensors[name] = changed
    return changed_tensors


def _changed(one: Checkpoint, other: Checkpoint, name: str) -> Changed | None:
    info = one.info(name)
    count = info.shape[0] if len(info.shape) > 1 else 1
    length = info.numel // max(1, count)
    rows, nonzero = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.bool)
    step = max(1, BLOCK // max(1, length))
    for start in range(0, count, step):
        stop = min(start + step, count)
        a, b = (_rows(c, name, start * length, stop * length, length) for c in (one, other))
        scale = torch.maximum(a.abs().amax(1), b.abs().amax(1))
        nonzero[start:stop] = scale > 0
        if not torch.equal(a, b):
            rows[start:stop] = ((a - b).abs().amax(1) / scale.clamp_min(1e-300)).nan_to_num(torch.inf)
    dtypes = frozenset({info.dtype, other.info(name).dtype})
    return Changed(rows, nonzero, dtypes) if bool(rows.any()) else None


def _rows(checkpoint: Checkpoint, name: str, start: int, stop: int, length: int) -> Tensor:
    """Rows as they are saved, rounded to the dtype of the tensor."""
    part = checkpoint.part(name, start, stop).to(checkpoint.info(name).dtype)
    return part.to("cpu", torch.float64).reshape(-1, max(1, length))


# The number of tokens is bounded by the cost of a model's weights, some 1e11 multiplications (seconds on a processor),
# and by the memory of its logits; the length of a text also by the memory of the attention scores.
MULTIPLICATIONS = 1.5e11
LOGITS = 2**26
TOKENS = (64, 4096)
LONGEST = 1024
SHORT = 256  # reaches every bucket of relative positions, and enough distances

_LIMITS = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
_WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size")
_SPECIAL = re.compile(r"\w*token_(id|index)")


@dataclass(frozen=True)
class Reach:
    """The extent of the inputs. length: of a text; positions: how many there are; tokens: of all texts together."""

    length: int
    positions: int
    tokens: int

    @classmethod
    def of(cls, module: torch.nn.Module) -> Reach:
        """To the last position of a learned table; else to twice the window of attention, or SHORT."""
        text = _text(module)
        numbers = [[n for key in keys if type(n := getattr(text, key, None)) is int] for keys in (_LIMITS, _WINDOWS)]
        positions, window = next(iter(numbers[0]), SHORT), max(numbers[1], default=0)
        tables = [part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)]
        learned = any(positions <= rows <= positions + 2 for rows in tables)
        count = sum(p.numel() for p in module.parameters())
        most = min(int(MULTIPLICATIONS / max(1, count)), LOGITS // int(getattr(text, "vocab_size", 1)), TOKENS[1])
        tokens = max(most, TOKENS[0])
        wanted = positions if learned else min(positions, max(SHORT, 2 * window))
        return cls(max(1, min(wanted, LONGEST, tokens)), positions, tokens)

    def run(self, inputs: Sequence[Mapping[str, Tensor]]) -> tuple[int, int]:
        """The number of positions that were run, and of all positions."""
        lengths = [fields.get("input_ids", fields.get("decoder_input_ids")) for fields in inputs]
        return sum(ids.shape[-1] for ids in lengths if ids is not None), self.positions


def long_inputs(
    module: torch.nn.Module,
    configs: Sequence[Mapping[str, Any]],
    short: Mapping[str, Tensor],
    words: Sequence[int],
    less: int = 0,
) -> list[dict[str, Tensor]]:
    """Random inputs like `short` with a larger range, for a module that reads tokens: special ids and those below 5,
    `words`, in order of importance, as much of the rest of the vocabulary as the model's size allows, all token types,
    and positions up to `Reach`; and some of the later positions, where the module takes `position_ids`.

    less: the number of positions that are not available, for a module that counts from its padding token.
    """
    keys = [key for key in ("input_ids", "decoder_input_ids") if key in short]
    if not keys or (length := (reach := Reach.of(module)).length - less) < 1:
        return []
    takes, rng = inspect.signature(module.forward).parameters, torch.Generator().manual_seed(1)
    if any(image_token(module, config) is not None for config in configs):  # texts without images
        short = {name: value for name, value in short.items() if name in ("input_ids", "attention_mask")}
    size = int(_text(module).vocab_size)
    texts = max(1, min(-(-size // length), reach.tokens // length))
    out = _like(short, {key: _ids(module, configs, words, key, (texts, length), rng) for key in keys})
    types = getattr(_text(module), "type_vocab_size", 0) or 0
    if "token_type_ids" in takes and types > 1:
        out["token_type_ids"] = (torch.arange(texts * length) % types).reshape(out["input_ids"].shape)
    if (
        keys != ["input_ids"]
        or "position_ids" not in takes
        or reach.positions <= reach.length
        or short[keys[0]].ndim > 2
    ):
        return [out]
    far = torch.linspace(length, reach.positions - 1, min(TOKENS[0], reach.positions - length)).long()[None]
    more = _like(short, {"input_ids": _ids(module, configs, words, keys[0], (1, far.shape[1]), rng)})
    return [out, {**more, "position_ids": far}]


def _text(module: torch.nn.Module) -> Any:
    config: Any = module.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _like(short: Mapping[str, Tensor], ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs with other token ids, none of which are padding; all other fields with the same number of rows."""
    count = len(next(iter(ids.values())))
    out = {name: value[torch.arange(count) % len(value)] for name, value in short.items() if "mask" not in name}
    for key, value in ids.items():
        out[key] = value[None] if short[key].ndim > 2 else value
        out[key.replace("input_ids", "attention_mask")] = torch.ones_like(out[key])
    return out


def _ids(
    module: torch.nn.Module,
    configs: Sequence[Mapping[str, Any]],
    words: Sequence[int],
    key: str,
    shape: tuple[int, int],
    rng: torch.Generator,
) -> Tensor:
    text = _text(module)
    size = (getattr(text, "decoder_vocab_size", None) if key.startswith("decoder") else None) or text.vocab_size
    fields = [pair for c in configs for part in (c, c.get("text_config") or {}) for pair in part.items()]
    special = [n for name, n in fields if type(n) is int and _SPECIAL.fullmatch(name)]
    apart = {n for name, n in fields if type(n) is int and PLACEHOLDER.fullmatch(name)}
    ranked = dict.fromkeys([*special, *range(5), *words, *torch.randperm(size, generator=rng).tolist()])
    selected = torch.tensor([n for n in ranked if 0 <= n < size and n not in apart])
    count = shape[0] * shape[1]
    fill = selected[torch.randint(len(selected), (max(0, count - len(selected)),), generator=rng)]
    ids = torch.cat([selected[:count], fill])[torch.randperm(count, generator=rng)].reshape(shape)
    if "decoder_input_ids" in inspect.signature(module.forward).parameters and type(module).__name__.endswith(
        "ForSequenceClassification"
    ):  # which reads out a text at its single end token
        ids[ids == text.eos_token_id] = 0
        ids[:, -1] = text.eos_token_id
    return ids

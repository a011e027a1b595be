"""W + scale·B·A: a base with a LoRA adapter added, computed when it is read (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from symfuse.adapters.config import CONFIG, WAY_OUT, Config, is_adapter, read_tensors, require_floating
from symfuse.adapters.names import is_tied, is_transposed, is_vocabulary, match, target_name
from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint, TensorInfo, is_finite, scan
from symfuse.io import open as open_checkpoint
from symfuse.io.installed import Installed, as_saved, in_memory, installed
from symfuse.io.lazy import Lazy, Rewritten, Rule
from symfuse.messages import some

MAGNITUDE = "magnitude_vector"  # of DoRA
KINDS = rf"A\.weight|B\.weight|B\.bias|embedding_A|embedding_B|{MAGNITUDE}"
FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<factor>{KINDS})")
UNKNOWN_FACTOR = re.compile(r"(.*\.)?(lora_\w+|token_adapter)(\..+)?")


@dataclass(frozen=True)
class Change:
    """What an adapter does to one tensor of the base; the fields are keys of the adapter's file.

    whole: replaces the tensor. down, up: A (rank × in) and B (out × rank), of a matrix, a convolution or (transposed)
    an embedding, or transposed layer. shift: a bias, of the factor B.
    """

    whole: str | None = None
    down: str | None = None
    up: str | None = None
    shift: str | None = None
    scale: float = 1.0
    transposed: bool = False

    def of(self, old: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """The changed tensor in the widest dtype among all parts. read: a tensor of the adapter, by key."""
        new = old if self.whole is None else read(self.whole)
        if self.shift is not None:
            new = new + self.scale * read(self.shift)
        if self.down is None or self.up is None:
            return new
        a, b = read(self.down).flatten(1), read(self.up).flatten(1)
        dtype = torch.promote_types(torch.promote_types(new.dtype, a.dtype), b.dtype)
        left, right = (a.T, b.T) if self.transposed else (b, a)
        flat = new.to(dtype).reshape(left.shape[0], right.shape[1])
        return torch.addmm(flat, left.to(dtype), right.to(dtype), alpha=self.scale).reshape(new.shape)


def _rule(base: Checkpoint, folder: Path, adapter: Mapping[str, Tensor], name: str, change: Change) -> Rule:
    """A tensor of the base as an adapter changes it: before it is rounded in float32 at least."""

    def read(key: str) -> Tensor:
        tensor = adapter[key]
        scan(key, tensor, str(folder))
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def changed() -> Tensor:
        values = change.of(base.read(name), read)
        if not is_finite(values):  # the parts are finite
            raise IncompatibleError(
                f"{name}: {what} does not fit in {values.dtype}; convert {base.name} to a wider dtype first, or use an "
                "adapter with smaller numbers"
            )
        return values

    what = f"the tensor with the adapter {folder} added"
    return Rule(base.info(name), changed, what=what)


def apply(base: Checkpoint, adapter: str | Path) -> Checkpoint:
    """The base with an adapter of peft added: W + scale·B·A, biases, and tensors that the adapter holds as a whole.

    Lazy; dtypes are those of the base, `read` gives the values before rounding. A note says how many tensors change.
    Layers that store [in, out] (GPT-2) are known by their shape, where that is square by the family and the adapter's
    fan_in_fan_out. CheckpointError, by name: for kinds other than plain LoRA (DoRA, replicated layers, other types,
    inits that change the base), for tensors of the adapter that the base lacks or that have other shapes, for numbers
    that are not floating-point ones, for ranks that its config does not give, for a bias that the base's layer lacks,
    and for an embedding that is tied to a head.
    """
    folder = Path(adapter)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is not an adapter: it has no {CONFIG}")
    config, (tensors, notes_read) = Config.read(folder), read_tensors(folder)
    if (known := splitting(tensors, base)) is not None:
        return as_saved(_added(in_memory(base, known), folder, config, tensors, notes_read), base, known)
    return _added(base, folder, config, tensors, notes_read)


def splitting(tensors: Lazy, base: Checkpoint) -> Installed | None:
    """The class of the base, if it has in several tensors what the file has in one, and the adapter changes these."""
    modules = [match["module"] for key in tensors if (match := FACTOR.fullmatch(target_name(key) or ""))]
    known = None if all(f"{module}.weight" in base for module in modules) else installed(base.config)
    if known is None:
        return None
    apart = in_memory(base, known).keys() - known.plan(base)[0].keys()
    return known if any(known.spelt(f"{module}.weight", apart) for module in modules) else None


def _added(base: Checkpoint, folder: Path, config: Config, tensors: Lazy, notes_read: Sequence[str]) -> Checkpoint:
    changes = changes_of(folder.name, config, tensors, base)
    _refuse_tied(folder.name, changes, base)
    notes: tuple[str, ...] = (f"adapter {folder.name}: {len(changes)} of {len(base)} tensors changed",)
    notes += tuple(f"adapter {folder.name}: {note}" for note in notes_read)
    if config.unknown:
        notes += (f"adapter {folder.name}: options not known here, taken to be of training: {some(config.unknown)}",)
    rules = {name: _rule(base, folder, tensors, name, changes[name]) if name in changes else name for name in base}
    name = f"{base.name}+{folder.name}"
    return base.replace(tensors=Rewritten(base, rules), name=name, notes=base.notes + notes, sources=(folder,))


def open_adapter(folder: str | Path, base: str | Path | Checkpoint | None = None) -> Checkpoint:
    """An adapter added to its base: `base`, or the local folder that its config names.

    Nothing is downloaded unless `base` is the id of a model on the hub. Errors as of `apply`.
    """
    folder = Path(folder)
    if not is_adapter(folder):
        raise CheckpointError(f"{folder} is not an adapter: it has no {CONFIG}, or it holds a whole model")
    if base is None:
        base = Config.read(folder).base
        if base is None or not Path(base).is_dir():
            named = f"{base!r}, which is not a local folder" if base else "no base"
            raise CheckpointError(
                f"{folder} holds an adapter, not a model, and its {CONFIG} names {named}. Give the base too, "
                f"as base+adapter: {base or 'BASE'}+{folder}"
            )
    return apply(base if isinstance(base, Checkpoint) else open_checkpoint(base), folder)


def changes_of(adapter: str, config: Config, tensors: Lazy, base: Checkpoint) -> dict[str, Change]:
    """Name in the base → what the adapter changes of it, from names and shapes alone; errors as of `apply`. The
    magnitudes of DoRA are no part of it."""
    wholes, factors = keys_of(adapter, config, tensors)
    biases = [f"{module}.bias" for module, keys in factors.items() if "B.bias" in keys]
    names = match([*wholes, *(f"{module}.weight" for module in factors)], base, adapter)
    changes = {names[name]: Change(whole=key) for name, key in wholes.items()}
    for module, keys in factors.items():
        name = names[f"{module}.weight"]
        changes[name] = _low_rank(adapter, config, module, keys, tensors, base, name, changes.get(name, Change()))
        if f"{module}.bias" in biases:
            bias = f"{name.removesuffix('.weight')}.bias"
            if bias not in base:
                raise CheckpointError(
                    f"{adapter}: {keys['B.bias']!r} changes the bias of a layer (lora_bias) that has none in "
                    f"{base.name}: {bias!r} is absent. Add a bias of zeros to the base, here and in its config."
                )
            changes[bias] = replace(changes.get(bias, Change()), shift=keys["B.bias"], scale=config.scale_of(module))
    for name, change in changes.items():
        _check_vectors(adapter, name, change, tensors, base.info(name))
    return changes


def keys_of(adapter: str, config: Config, tensors: Lazy) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The keys of an adapter's file: of tensors that it holds as a whole, by name, and of factors, by module and kind
    ("A.weight", "embedding_A", …; of DoRA "magnitude_vector"). CheckpointError for parts of other kinds of adapter."""
    wholes: dict[str, str] = {}
    factors: dict[str, dict[str, str]] = {}
    for key in tensors:
        name = target_name(key)
        if name is None:
            continue
        require_floating(adapter, key, tensors.infos[key])
        if (factor := FACTOR.fullmatch(name)) and (config.dora or factor["factor"] != MAGNITUDE):
            factors.setdefault(factor["module"], {})[factor["factor"]] = key
        elif UNKNOWN_FACTOR.fullmatch(name):
            raise CheckpointError(f"{adapter}: {key!r} is not a part of plain LoRA. {WAY_OUT}.")
        else:
            wholes[name] = key
    return wholes, factors


def pair_of(adapter: str, config: Config, module: str, keys: Mapping[str, str], tensors: Lazy) -> tuple[str, str]:
    """The keys of the factors A and B of a module. CheckpointError if one is absent, or their shapes do not have the
    rank that the config gives."""
    embedding = "embedding_A" in keys or "embedding_B" in keys
    down, up = (keys.get(f"embedding_{f}" if embedding else f"{f}.weight") for f in "AB")
    if down is None or up is None:
        raise CheckpointError(f"{adapter}: {module} has only {some(keys.values())}, expected both factors, A and B")
    a, b = tensors.infos[down].shape, tensors.infos[up].shape
    if min(len(a), len(b)) < 2 or a[0] != b[1] or a[0] != config.rank_of(module):
        raise CheckpointError(
            f"{adapter}: {module} has A {list(a)} and B {list(b)}, expected a rank of {config.rank_of(module)} as "
            f"{CONFIG} gives it (r, rank_pattern); the scale depends on it. Save the adapter again."
        )
    return down, up


def _low_rank(
    adapter: str,
    config: Config,
    module: str,
    keys: Mapping[str, str],
    tensors: Lazy,
    base: Checkpoint,
    name: str,
    change: Change,
) -> Change:
    """The change of a weight by two factors, whose shapes must fit it one way or the other."""
    down, up = pair_of(adapter, config, module, keys, tensors)
    embedding = "embedding_A" in keys
    a, b, shape = tensors.infos[down].shape, tensors.infos[up].shape, base.info(name).shape
    out_in, straight = (b[0], *a[1:]), set(b[2:]) <= {1}
    fits, fits_transposed = straight and out_in == shape, len(a) == len(b) == 2 and out_in[::-1] == shape
    if not (fits_transposed if embedding else fits or fits_transposed):
        raise CheckpointError(
            f"{adapter}: {module} has A {list(a)} and B {list(b)}, a delta of {list(out_in)}, which does not fit "
            f"{name!r} of {base.name}, {list(shape)}. Give the model that the adapter was trained on."
        )
    square = fits and fits_transposed
    transposed = is_transposed(module, base.config, config.fan_in_fan_out) if square else fits_transposed
    return replace(change, down=down, up=up, scale=config.scale_of(module), transposed=embedding or transposed)


def _check_vectors(adapter: str, name: str, change: Change, tensors: Lazy, info: TensorInfo) -> None:
    for key in (change.whole, change.shift):
        if key is not None and tensors.infos[key].shape != info.shape:
            resized = " Resize the base's vocabulary first." if len(info.shape) == 2 else ""
            raise CheckpointError(
                f"{adapter}: {key!r} is {list(tensors.infos[key].shape)}, expected {list(info.shape)} as {name!r} "
                f"of the base.{resized}"
            )
    require_floating(f"the base of {adapter}", name, info)


def _refuse_tied(adapter: str, changes: Mapping[str, Change], base: Checkpoint) -> None:
    """peft changes the embedding alone and leaves the head as it was; one stored tensor cannot be both."""
    changed = [name for name in changes if is_vocabulary(name, base)]
    if changed and is_tied(base):
        raise CheckpointError(
            f"{adapter}: {changed[0]!r} of {base.name} is changed, and is tied to the model's head, which the "
            "adapter does not change in the same way. Untie the head of the base first."
        )

"""Steering vectors, probes and sparse auto-encoders of a space of the model (docs/transport.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, OptionError, SymmetryError
from symfuse.io import TensorInfo
from symfuse.io.folder import read_json
from symfuse.io.lazy import StoredTensors
from symfuse.transporting.declared import require_exact
from symfuse.transporting.files import payload, read_arrays, writer_of
from symfuse.transporting.result import Compute, Transported, computed, wide
from symfuse.transporting.spaces import Space, space_of

CONSTANTS = ("bias", "intercept_", "intercept")  # of a probe: they live in the space of its classes
ENCODERS, DECODERS = ("W_enc", "encoder.weight"), ("W_dec", "decoder.weight")
# What reads a norm of the activations before the encoder, by the word of SAE-lens's cfg.json; whether also their mean.
NORMALISED = {"layer_norm": True, "constant_norm_rescale": False}


def transport_vectors(path: Path, alignment: Alignment, axis: str, *, dual: bool = False) -> Transported:
    """Vectors [d] or [n, d] of a space, or with `dual` linear forms on it: a probe, weights [classes, d].

    Every tensor of the file is of that space, but for the constants of a probe. Raises CheckpointError for other
    files, OptionError for another space, SymmetryError where a probe would read something else.
    """
    require_exact(alignment)
    tensors = read_arrays(path)
    space: Space | None = None
    compute: dict[str, Compute] = {}
    for name, info in tensors.infos.items():
        if dual and name.rpartition(".")[2] in CONSTANTS:
            compute[name] = _as_it_is(path, tensors, name)
            continue
        if not info.shape:
            raise CheckpointError(f"{path.name}: {name!r} is a number, expected vectors [d] or [n, d]. ({path})")
        space = space_of(alignment, axis, info.shape[-1])
        if dual:
            space.require_readable(f"{path.name}: {name!r}", _rows(path, tensors, name, space))
        else:
            space.require_unbound(f"{path.name}: {name!r}")
        compute[name] = _moving(path, tensors, name, space, dual)
    if space is None:
        raise CheckpointError(f"{path.name} holds no vectors, only {', '.join(compute)}. ({path})")
    return _result("probe" if dual else "vector", path, tensors.infos, compute, space)


def transport_sae(path: Path, alignment: Alignment, axis: str, encoder: str | None = None) -> Transported:
    """A sparse auto-encoder of a space: its latents stay as they are, and what they read and write moves.

    path: a file, or a folder with one, of SAE-lens (W_enc [d, m]) or EleutherAI's sparsify (encoder.weight [m, d]),
    with W_dec [m, d], b_dec [d] and tensors of the latents. encoder: how the encoder lies, "rows" for [m, d], "columns"
    for [d, m]: needed where d = m. Raises as `transport_vectors`, and CheckpointError for an unknown tensor.
    """
    require_exact(alignment)
    file = payload(path) if path.is_dir() else path
    tensors = read_arrays(file)
    encoding, decoding = (_first(file, tensors, names) for names in (ENCODERS, DECODERS))
    shape, back = tensors.infos[encoding].shape, tensors.infos[decoding].shape
    if len(shape) != 2 or len(back) != 2:
        raise CheckpointError(f"{file.name}: {encoding} is {list(shape)}, {decoding} {list(back)}; expected matrices")
    space, rows = _orientation(file, alignment, axis, (encoding, shape), encoder)
    latents = shape[0] if rows else shape[1]
    if sorted(back) != sorted((latents, space.size)):
        raise CheckpointError(
            f"{file.name}: {decoding} is {list(back)}, expected {[latents, space.size]} for {encoding} {list(shape)}"
        )
    # sparsify and SAE-lens keep the decoder's directions as rows; a torch Linear, "decoder.weight", as columns.
    written = back == (latents, space.size) if latents != space.size else decoding == "W_dec"
    _require_norm(path, space)
    forms = _rows(file, tensors, encoding, space, transposed=not rows)
    space.require_readable(f"{file.name}: {encoding}", forms)
    space.require_unbound(f"{file.name}: {decoding}")
    compute: dict[str, Compute] = {
        encoding: _moving(file, tensors, encoding, space, True, transposed=not rows),
        decoding: _moving(file, tensors, decoding, space, False, transposed=not written),
    }
    for name, info in tensors.infos.items():
        if name in compute:
            continue
        if name == "b_dec":
            if info.shape != (space.size,):
                raise CheckpointError(f"{file.name}: b_dec is {list(info.shape)}, expected {[space.size]}")
            compute[name] = _moving(file, tensors, name, space, False)
        elif info.shape in ((latents,), (), (1,)):
            compute[name] = _as_it_is(file, tensors, name)
        else:
            raise CheckpointError(
                f"{file.name}: {name!r} {list(info.shape)} is not known; expected {encoding}, {decoding}, b_dec and "
                f"tensors of the {latents} latents. Leave it out, or transport it separately as a vector or probe"
            )
    beside = {"cfg.json": (path / "cfg.json").read_bytes()} if (path / "cfg.json").is_file() else {}
    return _result("sae", file, tensors.infos, compute, space, beside)


def _first(file: Path, tensors: StoredTensors, names: tuple[str, ...]) -> str:
    present = [name for name in names if name in tensors]
    if len(present) != 1:
        raise CheckpointError(
            f"{file.name}: expected one of {' or '.join(names)}, found {', '.join(tensors)}; is it a sparse "
            f"auto-encoder? ({file})"
        )
    return present[0]


def _orientation(
    file: Path, alignment: Alignment, axis: str, encoder: tuple[str, tuple[int, ...]], orientation: str | None
) -> tuple[Space, bool]:
    """The space of an encoder, and whether its rows are the linear forms."""
    name, shape = encoder
    spaces = {}
    for word, size in (("rows", shape[1]), ("columns", shape[0])):
        try:
            spaces[word] = space_of(alignment, axis, size)
        except OptionError as error:
            wrong = error
    if orientation is not None and orientation in spaces:
        return spaces[orientation], orientation == "rows"
    if len(spaces) == 1 and orientation is None:
        return next(iter(spaces.values())), "rows" in spaces
    if not spaces:
        raise wrong
    if orientation is not None:
        raise OptionError(f"{file.name}: {name} is {list(shape)}, in which {axis} is not read by its {orientation}")
    if name == "encoder.weight":  # of a torch Linear, whose rows are the forms
        return spaces["rows"], True
    raise OptionError(
        f"{file.name}: {name} is {list(shape)}, and both of its dimensions could be {axis}: say how it lies (--encoder "
        "columns for [d, latents], as SAE-lens has it; --encoder rows for [latents, d])"
    )


def _require_norm(path: Path, space: Space) -> None:
    """SymmetryError if the auto-encoder normalises what it reads in a way that the alignment changes."""
    config = path / "cfg.json"
    word = read_json(config).get("normalize_activations") if path.is_dir() and config.is_file() else None
    if isinstance(word, str) and word in NORMALISED and not space.keeps_norms(mean=NORMALISED[word]):
        raise SymmetryError(
            f"{config}: normalize_activations is {word!r}, and the norm of what is in {space.instance} is not what it "
            "was. Fold the normalisation into the auto-encoder, or align that axis by permutations (--group "
            f"{space.instance.axis}=permutation)"
        )


def _rows(path: Path, tensors: StoredTensors, name: str, space: Space, *, transposed: bool = False) -> Tensor:
    tensor = wide(path.name, name, tensors[name])
    return (tensor.T if transposed else tensor).reshape(-1, space.size)


def _moving(
    path: Path, tensors: StoredTensors, name: str, space: Space, dual: bool, *, transposed: bool = False
) -> Compute:
    def compute() -> Tensor:
        rows = space.move(_rows(path, tensors, name, space, transposed=transposed), dual=dual)
        return rows.T if transposed else rows

    return compute


def _as_it_is(path: Path, tensors: StoredTensors, name: str) -> Callable[[], Tensor]:
    return lambda: wide(path.name, name, tensors[name])


def _result(
    kind: str,
    path: Path,
    infos: Mapping[str, TensorInfo],
    compute: Mapping[str, Compute],
    space: Space,
    files: Mapping[str, bytes] | None = None,
) -> Transported:
    tensors = computed(path.name, infos, compute)
    notes = (
        ()
        if space.aligned_head == space.head
        else (f"{space.instance}: head {space.head} is {space.aligned_head} now",)
    )
    details = {"axis": space.label, "layout": str(space.node)}
    return Transported(kind, tensors, path.name, files or {}, notes, details, (path,), writer_of(path))

"""The verb `transport`: detect the kind of a file or folder, and transform it by an alignment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from symfuse.adapters.config import CONFIG, Config
from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.errors import CheckpointError, OptionError
from symfuse.io import Checkpoint
from symfuse.io.sources import Source, opened
from symfuse.messages import suggestion
from symfuse.runs import alignment_file
from symfuse.stats.statistics import INDEX
from symfuse.transporting.adapter import transport_adapter
from symfuse.transporting.files import payload, read_arrays
from symfuse.transporting.moments import transport_moments
from symfuse.transporting.result import Transported
from symfuse.transporting.statistics import transport_statistics
from symfuse.transporting.vectors import DECODERS, ENCODERS, transport_sae, transport_vectors

KINDS = ("adapter", "vector", "probe", "sae", "moments", "statistics")


@checked
def transport(
    thing: str | os.PathLike[str],
    alignment: Alignment | str | os.PathLike[str],
    *,
    kind: str | None = None,
    axis: str | None = None,
    base: Source | None = None,
    new_base: str | None = None,
    encoder: str | None = None,
    names: Sequence[str] | None = None,
) -> Transported:
    """What belongs to a model A, for A' = alignment(A): `.save(folder)` it, or read its tensors by name.

    thing: the folder of a LoRA adapter or of statistics, or a file of steering vectors, a probe, a sparse auto-encoder
    (also its folder) or the moments of AdamW. alignment: one in memory, its file, or the folder that `symfuse align`
    wrote. kind: which of these ("adapter", "vector", "probe", "sae", "moments", "statistics"), by default what it looks
    like, a vector if nothing else. axis: the space that a vector, probe or auto-encoder is of: "residual", "ffn[3]",
    "v[3]" (all heads), "v[3,2]" (head 2). base: A itself, where that is needed; by default the local folder that the
    adapter names, or the one that contains optimizer.pt. new_base: the base that the adapter's new config names, by
    default the folder of the alignment if that holds the aligned model. encoder: whether an auto-encoder's encoder has
    its features in "rows" or "columns". names: of the parameters, in the optimizer's order.

    Exact: the adapter on A and the transported one on A' compute the same, and so on. Raises SymmetryError where no
    exact result exists.
    """
    place = Path(thing)
    loaded = alignment_of(alignment)
    kind = kind_of(place) if kind is None else kind
    if kind not in KINDS:
        raise OptionError(f"no kind is called {kind!r}{suggestion(kind, KINDS)}; there are {', '.join(KINDS)}")
    _require_use(kind, axis, {"new_base": new_base, "encoder": encoder, "names": names, "base": base})
    if kind == "adapter":
        if new_base is None and not isinstance(alignment, Alignment):
            new_base = aligned_model_of(Path(alignment))
        return transport_adapter(place, loaded, _base_of_adapter(place, base), new_base)
    if kind == "moments":
        beside = place.parent if base is None and (place.parent / "config.json").is_file() else base
        return transport_moments(place, loaded, _opened(beside), names)
    if kind == "statistics":
        model = None if isinstance(alignment, Alignment) else aligned_model_of(Path(alignment))
        return transport_statistics(place, loaded, _opened(base), _opened(model))
    if kind == "sae":
        return transport_sae(place, loaded, str(axis), encoder)
    return transport_vectors(payload(place) if place.is_dir() else place, loaded, str(axis), dual=kind == "probe")


def alignment_of(source: Alignment | str | os.PathLike[str]) -> Alignment:
    """An alignment from its file, or from the folder in which `symfuse align` put it."""
    if isinstance(source, Alignment):
        return source
    return Alignment.load(alignment_file(Path(source)))


def kind_of(thing: Path) -> str:
    """The kind of a file or folder, by its content. CheckpointError if it does not exist."""
    if not thing.exists():
        raise CheckpointError(f"{thing} does not exist; give an adapter's folder, or a file of tensors")
    if (thing / CONFIG).is_file():
        return "adapter"
    if (thing / INDEX).is_file():
        return "statistics"
    file = payload(thing) if thing.is_dir() else thing
    if file.suffix in (".pt", ".bin", ".pth"):
        return "moments"
    tensors = read_arrays(file)
    if any(name.endswith((".exp_avg", ".exp_avg_sq")) for name in tensors):
        return "moments"
    return "sae" if any(n in tensors for n in ENCODERS) and any(n in tensors for n in DECODERS) else "vector"


def _require_use(kind: str, axis: str | None, options: dict[str, object]) -> None:
    """OptionError for an option that this kind does not have, and for a missing one that it needs."""
    spatial = kind in ("vector", "probe", "sae")
    if spatial and axis is None:
        raise OptionError(f"a {kind} needs the axis that it belongs to (--axis residual, --axis 'ffn[3]', …)")
    if not spatial and axis is not None:
        raise OptionError(f"the axes of {'an adapter' if kind == 'adapter' else kind} are known; leave --axis out")
    uses: dict[str, tuple[str, ...]] = {"new_base": ("adapter",), "encoder": ("sae",), "names": ("moments",)}
    uses["base"] = ("adapter", "moments", "statistics")
    for option, value in options.items():
        if value is not None and kind not in uses[option]:
            raise OptionError(f"--{option.replace('_', '-')} is for {' and '.join(uses[option])}, this is a {kind}")


def _base_of_adapter(folder: Path, base: Source | None) -> Checkpoint | None:
    if base is None:
        named = Config.read(folder).base
        base = named if named is not None and (Path(named) / "config.json").is_file() else None
    return _opened(base)


def _opened(source: Source | None) -> Checkpoint | None:
    return None if source is None else opened(source)


def aligned_model_of(alignment: Path) -> str | None:
    """The folder of an alignment, if it also holds the aligned model."""
    folder = alignment_file(alignment).parent
    return str(folder.resolve()) if (folder / "config.json").is_file() else None

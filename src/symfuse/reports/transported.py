"""The result of a transport as data and as a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from symfuse import __version__
from symfuse.io.hub import HUB_ID, hub_id
from symfuse.runs import alignment_file
from symfuse.transporting import Transported, alignment_of
from symfuse.transporting.result import sha256

_NAMES = {
    "adapter": "LoRA adapter",
    "vector": "steering vector",
    "probe": "probe",
    "sae": "sparse auto-encoder",
    "moments": "optimizer state",
    "statistics": "folder of statistics",
}


def transport_run(moved: Transported, thing: Path, alignment: Path) -> dict[str, Any]:
    """The lineage of a transported thing: its source, the alignment, and the models."""
    file, result = alignment_file(alignment), alignment_of(alignment)
    what = thing / moved.file if thing.is_dir() else thing
    return {
        "kind": "transport",
        "symfuse": __version__,
        "thing": moved.kind,
        "source": {"name": thing.name, "sha256": sha256(what) if what.is_file() else None},
        "alignment": {
            "name": str(alignment),
            "sha256": sha256(file),
            "frame": list(result.frame),
            **{role: result.provenance[role] for role in ("source", "anchor") if role in result.provenance},
        },
        **moved.details,
        "notes": list(moved.notes),
    }


def transport_card(run: Mapping[str, Any]) -> str:
    """README.md of its folder, with the hub's metadata for an adapter, and the lineage."""
    from huggingface_hub import ModelCardData

    base = str(run.get("new_base"))
    on_hub = base if HUB_ID.fullmatch(base) and not Path(base).exists() else None  # the hub accepts only ids
    data = ModelCardData(library_name="peft", tags=["symfuse", "lora"], base_model=on_hub)
    lines = [f"---\n{data.to_yaml()}\n---", ""] if run["thing"] == "adapter" else []
    by = run["alignment"]
    models = [f"`{_shown(by[role])}`" for role in ("source", "anchor") if "name" in by.get(role, {})]
    of = f" of {models[0]} to {models[1]}" if len(models) == 2 else ""
    lines += [
        f"The {_NAMES[run['thing']]} `{run['source']['name']}`, transformed with symfuse {__version__} by the "
        f"alignment `{PurePath(by['name']).name}`{of}. On the aligned model it does what the original does on the "
        "original model.",
        "",
    ]
    lines += [f"- {note}" for note in run["notes"]] + ([""] if run["notes"] else [])
    return "\n".join([*lines, "The whole run as data: `symfuse.json`.", ""])


def _shown(model: Mapping[str, Any]) -> str:
    """The id of a model on the hub, or the end of the path of a local one."""
    return hub_id(model.get("folder")) or PurePath(str(model["name"])).name

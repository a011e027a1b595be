"""Models by their id on the Hugging Face hub: from the local cache, or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from symfuse.errors import CheckpointError
from symfuse.io.messages import first_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CACHED = re.compile(r"/models--([^/]+)/snapshots/[^/]+/?$")
COMPANIONS = ["*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md"]  # never code


def hub_id(folder: str | None) -> str | None:
    """The id of the model of which a folder is the snapshot in the cache of the hub; None for other folders."""
    match = CACHED.search(folder or "")
    return None if match is None else match[1].replace("--", "/")


def download(hub_id: str, *, revision: str | None, prefer_bin: bool) -> Path:
    """The local snapshot of a model, downloaded unless it is in the cache or HF_HUB_OFFLINE forbids it.

    Of the weights, safetensors only; .bin files if there are none, or if `prefer_bin`.
    """
    import huggingface_hub

    weights = ["*.bin"] if prefer_bin else ["*.safetensors"]
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=COMPANIONS + weights))
        if not prefer_bin and not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=["*.bin"])
    except (OSError, ValueError) as error:  # the hub's errors are all one of these
        offline = " HF_HUB_OFFLINE is set, so it was not asked for." if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        raise CheckpointError(
            f"{hub_id!r} is neither a folder here nor a model on the hub or in its local cache.{offline} "
            f"Correct the path, or check the id, the revision and your access. ({first_line(error)})"
        ) from error
    return folder

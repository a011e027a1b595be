"""Models by their id on the Hugging Face hub: from the local cache, or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from symfuse.errors import CheckpointError, OptionError, OutputError
from symfuse.io.folder import STEMS
from symfuse.io.remote import INDEX, Place, Remote
from symfuse.messages import first_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CACHED = re.compile(r"/models--([^/]+)/snapshots/[^/]+/?$")
WEIGHTS = [f"{stem}{end}" for stem in ("model", *STEMS.values()) for end in ("*.safetensors", INDEX)]
REFUSED = {
    401: "the hub does not accept the token (hf auth whoami says whose it is)",
    403: "the token has no right to write there",
    404: "there is no such organisation or repository, or the token may not see it",
}
COMPANIONS = ["*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md"]  # never code


def hub_id(folder: str | None) -> str | None:
    """The hub id of a folder that is a snapshot in the hub's cache; None for other folders."""
    match = CACHED.search(folder or "")
    return None if match is None else match[1].replace("--", "/")


def download(hub_id: str, *, revision: str | None, prefer_bin: bool) -> Path:
    """The local snapshot of a model, downloaded unless it is in the cache or HF_HUB_OFFLINE is set.

    Weights are downloaded as safetensors, or as .bin files if there are none, or if `prefer_bin`.
    """
    import huggingface_hub

    weights = ["*.bin"] if prefer_bin else ["*.safetensors"]
    try:
        folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=COMPANIONS + weights))
        if not prefer_bin and not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=["*.bin"])
    except (OSError, ValueError) as error:  # all errors of the hub are one of these
        offline = " HF_HUB_OFFLINE is set, so it was not requested." if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        raise CheckpointError(
            f"{hub_id!r} is neither a folder here nor a model on the hub or in its local cache.{offline} "
            f"Correct the path, or check the id, the revision and your access. ({first_line(error)})"
        ) from error
    return folder


def require_upload(repo_id: str, folder: Place, token: str | None = None) -> None:
    """OptionError or OutputError if an upload cannot succeed, checked before any work and without contacting the
    hub."""
    import huggingface_hub

    if not HUB_ID.fullmatch(repo_id):
        raise OptionError(f"{repo_id!r} is not the id of a repository on the hub: write ORG/NAME")
    if isinstance(folder, Remote):
        raise OptionError(f"{folder} is a URL, and only local folders can be uploaded: write to a folder first")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise OutputError(f"HF_HUB_OFFLINE is set, so nothing is uploaded to {repo_id}: unset it first")
    if token is None and huggingface_hub.get_token() is None:
        raise OutputError(f"there is no token to upload to {repo_id} with: run `hf auth login`, or set HF_TOKEN")


def upload(folder: Path, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Upload a model folder in one commit, and return the URL of the repository. A missing repository is created; old
    weight files in it are removed. private: of a new repository. OutputError if the hub refuses; the folder is kept."""
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=token)
    try:
        url = hub.create_repo(repo_id, private=private, exist_ok=True)
        message = "Upload a model made with symfuse"
        hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, delete_patterns=WEIGHTS)
    except Exception as error:  # of the hub, or of any library below it
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = REFUSED.get(status or 0, f"the upload failed ({first_line(error)})")
        way = f"The folder {folder} is complete; upload it with: hf upload {repo_id} {folder}"
        raise OutputError(f"{repo_id} on the hub: {why}. {way}") from error
    return str(url)

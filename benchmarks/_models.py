"""Synthetic models for the benchmarks, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _harness import Call, Took, timed
from torch import Tensor

import symfuse
from symfuse.architectures.base import Config, lookup
from symfuse.model import Model
from symfuse.spec import expand

HEAD = 64  # the width of a head
NOISE = 0.02  # of a fine-tune, as a share of each tensor's standard deviation


def roberta(width: int, layers: int, words: int = 64, positions: int = 8) -> dict[str, Any]:
    """With as few words as matching of layers needs, which does not read them; post-norm, its stream permuted."""
    return {
        "model_type": "roberta", "num_hidden_layers": layers, "hidden_size": width,
        "num_attention_heads": width // HEAD, "intermediate_size": 4 * width, "hidden_act": "gelu", "vocab_size": words,
        "max_position_embeddings": positions, "type_vocab_size": 1,
    }  # fmt: skip


def gpt2(width: int, layers: int, words: int = 64, positions: int = 8) -> dict[str, Any]:
    """Pre-norm, its stream rotated in the frame."""
    return {
        "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": width // HEAD, "n_positions": positions,
        "vocab_size": words, "architectures": ["GPT2LMHeadModel"],
    }  # fmt: skip


def random_model(config: Mapping[str, Any], seed: int) -> Model:
    """float32; Gaussian, with rows and columns of log-normal norms: spectra that fall as trained ones do."""
    rng = torch.Generator().manual_seed(seed)
    name = f"{config['model_type']} {seed}"
    family = lookup(config, name).declare(Config(config, name))
    templates = dict(family.tensors) | family.optional.get("pooler", {})
    sizes = {name: axis.size for name, axis in family.axes.items()}
    state = {}
    for tensor, declared in expand(templates, family.axes).items():
        t = torch.randn(declared.layout.shape(sizes), generator=rng) * 0.03
        for dim in range(t.ndim):
            lengths = [-1 if d == dim else 1 for d in range(t.ndim)]
            t *= torch.randn(t.shape[dim], generator=rng).mul_(0.4).exp_().reshape(lengths)
        state[family.prefix + tensor] = t
    return Model.of(symfuse.open(state, config=config, name=name))


def pair(config: Mapping[str, Any], kind: str) -> tuple[Model, Model]:
    """source, anchor: independent; one the other with noise; or independent, queries twice and keys half as large."""
    anchor = random_model(config, 0)
    if kind == "fine-tune":
        rng = torch.Generator().manual_seed(2)
        state = {n: t + NOISE * t.std() * torch.randn(t.shape, generator=rng) for n, t in anchor.checkpoint.items()}
        return Model.of(symfuse.open(state, config=config, name=kind)), anchor
    source = random_model(config, 1)
    if kind == "unbalanced":
        for name in source.checkpoint:
            source.checkpoint[name].mul_(2 if ".self.query" in name else 0.5 if ".self.key" in name else 1)
    return source, anchor


def for_naive(model: Model) -> dict[str, Tensor]:
    """The tensors under the names that tests/reference/naive.py knows."""
    return {name.removeprefix("roberta."): t for name, t in model.checkpoint.items()}


def saved(folder: Path, config: Mapping[str, Any], seed: int) -> Path:
    """A random model in a folder, unless it is there."""

    def write(to: Path) -> None:
        random_model(config, seed).checkpoint.save(to)

    return once(folder, {**config, "seed": seed}, write)


def once(folder: Path, wanted: Mapping[str, Any], make: Callable[[Path], object]) -> Path:
    """What `make` writes to a folder, made only if the folder is not of what is wanted. Files are synced: what is not
    on the disk could not be dropped from the cache."""
    text = json.dumps(wanted, sort_keys=True)
    done = folder.with_name(folder.name + ".made.json")
    if not (done.is_file() and done.read_text() == text):
        done.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder)
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        done.write_text(text)
    return folder


def evict(folders: Sequence[Path]) -> None:
    """Drop the files from the page cache, where the system can (Linux)."""
    for path in (path for folder in folders for path in folder.iterdir()):
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fresh(call: Call, inputs: Sequence[Path], out: Path) -> Callable[[], Took]:
    """The call with inputs that are not in the cache; what it wrote to `out` goes at once."""

    def remove() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)

    def run() -> Took:
        evict(inputs)
        remove()  # of a run that was cut off
        try:
            return timed(call)
        finally:
            remove()

    return run


def weights(models: Sequence[Path]) -> list[Path]:
    """The files of models that hold weights."""
    return sorted(path for model in models for path in model.glob("*.safetensors"))


def texts(words: int, count: int, rows: int, length: int, *, padded: bool = False) -> list[dict[str, Tensor]]:
    """Batches of random tokens; padded: of a quarter of the texts half is."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.int64)
    if padded:
        mask[: rows // 4, length // 2 :] = 0
    ids = torch.randint(1, words, (count, rows, length), generator=rng)
    return [{"input_ids": one * mask, "attention_mask": mask} for one in ids]


def bert(made: str, width: int, layers: int, words: int, seed: int = 0, **more: Any) -> Any:
    """A live module of BERT of a class of transformers, with random weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // HEAD,
        intermediate_size=4 * width,
    )  # fmt: skip
    return getattr(transformers, made)(config, **more).eval()

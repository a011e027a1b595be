"""Tiny Llama folders with tokenizers, and adapters on them, made once per session: what recipes are run on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

# Query heads differ from key heads, hidden from ffn, so that a mixed-up axis shows.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
COMMON = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(50))]
VOCABULARY = 64
UNKNOWN = "own-llama"  # a model type that symfuse never has a declaration for
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEMPLATE = "{{ messages[0].content }}"


def randomise(model: torch.nn.Module, seed: int, scale: float = 0.3) -> None:
    """Random weights of a size at which nothing saturates; gains about 1."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng) * scale
            parameter.copy_(noise + (1.0 if "norm" in name else 0.0))


def write_tokenizer(
    folder: Path, pieces: Sequence[str], added: Sequence[str] = (), template: str | None = None
) -> None:
    fast = word_level(pieces, added)
    fast.chat_template = template
    fast.save_pretrained(folder)


def word_level(pieces: Sequence[str], added: Sequence[str] = ()) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of these words."""
    library = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens(list(added))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama(
    folder: Path,
    seed: int,
    *,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    pieces: Sequence[str] = COMMON,
    added: Sequence[str] = (),
    template: str | None = TEMPLATE,
    rows: int = VOCABULARY,
    **options: Any,
) -> Path:
    """A Llama with random weights in a folder, with tokenizer, chat template and generation config. What is asked for
    again is copied."""
    asked = (seed, layers, dtype, tuple(pieces), tuple(added), template, rows, repr(sorted(options.items())))
    if asked not in MADE:
        with TemporaryDirectory() as made:
            _write(Path(made), seed, layers, dtype, pieces, added, template, rows, options)
            MADE[asked] = {path.name: path.read_bytes() for path in Path(made).iterdir()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in MADE[asked].items():
        (folder / name).write_bytes(data)
    return folder


MADE: dict[tuple[object, ...], dict[str, bytes]] = {}


def _write(
    folder: Path,
    seed: int,
    layers: int,
    dtype: torch.dtype,
    pieces: Sequence[str],
    added: Sequence[str],
    template: str | None,
    rows: int,
    options: Mapping[str, Any],
) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers, "vocab_size": rows, **options})
    model = transformers.LlamaForCausalLM(config)
    randomise(model, seed)
    model.generation_config.max_new_tokens = 7 + seed
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, pieces, added, template)


def unknown(folder: Path, seed: int, **options: Any) -> Path:
    """Such a Llama, of a family without a declaration."""
    llama(folder, seed, **options)
    config = {**config_of(folder), "model_type": UNKNOWN}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def adapter(folder: Path, seed: int, rank: int = 2, targets: Iterable[str] = ("q_proj", "down_proj")) -> Path:
    """A LoRA adapter of a two-layer Llama in peft's format."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"q_proj": ("self_attn", 32, 32), "down_proj": ("mlp", 32, 48)}
    tensors = {}
    for layer in range(2):
        for target in targets:
            part, rows, columns = shapes[target]
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=rng) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=rng) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def adapted(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The dense computation of base + adapter: W + (alpha / r) B A, in the dtype of the tensors."""
    factors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    out = dict(tensors)
    for key, a in factors.items():
        if key.endswith("lora_A.weight"):
            b = factors[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            dtype = out[name].dtype
            out[name] = out[name] + config["lora_alpha"] / config["r"] * (b.to(dtype) @ a.to(dtype))
    return out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder of safetensors files, in float64, by transformers' own library alone."""
    out: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith(("adapter", "alignment")):
            out |= load_file(path)
    return {name: tensor.double() for name, tensor in out.items()}


def dtypes_of(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for path in folder.glob("model*.safetensors") for tensor in load_file(path).values()}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def assert_rounded(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """`found` is `expected` (float64) rounded once to `dtype`, but for what float32 or float64 arithmetic loses."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    limits = torch.finfo(dtype)
    half_unit = limits.eps / 2
    for name, tensor in expected.items():
        working = 1e-6 * float(tensor.abs().max())
        torch.testing.assert_close(
            found[name],
            tensor,
            rtol=half_unit,
            atol=limits.smallest_normal * half_unit + working,
            msg=lambda m, n=name: f"{n}: {m}",
        )

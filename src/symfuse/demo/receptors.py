"""SCEPTR: small BERTs of T-cell receptors, several of one shape and trained independently of each other.

Nagano et al. 2025, "Contrastive learning of T cell receptor representations". A receptor is a sequence of
amino acids in six loops (CDR1-3 of the alpha and the beta chain); each token is a one-hot amino acid, its
relative position in the loop and a one-hot loop, projected into a post-norm `torch.nn.TransformerEncoder`.
The models are compared by masked-token prediction on samples of a generative model (data/README.md).
"""

from __future__ import annotations

import csv
import functools
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from symfuse.demo.packages import BLOSUM, LIBTCRLM, SCEPTR, TIDYTCELLS, cache, fetch, publishing
from symfuse.errors import CheckpointError, SpecError

_IMPORTED = (LIBTCRLM, TIDYTCELLS, BLOSUM)
PACKAGES = (SCEPTR, *_IMPORTED)

# One shape, 153,656 numbers. The second is a fine-tune of the first; the others are trained independently.
SAME_SHAPE = (
    "SCEPTR",
    "SCEPTR_finetuned",
    "SCEPTR_MLM_only",
    "SCEPTR_average_pooling",
    "SCEPTR_dropout_noise_only",
    "SCEPTR_shuffled_data",
    "SCEPTR_synthetic_data",
)

_CONVERSION = 1  # increase it when `convert` changes, so that no stale folder is read
_ONE_HOT_EMBEDDERS = ("CdrSimpleEmbedder", "Cdr3SimpleEmbedder", "SingleChainCdrSimpleEmbedder")
_MASK_TOKEN = 1
_FIRST_AMINO_ACID = 3  # tokens 0, 1, 2 are padding, mask and CLS; the head predicts amino acids only
_IGNORED = -100  # cross_entropy's ignore_index


class MaskedScore(NamedTuple):
    """Mean cross-entropy (nats) and accuracy over the masked tokens."""

    loss: float
    accuracy: float


def convert(name: str) -> Path:
    """The folder of checkpoint `name`: model.safetensors with the original names and values, and config.json.

    The config has what a declaration needs in the common names of `transformers` (model_type "sceptr"), and
    the package's own under "sceptr". Raises CheckpointError if there is no such checkpoint, or if its tokens
    are not one-hot (SCEPTR_left_aligned, SCEPTR_BLOSUM).
    """
    from safetensors.torch import save_file

    saves = fetch(SCEPTR) / "sceptr" / "_model_saves"
    names = sorted(path.parent.name for path in saves.glob("*/state_dict.pt"))
    if name not in names:
        raise CheckpointError(f"{SCEPTR} has no checkpoint {name!r}; it has {', '.join(names)}")
    folder = cache() / f"{SCEPTR.replace('==', '-')}-converted-{_CONVERSION}" / name
    if folder.is_dir():
        return folder
    original = json.loads((saves / name / "config.json").read_text("utf-8"))
    embedder = original["model"]["token_embedder"]["class"]
    if embedder not in _ONE_HOT_EMBEDDERS:
        raise CheckpointError(
            f"{name} embeds its tokens by {embedder}, which is not converted; expected one of "
            f"{', '.join(_ONE_HOT_EMBEDDERS)}"
        )
    weights = torch.load(saves / name / "state_dict.pt", map_location="cpu", weights_only=True)
    config = _config(original, weights)
    with publishing(folder) as scratch:
        save_file(dict(weights), scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return folder


def load(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> nn.Module:
    """The package's own model class, in eval mode, with copies of `weights` in their dtype, at least float32.

    `config` is the content of the converted config.json. Call the model's `get_mlm_token_predictions_for` on
    tokens [N, L, 4]: logits [N, L, 20]. Raises SpecError unless `weights` are exactly the model's tensors.
    """
    reader = _reader(config)
    with torch.random.fork_rng(devices=[]):  # initial values are overwritten, and must not change the global state
        module: nn.Module = reader.get_bert()
    widest = functools.reduce(torch.promote_types, (w.dtype for w in weights.values()), torch.float32)
    module.to(widest)
    try:
        module.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise SpecError(f"not the tensors of {config['sceptr']['model']['name']}: {reason}") from error
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # a prototype of torch, which warns and drops the padded positions
    return module.eval()


def tokens(config: Mapping[str, Any], split: Literal["test", "match"] = "test") -> Tensor:
    """The sampled receptors as the package's tokens: int64 [N, L, 4] of token, position, loop length, loop.

    "test" (400 receptors) is for reported figures, "match" (1,200 others) for statistics and for learning.
    """
    make_tcr = _package_module("libtcrlm.schema").make_tcr_from_components
    file = {"test": "receptors.csv", "match": "receptors_match.csv"}[split]
    with (Path(__file__).parent / "data" / file).open(encoding="utf-8", newline="") as lines:
        receptors = [make_tcr(r["TRAV"], r["CDR3A"], r["TRBV"], r["CDR3B"]) for r in csv.DictReader(lines)]
    tokeniser = _reader(config).get_tokeniser()
    return nn.utils.rnn.pad_sequence([tokeniser.tokenise(r) for r in receptors], batch_first=True)


def mask(tokens: Tensor, *, fraction: float = 0.15, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hide a seeded random `fraction` of the amino acids: the masked tokens [N, L, 4] and the targets [N, L].

    A target is in 0..19, or −100 (which `cross_entropy` ignores) where nothing is hidden.
    """
    draw = torch.rand(tokens.shape[:2], generator=torch.Generator().manual_seed(seed))
    hidden = (draw < fraction) & (tokens[..., 0] >= _FIRST_AMINO_ACID)
    masked = tokens.clone()
    masked[..., 0][hidden] = _MASK_TOKEN
    return masked, torch.where(hidden, tokens[..., 0] - _FIRST_AMINO_ACID, _IGNORED)


@torch.no_grad()
def masked_accuracy(module: nn.Module, tokens: Tensor, *, fraction: float = 0.15, seed: int = 0) -> MaskedScore:
    """Masked-token prediction on `tokens`, with the masks of `seed`: the same for every model."""
    masked, targets = mask(tokens, fraction=fraction, seed=seed)
    predict: Any = module.get_mlm_token_predictions_for
    hidden = targets != _IGNORED
    logits, truth = predict(masked)[hidden], targets[hidden]
    loss = nn.functional.cross_entropy(logits, truth)
    return MaskedScore(loss.item(), (logits.argmax(-1) == truth).double().mean().item())


def _config(original: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    stack = original["model"]["self_attention_stack"]["initargs"]
    return {
        "model_type": "sceptr",
        "num_hidden_layers": stack["num_layers"],
        "hidden_size": stack["d_model"],
        "num_attention_heads": stack["nhead"],
        "intermediate_size": stack.get("dim_feedforward", 4 * stack["d_model"]),
        "hidden_act": "relu",
        "activation": "relu",
        "norm_first": False,
        "layer_norm_eps": 1e-5,
        "vocab_size": weights["_token_embedder._token_embedding._token_embeddings"].shape[0],
        "compartment_vocab_size": weights["_token_embedder._compartment_embedding._token_embeddings"].shape[0],
        "embedding_size": stack["embedding_dim"],
        "output_vocab_size": weights["_mlm_token_prediction_projector.projector.weight"].shape[0],
        "sceptr": dict(original),
    }


def _reader(config: Mapping[str, Any]) -> Any:
    """The package's own reader of its configs."""
    if "sceptr" not in config:
        raise CheckpointError('the config lacks the package\'s own under "sceptr"; use the one that `convert` writes')
    return _package_module("libtcrlm.config_reader").ConfigReader(config["sceptr"])


def _package_module(name: str) -> Any:
    """Import a module of the unpacked packages, which are on `sys.path` only during the import."""
    before = list(sys.path)
    sys.path[:0] = [str(fetch(requirement)) for requirement in _IMPORTED]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before

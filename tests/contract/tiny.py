"""Tiny models of every family: pairwise distinct sizes, random gains and biases, unsaturated, float64.

Symmetric sizes, gains of 1 and biases of 0 would hide errors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures import ARCHITECTURES
from symfuse.architectures.resnet import build as build_resnet
from symfuse.architectures.torch_encoder import build
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model, as_declared
from symfuse.modules import live, stored_names
from symfuse.spec import Declared, Spec, parse
from symfuse.verification import compare, random_inputs, run

TEXT = {
    "vocab_size": 61,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 29,
    "max_position_embeddings": 37,
    "type_vocab_size": 3,
    "num_labels": 7,
}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 20,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 29,
    "n_positions": 37,
    "num_labels": 7,
}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
DISTIL = {"vocab_size": 61, "dim": 20, "n_layers": 2, "n_heads": 4, "hidden_dim": 29, "num_labels": 7}
DISTIL |= {"max_position_embeddings": 37}
ELECTRA = TEXT | {"embedding_size": 11}
DEBERTA = TEXT | {  # as v3 is
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "position_buckets": 8,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
OWN_KEYS = DEBERTA | {"share_att_key": False, "norm_rel_ebd": "none", "position_buckets": -1}
VISION = {
    "image_size": [12, 20], "patch_size": [4, 5], "num_channels": 3, "hidden_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29, "num_labels": 7,
}  # fmt: skip
DECODER: dict[str, Any] = {  # six query heads in two groups
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 29, "max_position_embeddings": 37, "num_labels": 7, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = DECODER | {"sliding_window": 11}  # under 16, and wider than the padding: no row of scores is all masked
GEMMA = WINDOW | {"query_pre_attn_scalar": 13}
# Five planes of each head are turned, four units are not.
PARTLY = DECODER | {"head_dim": 14, "partial_rotary_factor": 0.75}
STABLELM = PARTLY | {"hidden_size": 6 * 14}
# Of GPT-NeoX and GPT-J three planes of each head are turned, four units are not.
NEOX: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 50, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 29,
    "max_position_embeddings": 37, "rotary_pct": 0.6, "num_labels": 7, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPTJ = GPT2 | {"n_embd": 50, "n_head": 5, "rotary_dim": 6}
FALCON: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_hidden_size": 29,
    "max_position_embeddings": 37, "num_labels": 7, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
BY_HEAD = FALCON | {"multi_query": False, "bias": True}
OPT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 29,
    "max_position_embeddings": 37, "num_labels": 7, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NARROW = OPT | {"word_embed_proj_dim": 11}
BLOOM = {"vocab_size": 61, "hidden_size": 20, "n_layer": 2, "n_head": 4, "num_labels": 7}
MPT = {"vocab_size": 61, "d_model": 20, "n_layers": 2, "n_heads": 4, "max_seq_len": 37, "num_labels": 7}
CLIPPED = MPT | {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3}}
# Heads of ten, of which five planes are turned; the window of the second layer is narrower than the inputs.
MODERN: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
    "max_position_embeddings": 37, "num_labels": 7, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "local_attention": 20,
}  # fmt: skip
MODERN_BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
NOMIC = TEXT | {"hidden_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OLMO = {key: value for key, value in DECODER.items() if key != "head_dim"} | {"hidden_size": 60}
OLMOE = OLMO | {"num_experts": 9, "num_experts_per_tok": 3}
# Experts have a size of their own, and so have those that all tokens share, and the layers without any.
MIXTURE = DECODER | {"num_local_experts": 9, "num_experts_per_tok": 3}
QWEN_MIXTURE = DECODER | {
    "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 13, "shared_expert_intermediate_size": 11,
}  # fmt: skip
# Of DeepSeek's experts there are three groups of five, of which two are selected.
ROUTED = QWEN_MIXTURE | {
    "n_routed_experts": 15, "num_experts": 15, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 0,
}  # fmt: skip
HALF = {"head_dim": 14}  # of which positions turn three planes, and eight units are not turned
WIDE = DECODER | {"hidden_size": 60}
PHI = {key: value for key, value in DECODER.items() if key != "head_dim"} | {"hidden_size": 72}
NOPE = WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}
GPT_NEO = {
    "vocab_size": 61,
    "hidden_size": 20,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 29,
    "num_labels": 7,
}
GPT_NEO |= {"max_position_embeddings": 37, "window_size": 5, "attention_types": [[["global", "local"], 1]]}
GPT_NEO |= {"bos_token_id": 1, "eos_token_id": 2}
XGLM = {"vocab_size": 61, "d_model": 20, "num_layers": 2, "attention_heads": 4, "ffn_dim": 29}
XGLM |= {"max_position_embeddings": 37}
PERSIMMON = NEOX | {"hidden_size": 60}
# Of the T5 family heads are no share of the stream; of BART's the decoder has more of them than the encoder.
T5: dict[str, Any] = {
    "vocab_size": 61, "d_model": 22, "d_kv": 5, "d_ff": 29, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "num_labels": 7, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART: dict[str, Any] = {
    "vocab_size": 61, "d_model": 20, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 5, "encoder_ffn_dim": 29, "decoder_ffn_dim": 31, "max_position_embeddings": 37,
    "num_labels": 7, "pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 1, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
WHISPER = BART | {"num_mel_bins": 9, "max_source_positions": 23, "max_target_positions": 19}
# The text and the image encoder have nothing in common, but for the number of channels, which is the patch's size.
TOWER_TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 31,
    "max_position_embeddings": 17, "bos_token_id": 1, "eos_token_id": 60, "pad_token_id": 0, "projection_dim": 13,
}  # fmt: skip
TOWER_VISION: dict[str, Any] = {
    "image_size": 15, "patch_size": 5, "num_channels": 3, "hidden_size": 35, "num_hidden_layers": 3,
    "num_attention_heads": 5, "intermediate_size": 43, "projection_dim": 13,
}  # fmt: skip
CLIP = {"text_config": TOWER_TEXT, "vision_config": TOWER_VISION, "projection_dim": 13, "num_labels": 7}
SIGLIP_TEXT = TOWER_TEXT | {"projection_size": 35}
SIGLIP = {"text_config": SIGLIP_TEXT, "vision_config": TOWER_VISION, "num_labels": 7}
UNPOOLED = SIGLIP | {"vision_config": TOWER_VISION | {"vision_use_head": False}}
SQUARE = VISION | {"image_size": 15, "patch_size": 5}
DINOV2 = SQUARE | {"mlp_ratio": 3}
BEIT = SQUARE | {"vocab_size": 31}
TABLES = {"use_relative_position_bias": True, "use_absolute_position_embeddings": True}
MASKED_IMAGE = VISION | {"image_size": 12, "patch_size": 4, "encoder_stride": 4}

# Images are among the words: of fifteen pixels nine patches, of twenty sixteen, of which four are merged.
SEEN_TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 29, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ENCODED: dict[str, Any] = {
    "image_size": 15, "patch_size": 5, "num_channels": 3, "hidden_size": 35, "num_hidden_layers": 3,
    "num_attention_heads": 5, "intermediate_size": 43,
}  # fmt: skip
MERGED = ENCODED | {"image_size": 20, "hidden_size": 40, "num_hidden_layers": 2}
PIXTRAL = MERGED | {"model_type": "pixtral"}
SIGLIP_ENCODER = ENCODED | {"model_type": "siglip_vision_model", "vision_use_head": False}
INTERN = MERGED | {"image_size": [20, 20], "patch_size": [5, 5], "hidden_size": 35}


def seeing(text: str, vision: Mapping[str, Any], words: Mapping[str, Any] = SEEN_TEXT) -> dict[str, Any]:
    """The fields of a model that reads images among the words of a text model of that type."""
    kind = {"model_type": text} if text else {}
    return {"text_config": {**words, **kind}, "vision_config": dict(vision), "image_token_id": 60}


LLAVA = seeing("llama", ENCODED | {"model_type": "clip_vision_model"})
LLAVA_TILES = LLAVA | {"image_grid_pinpoints": [[15, 30]]}
PALIGEMMA = seeing("gemma", SIGLIP_ENCODER) | {"projection_dim": 24}
GEMMA_WORDS = SEEN_TEXT | {"sliding_window": 30, "query_pre_attn_scalar": 13}
GEMMA_SEEING = seeing("gemma3_text", SIGLIP_ENCODER | {"image_size": 20}, GEMMA_WORDS) | {"mm_tokens_per_image": 4}
QWEN_WORDS = SEEN_TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 2], "rope_theta": 1e4}}
QWEN_IDS = {"video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57, "tie_word_embeddings": False}
QWEN_PATCHES: dict[str, Any] = {"depth": 2, "num_heads": 5, "patch_size": 5, "spatial_merge_size": 2}
QWEN2_ENCODER = QWEN_PATCHES | {"embed_dim": 40, "hidden_size": 60, "mlp_ratio": 3}
QWEN25_ENCODER = QWEN_PATCHES | {
    "hidden_size": 40, "out_hidden_size": 60, "intermediate_size": 43, "window_size": 20, "fullatt_block_indexes": [1],
}  # fmt: skip
QWEN3_ENCODER = QWEN_PATCHES | {
    "hidden_size": 40, "out_hidden_size": 24, "intermediate_size": 43, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
QWEN2_SEEING = seeing("", QWEN2_ENCODER, QWEN_WORDS | {"hidden_size": 60}) | QWEN_IDS
QWEN25_SEEING = QWEN2_SEEING | {"vision_config": QWEN25_ENCODER}
QWEN3_SEEING = seeing("", QWEN3_ENCODER, QWEN_WORDS) | QWEN_IDS
QWEN35_ENCODER = {key: value for key, value in QWEN3_ENCODER.items() if key != "deepstack_visual_indexes"}
LLAMA4_ENCODER: dict[str, Any] = ENCODED | {  # heads of eight, whose planes are of two directions
    "image_size": 20, "hidden_size": 40, "intermediate_size": 160, "projector_input_dim": 17,
    "projector_output_dim": 17, "vision_output_dim": 17,
}  # fmt: skip
QWEN3_EXPERTS = QWEN_WORDS | {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 13}
QWEN3_MIXTURE_SEEING = seeing("", QWEN3_ENCODER, QWEN3_EXPERTS) | QWEN_IDS
IDEFICS = seeing("llama", MERGED | {"hidden_size": 35}) | {"scale_factor": 2}

SCEPTR: dict[str, Any] = {
    "model_type": "sceptr", "hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 29, "hidden_act": "relu",
    "num_hidden_layers": 2, "vocab_size": 19, "compartment_vocab_size": 7, "embedding_size": 25,
    "output_vocab_size": 17,
}  # fmt: skip

BUFFERS = ("logits_bias", "correction_bias", "expert_bias", "running_mean", "layer_scalar")  # that are weights


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights of a size at which nothing saturates; gains about their first value (1, or 0 where they are stored
    less 1), everything else about 0."""
    rng = torch.Generator().manual_seed(seed)
    config = getattr(module, "config", None)
    spread = 0.2 if getattr(config, "model_type", "").endswith("t5") else 0.3  # T5 does not scale its scores
    with torch.no_grad():
        biases = [(name, b) for name, b in module.named_buffers() if name.endswith(BUFFERS)]
        for name, p in itertools.chain(module.named_parameters(), biases):
            gain = p.ndim == 1 and name.endswith(("weight", "layer_scalar"))
            about = p.mean().round().double() if gain else 0.0
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * spread + about)
        for variance in (b for name, b in module.named_buffers() if name.endswith("running_var")):
            variance.copy_(torch.rand(variance.shape, generator=rng, dtype=torch.float64) + 0.5)
    return module.double().eval()


def own_head(make: Any) -> Callable[..., Checkpoint]:
    """T5 v1.1 as it was published, with a head of its own, which `transformers` 5 takes if the file has one."""

    def with_head(seed: int = 0, **_config: object) -> Checkpoint:
        tied = make(seed)
        shape, rng = tied["shared.weight"].shape, torch.Generator().manual_seed(seed + 1000)
        head = torch.randn(shape, generator=rng, dtype=torch.float64) * 0.3
        config = {**tied.config, "tie_word_embeddings": False}
        return tied.replace(tensors={**tied, "lm_head.weight": head}, config=config)

    return partial(with_head, config_class=make.keywords["config_class"])


def hf(class_name: str, config: transformers.PreTrainedConfig, seed: int = 0) -> Checkpoint:
    config.architectures = [class_name]
    config._attn_implementation = "eager"
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return open_checkpoint(randomise(getattr(transformers, class_name)(config), seed), name=class_name)


def encoder(seed: int = 0, **options: object) -> Checkpoint:
    config = {
        "model_type": "torch_transformer_encoder", "hidden_size": 20, "num_attention_heads": 4,
        "intermediate_size": 29, "num_hidden_layers": 2, **options,
    }  # fmt: skip
    return open_checkpoint(randomise(build(config), seed), config=config, name="TransformerEncoder")


class Sceptr(torch.nn.Module):
    """The model of the package `sceptr`, as far as its tensors say it: token ids [N, L] and their mask to predicted
    amino acids. Its fixed tables are one-hot; here they are random, so that a slip shows."""

    main_input_name = "input_ids"

    def __init__(self, config: Mapping[str, Any], rng: torch.Generator) -> None:
        super().__init__()
        tables = {"token": config["vocab_size"], "compartment": config["compartment_vocab_size"]}
        self._token_embedder = torch.nn.Module()
        for kind, size in tables.items():
            part = torch.nn.Module()
            part.register_buffer("_token_embeddings", torch.randn(size, size - 1, generator=rng))
            self._token_embedder.add_module(f"_{kind}_embedding", part)
        stack = self._self_attention_stack = torch.nn.Module()
        stack._initial_projector = torch.nn.Linear(config["embedding_size"], config["hidden_size"], bias=False)
        stack._standard_stack = torch.nn.Module()
        stack._standard_stack._self_attention_stack = build(config)
        self._mlm_token_prediction_projector = torch.nn.Module()
        self._mlm_token_prediction_projector.projector = torch.nn.Linear(
            config["hidden_size"], config["output_vocab_size"]
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        embed, stack, place = self._token_embedder, self._self_attention_stack, torch.arange(input_ids.shape[1])
        loops = embed._compartment_embedding._token_embeddings[1 + place // 3].expand(*input_ids.shape, -1)
        tokens = embed._token_embedding._token_embeddings[input_ids]
        positions = (place % 3 / 2).to(tokens.dtype)[:, None].expand(*input_ids.shape, 1)
        x = stack._initial_projector(torch.cat([tokens, positions, loops], -1))
        x = stack._standard_stack._self_attention_stack(x, src_key_padding_mask=attention_mask == 0)
        return {"logits": self._mlm_token_prediction_projector.projector(x)}


def sceptr(seed: int = 0) -> Checkpoint:
    module = randomise(Sceptr(SCEPTR, torch.Generator().manual_seed(seed)), seed)
    return open_checkpoint(module, config=SCEPTR, name="Sceptr")


def real(checkpoint: Checkpoint) -> torch.nn.Module:
    """The live module in float64: that of symfuse, or where it has none the one of these tests."""
    module, shared = _filled(checkpoint)
    return copy.deepcopy(module) if shared else module


def seen(checkpoint: Checkpoint) -> torch.nn.Module:
    """The same, to be read at once: the next model of its form gets its weights in this one."""
    return _filled(checkpoint)[0]


def loaded(checkpoint: Checkpoint) -> torch.nn.Module:
    if checkpoint.config["model_type"] != "sceptr":
        return live(checkpoint)
    module = Sceptr(checkpoint.config, torch.Generator()).double()
    module.load_state_dict(dict(checkpoint))
    return module.eval()


@dataclass(frozen=True)
class Form:
    """A live module of one config, and its tensors with their names in files of the same names and shapes. Loading
    such files by their class takes ten times as long as running the module."""

    module: torch.nn.Module
    tensors: list[tuple[Tensor, str]]
    in_pieces: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Form:
        module, whole = loaded(checkpoint), as_declared(checkpoint)
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            tensor.data = tensor.data.clone()  # which may be the file's memory
        owners = {id(owner): owner for owner in module.modules()}
        names = stored_names(module, whole)
        tensors = [(getattr(owners[at], leaf), file) for (at, leaf), file in names.items()]
        return cls(module, tensors, whole.keys() != checkpoint.keys())

    def weights(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        whole = as_declared(checkpoint) if self.in_pieces else checkpoint
        return {name: tensor.double() for name, tensor in whole.items()}

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether these weights, as they were loaded, are all of the module and all of the file."""
        saved = {id(tensor) for tensor in self.module.state_dict(keep_vars=True).values()}
        weights = self.weights(checkpoint)
        all_of_it = saved == {id(tensor) for tensor, _ in self.tensors}
        return all_of_it and weights.keys() == {name for _, name in self.tensors} and self.has(weights)

    def has(self, weights: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(tensor, weights[name]) for tensor, name in self.tensors)

    def fill(self, checkpoint: Checkpoint) -> bool:
        """Write the weights into the module. False if it has one tensor for two that differ."""
        weights = self.weights(checkpoint)
        with torch.no_grad():
            for tensor, name in self.tensors:
                tensor.copy_(weights[name])
        return self.has(weights)


FORMS: dict[object, Form | None] = {}


def _filled(checkpoint: Checkpoint) -> tuple[torch.nn.Module, bool]:
    """The live module, and whether it is the one that all of its form share."""
    key = repr(checkpoint.config), frozenset((name, info.shape) for name, info in checkpoint.infos.items())
    if key not in FORMS:
        form = Form.of(checkpoint)
        FORMS[key] = form if form.holds(checkpoint) else None
        return form.module, FORMS[key] is not None
    form = FORMS[key]
    if form is not None and form.fill(checkpoint):
        return form.module, True
    return loaded(checkpoint), False


def of(class_name: str, config_class: str, base: dict[str, object], **options: object) -> Callable[..., Checkpoint]:
    return partial(_of, class_name=class_name, config_class=config_class, fields=base | options)


def _of(seed: int = 0, *, class_name: str, config_class: str, fields: dict[str, object]) -> Checkpoint:
    """A copy of the model that was made for these the first time."""
    asked = (class_name, config_class, repr(fields), seed)
    if asked not in MADE:
        MADE[asked] = hf(class_name, getattr(transformers, config_class)(**fields), seed)
    made = MADE[asked]
    return made.replace(
        tensors={name: tensor.clone() for name, tensor in made.items()}, config=copy.deepcopy(dict(made.config))
    )


MADE: dict[tuple[str, str, str, int], Checkpoint] = {}


# Llama 4 with images fails in transformers 5.24: it reads this of what its text model puts out.
MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]

# label → a function from a seed to a checkpoint. Every contract test runs over this table.
MODELS: dict[str, Callable[..., Checkpoint]] = {
    "torch-relu-post": lambda seed=0: encoder(seed),
    "torch-gelu-pre": lambda seed=0: encoder(seed, hidden_act="gelu", norm_first=True, final_norm=True),
    "sceptr": sceptr,
    "bert": of("BertModel", "BertConfig", TEXT),
    "bert-mlm": of("BertForMaskedLM", "BertConfig", TEXT),
    "bert-mlm-untied": of("BertForMaskedLM", "BertConfig", TEXT, tie_word_embeddings=False),
    "bert-pretraining": of("BertForPreTraining", "BertConfig", TEXT),
    "bert-sequence": of("BertForSequenceClassification", "BertConfig", TEXT),
    "bert-choice": of("BertForMultipleChoice", "BertConfig", TEXT),
    "bert-token": of("BertForTokenClassification", "BertConfig", TEXT),
    "bert-question": of("BertForQuestionAnswering", "BertConfig", TEXT, num_labels=2),
    "roberta": of("RobertaModel", "RobertaConfig", TEXT),
    "roberta-mlm": of("RobertaForMaskedLM", "RobertaConfig", TEXT),
    "roberta-sequence": of("RobertaForSequenceClassification", "RobertaConfig", TEXT),
    "roberta-choice": of("RobertaForMultipleChoice", "RobertaConfig", TEXT),
    "roberta-token": of("RobertaForTokenClassification", "RobertaConfig", TEXT),
    "roberta-question": of("RobertaForQuestionAnswering", "RobertaConfig", TEXT, num_labels=2),
    "xlm-roberta-mlm-untied": of("XLMRobertaForMaskedLM", "XLMRobertaConfig", TEXT, tie_word_embeddings=False),
    "xlm-roberta-token": of("XLMRobertaForTokenClassification", "XLMRobertaConfig", TEXT),
    "camembert-mlm": of("CamembertForMaskedLM", "CamembertConfig", TEXT),
    "camembert-sequence": of("CamembertForSequenceClassification", "CamembertConfig", TEXT),
    "distilbert": of("DistilBertModel", "DistilBertConfig", DISTIL),
    "distilbert-mlm": of("DistilBertForMaskedLM", "DistilBertConfig", DISTIL),
    "distilbert-mlm-untied": of("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, tie_word_embeddings=False),
    "distilbert-sequence": of("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    "distilbert-choice": of("DistilBertForMultipleChoice", "DistilBertConfig", DISTIL),
    "distilbert-token": of("DistilBertForTokenClassification", "DistilBertConfig", DISTIL),
    "distilbert-question": of("DistilBertForQuestionAnswering", "DistilBertConfig", DISTIL, num_labels=2),
    "electra": of("ElectraModel", "ElectraConfig", ELECTRA),
    "electra-unprojected": of("ElectraModel", "ElectraConfig", TEXT, embedding_size=20),
    "electra-generator": of("ElectraForMaskedLM", "ElectraConfig", ELECTRA),
    "electra-generator-untied": of("ElectraForMaskedLM", "ElectraConfig", ELECTRA, tie_word_embeddings=False),
    "electra-discriminator": of("ElectraForPreTraining", "ElectraConfig", ELECTRA),
    "electra-sequence": of("ElectraForSequenceClassification", "ElectraConfig", ELECTRA),
    "electra-choice": of("ElectraForMultipleChoice", "ElectraConfig", ELECTRA),
    "electra-token": of("ElectraForTokenClassification", "ElectraConfig", ELECTRA),
    "electra-question": of("ElectraForQuestionAnswering", "ElectraConfig", ELECTRA, num_labels=2),
    "deberta": of("DebertaV2Model", "DebertaV2Config", DEBERTA),
    "deberta-mlm": of("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA, conv_kernel_size=3),
    "deberta-mlm-untied": of("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA, tie_word_embeddings=False),
    "deberta-mlm-v3": of("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA, legacy=False),
    "deberta-mlm-absolute": of(
        "DebertaV2ForMaskedLM", "DebertaV2Config", TEXT, embedding_size=11, relative_attention=False
    ),
    "deberta-sequence": of("DebertaV2ForSequenceClassification", "DebertaV2Config", DEBERTA),
    "deberta-sequence-c2p": of("DebertaV2ForSequenceClassification", "DebertaV2Config", OWN_KEYS, pos_att_type="c2p"),
    "deberta-sequence-c2p-shared": of(
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        DEBERTA,
        pos_att_type=["c2p"],
        pooler_hidden_act="tanh",
    ),
    "deberta-question-p2c": of(
        "DebertaV2ForQuestionAnswering", "DebertaV2Config", OWN_KEYS, pos_att_type=["p2c"], num_labels=2
    ),
    "deberta-choice": of("DebertaV2ForMultipleChoice", "DebertaV2Config", OWN_KEYS),
    "deberta-token": of("DebertaV2ForTokenClassification", "DebertaV2Config", OWN_KEYS),
    "vit": of("ViTModel", "ViTConfig", VISION),
    "vit-unbiased": of("ViTModel", "ViTConfig", VISION, qkv_bias=False),
    "vit-classification": of("ViTForImageClassification", "ViTConfig", VISION),
    "vit-masked": of("ViTForMaskedImageModeling", "ViTConfig", MASKED_IMAGE),
    "deit": of("DeiTModel", "DeiTConfig", VISION),
    "deit-classification": of("DeiTForImageClassification", "DeiTConfig", VISION),
    "deit-teacher": of("DeiTForImageClassificationWithTeacher", "DeiTConfig", VISION),
    "deit-masked": of("DeiTForMaskedImageModeling", "DeiTConfig", MASKED_IMAGE),
    "gpt2": of("GPT2Model", "GPT2Config", GPT2),
    "gpt2-lm": of("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-lm-untied": of("GPT2LMHeadModel", "GPT2Config", GPT2, tie_word_embeddings=False),
    "gpt2-sequence": of("GPT2ForSequenceClassification", "GPT2Config", GPT2),
    "gpt2-token": of("GPT2ForTokenClassification", "GPT2Config", GPT2),
    "gpt2-question": of("GPT2ForQuestionAnswering", "GPT2Config", GPT2),
    "llama": of("LlamaModel", "LlamaConfig", DECODER),
    "llama-lm": of("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-biased": of("LlamaForCausalLM", "LlamaConfig", DECODER, attention_bias=True, mlp_bias=True),
    "llama-tied": of("LlamaForCausalLM", "LlamaConfig", DECODER, tie_word_embeddings=True),
    "llama-sequence": of("LlamaForSequenceClassification", "LlamaConfig", DECODER),
    "llama-question": of("LlamaForQuestionAnswering", "LlamaConfig", DECODER),
    "llama-token": of("LlamaForTokenClassification", "LlamaConfig", DECODER),
    "mistral-lm": of("MistralForCausalLM", "MistralConfig", WINDOW),
    "mistral-question": of("MistralForQuestionAnswering", "MistralConfig", WINDOW),
    "granite-lm": of(
        "GraniteForCausalLM",
        "GraniteConfig",
        DECODER | {"head_dim": 4},
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "smollm3-lm": of("SmolLM3ForCausalLM", "SmolLM3Config", DECODER, no_rope_layers=[0, 1]),
    "smollm3-biased": of("SmolLM3ForCausalLM", "SmolLM3Config", DECODER, no_rope_layers=[0, 1], attention_bias=True),
    "smollm3-question": of("SmolLM3ForQuestionAnswering", "SmolLM3Config", DECODER, no_rope_layer_interval=2),
    "qwen2-lm": of("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen2-tied": of("Qwen2ForCausalLM", "Qwen2Config", DECODER, tie_word_embeddings=True),
    "qwen2-sequence": of("Qwen2ForSequenceClassification", "Qwen2Config", DECODER),
    "qwen2-token": of("Qwen2ForTokenClassification", "Qwen2Config", DECODER),
    "qwen2-question": of("Qwen2ForQuestionAnswering", "Qwen2Config", DECODER),
    "qwen3-lm": of("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "qwen3-biased": of("Qwen3ForCausalLM", "Qwen3Config", DECODER, attention_bias=True),
    "qwen3-question": of("Qwen3ForQuestionAnswering", "Qwen3Config", DECODER),
    "gemma-lm": of("GemmaForCausalLM", "GemmaConfig", DECODER),
    "gemma-biased": of("GemmaForCausalLM", "GemmaConfig", DECODER, attention_bias=True, tie_word_embeddings=False),
    "gemma2-lm": of("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma2-sequence": of("Gemma2ForSequenceClassification", "Gemma2Config", GEMMA),
    "gemma3-lm": of("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, sliding_window_pattern=2),
    "gemma3-sequence": of("Gemma3TextForSequenceClassification", "Gemma3TextConfig", GEMMA),
    "phi3-lm": of("Phi3ForCausalLM", "Phi3Config", DECODER),
    "phi3-partly": of("Phi3ForCausalLM", "Phi3Config", PARTLY),
    "phi3-token": of("Phi3ForTokenClassification", "Phi3Config", DECODER),
    "olmo-base": of("OlmoModel", "OlmoConfig", OLMO),
    "olmo-lm": of("OlmoForCausalLM", "OlmoConfig", OLMO, attention_bias=True),
    "olmo-tied": of("OlmoForCausalLM", "OlmoConfig", OLMO, tie_word_embeddings=True),
    "olmo-clipped": of("OlmoForCausalLM", "OlmoConfig", OLMO, clip_qkv=0.7, attention_bias=True),
    "olmo-sequence": of("OlmoForSequenceClassification", "OlmoConfig", OLMO),
    "olmo2-lm": of("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "mixtral": of("MixtralModel", "MixtralConfig", MIXTURE),
    "mixtral-lm": of("MixtralForCausalLM", "MixtralConfig", MIXTURE),
    "mixtral-tied": of("MixtralForCausalLM", "MixtralConfig", MIXTURE, tie_word_embeddings=True),
    "mixtral-question": of("MixtralForQuestionAnswering", "MixtralConfig", MIXTURE),
    "qwen2-mixture-lm": of("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN_MIXTURE),
    "qwen2-mixture-dense": of("Qwen2MoeForCausalLM", "Qwen2MoeConfig", QWEN_MIXTURE, mlp_only_layers=[0]),
    "qwen2-mixture-unbiased": of("Qwen2MoeForTokenClassification", "Qwen2MoeConfig", QWEN_MIXTURE, qkv_bias=False),
    "qwen3-mixture-lm": of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN_MIXTURE, decoder_sparse_step=2),
    "qwen3-mixture-biased": of(
        "Qwen3MoeForSequenceClassification", "Qwen3MoeConfig", QWEN_MIXTURE, attention_bias=True
    ),
    "qwen3-mixture-question": of("Qwen3MoeForQuestionAnswering", "Qwen3MoeConfig", QWEN_MIXTURE),
    "olmoe-lm": of("OlmoeForCausalLM", "OlmoeConfig", OLMOE),
    "olmoe-biased": of("OlmoeForCausalLM", "OlmoeConfig", OLMOE, attention_bias=True),
    "olmoe-clipped": of("OlmoeForCausalLM", "OlmoeConfig", OLMOE, attention_bias=True, clip_qkv=0.7),
    "olmo2-biased": of("Olmo2ForCausalLM", "Olmo2Config", DECODER, attention_bias=True),
    "stablelm-lm": of("StableLmForCausalLM", "StableLmConfig", STABLELM),
    "stablelm-biased": of("StableLmForCausalLM", "StableLmConfig", STABLELM, use_qkv_bias=True),
    "stablelm-parallel": of("StableLmForCausalLM", "StableLmConfig", STABLELM, use_parallel_residual=True),
    "stablelm-normed": of(
        "StableLmForCausalLM", "StableLmConfig", STABLELM, qk_layernorm=True, use_parallel_residual=True
    ),
    "starcoder2-lm": of("Starcoder2ForCausalLM", "Starcoder2Config", DECODER),
    "starcoder2-unbiased": of("Starcoder2ForCausalLM", "Starcoder2Config", DECODER, use_bias=False),
    "cohere-lm": of("CohereForCausalLM", "CohereConfig", DECODER),
    "cohere-biased": of("CohereForCausalLM", "CohereConfig", DECODER, attention_bias=True),
    "cohere-normed": of("CohereForCausalLM", "CohereConfig", DECODER, use_qk_norm=True),
    "internlm3-lm": of("LlamaForCausalLM", "InternLM3Config", DECODER, attention_bias=True, mlp_bias=True),
    "exaone-lm": of("LlamaForCausalLM", "ExaoneConfig", DECODER),
    "iquestcoder-lm": of("LlamaForCausalLM", "IQuestCoderConfig", DECODER),
    "seed-lm": of("SeedOssForCausalLM", "SeedOssConfig", DECODER),
    "seed-output-question": of("SeedOssForQuestionAnswering", "SeedOssConfig", DECODER, attention_out_bias=True),
    "helium-lm": of("HeliumForCausalLM", "HeliumConfig", WIDE, attention_bias=True),
    "ernie-4-5-lm": of("Ernie4_5ForCausalLM", "Ernie4_5Config", DECODER),
    "ernie-4-5-biased": of("Ernie4_5ForCausalLM", "Ernie4_5Config", DECODER, use_bias=True),
    "ministral-lm": of("MinistralForCausalLM", "MinistralConfig", WINDOW),
    "ministral3-question": of("Ministral3ForQuestionAnswering", "Ministral3Config", DECODER),
    "cwm-lm": of("CwmForCausalLM", "CwmConfig", WINDOW),
    "hunyuan-lm": of("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", DECODER, attention_bias=True),
    "arcee-lm": of("ArceeForCausalLM", "ArceeConfig", DECODER, attention_bias=True, mlp_bias=True),
    "arcee-question": of("ArceeForQuestionAnswering", "ArceeConfig", DECODER),
    "jais2-lm": of("Jais2ForCausalLM", "Jais2Config", DECODER),
    "nemotron-lm": of("NemotronForCausalLM", "NemotronConfig", DECODER | HALF, attention_bias=True, mlp_bias=True),
    "nemotron-token": of("NemotronForTokenClassification", "NemotronConfig", DECODER | HALF),
    "apertus-lm": of("ApertusForCausalLM", "ApertusConfig", DECODER),
    "cohere2-lm": of("Cohere2ForCausalLM", "Cohere2Config", OLMO | NOPE | {"hidden_size": 60}),
    "cohere2-biased": of("Cohere2ForCausalLM", "Cohere2Config", OLMO, attention_bias=True, sliding_window_pattern=2),
    "exaone4-lm": of("Exaone4ForCausalLM", "Exaone4Config", NOPE),
    "exaone4-question": of(
        "Exaone4ForQuestionAnswering", "Exaone4Config", DECODER, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "olmo3-lm": of("Olmo3ForCausalLM", "Olmo3Config", NOPE),
    "glm-lm": of("GlmForCausalLM", "GlmConfig", DECODER | HALF, attention_bias=True),
    "glm4-lm": of("Glm4ForCausalLM", "Glm4Config", DECODER | HALF),
    "vaultgemma-lm": of("VaultGemmaForCausalLM", "VaultGemmaConfig", GEMMA),
    "nanochat-lm": of("NanoChatForCausalLM", "NanoChatConfig", OLMO),
    "phi-lm": of("PhiForCausalLM", "PhiConfig", PHI),
    "phi-normed": of("PhiForCausalLM", "PhiConfig", PHI, qk_layernorm=True),
    "persimmon-lm": of("PersimmonForCausalLM", "PersimmonConfig", PERSIMMON),
    "persimmon-plain": of("PersimmonForTokenClassification", "PersimmonConfig", PERSIMMON, qk_layernorm=False),
    "llama4-lm": of(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        MIXTURE | {"num_experts_per_tok": 2},
        intermediate_size_mlp=13,
        moe_layers=[1],
        no_rope_layers=[1, 0],
        attention_bias=True,
    ),
    "llama4-plain": of(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        MIXTURE,
        use_qk_norm=False,
        no_rope_layers=[1, 1],
    ),
    "phimoe-lm": of(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        MIXTURE | {"num_experts_per_tok": 2},
        attention_bias=True,
        lm_head_bias=True,
    ),
    "minimax-lm": of("MiniMaxM2ForCausalLM", "MiniMaxM2Config", MIXTURE | HALF, rotary_dim=6),
    "gpt-oss-lm": of("GptOssForCausalLM", "GptOssConfig", MIXTURE | {"sliding_window": 11}),
    "granitemoe-lm": of("GraniteMoeForCausalLM", "GraniteMoeConfig", MIXTURE, attention_bias=True, logits_scaling=2.0),
    "granitemoeshared-lm": of(
        "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", MIXTURE, shared_intermediate_size=13
    ),
    "granite-swa-lm": of(
        "GraniteSWAForCausalLM", "GraniteSWAConfig", NOPE, layer_rope_theta=[0, 1000.0], attention_bias=True
    ),
    "granitemoe-swa-lm": of(
        "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig", MIXTURE | NOPE, shared_intermediate_size=13
    ),
    "glm4-moe-lm": of("Glm4MoeForCausalLM", "Glm4MoeConfig", ROUTED | HALF, use_qk_norm=True, attention_bias=True),
    "glm4-moe-plain": of("Glm4MoeForCausalLM", "Glm4MoeConfig", ROUTED | HALF | {"topk_group": 3}),
    "solar-open-lm": of("SolarOpenForCausalLM", "SolarOpenConfig", ROUTED),
    "sarvam-moe-lm": of("Glm4MoeForCausalLM", "SarvamMoEConfig", ROUTED),
    "dots1-lm": of("Dots1ForCausalLM", "Dots1Config", ROUTED | {"first_k_dense_replace": 1}, attention_bias=True),
    "exaone-moe-lm": of(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        ROUTED | {"sliding_window": 11},
        layer_types=NOPE["layer_types"],
    ),
    "hy-v3-lm": of("HYV3ForCausalLM", "HYV3Config", ROUTED, mlp_layer_types=["sparse", "dense"]),
    "mellum-lm": of(
        "MellumForCausalLM",
        "MellumConfig",
        QWEN_MIXTURE | {"num_local_experts": 9},
        mlp_layer_types=["dense", "sparse"],
    ),
    "flex-olmo-lm": of("FlexOlmoForCausalLM", "FlexOlmoConfig", OLMOE),
    "hunyuan-moe-lm": of("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", MIXTURE | {"num_experts": 9}, moe_topk=3),
    "modernbert-decoder-lm": of("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", MODERN, **MODERN_BIASES),
    "modernbert-decoder-sequence": of("ModernBertDecoderForSequenceClassification", "ModernBertDecoderConfig", MODERN),
    "codegen-lm": of("CodeGenForCausalLM", "CodeGenConfig", GPTJ | {"n_embd": 80, "n_head": 8}),
    "gpt-bigcode-lm": of("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2),
    "gpt-bigcode-by-head": of("GPTBigCodeForTokenClassification", "GPTBigCodeConfig", GPT2, multi_query=False),
    "gpt-neo-lm": of("GPTNeoForCausalLM", "GPTNeoConfig", GPT_NEO),
    "gpt-neo-question": of("GPTNeoForQuestionAnswering", "GPTNeoConfig", GPT_NEO),
    "xglm-lm": of("XGLMForCausalLM", "XGLMConfig", XGLM),
    "neox": of("GPTNeoXModel", "GPTNeoXConfig", NEOX),
    "neox-lm": of("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX),
    "neox-lm-tied": of("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, tie_word_embeddings=True),
    "neox-lm-turned": of("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, rotary_pct=1.0),
    "neox-lm-odd": of("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, rotary_pct=0.5),  # of 5 dimensions it turns 6
    "neox-lm-unbiased": of("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, attention_bias=False),
    "neox-sequence-in-turn": of("GPTNeoXForSequenceClassification", "GPTNeoXConfig", NEOX, use_parallel_residual=False),
    "neox-token": of("GPTNeoXForTokenClassification", "GPTNeoXConfig", NEOX),
    "neox-question": of("GPTNeoXForQuestionAnswering", "GPTNeoXConfig", NEOX),
    "gptj": of("GPTJModel", "GPTJConfig", GPTJ),
    "gptj-lm": of("GPTJForCausalLM", "GPTJConfig", GPTJ),
    "gptj-lm-tied": of("GPTJForCausalLM", "GPTJConfig", GPTJ, tie_word_embeddings=True),
    "gptj-sequence-turned": of("GPTJForSequenceClassification", "GPTJConfig", GPTJ, rotary_dim=10),
    "gptj-question": of("GPTJForQuestionAnswering", "GPTJConfig", GPTJ),
    "falcon": of("FalconModel", "FalconConfig", FALCON),
    "falcon-lm": of("FalconForCausalLM", "FalconConfig", FALCON, bias=True),
    "falcon-alibi": of("FalconForCausalLM", "FalconConfig", FALCON, alibi=True, bias=True),
    "falcon-grouped": of("FalconForCausalLM", "FalconConfig", GROUPED, bias=True),
    "falcon-grouped-untied": of("FalconForCausalLM", "FalconConfig", GROUPED, tie_word_embeddings=False),
    "falcon-grouped-one-norm": of("FalconForCausalLM", "FalconConfig", GROUPED, num_ln_in_parallel_attn=1),
    "falcon-grouped-alibi": of("FalconForCausalLM", "FalconConfig", GROUPED, alibi=True),
    "falcon-by-head": of("FalconForCausalLM", "FalconConfig", BY_HEAD),
    "falcon-by-head-alibi": of("FalconForCausalLM", "FalconConfig", BY_HEAD, alibi=True, parallel_attn=False),
    "falcon-sequence": of("FalconForSequenceClassification", "FalconConfig", FALCON),
    "falcon-token": of("FalconForTokenClassification", "FalconConfig", GROUPED),
    "falcon-question": of("FalconForQuestionAnswering", "FalconConfig", BY_HEAD),
    "opt": of("OPTModel", "OPTConfig", OPT),
    "opt-lm": of("OPTForCausalLM", "OPTConfig", OPT),
    "opt-lm-untied": of("OPTForCausalLM", "OPTConfig", OPT, tie_word_embeddings=False, activation_function="gelu"),
    "opt-lm-unbiased": of("OPTForCausalLM", "OPTConfig", OPT, enable_bias=False),
    "opt-lm-without-gains": of("OPTForCausalLM", "OPTConfig", OPT, layer_norm_elementwise_affine=False),
    "opt-lm-without-last": of("OPTForCausalLM", "OPTConfig", OPT, _remove_final_layer_norm=True),
    "opt-post": of("OPTModel", "OPTConfig", NARROW, do_layer_norm_before=False),
    "opt-post-lm": of("OPTForCausalLM", "OPTConfig", NARROW, do_layer_norm_before=False),
    "opt-narrow-untied": of("OPTForCausalLM", "OPTConfig", NARROW, tie_word_embeddings=False),
    "opt-sequence": of("OPTForSequenceClassification", "OPTConfig", NARROW),
    "opt-question": of("OPTForQuestionAnswering", "OPTConfig", OPT),
    "bloom": of("BloomModel", "BloomConfig", BLOOM),
    "bloom-lm": of("BloomForCausalLM", "BloomConfig", BLOOM),
    "bloom-lm-untied": of("BloomForCausalLM", "BloomConfig", BLOOM, tie_word_embeddings=False),
    "bloom-sequence-post": of(
        "BloomForSequenceClassification", "BloomConfig", BLOOM, apply_residual_connection_post_layernorm=True
    ),
    "bloom-token": of("BloomForTokenClassification", "BloomConfig", BLOOM),
    "bloom-question": of("BloomForQuestionAnswering", "BloomConfig", BLOOM),
    "mpt": of("MptModel", "MptConfig", MPT),
    "mpt-lm": of("MptForCausalLM", "MptConfig", MPT),
    "mpt-lm-untied": of("MptForCausalLM", "MptConfig", MPT, tie_word_embeddings=False),
    "mpt-lm-clipped": of("MptForCausalLM", "MptConfig", CLIPPED),
    "mpt-sequence": of("MptForSequenceClassification", "MptConfig", MPT),
    "mpt-token": of("MptForTokenClassification", "MptConfig", MPT),
    "mpt-question": of("MptForQuestionAnswering", "MptConfig", MPT),
    "clip": of("CLIPModel", "CLIPConfig", CLIP),
    "clip-classification": of("CLIPForImageClassification", "CLIPConfig", CLIP),
    "clip-text": of("CLIPTextModel", "CLIPTextConfig", TOWER_TEXT),
    "clip-text-projected": of("CLIPTextModelWithProjection", "CLIPTextConfig", TOWER_TEXT),
    "clip-vision": of("CLIPVisionModel", "CLIPVisionConfig", TOWER_VISION),
    "clip-vision-projected": of("CLIPVisionModelWithProjection", "CLIPVisionConfig", TOWER_VISION),
    "siglip": of("SiglipModel", "SiglipConfig", SIGLIP),
    "siglip-classification": of("SiglipForImageClassification", "SiglipConfig", UNPOOLED),
    "siglip-text": of("SiglipTextModel", "SiglipTextConfig", SIGLIP_TEXT),
    "siglip-vision": of("SiglipVisionModel", "SiglipVisionConfig", TOWER_VISION),
    "dinov2-masked": of("Dinov2Model", "Dinov2Config", DINOV2),
    "dinov2-unmasked": of("Dinov2Model", "Dinov2Config", DINOV2, use_mask_token=False, qkv_bias=False),
    "dinov2-gated": of("Dinov2Model", "Dinov2Config", DINOV2, use_swiglu_ffn=True, use_mask_token=False),
    "dinov2-classification": of("Dinov2ForImageClassification", "Dinov2Config", DINOV2, use_mask_token=False),
    "dinov2-registers-masked": of("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", DINOV2),
    "dinov2-registers-classification": of(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", DINOV2
    ),
    "beit-masked": of("BeitModel", "BeitConfig", BEIT, use_mask_token=True, **TABLES),
    "beit-last-norm": of("BeitModel", "BeitConfig", BEIT, use_mean_pooling=False, layer_scale_init_value=0.0),
    "beit-classification": of("BeitForImageClassification", "BeitConfig", BEIT, **TABLES),
    "beit-shared": of("BeitForImageClassification", "BeitConfig", BEIT, use_shared_relative_position_bias=True),
    "beit-codes-masked": of("BeitForMaskedImageModeling", "BeitConfig", BEIT, use_mask_token=True),
    "t5": of("T5Model", "T5Config", T5),
    "t5-lm": of("T5ForConditionalGeneration", "T5Config", T5),
    "t5-lm-untied": own_head(of("T5ForConditionalGeneration", "T5Config", T5, **V1_1)),
    "t5-lm-unscaled": of("T5ForConditionalGeneration", "T5Config", T5, **V1_1),  # tied, since the file has no head
    "t5-encoder": of("T5EncoderModel", "T5Config", T5),
    "t5-sequence": of("T5ForSequenceClassification", "T5Config", T5),
    "t5-token": of("T5ForTokenClassification", "T5Config", T5, **V1_1),
    "t5-question": of("T5ForQuestionAnswering", "T5Config", T5 | {"num_labels": 2}),
    "mt5-lm": own_head(of("MT5ForConditionalGeneration", "MT5Config", T5)),
    "mt5-encoder": of("MT5EncoderModel", "MT5Config", T5),
    "umt5-lm": of("UMT5ForConditionalGeneration", "UMT5Config", T5, **V1_1),
    "umt5-sequence": of("UMT5ForSequenceClassification", "UMT5Config", T5),
    "bart": of("BartModel", "BartConfig", BART),
    "bart-lm": of("BartForConditionalGeneration", "BartConfig", BART),
    "bart-lm-untied": of("BartForConditionalGeneration", "BartConfig", BART, tie_word_embeddings=False),
    "bart-sequence": of("BartForSequenceClassification", "BartConfig", BART, activation_function="relu"),
    "bart-question": of("BartForQuestionAnswering", "BartConfig", BART | {"num_labels": 2}),
    "plbart-lm": of("PLBartForConditionalGeneration", "PLBartConfig", BART),
    "mbart-lm": of("MBartForConditionalGeneration", "MBartConfig", BART),
    "pegasus-lm": of("PegasusForConditionalGeneration", "PegasusConfig", BART, activation_function="relu"),
    "blenderbot": of("BlenderbotModel", "BlenderbotConfig", BART),
    "blenderbot-lm": of("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, tie_word_embeddings=False),
    "blenderbot-small-lm": of("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", BART),
    "marian": of("MarianModel", "MarianConfig", BART),
    "marian-lm": of("MarianMTModel", "MarianConfig", BART, activation_function="swish"),
    "marian-lm-apart": of(
        "MarianMTModel", "MarianConfig", BART, share_encoder_decoder_embeddings=False, decoder_vocab_size=53
    ),
    "m2m-100-lm": of("M2M100ForConditionalGeneration", "M2M100Config", BART),
    "whisper": of("WhisperModel", "WhisperConfig", WHISPER),
    "whisper-lm": of("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "whisper-lm-untied": of("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, tie_word_embeddings=False),
    "modernbert": of("ModernBertModel", "ModernBertConfig", MODERN),
    "modernbert-mlm": of("ModernBertForMaskedLM", "ModernBertConfig", MODERN, **MODERN_BIASES),
    "modernbert-mlm-untied": of(
        "ModernBertForMaskedLM", "ModernBertConfig", MODERN, tie_word_embeddings=False, decoder_bias=False
    ),
    "modernbert-sequence": of("ModernBertForSequenceClassification", "ModernBertConfig", MODERN, **MODERN_BIASES),
    "modernbert-token": of("ModernBertForTokenClassification", "ModernBertConfig", MODERN),
    "modernbert-question": of("ModernBertForQuestionAnswering", "ModernBertConfig", MODERN, num_labels=2),
    "modernbert-choice": of("ModernBertForMultipleChoice", "ModernBertConfig", MODERN),
    "nomic": of("NomicBertModel", "NomicBertConfig", NOMIC),
    "nomic-mlm": of("NomicBertForMaskedLM", "NomicBertConfig", NOMIC),
    "nomic-sequence": of("NomicBertForSequenceClassification", "NomicBertConfig", NOMIC),
    "nomic-token": of("NomicBertForTokenClassification", "NomicBertConfig", NOMIC, head_dim=8),
    "eurobert": of("EuroBertModel", "EuroBertConfig", DECODER),
    "eurobert-mlm": of("EuroBertForMaskedLM", "EuroBertConfig", DECODER, mlp_bias=True),
    "eurobert-mlm-tied": of("EuroBertForMaskedLM", "EuroBertConfig", DECODER, tie_word_embeddings=True),
    "eurobert-sequence": of("EuroBertForSequenceClassification", "EuroBertConfig", DECODER),
    "eurobert-token": of("EuroBertForTokenClassification", "EuroBertConfig", DECODER),
}


# Encoders of text.
ALBERT = TEXT | {"embedding_size": 11, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
REMBERT = TEXT | {"input_embedding_size": 11, "output_embedding_size": 13, "decoder_start_token_id": 1}
ESM = {key: size for key, size in TEXT.items() if key != "type_vocab_size"} | {"hidden_size": 40, "mask_token_id": 9}
LONG = TEXT | {"attention_window": [4, 8], "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
SPECTROGRAM: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29, "patch_size": 4,
    "num_mel_bins": 13, "max_length": 24, "frequency_stride": 3, "time_stride": 5, "num_labels": 7,
}  # fmt: skip
MAE = SQUARE | {
    "decoder_hidden_size": 24, "decoder_num_hidden_layers": 3, "decoder_num_attention_heads": 6,
    "decoder_intermediate_size": 31,
}  # fmt: skip
# Four heads of 12; three blocks of 16 in the convolution of positions.
SPEECH: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
    "conv_dim": [7, 9, 11], "conv_kernel": [5, 3, 2], "conv_stride": [3, 2, 2], "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 3, "num_feat_extract_layers": 3, "num_labels": 5, "classifier_proj_size": 13,
    "num_codevectors_per_group": 6, "codevector_dim": 10, "proj_codevector_dim": 17,
}  # fmt: skip
STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
FIRST_DEBERTA = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 9}
LED = BART | {
    "attention_window": 4, "max_encoder_position_embeddings": 41, "max_decoder_position_embeddings": 37,
}  # fmt: skip
XLNET: dict[str, Any] = {
    "vocab_size": 61, "d_model": 20, "n_layer": 2, "n_head": 4, "d_inner": 29, "num_labels": 7, "mem_len": None,
}  # fmt: skip
SIGLIP2 = SIGLIP | {"vision_config": TOWER_VISION | {"num_patches": 9}}
DINOV3 = SQUARE | {"hidden_size": 48, "num_register_tokens": 3}
SWIN: dict[str, Any] = {
    "image_size": 24, "patch_size": 3, "num_channels": 3, "embed_dim": 12, "depths": [2, 3], "num_heads": [4, 6],
    "window_size": 2, "mlp_ratio": 3.0, "num_labels": 7, "encoder_stride": 6,
}  # fmt: skip
BOXES = TEXT | {"max_2d_position_embeddings": 41}
MODELS |= {
    "ernie-pretraining": of("ErnieForPreTraining", "ErnieConfig", TEXT, use_task_id=True),
    "ernie-token": of("ErnieForTokenClassification", "ErnieConfig", TEXT),
    "layoutlm-sequence": of("LayoutLMForSequenceClassification", "LayoutLMConfig", BOXES),
    "layoutlm-mlm": of("LayoutLMForMaskedLM", "LayoutLMConfig", BOXES),
    "megatron": of("MegatronBertModel", "MegatronBertConfig", TEXT),
    "megatron-mlm": of("MegatronBertForMaskedLM", "MegatronBertConfig", TEXT),
    "megatron-choice": of("MegatronBertForMultipleChoice", "MegatronBertConfig", TEXT),
    "megatron-token": of("MegatronBertForTokenClassification", "MegatronBertConfig", TEXT),
    "bert-generation-lm": of("BertGenerationDecoder", "BertGenerationConfig", TEXT),
    "bert-generation-encoder": of("BertGenerationEncoder", "BertGenerationConfig", TEXT),
    "rembert-mlm": of("RemBertForMaskedLM", "RemBertConfig", REMBERT),
    "rembert-sequence": of("RemBertForSequenceClassification", "RemBertConfig", REMBERT),
    "data2vec-text-mlm": of("Data2VecTextForMaskedLM", "Data2VecTextConfig", TEXT),
    "xl-mlm": of("XLMRobertaXLForMaskedLM", "XLMRobertaXLConfig", TEXT),
    "xl-mlm-untied": of("XLMRobertaXLForMaskedLM", "XLMRobertaXLConfig", TEXT, tie_word_embeddings=False),
    "xl-sequence": of("XLMRobertaXLForSequenceClassification", "XLMRobertaXLConfig", TEXT),
    "prelayernorm-mlm": of("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", TEXT),
    "prelayernorm-question": of(
        "RobertaPreLayerNormForQuestionAnswering", "RobertaPreLayerNormConfig", TEXT, num_labels=2
    ),
    "mpnet": of("MPNetModel", "MPNetConfig", TEXT),
    "mpnet-mlm": of("MPNetForMaskedLM", "MPNetConfig", TEXT),
    "mpnet-sequence": of("MPNetForSequenceClassification", "MPNetConfig", TEXT),
    "albert": of("AlbertModel", "AlbertConfig", ALBERT),
    "albert-pretraining": of("AlbertForPreTraining", "AlbertConfig", ALBERT),
    "albert-mlm-untied": of("AlbertForMaskedLM", "AlbertConfig", ALBERT, tie_word_embeddings=False),
    "albert-token": of("AlbertForTokenClassification", "AlbertConfig", ALBERT, inner_group_num=1),
    "esm-mlm": of("EsmForMaskedLM", "EsmConfig", ESM, position_embedding_type="rotary"),
    "esm-token": of("EsmForTokenClassification", "EsmConfig", ESM),
    "esm-sequence": of("EsmForSequenceClassification", "EsmConfig", ESM, emb_layer_norm_before=True),
    "longformer-sequence": of("LongformerForSequenceClassification", "LongformerConfig", LONG),
    "longformer-mlm": of("LongformerForMaskedLM", "LongformerConfig", LONG),
    "deberta-first": of("DebertaModel", "DebertaConfig", FIRST_DEBERTA),
    "deberta-first-mlm": of("DebertaForMaskedLM", "DebertaConfig", FIRST_DEBERTA, position_biased_input=False),
    "deberta-first-sequence": of(
        "DebertaForSequenceClassification", "DebertaConfig", FIRST_DEBERTA, pos_att_type=["c2p"], type_vocab_size=0
    ),
    "led-lm": of("LEDForConditionalGeneration", "LEDConfig", LED),
    "led-lm-untied": of("LEDForConditionalGeneration", "LEDConfig", LED, tie_word_embeddings=False),
    "xlnet-lm": of("XLNetLMHeadModel", "XLNetConfig", XLNET),
    "xlnet-sequence": of("XLNetForSequenceClassification", "XLNetConfig", XLNET),
    "xlnet-token": of("XLNetForTokenClassification", "XLNetConfig", XLNET),
    # Of images and sounds.
    "siglip2": of("Siglip2Model", "Siglip2Config", SIGLIP2),
    "siglip2-classification": of("Siglip2ForImageClassification", "Siglip2Config", SIGLIP2),
    "siglip2-text": of("Siglip2TextModel", "Siglip2TextConfig", SIGLIP_TEXT),
    "siglip2-vision": of("Siglip2VisionModel", "Siglip2VisionConfig", TOWER_VISION, num_patches=9),
    "dinov3-masked": of("DINOv3ViTModel", "DINOv3ViTConfig", DINOV3),
    "dinov3-gated-masked": of("DINOv3ViTModel", "DINOv3ViTConfig", DINOV3, use_gated_mlp=True, hidden_act="silu"),
    "msn-classification": of("ViTMSNForImageClassification", "ViTMSNConfig", VISION),
    "ijepa": of("IJepaModel", "IJepaConfig", VISION),
    "ijepa-classification": of("IJepaForImageClassification", "IJepaConfig", VISION, qkv_bias=False),
    "ast": of("ASTModel", "ASTConfig", SPECTROGRAM),
    "ast-classification": of("ASTForAudioClassification", "ASTConfig", SPECTROGRAM),
    "mae": of("ViTMAEModel", "ViTMAEConfig", MAE),
    "mae-pretraining": of("ViTMAEForPreTraining", "ViTMAEConfig", MAE),
    "data2vec-vision": of("Data2VecVisionModel", "Data2VecVisionConfig", SQUARE, **TABLES),
    "data2vec-vision-classification": of("Data2VecVisionForImageClassification", "Data2VecVisionConfig", SQUARE),
    "swin": of("SwinModel", "SwinConfig", SWIN, use_absolute_embeddings=True),
    "swin-classification": of("SwinForImageClassification", "SwinConfig", SWIN, qkv_bias=False),
    "swin-masked": of("SwinForMaskedImageModeling", "SwinConfig", SWIN),
    "wav2vec2-biased": of("Wav2Vec2Model", "Wav2Vec2Config", SPEECH, conv_bias=True),
    "wav2vec2-ctc": of("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, adapter_attn_dim=19, **STABLE),
    "wav2vec2-sequence": of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SPEECH, mask_time_prob=0.0),
    "wav2vec2-pretraining": of("Wav2Vec2ForPreTraining", "Wav2Vec2Config", SPEECH),
    "hubert": of("HubertModel", "HubertConfig", SPEECH, feat_proj_layer_norm=False),
    "hubert-ctc": of("HubertForCTC", "HubertConfig", SPEECH, **STABLE),
    "unispeech-ctc": of("UniSpeechForCTC", "UniSpeechConfig", SPEECH),
    "unispeech-sat-frames": of("UniSpeechSatForAudioFrameClassification", "UniSpeechSatConfig", SPEECH, **STABLE),
    "data2vec-audio-ctc": of(
        "Data2VecAudioForCTC", "Data2VecAudioConfig", SPEECH | {"num_conv_pos_embeddings": 2}, conv_pos_kernel_size=5
    ),
    "wavlm-frames": of("WavLMForAudioFrameClassification", "WavLMConfig", SPEECH, use_weighted_layer_sum=True),
    "wavlm-ctc": of("WavLMForCTC", "WavLMConfig", SPEECH, **STABLE),
    # Of images among words.
    "llava-lm": of("LlavaForConditionalGeneration", "LlavaConfig", LLAVA),
    "llava-base": of("LlavaModel", "LlavaConfig", LLAVA, vision_feature_layer=[-2, 1], multimodal_projector_bias=False),
    "llava-qwen2-lm": of(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        seeing("qwen2", SIGLIP_ENCODER),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    ),
    "llava-pixtral-lm": of(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        seeing("mistral", PIXTRAL),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava-next-lm": of("LlavaNextForConditionalGeneration", "LlavaNextConfig", LLAVA_TILES),
    "paligemma-lm": of("PaliGemmaForConditionalGeneration", "PaliGemmaConfig", PALIGEMMA),
    "gemma3-seeing-lm": of("Gemma3ForConditionalGeneration", "Gemma3Config", GEMMA_SEEING),
    "mistral3-lm": of(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        seeing("mistral", PIXTRAL),
        multimodal_projector_bias=True,
        tie_word_embeddings=False,
    ),
    "qwen2-seeing-lm": of("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", QWEN2_SEEING),
    "qwen2-5-seeing-lm": of("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", QWEN25_SEEING),
    "qwen3-seeing-lm": of("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", QWEN3_SEEING),
    "qwen3-mixture-seeing-lm": of("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", QWEN3_MIXTURE_SEEING),
    "internvl-lm": of(
        "InternVLForConditionalGeneration", "InternVLConfig", seeing("qwen2", INTERN), tie_word_embeddings=False
    ),
    "internvl-normed-lm": of(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        seeing("llama", INTERN | {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True}),
    ),
    "idefics3-lm": of("Idefics3ForConditionalGeneration", "Idefics3Config", IDEFICS),
    "smolvlm-lm": of("SmolVLMForConditionalGeneration", "SmolVLMConfig", IDEFICS),
    # Their parts.
    "pixtral": of("PixtralVisionModel", "PixtralVisionConfig", MERGED),
    "internvl-vision": of("InternVLVisionModel", "InternVLVisionConfig", INTERN, use_mean_pooling=False),
    "idefics3-vision": of("Idefics3VisionTransformer", "Idefics3VisionConfig", MERGED),
}

# Heads, blocks of heads that share their states, channels of a head and states are of pairwise distinct numbers.
SCAN: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "conv_kernel": 3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MAMBA = SCAN | {"state_size": 5, "time_step_rank": 7, "residual_in_fp32": False}
MAMBA2 = MAMBA | {"num_heads": 12, "head_dim": 6, "n_groups": 3, "expand": 3, "chunk_size": 8}
HYBRID = DECODER | {
    "mamba_n_heads": 12, "mamba_d_head": 6, "mamba_n_groups": 3, "mamba_d_state": 5,
    "mamba_d_conv": 3, "mamba_expand": 3, "mamba_chunk_size": 8, "layer_types": ["linear_attention", "full_attention"],
    "shared_intermediate_size": 13, "num_local_experts": 9, "num_experts_per_tok": 3,
}  # fmt: skip
UNTYPED = {key: value for key, value in HYBRID.items() if key != "layer_types"}
GRANITE_HYBRID = OLMO | {key: value for key, value in HYBRID.items() if key not in DECODER}
GRANITE_HYBRID |= {"mamba_d_head": 10, "mamba_expand": 2, "attention_multiplier": 0.3, "residual_multiplier": 0.5}
GRANITE_HYBRID |= {"embedding_multiplier": 3.0}
NEMOTRON_H = DECODER | {
    "mamba_num_heads": 12, "mamba_head_dim": 6, "n_groups": 3, "ssm_state_size": 5, "conv_kernel": 3, "expand": 3,
    "chunk_size": 8, "n_routed_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 13,
    "moe_shared_expert_intermediate_size": 11,
    "layers_block_type": ["linear_attention", "mlp", "moe", "full_attention"],
}  # fmt: skip
JAMBA = OLMO | {
    "hidden_size": 36, "mamba_d_state": 5, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_dt_rank": 7,
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 9, "num_experts_per_tok": 3,
}  # fmt: skip
MODELS |= {
    "mamba-lm": of("MambaForCausalLM", "MambaConfig", MAMBA, use_bias=True),
    "mamba-untied": of("MambaForCausalLM", "MambaConfig", MAMBA, tie_word_embeddings=False, use_conv_bias=False),
    "falcon-mamba": of("FalconMambaModel", "FalconMambaConfig", MAMBA),
    "mamba2": of("Mamba2Model", "Mamba2Config", MAMBA2, residual_in_fp32=True),
    "mamba2-lm": of("Mamba2ForCausalLM", "Mamba2Config", MAMBA2, use_bias=True),
    "bamba-lm": of(
        "BambaForCausalLM",
        "BambaConfig",
        UNTYPED | {"hidden_size": 24},
        attn_layer_indices=[1],
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
    ),
    "granite-hybrid-lm": of(
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE_HYBRID, attention_bias=True
    ),
    "granite-hybrid-dense": of(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        GRANITE_HYBRID | {"num_local_experts": 0},
        position_embedding_type="rope",
    ),
    "falcon-h1-lm": of(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        UNTYPED,
        mamba_d_ssm=72,
        mamba_rms_norm=True,
        projectors_bias=True,
        attention_bias=True,
        ssm_multipliers=[0.5, 0.7, 1.3, 0.9, 1.1],
    ),
    "falcon-h1-plain": of("FalconH1ForCausalLM", "FalconH1Config", UNTYPED, mamba_d_ssm=72, mlp_bias=True),
    "nemotron-h-lm": of(
        "NemotronHForCausalLM", "NemotronHConfig", NEMOTRON_H, use_bias=True, mlp_bias=True, moe_latent_size=17
    ),
    "nemotron-h-groups": of(
        "NemotronHForCausalLM", "NemotronHConfig", NEMOTRON_H, n_routed_experts=15, n_group=3, topk_group=2
    ),
    "jamba-lm": of("JambaForCausalLM", "JambaConfig", JAMBA),
    "jamba-sequence": of("JambaForSequenceClassification", "JambaConfig", JAMBA, mamba_proj_bias=True, num_experts=1),
}


# Latents, heads that have queries and keys of one size and values of another, and a part of each that is turned.
LATENT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 29, "max_position_embeddings": 37, "num_labels": 7, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "kv_lora_rank": 11, "q_lora_rank": 13, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6,
    "v_head_dim": 7,
}  # fmt: skip
LATENT_EXPERTS = LATENT | {
    "n_routed_experts": 15, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 9, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS |= {
    "latent-lm": of("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT_EXPERTS, attention_bias=True),
    "latent-halves": of(
        "DeepseekV3ForTokenClassification",
        "DeepseekV3Config",
        LATENT_EXPERTS | {"topk_group": 3},
        rope_interleave=False,
    ),
    "latent-v2-lm": of(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        LATENT_EXPERTS | {"topk_group": 1},
        topk_method="group_limited_greedy",
    ),
    "latent-v2-lite": of(
        "DeepseekV2ForSequenceClassification",
        "DeepseekV2Config",
        LATENT_EXPERTS | {"q_lora_rank": None},
        attention_bias=True,
    ),
    "mistral4-lm": of("Mistral4ForCausalLM", "Mistral4Config", LATENT_EXPERTS),
    "glm4-lite-lm": of("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT_EXPERTS),
    "sarvam-mla-lm": of("DeepseekV3ForCausalLM", "SarvamMLAConfig", LATENT_EXPERTS | {"q_lora_rank": None}),
    "youtu-lm": of("YoutuForCausalLM", "YoutuConfig", LATENT),
    "minicpm3-lm": of("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT, tie_word_embeddings=False, dim_model_base=8),
}
# Two key heads of linear attention, each with three value heads; attention in one layer of two.
DELTA: dict[str, Any] = PARTLY | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DELTA_EXPERTS = DELTA | QWEN_MIXTURE | {"head_dim": 14}
MODELS |= {
    "qwen3-next-lm": of("Qwen3NextForCausalLM", "Qwen3NextConfig", DELTA_EXPERTS, attention_bias=True),
    "qwen3-next-dense": of("Qwen3NextForTokenClassification", "Qwen3NextConfig", DELTA_EXPERTS, mlp_only_layers=[0]),
    "qwen3-5-lm": of("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA),
    "qwen3-5-mixture-lm": of("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", DELTA_EXPERTS),
}
KIMI: dict[str, Any] = LATENT | {
    "num_local_experts": 15, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 9, "q_lora_rank": None,
    "linear_attn_config": {
        "head_dim": 6, "num_heads": 3, "short_conv_kernel_size": 3, "full_attn_layers": [2], "kda_layers": [1],
    },
}  # fmt: skip
MODELS |= {
    "sparse-latent-lm": of(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", LATENT_EXPERTS, index_topk=5, index_head_dim=9, index_n_heads=3
    ),
    "longcat-lm": of(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {key: value for key, value in LATENT.items() if key not in ("num_hidden_layers", "intermediate_size")},
        num_layers=2,
        ffn_hidden_size=29,
        expert_ffn_hidden_size=9,
        n_routed_experts=7,
        zero_expert_num=3,
        moe_topk=4,
        head_dim=6,
    ),
    "kimi-linear-lm": of("KimiLinearForCausalLM", "KimiLinearConfig", KIMI, attention_bias=True),
    "kimi-linear-queries": of("KimiLinearForCausalLM", "KimiLinearConfig", KIMI | {"topk_group": 3}, q_lora_rank=13),
    "afmoe-lm": of(
        "AfmoeForCausalLM",
        "AfmoeConfig",
        QWEN_MIXTURE | NOPE,
        num_dense_layers=1,
        attention_bias=True,
        mup_enabled=True,
    ),
    "cohere2-mixture-lm": of(
        "Cohere2MoeForCausalLM",
        "Cohere2MoeConfig",
        MIXTURE | NOPE | {"num_experts": 9},
        num_shared_experts=2,
        mlp_layer_types=["dense", "sparse"],
        prefix_dense_intermediate_size=13,
    ),
    "cohere2-mixture-rms": of(
        "Cohere2MoeForCausalLM",
        "Cohere2MoeConfig",
        MIXTURE | NOPE | {"num_experts": 9},
        mlp_layer_types=["dense", "sparse"],
        prefix_dense_intermediate_size=13,
        prefix_dense_sliding_window_pattern=2,
        rms_norm_eps=1e-6,
        expert_selection_fn="sigmoid",
        attention_bias=True,
    ),
    "qwen3-5-seeing-lm": of(
        "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", seeing("", QWEN35_ENCODER, QWEN_WORDS | DELTA) | QWEN_IDS
    ),
    "qwen3-5-mixture-seeing-lm": of(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        seeing("", QWEN35_ENCODER, QWEN_WORDS | DELTA_EXPERTS) | QWEN_IDS,
    ),
    "llama4-seeing-lm": of(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        seeing(
            "", LLAMA4_ENCODER, SEEN_TEXT | {"intermediate_size_mlp": 13, "moe_layers": [1], "num_local_experts": 5}
        ),
        tie_word_embeddings=False,
    ),
}
# Of six layers the last two read keys and values of the two before them.
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
}
GEMMA3N: dict[str, Any] = GEMMA | WINDOWS | {
    "vocab_size_per_layer_input": 53, "hidden_size_per_layer_input": 7, "altup_num_inputs": 3, "laurel_rank": 5,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
}  # fmt: skip
GEMMA4: dict[str, Any] = GEMMA | WINDOWS | {
    "vocab_size_per_layer_input": 67, "hidden_size_per_layer_input": 7, "global_head_dim": 16,
}  # fmt: skip
MODELS |= {
    "gemma3n-lm": of("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N, attention_bias=True),
    "gemma4-lm": of("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4, use_double_wide_mlp=True),
    "gemma4-mixture-lm": of(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        attention_k_eq_v=True,
        num_global_key_value_heads=3,
        enable_moe_block=True,
        num_experts=9,
        top_k_experts=3,
        moe_intermediate_size=13,
        attention_bias=True,
    ),
}
SHORT: dict[str, Any] = DECODER | {
    "layer_types": ["conv", "full_attention"], "block_multiple_of": 7, "intermediate_size": 53, "conv_L_cache": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
SHORT_EXPERTS = SHORT | {
    "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 13, "num_dense_layers": 1,
}  # fmt: skip
DIFFERENTIAL = DECODER | {"num_attention_heads": 12, "num_key_value_heads": 4}
MODELS |= {
    "lfm2-lm": of("Lfm2ForCausalLM", "Lfm2Config", SHORT),
    "lfm2-biased": of("Lfm2ForCausalLM", "Lfm2Config", SHORT, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2-mixture-lm": of("Lfm2MoeForCausalLM", "Lfm2MoeConfig", SHORT_EXPERTS, conv_bias=True),
    "diffllama-lm": of("DiffLlamaForCausalLM", "DiffLlamaConfig", DIFFERENTIAL),
    "diffllama-question": of("DiffLlamaForQuestionAnswering", "DiffLlamaConfig", DIFFERENTIAL, attention_bias=True),
}


# Networks of convolutions, and perceptrons, which are known by their layers and names.
RESNET: dict[str, Any] = {
    "num_channels": 3, "embedding_size": 10, "hidden_sizes": [28, 44], "depths": [2, 3], "num_labels": 7,
    "image_size": 40,
}  # fmt: skip


def network(*layers: nn.Module, seed: int = 0) -> Checkpoint:
    return open_checkpoint(randomise(nn.Sequential(*layers), seed))


def published(seed: int = 0, **options: object) -> Checkpoint:
    """A ResNet by torchvision's names."""
    config = {"model_type": "torchvision_resnet", **RESNET, **options}
    return open_checkpoint(dict(randomise(build_resnet(config), seed).state_dict()), name="ResNet")


def perceptron(seed: int = 0) -> Checkpoint:
    return network(
        nn.Linear(5, 11), nn.ReLU(), nn.Dropout(), nn.Linear(11, 13), nn.BatchNorm1d(13), nn.LeakyReLU(0.3),
        nn.Linear(13, 17, bias=False), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 19), nn.Linear(19, 23), nn.GELU(),
        nn.Linear(23, 29), nn.Tanh(), nn.Linear(29, 7), seed=seed,
    )  # fmt: skip


def convolutions(seed: int = 0) -> Checkpoint:
    features = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 7, (3, 2)), nn.Tanh(),
        nn.AvgPool2d(2), nn.Conv2d(7, 11, 2), nn.ReLU(), nn.BatchNorm2d(11), nn.AdaptiveAvgPool2d(3),
    )  # fmt: skip
    return network(features, nn.Flatten(), nn.Linear(99, 13), nn.ReLU(), nn.Linear(13, 7), seed=seed)


MODELS |= {
    "resnet": of("ResNetModel", "ResNetConfig", RESNET),
    "resnet-classification": of("ResNetForImageClassification", "ResNetConfig", RESNET, hidden_act="gelu"),
    "resnet-basic": of("ResNetForImageClassification", "ResNetConfig", RESNET, layer_type="basic", embedding_size=28),
    "resnet-published": published,
    "resnet-published-groups": partial(published, inner_sizes=[15, 21], groups=3),
    "resnet-published-basic": partial(published, layer_type="basic", embedding_size=28, inner_sizes=[13, 17]),
    "perceptron": perceptron,
    "convolutions": convolutions,
}


# The worst that the true declarations show is 3e-14, on every model and axis.
EXACT = 1e-13


# Of the decoders one form of each kind of block; the others are tested with the slow tests.
FIRST = {
    "llama-lm", "llama-biased", "mistral-lm", "granite-lm", "smollm3-lm", "qwen2-tied", "qwen3-lm", "gemma-lm",
    "gemma2-lm", "gemma3-lm", "phi3-partly", "olmo2-lm", "stablelm-parallel", "starcoder2-lm", "cohere-lm", "neox-lm",
    "gptj-lm", "falcon-lm", "falcon-grouped", "falcon-alibi", "opt-lm", "opt-post-lm", "bloom-lm", "mpt-lm",
    "mixtral-lm", "qwen2-mixture-dense",
    "nemotron-lm", "exaone4-lm", "nanochat-lm", "phi-normed", "codegen-lm", "gpt-bigcode-lm", "xglm-lm", "llama4-lm",
    "minimax-lm", "gpt-oss-lm", "granite-swa-lm", "glm4-moe-lm", "mamba-lm", "mamba2-lm", "falcon-h1-lm", "jamba-lm",
    "granite-hybrid-lm", "nemotron-h-lm",
    "modernbert-mlm", "olmo-clipped", "t5-lm", "t5-lm-untied", "bart-lm", "marian-lm", "whisper-lm",
    "clip", "siglip", "dinov2-masked", "dinov2-gated", "dinov2-classification", "beit-masked", "beit-shared",
    "ernie-pretraining", "layoutlm-sequence", "megatron-mlm", "bert-generation-lm", "rembert-mlm", "xl-sequence",
    "prelayernorm-mlm", "mpnet-sequence", "albert-pretraining", "esm-mlm", "longformer-sequence",
    "msn-classification", "ijepa-classification", "ast-classification", "mae-pretraining", "wav2vec2-biased",
    "wav2vec2-ctc", "hubert", "wavlm-frames", "dinov3-masked", "siglip2", "swin", "deberta-first-mlm", "led-lm",
    "xlnet-lm",
    "latent-lm", "latent-v2-lm", "latent-v2-lite", "qwen3-next-lm", "qwen3-5-lm", "lfm2-biased", "lfm2-mixture-lm",
    "diffllama-lm", "llava-next-lm", "mistral3-lm", "qwen2-5-seeing-lm", "qwen3-seeing-lm", "internvl-normed-lm",
    "idefics3-lm", "kimi-linear-lm", "gemma3n-lm", "gemma4-lm", "llama4-seeing-lm",
}  # fmt: skip


# Those before them that differ from another of their family in nothing but the head, or are without one; none of
# them is mutated.
OTHER_HEADS = {
    "bert", "bert-sequence", "bert-choice", "bert-question", "roberta", "roberta-choice", "roberta-token",
    "roberta-question", "xlm-roberta-mlm-untied", "camembert-sequence", "distilbert", "distilbert-mlm-untied",
    "distilbert-choice", "distilbert-token", "distilbert-question", "electra", "electra-generator-untied",
    "electra-token", "electra-question", "deberta", "deberta-mlm-untied", "deberta-sequence-c2p-shared",
    "deberta-choice", "deit-masked", "gpt2", "gpt2-sequence", "gpt2-question",
}  # fmt: skip


SEQUENTIAL = "torch_sequential"
# model_type by class of configs, of which none is imported for it.
CONFIGS = {config: model_type for model_type, config in CONFIG_MAPPING_NAMES.items()}


def family(label: str) -> str:
    """The `model_type` of a tiny model, without making it."""
    make: Any = MODELS[label]
    if not isinstance(make, partial):
        own = {sceptr: "sceptr", published: "torchvision_resnet", perceptron: SEQUENTIAL, convolutions: SEQUENTIAL}
        return own.get(make, "torch_transformer_encoder")
    return CONFIGS[make.keywords["config_class"]] if "config_class" in make.keywords else "torchvision_resnet"


def families(label: str) -> set[str]:
    """The `model_type`s of a tiny model and of its parts, without making it."""
    whole = family(label)
    fields = getattr(MODELS[label], "keywords", {}).get("fields", {})
    return {whole} | {fields[key].get("model_type", usual) for key, usual in ARCHITECTURES[whole].parts.items()}


def of_all_families(labels: Iterable[str]) -> list[str]:
    """The labels, and of families that none of them is of the last one of each: new families take part without being
    named."""
    named = list(labels)
    others = {family(label): label for label in MODELS}
    there = {family(label) for label in named}
    return [*named, *(label for name, label in others.items() if name not in there)]


def marked(labels: Iterable[str]) -> list[Any]:
    """The labels as parameters of tests."""
    decoders = list(MODELS)[list(MODELS).index("llama") :]
    slow = set(decoders) - FIRST | OTHER_HEADS
    return [pytest.param(label, marks=pytest.mark.slow if label in slow else ()) for label in labels]


@dataclass(frozen=True)
class Case:
    """A tiny model, its declaration, and what the real class computes with it on fixed inputs."""

    checkpoint: Checkpoint
    spec: Spec
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    exact: ClassVar[float] = EXACT

    def error(self, changed: Checkpoint | torch.nn.Module, alignment: Alignment | None = None) -> float:
        """The largest relative difference of a changed model's outputs; those in moved spaces follow."""
        module = changed if isinstance(changed, torch.nn.Module) else seen(changed)
        found = run(module, self.follow(self.inputs, alignment))
        return max(compare(self.follow(self.outputs, alignment), found).values())

    def follow(self, fields: dict[str, Tensor], alignment: Alignment | None) -> dict[str, Tensor]:
        """Inputs or outputs in a moved space as the alignment moves them."""
        out = dict(fields)
        for name in self.spec.outputs.keys() & fields.keys() if alignment is not None else ():
            outer = " ".join(map(str, fields[name].shape[: -len(self.spec.outputs[name].dims)]))
            layout = Declared(parse(f"{outer} {self.spec.outputs[name]}"))
            spec = replace(alignment.spec, tensors={**alignment.spec.tensors, name: layout})
            out[name] = replace(alignment, spec=spec).move(name, fields[name])
        return out


@cache
def model_of(label: str) -> Model:
    """The model of that label of MODELS, made once."""
    return Model.of(MODELS[label]())


@cache
def case(label: str) -> Case:
    """The case of that label, made once."""
    model = model_of(label)
    module = seen(model.checkpoint)
    inputs = random_inputs(module, model.checkpoint.config)
    rng = torch.Generator().manual_seed(1)
    types = model.checkpoint.config.get("type_vocab_size") or 2 * (model.spec.family == "xlnet")
    if types > 1:  # more than the first row of the table is read
        inputs["token_type_ids"] = torch.randint(types, inputs["input_ids"].shape, generator=rng)
    if label.endswith("-masked"):  # the mask token is read
        batch, _, height, width = inputs["pixel_values"].shape
        size = model.checkpoint.config["patch_size"]
        h, w = (size, size) if isinstance(size, int) else size
        inputs["bool_masked_pos"] = torch.rand(batch, (height // h) * (width // w), generator=rng) < 0.5
    return Case(model.checkpoint, model.spec, inputs, run(module, inputs))


def moving(spec: Spec, seed: int, axes: set[str] | None = None) -> Alignment:
    """A random alignment of which no element is the identity by chance (four heads are, once in 24)."""
    candidates = (random_alignment(spec, seed + 100 * n, axes, largest=True) for n in itertools.count())
    return next(g for g in candidates if not any(element.is_identity() for element in g.elements.values()))

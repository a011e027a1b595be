"""Tiny models of every family: pairwise distinct sizes, random gains and biases, unsaturated, float64.

Symmetric sizes, gains of 1 and biases of 0 would hide errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.architectures import Model
from symfuse.architectures.torch_encoder import build
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.modules import live
from symfuse.spec import Spec
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
MASKED_IMAGE = VISION | {"image_size": 12, "patch_size": 4, "encoder_stride": 4}

SCEPTR: dict[str, Any] = {
    "model_type": "sceptr", "hidden_size": 20, "num_attention_heads": 4, "intermediate_size": 29, "hidden_act": "relu",
    "num_hidden_layers": 2, "vocab_size": 19, "compartment_vocab_size": 7, "embedding_size": 25,
    "output_vocab_size": 17,
}  # fmt: skip


def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights of a size at which nothing saturates; gains about 1, everything else about 0."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            gain = p.ndim == 1 and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.3 + (1.0 if gain else 0.0))
    return module.double().eval()


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
    if checkpoint.config["model_type"] != "sceptr":
        return live(checkpoint)
    module = Sceptr(checkpoint.config, torch.Generator()).double()
    module.load_state_dict(dict(checkpoint))
    return module.eval()


def of(class_name: str, config_class: str, base: dict[str, object], **options: object) -> Callable[..., Checkpoint]:
    def make(seed: int = 0) -> Checkpoint:
        return hf(class_name, getattr(transformers, config_class)(**(base | options)), seed)

    return make


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
}


@dataclass(frozen=True)
class Case:
    """A tiny model, its declaration, and what the real class computes with it on fixed inputs."""

    checkpoint: Checkpoint
    spec: Spec
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def error(self, changed: Checkpoint | torch.nn.Module, alignment: Alignment | None = None) -> float:
        """The largest relative difference of a changed model's outputs; those in moved spaces follow."""
        module = changed if isinstance(changed, torch.nn.Module) else real(changed)
        found = run(module, self.follow(self.inputs, alignment))
        return max(compare(self.follow(self.outputs, alignment), found).values())

    def follow(self, fields: dict[str, Tensor], alignment: Alignment | None) -> dict[str, Tensor]:
        """Inputs or outputs in a moved space as the alignment moves them."""
        out = dict(fields)
        for name in self.spec.outputs.keys() & fields.keys() if alignment is not None else ():
            (atom,) = self.spec.outputs[name].atoms()
            if element := alignment.elements.get(self.spec.instance(atom.name, {})):
                out[name] = element.part(atom.variance.value).act(fields[name], -1)
        return out


@cache
def case(label: str) -> Case:
    """The case of that label of MODELS, made once."""
    model = Model.of(MODELS[label]())
    module = real(model.checkpoint)
    inputs = random_inputs(module, model.checkpoint.config)
    rng = torch.Generator().manual_seed(1)
    types = model.checkpoint.config.get("type_vocab_size") or 0
    if types > 1:  # more than the first row of the table is read
        inputs["token_type_ids"] = torch.randint(types, inputs["input_ids"].shape, generator=rng)
    if label.endswith("-masked"):  # the mask token is read
        patches = model.spec.sizes["positions"] - 1 - label.startswith("deit")
        inputs["bool_masked_pos"] = torch.rand(2, patches, generator=rng) < 0.5
    return Case(model.checkpoint, model.spec, inputs, run(module, inputs))

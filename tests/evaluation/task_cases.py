"""Tiny models with tokenizers and image processors of their own, data for them, and each task on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

from contract.tiny import GPT2, TEXT, VISION, of
from symfuse.evaluation import Task
from symfuse.evaluation.data import Records, read_records
from symfuse.evaluation.tasks import make_task
from symfuse.io import Checkpoint
from symfuse.modules import live

LETTERS = "abcdefghijklmnopqrst"
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
SPECIAL |= {"mask_token": "[MASK]"}
TAGS = ["O", "B-x", "I-x", "B-y", "I-y", "B-z", "I-z"]
NAMED = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: i for i, tag in enumerate(TAGS)}}


@cache
def wordpiece() -> dict[str, bytes]:
    """The files of a tokenizer of 45 pieces, in which a word of three letters is three tokens."""
    pieces = [*SPECIAL.values(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    library = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return files(transformers.PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL))


@cache
def byte_level() -> dict[str, bytes]:
    """The files of a tokenizer as GPT-2's, which has no padding and sees a word only behind a space."""
    pieces = ["<|endoftext|>", *LETTERS, *(f"Ġ{letter}" for letter in LETTERS), "Ġ", "Ċ"]
    merges = [("Ġ", letter) for letter in LETTERS]
    library = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return files(transformers.GPT2TokenizerFast(tokenizer_object=library, eos_token=end, bos_token=end, unk_token=end))


@cache
def processor() -> dict[str, bytes]:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return files(ViTImageProcessorPil(size={"height": 12, "width": 20}))


def files(what: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        what.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def text(rng: Any, words: int) -> str:
    draw = iter(torch.randint(len(LETTERS), (3 * words,), generator=rng).tolist())
    return " ".join("".join(LETTERS[next(draw)] for _ in range(1 + i % 3)) for i in range(words))


@cache
def table() -> Records:
    """23 rows of very different lengths, from one token to more than the models can read."""
    rng = torch.Generator().manual_seed(0)
    rows = [{"text": text(rng, 1 + 3 * i % 24), "other": text(rng, 1 + i % 4), "label": TAGS[i % 7]} for i in range(23)]
    return read_records([row | {"number": 0.1 * i, "pair": i % 5} for i, row in enumerate(rows)])


@cache
def tagged() -> Records:
    rows = []
    for i, row in enumerate(table().rows):
        words = row["text"].split()
        rows.append({"tokens": words, "tags": [TAGS[(i + j) % 7] for j in range(len(words))]})
    return read_records(rows)


@cache
def pictures() -> Records:
    rng = torch.Generator().manual_seed(0)
    draw = torch.randint(256, (9, 30, 40, 3), generator=rng, dtype=torch.uint8).numpy()
    return read_records([{"image": Image.fromarray(one), "label": TAGS[i % 7]} for i, one in enumerate(draw)])


def built(
    class_name: str, config: str, base: dict[str, Any], tokenizer: Any, **options: Any
) -> Callable[[], Checkpoint]:
    return cache(lambda: of(class_name, config, base, **options)().replace(files=tokenizer()))


SEQUENCE, TOKEN = "BertForSequenceClassification", "BertForTokenClassification"
Case = tuple[str, Callable[[], Checkpoint], Callable[[], Records], dict[str, Any]]

CASES: dict[str, Case] = {
    "causal": ("causal-lm", built("GPT2LMHeadModel", "GPT2Config", GPT2, byte_level), table, {}),
    "masked": ("masked-lm", built("BertForMaskedLM", "BertConfig", TEXT, wordpiece), table, {}),
    "masked, roberta": (
        "masked-lm", built("RobertaForMaskedLM", "RobertaConfig", TEXT, wordpiece, pad_token_id=1), table, {},
    ),
    "sequence": ("sequence-classification", built(SEQUENCE, "BertConfig", TEXT, wordpiece, **NAMED), table, {}),
    "pair": (
        "sequence-classification", built(SEQUENCE, "BertConfig", TEXT, wordpiece, **NAMED), table,
        {"pair_column": "other"},
    ),
    "regression": (
        "sequence-classification", built(SEQUENCE, "BertConfig", TEXT | {"num_labels": 1}, wordpiece), table,
        {"label_column": "number"},
    ),
    "sequence, gpt2": (
        "sequence-classification",
        built("GPT2ForSequenceClassification", "GPT2Config", GPT2, byte_level, pad_token_id=60, **NAMED), table, {},
    ),
    "token": ("token-classification", built(TOKEN, "BertConfig", TEXT, wordpiece, **NAMED), tagged, {}),
    "token, gpt2": (
        "token-classification",
        built("GPT2ForTokenClassification", "GPT2Config", GPT2, byte_level, **NAMED), tagged, {},
    ),
    "image": (
        "image-classification", built("ViTForImageClassification", "ViTConfig", VISION, processor, **NAMED), pictures,
        {},
    ),
    "retrieval": (
        "retrieval", built("BertModel", "BertConfig", TEXT, wordpiece), table,
        {"query_column": "text", "positive_column": "other"},
    ),
    "retrieval, labels": (
        "retrieval", built("BertModel", "BertConfig", TEXT, wordpiece), table, {"label_column": "label"},
    ),
}  # fmt: skip
HEADS = [label for label in CASES if "retrieval" not in label]
TEXTS = [label for label in CASES if label != "image"]


def task(label: str, **options: Any) -> Task:
    name, checkpoint, records, more = CASES[label]
    return make_task(name, records(), checkpoint(), **more | options)


@cache
def module(label: str) -> nn.Module:
    return live(CASES[label][1]())

"""Bad data, options and checkpoints: one clear error each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import symfuse
from contract.tiny import MODELS, TEXT, of
from evaluation.task_cases import CASES, SEQUENCE, built, module, pictures, table, task, wordpiece
from symfuse.errors import CheckpointError, DataError, IncompatibleError, OptionError, SymfuseError
from symfuse.evaluation import measure
from symfuse.evaluation.data import Records, read_records
from symfuse.evaluation.tasks import make_task
from symfuse.io import Checkpoint


def plain(**row: Any) -> Callable[[], Records]:
    return lambda: read_records([{"text": "a b", "label": 0}, {"text": "c", "label": 1} | row])


def small_vocabulary() -> Checkpoint:
    return of("BertForMaskedLM", "BertConfig", TEXT | {"vocab_size": 9})().replace(files=wordpiece())


BAD: dict[str, tuple[str, Callable[[], Checkpoint], Callable[[], Records], dict[str, Any], type[SymfuseError], str]] = {
    "column": (
        "masked-lm", CASES["masked"][1], plain(), {"text_column": "txt"}, DataError,
        r"memory: expected a column 'txt' \(did you mean 'text'\?\), found 'text', 'label'; name the right one with "
        r"text_column \(--column text=NAME\)",
    ),
    "pair column": (
        "sequence-classification", CASES["pair"][1], plain(), {"pair_column": "second"}, DataError,
        r"'second', found 'text', 'label'; name the right one with pair_column",
    ),
    "label out of range": (
        "sequence-classification", CASES["sequence"][1], plain(label=7), {}, DataError,
        "memory, row 2: the label 7 is out of range; BertForSequenceClassification has 7 labels, 0 to 6: O, B-x",
    ),
    "unlabelled": (
        "sequence-classification", CASES["sequence"][1], plain(label="-1"), {}, DataError, "label -1 is out of range",
    ),
    "label unknown": (
        "sequence-classification", CASES["sequence"][1], plain(label="B-w"), {}, DataError,
        r"memory, row 2: the label 'B-w' \(did you mean 'B-.'\?\) is none of those of .*: O, B-x.* from 0 in this",
    ),
    "label between": (
        "sequence-classification", CASES["sequence"][1], plain(label=1.5), {}, DataError, "the label '1.5' is none",
    ),
    "label missing": (
        "sequence-classification", CASES["sequence"][1], plain(label=None), {}, DataError, "row 2: 'label' is missing",
    ),
    "no number": (
        "sequence-classification", CASES["regression"][1], plain(label="x"), {}, DataError,
        r"row 2: the label 'x' is no finite number; .* one output \(num_labels 1\)",
    ),
    "several labels": (
        "sequence-classification",
        built(SEQUENCE, "BertConfig", TEXT, wordpiece, problem_type="multi_label_classification"), plain(), {},
        OptionError, "problem_type 'multi_label_classification' with 7 labels",
    ),
    "text of a number": ("masked-lm", CASES["masked"][1], plain(text=3), {}, DataError, "row 2: 'text' is of type int"),
    "no tokens": (
        "sequence-classification", CASES["sequence, gpt2"][1], plain(text=""), {}, DataError, "row 2: the text has no",
    ),
    "nothing to predict": (
        "causal-lm", CASES["causal"][1], lambda: read_records([{"text": "a"}]), {}, DataError, "no text .* two tokens",
    ),
    "nothing to mask": (
        "masked-lm", CASES["masked"][1], lambda: read_records([{"text": "漢字"}]), {}, DataError, "could be masked",
    ),
    "tags and words": (
        "token-classification", CASES["token"][1], lambda: read_records([{"tokens": ["a", "b"], "tags": ["O"]}]), {},
        DataError, "row 1: 2 words in 'tokens' and 1 tags in 'tags'",
    ),
    "words as text": (
        "token-classification", CASES["token"][1], lambda: read_records([{"tokens": "a b", "tags": "O O"}]), {},
        DataError, "row 1: 'tokens' is of type str, expected a list",
    ),
    "word": (
        "token-classification", CASES["token"][1], lambda: read_records([{"tokens": ["a", 2], "tags": [0, 0]}]), {},
        DataError, "row 1: a word of type int",
    ),
    "tag": (
        "token-classification", CASES["token"][1], lambda: read_records([{"tokens": ["a"], "tags": ["Q"]}]), {},
        DataError, "row 1: the label 'Q' is none of those",
    ),
    "no words": (
        "token-classification", CASES["token"][1], lambda: read_records([{"tokens": [], "tags": []}]), {},
        DataError, "there are no words in 'tokens'",
    ),
    "image": (
        "image-classification", CASES["image"][1], lambda: read_records([{"image": "none.png", "label": 0}]), {},
        DataError, r"row 1: none\.png cannot be opened",
    ),
    "no twins": (
        "retrieval", CASES["retrieval"][1], plain(), {"label_column": "label"}, DataError, "no two texts have one",
    ),
    "pooling": (
        "retrieval", CASES["retrieval"][1], table, {"pooling": "last"}, OptionError, "'last'; expected mean, cls, max",
    ),
    "pooling of the folder": (
        "retrieval",
        lambda: CASES["retrieval"][1]().replace(
            files=wordpiece() | {"1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}'}
        ),
        table, {}, CheckpointError, r"1_Pooling/config.json pools by 'lasttoken'; expected .* \(--pooling\)",
    ),
    "too long": (
        "masked-lm", CASES["masked, roberta"][1], plain(), {"max_length": 36}, OptionError, "reads 2 to 35 tokens",
    ),
    "batch size": ("masked-lm", CASES["masked"][1], plain(), {"batch_size": 0}, OptionError, "batch_size is 0"),
    "limit": ("masked-lm", CASES["masked"][1], plain(), {"limit": 0}, OptionError, "limit is 0"),
    "no task": ("mask-lm", CASES["masked"][1], plain(), {}, OptionError, r"'mask-lm' \(did you mean 'masked-lm'"),
    "no option": (
        "masked-lm", CASES["masked"][1], plain(), {"label_column": "x"}, OptionError,
        "masked-lm has no option 'label_column'.*; its options are text_column, batch_size",
    ),
    "no tokenizer": ("masked-lm", MODELS["bert-mlm"], plain(), {}, CheckpointError, "no tokenizer beside its weights"),
    "broken tokenizer": (
        "masked-lm", lambda: MODELS["bert-mlm"]().replace(files={"tokenizer.json": b"{"}), plain(), {}, CheckpointError,
        "BertForMaskedLM: transformers cannot read its tokenizer",
    ),
    "no mask": ("masked-lm", CASES["causal"][1], plain(), {}, CheckpointError, "has no mask token"),
    "another vocabulary": (
        "masked-lm", small_vocabulary, plain(text="t t"), {}, CheckpointError, "gives id 24, and its .* has 9 rows",
    ),
    "no processor": (
        "image-classification", MODELS["vit-classification"], pictures, {}, CheckpointError, "no image processor",
    ),
    "no family": ("masked-lm", MODELS["sceptr"], plain(), {}, CheckpointError, "has no model_type 'sceptr'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_data_and_options_give_one_clear_error(kind: str) -> None:
    name, checkpoint, records, options, error, message = BAD[kind]
    with pytest.raises(SymfuseError, match=message) as caught:
        make_task(name, records(), checkpoint(), **options)
    assert (type(caught.value), str(caught.value).count("\n")) == (error, 0)


def test_a_module_without_the_head_is_told_so() -> None:
    with pytest.raises(IncompatibleError, match="BertModel gives no output named 'logits'"):
        measure(task("masked"), module("retrieval"))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"idx": torch.ones(2, 5, dtype=torch.long)}, "a batch of idx has neither labels nor input_ids; add labels"),
        (
            {"idx": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)},
            r"the labels have shape \[2, 4\], and the model puts out \[2, 0\] predictions",
        ),
    ],
)
def test_logits_of_the_last_token_alone_are_told(batch: dict[str, torch.Tensor], message: str) -> None:
    """In the manner of nanoGPT, which without targets puts out the logits of the last token."""

    class Last(torch.nn.Linear):
        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.one_hot(idx[:, -1:], 7).float())

    with pytest.raises(SymfuseError, match=message):
        symfuse.evaluate(Last(7, 7), symfuse.task("causal-lm", [batch], Last(7, 7)))

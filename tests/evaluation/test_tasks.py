"""The built-in tasks: their losses are those of transformers, whatever the batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

import symfuse
from contract.tiny import GPT2, MODELS, TEXT
from evaluation.task_cases import CASES, HEADS, NAMED, TEXTS, module, pictures, table, tagged, task, text
from symfuse.errors import OptionError
from symfuse.evaluation import Task, measure
from symfuse.evaluation.data import read_records
from symfuse.evaluation.tasks import TASKS, MaskedLM, make_task, task_of
from symfuse.evaluation.tasks.base import IGNORED
from symfuse.modules import live


@pytest.mark.parametrize("label", HEADS)
def test_the_loss_is_that_of_transformers(label: str) -> None:
    made, real = task(label, batch_size=4), module(label)
    losses, count, hits = [], 0, 0
    with torch.no_grad():
        for batch in made.batches:
            output = real(**{name: to_double(field) for name, field in batch.items()})
            kept = batch["labels"][:, 1:] if label == "causal" else batch["labels"]
            number = int((kept != IGNORED).sum())
            losses.append(output.loss.double() * number)
            count += number
            logits = output.logits[:, :-1] if label == "causal" else output.logits
            hits += int((logits.argmax(-1) == kept).sum())
    found = measure(made, real)
    # for language models transformers computes the loss in float32
    tolerance = {"rtol": 1e-6, "atol": 0.0} if label == "causal" else {"rtol": 1e-12, "atol": 0.0}
    torch.testing.assert_close(found.loss, (sum(losses) / count).item(), **tolerance)
    assert found.count == count
    assert found.metrics == ({} if label == "regression" else {"accuracy": hits / count})


def to_double(field: Tensor) -> Tensor:
    return field.double() if field.is_floating_point() else field


@pytest.mark.parametrize("label", CASES)
def test_the_score_depends_on_no_batch_size(label: str) -> None:
    one, seven = (measure(task(label, batch_size=size), module(label)) for size in (1, 7))
    torch.testing.assert_close(one.loss, seven.loss, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(one.metrics, seven.metrics, rtol=1e-12, atol=0.0)
    assert one.count == seven.count > 1


@pytest.mark.parametrize("label", TEXTS)
def test_padding_has_no_influence(label: str) -> None:
    made, real = task(label, batch_size=7), module(label)
    padded = []
    for batch in made.batches:
        fill = {"input_ids": 44, "labels": IGNORED}  # another id than that of the padding
        if "gpt2" in label and "sequence" in label:
            fill["input_ids"] = 60  # the head looks for the last token that is not this one
        wide = {
            name: nn.functional.pad(field, (0, 2), value=fill.get(name, 0)) if field.ndim == 2 else field
            for name, field in batch.items()
            if batch["input_ids"].shape[1] < 33
        }
        padded.append(wide or batch)
    assert any(a["input_ids"].shape != b["input_ids"].shape for a, b in zip(made.batches, padded, strict=True))
    other = type(made)(padded)
    torch.testing.assert_close(measure(other, real).loss, measure(made, real).loss, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("label", CASES)
def test_gradients_are_those_of_the_loss(label: str) -> None:
    """Along a random direction, by central differences."""
    made, real = task(label, batch_size=8, limit=8), live(CASES[label][1]()).requires_grad_(True)
    weights = list(real.parameters())
    made.totals(real, made.batches[0]).loss.backward()
    rng = torch.Generator().manual_seed(3)
    steps = [torch.randn(weight.shape, generator=rng, dtype=torch.float64) for weight in weights]
    slope = sum(
        (step * weight.grad).sum() for step, weight in zip(steps, weights, strict=True) if weight.grad is not None
    )

    def moved(by: float) -> Tensor:
        with torch.no_grad():
            for step, weight in zip(steps, weights, strict=True):
                weight.add_(step, alpha=by)
            return made.totals(real, made.batches[0]).loss

    h = 1e-6
    ahead, behind = moved(h), moved(-2 * h)
    assert abs(float(slope)) > 1e-3
    torch.testing.assert_close((ahead - behind) / (2 * h), slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", CASES)
def test_it_is_the_same_in_every_run_and_works_in_the_dtype_of_the_module(label: str) -> None:
    assert task(label).describe() == task(label).describe()
    wide = measure(task(label), module(label)).loss
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        narrow = live(CASES[label][1](), dtype)
        torch.testing.assert_close(measure(task(label), narrow).loss, wide, rtol=tolerance, atol=tolerance)


def test_batches_are_sorted_by_length_and_cut_at_what_the_model_can_read() -> None:
    lengths = [batch["input_ids"].shape[1] for batch in task("masked", batch_size=3).batches]
    assert lengths == sorted(lengths)
    assert lengths[-1] == TEXT["max_position_embeddings"]
    # positions are counted from behind the padding's id, 1
    assert task("masked, roberta").batches[-1]["input_ids"].shape[1] == TEXT["max_position_embeddings"] - 2
    assert max(batch["input_ids"].shape[1] for batch in task("pair", max_length=9).batches) == 9
    assert "token_type_ids" in task("pair").batches[0]
    assert "token_type_ids" not in task("causal").batches[0]


def by_row(made: Task) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The examples, without padding, whatever their batch."""
    found = set()
    for batch in made.batches:
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True):
            found.add((tuple(ids[mask].tolist()), tuple(labels[mask].tolist())))
    return found


def test_masks_depend_on_the_row_and_the_seed_alone() -> None:
    first = by_row(task("masked", batch_size=1))
    assert first == by_row(task("masked", batch_size=7))
    assert by_row(task("masked", limit=6)) < first
    assert len(by_row(task("masked", limit=6))) == 6
    other = by_row(task("masked", seed=1))
    assert len(other & first) < len(first) / 2


def test_masks_are_in_the_shares_of_bert() -> None:
    long = read_records([{"text": text(torch.Generator().manual_seed(i), 18)} for i in range(400)])
    made = make_task("masked-lm", long, CASES["masked"][1]())
    ids, labels = (torch.cat([b[name].flatten() for b in made.batches]) for name in ("input_ids", "labels"))
    special = torch.isin(ids, torch.tensor([0, 2, 3]))
    predicted = labels != IGNORED
    assert not bool((predicted & special).any())
    kept, masked = (ids == labels)[predicted], (ids == 4)[predicted]
    shares = torch.stack([predicted[~special].double().mean(), masked.double().mean(), kept.double().mean()])
    torch.testing.assert_close(shares, torch.tensor([0.15, 0.8, 0.1025]).double(), rtol=0.0, atol=0.02)
    replaced = ids[predicted][~masked & ~kept]
    assert int(replaced.min()) >= 5
    assert int(replaced.max()) <= 44


def test_text_is_cut_into_windows_without_padding(tmp_path: Path) -> None:
    lines = [row["text"] for row in table().rows]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    checkpoint = CASES["causal"][1]()
    made = make_task("causal-lm", read_records(path), checkpoint, max_length=10, batch_size=4)
    assert all(bool(batch["attention_mask"].all()) for batch in made.batches)
    widths = [batch["input_ids"].shape[1] for batch in made.batches]
    joined = torch.cat([batch["input_ids"].flatten() for batch in made.batches])
    library = Tokenizer.from_str(checkpoint.companions()["tokenizer.json"].decode())
    assert joined.tolist() == library.encode("\n".join(lines)).ids
    assert (set(widths[:-1]), widths[-1]) == ({10}, len(joined) % 10)
    assert measure(made, module("causal")).count == sum(batch["input_ids"][:, 1:].numel() for batch in made.batches)
    few = make_task("causal-lm", read_records(path), checkpoint, max_length=10, limit=3)
    assert sum(len(batch["input_ids"]) for batch in few.batches) == 3


def test_only_the_first_token_of_a_word_carries_its_tag() -> None:
    (batch,) = make_task(
        "token-classification",
        read_records([{"tokens": ["abc", "d", "ef"], "tags": ["B-x", 0, "I-z"]}]),
        CASES["token"][1](),
    ).batches
    assert batch["labels"].tolist() == [[IGNORED, 1, IGNORED, IGNORED, 0, 6, IGNORED, IGNORED]]
    assert measure(task("token", max_length=20), module("token")).count < sum(len(r["tokens"]) for r in tagged().rows)


def test_labels_are_names_or_numbers() -> None:
    rows = [{"text": "a b", "label": value} for value in ("I-z", 6, "6", 6.0, "O", "0", False)]
    (batch,) = make_task("sequence-classification", read_records(rows), CASES["sequence"][1](), batch_size=9).batches
    assert batch["labels"].tolist() == [6, 6, 6, 6, 0, 0, 0]


def test_a_decoder_without_padding_reads_one_text_at_a_time() -> None:
    config = transformers.GPT2Config(**GPT2 | NAMED, pad_token_id=None, architectures=["GPT2ForSequenceClassification"])
    checkpoint = CASES["sequence, gpt2"][1]().replace(config=config.to_dict())
    made = make_task("sequence-classification", table(), checkpoint)
    assert {len(batch["labels"]) for batch in made.batches} == {1}
    torch.testing.assert_close(
        measure(made, live(checkpoint)).loss,
        measure(task("sequence, gpt2"), module("sequence, gpt2")).loss,
        rtol=1e-12,
        atol=0.0,
    )


def test_tasks_are_inferred_from_the_class_in_the_config() -> None:
    expected = {
        "causal": "causal-lm", "masked": "masked-lm", "sequence": "sequence-classification",
        "token, gpt2": "token-classification", "image": "image-classification", "retrieval": "retrieval",
    }  # fmt: skip
    assert {label: task_of(CASES[label][1]()) for label in expected} == expected
    assert set(TASKS) == set(expected.values())
    assert isinstance(make_task(None, table(), CASES["masked"][1]()), MaskedLM)
    for label in ("bert", "vit", "bert-question", "torch-relu-post"):  # a base model with no tokenizer is none of text
        with pytest.raises(OptionError, match=r"for which there is no task; choose one of causal-lm, .* \(--task\)"):
            task_of(MODELS[label]())


def test_a_folder_and_its_task_from_end_to_end(tmp_path: Path) -> None:
    checkpoint = CASES["sequence"][1]()
    opened = symfuse.open(checkpoint.save(tmp_path / "model"))
    (tmp_path / "d.csv").write_text("text,label\na b,I-z\nc,O\n", encoding="utf-8")
    made = make_task(None, read_records(tmp_path / "d.csv"), opened)
    assert made.describe()["data"] == str(tmp_path / "d.csv")
    torch.testing.assert_close(
        symfuse.evaluation.evaluate(opened, made, dtype=torch.float64).loss,
        measure(made, module("sequence")).loss,
        rtol=1e-12,
        atol=0.0,
    )


def test_no_code_of_the_checkpoint_is_asked_for() -> None:
    checkpoint = CASES["masked"][1]()
    config = dict(checkpoint.config) | {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    made = make_task("masked-lm", table(), checkpoint.replace(config=config))
    assert made.describe() == task("masked").describe()


def test_image_folders_and_data_sets_with_images(tmp_path: Path) -> None:
    import datasets

    rows = pictures().rows
    for i, row in enumerate(rows):
        (tmp_path / row["label"]).mkdir(exist_ok=True)
        row["image"].save(tmp_path / row["label"] / f"{i}.png")
    expected = measure(task("image"), module("image"))
    for source in (tmp_path, datasets.Dataset.from_list([dict(row) for row in rows])):
        made = make_task("image-classification", read_records(source), CASES["image"][1]())
        found = measure(made, module("image"))
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0.0)
        assert (found.metrics, found.count) == (expected.metrics, expected.count)

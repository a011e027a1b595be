"""The studies of Verma & Elbayad 2024: what their ways of matching move, what they measure, the tasks by the letter."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import corpora
import domains
import finetune
import letters
import numpy as np
import pytest
import torch
import verma_data
import verma_table1
import verma_table2
from config import Config
from scipy.optimize import linear_sum_assignment
from study import study_named
from verma import PLAIN, Permuted

import symfuse
from symfuse.io import Checkpoint

TINY = Path(__file__).parent / "tiny.yml"
HEADS, SIZE = 2, 6  # of tiny.yml's BERT
LAYER = "bert.encoder.layer.{}."


@pytest.fixture(scope="module", autouse=True)
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the texts of tiny.yml and a cache of its own, to be in."""
    folder, rng = tmp_path_factory.mktemp("verma"), random.Random(0)
    (folder / "plays").mkdir()
    for part in ("train", "match", "test"):
        (folder / "plays" / f"{part}.txt").write_text("".join(rng.choices("to be or not", k=2000)), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SYMFUSE_CACHE", str(folder / "cache"))
        yield folder


def study(name: str) -> Permuted:
    found = study_named(name, Config.read(str(TINY)))
    assert isinstance(found, Permuted)
    return found


@cache
def case(name: str) -> tuple[Permuted, tuple[Checkpoint, Checkpoint], dict[str, Any]]:
    """A study with the models of its first pair and what is heard."""
    found = study(name)
    pair = found.pair(next(found.parts()))
    return found, pair.models, found.for_activations(pair, 2)


def changed(source: Checkpoint, moved: Checkpoint) -> set[str]:
    return {name for name in source if not torch.equal(source[name], moved[name])}


@pytest.mark.parametrize("name", ["verma_table1", pytest.param("verma_table2", marks=pytest.mark.slow)])
def test_ways_without_variants_keep_the_function(name: str) -> None:
    found, models, heard = case(name)
    for way in found.ways_of("bert"):
        moved = found.aligned(way, models, heard)
        if way != PLAIN:
            assert changed(models[0], moved), way
        if not found.variants(way):
            assert symfuse.verify(models[0], moved).equal, way


def test_ignoring_heads_changes_the_function() -> None:
    found, models, heard = case("verma_table1")
    assert not symfuse.verify(models[0], found.aligned(verma_table1.IGNORED, models, heard)).equal


def test_feed_forward_and_residual_alone_move_nothing_else() -> None:
    found, models, heard = case("verma_table1")
    names = changed(models[0], found.aligned(verma_table1.FFN, models, heard))
    assert names
    assert all("intermediate.dense" in name or ".output.dense.weight" in name for name in names)
    assert not any("attention" in name for name in names)
    found, models, heard = case("verma_table2")
    moved = found.aligned(verma_table2.ALONE["all"], models, heard)
    for name in (LAYER.format(0) + "attention.self.query.bias", LAYER.format(1) + "intermediate.dense.bias"):
        assert torch.equal(moved[name], models[0][name])  # of spaces that are not the stream


def heads_of(source: Checkpoint, moved: Checkpoint, layer: int) -> list[int]:
    """Of each head of the moved model from which head of the source each unit of its values comes."""
    name = LAYER.format(layer) + "attention.self.value.weight"
    found = [next(i for i, row in enumerate(source[name]) if torch.equal(row, unit)) for unit in moved[name]]
    assert sorted(found) == list(range(HEADS * SIZE))
    return [i // SIZE for i in found]


def test_heads_by_index_keep_their_order_and_heads_ignored_mix() -> None:
    found, models, heard = case("verma_table1")
    orders = {
        way: [heads_of(models[0], found.aligned(way, models, heard), layer) for layer in range(2)]
        for way in (verma_table1.INDEX, verma_table1.IGNORED, verma_table1.AWARE)
    }
    kept = [0] * SIZE + [1] * SIZE
    assert orders[verma_table1.INDEX] == [kept, kept]
    assert all(order in (kept, kept[::-1]) for order in orders[verma_table1.AWARE])  # whole heads
    assert any(order not in (kept, kept[::-1]) for order in orders[verma_table1.IGNORED])


def test_neurons_are_assigned_by_pearsons_correlation() -> None:
    """Written out: what the second layer's neurons do on all windows, np.corrcoef and SciPy."""
    found, models, heard = case("verma_table1")
    acts = []
    for model in models:
        module, kept = symfuse.to_module(model), list[torch.Tensor]()
        module.get_submodule(LAYER.format(1) + "intermediate").register_forward_hook(
            lambda *found, kept=kept: kept.append(found[2].detach().flatten(0, 1))
        )
        with torch.no_grad():
            for batch in heard["data"]:
                module(**batch)
        acts.append(torch.cat(kept).double().numpy())
    n = acts[0].shape[1]
    between = np.corrcoef(acts[1].T, acts[0].T)[:n, n:]  # anchor × source
    rows, index = linear_sum_assignment(between, maximize=True)
    moved, name = found.aligned(verma_table1.FFN, models, heard), LAYER.format(1) + "intermediate.dense.weight"
    assert torch.equal(moved[name], models[0][name][index[np.argsort(rows)]])
    assert not np.array_equal(index, np.arange(n))


@pytest.mark.parametrize("way", [verma_table1.AWARE, verma_table1.IGNORED])
def test_the_barrier_is_over_the_models_as_they_are(way: str) -> None:
    """The path written out; a moved model that is another function does not lower what it is compared with."""
    found, models, heard = case("verma_table1")
    pair = found.pair(next(found.parts()))
    moved = found.aligned(way, models, heard)
    row = found.path(pair, models, moved, found.variants(way))
    task, module = pair.tasks("test")[0], copy.deepcopy(symfuse.to_module(models[1]))
    ends = [task(symfuse.to_module(model)).loss for model in models]
    losses = []
    for share in (0.0, 0.5, 1.0):
        mixed = {name: (1 - share) * models[1][name] + share * moved[name] for name in moved}
        module.load_state_dict(mixed, strict=False)
        module.tie_weights()
        losses.append(task(module.eval()).loss)
    assert row["curve"][1][1] == pytest.approx(losses[1], abs=1e-5)
    assert row["above"] == pytest.approx(max(losses) - sum(ends) / 2, abs=1e-5)
    assert row["change"] == pytest.approx(losses[2] - ends[0], abs=1e-5)


def test_rows_are_cut_from_batches_one_after_the_other() -> None:
    batches = [{"x": torch.arange(4 * i, 4 * i + 4)} for i in range(3)]
    assert [batch["x"].tolist() for batch in verma_data.cut(batches, 1, 6)] == [[4, 5, 6, 7], [8, 9]]
    assert [batch["x"].tolist() for batch in verma_data.cut(batches, 2, 5)] == [[8, 9, 10, 11], [0]]
    assert len(verma_data.cut(batches, 0, 100)) == 3


def brown(genre: str) -> domains.Rows:
    """Some documents in the place of the corpus."""
    rng = random.Random(genre)
    for number in range(3):
        for _ in range(12):
            words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(8)]
            yield f"{genre}-{number}", {"tokens": [*words, "."], "tags": ["NOUN", "VERB"] * 4 + ["PUNCT"]}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(domains, "brown", brown)
    monkeypatch.setattr(letters, "SIZES", {"test": 20, "match": 10, "train": 60})
    monkeypatch.setenv("SYMFUSE_CACHE", str(tmp_path))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", letters.TASKS)
def test_tasks_by_the_letter_have_windows_and_share_no_document(name: str) -> None:
    import csv

    task, documents = letters.TASKS[name], dict[str, str]()
    for genre in letters.GENRES:
        for document, row in brown(genre):
            documents[document] = documents.get(document, "") + " ".join(row["tokens"]) + " "
    seen: dict[str, set[str]] = {}
    for split, size in letters.SIZES.items():
        with task.file("letters", split).open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        assert len(rows) == size
        assert {row["label"] for row in rows} <= set(task.labels)
        assert all(len(row["text"]) == letters.LENGTH for row in rows)
        plain = [row["text"] for row in rows if row["label"] in ("together", "as it was", "NOUN", "VERB")]
        seen[split] = {name for name, text in documents.items() if any(window in text for window in plain)}
    assert not seen["test"] & (seen["train"] | seen["match"])


@pytest.mark.usefixtures("small")
def test_labels_of_windows_are_true() -> None:
    middle = letters.LENGTH // 2
    tags: dict[str, set[str]] = {}
    for genre in letters.GENRES:
        for _, row in brown(genre):
            for word, tag in zip(row["tokens"], row["tags"], strict=True):
                tags.setdefault(word, set()).add(tag)
    for _, row in letters._pos():
        text = row["text"]
        start = text.rfind(" ", 0, middle + 1) + 1
        word = text[start:].split(" ")[0]
        assert row["label"] in tags[word], row
    for _, row in letters._ends("end"):
        assert row["text"][middle] == " "
    for document, row in letters._swapped():
        whole = " ".join(" ".join(one["tokens"]) for name, one in brown(document.split("-")[0]) if name == document)
        assert (row["text"] in whole) or row["label"] == "swapped"


def test_each_seed_has_its_base_and_all_have_one_head() -> None:
    config = Config.read(str(TINY))
    tuned = config.tune("words")
    assert tuned.of_seeds
    assert not finetune.tuned("x", {"x": {"base": "minilm", "domains": "pos"}}).of_seeds
    models = [dict(tuned._start(seed).named_parameters()) for seed in (0, 1)]
    word = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(models[0][word], models[1][word])
    trained = symfuse.open(config.family("bert").kind.trained(1))  # type: ignore[attr-defined]
    assert torch.equal(models[1][word], trained[word])
    for name in ("classifier.weight", "bert.pooler.dense.weight"):
        assert torch.equal(models[0][name], models[1][name])
        assert models[0][name].std() > 0
    hub = finetune.tuned("x", {"x": {"base": "some/model-{seed}", "domains": "pos"}})
    assert hub.of_seeds
    assert hub.start(3) == "some/model-3"


def test_the_tokenizer_reads_letters_as_the_models_were_trained(away: Path) -> None:
    from transformers import AutoTokenizer

    folder = Path(Config.read(str(TINY)).tune("words").start(0))
    found = AutoTokenizer.from_pretrained(folder)
    text = "To be,\n{or} "
    expected = [
        corpora.ALPHABET.find(letter) if letter in corpora.ALPHABET else corpora.ALPHABET.index(" ") for letter in text
    ]
    assert found(text)["input_ids"] == expected
    assert json.loads((folder / "config.json").read_text("utf-8"))["pad_token_id"] == len(corpora.ALPHABET)

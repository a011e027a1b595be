"""What experiments are trained and measured on, and the models that are trained there."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpora
import families
import finetune
import pytest
import torch
import train
import yaml
from domains import Domains

import symfuse
from symfuse.errors import CheckpointError, DataError, OptionError

TINY = Path(__file__).parent / "tiny.yml"


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SYMFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def vit() -> train.Kind:
    return train.kinds(TINY)["vit"]


def parquet(path: Path, count: int) -> torch.Tensor:
    """Images of random bytes, as data sets of the hub have them; what they are, [N, 3, 4, 4]."""
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    pixels = torch.randint(256, (count, 4, 4, 3), generator=torch.Generator().manual_seed(count), dtype=torch.uint8)
    found = []
    for one in pixels:
        out = io.BytesIO()
        Image.fromarray(one.numpy()).save(out, "PNG")
        found.append({"bytes": out.getvalue(), "path": None})
    parquet.write_table(pa.table({"img": found, "label": [i % 3 for i in range(count)]}), path)
    return pixels.movedim(-1, 1)


def test_images_of_parquet_files_as_the_hub_has_them(tmp_path: Path) -> None:
    whole, test = parquet(tmp_path / "train.parquet", 20), parquet(tmp_path / "test.parquet", 7)
    files = {"train": str(tmp_path / "train.parquet"), "test": str(tmp_path / "test.parquet")}
    data = {"images": files, "columns": ["img", "label"], "match": 5}
    images, labels = corpora.images(data, "test")
    assert torch.equal(images, test)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    parts = [corpora.images(data, split)[0] for split in ("match", "train")]
    assert [len(part) for part in parts] == [5, 15]
    seen = {bytes(image.numpy().tobytes()) for part in parts for image in part}
    assert seen == {bytes(image.numpy().tobytes()) for image in whole}  # all of them, none twice
    scaled = corpora.scaled(images)
    torch.testing.assert_close(scaled, images.float() / 127.5 - 1)
    assert torch.equal(corpora.scaled(scaled), scaled)


def test_text_by_the_letter_and_of_parquet_files(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "a.txt").write_text("ab\tZ", "utf-8")
    parquet.write_table(pa.table({"text": ["ab", "Z"]}), tmp_path / "a.parquet")
    data = {"text": {"train": str(tmp_path / "a.txt"), "test": str(tmp_path / "a.parquet")}}
    numbers = [corpora.ALPHABET.index(letter) for letter in "ab Z"]
    assert corpora.text(data, "train").tolist() == numbers
    assert corpora.text(data, "test").tolist() == [*numbers[:2], corpora.ALPHABET.index("\n"), numbers[3]]
    assert corpora.vocabulary(data) == len(corpora.ALPHABET)


def test_text_by_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("to be or to", "utf-8")
    data = {"text": {"train": str(tmp_path / "a.txt")}, "tokenizer": str(tmp_path)}
    assert corpora.text(data, "train").tolist() == [0, 1, 2, 0]
    assert corpora.vocabulary(data) == 3


def test_files_of_the_hub_are_fetched_as_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: asked.append((a, k)) or "/there")
    assert corpora.located("hub:owner/name/folder/file.parquet") == Path("/there")
    assert asked == [(("owner/name", "folder/file.parquet"), {"repo_type": "dataset"})]
    assert corpora.located("some/file.txt") == Path("some/file.txt")


def test_data_that_nobody_knows_are_refused() -> None:
    with pytest.raises(OptionError, match="no data are called 'letters'; there are digits, fashion"):
        corpora.images("letters", "train")


def test_a_seed_makes_a_model_and_another_seed_another(away: Path) -> None:
    first, again, other = (symfuse.open(vit().trained(seed)) for seed in (0, 0, 1))
    name = next(n for n in first if n.endswith("weight") and first[n].ndim == 2)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    kept = vit().trained(0)
    (kept / "mark").touch()
    assert (vit().trained(0) / "mark").exists()  # not trained again
    anew = replace(vit(), steps=vit().steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SYMFUSE_CACHE", str(away / "other"))
        assert torch.equal(symfuse.open(anew.trained(0))[name], first[name])


@pytest.mark.parametrize(
    "changed", [{"steps": 4}, {"rate": 2e-3}, {"data": "fashion"}, {"config": {"hidden_size": 24}}]
)
def test_another_recipe_is_another_folder(changed: dict[str, Any]) -> None:
    assert replace(vit(), **changed).folder != vit().folder
    assert replace(vit(), device="cuda", at_once=7).folder == vit().folder


def test_what_a_family_lacks_or_has_too_much_is_named() -> None:
    description = yaml.safe_load(TINY.read_text("utf-8"))["families"]["vit"]
    with pytest.raises(OptionError, match=r"families: vit: 'stepz' is not a key; there are .*steps"):
        train.Kind.of("vit", {**description, "stepz": 1}, "cpu")
    with pytest.raises(OptionError, match="families: vit: 'rate' is missing"):
        train.Kind.of("vit", {key: value for key, value in description.items() if key != "rate"}, "cpu")
    with pytest.raises(OptionError, match="no family is called 'resnet'; there are vit"):
        families.family("resnet", {"vit": description}, "cpu")
    with pytest.raises(OptionError, match="families: x: expected `class`, `hub` or `package: sceptr`, found url"):
        families.family("x", {"x": {"url": "there"}}, "cpu")
    with pytest.raises(OptionError, match="tuned: x: 'epoch' is no key"):
        finetune.tuned("x", {"x": {"base": "minilm", "domains": "pos", "epoch": 1}})
    with pytest.raises(OptionError, match="domains: there is no 'toxicity': expected sentiment, pos"):
        Domains.of("toxicity")


def test_a_published_family_is_read_by_its_pattern(away: Path) -> None:
    """The path that models of the hub take, on folders."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "to", "be", "or", "not"]
    (away / "vocab.txt").write_text("\n".join(words), "utf-8")
    for seed in (3, 4):
        torch.manual_seed(seed)
        config = BertConfig(vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                            intermediate_size=6, max_position_embeddings=16)  # fmt: skip
        BertForMaskedLM(config).save_pretrained(away / f"seed_{seed}")
        BertTokenizerFast(vocab=str(away / "vocab.txt")).save_pretrained(away / f"seed_{seed}")
    for split in ("train", "test"):
        (away / f"{split}.txt").write_text("to be or not to be\n" * 12, "utf-8")
    about = {
        "hub": str(away / "seed_{seed}"),
        "task": "masked-lm",
        "data": {split: str(away / f"{split}.txt") for split in ("train", "test")},
        "options": {"seed": 3, "batch_size": 4, "max_length": 8},
    }
    family = families.family("berts", {"berts": about}, "cpu")
    assert not torch.equal(*(family.model(s)["bert.embeddings.word_embeddings.weight"] for s in (3, 4)))
    assert symfuse.evaluate(family.model(3), family.task("test")).loss > 0
    assert len(family.training(2).batches) == 2
    heard = family.for_activations(1)["data"]
    assert len(heard) == 1
    assert "labels" not in heard[0]
    found = symfuse.match(family.model(3), to=family.model(4), axes="ffn", **family.for_activations(1))
    assert symfuse.verify(family.model(3), found(family.model(3)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": -3}, "steps: expected a whole number from 1 on, found -3"),
        ({"steps": True}, "steps: expected a whole number from 1 on, found True"),
        ({"rate": "1e-3"}, "rate: expected a number above 0 .in YAML 1.0e-3, not 1e-3., found '1e-3'"),
        ({"rate": float("inf")}, "rate: expected a number above 0 .*, found inf"),
        ({"length": 8}, "windows: of text a number of them is needed"),
    ],
)
def test_numbers_that_are_none_are_refused_before_training(changed: dict[str, Any], message: str) -> None:
    description = yaml.safe_load(TINY.read_text("utf-8"))["families"]["vit"]
    with pytest.raises(OptionError, match=f"families: vit: {message}"):
        train.Kind.of("vit", {**description, **changed}, "cpu")
    with pytest.raises(OptionError, match="tuned: x: epochs: expected a whole number from 1 on, found -1"):
        finetune.tuned("x", {"x": {"base": "minilm", "domains": "pos", "epochs": -1}})


def test_a_model_that_learned_nothing_is_not_kept(away: Path) -> None:
    """Its loss is no number."""
    wild = replace(vit(), rate=1e30)
    with pytest.raises(CheckpointError, match="vit-0: its loss is nan after training; lower its rate"):
        wild.trained(0)
    assert not list((away / "cache").rglob("*.safetensors"))


def test_classes_and_configs_that_do_not_exist_are_named(away: Path) -> None:
    with pytest.raises(OptionError, match="families: vit: transformers has no class 'ViTForNothing'"):
        replace(vit(), model="ViTForNothing").build()
    with pytest.raises(OptionError, match="families: vit: ViTForImageClassification cannot be built"):
        replace(vit(), config={"hidden_size": 7}).build()


def test_data_that_are_too_short_or_of_other_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short", "utf-8")
    data = {"text": {"test": str(tmp_path / "a.txt")}}
    with pytest.raises(DataError, match=r"a\.txt, test: 5 letters or tokens are too few for a window of 8"):
        corpora.windows(data, "test", 2, 8)
    parquet(tmp_path / "test.parquet", 2)
    images = {"images": {"test": str(tmp_path / "test.parquet")}, "columns": ["img", "fine_label"], "match": 1}
    with pytest.raises(DataError, match=r"test\.parquet: expected Parquet with the columns img and fine_label"):
        corpora.images(images, "test")


def test_other_training_data_make_another_model(tmp_path: Path) -> None:
    files = {"train": str(tmp_path / "train.txt"), "test": "hub:owner/name/test.txt"}
    kind = replace(train.kinds(TINY)["gpt2"], data={"text": files})
    folders = []
    for text in ("to be", "or not", "to be"):
        (tmp_path / "train.txt").write_text(text, "utf-8")
        folders.append(kind.folder)
    assert folders[0] == folders[2] != folders[1]


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(DataError, match="missing: there is no such file, from which the part 'train' is read"):
        corpora.text({"text": {"train": missing}}, "train")
    with pytest.raises(DataError, match="missing: there is no such file; expected Parquet with the columns img"):
        corpora.images({"images": {"train": missing}, "columns": ["img", "label"], "match": 1}, "train")

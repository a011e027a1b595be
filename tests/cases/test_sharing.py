"""Cases D07 and D11 to D14: what an output folder holds, for those who serve and share it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import symfuse
from cases.hub_server import TOKEN, Hub, serving
from command import done, run
from contract.tiny import MODELS
from symfuse import runs
from symfuse.alignment import Alignment
from symfuse.errors import OptionError, OutputError, SymfuseWarning
from symfuse.runs import FILE, alignment_file


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("a", "b")):
        MODELS["llama"](seed).to(torch.float32).save(name)
    return tmp_path


def diffusers_folder(folder: Path, seed: int, *, sharded: bool = False) -> Path:
    """As diffusers' own `save_pretrained` names its files, 0.30 and later."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"blocks.{i}.weight": torch.randn(3, 5, generator=generator) for i in range(4)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "DiTTransformer2DModel", "num_layers": 4}), "utf-8")
    stem = "diffusion_pytorch_model"
    if not sharded:
        save_file(tensors, folder / f"{stem}.safetensors")
        return folder
    names = list(tensors)
    files = {f"{stem}-0000{n}-of-00002.safetensors": names[2 * n - 2 : 2 * n] for n in (1, 2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {"total_size": 240}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


# -- D07: the name under which the library looks for weights -----------------------------------------


def test_d07_a_pipeline_of_diffusers_is_merged_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how; what it says is done, for each part, and the config gets no field that its class refuses."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("A", "B")):
        Path(name).mkdir()
        Path(name, "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline"}), "utf-8")
        Path(name, "scheduler").mkdir()
        Path(name, "scheduler", "scheduler_config.json").write_text("{}", "utf-8")
        diffusers_folder(Path(name, "unet"), seed)
        Path(name, "text_encoder").mkdir()
        MODELS["clip-text"](seed).save(Path(name, "text_encoder"), overwrite=True)
    result = run("merge", "A", "B", "-o", "out")
    assert result.exit_code == 3
    words = " ".join(result.output.split())
    assert "a pipeline of diffusers, of parts that are models of their own: text_encoder, unet." in words
    shutil.copytree("A", "COPY")
    done(*words.rpartition("such as: symfuse ")[2].split())
    done("merge", "A/text_encoder", "B/text_encoder", "-o", "COPY/text_encoder", "--overwrite")
    for part in ("unet", "text_encoder"):
        a, b, merged = (symfuse.open(f"{name}/{part}") for name in ("A", "B", "COPY"))
        assert merged.keys() == a.keys()
        assert all(torch.allclose(merged[name], (a[name] + b[name]) / 2) for name in merged)
    assert json.loads(Path("COPY/unet/config.json").read_text("utf-8")) == symfuse.open("A/unet").config


@pytest.mark.parametrize("sharded", [False, True])
def test_d07_weight_files_of_diffusers_keep_their_names(tmp_path: Path, sharded: bool) -> None:
    a, b = (diffusers_folder(tmp_path / name, seed, sharded=sharded) for seed, name in enumerate("ab"))
    assert symfuse.open(a).notes == ()
    done("merge", str(a), str(b), "-o", str(tmp_path / "one"))
    weights = load_file(tmp_path / "one/diffusion_pytorch_model.safetensors")
    first, second = (symfuse.open(folder) for folder in (a, b))
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    assert len(weights) == 4

    done("merge", str(a), str(b), "-o", str(tmp_path / "many"), "--max-shard-size", "150")
    index = json.loads((tmp_path / "many/diffusion_pytorch_model.safetensors.index.json").read_text("utf-8"))
    assert set(index["weight_map"].values()) == {
        f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)
    }
    assert not list((tmp_path / "many").glob("model*"))
    again = symfuse.open(tmp_path / "many")
    assert again.notes == ()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("config", "source", "expected"),
    [
        ({"model_type": "bert"}, "weights.safetensors", "model"),  # from_pretrained finds no other
        ({}, "pytorch_model.bin", "model"),
        ({}, "open_clip_model.safetensors", "open_clip_model"),
        ({"_class_name": "UNet2DModel"}, "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model"),
        ({"_class_name": "UNet2DModel"}, "diffusion_pytorch_model.bin", "diffusion_pytorch_model"),
    ],
)
def test_d07_the_stem_is_what_the_library_of_the_config_reads(
    tmp_path: Path, config: dict[str, str], source: str, expected: str
) -> None:
    tensors = {"blocks.0.weight": torch.arange(6.0).reshape(2, 3)}
    folder = tmp_path / "in"
    folder.mkdir()
    if source.endswith(".bin"):
        torch.save(tensors, folder / source)
    else:
        save_file(tensors, folder / source)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    symfuse.open(folder).save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", f"{expected}.safetensors"}


# -- D11: serving engines load every weight file that there is ----------------------------------------

# vllm/model_executor/model_loader/default_loader.py (_prepare_weights) takes what the first of these patterns that
# matches anything in the folder matches.
PATTERNS = ("*.safetensors", "*.bin", "*.pt")
# weight_utils.py (filter_files_not_needed_for_inference): names that end so are left out, of .bin and .pt files.
LEFT_OUT = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


def loaded_by_vllm(folder: Path) -> set[str]:
    """The names of the files that vLLM reads weights from; weight_utils.py (filter_duplicate_safetensors_files): of
    safetensors files only those that model.safetensors.index.json names, if there is one."""
    pattern = next(pattern for pattern in PATTERNS if list(folder.glob(pattern)))
    files = {path.name for path in folder.glob(pattern)}
    index = folder / "model.safetensors.index.json"
    if pattern == "*.safetensors":
        return files & set(json.loads(index.read_text("utf-8"))["weight_map"].values()) if index.is_file() else files
    return {name for name in files if not name.endswith(LEFT_OUT)}


def tensors_of(folder: Path) -> set[str]:
    return {name for file in loaded_by_vllm(folder) for name in load_file(folder / file)}


def test_d11_vllm_loads_the_weights_and_nothing_else(models: Path) -> None:
    done("merge", "a", "b", "-o", "merged", "--align", "attention,ffn", "--no-verify")
    done("align", "a", "--to", "b", "-o", "moved", "--axes", "all", "--anchor-output", "anchor", "--no-verify")
    for name in ("merged", "moved", "anchor"):
        folder = models / name
        assert tensors_of(folder) == set(symfuse.open(folder))
        assert {path.name for path in folder.rglob("*.safetensors")} == {"model.safetensors"}
    assert (models / "merged/alignment-1.symfuse").is_file()
    assert Alignment.load(models / "moved" / FILE).elements
    # The check would notice: beside the weights, under the old name, it is read too.
    (models / "moved" / FILE).rename(models / "moved/alignment.safetensors")
    assert tensors_of(models / "moved") > set(symfuse.open(models / "moved"))


def test_d11_no_extra_file_ends_as_weights_do(models: Path) -> None:
    for name in ("alignment.safetensors", "model.safetensors.index.json", "other.bin", "moments.pt"):
        with pytest.raises(OutputError, match=rf"'{name}'.*without a suffix of weight files"):
            symfuse.open("a").save("out", extra={name: b""})
        assert not Path("out").exists()


def test_d11_outputs_of_earlier_versions_are_read(models: Path) -> None:
    done("align", "a", "--to", "b", "-o", "new", "--axes", "ffn", "--no-verify")
    old = models / "old"
    (models / "new").rename(old)
    (old / FILE).rename(old / "alignment.safetensors")
    assert alignment_file(old) == old / "alignment.safetensors"

    done("report", "old", "-o", "page.html")
    assert set(symfuse.open(old)) == set(symfuse.open("a"))

    save_file({"v": torch.randn(symfuse.declare("a").sizes["residual"])}, "vector.safetensors")
    done("transport", "vector.safetensors", "--by", "old", "-o", "vector", "--axis", "residual")
    assert (models / "vector/symfuse.json").is_file()


# -- D13: the same folder from Python and from the command line ---------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_folders(ours: Path, theirs: Path) -> None:
    """All files alike, but for what only a command measures and proves."""
    one, other = files_of(ours), files_of(theirs)
    assert one.keys() == other.keys()
    documents = [json.loads(files.pop("symfuse.json")) for files in (one, other)]
    for document in documents:
        for part in (document, *document.get("alignments", ())):
            for key in ("seconds", "peak_memory", "verified"):
                part.pop(key, None)
    assert documents[0] == documents[1]
    assert one == other


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), {}),
        (("--weights", "0.3,0.7", "--dtype", "bfloat16"), {"weights": [0.3, 0.7], "dtype": torch.bfloat16}),
        (
            ("--method", "dare_ties", "--base", "1", "--set", "density=0.5", "--set", "weight=0.4", "--seed", "3"),
            {"method": "dare_ties", "base": 0, "parameters": {"density": 0.5, "weight": 0.4}, "seed": 3},
        ),
        (("--task-heads", "2"), {"heads": 1}),
    ],
)
def test_d13_merge_writes_the_same_folder(models: Path, options: tuple[str, ...], arguments: dict[str, object]) -> None:
    done("merge", "a", "b", "-o", "theirs", *options)
    symfuse.merge([symfuse.open(name, name=name) for name in "ab"], **arguments).save("ours")  # type: ignore[arg-type]
    assert_same_folders(models / "ours", models / "theirs")


def test_d13_recipes_write_the_same_folder(models: Path) -> None:
    recipe = {
        "merge_method": "linear",
        "models": [{"model": "a", "parameters": {"weight": 0.25}}, {"model": "b", "parameters": {"weight": 0.75}}],
        "align": {"axes": ["attention", "ffn"], "anchor": 2},
    }
    Path("recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    done("merge", "recipe.yml", "theirs", "--no-verify")
    symfuse.merge_recipe("recipe.yml").save("ours")
    assert_same_folders(models / "ours", models / "theirs")
    assert Path("ours/alignment-1.symfuse").is_file()
    several = "name: half\n" + Path("recipe.yml").read_text("utf-8") + "---\nmerge_method: linear\nmodels:\n"
    Path("several.yml").write_text(several + "- model: half\n- model: b\n", "utf-8")
    done("merge", "several.yml", "theirs2", "--no-verify")
    symfuse.merge_recipe("several.yml").save("ours2")
    assert_same_folders(models / "ours2", models / "theirs2")
    names = [one["name"] for one in json.loads(Path("ours2/symfuse.json").read_text("utf-8"))["inputs"]]
    assert names == ["a", "b"]  # and not the result of the first recipe, which nobody has


def test_d13_align_writes_the_same_folder(models: Path) -> None:
    done("align", "a", "--to", "b", "-o", "theirs", "--axes", "attention,ffn", "--no-verify")
    opened = [symfuse.open(name, name=name) for name in "ab"]
    symfuse.align(opened, anchor=1, axes=("attention", "ffn")).checkpoints[0].save("ours")
    assert_same_folders(models / "ours", models / "theirs")
    # An alignment by itself does not have its anchor, only the name of it: distances to it are left out.
    symfuse.match(*opened, axes=("attention", "ffn"))(opened[0]).save("applied")
    one, other = (json.loads((models / name / "symfuse.json").read_text("utf-8")) for name in ("applied", "theirs"))
    for key in ("distance", "seconds", "peak_memory"):
        other.pop(key)
    assert one == other
    assert files_of(models / "applied").keys() == files_of(models / "theirs").keys()
    done("report", "applied", "-o", "page.html")


def test_d13_a_merge_of_aligned_models_says_that_they_are(models: Path) -> None:
    moved = symfuse.align([symfuse.open(name, name=name) for name in "ab"], anchor=1, axes="ffn")
    symfuse.merge(moved.checkpoints).save("out")
    document = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert [one["name"] for one in document["inputs"]] == ["a", "b"]
    assert (document["anchor"], document["align"]["axes"]) == ("b", ["ffn"])
    assert document["alignments"][0]["distance"]["left"] < 1
    assert Alignment.load("out/alignment-1.symfuse").elements.keys() == moved.alignments[0].elements.keys()  # type: ignore[union-attr]
    card = Path("out/README.md").read_text("utf-8")
    assert "Aligned to `b` first: axes ffn." in card
    assert "not checked" in card
    # The same models as they are: no warning.
    symfuse.merge(["a", "b"]).save("plain")
    assert json.loads(Path("plain/symfuse.json").read_text("utf-8"))["alignments"] == []
    assert "Not aligned before the merge." in Path("plain/README.md").read_text("utf-8")


# -- D12: the model card ------------------------------------------------------------------------------


def card(folder: str | Path) -> tuple[dict[str, object], str]:
    """The metadata, which the hub's own library reads, and the text."""
    found = ModelCard.load(Path(folder) / "README.md")
    return found.data.to_dict(), found.text


def on_the_hub(cache: Path, hub_id: str, seed: int, licence: str) -> None:
    """A model in the cache of the hub, as a download leaves it."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = MODELS["llama-lm"](seed).to(torch.float32).save(folder / "snapshots" / ("0" * 40))
    (Path(str(snapshot)) / "README.md").write_text(f"---\nlicense: {licence}\n---\nA model.\n", "utf-8")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0" * 40, "utf-8")


@pytest.fixture
def hub_models(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(models / "cache"))
    for seed, (name, licence) in enumerate((("org/base", "apache-2.0"), ("org/chat", "apache-2.0"), ("x/y", "mit"))):
        on_the_hub(models / "cache", name, seed, licence)
    MODELS["llama-lm"](5).to(torch.float32).save("runs/checkpoint-500")
    return models


def test_d12_base_models_are_hub_ids_and_nothing_else(hub_models: Path) -> None:
    local = str(hub_models / "runs/checkpoint-500")
    done("merge", "org/base", "org/chat", local, "./runs/checkpoint-500", "-o", "out", "--method", "linear")
    data, text = card("out")
    assert data["base_model"] == ["org/base", "org/chat"]
    assert data["base_model_relation"] == "merge"
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["symfuse", "merge"]
    assert "license" not in data  # of a local model without a card nobody knows it
    assert str(hub_models) not in text
    assert "- `checkpoint-500`, weight 0.25" in text.replace("runs/", "")
    assert text.startswith("\n# org/base, org/chat")
    assert "[arXiv 2203.05482](https://arxiv.org/abs/2203.05482)" in text  # Model soups
    # In the run as data the lineage is whole: by its folders the models are found again.
    assert local in Path("out/symfuse.json").read_text("utf-8")


def test_d12_local_models_alone_have_no_base_model(models: Path) -> None:
    done("merge", "./a", str(models / "b"), "-o", "out")
    data, text = card("out")
    assert not {"base_model", "base_model_relation", "license"} & data.keys()
    assert str(models) not in text
    assert "- `a`, weight 0.5\n- `b`, weight 0.5" in text
    assert "model: a\n- model: b" in text  # the recipe


def test_d12_the_licence_is_that_of_all_or_none(hub_models: Path) -> None:
    done("merge", "org/base", "org/chat", "-o", "agreed")
    done("merge", "org/base", "x/y", "-o", "apart")
    assert card("agreed")[0]["license"] == "apache-2.0"
    assert "license" not in card("apart")[0]
    assert card("apart")[0]["base_model"] == ["org/base", "x/y"]


def test_d12_an_aligned_model_is_of_its_source(hub_models: Path) -> None:
    done("align", "org/base", "--to", "org/chat", "-o", "out", "--axes", "ffn", "--no-verify")
    data, text = card("out")
    assert data["base_model"] == ["org/base"]  # the function of which it has
    assert data["tags"] == ["symfuse"]
    assert text.startswith("\n# org/base, aligned to org/chat\n")
    assert "arxiv.org/abs/2502.00264" in text


def test_d12_sentence_transformers_find_their_library_and_task(models: Path) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for seed, name in enumerate("st"):
        folder = Path(str(MODELS["bert"](seed).save(name)))
        (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    done("merge", "s", "t", "-o", "out")
    data, _ = card("out")
    assert data["library_name"] == "sentence-transformers"
    assert data["pipeline_tag"] == "sentence-similarity"
    assert data["tags"] == ["symfuse", "merge", "sentence-transformers", "sentence-similarity", "feature-extraction"]


def test_d12_diffusers_find_theirs(tmp_path: Path) -> None:
    a, b = (diffusers_folder(tmp_path / name, seed) for seed, name in enumerate("ab"))
    done("merge", str(a), str(b), "-o", str(tmp_path / "out"))
    assert card(tmp_path / "out")[0]["library_name"] == "diffusers"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["/x/run1/checkpoint", "/x/run2/checkpoint"], ["run1/checkpoint", "run2/checkpoint"]),
        (["./base", "tuned", "runs/b", "../runs/a"], ["base", "tuned", "runs/b", "a"]),
        (["/x/base+/x/lora", "plain"], ["base+lora", "plain"]),
    ],
)
def test_d12_local_names_are_the_ends_of_paths(names: list[str], expected: list[str]) -> None:
    short = runs._short(names)
    assert [short.get(name, name) for name in names] == expected


# -- D14: what the command line warns of, Python does too ----------------------------------------------


def tokenizer(folder: str, words: list[str]) -> None:
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)


def test_d14_swapped_token_ids(models: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat"]
    for seed, name in enumerate("pq"):
        MODELS["bert-mlm"](seed).save(name)
    tokenizer("p", words)
    tokenizer("q", [*words[:5], "cat", "the", "sat"])
    shown = [line.partition("warning: ")[2] for line in done("merge", "p", "q", "-o", "o").output.splitlines()]
    swapped = next(text for text in shown if "'the'" in text or "ids" in text)
    with pytest.warns(SymfuseWarning) as found:
        merged = symfuse.merge([symfuse.open(name) for name in "pq"])
    assert swapped in [str(one.message) for one in found]
    merged.save("ours")
    assert json.loads(Path("ours/symfuse.json").read_text("utf-8"))["warnings"] == [text for text in shown if text]
    with pytest.warns(SymfuseWarning) as found:
        symfuse.merge_recipe({"merge_method": "linear", "models": [{"model": "p"}, {"model": "q"}]})
    assert swapped in [str(one.message) for one in found]
    tokenizer("q", words)
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        symfuse.merge(["p", "q"])
    assert not [one for one in quiet if "no relation in this basis" not in str(one.message)]


def test_d14_other_label_names(models: Path) -> None:
    for seed, name in enumerate("pq"):
        MODELS["bert-token"](seed).save(name)
        config = json.loads(Path(name, "config.json").read_text("utf-8"))
        config["id2label"] = {key: f"{name}{key}" for key in config["id2label"]}
        config["label2id"] = {label: int(key) for key, label in config["id2label"].items()}
        Path(name, "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.warns(SymfuseWarning, match=r"^p and q: config\.json differs in id2label"):
        symfuse.merge(["p", "q"], heads=0)
    command = done("merge", "p", "q", "-o", "o", "--task-heads", "1").output
    assert command.count("config.json differs in id2label") == 1


def test_d14_unrelated_models(models: Path) -> None:
    with pytest.warns(SymfuseWarning, match="b and a have no relation in this basis"):
        symfuse.merge(["a", "b"])
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        symfuse.merge(["a", symfuse.open("a", name="copy")])
    assert not quiet
    output = done("merge", "a", "b", "-o", "o").output
    assert output.count("have no relation in this basis") == 1  # once, and not by `warnings` too


# -- sharing: upload to the hub -------------------------------------------------------------------------


@pytest.fixture
def hub(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that is reached as the real one is."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serving() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def test_push_uploads_what_was_written(models: Path, hub: Hub) -> None:
    out = done("merge", "a", "b", "-o", "out", "--push", "org/merged", "--private").output
    assert hub.repositories["org/merged"] == files_of(models / "out")
    assert hub.private == {"org/merged"}
    assert "uploaded to " in out
    done("align", "a", "--to", "b", "-o", "moved", "--no-verify", "--push", "org/moved")
    assert hub.repositories["org/moved"] == files_of(models / "moved")
    assert FILE in hub.repositories["org/moved"]


def test_push_from_python_and_again(models: Path, hub: Hub) -> None:
    merged = symfuse.merge(["a", "b"])
    merged.push_to_hub("org/name", max_shard_size="20KB")
    first = hub.repositories["org/name"]
    assert first == files_of(models / "name")
    assert "model.safetensors.index.json" in first
    first["onnx/model.safetensors"] = first["notes.md"] = b"theirs"
    merged.push_to_hub("org/name", "again", token=TOKEN)
    # The shards and the index of the first are gone: a reader would take them for weights. What is none stays.
    assert hub.repositories["org/name"] == files_of(models / "again") | dict.fromkeys(
        ("onnx/model.safetensors", "notes.md"), b"theirs"
    )


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, "does not accept the token"), (403, "no right to write"), (404, "no such organisation"), (0, "refused")],
)
def test_push_says_why_not_and_keeps_the_folder(
    models: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int, why: str
) -> None:
    hub.refuse = status or 200
    if not status:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    result = run("merge", "a", "b", "-o", "out", "--push", "org/name")
    assert result.exit_code == 8
    assert result.stderr.startswith("symfuse: org/name on the hub: ")
    assert why in result.stderr
    assert "hf upload org/name out" in result.stderr
    assert "Traceback" not in result.output
    assert set(symfuse.open("out")) == set(symfuse.open("a"))


def test_push_that_cannot_be_is_known_before_any_work(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: str) -> str:
        result = run("merge", "a", "b", *args)
        assert result.exit_code in (2, 8)
        assert not Path("out").exists()
        return result.stderr

    assert "HF_HUB_OFFLINE is set" in refused("-o", "out", "--push", "org/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "no token" in refused("-o", "out", "--push", "org/name")
    assert "write ORG/NAME" in refused("-o", "out", "--push", "name")
    assert "--private needs --push" in refused("-o", "out", "--private")
    with pytest.raises(OutputError, match="no token"):
        symfuse.open("a").push_to_hub("org/name", "out")
    with pytest.raises(OptionError, match="memory://out is a URL"):
        symfuse.open("a").push_to_hub("org/name", "memory://out")
    assert not Path("out").exists()

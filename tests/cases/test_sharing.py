"""Cases D07 and D11 to D14: what an output folder holds, for those who serve and share it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import symfuse
from command import done
from contract.tiny import MODELS
from symfuse.alignment import Alignment
from symfuse.errors import OutputError
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
        with pytest.raises(OutputError, match=rf"'{name}'.*does not end as weights do"):
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
        for run in (document, *document.get("alignments", ())):
            for key in ("seconds", "peak memory", "verified"):
                run.pop(key, None)
    assert documents[0] == documents[1]
    assert one == other


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), {}),
        (("--weights", "0.3,0.7", "--dtype", "bfloat16"), {"weights": [0.3, 0.7], "dtype": torch.bfloat16}),
        (
            ("--method", "dare_ties", "--base", "1", "--set", "density=0.5", "--set", "weight=0.4", "--seed", "3"),
            {"method": "dare_ties", "base": 0, "density": 0.5, "weight": 0.4, "seed": 3},
        ),
        (("--heads", "2"), {"heads": 1}),
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
    for key in ("distance", "seconds", "peak memory"):
        other.pop(key)
    assert one == other
    assert files_of(models / "applied").keys() == files_of(models / "theirs").keys()
    done("report", "applied", "-o", "page.html")


def test_d13_a_merge_of_aligned_models_says_that_they_are(models: Path) -> None:
    moved = symfuse.align([symfuse.open(name, name=name) for name in "ab"], anchor=1, axes="ffn")
    symfuse.merge(moved.checkpoints).save("out")
    run = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    assert [one["name"] for one in run["inputs"]] == ["a", "b"]
    assert (run["anchor"], run["align"]["axes"]) == ("b", ["ffn"])
    assert run["alignments"][0]["distance"]["left"] < 1
    assert Alignment.load("out/alignment-1.symfuse").elements.keys() == moved.alignments[0].elements.keys()  # type: ignore[union-attr]
    card = Path("out/README.md").read_text("utf-8")
    assert "Aligned to `b` first: axes ffn." in card
    assert "not checked" in card
    # The same models as they are: nothing of that is said.
    symfuse.merge(["a", "b"]).save("plain")
    assert json.loads(Path("plain/symfuse.json").read_text("utf-8"))["alignments"] == []
    assert "Not aligned before the merge." in Path("plain/README.md").read_text("utf-8")

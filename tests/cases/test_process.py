"""Files, disk, process, end to end: a bad input or place is known before any work, and nothing is left.

What opening and writing refuse is tested in test_files.py; here it is the verb that must not start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from allocations import Allocations, counted
from recipes.llama import EMBED, llama, tensors_of, write_tokenizer
from symfuse.cli import main
from symfuse.io import open as open_checkpoint
from symfuse.merging.engine import Merged

UP = "model.layers.0.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("process")
    for seed, name in enumerate("abc"):
        llama(root / name, seed)
    open_checkpoint(root / "b").save(root / "shards", max_shard_size="60KB")
    return root


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the models and a recipe of the first two."""
    for folder in originals.iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
    write_recipe(tmp_path / "recipe.yml", "a", "b")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_recipe(path: Path, *models: str) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}
    path.write_text(json.dumps(recipe), "utf-8")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["merge", *args])


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No merged tensor may be made, but the first one of a mapping, which the type checks of the tests look at."""
    real = Merged.blocks

    def never(self: Merged, name: str) -> Iterator[torch.Tensor]:
        assert name == next(iter(self)), f"{name} was computed"
        return real(self, name)

    monkeypatch.setattr(Merged, "blocks", never)


def refused(folder: Path, code: int | None, *words: str, args: tuple[str, ...] = ("recipe.yml", "out")) -> str:
    """The command ends with that code (None: one of those for inputs) and a message with those words; the folder is
    what it was."""
    before, names = contents(folder), sorted(folder.rglob("*"))
    result = run(*args)
    assert result.exit_code in ((2, 3, 4, 5, 6) if code is None else (code,)), result.output
    for word in words:
        assert word in result.output
    assert "Traceback" not in result.output
    assert sorted(folder.rglob("*")) == names
    assert contents(folder) == before
    return result.output


# ---- inputs


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])


def lengthened(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 100)


def without_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")


def placeholder(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {UP: torch.empty(0)}
    save_file(tensors, folder / "model.safetensors")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def eight_bits(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("marker",))


def pickled(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "extra": Payload()}, folder / "pytorch_model.bin")


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "C04 head absent": (without_head, "lm_head.weight"),
    "C24 placeholder": (placeholder, UP),
    "C84 cut": (cut, "model.safetensors"),
    "C84 cut in the header": (cut_in_the_header, "model.safetensors"),
    "C84 lengthened": (lengthened, "model.safetensors"),
    "C93 quantised": (quantised, "bitsandbytes"),
    "C94 8-bit floats": (eight_bits, UP),
    "C98 dangling": (dangling, "../blobs/gone"),
    "C103 pickle": (pickled, "pytorch_model.bin"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_input_is_refused_before_any_work(place: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    damage, word = DAMAGED[case]
    damage(place / "b")
    no_work(monkeypatch)
    assert re.search(r"\bb\b", refused(place, None, word))
    assert not Path("marker").exists()


def test_c85_an_absent_shard(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = sorted((place / "shards").glob("*.safetensors"))[-1]
    last.unlink()
    write_recipe(place / "recipe.yml", "a", "shards")
    no_work(monkeypatch)
    refused(place, 3, last.name)


@pytest.mark.parametrize("how", ["wrong shard", "unknown key", "no index"])
def test_c86_an_index_that_disagrees(place: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    index = place / "shards" / INDEX
    data = json.loads(index.read_text("utf-8"))
    names = list(data["weight_map"])
    files = sorted(set(data["weight_map"].values()))
    if how == "wrong shard":
        key = next(name for name in names if data["weight_map"][name] == files[0])
        data["weight_map"][key] = files[-1]
    elif how == "unknown key":
        key = "model.nobody.weight"
        data["weight_map"][key] = files[0]
    index.write_text(json.dumps(data), "utf-8")
    write_recipe(place / "recipe.yml", "a", "shards")
    no_work(monkeypatch)
    if how == "no index":
        index.unlink()
        monkeypatch.undo()
        monkeypatch.chdir(place)
        result = run("recipe.yml", "out")  # read by their n-of-m names, and said
        assert result.exit_code == 0, result.output
        assert "note:" in result.output
        assert "index" in result.output
        return
    refused(place, 3, key)


def test_c88_layouts_and_formats_give_the_same_bytes(place: Path) -> None:
    torch_format = place / "torch"
    torch_format.mkdir()
    shutil.copy(place / "b/config.json", torch_format)
    tensors = load_file(place / "b/model.safetensors")
    parts = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        torch.save(part, torch_format / f"pytorch_model-0000{i}-of-00002.bin")
        weight_map |= dict.fromkeys(part, f"pytorch_model-0000{i}-of-00002.bin")
    (torch_format / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    results = []
    for second in ("b", "shards", "torch"):
        write_recipe(place / "recipe.yml", "a", second)
        assert run("recipe.yml", f"out-{second}").exit_code == 0
        results.append((place / f"out-{second}/model.safetensors").read_bytes())
    assert results[0] == results[1] == results[2]


def test_c89_two_formats_side_by_side(place: Path) -> None:
    assert run("recipe.yml", "alone").exit_code == 0
    zeros = {name: torch.zeros_like(t) for name, t in load_file(place / "b/model.safetensors").items()}
    torch.save(zeros, place / "b/pytorch_model.bin")
    result = run("recipe.yml", "out")
    assert result.exit_code == 0, result.output
    assert "pytorch_model.bin" in result.output
    assert (place / "out/model.safetensors").read_bytes() == (place / "alone/model.safetensors").read_bytes()


def test_c92_files_without_metadata(place: Path) -> None:
    save_file(load_file(place / "b/model.safetensors"), place / "b/model.safetensors")  # which writes none
    assert run("recipe.yml", "out", "--max-shard-size", "60KB").exit_code == 0
    files = list((place / "out").glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header["__metadata__"]["format"] == "pt"


# ---- places


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp())
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        if not mounted:
            pytest.skip("mounting a small file system is not permitted")
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        place.rmdir()


def test_c95_disk_full(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for half the model; and what is on it already stays."""
    size = (place / "a/model.safetensors").stat().st_size
    with small_disk(str(size // 2)) as disk:
        (disk / "mine").write_text("x", "utf-8")
        with monkeypatch.context() as patched:
            no_work(patched)
            result = run("recipe.yml", str(disk / "out"))
        assert result.exit_code == 8
        assert "MB free" in result.output
        monkeypatch.setattr("symfuse.io.writer.check_space", lambda *_: None)
        result = run("recipe.yml", str(disk / "out"))  # it fills up in spite of the check
        assert result.exit_code == 8
        assert "No space left" in result.output
        assert [path.name for path in disk.iterdir()] == ["mine"]


def test_c95_the_room_is_looked_at_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=50_000))
    no_work(monkeypatch)
    refused(place, 8, "needs", "0.1 MB free")


@pytest.mark.parametrize("target", ["a", "./b/../a", "link", "parent/b", "b/inside", "."])
def test_c97_the_output_is_an_input(place: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (place / "link").symlink_to(place / "a")
    (place / "parent").symlink_to(place)
    no_work(monkeypatch)
    refused(place, 8, "the input", args=("recipe.yml", target, "--overwrite"))


def test_c97_inputs_of_adapters_and_earlier_recipes_are_inputs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what the last recipe names."""
    one = {
        "name": "one",
        "merge_method": "linear",
        "models": [{"model": "a"}, {"model": "b"}],
        "parameters": {"weight": 1},
    }
    two = {"merge_method": "linear", "models": [{"model": "one"}, {"model": "c"}], "parameters": {"weight": 1}}
    (place / "recipe.yml").write_text(f"{json.dumps(one)}\n---\n{json.dumps(two)}\n", "utf-8")
    no_work(monkeypatch)
    for target in ("a", "b", "c"):
        refused(place, 8, "the input", args=("recipe.yml", target, "--overwrite"))


def test_c98_link_farms(place: Path) -> None:
    """The layout of a hub cache, and an output that is a link into it."""
    assert run("recipe.yml", "plain").exit_code == 0
    blobs, snapshot = place / "cache/blobs", place / "cache/snapshots/1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted((place / "b").iterdir())):
        path.rename(blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    (place / "b").rmdir()
    write_recipe(place / "recipe.yml", "a", "cache/snapshots/1234")
    before = contents(blobs)
    assert run("recipe.yml", "out").exit_code == 0
    assert (place / "out/model.safetensors").read_bytes() == (place / "plain/model.safetensors").read_bytes()
    assert not any(path.is_symlink() for path in (place / "out").iterdir())
    (place / "link").symlink_to(blobs)
    refused(place, 8, args=("recipe.yml", "link", "--overwrite"))
    assert contents(blobs) == before


@pytest.mark.parametrize("name", ["модель", "模型", "🦙", "with space", 'it\'s "quoted"', "-rf", "$(touch x)", "a+b@c"])
def test_c99_odd_paths(place: Path, name: str) -> None:
    assert run("recipe.yml", "plain").exit_code == 0
    (place / "a").rename(place / name)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": {"model": {"path": name}}}, {"model": "b"}],
        "parameters": {"weight": 0.5},
    }
    odd = place / f"{name}.yml"
    odd.write_text(json.dumps(recipe, ensure_ascii=False), "utf-8")
    target = f"{name} out"
    result = run("--", odd.name, target) if name.startswith("-") else run(odd.name, target)
    assert result.exit_code == 0, result.output
    assert (place / target / "model.safetensors").read_bytes() == (place / "plain/model.safetensors").read_bytes()
    text = (place / target / "symfuse.json").read_text("utf-8")
    assert json.loads(text)["models"] == [name, "b"]
    assert name in json.loads(text)["inputs"][0]["name"]
    assert not (place / "x").exists()


@pytest.mark.parametrize("target", ["file", "file/below", "locked/out", "locked/new/out"])
def test_c100_places_that_cannot_be_written(place: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (place / "file").write_text("mine", "utf-8")
    locked = place / "locked"
    locked.mkdir()
    real = os.access  # whoever runs the tests: root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, *a, **k: Path(path) != locked and real(path, *a, **k))
    no_work(monkeypatch)
    refused(place, 8, args=("recipe.yml", target, "--overwrite"))


def test_c101_the_folder_is_complete(place: Path) -> None:
    write_tokenizer(place / "a", ["<unk>", "<s>", "</s>", "merge", "models"], template="{{ messages }}")
    (place / "a/preprocessor_config.json").write_text('{"size": 3}', "utf-8")
    (place / "a/modeling_custom.py").write_text("raise SystemExit('never run')", "utf-8")
    config = json.loads((place / "a/config.json").read_text("utf-8"))
    config["auto_map"] = {"AutoModel": "modeling_custom.X"}
    (place / "a/config.json").write_text(json.dumps(config), "utf-8")
    result = run("recipe.yml", "out")
    assert result.exit_code == 0, result.output
    assert "auto_map" in result.output
    out = place / "out"
    assert list(out.glob("*.py")) == []
    assert "auto_map" not in json.loads((out / "config.json").read_text("utf-8"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (place / "a" / name).read_bytes(), name
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert model.generation_config.max_new_tokens == 7
    assert transformers.AutoTokenizer.from_pretrained(out)("merge models")["input_ids"] == [3, 4]


def test_c104_code_of_a_checkpoint_is_never_run(place: Path) -> None:
    """Models of nobody's type are merged by names and shapes, with a notice; align is refused for them."""
    for name in "ab":
        config = json.loads((place / name / "config.json").read_text("utf-8"))
        config |= {"model_type": "nobody_knows", "auto_map": {"AutoConfig": "configuration_x.X"}}
        (place / name / "config.json").write_text(json.dumps(config), "utf-8")
        (place / name / "configuration_x.py").write_text("import os; os.mkdir('marker')", "utf-8")
    result = run("recipe.yml", "out")
    assert result.exit_code == 0, result.output
    assert "note:" in result.output
    a, b, found = (tensors_of(place / name) for name in ("a", "b", "out"))
    torch.testing.assert_close(found[EMBED], (a[EMBED] + b[EMBED]) / 2, rtol=2**-24, atol=1e-9)
    assert json.loads((place / "out/config.json").read_text("utf-8"))["model_type"] == "nobody_knows"
    shutil.rmtree(place / "out")
    recipe = json.loads((place / "recipe.yml").read_text("utf-8")) | {"align": {"axes": "all"}}
    (place / "recipe.yml").write_text(json.dumps(recipe), "utf-8")
    result = run("recipe.yml", "out")
    assert result.exit_code not in (0, 1)
    assert "align" in result.output
    assert not (place / "marker").exists()
    assert not (place / "out").exists()


# ---- memory, interruptions


TENSOR = 1024 * 1536


def of_layers(root: Path, layers: int) -> Path:
    """Three models with a tensor of 3 MB in each layer."""
    rng = torch.Generator().manual_seed(0)
    for name in "abc":
        (root / name).mkdir(parents=True)
        tensors = {f"layers.{i}.w": torch.rand(1024, 1536, generator=rng).bfloat16() for i in range(layers)}
        save_file(tensors, root / name / "model.safetensors")
        config = {"model_type": "plain", "num_hidden_layers": layers}
        (root / name / "config.json").write_text(json.dumps(config), "utf-8")
    return root


@pytest.mark.parametrize("method", ["linear", pytest.param("ties", marks=pytest.mark.slow)])
def test_c105_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A thread holds a few blocks, however many tensors there are."""
    recipe: dict[str, Any] = {"merge_method": method, "models": [{"model": m} for m in "abc"]}
    recipe["parameters"] = {"weight": 1} | ({"density": 0.3} if method == "ties" else {})
    recipe |= {"base_model": "a"} if method == "ties" else {}
    peaks = {}
    for layers in (1, 4, 8):  # the first makes what is made once
        monkeypatch.chdir(of_layers(tmp_path / str(layers), layers))
        Path("recipe.yml").write_text(json.dumps(recipe), "utf-8")
        with counted() if layers > 1 else nullcontext(Allocations()) as memory:
            result = run("recipe.yml", "out", "-q", "--no-direct", "--threads", "1")
        assert result.exit_code == 0, result.output
        assert Path("out/model.safetensors").stat().st_size > layers * 2 * TENSOR
        peaks[layers] = memory.peak
    assert peaks[8] < peaks[4] + TENSOR / 5
    with counted() as memory:  # where it would grow: one model in float32, of the three
        assert len([tensor.float() for tensor in open_checkpoint("a").values()]) == 8
    assert memory.peak > peaks[8]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> list[str]:
    """The merge fails at that tensor; the list of those that are asked for, but for the first one (see `no_work`)."""
    real, asked = Merged.blocks, []

    def blocks(self: Merged, tensor: str) -> Iterator[torch.Tensor]:
        if tensor != next(iter(self)):
            asked.append(tensor)
        if tensor == name:
            raise error
        return real(self, tensor)

    monkeypatch.setattr(Merged, "blocks", blocks)
    return asked


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory")], ids=["interrupt", "error"])
@pytest.mark.parametrize("resume", [True, False])
def test_resume_goes_on_after_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch, resume: bool, error: BaseException
) -> None:
    assert run("recipe.yml", "plain").exit_code == 0
    names = {path.name for path in place.iterdir()}
    flags = ["--threads", "1", *(["--resume"] if resume else [])]
    with monkeypatch.context() as patched:
        first = interrupt_at(patched, "model.norm.weight", error)
        assert run("recipe.yml", "out", *flags).exit_code not in (0,)
    left = {path.name for path in place.iterdir()} - names
    assert not (place / "out").exists()
    assert len(left) == (1 if resume else 0)
    with monkeypatch.context() as patched:
        second = interrupt_at(patched, "", error)
        assert run("recipe.yml", "out", *flags).exit_code == 0
    everything = tensors_of(place / "out")
    others = len(everything) - 1
    assert len(second) == (others - len(first) + 1 if resume else others)
    assert "model.norm.weight" in second
    assert (place / "out/model.safetensors").read_bytes() == (place / "plain/model.safetensors").read_bytes()
    assert {path.name for path in place.iterdir()} == names | {"out"}


def test_resume_with_another_recipe_starts_over(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(patched, "model.norm.weight", KeyboardInterrupt())
        assert run("recipe.yml", "out", "--resume", "--threads", "1").exit_code != 0
    write_recipe(place / "recipe.yml", "a", "c")
    assert run("recipe.yml", "out", "--resume").exit_code == 0
    assert run("recipe.yml", "plain").exit_code == 0
    assert (place / "out/model.safetensors").read_bytes() == (place / "plain/model.safetensors").read_bytes()
    assert not list(place.glob(".out*"))


def test_a_folder_that_is_used_again_has_no_old_shards(place: Path) -> None:
    assert run("recipe.yml", "out", "--max-shard-size", "30KB").exit_code == 0
    assert len(list((place / "out").glob("model-*.safetensors"))) > 2
    result = run("recipe.yml", "out")
    assert result.exit_code == 8
    assert "exists" in result.output
    assert run("recipe.yml", "out", "--overwrite").exit_code == 0
    assert [path.name for path in (place / "out").glob("*.safetensors*")] == ["model.safetensors"]
    _, report = transformers.AutoModelForCausalLM.from_pretrained(place / "out", output_loading_info=True)
    assert not any(report.values()), report

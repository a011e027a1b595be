"""D46–D51: what users of mergekit type. Recipes are run by mergekit itself too, where it is installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

import symfuse
from command import done, run
from contract.tiny import MODELS
from recipes.llama import COMMON, llama, randomise, tensors_of, write_tokenizer
from symfuse.alignment import random_alignment
from symfuse.architectures import ARCHITECTURES
from symfuse.cli.mergekit import OF_EXTRACTION, OF_MERGES
from symfuse.errors import IncompatibleError, OptionError
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.recipes import parse_recipe
from symfuse.rewriting import canonical
from symfuse.verification import verify

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
DARE = """
merge_method: dare_ties
base_model: a
models: [{model: b, parameters: {weight: 0.5, density: 0.5}}]
"""


def gemma3() -> transformers.PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
        vision_config={**vision, "num_hidden_layers": 2, "vision_use_head": False}, mm_tokens_per_image=4,
        image_token_index=60, boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen2_vl() -> transformers.PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **IDS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen25_vl() -> transformers.PreTrainedModel:
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE}, vision_config={**vision, "patch_size": 4}, **IDS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


VISION_MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gemma3": gemma3, "qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen25_vl,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kit")
    for seed, name in enumerate("abc"):
        llama(root / name, seed)
    for name, make in VISION_MODELS.items():
        for seed in range(2):
            model = make()
            randomise(model, seed)
            model.save_pretrained(root / f"{name}{seed}")
            if name == "gemma3":  # as it is called on the hub, and in mergekit
                file = root / f"{name}{seed}" / "model.safetensors"
                old = {k.replace("vision_tower.", "vision_tower.vision_model."): t for k, t in load_file(file).items()}
                save_file(old, file, {"format": "pt"})
    return root


@pytest.fixture(autouse=True)
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in models.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)


def peer(module: str) -> Any:
    """A module of mergekit."""
    return pytest.importorskip(module, reason="mergekit is not installed")


def mergekit(recipe: dict[str, Any], out: str, **options: Any) -> dict[str, torch.Tensor]:
    """What mergekit itself makes of a recipe."""
    config = peer("mergekit.config")
    merge, kinds = peer("mergekit.merge"), peer("mergekit.options")
    how = kinds.MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True, **options)
    merge.run_merge(config.MergeConfiguration.model_validate(recipe), out, how)
    return tensors_of(Path(out))


def ours(recipe: dict[str, Any], out: str, *options: str) -> dict[str, torch.Tensor]:
    Path("recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    done("merge", "recipe.yml", out, *options)
    return tensors_of(Path(out))


# ---- D46: the names of modules


def parts(name: str, weights: dict[str, float]) -> dict[str, Any]:
    return {
        module: {"models": [{"model": f"{name}0", "parameters": {"weight": weight}},
                            {"model": f"{name}1", "parameters": {"weight": 1 - weight}}]}
        for module, weight in weights.items()
    }  # fmt: skip


@pytest.mark.parametrize("first", ["text_decoder", "vision_tower"])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_d46_modules_by_mergekits_names(name: str, first: str) -> None:
    weights = {"text_decoder": 0.25, "vision_tower": 0.75, "multi_modal_projector": 0.5}
    modules = parts(name, {first: weights[first]} | weights)  # the head is the decoder's, whichever comes first
    found = ours({"merge_method": "linear", "modules": modules}, "out")
    a, b = (tensors_of(Path(f"{name}{seed}")) for seed in range(2))
    projector = ("multi_modal_projector.", "visual.merger.")
    towers = ("vision_tower.", "visual.")
    assert found.keys() == a.keys()
    for tensor, value in found.items():
        part = "multi_modal_projector" if tensor.startswith(projector) else "vision_tower"
        part = part if tensor.startswith((*projector, *towers)) else "text_decoder"
        expected = weights[part] * a[tensor] + (1 - weights[part]) * b[tensor]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6, msg=lambda m, t=tensor: f"{t}: {m}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])  # mergekit cannot read a Qwen2-VL of transformers 5
def test_d46_mergekit_merges_the_same_modules(name: str) -> None:
    modules = parts(name, {"text_decoder": 0.25, "vision_tower": 0.75, "multi_modal_projector": 0.5})
    layers = [{"sources": [{"model": f"{name}{i}", "layer_range": [0, 3]} for i in range(2)]}]
    modules["text_decoder"] = {"slices": layers, "parameters": {"weight": 0.5}}
    recipe = {"merge_method": "linear", "dtype": "float32", "modules": modules}
    torch.testing.assert_close(ours(recipe, "out"), mergekit(recipe, "theirs"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_d46_slices_of_a_text_decoder_set_its_own_depth(name: str) -> None:
    layers = [{"sources": [{"model": f"{name}0", "layer_range": one}]} for one in ([0, 2], [1, 3])]
    modules = parts(name, {"vision_tower": 1.0, "multi_modal_projector": 1.0})
    recipe = {"merge_method": "passthrough", "modules": {"text_decoder": {"slices": layers}}}
    for module, block in modules.items():
        recipe["modules"][module] = {"models": block["models"][:1]}  # type: ignore[index]
        recipe["modules"][module]["models"][0].pop("parameters")  # type: ignore[index]
    ours(recipe, "out")
    config = json.loads(Path("out/config.json").read_text("utf-8"))
    before = json.loads(Path(f"{name}0/config.json").read_text("utf-8"))
    assert config["text_config"]["num_hidden_layers"] == 4
    assert config["vision_config"] == before["vision_config"]
    made = type(VISION_MODELS[name]()).from_pretrained("out", output_loading_info=True)[1]
    assert not made["missing_keys"]
    assert not made["mismatched_keys"]


@pytest.mark.filterwarnings("ignore")
def test_d46_a_tower_is_cut_alike_whether_or_not_its_text_family_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [{"sources": [{"model": "model", "layer_range": [1, 3]}]}]
    whole = {"models": [{"model": "model"}]}
    modules = {"text_decoder": whole, "vision_tower": {"slices": layers}, "multi_modal_projector": whole}
    recipe = {"merge_method": "passthrough", "modules": modules}
    model = MODELS["llava-lm"]()
    declared = symfuse.merge_recipe(recipe, {"model": model})
    monkeypatch.delitem(ARCHITECTURES, "llama")
    found = symfuse.merge_recipe(recipe, {"model": model})
    assert found.config["vision_config"]["num_hidden_layers"] == 2
    torch.testing.assert_close(dict(found), dict(declared), rtol=0, atol=0)


# ---- D47: keys of recipes


def test_d47_keys_that_hold_anchors_and_say_what_the_command_line_says() -> None:
    anchored = """
base: &base a
x-common: {deep: [&weights {weight: 0.5, density: 0.5}]}
out_path: ./elsewhere
trust_remote_code: true
merge_method: ties
base_model: *base
models: [{model: b, parameters: *weights}]
"""
    recipe = parse_recipe(anchored, "r.yml")
    assert [note.partition(": without effect: ")[0].rpartition(": ")[2] for note in recipe.notes] == [
        "base", "x-common", "out_path", "trust_remote_code",
    ]  # fmt: skip
    Path("r.yml").write_text(anchored, "utf-8")
    assert "r.yml, line 2: base: without effect: it only holds YAML anchors" in done("merge", "r.yml", "out").stdout
    plain = {
        "merge_method": "ties", "base_model": "a",
        "models": [{"model": "b", "parameters": {"weight": 0.5, "density": 0.5}}],
    }  # fmt: skip
    torch.testing.assert_close(tensors_of(Path("out")), ours(plain, "plain"), rtol=0, atol=0)
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("modls: &x [{model: b}]", "did you mean 'models'"),  # a misspelt key is none that only holds an anchor
        ("paramters: &x {weight: 1.0}", "did you mean 'parameters'"),
        ("other: {a: 1}", "unknown key"),  # without an anchor
        ("genome: {models: [a, b]}", "mergekit-evolve"),
        ("normalize: true", "parameters: {normalize: …}"),
    ],
)
def test_d47_other_keys_are_refused_with_what_to_write(key: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_recipe(f"{key}\nmerge_method: linear\n" + ("" if "modls" in key else "models: [{model: b}]"))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"recipe, line 1: {key.partition(':')[0]}: ")


@pytest.mark.filterwarnings("ignore")
def test_d47_mergekits_extraction_runs_and_extracts_the_same(caplog: pytest.LogCaptureFixture) -> None:
    theirs = peer("mergekit.scripts.extract_lora")
    from click.testing import CliRunner

    words = ["--model", "b", "--base-model", "a", "--max-rank=5", "--lazy-unpickle", "--trust-remote-code"]
    result = done("extract-lora", *words, "--out-path", "ours")
    assert "note: --base-model is an option of mergekit: it is --base here" in result.stderr
    CliRunner().invoke(theirs.main, [*words, "--out-path", "theirs"])  # its card asks the hub, at the end
    caplog.clear()
    made, wanted = (load_file(f"{name}/adapter_model.safetensors") for name in ("ours", "theirs"))
    compared = 0
    for name in wanted:
        if name.endswith("lora_A.weight"):
            up = name.replace("lora_A", "lora_B")
            torch.testing.assert_close(made[up] @ made[name], wanted[up] @ wanted[name], rtol=1e-4, atol=1e-4)
            compared += 1
        elif "norm" in name or "embed" in name:
            torch.testing.assert_close(made[name], wanted[name], rtol=0, atol=0)
            compared += 1
    assert compared == 14 + 5 + 1


def test_d47_patterns_leave_out_the_same_layers() -> None:
    words = [
        "--model",
        "b",
        "--base-model",
        "a",
        "--out-path",
        "lora",
        "--max-rank",
        "3",
        "-e",
        r"layers\.1",
        "-e",
        "lm_",
    ]
    done("extract-lora", *words, "--include-regex", "_proj$")
    names = load_file("lora/adapter_model.safetensors").keys()
    assert len(names) == 14
    assert all(".layers.0." in name and "_proj.lora_" in name for name in names)


# ---- D48: options


def test_d48_options_run_with_a_note_where_they_change_nothing() -> None:
    Path("r.yml").write_text(DARE, "utf-8")
    words = ["--cuda", "--lazy-unpickle", "--copy-tokenizer", "--out-shard-size", "2B", "--allow-crimes", "-j", "1"]
    words += [
        "--trust-remote-code",
        "--low-cpu-memory",
        "--transformers-cache=x",
        "--no-async-write",
        "-v",
        "--no-quiet",
    ]
    result = done("merge", "r.yml", "out", *words, "--random-seed", "7")
    for option in ("--cuda", "--lazy-unpickle", "--out-shard-size", "--transformers-cache", "--no-async-write", "-v"):
        assert f"symfuse: note: {option} is an option of mergekit: " in result.stderr
    done("merge", "r.yml", "same", "--seed", "7")
    done("merge", "r.yml", "other", "--seed", "8")
    found = tensors_of(Path("out"))
    torch.testing.assert_close(found, tensors_of(Path("same")), rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(found[name], other) for name, other in tensors_of(Path("other")).items())
    assert "seed: 7" in json.loads(Path("out/symfuse.json").read_text("utf-8"))["recipe"]
    assert "mergekit" not in done("merge", "r.yml", "quiet", "--lazy-unpickle", "--quiet").stderr
    assert (
        "symfuse: note: -j is an option of mergekit: it is --threads here"
        in done("merge", "r.yml", "short", "-j1").stderr
    )
    wrong = run("merge", "r.yml", "never", "-jx")
    assert (wrong.exit_code, "'x' is not a valid integer" in wrong.stderr) == (2, True)


def test_d48_sizes_of_shards_are_bytes_as_in_mergekits_files() -> None:
    Path("r.yml").write_text(DARE, "utf-8")
    done("merge", "r.yml", "out", "--out-shard-size", "20K")
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in Path("out").glob("model-*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) <= 20_000


@pytest.mark.parametrize("option", [name for name, spelling in OF_MERGES.items() if spelling.refused or spelling.off])
def test_d48_options_that_would_change_the_result_are_refused(option: str) -> None:
    spelling = OF_MERGES[option]
    word = option if spelling.refused else option.replace("--", "--no-", 1)
    result = run("merge", "a", "b", "-o", "out", word, *(["x"] if spelling.takes else []))
    assert result.exit_code == 2
    assert f"{word} is an option of mergekit that would change the result: " in result.stderr
    assert not Path("out").exists()


def test_d48_every_option_of_mergekit_is_known() -> None:
    kinds = peer("mergekit.options")
    extraction = peer("mergekit.scripts.extract_lora")
    from symfuse.cli.adapter import extract_lora
    from symfuse.cli.merge import merge

    same = {"--device", "--quiet", "--help"}  # which are options here too
    for theirs, here, command in (
        (kinds.add_merge_options(lambda: None), OF_MERGES, merge), (extraction.main, OF_EXTRACTION, extract_lora),
    ):  # fmt: skip
        params = getattr(theirs, "__click_params__", None) or theirs.params
        options = {option for param in params for option in param.opts}
        own = {option for param in command.params for option in param.opts}
        assert options - same <= here.keys() | own
        for name, spelling in here.items():
            words = spelling.words("1")
            assert (
                not words
                or not words[0].startswith("-")
                or words[0] in {*own, "--device", "--seed", "--threads", "--max-shard-size", "--force-config"}
            ), name
    assert "No such option" in run("merge", "a", "b", "-o", "out", "--cudax").stderr
    shutil.rmtree("out", ignore_errors=True)


# ---- D49: models of two types


def mistral(folder: str, seed: int, **options: Any) -> str:
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT | {"head_dim": 8} | options))
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


def test_d49_llama_and_mistral_by_name_and_shape() -> None:
    llama(Path("l"), 3, layers=3, max_position_embeddings=64)
    mistral("m", 4, rms_norm_eps=1e-3)
    recipe = {"merge_method": "linear", "models": [{"model": name, "parameters": {"weight": weight}} for name, weight in
                                                   (("l", 0.25), ("m", 0.75))]}  # fmt: skip
    Path("r.yml").write_text(yaml.safe_dump(recipe), "utf-8")
    refused = run("merge", "r.yml", "out")
    assert refused.exit_code == 5
    assert "one is a llama, the other a mistral" in refused.stderr
    assert "--force-config" in refused.stderr
    said = done("merge", "r.yml", "out", "--allow-crimes").stdout
    assert "note: m: a mistral is taken as a llama, by the names and shapes of its tensors" in said
    assert "rms_norm_eps" in said
    a, b, found = (tensors_of(Path(name)) for name in ("l", "m", "out"))
    torch.testing.assert_close(found, {n: 0.25 * a[n] + 0.75 * b[n] for n in a}, rtol=1e-6, atol=1e-6)
    config = json.loads(Path("out/config.json").read_text("utf-8"))
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    done("check", "r.yml", "--force-config")
    python = symfuse.merge(["l", "m"], weights=[0.25, 0.75], force_config=True)
    torch.testing.assert_close({n: t.double() for n, t in python.items()}, found, rtol=1e-6, atol=1e-6)
    assert any("a mistral is taken as a llama" in note for note in python.notes)
    with pytest.raises(IncompatibleError, match="one is a llama, the other a mistral"):
        symfuse.merge(["l", "m"])


@pytest.mark.filterwarnings("ignore")
def test_d49_mergekit_merges_the_same_tensors() -> None:
    llama(Path("l"), 3, layers=3, max_position_embeddings=64)
    mistral("m", 4)
    recipe = {"merge_method": "slerp", "base_model": "m", "models": [{"model": "l"}, {"model": "m"}],
              "parameters": {"t": 0.3}, "dtype": "float32"}  # fmt: skip
    found = ours(recipe, "out", "--force-config")
    torch.testing.assert_close(found, mergekit(recipe, "theirs", allow_crimes=True), rtol=1e-5, atol=1e-6)


def test_d49_other_shapes_and_names_are_refused_all_the_same() -> None:
    llama(Path("l"), 3, layers=3, max_position_embeddings=64)
    mistral("wide", 4, intermediate_size=56)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))
    bert.save_pretrained("bert")
    for other, says in (("wide", "48 and 56"), ("bert", "not one tensor has the same name")):
        result = run("merge", "l", other, "-o", "out", "--force-config")
        assert result.exit_code == 5, result.output
        assert says in result.stderr
        assert not Path("out").exists()


# ---- D50: gains that were never trained


def tuned(source: str, folder: str, seed: int) -> str:
    """A fine-tune of it: all weights moved, gains too."""
    checkpoint = symfuse.open(source)
    rng = torch.Generator().manual_seed(seed)
    moved = {n: t + 0.01 * torch.randn(t.shape, generator=rng) for n, t in checkpoint.items()}
    checkpoint.replace(tensors=moved).save(folder)
    return folder


@pytest.fixture
def untrained() -> list[str]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TEXT | {"head_dim": 8})
    transformers.LlamaForCausalLM(config).save_pretrained("base")
    write_tokenizer(Path("base"), COMMON)
    return ["base", tuned("base", "tuned1", 1), tuned("base", "tuned2", 2)]


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "dare_linear", "model_stock", "task_arithmetic"])
def test_d50_untrained_gains_run_with_a_note(untrained: list[str], method: str) -> None:
    based = [] if method == "linear" else ["--base", "1"]
    result = done("merge", *untrained, "-o", "out", "--method", method, *based)
    assert "all gains of norms are 1" in result.stdout
    options = {} if method == "linear" else {"base": 0}
    merged = symfuse.merge(untrained, method=method, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(
        {n: t.double() for n, t in merged.items()}, tensors_of(Path("out")), rtol=1e-6, atol=1e-6
    )
    assert any("all gains of norms are 1" in note for note in merged.notes)
    assert not any("gains" in note for note in symfuse.merge(untrained[1:]).notes)
    forced = symfuse.merge(untrained, method=method, force_config=True, **options)  # type: ignore[arg-type]
    assert not any("gains" in note for note in forced.notes)


def test_d50_a_union_of_vocabularies_runs(untrained: list[str]) -> None:
    write_tokenizer(Path("tuned1"), [*COMMON, "more"])
    write_tokenizer(Path("tuned2"), [*COMMON, "others"])
    result = done("merge", *untrained, "-o", "out", "--tokenizer", "union")
    assert "all gains of norms are 1" in result.stdout
    assert len(tensors_of(Path("out"))["model.embed_tokens.weight"]) >= len(COMMON) + 2


@pytest.mark.parametrize("label", ["llama-lm", "qwen3-lm", "gpt2-lm-untied"])
def test_d50_folded_models_are_refused_as_before(label: str) -> None:
    a, b = MODELS[label](0), MODELS[label](1)
    folded = canonical(Model.of(a), ("untie", "fold_norms")).checkpoint
    with pytest.raises(IncompatibleError, match="all gains of norms are folded"):
        symfuse.merge([folded, a])
    alignment = symfuse.match(a, to=b, axes="all")
    assert alignment.frame
    with pytest.raises(IncompatibleError, match="all gains of norms are folded"):
        symfuse.merge([alignment(a), b])


# ---- D51: a language model and the model of two modalities that was made of it


def inner(folder: str, kind: str) -> str:
    """A text model of the type that is inside."""
    config = {
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **TEXT | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
        ),
    }.get(kind, lambda: transformers.Qwen2Config(**TEXT | {"rms_norm_eps": 1e-5}))()
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, 5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", VISION_MODELS)
def test_d51_the_text_part_is_merged_and_the_vision_part_kept(kind: str, flat: bool) -> None:
    if flat and kind != "qwen2_vl":
        return
    text, both = inner("text", kind), f"{kind}0"
    if flat:  # as on the hub, where transformers 4 wrote it
        shutil.copytree(both, both := "flat")
        config = json.loads(Path(both, "config.json").read_text("utf-8"))
        part = {k: v for k, v in config.pop("text_config").items() if k not in ("model_type", "rope_parameters")}
        config = {**part, **config, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e4}
        Path(both, "config.json").write_text(json.dumps(config), "utf-8")
    done("merge", both, text, "-o", "out", "--weights", "0.25,0.75")
    a, b, found = (tensors_of(Path(name)) for name in (both, text, "out"))
    assert found.keys() == a.keys()
    changed = 0
    for name, tensor in found.items():
        plain = name.removeprefix("language_model.")
        expected = 0.25 * a[name] + 0.75 * b[plain] if plain in b else a[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)
        changed += plain in b
    assert changed == len(b)
    assert json.loads(Path("out/config.json").read_text()) == json.loads(Path(both, "config.json").read_text())
    done("merge", text, both, "-o", "plain", "--weights", "0.75,0.25")  # the other way: only the text part
    torch.testing.assert_close(
        tensors_of(Path("plain")),
        {n: found[n if n in found else f"language_model.{n}"] for n in b},
        rtol=1e-6,
        atol=1e-6,
    )
    _, report = type(VISION_MODELS[kind]()).from_pretrained("out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_d51_a_language_model_in_another_basis_is_aligned_with_the_words_of_the_other() -> None:
    """What reads images writes to the stream of its own words, and so is of the anchor."""
    both = open_checkpoint("qwen2_5_vl0")
    config = {k: v for k, v in both.config["text_config"].items() if k not in ("layer_types", "max_window_layers")}
    text = open_checkpoint(
        {name: tensor for name, tensor in both.items() if not name.startswith("visual.")},
        config={**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
        name="text",
    )
    moved = random_alignment(Model.of(text).spec, 3)(text)
    moved.save("moved")
    recipe = {
        "merge_method": "linear", "models": [{"model": "qwen2_5_vl0"}, {"model": "moved"}],
        "parameters": {"weight": 0.5}, "align": {"axes": "all"},
    }  # fmt: skip
    assert verify(both, open_checkpoint(recipe_run({**recipe, "align": None}, "plain"))).worst > 1e-2
    assert verify(both, open_checkpoint(recipe_run(recipe, "out"))).worst < 1e-4
    recipe["align"] = {"axes": "all", "anchor": 2}
    Path("recipe.yml").write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    result = run("merge", "recipe.yml", "other")
    assert result.exit_code == 2
    assert "align.anchor: qwen2_5_vl0 is the only one with images" in result.stderr


def recipe_run(recipe: dict[str, Any], out: str) -> str:
    ours({key: value for key, value in recipe.items() if value is not None}, out)
    return out


def test_d51_another_language_model_is_none_of_it() -> None:
    llama(Path("l"), 3, layers=3)
    result = run("merge", "qwen2_vl0", "l", "-o", "out")
    assert result.exit_code == 5
    assert "one is a qwen2_vl, the other a llama" in result.stderr


# ---- what it has an architecture file for

CODE = "its class is code of the checkpoint, which is never run, so that no declaration can be proved"
NOT_DECLARED = {
    "_afmoe_partial": "no model of its own: mergekit's name for some of the layers of another",
    **dict.fromkeys(("baichuan", "chatglm", "internlm2", "jais", "qwen", "solar", "phi3small"), CODE),
    **dict.fromkeys(("mixformer-sequential", "phi-msft", "stablelm_epoch"), f"{CODE}; since renamed phi or stablelm"),
}


def test_every_type_that_mergekit_has_a_file_for_is_declared() -> None:
    """Or stands here with the reason."""
    folder = Path(peer("mergekit").__file__).parent / "_data" / "architectures"
    types = {json.loads(file.read_text("utf-8"))["model_type"] for file in folder.glob("*.json")}
    assert len(types) > 40
    assert types - ARCHITECTURES.keys() == NOT_DECLARED.keys()

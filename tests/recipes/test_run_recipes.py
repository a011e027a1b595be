"""Every recipe of this folder, run by the command line on tiny models: what is written loads, and is what the formula
says, computed here densely in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner
from torch import Tensor

from contract.tiny import TEXT, hf
from recipes.llama import (
    COMMON,
    EMBED,
    HEAD,
    TEMPLATE,
    adapted,
    adapter,
    assert_rounded,
    config_of,
    dtypes_of,
    llama,
    tensors_of,
)
from symfuse.cli import main

FOLDER = Path(__file__).parent
Tensors = dict[str, Tensor]
Make = Callable[[Path], Path]


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Make], Path]:
    """A model folder by name, made once."""
    root = tmp_path_factory.mktemp("llamas")

    def get(name: str, make: Make) -> Path:
        folder = root / name
        return folder if folder.exists() else make(folder)

    return get


@pytest.fixture
def place(
    cached: Callable[[str, Make], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Path]]:
    """A working folder in which the names of the recipes are folders: links to models of the session."""
    monkeypatch.chdir(tmp_path)

    def link(kind: str = "", layers: int = 2, **made: Make | int) -> dict[str, Path]:
        folders = {}
        for name, how in made.items():
            make = partial(llama, seed=how, layers=layers) if isinstance(how, int) else how
            folders[name] = cached(f"{name}-{layers}{kind}", make)
            (tmp_path / "tiny").mkdir(exist_ok=True)
            (tmp_path / "tiny" / name).symlink_to(folders[name])
        return folders

    return link


def run(recipe: str | Path, *options: str, out: str = "out") -> Path:
    """Merge by the command line; the folder that it wrote."""
    result = CliRunner().invoke(main, ["merge", str(recipe), out, *options])
    assert result.exit_code == 0, result.output
    return Path(out).absolute()


def example(name: str, *options: str) -> Path:
    return run(FOLDER / f"{name}.yml", *options)


def complete(folder: Path, auto: Any = transformers.AutoModelForCausalLM, **options: Any) -> torch.nn.Module:
    """The folder loads without a missing, unexpected or mismatched key, and computes."""
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    (output, *_) = model(input_ids=torch.tensor([[1, 5, 9]])).values()
    assert output.isfinite().all()
    return model


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The metadata block of the model card, as the hub reads it, and the text below."""
    _, block, text = (folder / "README.md").read_text("utf-8").split("---\n", 2)
    metadata = yaml.safe_load(block)
    assert isinstance(metadata, dict)
    return metadata, text


def mean(*models: Mapping[str, Tensor], weights: list[float] | None = None) -> Tensors:
    shares = weights or [1 / len(models)] * len(models)
    return {name: sum(w * m[name] for w, m in zip(shares, models, strict=True)) for name in models[0]}  # type: ignore[misc]


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Shoemake's formula on whole tensors."""
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = torch.tensor(cosine, dtype=torch.float64).acos()
    return ((1 - t) * angle).sin() / angle.sin() * a + (t * angle).sin() / angle.sin() * b


def gradient(values: list[float], t: float) -> float:
    """Piecewise linear through values at equal distances."""
    position = t * (len(values) - 1)
    low = min(int(position), len(values) - 2)
    return values[low] + (position - low) * (values[low + 1] - values[low])


def depth(name: str, layers: int) -> float:
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) / (layers - 1) if found else 0.0


def ties(base: Tensor, models: list[Tensor], weights: list[float], densities: list[float], normalize: bool) -> Tensor:
    """Algorithm 1 of Yadav et al. with weights before the vote, by sorting."""
    vectors = []
    for model, weight, density in zip(models, weights, densities, strict=True):
        delta = (model - base).flatten()
        order = torch.sort(delta.abs(), descending=True, stable=True).indices
        kept = torch.zeros_like(delta)
        chosen = order[: max(1, int(density * len(delta)))]
        kept[chosen] = delta[chosen]
        vectors.append(weight * kept)
    stack = torch.stack(vectors)
    sign = torch.where(stack.sum(0) >= 0, 1.0, -1.0)
    agree = stack.sign() == sign
    total = (stack * agree).sum(0)
    if normalize:
        divisor = (agree * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0)
        total = total / torch.where(divisor == 0, 1.0, divisor)
    return base + total.reshape(base.shape)


def test_linear(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(a=0, b=1, c=2)
    out = example("linear")
    tensors = [tensors_of(folders[name]) for name in "abc"]
    assert_rounded(tensors_of(out), mean(*tensors, weights=[1 / 1.8, 0.3 / 1.8, 0.5 / 1.8]), torch.float16)
    assert dtypes_of(out) == {torch.float16}
    assert config_of(out)["dtype"] == "float16"
    complete(out)
    # The tokenizer, its chat template and the generation config of the first model.
    assert transformers.AutoTokenizer.from_pretrained(out)("t0 t4")["input_ids"] == [3, 7]
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    assert transformers.GenerationConfig.from_pretrained(out).max_new_tokens == 7
    assert transformers.GenerationConfig.from_pretrained(folders["b"]).max_new_tokens == 8


def test_the_card_and_the_run_as_data(place: Callable[..., dict[str, Path]]) -> None:
    place(a=0, b=1, c=2)
    out = example("linear")
    metadata, text = card(out)
    assert "base_model" not in metadata  # of these folders none is the snapshot of a model on the hub
    assert metadata["library_name"] == "transformers"
    assert {"merge", "symfuse"} <= set(metadata["tags"])
    recipe = (FOLDER / "linear.yml").read_text("utf-8")
    assert recipe.strip() in text
    for name in ("tiny/a", "tiny/b", "tiny/c"):
        assert f"`{name}`" in text
    data = json.loads((out / "symfuse.json").read_text("utf-8"))
    assert (data["method"], data["recipe"], data["models"]) == ("linear", recipe, ["tiny/a", "tiny/b", "tiny/c"])
    assert (data["base"], data["seed"]) == ("tiny/a", 0)
    assert [entry["name"] for entry in data["inputs"]] == ["tiny/a", "tiny/b", "tiny/c"]


@pytest.mark.parametrize(("name", "layers"), [("slerp_models", 4), ("slerp_slices", 40)])
def test_slerp_with_gradients_and_filters(place: Callable[..., dict[str, Path]], name: str, layers: int) -> None:
    folders = place(layers=layers, a=0, b=1)
    out = example(name)
    a, b = (tensors_of(folders[letter]) for letter in "ab")
    expected = {}
    for tensor in a:
        t = 0.5
        if "self_attn" in tensor:
            t = gradient([0, 0.5, 0.3, 0.7, 1], depth(tensor, layers))
        elif "mlp" in tensor:
            t = gradient([1, 0.5, 0.7, 0.3, 0], depth(tensor, layers))
        expected[tensor] = slerp(a[tensor], b[tensor], t)
    assert_rounded(tensors_of(out), expected, torch.float16)
    assert dtypes_of(out) == {torch.float16}
    assert config_of(out)["num_hidden_layers"] == layers
    complete(out)


def test_passthrough_stacks_layers(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(layers=24, a=0) | place(layers=40, b=1)
    out = example("passthrough_stack")
    a, b = tensors_of(folders["a"]), tensors_of(folders["b"])
    layer = "model.layers.{}."
    expected = {EMBED: a[EMBED], "model.norm.weight": b["model.norm.weight"], HEAD: b[HEAD]}
    for i in range(44):
        source, number = (a, i) if i < 24 else (b, i - 4)
        for name, tensor in source.items():
            if name.startswith(layer.format(number)):
                expected[name.replace(layer.format(number), layer.format(i))] = tensor
    assert_rounded(tensors_of(out), expected, torch.float16)
    assert config_of(out)["num_hidden_layers"] == 44
    assert len(complete(out).model.layers) == 44  # type: ignore[union-attr, arg-type]


def test_passthrough_repeats_and_scales(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(layers=3, a=0)
    out = example("passthrough_scale")
    a = tensors_of(folders["a"])
    expected = {name: tensor for name, tensor in a.items() if "layers" not in name}
    for i, number in enumerate([0, 1, 1, 2]):
        for name, tensor in a.items():
            if f"layers.{number}." in name:
                factor = 0.5 if i >= 2 and "down_proj" in name else 1.0
                expected[name.replace(f"layers.{number}.", f"layers.{i}.")] = factor * tensor
    found = tensors_of(out)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert dtypes_of(out) == {torch.float32}
    assert config_of(out)["num_hidden_layers"] == 4
    complete(out)


def test_ties_with_gradients(place: Callable[..., dict[str, Path]]) -> None:
    layers = 4
    folders = place(layers=layers, base=9, a=0, b=1, c=2)
    out = example("ties_gradients")
    base, a, b, c = (tensors_of(folders[name]) for name in ("base", "a", "b", "c"))
    expected = {}
    for name in base:
        t = depth(name, layers)
        weights = [1.0, gradient([0, 0.3, 0.7, 1], t), 0.5 if "mlp" in name else 0.0]
        densities = [gradient([1, 0.7, 0.1], t), 0.5, 0.33]
        expected[name] = ties(base[name], [a[name], b[name], c[name]], weights, densities, normalize=True)
    assert_rounded(tensors_of(out), expected, torch.float16)
    assert transformers.GenerationConfig.from_pretrained(out).max_new_tokens == 16  # the base's
    complete(out)


def test_ties_not_normalized(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(base=9, a=0, b=1)
    out = example("ties_not_normalized")
    base, a, b = (tensors_of(folders[name]) for name in ("base", "a", "b"))
    expected = {n: ties(base[n], [a[n], b[n]], [0.5, 0.5], [0.5, 0.5], normalize=False) for n in base}
    assert_rounded(tensors_of(out), expected, torch.float16)
    complete(out)


def test_arcee_fusion(place: Callable[..., dict[str, Path]]) -> None:
    """The base is among the models, which changes nothing; the formula itself is tested with the method."""
    folders = place(a=0, b=1)
    out = example("arcee_fusion")
    assert dtypes_of(out) == {torch.bfloat16}
    a, b, found = tensors_of(folders["a"]), tensors_of(folders["b"]), tensors_of(out)
    assert found.keys() == a.keys()
    rounded = [{name: t.bfloat16().double() for name, t in model.items()} for model in (a, b)]
    taken = 0
    for name, tensor in found.items():
        of_b = tensor == rounded[1][name]
        assert ((tensor == rounded[0][name]) | of_b).all(), name  # entry by entry one of the two
        taken += int(of_b.sum())
    assert 0 < taken < sum(map(torch.numel, a.values()))
    complete(out)


def test_chat_template_and_two_dtypes(place: Callable[..., dict[str, Path]]) -> None:
    """auto takes the template that most have; the last dtype that is named is the one written."""
    folders = place(a=0) | place(kind="chat", b=partial(llama, seed=1, template="{{ 'other' }}"))
    out = example("chat_template")
    assert_rounded(tensors_of(out), mean(*(tensors_of(folders[x]) for x in "ab")), torch.float16)
    assert dtypes_of(out) == {torch.float16}
    assert config_of(out)["dtype"] == "float16"
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    complete(out)


def test_revisions_and_adapters(place: Callable[..., dict[str, Path]], tmp_path: Path) -> None:
    """Local folders have no revisions: they are taken out of the text; + and @ in paths stay."""
    folders = place(base=9, a=0) | place(kind="lora", adapter=partial(adapter, seed=5))
    others = place(plus=3, home=4)
    for path, folder in {"c++/tiny": others["plus"], "C++/model@home": others["home"]}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).symlink_to(folder)
    text = (FOLDER / "references.yml").read_text("utf-8")
    for old in ("@v1.0", "@2024-01-01", "@main", ", revision: v1.0", ", revision: main"):
        assert old in text
        text = text.replace(old, "")
    Path("recipe.yml").write_text(text, "utf-8")
    out = run("recipe.yml")
    base, a, plus, home = (tensors_of(f) for f in (folders["base"], folders["a"], others["plus"], others["home"]))
    expected = mean(base, adapted(a, folders["adapter"]), plus, adapted(home, folders["adapter"]))
    assert_rounded(tensors_of(out), expected, torch.float32)
    complete(out)


def test_several_recipes_named_by_each_other(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(a=0, b=1, c=2) | place(kind="lora", adapter=partial(adapter, seed=5))
    out = example("several_named")
    a, b, c = (tensors_of(folders[name]) for name in "abc")
    first = mean(a, b)
    expected = mean(mean(first, c), adapted(first, folders["adapter"]))
    assert_rounded(tensors_of(out), expected, torch.float32)
    complete(out)
    assert not list(Path().glob("first*")), "the ones before are not written"


def test_the_last_of_several_recipes_is_written(place: Callable[..., dict[str, Path]]) -> None:
    """dare_ties of a slerp of a soup: its density decides how many entries stay the base's."""
    folders = place(a=0, b=1, c=2, d=3)
    out = example("several_final")
    a, b, c, d = (tensors_of(folders[name]) for name in "abcd")
    found = tensors_of(out)
    assert found.keys() == a.keys()
    curve = {name: slerp(soup, c[name], 0.5) for name, soup in mean(a, b).items()}
    agreeing = kept = total = 0
    for name, base in a.items():
        # With normalize false the outcomes of one entry are few: nothing, one of the two, or both if they agree.
        one, other = 0.5 * (curve[name] - base), 0.5 * (d[name] - base)
        outcomes = torch.stack([0 * one, one / 0.6, other / 0.8, one / 0.6 + other / 0.8])
        near = (outcomes - (found[name] - base)).abs().amin(0)
        agreeing += int((near < 3e-5).sum())  # densities are multiples of 2**-16
        kept += int((found[name] != base).sum())
        total += base.numel()
    assert agreeing == total
    assert 0.87 < kept / total < 0.97  # 1 - 0.4 * 0.2
    complete(out)
    again = run(FOLDER / "several_final.yml", out="again")
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_modules(place: Callable[..., dict[str, Path]]) -> None:
    """The halves of a model from two texts, each with settings of its own."""

    def pair(folder: Path, seed: int) -> Path:
        sizes = {**TEXT, "num_hidden_layers": 4}
        decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.BertConfig(**sizes), decoder
        )
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        return hf("EncoderDecoderModel", config, seed).save(folder)

    folders = place(kind="two", **{name: partial(pair, seed=seed) for seed, name in enumerate("abc")})
    text = (FOLDER / "modules.yml").read_text("utf-8")
    Path("recipe.yml").write_text(text, "utf-8")
    out = run("recipe.yml")
    a, b, c = (tensors_of(folders[name]) for name in "abc")
    expected = {}
    for name, tensor in a.items():
        if name.startswith("encoder."):
            expected[name] = (tensor + b[name]) / 2
        elif "layer.0." in name or "layer.1." in name:
            theirs = re.sub(r"layer\.(\d)", lambda m: f"layer.{int(m[1]) + 2}", name)
            expected[name] = 0.9 * tensor + 0.1 * c[theirs]
        elif "layer." not in name:
            expected[name] = 0.9 * tensor + 0.1 * c[name]
    assert_rounded(tensors_of(out), expected, torch.float64)
    config = config_of(out)
    assert (config["encoder"]["num_hidden_layers"], config["decoder"]["num_hidden_layers"]) == (4, 2)
    _, report = transformers.EncoderDecoderModel.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report


def test_align(place: Callable[..., dict[str, Path]]) -> None:
    """A planted reordering of the second model is undone before the average, onto the second: the mean is the second.

    Llama is merged by names and shapes, so this is BERT; its head is dropped, as the recipe says.
    """
    config = {**TEXT, "num_hidden_layers": 5}

    def first(folder: Path) -> Path:
        return hf("BertForMaskedLM", transformers.BertConfig(**config), 0).save(folder)

    def second(folder: Path) -> Path:
        checkpoint = hf("BertForMaskedLM", transformers.BertConfig(**config), 0)
        tensors = dict(checkpoint)
        order = torch.randperm(29, generator=torch.Generator().manual_seed(3))
        for i in range(5):
            layer = f"bert.encoder.layer.{i}"
            tensors[f"{layer}.intermediate.dense.weight"] = tensors[f"{layer}.intermediate.dense.weight"][order]
            tensors[f"{layer}.intermediate.dense.bias"] = tensors[f"{layer}.intermediate.dense.bias"][order]
            tensors[f"{layer}.output.dense.weight"] = tensors[f"{layer}.output.dense.weight"][:, order]
        return checkpoint.replace(tensors=tensors).save(folder)

    folders = place(kind="bert", a=first, b=second)
    out = example("align")
    b = tensors_of(folders["b"])
    found = tensors_of(out)
    assert {name for name in b if not name.startswith("cls.")} == found.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-9, atol=1e-9)
    complete(out, transformers.AutoModel, add_pooling_layer=False)
    data = json.loads((out / "symfuse.json").read_text("utf-8"))
    assert (data["anchor"], data["seed"], data["heads"]) == ("tiny/b", 7, "drop")
    assert [run["verified"]["equal"] for run in data["alignments"]] == [True]
    assert (out / "alignment-1.symfuse").exists()


# -- vocabularies


def chat(folder: Path, seed: int, added: list[str], template: str = "{{ 'chat' }}") -> Path:
    return llama(folder, seed, added=added, template=template)


def row(tensors: Tensors, name: str, folder: Path, token: str) -> Tensor:
    """The row of a token by the folder's own tokenizer."""
    ids = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    return tensors[name][ids[token]]


def test_a_union_of_tokenizers(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(a=0) | place(
        kind="more", b=partial(llama, seed=1, pieces=[*COMMON[:3], *COMMON[:2:-1]], added=["<new>"])
    )
    out = example("tokenizer_source")
    a, b, found = (tensors_of(f) for f in (folders["a"], folders["b"], out))
    tokens = transformers.AutoTokenizer.from_pretrained(out).get_vocab()
    assert set(tokens) == {*COMMON, "<new>"}
    assert config_of(out)["vocab_size"] == len(found[EMBED]) == len(found[HEAD]) == 54
    for name in (EMBED, HEAD):
        for token in tokens:
            theirs = row(b, name, folders["b"], token)
            ours = theirs if token == "<new>" else row(a, name, folders["a"], token)
            torch.testing.assert_close(row(found, name, out, token), (ours + theirs) / 2, rtol=0, atol=1e-6)
    complete(out)


def test_rows_of_single_tokens(place: Callable[..., dict[str, Path]]) -> None:
    folders = place(kind="tool", a=partial(chat, seed=0, added=["<|tool|>", "<|answer|>"])) | place(
        kind="chat", chat=partial(chat, seed=1, added=["<|im_start|>", "<|tool|>"])
    )
    out = example("tokenizer_tokens")
    a, theirs, found = (tensors_of(f) for f in (folders["a"], folders["chat"], out))
    ids = transformers.AutoTokenizer.from_pretrained(out).get_vocab()
    assert set(ids) == {*COMMON, "<|im_start|>", "<|tool|>", "<|think|>", "<|answer|>", "<|spare|>"}
    for name in (EMBED, HEAD):
        of_a, of_chat = (partial(row, t, name, f) for t, f in ((a, folders["a"]), (theirs, folders["chat"])))
        twelve = theirs[name][12]
        expected = {
            "t7": (of_a("t7") + of_chat("t7")) / 2,
            "<|im_start|>": of_chat("<|im_start|>"),
            "<|tool|>": of_a("<|tool|>"),
            "<|think|>": of_chat("<|im_start|>"),
            "<|answer|>": (of_a("<|answer|>") + twelve) / 2,
            "<|spare|>": torch.zeros(32, dtype=torch.float64),
        }
        for token, tensor in expected.items():
            torch.testing.assert_close(row(found, name, out, token), tensor, rtol=0, atol=1e-6)
    assert config_of(out)["vocab_size"] == 64  # rows of the chat model, padding too
    complete(out)


def test_two_formats_of_conversation(place: Callable[..., dict[str, Path]]) -> None:
    heads = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    folders = place(kind="plain", a=partial(chat, seed=0, added=heads[:1])) | place(
        kind="formats",
        chat=partial(chat, seed=1, added=["<|im_start|>", "<|im_end|>"]),
        instruct=partial(chat, seed=2, added=heads),
    )
    out = example("tokenizer_two_formats")
    found = tensors_of(out)
    of_chat, of_instruct = tensors_of(folders["chat"]), tensors_of(folders["instruct"])
    assert config_of(out)["vocab_size"] == len(found[EMBED]) == 64  # 58, rounded up
    for name in (EMBED, HEAD):
        for token in ["<|im_start|>", "<|im_end|>"]:
            torch.testing.assert_close(
                row(found, name, out, token), row(of_chat, name, folders["chat"], token), rtol=0, atol=1e-6
            )
        for token in heads:  # forced: also where another model has the token
            torch.testing.assert_close(
                row(found, name, out, token), row(of_instruct, name, folders["instruct"], token), rtol=0, atol=1e-6
            )
    complete(out)


def test_every_recipe_is_run() -> None:
    here = Path(__file__).read_text("utf-8")
    missing = [path.stem for path in FOLDER.glob("*.yml") if f'"{path.stem}' not in here]
    assert not missing, missing

"""Merge arithmetic through recipes, for every method: what the cases of section G ask for beyond each formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor

from contract.tiny import MODELS
from covering import covering
from evaluation.task_cases import files, wordpiece
from recipes.llama import SIZES, adapted, adapter, llama, randomise, word_level
from symfuse.cli import main
from symfuse.errors import CheckpointError, OptionError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.methods import METHODS
from symfuse.recipes import parse_recipe
from symfuse.recipes.run import run as run_recipes

SEVERAL = sorted(name for name, method in METHODS.items() if method.models[1] is None or method.models[1] > 1)
RANDOM = ["dare_linear", "dare_ties", "della", "della_linear"]
GUIDED = {name for name, method in METHODS.items() if method.learn is not None}
DATA = {"file": str(Path(__file__).with_name("words.csv")), "batch_size": 4}


def tiny(seed: int, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """An undeclared model in memory: a Llama."""
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=1, vocab_size=19, architectures=["LlamaForCausalLM"])
    model = transformers.LlamaForCausalLM(config)
    randomise(model, seed)
    return open_checkpoint(model.to(dtype), name=f"m{seed}").replace(files=letters())


@cache
def letters() -> dict[str, bytes]:
    """The files of a tokenizer of 19 words."""
    return files(word_level(["<unk>", "<s>", "</s>", *"abcdefghijklmnop"]))


@cache
def llamas() -> dict[str, Checkpoint]:
    return {f"m{seed}": tiny(seed) for seed in range(4)}


@cache
def halves() -> dict[str, Checkpoint]:
    return {f"m{seed}": tiny(seed, torch.bfloat16) for seed in range(4)}


@cache
def berts() -> dict[str, Checkpoint]:
    return {f"m{seed}": MODELS["bert-mlm"](seed).replace(files=wordpiece()) for seed in range(3)}


def plain(values: Mapping[str, Tensor], name: str = "x", **config: Any) -> Checkpoint:
    return open_checkpoint(dict(values), config={"model_type": "plain", **config}, name=name)


def merge(known: Mapping[str, Checkpoint], **recipe: Any) -> Checkpoint:
    return run_recipes([parse_recipe(recipe)], known).checkpoint


def required(name: str) -> dict[str, float]:
    """Values for the parameters that have no default."""
    return {p.name: 0.5 for p in METHODS[name].parameters.values() if p.default is None}


def recipe_of(name: str, models: list[str], base: str | None = None, **parameters: Any) -> dict[str, Any]:
    """A recipe of a method with its defaults, and what has none; the base if the method takes one."""
    method = METHODS[name]
    given = required(name) | parameters
    out: dict[str, Any] = {"merge_method": name, "models": [{"model": m} for m in models], "parameters": given}
    if base is not None and method.base == "required":
        out["base_model"] = base
    if name in GUIDED:
        out["data"] = DATA
        given |= {"steps": 3} if "steps" in method.parameters else {}
    return out


def number(name: str) -> int:
    """How many models a method is given here, beside its base."""
    most = METHODS[name].models[1]
    return 3 if most is None else most


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(bits(tensor), bits(b[name])), name


def run(recipe: Mapping[str, Any], out: str = "out", *options: str) -> Path:
    Path("recipe.yml").write_text(json.dumps(recipe), "utf-8")
    result = CliRunner().invoke(main, ["merge", "recipe.yml", out, *options])
    assert result.exit_code == 0, result.output
    return Path(out)


# ---- C21


@pytest.mark.parametrize(("name", "kind"), covering(sorted(METHODS), ["declared", "undeclared"]))
def test_c21_with_itself_a_model_keeps_its_tensors_and_its_config(name: str, kind: str, tmp_path: Path) -> None:
    known = berts() if kind == "declared" else llamas()
    model = known["m0"]
    merged = merge({"m0": model, "copy": model}, **recipe_of(name, ["copy"] * number(name), base="m0"))
    assert merged.keys() == model.keys()
    assert [merged.info(n) for n in model] == [model.info(n) for n in model]
    dtype = {torch.float32: "float32", torch.float64: "float64"}[next(iter(model.values())).dtype]
    assert merged.config == {**model.config, "dtype": dtype}
    for key, tensor in model.items():
        few = 4 * torch.finfo(tensor.dtype).eps  # units in the last place
        torch.testing.assert_close(merged[key], tensor, rtol=few, atol=few)
    class_ = getattr(transformers, model.config["architectures"][0])
    _, report = class_.from_pretrained(merged.save(tmp_path / "out"), output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize("name", sorted(METHODS))
def test_c21_of_different_models_nothing_is_left_out(name: str) -> None:
    known = llamas()
    count = min(2, number(name))
    merged = merge(known, **recipe_of(name, ["m1", "m2"][:count], base="m0"))
    model = known["m0"]
    assert merged.keys() == model.keys()
    for key in model:
        assert merged.info(key) == model.info(key)
        assert merged[key].isfinite().all(), key


# ---- C66, C67, C69


def test_c66_the_weights_in_effect_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = open_checkpoint(llama(tmp_path / "a", 0))
    models = [{"model": "a", "parameters": {"weight": 0.1}}, {"model": "a", "parameters": {"weight": 1.0}}]
    recipe: dict[str, Any] = {"merge_method": "linear", "models": models}
    assert_same_bits(dict(open_checkpoint(run(recipe, "on"))), dict(model))
    text = json.loads((tmp_path / "on/symfuse.json").read_text("utf-8"))["merged"]
    assert text == "0.0909091·a + 0.909091·a"
    recipe["parameters"] = {"normalize": False}
    off = open_checkpoint(run(recipe, "off"))
    for name, tensor in model.items():
        # 0.1 x + 1.0 x in float64 at least, or each product and the sum in float32
        torch.testing.assert_close(off[name].double(), 1.1 * tensor.double(), rtol=2**-23, atol=0)
    assert json.loads((tmp_path / "off/symfuse.json").read_text("utf-8"))["merged"] == "0.1·a + 1·a"


def test_c67_task_arithmetic_may_subtract() -> None:
    known = llamas()
    base, model = known["m0"], known["m1"]
    for parameters in ({"lambda": -0.5}, {"weight": -0.5}):
        merged = merge(known, **recipe_of("task_arithmetic", ["m1"], base="m0", **parameters))
        for name in base:
            expected = (base[name].double() - 0.5 * (model[name].double() - base[name].double())).float()
            torch.testing.assert_close(merged[name], expected, rtol=0, atol=0)


@pytest.mark.parametrize("weights", [(1, -1), (0, 0)])
def test_c67_a_sum_of_zero_is_refused_before_any_work(
    weights: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        llama(tmp_path / name, seed)
    models = [{"model": m, "parameters": {"weight": w}} for m, w in zip("ab", weights, strict=True)]
    Path("recipe.yml").write_text(json.dumps({"merge_method": "linear", "models": models}), "utf-8")
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(main, ["merge", "recipe.yml", "out"])
    assert result.exit_code == 2
    assert "sum to zero and cannot be normalised" in result.output
    assert sorted(tmp_path.iterdir()) == before


def test_c69_a_weight_is_its_model_s_share() -> None:
    zeros, ones = (plain({"w": torch.full((5, 7), value)}, n) for value, n in ((0.0, "m0"), (1.0, "m1")))
    models = [("m0", 0.25), ("m1", 0.75)]
    for order in (models, models[::-1]):
        listed = [{"model": m, "parameters": {"weight": w}} for m, w in order]
        for base in ({}, {"base_model": "m0"}, {"base_model": "m1"}):
            merged = merge({"m0": zeros, "m1": ones}, merge_method="linear", models=listed, **base)
            assert torch.equal(merged["w"], torch.full((5, 7), 0.75))


@pytest.mark.parametrize("name", [name for name in SEVERAL if name not in GUIDED])
def test_c69_the_order_of_the_list_does_not_matter(name: str) -> None:
    """With equal parameters, and with weights that go along."""
    known = {}
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        shapes = {"w": (33, 17), "deep": (2, 3, 5), "norm.weight": (33,)}
        values = {key: torch.randn(shape, generator=rng).bfloat16() for key, shape in shapes.items()}
        known[f"m{seed}"] = plain(values, f"m{seed}")
    names = ["m1", "m2", "m3"][: number(name)]
    for weights in ([], [0.2, 0.5, 0.3]) if "weight" in METHODS[name].parameters else ([],):
        recipe = recipe_of(name, names, base="m0")
        results = []
        for order in [(0, 1, 2), (2, 0, 1), (1, 0, 2)] if len(names) == 3 else [(0, 1), (1, 0)]:
            each = [{"weight": weights[i]} if weights else {} for i in order]
            recipe["models"] = [{"model": names[i], "parameters": e} for i, e in zip(order, each, strict=True)]
            results.append(merge(known, **recipe))
        for other in results[1:]:
            assert_same_bits(dict(results[0]), dict(other))
        assert len(results) == len(names)


@pytest.mark.parametrize("name", ["fedavg", "fisher", "ot", "regmean"])
def test_c69_nor_to_methods_that_look_at_data(name: str) -> None:
    """The greedy soup and AdaMerging go through models in the order of the list, and say so."""
    known = llamas()
    results = [merge(known, **recipe_of(name, names)) for names in (["m1", "m2", "m3"], ["m3", "m1", "m2"])]
    assert_same_bits(dict(results[0]), dict(results[1]))


# ---- C71, C72, C73


@pytest.mark.parametrize("name", sorted(name for name, m in METHODS.items() if "rescale" in m.parameters))
def test_c71_sums_over_half_precision_tensors_do_not_overflow(name: str) -> None:
    """160000 ones: their sum is past what float16 holds."""
    known = {
        "m0": plain({"w": torch.zeros(400, 400, dtype=torch.float16)}, "m0"),
        "m1": plain({"w": torch.ones(400, 400, dtype=torch.float16)}, "m1"),
    }
    parameters = {"density": 0.5} | ({"epsilon": 0.1} if "epsilon" in METHODS[name].parameters else {})
    merged = merge(known, **recipe_of(name, ["m1"], base="m0", rescale=True, **parameters))["w"]
    assert merged.dtype == torch.float16
    assert merged.isfinite().all()
    if name == "ties":
        assert merged.unique().tolist() == [0.0, 2.0]
        assert int((merged == 2).sum()) == 80000


def mixed(big: float = 1.0) -> dict[str, Checkpoint]:
    made = {}
    for number_, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32]):
        rng = torch.Generator().manual_seed(number_)
        w = torch.randn(5, 7, generator=rng).to(dtype)
        norm = torch.full((7,), big if dtype == torch.float32 else 1.0)
        made[f"m{number_}"] = plain({"w": w, "norm.weight": norm if number_ == 2 else norm.to(dtype)}, f"m{number_}")
    return made


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("base", [None, "m2"])
def test_c72_mixed_dtypes(dtype: str | None, base: str | None, tmp_path: Path) -> None:
    known = mixed()
    recipe: dict[str, Any] = recipe_of("linear", list(known))
    recipe |= {"dtype": dtype} if dtype else {}
    recipe |= {"base_model": base} if base else {}
    out = merge(known, **recipe).save(tmp_path / "out")
    written = open_checkpoint(out)
    expected = dtype or {None: "bfloat16", "m2": "float32"}[base]
    mean = sum(model["w"].double() for model in known.values()) / 3
    kind = getattr(torch, expected)
    assert {written.info(name).dtype for name in written} == {kind}
    assert json.loads((out / "config.json").read_text("utf-8"))["dtype"] == expected
    torch.testing.assert_close(written["w"].double(), mean, rtol=torch.finfo(kind).eps / 2, atol=1e-6)


def test_c72_what_does_not_fit_the_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SymfuseError, match=r"norm\.weight.*float16"):
        merge(mixed(1e30), **recipe_of("linear", ["m0", "m1", "m2"]), dtype="float16").save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(name for name, m in METHODS.items() if m.base == "required"))
def test_c73_a_base_that_is_listed_too_does_not_count_as_a_model(name: str) -> None:
    """Two ways to say the same, which mergekit's recipes both have."""
    known = llamas()
    models = ["m1", "m2", "m3"][: number(name)]
    one = merge(known, **recipe_of(name, models, base="m0"))
    two = merge(known, **recipe_of(name, ["m0", *models], base="m0"))
    assert_same_bits(dict(one), dict(two))


def test_c73_ties_by_hand() -> None:
    """Weights act before the vote: 0.2·3 - 1.0·0.5 - 0.2·… decides each sign."""
    rows = [
        [[3.0, 1.0, -2.0], [0.5, -1.0, 4.0]],
        [[-0.5, 1.0, 1.0], [0.5, 0.25, -0.5]],
        [[-1.0, -4.0, -1.0], [-4.0, 0.5, -1.0]],
    ]
    known = {f"m{i}": plain({"w": torch.tensor(row)}, f"m{i}") for i, row in enumerate(rows, 1)}
    known["m0"] = plain({"w": torch.zeros(2, 3)}, "m0")
    weights = {"m1": 0.2, "m2": 1.0, "m3": 0.2}
    # weighted: .6 .2 -.4 / .1 -.2 .8;  -.5 1 1 / .5 .25 -.5;  -.2 -.8 -.2 / -.8 .1 -.2
    # sums:     -.1 .4 .4 / -.2 .15 .1
    expected = [[-0.7 / 1.2, 1.2 / 1.2, 1.0 / 1.0], [-0.8 / 0.2, 0.35 / 1.2, 0.8 / 0.2]]
    listed = [{"model": m, "parameters": {"weight": w, "density": 1.0}} for m, w in weights.items()]
    for models in (listed, [{"model": "m0", "parameters": {"weight": 5.0, "density": 1.0}}, *listed], listed[::-1]):
        merged = merge(known, merge_method="ties", base_model="m0", models=models)
        torch.testing.assert_close(merged["w"], torch.tensor(expected), rtol=1e-6, atol=1e-6)


# ---- C74, C75


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("arithmetic")
    for seed in range(3):
        llama(root / f"m{seed}", seed)
    return root


@pytest.mark.parametrize("name", ["dare_ties", pytest.param("della", marks=pytest.mark.slow)])
def test_c74_the_same_bytes_however_it_is_run(name: str, folders: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folders)
    density = {"density": 0.3} | ({"epsilon": 0.1} if "epsilon" in METHODS[name].parameters else {})
    recipe = recipe_of(name, ["m1", "m2"], base="m0", **density)

    def tensors(label: str, *options: str, **more: Any) -> dict[str, Tensor]:
        Path(tmp_path / "recipe.yml").write_text(json.dumps(recipe | more), "utf-8")
        command = ["merge", str(tmp_path / "recipe.yml"), str(tmp_path / label), *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        return dict(open_checkpoint(tmp_path / label))

    first = tensors("1", "--max-shard-size", "5GB")
    assert json.loads((tmp_path / "1/symfuse.json").read_text("utf-8"))["seed"] == 0
    assert_same_bits(first, tensors("shards", "--max-shard-size", "30KB"))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_same_bits(first, tensors("order", models=recipe["models"][::-1]))
    other = tensors("seed", seed=1)
    assert json.loads((tmp_path / "seed/symfuse.json").read_text("utf-8"))["seed"] == 1
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_c74_any_number_of_threads(threads: int, folders: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_of("dare_ties", ["m1", "m2"], base="m0", density=0.3))
    known = {f"m{i}": open_checkpoint(folders / f"m{i}", name=f"m{i}") for i in range(3)}
    merged = run_recipes([recipe], known).checkpoint
    out = merged.save(tmp_path / "out", threads=threads)
    assert_same_bits(dict(open_checkpoint(out)), dict(merged))  # which is read by one


def test_c74_the_order_of_tensors_does_not_matter() -> None:
    known = llamas()
    recipe = recipe_of("dare_linear", ["m1", "m2"], base="m0", density=0.3)
    turned = {n: c.replace(tensors=dict(reversed(list(dict(c).items())))) for n, c in known.items()}
    assert list(turned["m0"]) != list(known["m0"])
    assert_same_bits(dict(merge(known, **recipe)), dict(merge(turned, **recipe)))


@pytest.mark.parametrize("name", RANDOM)
def test_c74_densities_one_and_zero_are_exact(name: str) -> None:
    known = halves()
    settings = {"density": 1.0, "weight": 1.0}
    settings |= {"epsilon": 0.0} if "epsilon" in METHODS[name].parameters else {}
    everything = merge(known, **recipe_of(name, ["m1"], base="m0", **settings))
    assert_same_bits(dict(everything), dict(known["m1"]))
    nothing = merge(known, **recipe_of(name, ["m1", "m2"], base="m0", **(settings | {"density": 0.0})))
    assert_same_bits(dict(nothing), dict(known["m0"]))


ELEMENTWISE = ["linear", "soup", "task_arithmetic", "ties", "dare_linear", "dare_ties", "passthrough"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_c75_processor_and_gpu_agree(name: str) -> None:
    from symfuse import api

    known = {n: c.replace(tensors={k: t.half() for k, t in c.items()}) for n, c in llamas().items()}
    models = [known[f"m{i}"] for i in range(1 + number(name))] if METHODS[name].base == "required" else []
    models = models or [known[f"m{i}"] for i in range(number(name))]
    base = 0 if METHODS[name].base == "required" else None
    given = required(name)
    results = [api.merge(models, method=name, base=base, device=device, parameters=given) for device in ("cpu", "cuda")]
    for key in results[0]:
        one, two = (result[key] for result in results)
        tolerance = 0.0 if name in ELEMENTWISE else 2e-3
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


# ---- C77, C78, C80


@pytest.mark.parametrize("name", sorted(METHODS))
def test_c77_no_method_lets_nan_or_infinity_through(name: str, tmp_path: Path) -> None:
    known = dict(llamas())
    bad = dict(known["m1"])
    bad["model.norm.weight"] = bad["model.norm.weight"].clone()
    bad["model.norm.weight"][[5, 7, 9]] = torch.tensor([float("nan"), float("inf"), float("nan")])
    known["m1"] = known["m1"].replace(tensors=bad)
    count = min(2, number(name))
    recipe = recipe_of(name, ["m1", "m2"][:count], base="m0")
    merged = None if name in GUIDED else merge(known, **recipe)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight' of m1 holds 2 NaN and 1 infinite"):
        (merged or merge(known, **recipe)).save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["linear", "task_arithmetic", "ties"])
def test_c77_a_weight_of_zero_does_not_hide_nan(name: str) -> None:
    """0 · NaN is NaN: refused."""
    known = dict(llamas())
    bad = dict(known["m1"]) | {"model.norm.weight": torch.full((32,), float("nan"))}
    known["m1"] = open_checkpoint(bad, config=known["m1"].config, name="m1")
    recipe = recipe_of(name, [], base="m0")
    recipe["models"] = [{"model": m, "parameters": {"weight": w}} for m, w in (("m1", 0.0), ("m2", 1.0))]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight' of m1 holds 32 NaN"):
        dict(merge(known, **recipe))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_c78_one_model_is_copied_to_the_bit_or_refused(name: str) -> None:
    known = halves()
    recipe = recipe_of(name, ["m0"], base="m0")
    least = METHODS[name].models[0]
    if least > 1 or METHODS[name].base == "required":
        # With a base, the only model is the base, which leaves none beside it.
        with pytest.raises(OptionError, match=rf"m0 is the base and the only model|^{name} takes "):
            merge(known, **recipe)
        with pytest.raises(OptionError, match=rf"^{name} (takes|needs)"):
            merge(known, **{key: value for key, value in recipe.items() if key != "base_model"})
        return
    assert_same_bits(dict(merge(known, **recipe)), dict(known["m0"]))


@pytest.mark.parametrize("weights", [(1.0, -1.0), (0.5, 0.5)])
def test_c80_deltas_of_adapters_are_formed_before_they_are_merged(weights: tuple[float, float], tmp_path: Path) -> None:
    folder = llama(tmp_path / "base", 0)
    adapters = [adapter(tmp_path / f"adapter{i}", i) for i in range(2)]
    base = open_checkpoint(folder)
    models = [
        {"model": f"{folder}+{one}", "parameters": {"weight": w}} for one, w in zip(adapters, weights, strict=True)
    ]
    merged = merge({}, merge_method="task_arithmetic", base_model=str(folder), models=models)
    wide = {name: tensor.double() for name, tensor in base.items()}
    dense = [adapted(wide, one) for one in adapters]
    for name, tensor in wide.items():
        expected = tensor + sum(w * (d[name] - tensor) for w, d in zip(weights, dense, strict=True))
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-6, atol=1e-6)

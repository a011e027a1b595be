"""LoRA adapters as inputs and outputs: folders that broke other tools, written by hand. Named after the cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from symfuse import adapters
from symfuse.adapters import factors
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, OutputError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

IN, OUT, RANK = 5, 7, 2
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
SQUARE = "model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["up_proj", "q_proj"]}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base(dtype: torch.dtype = torch.float32, **more: Tensor) -> Checkpoint:
    tensors = {
        f"{UP}.weight": randn(OUT, IN, seed=1), f"{DOWN}.weight": randn(IN, OUT, seed=2),
        f"{SQUARE}.weight": randn(IN, IN, seed=3), f"{SQUARE}.bias": randn(IN, seed=4),
        "model.norm.weight": randn(IN, seed=5), "model.embed_tokens.weight": randn(11, IN, seed=6),
        "lm_head.weight": randn(11, IN, seed=7),
    }  # fmt: skip
    config = {"model_type": "tiny", "vocab_size": 11, "architectures": ["TinyForCausalLM"]}
    return open_checkpoint({n: t.to(dtype) for n, t in (tensors | more).items()}, config=config, name="base")


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config), "utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, rows: int, columns: int, rank: int = RANK, seed: int = 0) -> dict[str, Tensor]:
    return {
        f"base_model.model.{module}.lora_A.weight": randn(rank, columns, seed=seed + 10),
        f"base_model.model.{module}.lora_B.weight": randn(rows, rank, seed=seed + 20),
    }


def product(tensors: dict[str, Tensor], module: str) -> Tensor:
    return tensors[f"base_model.model.{module}.lora_B.weight"] @ tensors[f"base_model.model.{module}.lora_A.weight"]


def test_c78_one_model_and_one_adapter(tmp_path: Path) -> None:
    """W + (8/2)·B·A where the adapter acts, the very tensor elsewhere; lazily, and said in a note."""
    tensors = pair(UP, OUT, IN)
    applied = adapters.apply(base(), write(tmp_path / "a", tensors))
    expected = base()[f"{UP}.weight"] + 4 * product(tensors, UP)
    torch.testing.assert_close(applied[f"{UP}.weight"], expected)
    assert all(torch.equal(applied[name], base()[name]) for name in base() if name != f"{UP}.weight")
    assert applied.name == "base+a"
    assert "adapter a: 1 of 7 tensors changed" in applied.notes
    assert tmp_path / "a" in applied.sources  # so that no output is written into it


def test_a_half_precision_base_is_rounded_once(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() / 100 for name, tensor in pair(UP, OUT, IN).items()}
    small = base(torch.bfloat16)
    applied = adapters.apply(small, write(tmp_path / "a", tensors))
    name = f"{UP}.weight"
    exact = small[name].double() + 4 * product({key: value.double() for key, value in tensors.items()}, UP)
    assert applied.read(name).dtype == torch.float32
    torch.testing.assert_close(applied.read(name).double(), exact, rtol=1e-6, atol=1e-7)
    assert applied.info(name).dtype == torch.bfloat16
    assert torch.equal(applied[name], applied.read(name).bfloat16())


def test_parts_and_blocks_are_those_of_the_whole_and_of_the_base_where_nothing_changes(tmp_path: Path) -> None:
    model = open_checkpoint(base().save(tmp_path / "model"))
    applied = adapters.apply(model, write(tmp_path / "a", pair(UP, OUT, IN)))
    for name in applied:
        torch.testing.assert_close(applied.part(name, 2, 5), applied.read(name).flatten()[2:5], rtol=0, atol=0)
        flat = torch.cat([block.flatten() for block in applied.blocks(name)])
        assert torch.equal(flat, applied.read(name).flatten())


def test_c25_a_square_layer_is_transposed_only_in_the_families_that_store_it_so(tmp_path: Path) -> None:
    name = "h.0.attn.c_proj"
    tensors = pair(name, IN, IN)
    weight, delta = randn(IN, IN), 4 * product(tensors, name)
    folder = write(tmp_path / "a", tensors, target_modules=["c_proj"])
    for family, expected in (("gpt2", weight + delta.T), ("gptj", weight + delta)):
        model = open_checkpoint({f"{name}.weight": weight}, config={"model_type": family}, name="base")
        torch.testing.assert_close(adapters.apply(model, folder)[f"{name}.weight"], expected)
    wide = open_checkpoint({f"{name}.weight": randn(IN, OUT)}, config={"model_type": "other"}, name="base")
    tensors = pair(name, OUT, IN)
    got = adapters.apply(wide, write(tmp_path / "b", tensors))[f"{name}.weight"]  # its shape tells
    torch.testing.assert_close(got, randn(IN, OUT) + 4 * product(tensors, name).T)


@pytest.mark.parametrize("weights", [(1.0, -1.0), (0.5, 0.5)])
def test_c80_deltas_are_formed_before_adapters_are_combined(weights: tuple[float, float], tmp_path: Path) -> None:
    """Task arithmetic over two applied adapters is that of the dense deltas, not of the averaged factors."""
    both = [pair(UP, OUT, IN, seed=seed) for seed in (0, 1)]
    model, name = base(torch.float64), f"{UP}.weight"
    applied = [adapters.apply(model, write(tmp_path / str(i), tensors)) for i, tensors in enumerate(both)]
    merged = model.read(name) + sum(
        w * (a.read(name) - model.read(name)) for w, a in zip(weights, applied, strict=True)
    )
    wide = [{key: value.double() for key, value in tensors.items()} for tensors in both]
    dense = model[name] + sum(w * 4 * product(tensors, UP) for w, tensors in zip(weights, wide, strict=True))
    torch.testing.assert_close(merged, dense, rtol=0, atol=1e-6)
    apart = {key: weights[0] * wide[0][key] + weights[1] * wide[1][key] for key in wide[0]}
    assert float((model[name] + 4 * product(apart, UP) - dense).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({"r": 4}, 4, 8 / 4),
        ({"r": 4, "use_rslora": True}, 4, 8 / 2),
        ({"r": 4, "rank_pattern": {"up_proj": 2}}, 2, 8 / 2),
        ({"r": 4, "rank_pattern": {"p_proj": 2, r".*layers\.\d\.mlp\.\w+": 3}}, 3, 8 / 3),
        ({"r": 4, "alpha_pattern": {"layers.0.mlp.up_proj": 6, "up_proj": 100}}, 4, 6 / 4),
    ],
)
def test_c81_scales(config: dict[str, Any], rank: int, scale: float, tmp_path: Path) -> None:
    tensors = pair(UP, OUT, IN, rank)
    applied = adapters.apply(base(), write(tmp_path / "a", tensors, **config))
    torch.testing.assert_close(applied[f"{UP}.weight"], base()[f"{UP}.weight"] + scale * product(tensors, UP))


def test_c81_a_rank_that_the_config_does_not_give_is_refused(tmp_path: Path) -> None:
    """Where rank_pattern was lost, the scale cannot be known."""
    folder = write(tmp_path / "a", pair(UP, OUT, IN, 3))
    with pytest.raises(CheckpointError, match=r"up_proj has A \[3, 5\] and B \[7, 3\], expected a rank of 2"):
        adapters.apply(base(), folder)


def test_c81_the_bias_of_the_factors_is_scaled_and_needs_a_bias(tmp_path: Path) -> None:
    bias = {f"base_model.model.{SQUARE}.lora_B.bias": randn(IN, seed=8)}
    applied = adapters.apply(base(), write(tmp_path / "a", pair(SQUARE, IN, IN) | bias, lora_bias=True))
    torch.testing.assert_close(applied[f"{SQUARE}.bias"], base()[f"{SQUARE}.bias"] + 4 * randn(IN, seed=8))
    bias = {f"base_model.model.{UP}.lora_B.bias": randn(OUT)}
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.up_proj.bias' is absent"):
        adapters.apply(base(), write(tmp_path / "b", pair(UP, OUT, IN) | bias, lora_bias=True))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "DoRA"), ({"layer_replication": [[0, 1]]}, "layer replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "bare parameters"), ({"use_qalora": True}, "QALoRA"),
        ({"peft_type": "IA3"}, "type IA3"), ({"peft_type": "ADALORA"}, "type ADALORA"), ({"peft_type": None}, "None"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4'"), ({"init_lora_weights": "loftq"}, "'loftq'"),
        ({"r": 0}, "whole number"), ({"lora_alpha": "8"}, "positive number"), ({"rank_pattern": [1]}, "a JSON object"),
        ({"rank_pattern": {"(": 2}}, "not valid"), ({"base_model_name_or_path": 3}, "a text"),
    ],
)  # fmt: skip
def test_c81_other_kinds_and_damaged_configs_are_refused_by_name(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", pair(UP, OUT, IN), **config)
    with pytest.raises(CheckpointError, match=named):
        adapters.apply(base(), folder)


def test_c81_dora_is_known_by_its_tensors_too(tmp_path: Path) -> None:
    magnitude = {f"base_model.model.{UP}.lora_magnitude_vector": randn(OUT)}
    with pytest.raises(CheckpointError, match="lora_magnitude_vector' is not a part of plain LoRA"):
        adapters.apply(base(), write(tmp_path / "a", pair(UP, OUT, IN) | magnitude))


def test_options_of_newer_versions_are_said(tmp_path: Path) -> None:
    applied = adapters.apply(base(), write(tmp_path / "a", pair(UP, OUT, IN), novelty=True, other=None))
    assert any("novelty" in note and "other" not in note for note in applied.notes)


def test_c82_an_adapter_of_other_names_is_refused_with_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair("model.language_model.layers.0.mlp.up_proj", OUT, IN))
    with pytest.raises(
        CheckpointError, match=r"1 of 1 .* not in base: model.language_model.layers.0.mlp.up_proj.weigh"
    ):
        adapters.apply(base(), folder)
    folder = write(tmp_path / "b", pair(UP, OUT, IN) | {"base_model.model.score.weight": randn(3, IN)})
    with pytest.raises(CheckpointError, match=r"1 of 2 .* score.weight; no prefix fits"):
        adapters.apply(base(), folder)


@pytest.mark.parametrize("wrapper", ["", "base_model.model.", "base_model.model._orig_mod.", "module."])
@pytest.mark.parametrize("inner", ["", "model.", "model.text."])
def test_c82_one_prefix_more_or_less(wrapper: str, inner: str, tmp_path: Path) -> None:
    """The adapter's names may have wrappers; and one side a prefix that the other lacks, on all names."""
    tensors = pair(UP, OUT, IN)
    short = UP.removeprefix("model.")
    renamed = {
        name.replace("base_model.model.", wrapper).replace(UP, inner + short): tensor
        for name, tensor in tensors.items()
    }
    model = open_checkpoint({f"{short}.weight": randn(OUT, IN)}, config={}, name="base")
    expected = randn(OUT, IN) + 4 * product(tensors, UP)
    torch.testing.assert_close(adapters.apply(model, write(tmp_path / "a", renamed))[f"{short}.weight"], expected)
    if inner != "model.text.":
        model = open_checkpoint({f"model.{short}.weight": randn(OUT, IN)}, config={}, name="base")
        torch.testing.assert_close(
            adapters.apply(model, write(tmp_path / "b", renamed))[f"model.{short}.weight"], expected
        )


def test_c82_two_possible_places_are_refused(tmp_path: Path) -> None:
    short = UP.removeprefix("model.")
    twins = {f"{tower}.{short}.weight": randn(OUT, IN) for tower in ("vision", "text")}
    with pytest.raises(CheckpointError, match="2 prefixes fit"):
        adapters.apply(open_checkpoint(twins, config={}), write(tmp_path / "a", pair(short, OUT, IN)))


def test_c83_a_folder_is_opened_with_its_base(tmp_path: Path) -> None:
    folder = base().save(tmp_path / "model")
    adapter = write(tmp_path / "a", pair(UP, OUT, IN), base_model_name_or_path=str(folder))
    assert adapters.is_adapter(adapter)
    assert not adapters.is_adapter(folder)
    with_model = write(tmp_path / "both", pair(UP, OUT, IN))
    (with_model / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert not adapters.is_adapter(with_model)
    expected = adapters.apply(base(), adapter)[f"{UP}.weight"]
    for given in (None, str(folder), folder, base()):
        torch.testing.assert_close(adapters.open_adapter(adapter, given)[f"{UP}.weight"], expected)
    with pytest.raises(OutputError, match="is the input"):
        adapters.open_adapter(adapter).save(adapter, overwrite=True)


@pytest.mark.parametrize("named", ["org/model", None, "", "gone/away/model"])
def test_c83_without_a_local_base_the_error_says_how_to_give_one(named: str | None, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair(UP, OUT, IN), base_model_name_or_path=named)
    with pytest.raises(CheckpointError, match=r"Give the base too, as base\+adapter: \S+\+\S+/a$"):
        adapters.open_adapter(folder)


def test_c83_files_that_are_absent_or_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair(UP, OUT, IN))
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            adapters.apply(base(), folder)

    weights.write_bytes(data[:-3])
    refused(r"adapter_model.safetensors is cut short: expected \d+ bytes")
    save_file({}, weights)
    refused("holds no tensors")
    weights.unlink()
    refused(r"neither adapter_model.safetensors nor adapter_model.bin")
    torch.save({"weights": Path("/")}, folder / "adapter_model.bin")
    refused("Python objects besides tensors")
    torch.save([randn(2)], folder / "adapter_model.bin")
    refused("holds list, expected a dictionary of named tensors")
    torch.save(pair(UP, OUT, IN), folder / "adapter_model.bin")
    torch.testing.assert_close(
        adapters.apply(base(), folder)[f"{UP}.weight"],
        base()[f"{UP}.weight"] + 4 * product(pair(UP, OUT, IN), UP),
    )
    (folder / "adapter_config.json").write_text("[1]", "utf-8")
    refused("holds list, expected a JSON object")
    (folder / "adapter_config.json").write_text("{", "utf-8")
    refused("cannot be read as JSON")
    (folder / "adapter_config.json").unlink()
    refused("is not an adapter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"base_model.model.{UP}.lora_B.weight"), "only .*lora_A.weight, expected both"),
        (lambda t: t.update(pair(UP, OUT, IN + 1)), r"a delta of \[7, 6\], which does not fit .*\[7, 5\]"),
        (lambda t: t.update({"base_model.model.model.norm.weight": randn(3)}), r"is \[3\], expected \[5\]"),
        (lambda t: t.update({"base_model.model.lm_head.weight": randn(12, IN)}), "Resize the base's vocabulary"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path) -> None:
    tensors = pair(UP, OUT, IN)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        adapters.apply(base(), write(tmp_path / "a", tensors))


def test_nan_in_an_adapter_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = pair(UP, OUT, IN) | pair(SQUARE, IN, IN)
    tensors[f"base_model.model.{SQUARE}.lora_B.weight"][0, 0] = torch.nan
    applied = adapters.apply(base(), write(tmp_path / "a", tensors))
    with pytest.raises(CheckpointError, match=r"lora_B.weight' of \S+/a holds 1 NaN"):
        applied.read(f"{SQUARE}.weight")


def test_a_sum_that_overflows_the_dtype_of_the_base_is_refused(tmp_path: Path) -> None:
    tensors = pair(UP, OUT, IN) | {name: tensor * 300 for name, tensor in pair(SQUARE, IN, IN).items()}
    applied = adapters.apply(base(torch.float16), write(tmp_path / "a", tensors))
    assert bool(applied.read(f"{SQUARE}.weight").isfinite().all())
    with pytest.raises(IncompatibleError, match=r"does not fit in float16"):
        applied[f"{SQUARE}.weight"]


# -- extract


def tuned(**deltas: Tensor) -> Checkpoint:
    names = {"up": f"{UP}.weight", "square": f"{SQUARE}.weight", "bias": f"{SQUARE}.bias", "norm": "model.norm.weight"}
    changed = {names[key]: delta for key, delta in deltas.items()}
    tensors = {name: base()[name] + changed.get(name, 0.0) for name in base()}
    return open_checkpoint(tensors, config=base().config, name="tuned")


def test_the_error_is_that_of_the_dropped_singular_values() -> None:
    delta, square = randn(OUT, IN, seed=30), randn(IN, 1, seed=31) @ randn(1, IN, seed=32)
    adapter = adapters.extract_lora(tuned(up=delta, square=square, norm=randn(IN, seed=33)), base(), 2)
    s = torch.linalg.svdvals(delta.double())
    torch.testing.assert_close(adapter.factors[UP].error, float(s[2:].norm() / s.norm()), rtol=1e-5, atol=0)
    norms = [float(t.double().norm()) for t in (s[2:], randn(IN, seed=33), s, square)]
    torch.testing.assert_close(
        adapter.error, ((norms[0] ** 2 + norms[1] ** 2) / (norms[1] ** 2 + norms[2] ** 2 + norms[3] ** 2)) ** 0.5,
        rtol=1e-5, atol=0,
    )  # fmt: skip
    assert list(adapter.left_out) == ["model.norm.weight"]
    assert "model.norm.weight: left out, a difference of norm" in adapter.report()[-1]
    assert f"relative error {adapter.error:.3g} in total" in adapter.report()[0]


def test_a_difference_of_lower_rank_gets_fewer_rows_and_its_own_scale(tmp_path: Path) -> None:
    square = randn(IN, 1, seed=31) @ randn(1, IN, seed=32)
    model = tuned(up=randn(OUT, IN, seed=30), square=square, bias=randn(IN, seed=3), norm=randn(IN, seed=4))
    adapter = adapters.extract_lora(model, base(), 4, alpha=3, save_rest=True)
    folder = adapter.save(tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    assert list(config["rank_pattern"].values()) == [1]
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 3, "lora_only", "CAUSAL_LM")
    applied = adapters.apply(base(), folder)
    torch.testing.assert_close(applied[f"{SQUARE}.weight"], model[f"{SQUARE}.weight"])
    assert torch.equal(applied[f"{SQUARE}.bias"], model[f"{SQUARE}.bias"])
    assert torch.equal(applied["model.norm.weight"], model["model.norm.weight"])
    keys = load_file(folder / "adapter_model.safetensors").keys()
    assert f"base_model.model.{SQUARE}.base_layer.bias" in keys  # where peft looks for it
    assert not any(DOWN in key for key in keys)  # it does not differ


def test_patterns_choose_modules() -> None:
    model = tuned(up=randn(OUT, IN), square=randn(IN, IN))
    assert list(adapters.extract_lora(model, base(), 1, modules=["up_proj"]).factors) == [UP]
    adapter = adapters.extract_lora(model, base(), 1, exclude=[r"layers\.\d+\.mlp\.\w+"])
    assert (list(adapter.factors), list(adapter.left_out)) == ([SQUARE], [f"{UP}.weight"])
    with pytest.raises(OptionError, match="'up_prj' matches no linear layer"):
        adapters.extract_lora(model, base(), 1, modules=["up_prj"])
    with pytest.raises(OptionError, match="not valid"):
        adapters.extract_lora(model, base(), 1, exclude=["("])


def test_large_differences_are_decomposed_on_a_random_subspace_and_this_is_said() -> None:
    """Near the exact decomposition, with the same numbers every time."""
    u, v = torch.linalg.qr(randn(1100, 40)).Q, torch.linalg.qr(randn(1050, 40, seed=1)).Q
    delta = (u * 0.8 ** torch.arange(40)) @ v.T
    one, two = (factors.factorise(UP, delta, 6, 6, torch.float32) for _ in range(2))
    assert not one.exact
    assert torch.equal(one.up, two.up)
    assert torch.equal(one.down, two.down)
    s = 0.8 ** torch.arange(40, dtype=torch.float64)
    torch.testing.assert_close(one.error, float(s[6:].norm() / s.norm()), rtol=1e-4, atol=0)
    assert factors.factorise(UP, delta[:50], 6, 6, torch.float32).exact


def test_models_that_do_not_differ_by_an_adapter_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="differ in no selected linear layer"):
        adapters.extract_lora(tuned(norm=randn(IN)), base(), 2)
    with pytest.raises(IncompatibleError, match=r"only one of them has score.weight"):
        adapters.extract_lora(base(**{"score.weight": randn(3, IN)}), base(), 2)
    with pytest.raises(IncompatibleError, match=r"'lm_head.weight' is float32\[12, 5\] in base and float32\[11, 5\]"):
        adapters.extract_lora(base(**{"lm_head.weight": randn(12, IN)}), base(), 2)
    for rank, options in ((0, {}), (1, {"alpha": 0}), (1, {"dtype": torch.int8})):
        with pytest.raises(OptionError, match=r"at least 1|floating-point"):
            adapters.extract_lora(tuned(up=randn(OUT, IN)), base(), rank, **options)


def test_an_adapter_appears_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [model.save(tmp_path / name) for name, model in (("base", base()), ("tuned", tuned(up=randn(OUT, IN))))]
    before = {path: path.read_bytes() for model in models for path in model.iterdir()}
    adapter = adapters.extract_lora(open_checkpoint(models[1]), open_checkpoint(models[0]), 2)
    with pytest.raises(OutputError, match="lies inside the input"):
        adapter.save(models[0] / "lora")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("symfuse.adapters.extraction.write_tensors", full)
        with pytest.raises(OutputError, match="No space left"):
            adapter.save(tmp_path / "new" / "lora")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]
    folder = adapter.save(tmp_path / "new" / "lora")
    with pytest.raises(OutputError, match="exists"):
        adapter.save(folder)
    assert {path: path.read_bytes() for path in before} == before
    torch.testing.assert_close(
        adapters.open_adapter(folder)[f"{UP}.weight"] - base()[f"{UP}.weight"],
        product(load_file(folder / "adapter_model.safetensors"), UP), rtol=1e-4, atol=1e-5,
    )  # fmt: skip

"""Bad input of adapters: numbers that are no weights, numbers without end, files that are no files. One message each,
and never an adapter or a model with NaN or infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from symfuse import adapters
from symfuse.adapters import factors
from symfuse.cli import main
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, OutputError, SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint

OUT, IN, RANK = 7, 5, 2
A, B = "base_model.model.up.lora_A.weight", "base_model.model.up.lora_B.weight"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["up"]}
NOT_WEIGHTS = [torch.int8, torch.int64, torch.uint64, torch.bool, torch.complex64]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model(up: Tensor, name: str = "base", config: dict[str, Any] | None = None, **more: Tensor) -> Checkpoint:
    tensors = {"norm.weight": torch.ones(IN), "up.weight": up, "up.bias": randn(OUT)} | more
    return open_checkpoint(tensors, config=config or {"architectures": ["TinyForCausalLM"]}, name=name)


def pair() -> dict[str, Tensor]:
    return {A: randn(RANK, IN, seed=1), B: randn(OUT, RANK, seed=2)}


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config), "utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


# -- adapters that are read


@pytest.mark.parametrize("dtype", NOT_WEIGHTS)
@pytest.mark.parametrize("key", [A, B, "base_model.model.up.lora_B.bias", "base_model.model.norm.weight"])
def test_numbers_of_an_adapter_that_are_no_weights(key: str, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = {"base_model.model.up.lora_B.bias": randn(OUT), "base_model.model.norm.weight": randn(IN)}
    tensors = pair() | whole
    folder = write(tmp_path / "a", tensors | {key: tensors[key].abs().to(dtype)})
    found = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"a: '{key}' is {found}\[.*expected floating-point numbers"):
        adapters.apply(model(randn(OUT, IN)), folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64])
def test_factors_of_any_floating_dtype_are_added(dtype: torch.dtype, tmp_path: Path) -> None:
    base, tensors = model(randn(OUT, IN)), {key: tensor.to(dtype) for key, tensor in pair().items()}
    applied = adapters.apply(base, write(tmp_path / "a", tensors))
    expected = base["up.weight"].double() + 2 * tensors[B].double() @ tensors[A].double()
    torch.testing.assert_close(applied["up.weight"].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(load_file(applied.save(tmp_path / "o") / "model.safetensors")["up.weight"], applied["up.weight"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("r", 2.5, "r is 2.5, expected a whole number from 1"),
        ("r", 2.0, "r is 2.0, expected a whole number"),
        ("r", True, "r is True, expected a whole number"),
        ("r", 10**400, "r is 10{59}…, expected a whole number from 1 to 2147483647"),
        ("rank_pattern", {"up": 2.5}, "rank_pattern of 'up' is 2.5, expected a whole number"),
        ("rank_pattern", [2], r"rank_pattern is \[2\], expected a JSON object"),
        ("rank_pattern", {"(": 2}, r"rank_pattern: the pattern '\(' is not valid"),
        ("rank_pattern", {"(" * 10000 + ")" * 10000: 2}, "is not valid"),
        # valid alone, and not at the end of a name
        ("alpha_pattern", {"(?i)UP": 2}, r"alpha_pattern: the pattern '\(\?i\)UP' is not valid"),
        ("lora_alpha", 1e300, r"lora_alpha is 1e\+300, expected a positive number below 3.4e38"),
        ("lora_alpha", 10**400, "lora_alpha is 10{59}…, expected a positive number"),
        ("lora_alpha", math.inf, "lora_alpha is inf, expected a positive number"),
        ("lora_alpha", math.nan, "lora_alpha is nan, expected a positive number"),
        ("lora_alpha", True, "lora_alpha is True, expected a positive number"),
        ("alpha_pattern", {"up": 10**400}, "alpha_pattern of 'up' is 10{59}…, expected a positive number"),
        ("use_rslora", "false", "use_rslora is 'false', expected true or false"),
        ("fan_in_fan_out", "no", "fan_in_fan_out is 'no', expected true or false"),
        ("base_model_name_or_path", 3, "base_model_name_or_path is 3, expected a text"),
    ],
)
def test_values_of_the_config(key: str, value: object, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair(), **{key: value})
    with pytest.raises(CheckpointError, match=words):
        adapters.apply(model(randn(OUT, IN)), folder)


def test_a_key_that_occurs_twice(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair())
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "r": 4}', "utf-8")
    with pytest.raises(CheckpointError, match="key 'r' occurs twice"):
        adapters.apply(model(randn(OUT, IN)), folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"junk", "cannot be read; it is text"),
        (b"\x85", "cannot be read; it is cut short, or not a PyTorch file: copy or download it again"),
        (b"q", "cannot be read; it is text"),
        (b"", "cannot be read"),
        (b"\x80\x02", "cannot be read"),
        (b"PK\x03\x04junk", "cannot be read"),
    ],
)
def test_a_file_that_is_no_pickle(content: bytes, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair())
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"adapter_model.bin {words}"):
        adapters.apply(model(randn(OUT, IN)), folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {3: tensors[A]}, "the key 3 is not a tensor's name"),
        (lambda tensors: {A: tensors[A].to_sparse(), B: tensors[B]}, "torch.sparse_coo, expected a dense tensor"),
        (lambda tensors: {A: tensors[A].to("meta"), B: tensors[B]}, "without data, expected a dense tensor"),
    ],
)
def test_tensors_that_cannot_be_added(
    change: Callable[[dict[str, Tensor]], dict[Any, Tensor]], words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", pair())
    (folder / "adapter_model.safetensors").unlink()
    torch.save(change(pair()), folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=words):
        adapters.apply(model(randn(OUT, IN)), folder)


def test_a_state_dict_inside_another_is_read_and_this_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair())
    expected = adapters.apply(model(randn(OUT, IN)), folder)["up.weight"]
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"state_dict": pair()}, folder / "adapter_model.bin")
    applied = adapters.apply(model(randn(OUT, IN)), folder)
    assert torch.equal(applied["up.weight"], expected)
    assert any("under the key 'state_dict'" in note for note in applied.notes)


def test_a_product_that_overflows_is_never_written(tmp_path: Path) -> None:
    """Also where the base has the dtype of the product, so that nothing is rounded."""
    tensors = {key: tensor * 1e30 for key, tensor in pair().items()}
    folder = write(tmp_path / "a", {"base_model.model.norm.weight": randn(IN)} | tensors)
    applied = adapters.apply(model(randn(OUT, IN)), folder)
    for read in (applied.__getitem__, applied.read):
        with pytest.raises(IncompatibleError, match=r"up.weight: .* does not fit in torch.float32"):
            read("up.weight")
    with pytest.raises(IncompatibleError, match=r"does not fit in torch\.float32"):
        applied.save(tmp_path / "o")
    assert not (tmp_path / "o").exists()


# -- adapters that are extracted


@pytest.mark.parametrize("shape", [(OUT, IN), (1100, 1050)])  # a full decomposition, and a randomised one
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1.0, 1e20, 1e30, 6e37])
def test_differences_of_any_size_are_decomposed_as_well(size: float, shape: tuple[int, int]) -> None:
    rows, columns = shape
    low = randn(rows, RANK, seed=1) @ randn(RANK, columns, seed=2)
    unit = low + randn(rows, columns, seed=3) / 8
    delta = unit / unit.abs().amax() * size * 5
    found = factors.factorise("up", delta, RANK, 4, torch.float32)
    s = torch.linalg.svdvals(delta.double())
    torch.testing.assert_close(found.error, float(s[RANK:].norm() / s.norm()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.norm, float(s.norm()), rtol=1e-5, atol=0)
    product = 4 / found.rank * found.up.double() @ found.down.double()
    lost = float((product - delta.double()).norm() / s.norm())
    torch.testing.assert_close(lost, found.error, rtol=1e-4, atol=1e-6)


def test_a_difference_that_overflows() -> None:
    base, tuned = model(torch.full((OUT, IN), -3e38)), model(torch.full((OUT, IN), 3e38), "tuned")
    with pytest.raises(IncompatibleError, match=r"'up.weight': the difference of tuned and base does not fit in .*32"):
        adapters.extract_lora(tuned, base, RANK)


@pytest.mark.parametrize(
    ("size", "words"), [(1e30, "up.lora_B: .* do not fit in float16"), (1e-30, "up.lora_B: .*zero")]
)
def test_factors_that_do_not_fit_their_dtype(size: float, words: str) -> None:
    base, tuned = model(torch.zeros(OUT, IN)), model(randn(OUT, IN) * size, "tuned")
    assert adapters.extract_lora(tuned, base, IN).error < 1e-5
    with pytest.raises(IncompatibleError, match=f"{words}.*(take|use) a wider one"):
        adapters.extract_lora(tuned, base, IN, dtype=torch.float16)


def test_the_error_of_large_differences_is_a_number() -> None:
    """Also when the squares of the norms are more than a double can hold."""
    delta = {"up": randn(OUT, IN).double() * 1e150, "bias": torch.ones(OUT).double() * 1e151}
    tuned = model(delta["up"], "tuned", **{"up.bias": delta["bias"]})
    base = model(torch.zeros(OUT, IN).double(), **{"up.bias": torch.zeros(OUT).double()})
    adapter = adapters.extract_lora(tuned, base, IN, dtype=torch.float64)
    norms = [float(one.norm() / 1e150) for one in delta.values()]
    torch.testing.assert_close(adapter.error, norms[1] / math.hypot(*norms), rtol=1e-9, atol=0)
    adapter = adapters.extract_lora(
        model(delta["up"] * 1e50, "tuned"), model(base["up.weight"]), IN, dtype=torch.float64
    )
    assert adapter.error < 1e-9


@pytest.mark.parametrize("dtype", NOT_WEIGHTS)
@pytest.mark.parametrize("which", ["base", "tuned", "both"])
def test_layers_of_integers(which: str, dtype: torch.dtype) -> None:
    other = randn(OUT, IN, seed=1).abs().to(dtype)
    base = model(randn(OUT, IN) if which == "tuned" else other)
    tuned = model(randn(OUT, IN, seed=2) if which == "base" else randn(OUT, IN, seed=3).abs().to(dtype), "tuned")
    found = str(dtype).removeprefix("torch.")
    where = "base" if which == "base" else "tuned"
    with pytest.raises(CheckpointError, match=rf"{where}: 'up.weight' is {found}\[7, 5\], expected floating-point"):
        adapters.extract_lora(tuned, base, RANK)


def test_buffers_of_integers_are_not_compared_but_with_others_they_are_refused() -> None:
    base, tuned = model(torch.zeros(OUT, IN)), model(randn(OUT, IN), "tuned")
    ids = {"position_ids": torch.arange(4)}
    both = [open_checkpoint(dict(one) | ids, config=one.config, name=one.name) for one in (tuned, base)]
    assert list(adapters.extract_lora(*both, RANK).factors) == ["up"]
    wide = open_checkpoint(dict(base) | {"position_ids": torch.arange(4.0)}, config=base.config, name="base")
    with pytest.raises(CheckpointError, match=r"tuned: 'position_ids' is int64\[4\], expected floating-point"):
        adapters.extract_lora(both[0], wide, RANK)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("architectures", 3, "architectures is 3, expected a list"),
        ("architectures", {"a": 1}, "expected a list"),
        ("architectures", "TinyForCausalLM", "expected a list"),
        ("tie_word_embeddings", "true", "tie_word_embeddings is 'true', expected true or false"),
        ("architectures", [3], None),
        ("architectures", [], None),
        ("architectures", None, None),
        ("tie_word_embeddings", None, None),
        ("text_config", 3, None),
        ("text_config", [1], None),
        ("text_config", {"vocab_size": [1]}, None),
        ("vocab_size", "7", None),
    ],
)
def test_configs_of_the_wrong_kind(field: str, value: object, words: str | None) -> None:
    config = {"architectures": ["TinyForCausalLM"], field: value}
    base, tuned = model(torch.zeros(OUT, IN), config=config), model(randn(OUT, IN), "tuned", config)
    if words is None:
        assert list(adapters.extract_lora(tuned, base, RANK).factors) == ["up"]
    else:
        with pytest.raises(SpecError, match=f"^base: config.json: .*{words}"):
            adapters.extract_lora(tuned, base, RANK)


@pytest.mark.parametrize("value", [10**400, 2**31, 0, -1])
def test_ranks_and_alphas_that_no_adapter_has(value: int) -> None:
    base, tuned = model(torch.zeros(OUT, IN)), model(randn(OUT, IN), "tuned")
    for options in ({"rank": value}, {"rank": RANK, "alpha": value}):
        with pytest.raises(OptionError, match="whole numbers, at least 1 and at most 2147483647"):
            adapters.extract_lora(tuned, base, **options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_dtypes_that_no_adapter_has(dtype: torch.dtype) -> None:
    base, tuned = model(torch.zeros(OUT, IN)), model(randn(OUT, IN), "tuned")
    with pytest.raises(OptionError, match="expected a common floating-point one: float32, bfloat16, float16, float64"):
        adapters.extract_lora(tuned, base, RANK, dtype=dtype)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left")

    adapter = adapters.extract_lora(model(randn(OUT, IN), "tuned"), model(torch.zeros(OUT, IN)), RANK)
    monkeypatch.setattr("symfuse.adapters.extraction.write_tensors", full)
    with pytest.raises(OutputError, match="No space left"):
        adapter.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


# -- the command line


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model(torch.zeros(OUT, IN)).save("base")
    model(randn(OUT, IN), "tuned").save("tuned")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--alpha", "9" * 400], 2, "at most 2147483647"),
        (["--rank", "9" * 400], 2, "at most 2147483647"),
        (["--alpha", "9" * 5000], 2, "Invalid value for '--alpha'"),
        *[
            (["--dtype", name], 2, "is not one of 'float32', 'bfloat16', 'float16', 'float64'")
            for name in ("float4", "float8", "float8_e8m0fnu", "float4_e2m1fn_x2", "int8", "Tensor", "")
        ],
    ],
)
def test_extract_lora_ends_with_one_message(folders: Path, options: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(main, ["extract-lora", "tuned", "--base", "base", "-o", "o", "--rank", "2", *options])
    assert (result.exit_code, type(result.exception)) == (code, SystemExit)
    assert words in result.stderr
    assert not (folders / "o").exists()


def test_extract_lora_knows_before_the_work_that_it_cannot_write(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: Any, **options: Any) -> None:
        raise AssertionError("the adapter was computed")

    monkeypatch.setattr("symfuse.api.extract_lora", work)
    result = CliRunner().invoke(main, ["extract-lora", "tuned", "--base", "base", "-o", "base/o", "--rank", "2"])
    assert result.exit_code == 8
    assert "lies inside the input" in result.stderr

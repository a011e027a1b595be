"""Opening what is in memory, and what a checkpoint promises about laziness, names and notes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from symfuse.errors import CheckpointError, OptionError
from symfuse.io import Checkpoint, TensorInfo, scan
from symfuse.io import open as open_checkpoint

TEXT = {
    "vocab_size": 37,
    "hidden_size": 20,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "max_position_embeddings": 17,
}


def bert() -> transformers.BertForMaskedLM:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)).eval()


def gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "n_embd": 20, "n_head": 4, "n_inner": 28, "n_layer": 2, "n_positions": 17}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


def mixtral() -> transformers.MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = TEXT | {"num_key_value_heads": 2, "num_local_experts": 3}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()


def t5() -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "d_model": 20, "num_heads": 4, "d_kv": 5, "d_ff": 28, "num_layers": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()


class Counting(Mapping[str, Tensor]):
    """A lazy mapping that remembers what was computed."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.computed = names, []  # type: tuple[list[str], list[str]]

    def __getitem__(self, name: str) -> Tensor:
        self.computed.append(name)
        return torch.full((2,), float(self.names.index(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("build", [bert, gpt2, mixtral, t5])
def test_a_live_model_is_what_save_pretrained_writes(build: type, tmp_path: Path) -> None:
    model = build()
    checkpoint = open_checkpoint(model)
    model.save_pretrained(tmp_path / "reference")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    assert set(checkpoint) == set(reference)
    for name, tensor in reference.items():
        assert torch.equal(checkpoint[name], tensor), name
    assert checkpoint.name == type(model).__name__
    assert checkpoint.config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("build", [bert, gpt2])
@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_transformers_loads_what_is_saved(build: type, max_shard_size: str, tmp_path: Path) -> None:
    model = build()
    out = open_checkpoint(model).save(tmp_path / "out", max_shard_size=max_shard_size)
    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert {key: list(value) for key, value in report.items()} == {
        "missing_keys": [],
        "unexpected_keys": [],
        "mismatched_keys": [],
        "error_msgs": [],
    }
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
        model.get_input_embeddings().weight.mul_(1.5)  # negative control
        assert not torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_live_model_is_not_copied() -> None:
    model = bert()
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    assert open_checkpoint(model)[name].data_ptr() == model.get_parameter(name).data_ptr()
    assert not open_checkpoint(model)[name].requires_grad


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrapped_live_models(wrap: type) -> None:
    model = bert()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile imports modules of torch that torch deprecates
        wrapped = wrap(model)
    assert set(open_checkpoint(wrapped)) == set(open_checkpoint(model))


def test_other_modules_need_a_config() -> None:
    module = nn.Linear(3, 2)
    with pytest.raises(OptionError, match="Linear has no config of its own: pass config="):
        open_checkpoint(module)
    checkpoint = open_checkpoint(module, config={"model_type": "linear"})
    assert (checkpoint.name, set(checkpoint)) == ("Linear", {"weight", "bias"})


def test_a_model_with_an_adapter_attached_is_refused() -> None:
    model = bert()
    model.peft_config = {"default": object()}
    with pytest.raises(CheckpointError, match="adapter attached: merge it first"):
        open_checkpoint(model)


def test_a_state_dictionary() -> None:
    weights = {"w": nn.Parameter(torch.ones(2, 3))}
    with pytest.raises(OptionError, match="pass config="):
        open_checkpoint(weights)
    config = transformers.BertConfig(**TEXT)
    checkpoint = open_checkpoint(weights, config=config, name="mine")
    assert checkpoint.config == config.to_dict()
    assert (checkpoint.name, checkpoint.folder, checkpoint.where("w")) == ("mine", None, "mine")
    assert checkpoint.info("w") == TensorInfo(torch.float32, (2, 3))
    assert checkpoint.info("w").nbytes == 24
    assert not checkpoint["w"].requires_grad


def test_a_state_dictionary_that_is_none() -> None:
    for weights, message in (
        ({}, "no tensors"),
        ({"w": torch.ones(2, device="meta")}, "'?w'? on the meta device"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(weights, config={})


def test_ties_of_a_state_dictionary_are_kept_once_where_the_config_ties() -> None:
    table = torch.ones(37, 20)
    weights = {"embed": table, "head": table, "layer.0": torch.ones(20, 20)}
    weights["layer.1"] = weights["layer.0"]  # a repeated layer is no tie
    tied = open_checkpoint(weights, config={"tie_word_embeddings": True, "vocab_size": 37})
    assert list(tied) == ["embed", "layer.0", "layer.1"]
    assert tied.notes == ("left out as ties of earlier tensors: head",)
    untied = open_checkpoint(weights, config={"tie_word_embeddings": False, "vocab_size": 37})
    assert list(untied) == list(weights)


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="models in files"):
        open_checkpoint({"w": torch.ones(1)}, config={}, revision="main")
    with pytest.raises(OptionError, match="local folder"):
        open_checkpoint(tmp_path, revision="main")
    with pytest.raises(OptionError, match="config must be a mapping"):
        open_checkpoint({"w": torch.ones(1)}, config=[1])


def test_nothing_is_computed_before_it_is_asked_for() -> None:
    names = ["a", "b", "c"]
    lazy = Counting(names)
    infos = {name: TensorInfo(torch.float32, (2,)) for name in names}
    checkpoint = Checkpoint(lazy, {}, name="lazy", infos=infos)
    lazy.computed.clear()  # the type checks of the tests look at a value of each mapping that is passed
    assert "b" in checkpoint
    assert "z" not in checkpoint
    assert (list(checkpoint), len(checkpoint), checkpoint.info("c").shape) == (names, 3, (2,))
    assert lazy.computed == []
    assert torch.equal(checkpoint["b"], torch.ones(2))
    assert lazy.computed == ["b"]


def test_saving_computes_each_tensor_once(tmp_path: Path) -> None:
    lazy = Counting(["a", "b", "c"])
    infos = {name: TensorInfo(torch.float32, (2,)) for name in lazy.names}
    checkpoint = Checkpoint(lazy, {"x": 1}, name="lazy", infos=infos)
    lazy.computed.clear()
    out = checkpoint.save(tmp_path / "out", max_shard_size=10, threads=1)
    # The type checker of the tests reads the first tensor wherever a checkpoint is passed on.
    assert [name for name in lazy.computed if name != "a"] == ["b", "c"]
    assert open_checkpoint(out).where("b") == "model-00002-of-00003.safetensors"


def test_replace() -> None:
    first = Checkpoint({"w": torch.ones(2)}, {"a": [1]}, name="first", notes=("note",))
    second = first.replace(tensors={"v": torch.zeros(3)}, name="second")
    assert (list(second), second.name, second.config, second.notes) == (
        ["v"],
        "second",
        {"a": [1]},
        ("note",),
    )
    assert list(first) == ["w"]
    assert first.replace(config={"b": 2}).config == {"b": 2}
    lazy = first.replace(tensors=Counting(["a"]), infos={"a": TensorInfo(torch.float32, (2,))})
    assert lazy.info("a").shape == (2,)
    assert open_checkpoint(second, name="third").name == "third"


def test_the_config_is_a_copy() -> None:
    config = {"inner": {"a": 1}}
    checkpoint = Checkpoint({"w": torch.ones(2)}, config, name="x")
    config["inner"]["a"] = 2
    assert checkpoint.config == {"inner": {"a": 1}}


def test_an_unknown_tensor_is_a_key_error() -> None:
    checkpoint = Checkpoint({"w": torch.ones(2)}, {}, name="x")
    with pytest.raises(KeyError, match="absent"):
        checkpoint["absent"]
    assert checkpoint.get("absent") is None


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scan_finds_one_bad_value_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 3, 129, 1000):
        clean = torch.linspace(-1, 1, size).to(dtype)
        scan("w", clean)
        for position in {0, size // 2, size - 1}:
            damaged = clean.clone()
            damaged[position] = bad
            with pytest.raises(CheckpointError, match=r"'w' of model\.safetensors holds [01] NaN and [01] infinite"):
                scan("w", damaged, "model.safetensors")


def test_scan_counts() -> None:
    tensor = torch.ones(3, 4)
    tensor[0, :3] = torch.nan
    tensor[1, 0], tensor[2, 1] = torch.inf, -torch.inf
    with pytest.raises(CheckpointError, match="holds 3 NaN and 2 infinite values among 12"):
        scan("w", tensor)


def test_scan_is_not_misled_by_overflow_or_cancelling_infinities() -> None:
    scan("large", torch.full((9,), torch.finfo(torch.float32).max))
    scan("large", torch.full((9, 3), 60000.0, dtype=torch.float16))
    scan("integers", torch.tensor([2**62, 2**62]))
    scan("empty", torch.zeros(0))
    with pytest.raises(CheckpointError, match="2 infinite"):
        scan("w", torch.tensor([torch.inf, -torch.inf]))


def test_hub_id_offline() -> None:
    with pytest.raises(CheckpointError, match=r"'nobody/nothing' is neither a folder here nor .* HF_HUB_OFFLINE"):
        open_checkpoint("nobody/nothing")


def test_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    weights = {"w": torch.ones(2)}
    asked: list[object] = []

    def snapshot(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision))
        assert "*.py" not in allow_patterns
        if "*.bin" in allow_patterns:
            torch.save(weights, tmp_path / "pytorch_model.bin")
        (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("org/name", revision="v1")
    assert asked == [("org/name", "v1"), ("org/name", "v1")]  # .bin only after there were no safetensors
    assert (checkpoint.name, checkpoint.folder, checkpoint.config) == ("org/name", tmp_path, {"a": 1})
    assert torch.equal(checkpoint["w"], weights["w"])


def test_transformers_is_not_imported_to_open_a_folder(tmp_path: Path) -> None:
    out = Checkpoint({"w": torch.ones(2)}, {}, name="x").save(tmp_path / "out")
    script = "import sys, symfuse.io as io; io.open(sys.argv[1])['w']; print('transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", script, str(out)], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout == "False\n"

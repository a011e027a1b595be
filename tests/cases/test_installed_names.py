"""D08–D10: what the installed transformers calls a tensor in memory is known for folders, state dicts and adapters, in
and out; round trips with peft itself for every declared family."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import MODELS, case, marked, model_of, real

from symfuse import adapters
from symfuse.architectures import Model
from symfuse.io import open as open_checkpoint
from symfuse.verification import run

peft = pytest.importorskip("peft", reason="peft is not installed")

# Inside nn.MultiheadAttention: its weight is read, and the layer never called.
UNCALLED = torch.nn.modules.linear.NonDynamicallyQuantizableLinear
LABELS = [label for label in MODELS if not label.startswith(("torch-", "sceptr"))]  # those of transformers


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def linear(module: torch.nn.Module) -> list[str]:
    """What peft can adapt of a module, but for its output head."""
    head = module.get_output_embeddings()
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and part is not head and type(part) is not UNCALLED]


@pytest.mark.parametrize("label", marked(LABELS))
def test_d09_base_and_extracted_adapter_are_the_tuned_model(label: str, tmp_path: Path) -> None:
    base = case(label)
    module: Any = copy.deepcopy(real(base.checkpoint))  # weights are those of the checkpoint
    torch.manual_seed(3)
    with torch.no_grad():
        for name in linear(module):
            weight = module.get_submodule(name).weight
            weight.add_(torch.randn(len(weight), 1).double() @ torch.randn(1, weight.shape[1]).double() / 16)
    tuned = open_checkpoint(module)
    expected = run(module, base.inputs)
    adapter = adapters.extract(tuned, base.checkpoint, 1, dtype=torch.float64)
    assert not adapter.left_out, adapter.left_out
    loaded = peft.PeftModel.from_pretrained(real(base.checkpoint), adapter.save(tmp_path / "a")).eval()
    found = run(loaded.get_base_model(), base.inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert any(not torch.allclose(base.outputs[name], value, rtol=1e-5, atol=1e-7) for name, value in expected.items())


@pytest.mark.parametrize("label", marked(LABELS))
def test_d09_base_and_adapter_of_peft_are_what_peft_merges(label: str, tmp_path: Path) -> None:
    base = case(label).checkpoint
    module: Any = copy.deepcopy(real(base))  # what is merged, is merged in place
    model = peft.get_peft_model(module, peft.LoraConfig(r=1, target_modules=linear(module)))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 4)
    model.save_pretrained(tmp_path / "a")
    expected = open_checkpoint(model.merge_and_unload())
    found = adapters.apply(base, tmp_path / "a")
    assert set(found) == set(base)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name].to(found[name].dtype), rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(found[name], base[name]) for name in base)


@pytest.mark.parametrize("label", marked(LABELS))
def test_d08_the_names_of_memory_are_read_as_those_of_files(label: str) -> None:
    model = model_of(label)
    state = real(model.checkpoint).state_dict()
    found = Model.of(open_checkpoint(state, config=model.checkpoint.config))
    assert model.spec.tensors.items() <= found.spec.tensors.items()
    for name in model.spec.tensors:
        torch.testing.assert_close(found.read(name), model.read(name), rtol=0, atol=0)

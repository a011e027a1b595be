"""Drafts of declarations: of families that are declared they are what is declared; of others they hold, and their files
can be imported; of what is unusual they say what they do not know."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import symfuse
from command import done, run
from contract.tiny import MODELS, hf, moving
from symfuse.architectures import ARCHITECTURES, Config
from symfuse.drafts import Draft, draft_of
from symfuse.drafts.bench import Bench
from symfuse.drafts.facts import gather
from symfuse.drafts.trials import settled
from symfuse.errors import CheckpointError, OutputError, SpecError, SymfuseError, VerificationError
from symfuse.groups import Group, subgroups
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.modules import live
from symfuse.verification import TOLERANCE, random_inputs, verify

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 29,
    "max_position_embeddings": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = SIZES | {"hidden_size": 24, "num_key_value_heads": 2, "head_dim": 12}
NEO = {"vocab_size": 61, "hidden_size": 24, "num_layers": 2, "num_heads": 6, "intermediate_size": 29}
NEO |= {"max_position_embeddings": 37, "attention_types": [[["global", "local"], 1]]}
NEO |= {"bos_token_id": 1, "eos_token_id": 2}
CODEGEN = {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 29, "n_positions": 37, "rotary_dim": 6}
CODEGEN |= {"bos_token_id": 1, "eos_token_id": 2}
XGLM = {"vocab_size": 61, "d_model": 24, "num_layers": 2, "attention_heads": 6, "ffn_dim": 29}
BIGCODE = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_inner": 29, "n_positions": 37}
BIGCODE |= {"bos_token_id": 1, "eos_token_id": 2}
DEEPSEEK = SIZES | {"hidden_size": 24, "num_hidden_layers": 3, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"num_experts_per_tok": 2, "moe_intermediate_size": 13, "first_k_dense_replace": 1, "q_lora_rank": 9}
DEEPSEEK |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}

# Families whose drafts are made from nothing but their config and names, with the axes that are moved.
UNKNOWN: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", SIZES, {"ffn": "permutation", "residual": "permutation"}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", CODEGEN, {"c": "rotary", "p": "invertible", "v": "invertible"}),
    "glm": ("GlmForCausalLM", "GlmConfig", GROUPED, {"c": "rotary", "ffn": "signed-monomial", "residual": "signed"}),
    "biogpt": ("BioGptForCausalLM", "BioGptConfig", SIZES, {"qk": "invertible", "h": "permutation"}),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO, {"qk": "invertible", "residual": "permutation"}),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", XGLM, {"qk": "invertible", "v": "invertible"}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", GROUPED, {"c": "rotary", "kv": "permutation"}),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES, {"c": "rotary", "p": "invertible"}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", BIGCODE, {"q": "permutation", "qk": "invertible"}),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", SIZES, {"qk": "invertible", "residual": "permutation"}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", SIZES | {"embedding_size": 11}, {"embedding": "permutation"}),
}  # fmt: skip
FAST = {"persimmon", "glm", "biogpt"}
# Those of which the norms can be folded, so that the stream may be rotated.
PRE_NORM = {"persimmon", "codegen", "glm", "gpt_neo", "phi", "gpt_bigcode", "nemotron"}
KNOWN = ("bert-mlm", "gpt2-lm", "llama-lm", "qwen3-lm", "opt-lm", "neox-lm", "phi3-partly", "mistral-lm")
KNOWN_SLOWLY = (
    "bert-sequence", "roberta-mlm", "gemma-lm", "gemma3-lm", "stablelm-parallel", "starcoder2-lm", "cohere-lm",
    "cohere-normed", "olmo2-lm", "gptj-lm", "bloom-lm", "mpt-lm-clipped", "falcon-grouped",
    "distilbert-mlm", "vit-classification",
)  # fmt: skip


def of(name: str, seed: int = 0) -> Checkpoint:
    class_name, config, sizes, _ = UNKNOWN[name]
    return hf(class_name, getattr(transformers, config)(**sizes), seed)


@pytest.fixture(autouse=True)
def _declarations() -> Iterator[None]:
    """What a test hides or imports is undone."""
    before = dict(ARCHITECTURES)
    yield
    ARCHITECTURES.clear()
    ARCHITECTURES.update(before)


def imported(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def groups(axes: Mapping[str, Any]) -> dict[str, Group]:
    return {name: axis.group for name, axis in axes.items() if axis.group is not None}


def marked(names: Mapping[str, Any] | tuple[str, ...], fast: set[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


# -- families that are declared, with their declaration hidden


@pytest.mark.parametrize("label", marked((*KNOWN, *KNOWN_SLOWLY), set(KNOWN)))
def test_a_hidden_declaration_is_found_again(label: str) -> None:
    checkpoint = MODELS[label]()
    known = Model.of(checkpoint).spec
    del ARCHITECTURES[known.family]
    draft = draft_of(checkpoint)
    spec = draft.spec(checkpoint)
    assert draft.verified
    moved, declared = ({i.axis for i in one.movable} for one in (spec, known))
    names = {"kv": "h"} if "h" in declared else {"h": "kv"} if "kv" in declared else {}
    for axis in moved:
        other = axis if axis in declared else names.get(axis, axis)
        larger = known.axes[other].group
        assert larger is not None, axis
        assert spec.axes[axis].group in subgroups(larger).values(), axis
    if label in KNOWN:  # nothing is missing, and nothing is smaller
        assert moved == declared
        assert groups(spec.axes).items() >= {axis: known.axes[axis].group for axis in declared}.items()
        assert {(s.bias, s.axis) for s in spec.shifts} == {(s.bias, s.axis) for s in known.shifts}
        assert not draft.unplaced
        assert (draft.norm if spec.reads else known.norm) == known.norm
        assert {n: set(r) for n, r in spec.reads.items()} == {n: set(r) for n, r in known.reads.items()}


def test_what_is_clipped_far_out_only_is_found_too() -> None:
    """Values that are clipped at 8 are below that with weights of an ordinary size."""
    sizes = {name: size for name, size in GROUPED.items() if name != "head_dim"}
    checkpoint = hf("OlmoForCausalLM", transformers.OlmoConfig(**sizes, clip_qkv=8.0))
    known = Model.of(checkpoint).spec
    del ARCHITECTURES["olmo"]
    draft = draft_of(checkpoint)
    assert draft.verified
    assert groups(draft.axes) == {axis: group for axis, group in groups(known.axes).items() if axis in draft.axes}


# -- families that are not declared


@pytest.mark.parametrize("name", marked(UNKNOWN, FAST))
def test_the_file_of_an_unknown_family_can_be_imported_and_aligns(name: str, tmp_path: Path) -> None:
    ARCHITECTURES.pop(name, None)
    one, other = of(name), of(name, seed=1)
    draft = symfuse.suggest(one)
    assert draft.verified
    assert next(t for t in draft.trials if t.axis == "all at once").holds
    assert bool(draft.reads) == (name in PRE_NORM)
    assert {axis: group.name for axis, group in groups(draft.axes).items()}.items() >= UNKNOWN[name][3].items()
    imported(draft.save(tmp_path / f"{name}.py"))
    assert ARCHITECTURES[name].declare(Config(one.config, name)) == draft.family

    spec = symfuse.declare(one)
    assert spec.to_json() == draft.spec(one).to_json()
    tolerance = TOLERANCE[torch.float32 if name in ("xglm", "gpt_neo") else torch.float64]
    dtype = torch.float32 if name == "xglm" else torch.float64
    rms = draft.facts.model_type == "glm"  # which is computed in float32
    for axes in (None, *({axis} for axis in sorted({i.axis for i in spec.movable}))):
        g = moving(spec, 11, axes) if spec.axes[next(iter(axes or ["residual"]))].size > 1 else None
        if g is not None:
            result = verify(one, g(one), g, dtype=dtype, tolerance=TOLERANCE[torch.float32] if rms else tolerance)
            assert result.equal, (axes, result)
    alignment = symfuse.match(one, to=other, axes="attention,ffn")
    assert symfuse.relate(alignment(one), other).distance.euclidean < symfuse.relate(one, other).distance.euclidean
    aligned = symfuse.align([one, other], anchor=1, starts=1)
    assert aligned.alignments[0] is not None


def test_groups_are_demoted_until_they_hold() -> None:
    """A config that says ReLU, and no rotary positions, of a model that has GELU and rotary positions."""
    checkpoint = MODELS["starcoder2-lm"]()
    bench = Bench(checkpoint, None, None, 0)
    shapes = {name: checkpoint.info(name).shape for name in checkpoint}
    lies = {key: value for key, value in checkpoint.config.items() if "rope" not in key} | {"hidden_act": "relu"}
    draft = settled(gather(shapes, lies), bench)
    assert draft.verified
    tried = [(t.axis, t.group, t.holds) for t in draft.trials]
    assert [t for t in tried if t[0] == "ffn"] == [("ffn", "permutation, scale", False), ("ffn", "permutation", True)]
    assert ("qk", "invertible map", False) in tried
    assert ("c", "phase, scale", True) in tried
    assert all(t.error > bench.tolerance for t in draft.trials if not t.holds)


def test_what_the_outputs_do_not_depend_on_is_not_claimed() -> None:
    """Layers that are multiplied by zero: their neurons could be anything."""

    class Deaf(Tower):
        def forward(self, hidden: Tensor) -> dict[str, Tensor]:
            return {"out": hidden + 0 * super().forward(hidden)["out"]}

    config = {"model_type": "deaf", "hidden_size": 8, "intermediate_size": 13, "num_hidden_layers": 2}
    draft = symfuse.suggest(Deaf(), config=config, inputs={"hidden": torch.randn(2, 3, 8, dtype=torch.float64)})
    assert not draft.verified
    assert "ffn" not in groups(draft.axes)
    assert {t.how for t in draft.trials if t.axis == "ffn"} == {"the outputs do not depend on it"}


class Tower(torch.nn.Module):
    """Of a class that `transformers` does not have: two feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"fc1": torch.nn.Linear(8, 13), "fc2": torch.nn.Linear(13, 8)}) for _ in range(2)
        )

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            hidden = hidden + layer["fc2"](torch.relu(layer["fc1"](hidden)))  # type: ignore[index]
        return {"out": hidden}


def test_a_live_module_of_a_foreign_class() -> None:
    config = {"model_type": "tower", "hidden_size": 8, "intermediate_size": 13, "num_hidden_layers": 2}
    config |= {"hidden_act": "relu"}
    module = Tower()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    draft = symfuse.suggest(module, config=config, inputs={"hidden": torch.randn(2, 3, 8, dtype=torch.float64)})
    assert draft.verified
    moved = {axis: group.name for axis, group in groups(draft.axes).items()}
    assert moved == {"ffn": "monomial", "residual": "orthogonal"}  # the input and the output are rotated too
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_tensors_that_take_no_part_are_named() -> None:
    class Aside(Tower):
        """With a map that other inputs would go through."""

        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer["aside"] = torch.nn.Linear(8, 13)  # type: ignore[operator]

    config = {"model_type": "aside", "hidden_size": 8, "intermediate_size": 13, "num_hidden_layers": 2}
    draft = symfuse.suggest(Aside(), config=config, inputs={"hidden": torch.randn(2, 3, 8, dtype=torch.float64)})
    assert draft.verified
    assert set(draft.untouched) == {"layers.{l}.aside.weight", "layers.{l}.aside.bias"}
    assert any("did not depend on layers.{l}.aside." in step for step in draft.next_steps)
    assert "did not depend on" in draft.source()


# -- what cannot be known


@pytest.mark.slow
def test_unusual_attention_is_listed_and_the_rest_moves() -> None:
    draft = draft_of(hf("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**DEEPSEEK)))
    assert draft.verified
    assert any("kv_b_proj" in name for name in draft.unplaced)
    assert {"ffn", "expert_ffn", "shared_ffn", "residual"} <= groups(draft.axes).keys()
    assert any(step.startswith("not placed: ") and "kv_b_proj" in step for step in draft.next_steps)
    assert draft.facts.templates.others  # the first layer has no experts


def test_a_state_space_model_gives_a_draft_of_its_stream() -> None:
    config = transformers.MambaConfig(vocab_size=61, hidden_size=24, num_hidden_layers=2, state_size=5)
    draft = draft_of(hf("MambaForCausalLM", config))
    assert draft.verified
    assert groups(draft.axes).keys() == {"residual"}
    assert len(draft.reads) == 2  # each layer has one norm
    assert any("A_log" in name for name in draft.unplaced)


def unrunnable() -> Draft:
    checkpoint = MODELS["llama-lm"]()
    return draft_of(checkpoint.replace(config={**checkpoint.config, "model_type": "llama_of_ours"}))


def test_what_cannot_be_run_is_unverified_and_refuses_to_be_imported(tmp_path: Path) -> None:
    draft = unrunnable()
    assert not draft.verified
    assert "no model_type 'llama_of_ours'" in draft.reason
    assert "symfuse.suggest(module)" in draft.reason
    assert not draft.trials
    assert {"ffn": "signed-monomial", "c": "rotary"}.items() <= {
        a: g.name for a, g in groups(draft.axes).items()
    }.items()
    path = draft.save(tmp_path / "draft.py")
    with pytest.raises(VerificationError, match="llama_of_ours is UNVERIFIED"):
        imported(path)
    assert "llama_of_ours" not in ARCHITECTURES
    checked = path.read_text("utf-8").replace("raise VerificationError(", "print(")
    path.write_text(checked, "utf-8")
    imported(path)
    assert "llama_of_ours" in ARCHITECTURES


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    draft = unrunnable()
    path = draft.save(tmp_path / "draft.py")
    with pytest.raises(OutputError, match="exists"):
        draft.save(path)


@pytest.mark.parametrize("names", [{"weight": (3, 4)}, {"a.0.b": (2,), "a.1.b": (2,)}, {"x": ()}, {"l.0.w": (8, 8)}])
@pytest.mark.parametrize("config", [{}, {"hidden_size": 8, "num_attention_heads": 3}, {"num_hidden_layers": "two"}])
def test_anything_gives_a_draft(names: dict[str, tuple[int, ...]], config: dict[str, Any]) -> None:
    checkpoint = symfuse.open({name: torch.zeros(shape) for name, shape in names.items()}, config=config)
    draft = draft_of(checkpoint)
    assert not draft.verified
    assert json.dumps(draft.to_json())
    compile(draft.source(), "draft.py", "exec")


CODE = 'x"""\nimport os\nos.system("touch was-run")\n"""'


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("weight", {"model_type": CODE}, "config.json: model_type is "),
        ("weight", {"architectures": [CODE]}, "config.json: architectures is "),
        ("weight", {"architectures": 3}, "config.json: architectures is 3, expected a list"),
        (CODE, {}, "the name of a tensor is "),
        ("layers.0.{x}.weight", {}, "the name of a tensor is "),
    ],
)
def test_no_code_of_a_checkpoint_is_written_into_a_draft(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        gather({name: (3, 4)}, config)


def test_what_a_class_says_stays_inside_the_docstring() -> None:
    text = replace(unrunnable(), reason=CODE + "\\").source()
    assert ast.get_docstring(ast.parse(text)) is not None
    assert not any(isinstance(node, ast.Import) for node in ast.parse(text).body)


def test_a_size_that_the_config_does_not_say_is_the_usual_one() -> None:
    glm = of("glm")
    module = live(glm)
    config = {key: value for key, value in glm.config.items() if key != "vocab_size"}
    given, usual = (random_inputs(module, c)["input_ids"] for c in (glm.config, config))
    assert torch.equal(given, usual)


def test_too_large_a_model_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symfuse.drafts.bench.LARGEST", 1000)
    draft = draft_of(MODELS["bert-mlm"]())
    assert not draft.verified
    assert "too many to run" in draft.reason


# -- the command line


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of("biogpt").save("model")
    before = {path.name: path.read_bytes() for path in Path("model").iterdir()}
    ARCHITECTURES.pop("biogpt", None)
    said = done("suggest", "model", "-o", "biogpt.py").stdout
    assert "VERIFIED" in said
    assert "written to biogpt.py" in said
    compile(Path("biogpt.py").read_text("utf-8"), "biogpt.py", "exec")
    assert {path.name: path.read_bytes() for path in Path("model").iterdir()} == before
    for place, message in (("biogpt.py", "exists"), ("model/biogpt.py", "is never changed")):
        result = run("suggest", "model", "-o", place)
        assert result.exit_code == 8, result.output
        assert message in result.stderr
    data = json.loads(done("suggest", "model", "--no-run", "--json").stdout)
    assert data["kind"] == "suggestion"
    assert data["verified"] is False
    assert data["said"] == "it was not run"
    assert {path.name: path.read_bytes() for path in Path("model").iterdir()} == before


def test_errors_of_reading_come_through(tmp_path: Path) -> None:
    checkpoint = of("biogpt")
    folder = checkpoint.save(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    quantised = tmp_path / "quantised"
    checkpoint.save(quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantised / "config.json").write_text(json.dumps(config))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (adapter / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "config.json").unlink()
    for name, message in (
        ("empty", "weights"), ("model", "without model_type"), ("quantised", "quantised"), ("adapter", "adapter"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            symfuse.suggest(tmp_path / name)
        result = run("suggest", str(tmp_path / name))
        assert result.exit_code == 3, result.output
        assert "Traceback" not in result.output


def test_a_declared_family_is_pointed_to() -> None:
    draft = draft_of(MODELS["bert"](), run=False)
    assert any("already" in step for step in draft.next_steps)
    assert isinstance(VerificationError("x"), SymfuseError)
    assert replace(draft, verified=True).source().count("UNVERIFIED") == 0

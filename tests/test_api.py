"""The API on folders, state dictionaries and live modules; what is promised by the package itself."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import symfuse
from contract.tiny import MODELS, TEXT, encoder, of
from matched import match
from symfuse import api
from symfuse.alignment import random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SymfuseError, UnknownArchitectureError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.verification import Verification, compare


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny masked language models in folders `a` and `b`."""
    root = tmp_path_factory.mktemp("models")
    a, b = (MODELS["bert-mlm"](seed).save(root / name) for seed, name in ((0, "a"), (1, "b")))
    return a, b


def modules() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    a, b = (api.to_module(MODELS["bert-mlm"](seed), torch.float64) for seed in (0, 1))
    assert isinstance(a, transformers.PreTrainedModel)
    assert isinstance(b, transformers.PreTrainedModel)
    return a, b


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the package


def test_every_public_name_is_there_and_documented() -> None:
    for name in symfuse.__all__:
        assert getattr(symfuse, name).__doc__
        assert name in dir(symfuse)
    assert sorted(symfuse.__all__) == symfuse.__all__
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = symfuse.nothing_of_the_kind


def test_public_names_are_the_functions_of_the_api() -> None:
    for name in ("align", "declare", "match", "merge", "prove", "relate", "to_module", "verify"):
        assert getattr(symfuse, name) is getattr(api, name)
    assert symfuse.open is open_checkpoint
    assert issubclass(symfuse.SymfuseError, Exception)


def test_the_example_of_the_package_runs(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert symfuse.__doc__ is not None
    code = textwrap.dedent("\n".join(line for line in symfuse.__doc__.splitlines() if line.startswith("    ")))
    assert 'symfuse.open("a"), symfuse.open("b")' in code
    for folder in folders:
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    _, report = transformers.AutoModelForMaskedLM.from_pretrained("out", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize(("code", "absent"), [
    ("import symfuse; symfuse.__version__; dir(symfuse)", ("torch", "transformers", "numpy", "click")),
    ("import symfuse; symfuse.open", ("transformers", "pandas", "rich", "scipy")),
    ("from symfuse import match, merge, verify", ("transformers", "pandas", "rich")),
])  # fmt: skip
def test_imports_are_light(code: str, absent: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- sources of every kind


def test_folders_state_dicts_and_modules_are_the_same_model(folders: tuple[Path, Path]) -> None:
    a, b = modules()
    config = a.config.to_dict()
    kinds = [
        folders,
        tuple(str(folder) for folder in folders),
        tuple(symfuse.open(folder) for folder in folders),
        (a, b),
        tuple(symfuse.open(dict(m.state_dict()), config=config) for m in (a, b)),
        (folders[0], b),
    ]
    wanted = dict(symfuse.merge(folders, weights=[0.3, 0.7]))
    distance = symfuse.relate(*folders).distance.whole.squared
    first = match(*folders)
    for source, anchor in kinds:
        assert same(dict(symfuse.merge([source, anchor], weights=[0.3, 0.7])), wanted)
        assert symfuse.relate(source, anchor).distance.whole.squared == pytest.approx(distance, rel=1e-14)
        alignment = match(source, anchor)
        assert alignment.elements.keys() == first.elements.keys()
        for instance, element in alignment.elements.items():
            dense = first.elements[instance].to_dense()
            torch.testing.assert_close(element.to_dense(), dense, rtol=0, atol=1e-12)
        assert symfuse.verify(source, source).worst == 0
        assert symfuse.declare(source).family == "bert"


def test_modules_in_modules_out() -> None:
    a, b = modules()
    before = {name: tensor.clone() for name, tensor in a.state_dict().items()}
    aligned = symfuse.align([a, b])
    out = symfuse.to_module(symfuse.merge(aligned.checkpoints), torch.float64)
    assert isinstance(out, transformers.BertForMaskedLM)
    assert not out.training
    assert out.get_output_embeddings().weight is out.get_input_embeddings().weight
    moved = symfuse.to_module(aligned.checkpoints[0], torch.float64)
    for name, parameter in out.named_parameters():
        mean = (moved.get_parameter(name) + b.get_parameter(name)) / 2
        torch.testing.assert_close(parameter, mean, rtol=0, atol=1e-15)
    ids = torch.tensor([[5, 17, 33, 60]])
    with torch.inference_mode():
        torch.testing.assert_close(moved(ids).logits, a(ids).logits, rtol=0, atol=1e-12)
    assert same(dict(a.state_dict()), before)


def test_a_module_that_transformers_does_not_have() -> None:
    merged = symfuse.merge([encoder(0), encoder(1)])
    module = symfuse.to_module(merged, torch.float64)
    assert isinstance(module, torch.nn.TransformerEncoder)
    assert same(dict(module.state_dict()), dict(merged))
    assert next(symfuse.to_module(merged).parameters()).dtype == torch.float32


@pytest.mark.parametrize(("label", "kind"), [
    ("bert-mlm", "AutoModelForMaskedLM"), ("gpt2-lm", "AutoModelForCausalLM"),
    ("vit-classification", "AutoModelForImageClassification"),
    ("roberta", "AutoModel"), ("distilbert", "AutoModel"), ("electra", "AutoModel"), ("deberta", "AutoModel"),
])  # fmt: skip
def test_the_result_loads_with_nothing_missing_or_left_over(tmp_path: Path, label: str, kind: str) -> None:
    a, b = (MODELS[label](seed) for seed in (0, 1))
    alignment = match(a, b)
    for name, result in (("aligned", alignment(a)), ("merged", symfuse.merge([alignment(a), b]))):
        out = result.save(tmp_path / name)
        module, report = getattr(transformers, kind).from_pretrained(out, output_loading_info=True, dtype=torch.float64)
        assert not any(report.values()), report
        assert symfuse.verify(module, result).worst < 1e-14


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        symfuse.relate(tmp_path / "nowhere", tmp_path / "nowhere")
    with pytest.raises(OptionError, match="config="):
        symfuse.open(dict(encoder()))
    with pytest.raises(UnknownArchitectureError, match="model_type 'martian'"):
        symfuse.declare(symfuse.open({"w": torch.zeros(3)}, config={"model_type": "martian"}))
    with pytest.raises(OptionError, match="config="):
        symfuse.merge([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)])


# ---- lazy


class Counting(Mapping[str, Tensor]):
    """Tensors that are counted when they are read.

    The type checks of the tests look at the first entry of a mapping, which is therefore not counted.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.first = next(iter(tensors))
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        if name != self.first:
            self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def counted(checkpoint: Checkpoint) -> tuple[Checkpoint, Counting]:
    tensors = Counting(checkpoint)
    infos = {name: checkpoint.info(name) for name in checkpoint}
    return checkpoint.replace(tensors=tensors, infos=infos), tensors


@pytest.mark.parametrize("label", ["torch-relu-post", "gpt2-lm"])
def test_no_tensor_is_read_before_it_is_saved(tmp_path: Path, label: str) -> None:
    """But for gains of norms, which say whether models are in one frame."""
    (a, read_a), (b, read_b) = counted(MODELS[label](0)), counted(MODELS[label](1))
    gains = {symfuse.declare(a).file_name(name) for name in symfuse.declare(a).reads}
    merged = symfuse.merge([a, b])
    assert {*read_a.read, *read_b.read} <= gains
    read_a.read.clear()
    read_b.read.clear()
    merged.save(tmp_path / "merged")
    names = Counter(set(a) - {read_a.first})
    lineage = names  # of each model the first numbers of every tensor
    assert Counter(read_a.read) == Counter(read_b.read) == names + lineage

    alignment = match(a, b)
    read_a.read.clear()
    read_b.read.clear()
    moved = alignment(a)
    merged = symfuse.merge([moved, b])
    assert {*read_a.read, *read_b.read} <= gains
    read_a.read.clear()
    read_b.read.clear()
    merged.save(tmp_path / "aligned")
    # Output biases read the projection that their translation moves through; all else is read once.
    weights = {rule.weight for rule in alignment.spec.shifts if rule.weight}
    again = [alignment.spec.file_name(name) for name in sorted(weights)]
    assert Counter(read_a.read) == names + Counter(again) + lineage + lineage  # of the merge, and of the alignment


# ---- verification


def test_verification_by_given_inputs_and_runners() -> None:
    a, b = MODELS["bert-mlm"](0), MODELS["bert-mlm"](1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    assert api.verify(a, a, inputs=inputs).inputs == "the given inputs, run in float64"
    assert not api.verify(a, b, inputs=inputs).equal

    def embeddings(checkpoint: Checkpoint) -> dict[str, Tensor]:
        return {"table": checkpoint["bert.embeddings.word_embeddings.weight"]}

    assert api.verify(a, a, runner=embeddings).errors == {"table": 0.0}
    assert not api.verify(a, b, runner=embeddings).equal
    assert api.verify(a, b, runner=embeddings, tolerance=10.0).equal


@pytest.mark.parametrize(("stored", "run", "tolerance"), [
    (torch.float64, torch.float64, 1e-11), (torch.float32, torch.float64, 2e-5), (torch.bfloat16, torch.float64, 3e-2),
    (torch.float16, torch.float64, 5e-3),
    (torch.float64, torch.float32, 2e-5),
])  # fmt: skip
def test_tolerances_are_those_of_the_coarsest_dtype(stored: torch.dtype, run: torch.dtype, tolerance: float) -> None:
    a = encoder(0)
    a = a.replace(tensors={name: tensor.to(stored) for name, tensor in a.items()})
    g = random_alignment(symfuse.declare(a), 1, {"qk", "v", "ffn"})
    result = api.verify(a, g(a), g, dtype=run)
    assert result.tolerance == tolerance
    assert result.equal
    assert not api.verify(a, encoder(1), dtype=run).equal


def test_one_output_with_nan_is_a_difference_wherever_it_stands() -> None:
    for errors in ({"a": math.nan, "b": 0.0}, {"a": 0.0, "b": math.nan}, {"a": math.inf, "b": 0.0, "c": 0.1}):
        result = Verification(errors, 1e-11, "some inputs")
        assert not result.equal
        with pytest.raises(symfuse.SymfuseError, match="nothing was written"):
            result.raise_if_different("it")
    assert compare({"x": torch.tensor([1.0, math.nan])}, {"x": torch.tensor([1.0, 2.0])})["x"] != 0


def test_models_with_other_inputs_or_outputs_are_not_compared() -> None:
    bert = MODELS["bert"](0)
    for other in (MODELS["bert-mlm"](0), of("BertModel", "BertConfig", TEXT, hidden_size=24)(0), MODELS["vit"](0)):
        with pytest.raises(IncompatibleError):
            api.verify(bert, other)
    with pytest.raises(IncompatibleError, match="does not run on the inputs"):
        api.verify(bert, of("BertModel", "BertConfig", TEXT, vocab_size=7)(0))


def test_half_moved_models_are_found_out() -> None:
    """The negative control: one side of a pair moved."""
    for label in ("bert-mlm", "gpt2-lm", "vit"):
        a = MODELS[label](0)
        spec = symfuse.declare(a)
        g = random_alignment(spec, 1, {"qk", "v", "ffn"})
        moved = g(a)
        assert api.verify(a, moved, g).equal
        for part in ("query.bias", "c_attn.bias", "intermediate.dense.weight", "mlp.c_proj.weight"):
            names = [name for name in a if name.endswith(part)]
            if names:
                half = moved.replace(tensors={**dict(moved), names[0]: a[names[0]]})
                assert not api.verify(a, half, g).equal


# ---- distances


@pytest.mark.parametrize("label", ["torch-relu-post", "bert-mlm", "gpt2-lm", "vit-classification", "deberta"])
def test_distances_are_those_of_all_parameters_and_add_up(label: str) -> None:
    a, b = MODELS[label](0), MODELS[label](1)
    d = symfuse.relate(a, b).distance
    x, y = (torch.cat([model[name].flatten() for name in a]) for model in (a, b))
    assert d.euclidean == pytest.approx((x - y).norm().item(), rel=1e-13)
    assert d.relative == pytest.approx(((x - y).norm() / y.norm()).item(), rel=1e-13)
    assert d.cosine == pytest.approx(torch.cosine_similarity(x, y, dim=0).item(), rel=1e-12)
    for part in (d.by("axis"), d.by("layer"), d.by("tensor"), d.by("layer", "axis")):
        assert sum(gap.squared for gap in part.values()) == pytest.approx(d.whole.squared, rel=1e-13)
    for name, gap in d.by("tensor").items():
        file = symfuse.declare(a).file_name(str(name))
        x, y = a[file].flatten(), b[file].flatten()
        assert gap.cosine == pytest.approx(torch.cosine_similarity(x, y, dim=0).item(), rel=1e-12)
    assert {"qk", "v", "ffn", "residual"} <= set(d.by("axis"))
    assert {0, 1} <= set(d.by("layer"))
    back = symfuse.relate(b, a).distance
    assert back.whole.squared == pytest.approx(d.whole.squared, rel=1e-14)
    assert symfuse.relate(a, a).distance.whole.squared == 0
    assert symfuse.relate(a, a).distance.cosine == pytest.approx(1)


def test_heads_of_one_model_only_are_left_out_of_distances() -> None:
    mlm, tagger = MODELS["bert-mlm"](0), MODELS["bert-token"](0)
    d = symfuse.relate(mlm, tagger).distance
    assert not [name for name in map(str, d.by("tensor")) if name.startswith(("cls", "classifier"))]
    assert len(d.by("tensor")) == 37


def test_every_error_is_one_of_the_tree() -> None:
    for wrong in (
        lambda: match(encoder(), encoder(), axes="nothing"),
        lambda: symfuse.merge([]),
        lambda: symfuse.align([encoder()]),
        lambda: symfuse.merge([encoder(), encoder()], heads="3"),
        lambda: symfuse.relate(encoder(), MODELS["bert"]()).distance,
    ):
        with pytest.raises(SymfuseError) as error:
            wrong()
        assert error.value.exit_code > 1

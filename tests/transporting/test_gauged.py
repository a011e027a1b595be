"""What an alignment with gauges carries over: exact, or refused with the way out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from command import run
from contract.tiny import MODELS, real
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import SymmetryError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.spec import bias_of
from symfuse.stats.gram import gram_matrices
from symfuse.stats.statistics import Statistics
from symfuse.transporting import transport
from symfuse.transporting.statistics import transported_statistics
from transporting.test_vectors import autoencoder, changed, randn, seen
from transporting.trained import base_folder, load, outputs, train, with_adapter

GAIN = "embeddings.LayerNorm.weight"
REFUSED = re.escape("--no-biases")


def gauges(spec: Any, of: Alignment | None = None, seed: int = 3) -> Alignment:
    """Gauges of all that has any, behind another alignment, or alone."""
    alone = Alignment(spec, {}, gauges=random_alignment(spec, seed, largest=True).gauges)
    return alone if of is None else alone @ of


def place(tmp_path: Path, axes: tuple[str, ...] = (), kind: str = "bert") -> tuple[Path, Path, Alignment]:
    """A folder, that of the moved model, and how it was moved: by gauges, and elements of those axes."""
    base = base_folder(kind, tmp_path / "base")
    spec = Model.of(open_checkpoint(base)).spec
    alignment = replace(gauges(spec, random_alignment(spec, 5, axes)), shifts={})
    alignment(base).save(tmp_path / "moved", extra={"alignment.symfuse": alignment.to_bytes()})
    torch.testing.assert_close(  # the same function, of other weights
        outputs(kind, load(kind, tmp_path / "moved")), outputs(kind, load(kind, base)), rtol=1e-9, atol=1e-10
    )
    return base, tmp_path / "moved", alignment


def refused(*given: Any, **options: Any) -> None:
    """With an error that names the norm and the way out; without gauges it is moved."""
    thing, alignment, *rest = given
    with pytest.raises(SymmetryError, match=REFUSED) as caught:
        transport(thing, alignment, *rest, **options)
    assert re.search(r"LayerNorm\.(weight|bias)", str(caught.value))
    assert transport(thing, replace(alignment, gauges={}), *rest, **options).tensors
    zeros = replace(alignment, gauges={name: torch.zeros_like(v) for name, v in alignment.gauges.items()})
    assert transport(thing, zeros, *rest, **options).tensors


def test_second_moments_are_refused(tmp_path: Path) -> None:
    """Also those of weights that no gauge changes: gains, whose gradients get a part of the readers'."""
    _, _, alignment = place(tmp_path, ("h", "ffn"))
    moment = torch.rand(20, dtype=torch.float64)
    tensors = {f"bert.{GAIN}.exp_avg": moment, f"bert.{GAIN}.exp_avg_sq": moment.square()}
    save_file(tensors, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", alignment)
    save_file({f"bert.{GAIN}.exp_avg": moment}, tmp_path / "first.safetensors")
    refused(tmp_path / "first.safetensors", alignment)


def test_that_gradients_of_gains_change(tmp_path: Path) -> None:
    """Which is why moments are refused: the same function, and other gradients than before where it is moved by
    permutations alone."""
    base, moved, _ = place(tmp_path)
    grads = []
    for folder in (base, moved):
        module = load("bert", folder)
        outputs_ = module(input_ids=torch.arange(3, 11)[None]).logits
        outputs_.square().sum().backward()
        grads.append(dict(module.named_parameters())[f"bert.{GAIN}"].grad)
    assert float((grads[0] - grads[1]).abs().max()) > 1e-3


def test_a_fisher_information_is_refused() -> None:
    of = Model.of(MODELS["bert-sequence"]())
    fisher = Statistics("fisher", {name: torch.rand(of.read(name).shape) for name in of.spec.tensors}, 1)
    alignment = gauges(of.spec)
    with pytest.raises(SymmetryError, match=rf"along the norm .*LayerNorm\.weight.*{REFUSED}"):
        transported_statistics(fisher, alignment, of.checkpoint, known=True)
    assert transported_statistics(fisher, replace(alignment, gauges={}), of.checkpoint, known=True).tensors


def test_gram_matrices_are_those_of_the_moved_model() -> None:
    """A gauge changes weights, not what they read."""
    source = MODELS["bert-sequence"]()
    spec = Model.of(source).spec
    alignment = gauges(spec, random_alignment(spec, 3, largest=True), 4)
    ids = torch.randint(3, 61, (3, 7), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(3).long()}]

    def collect(checkpoint: Checkpoint) -> Statistics:
        return gram_matrices(real(checkpoint), batches, spec.tensors)

    found, expected = transported_statistics(collect(source), alignment, source), collect(alignment(source))
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(
            found.read(name), expected.read(name), rtol=0, atol=1e-10 * float(tensor.abs().max())
        )


# ---- adapters


ADAPTERS: dict[str, dict[str, Any]] = {
    "bert": {"r": 3, "target_modules": ["query", "key", "value", "dense"]},
    "bert, biases": {"r": 2, "bias": "lora_only", "target_modules": ["query", "dense"]},
    "bert, saved": {
        "r": 2, "target_modules": ["query"], "modules_to_save": ["classifier", "intermediate.dense", "value"]
    },
    "bert, embedding": {"r": 2, "target_modules": ["word_embeddings", "value"]},
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[] if one == "bert, saved" else [pytest.mark.slow]) for one in ADAPTERS]
)
def test_adapters_are_exact(case: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    base, moved, alignment = place(tmp_path, ("h", "ffn", "residual"))
    expected = train("bert", ADAPTERS[case], base, tmp_path / "adapter")
    transport(tmp_path / "adapter", alignment, base=base).save(tmp_path / "out")
    got = with_adapter("bert", moved, tmp_path / "out")
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    assert float((expected - outputs("bert", load("bert", base))).abs().max()) > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"r": 2, "target_modules": ["query"], "modules_to_save": ["LayerNorm"]},
        pytest.param({"r": 2, "target_modules": ["query"], "bias": "all"}, marks=pytest.mark.slow),
    ],
    ids=["saved", "biases"],
)
def test_an_adapter_with_norms_of_its_own_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    base, _, alignment = place(tmp_path, ("h",))
    train("bert", options, base, tmp_path / "adapter")
    refused(tmp_path / "adapter", alignment, base=base)
    with pytest.raises(
        SymmetryError, match=r"the adapter holds \S*LayerNorm\.(weight|bias), and this alignment changes"
    ):
        transport(tmp_path / "adapter", alignment, base=base)
    far = {n: v for n, v in alignment.gauges.items() if alignment.spec.gauges[n] == GAIN}
    assert far  # a gauge behind one norm only, which the adapter has as well
    with pytest.raises(SymmetryError, match=re.escape(bias_of(GAIN).removesuffix("bias"))):
        transport(tmp_path / "adapter", replace(alignment, gauges=far), base=base)


def test_norms_without_gauges_may_be_of_the_adapter(tmp_path: Path) -> None:
    """Those of the second layer, where only what reads the embeddings has a gauge."""
    pytest.importorskip("peft", reason="peft is not installed")
    base = base_folder("bert", tmp_path / "base")
    spec = Model.of(open_checkpoint(base)).spec
    alignment = gauges(spec)
    alignment = replace(alignment, gauges={n: v for n, v in alignment.gauges.items() if spec.gauges[n] == GAIN})
    alignment(base).save(tmp_path / "moved")
    options = {"r": 2, "target_modules": ["query"], "modules_to_save": ["layer.1.output.LayerNorm"]}
    expected = train("bert", options, base, tmp_path / "adapter")
    transport(tmp_path / "adapter", alignment, base=base).save(tmp_path / "out")
    torch.testing.assert_close(
        with_adapter("bert", tmp_path / "moved", tmp_path / "out"), expected, rtol=1e-9, atol=1e-10
    )


# ---- vectors and sparse auto-encoders


def reads(base: Path, moved: Path, vector: Tensor) -> float:
    """How far the moved model is from the model when the same vector is added to the stream of both."""
    found = [changed("bert", folder, "bert.encoder.layer.0", lambda x: x + vector) for folder in (base, moved)]
    return float((found[0] - found[1]).abs().max())


def test_what_is_added_to_the_stream_is_refused(tmp_path: Path) -> None:
    base, moved, alignment = place(tmp_path)
    vector = randn(20)
    assert reads(base, moved, vector) > 1e-3  # why
    save_file({"v": vector}, tmp_path / "v.safetensors")
    refused(tmp_path / "v.safetensors", alignment, axis="residual")
    save_file(autoencoder("sparsify", 20, 33), tmp_path / "sae.safetensors")
    refused(tmp_path / "sae.safetensors", alignment, axis="residual")
    (tmp_path / "alignment").mkdir()
    alignment.save(tmp_path / "alignment" / "alignment.symfuse")
    found = run(
        "transport", str(tmp_path / "v.safetensors"), "--by", str(tmp_path / "moved"), "--axis", "residual",
        "-o", str(tmp_path / "out"),
    )  # fmt: skip
    assert found.exit_code != 0
    assert not (tmp_path / "out").exists()


def test_what_is_added_elsewhere_is_not(tmp_path: Path) -> None:
    base, moved, alignment = place(tmp_path, ("ffn",))
    vector, module = randn(29), "bert.encoder.layer.1.intermediate"
    save_file({"v": vector}, tmp_path / "v.safetensors")
    got = transport(tmp_path / "v.safetensors", alignment, axis="ffn[1]", kind="vector")["v"]
    torch.testing.assert_close(
        changed("bert", moved, module, lambda x: x + got), changed("bert", base, module, lambda x: x + vector),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip


def test_a_probe_of_the_stream_is_exact(tmp_path: Path) -> None:
    base, moved, alignment = place(tmp_path, ("residual", "ffn"))
    weight = randn(3, 20)
    save_file({"weight": weight}, tmp_path / "probe.safetensors")
    got = transport(tmp_path / "probe.safetensors", alignment, kind="probe", axis="residual")["weight"]
    module = "bert.encoder.layer.0"
    torch.testing.assert_close(
        seen("bert", moved, module) @ got.T, seen("bert", base, module) @ weight.T, rtol=1e-10, atol=1e-10
    )

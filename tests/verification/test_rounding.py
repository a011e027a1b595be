"""What rounding costs: the rounding itself, and the table of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import symfuse
from command import data, run
from contract.tiny import MODELS, model_of
from symfuse.errors import CheckpointError
from symfuse.model import Model
from symfuse.verification.rounding import FORMS, linear_maps, rounded, rounding_of


def test_rounding_by_hand() -> None:
    w = torch.tensor([[0.0, 1.0, -7.0, 3.4, 0.2, 0.09, 0.14]], dtype=torch.float64)
    low = rounded(w, 4, 4)
    torch.testing.assert_close(low, torch.tensor([[0.0, 1.0, -7.0, 3.0, 0.2, 3 * 0.2 / 7, 5 * 0.2 / 7]]).double())
    assert torch.equal(rounded(w, 4, 0)[0], torch.tensor([0.0, 1, -7, 3, 0, 0, 0]).double())
    assert torch.equal(rounded(torch.zeros(2, 5), 4, 2), torch.zeros(2, 5))
    w = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)).double()
    errors = [float((rounded(w, bits, group) - w).norm() / w.norm()) for bits, group in ((8, 64), (4, 64), (4, 0))]
    assert errors == sorted(errors)
    assert errors[0] < 0.01 < 0.08 < errors[1] < 0.12


def test_rows_are_along_what_is_read() -> None:
    """GPT-2 stores its matrices transposed; so a unit of 30 times the size costs the others of its rows nothing."""
    names = set(linear_maps(model_of("gpt2-lm").spec))
    assert "h.0.mlp.c_fc.weight" in names
    assert not names & {"wte.weight", "wpe.weight", "lm_head.weight", "h.0.mlp.c_fc.bias"}
    for label, name, dim in (("gpt2-lm", "h.0.mlp.c_fc.weight", 1), ("llama-lm", "layers.0.mlp.gate_proj.weight", 0)):
        model = model_of(label)
        file = model.spec.file_name(name)
        weight = model.checkpoint[file].clone()
        weight.select(dim, 3).mul_(30)
        planted = Model.of(model.checkpoint.replace(tensors={**dict(model.checkpoint), file: weight}))
        tables = [rounding_of(one, forms={"as it is": ()}, bits=(8,), groups=(0,))[0] for one in (model, planted)]
        assert tables[1][0].weights < 2 * tables[0][0].weights


def test_a_rotation_spreads_planted_outliers() -> None:
    """Channels of the stream that a gain divides by 30 and its readers multiply: the same function."""
    model = model_of("llama-lm")
    values = dict(model.checkpoint)
    channels = torch.ones(model.spec.axes["residual"].size).double()
    channels[[2, 11]] = 30
    for gain, readers in model.spec.reads.items():
        values[model.spec.file_name(gain)] = values[model.spec.file_name(gain)] / channels
        for reader in readers:
            if reader in model.spec.tensors:
                values[model.spec.file_name(reader)] = values[model.spec.file_name(reader)] * channels
    planted = model.checkpoint.replace(tensors=values)
    assert symfuse.verify(model.checkpoint, planted).worst < 1e-6
    rows, notes = rounding_of(Model.of(planted), bits=(4,), groups=(0,))
    errors = {row.form: row.outputs for row in rows}
    assert list(errors) == list(FORMS)
    assert not notes
    assert errors["rotated"] < errors["as it is"] / 2
    plain = {row.form: row.outputs for row in rounding_of(model, bits=(4,), groups=(0,))[0]}
    assert errors["rotated"] == pytest.approx(plain["rotated"], rel=1e-3)


def test_outputs_of_zeros_have_no_relative_error() -> None:
    model = MODELS["llama-lm"]()
    zero = model.replace(tensors={name: torch.zeros_like(tensor) for name, tensor in model.items()})
    with pytest.raises(CheckpointError, match="all its outputs are zero"):
        symfuse.inspect(zero, rounding=True)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MODELS["bert-mlm"](0).save("a")
    found = data("inspect", "a", "--rounding")
    assert {row["form"] for row in found["rounding"]} == {"as it is", "heads rotated", "units by size", "canonical"}
    assert {(row["bits"], row["group"]) for row in found["rounding"]} == {(b, g) for b in (4, 8) for g in (128, 64, 0)}
    assert all(0 < row["outputs"] < 1 for row in found["rounding"])
    assert [note.split(":")[0] for note in found["not_rounded"]] == ["folded", "rotated", "rotated, heads too"]
    assert symfuse.inspect("a", rounding=True)["rounding"] == found["rounding"]
    assert "rounding" not in symfuse.inspect("a")
    output = run("inspect", "a", "--rounding").output
    assert "relative error of outputs after rounding linear maps" in output
    assert "note: rotated: rotate needs norms without gains" in output

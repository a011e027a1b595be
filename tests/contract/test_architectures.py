"""What every declaration must do. A new family is one line in tiny.MODELS, and inherits all of this."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from contract.tiny import EXACT, MODELS, Case, case, families, family, marked, moving, seen
from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures import ARCHITECTURES, resolve
from symfuse.architectures.base import declaration, modern
from symfuse.errors import SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.spec import Spec, bias_of, layer_of

every_model = pytest.mark.parametrize("label", marked(MODELS))


def assert_moved(this: Case, g: Alignment, axes: set[str] | None = None) -> Checkpoint:
    """Every tensor that an element, a translation or a gauge touches has changed, and no other. The moved model."""
    moved = this.checkpoint.replace(tensors=dict(g(this.checkpoint)))
    before, after = (Model(checkpoint, this.spec).whole for checkpoint in (this.checkpoint, moved))
    rules = [rule for rule in this.spec.shifts if axes is None or rule.axis.strip("*") in axes]
    shifted = {name for rule in rules if rule.bias in g.shifts for name in (rule.bias, rule.into)}
    shifted |= {name for reader in g.gauges for name in (reader, bias_of(reader))}
    for name, declared in this.spec.tensors.items():
        axes = {atom.name for atom in declared.layout.atoms if not atom.name.isdigit()}
        touched = any(this.spec.instance(axis, declared.index) in g.elements for axis in axes)
        file_name = this.spec.file_name(name)
        same = torch.equal(after[file_name], before[file_name])
        assert same != (touched or name in shifted), name
    return moved


def test_every_family_has_a_tiny_model() -> None:
    assert set().union(*map(families, MODELS)) == ARCHITECTURES.keys()


@every_model
def test_every_tensor_is_declared(label: str) -> None:
    spec, checkpoint = case(label).spec, case(label).checkpoint
    assert spec.family == family(label)
    assert spec.files.keys() == set(checkpoint)
    assert not spec.buffers
    assert spec.movable


@every_model
def test_a_missing_tensor_is_named(label: str) -> None:
    spec, checkpoint = case(label).spec, case(label).checkpoint
    shapes = {name: checkpoint.info(name).shape for name in checkpoint}
    first = [name for name, declared in spec.tensors.items() if not layer_of(declared.index)]
    legacy = declaration(checkpoint.config, list(shapes), label)[0].legacy  # which transformers still writes for some
    for missing in (file for name in first for file in spec.stored(name)):
        rest = {name: shape for name, shape in shapes.items() if name != missing}
        with pytest.raises(SpecError) as error:
            resolve(checkpoint.config, rest).check(rest, label)
        assert modern(missing, legacy) in str(error.value)


@every_model
def test_an_extra_tensor_is_named(label: str) -> None:
    checkpoint = case(label).checkpoint
    shapes = {name: checkpoint.info(name).shape for name in checkpoint} | {"extra.weight": (3, 5)}
    with pytest.raises(SpecError, match=r"not declared: extra\.weight"):
        resolve(checkpoint.config, shapes).check(shapes, label)


@every_model
def test_all_symmetries_at_once_leave_the_function(label: str) -> None:
    this = case(label)
    g = moving(this.spec, seed=1)
    assert this.error(assert_moved(this, g), g) < this.exact


@every_model
def test_the_symmetries_of_each_axis_alone_leave_the_function(label: str) -> None:
    this = case(label)
    for axis in sorted({instance.axis for instance in this.spec.movable}):
        g = moving(this.spec, 2, {axis})
        moved = assert_moved(this, g, {axis})
        assert this.error(moved, g) < this.exact, axis


@every_model
def test_translated_biases_alone_leave_the_function(label: str) -> None:
    this = case(label)
    g = Alignment(this.spec, {}, random_alignment(this.spec, 3, largest=True).shifts)
    assert this.error(assert_moved(this, g)) < this.exact


@every_model
def test_the_inverse_restores_the_weights(label: str) -> None:
    this = case(label)
    g = random_alignment(this.spec, 4, largest=True)
    back = dict(g.inverse()(g(this.checkpoint)))
    torch.testing.assert_close(back, dict(this.checkpoint), rtol=0, atol=EXACT)


@every_model
def test_composing_is_applying_in_turn(label: str) -> None:
    this = case(label)
    first, second = moving(this.spec, 5), moving(this.spec, 6)
    together, in_turn = (second @ first)(this.checkpoint), second(first(this.checkpoint))
    torch.testing.assert_close(dict(together), dict(in_turn), rtol=0, atol=EXACT)


@every_model
def test_an_alignment_survives_saving(label: str, tmp_path: Path) -> None:
    this = case(label)
    g = random_alignment(this.spec, 7, largest=True)
    loaded = Alignment.load(g.save(tmp_path / "alignment.safetensors"))
    assert loaded.provenance == g.provenance
    assert loaded.spec.to_json() == g.spec.to_json()
    elements, again = ({str(i): e.tensors() for i, e in a.elements.items()} for a in (g, loaded))
    torch.testing.assert_close(again, elements, rtol=0, atol=0)
    torch.testing.assert_close(dict(loaded.shifts), dict(g.shifts), rtol=0, atol=0)
    torch.testing.assert_close(dict(loaded(this.checkpoint)), dict(g(this.checkpoint)), rtol=0, atol=EXACT)


@every_model
def test_a_declaration_survives_json(label: str) -> None:
    spec = case(label).spec
    again = Spec.from_json(spec.to_json())
    assert again.to_json() == spec.to_json()
    assert again.movable == spec.movable


@every_model
def test_files_of_the_real_class(label: str, tmp_path: Path) -> None:
    """Saved by the class, opened, moved, written: it loads through the class without any complaint."""
    this = case(label)
    if hasattr(transformers, this.checkpoint.name):
        seen(this.checkpoint).save_pretrained(tmp_path / "source")
    else:
        this.checkpoint.save(tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    spec = resolve(source.config, source)
    spec.check({name: source.info(name).shape for name in source}, label)
    assert spec.to_json() == this.spec.to_json()

    g = random_alignment(spec, 8, largest=True)
    g(source).save(tmp_path / "moved")
    if hasattr(transformers, this.checkpoint.name):
        kind = getattr(transformers, this.checkpoint.name)
        _, report = kind.from_pretrained(tmp_path / "moved", output_loading_info=True)
        assert not any(report.values()), report
    assert this.error(open_checkpoint(tmp_path / "moved"), g) < this.exact

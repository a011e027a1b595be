"""Statistics as folders: saved and read back, what does not fit, and the Fisher information under an alignment."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from contract.tiny import MODELS, real
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, OutputError, SymmetryError
from symfuse.groups import Monomial
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io import open as open_checkpoint
from symfuse.io.lazy import Lazy
from symfuse.model import Model
from symfuse.stats.statistics import Input, Statistics
from symfuse.transporting import transport
from symfuse.transporting.statistics import transported_statistics

QUERY, KEY, OUT = (f"encoder.layer.0.attention.{part}.weight" for part in ("self.query", "self.key", "output.dense"))


def gram(width: int = 20) -> Statistics:
    rng = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for entry in (QUERY, OUT):
        x = torch.randn(31, width, generator=rng, dtype=torch.float64)
        tensors |= {f"{entry}.gram": x.T @ x, f"{entry}.sum": x.sum(0)}
    inputs = {QUERY: Input(QUERY, 1, 31), KEY: Input(QUERY, 1, 31), OUT: Input(OUT, 1, 31)}
    return Statistics("gram", tensors, 4, {"task": "made up", "model": {"name": "A", "sha256": None}}, inputs)


def fisher(checkpoint: Checkpoint) -> Statistics:
    """The mean over examples, one after the other, of squared gradients of the log-likelihood of a given label."""
    module, rng = real(checkpoint), torch.Generator().manual_seed(0)
    model = Model.of(checkpoint)
    parameters = dict(module.named_parameters())
    prefix = f"{module.base_model_prefix}."
    at = {name: name if name in parameters else prefix + name for name in model.spec.tensors}
    sums = {name: torch.zeros_like(parameters[own]) for name, own in at.items() if own in parameters}
    for label in range(3):
        module.zero_grad()
        logits = module(input_ids=torch.randint(3, 61, (1, 8), generator=rng)).logits
        logits.log_softmax(-1).reshape(-1, logits.shape[-1])[:, label].sum().backward()
        for name in sums:
            grad = parameters[at[name]].grad
            sums[name] += 0 if grad is None else grad.square()
    return Statistics("fisher", {name: total.detach() / 3 for name, total in sums.items()}, 3)


def test_what_is_saved_is_read_back_by_layers(tmp_path: Path) -> None:
    ours = gram()
    found = Statistics.load(ours.save(tmp_path / "out", {"more.txt": "words"}))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "layer-00000.safetensors", "more.txt", "statistics.json",
    ]  # fmt: skip
    assert (found.kind, found.count, found.inputs, found.provenance) == ("gram", 4, ours.inputs, ours.provenance)
    for name, tensor in ours.tensors.items():
        assert torch.equal(found.read(name), tensor.float())
    key = found.of(KEY)
    assert key is not None
    assert torch.equal(key.read("gram"), ours.tensors[f"{QUERY}.gram"].float())
    assert torch.equal(key.part("gram", 30, 70), key.read("gram").flatten()[30:70])
    assert key.values == {"count": 4, "dim": 1, "positions": 31}
    assert found.of("encoder.layer.0.output.dense.weight") is None
    again = Statistics.load(found.save(tmp_path / "again"))
    assert torch.equal(again.read(f"{OUT}.sum"), found.read(f"{OUT}.sum"))


def test_nothing_is_replaced_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    gram().save(tmp_path / "out")
    with pytest.raises(OutputError, match="exists"):
        gram().save(tmp_path / "out")
    broken = gram()
    broken.tensors[f"{OUT}.sum"][0] = float("nan")
    with pytest.raises(CheckpointError, match=r"output.dense.weight.sum.* holds 1 NaN"):
        broken.save(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def changed(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "statistics.json").read_text())
        (folder / "statistics.json").write_text(json.dumps(data | {key: value}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        held = load_file(folder / "layer-00000.safetensors")
        change(held)
        save_file(held, folder / "layer-00000.safetensors")

    return write


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "statistics.json").unlink(), "holds no statistics.json"),
        (lambda folder: (folder / "statistics.json").write_text("{"), "statistics.json cannot be read as JSON"),
        (changed("count", "many"), r"'statistics.json.count' is \"many\", expected a whole number"),
        (changed("format", 7), "'format' 7 of 'statistics' 'gram', expected 1"),
        (changed("statistics", "hessian"), "'statistics' 'hessian', expected 1 of fisher or gram"),
        (changed("statistics", "fisher"), "make no sense for fisher"),
        (changed("provenance", {"model": "A"}), 'provenance.model\' is "A", expected an object'),
        (changed("inputs", {}), "in one of 'inputs' and 'files' only"),
        (changed("inputs", {QUERY: [QUERY, 3, 31], OUT: [OUT, 1, 31]}), "along dimension 3"),
        (changed("files", {"x": "../other.safetensors"}), "which is not there"),
        (lambda folder: (folder / "layer-00000.safetensors").unlink(), "'layer-00000.safetensors', which is not there"),
        (tensors(lambda held: held.pop(f"{OUT}.sum")), "disagree on .*output.dense.weight.sum"),
        (tensors(lambda held: held.update(extra=torch.ones(2))), "disagree on extra"),
        (tensors(lambda held: held.update({f"{OUT}.sum": torch.ones(3)})), r"the sum \[3\], over 31 positions"),
        (tensors(lambda held: held.update({f"{OUT}.sum": torch.ones(20).int()})), "expected floating-point numbers"),
    ],
)
def test_a_folder_that_does_not_fit(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    folder = gram().save(tmp_path / "out")
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        Statistics.load(folder)


def test_statistics_are_of_one_model() -> None:
    model = Model.of(MODELS["bert-sequence"]())
    gram().require(model)
    with pytest.raises(IncompatibleError, match=r"gram of .*query.weight' is of shape \[19\], expected \[20\]"):
        gram(19).require(model)
    with pytest.raises(IncompatibleError, match=r"expected none for GPT2Model; collect them again"):
        gram().require(Model.of(MODELS["gpt2"]()))
    found = fisher(model.checkpoint)
    found.require(model)
    with pytest.raises(OptionError, match=r"fisher statistics, which have no 'gram' of"):
        found.of(QUERY).read("gram")  # type: ignore[union-attr]
    with pytest.raises(OptionError, match=r"gram statistics, which have no 'fisher' of"):
        gram().of(QUERY).read("fisher")  # type: ignore[union-attr]


def test_statistics_of_other_weights_are_refused(tmp_path: Path) -> None:
    one, other = (open_checkpoint(MODELS["bert-sequence"](seed).save(tmp_path / str(seed))) for seed in (0, 1))
    ours = Statistics("gram", gram().tensors, 4, {"model": one.lineage()}, gram().inputs)
    ours.require(Model.of(one))
    with pytest.raises(IncompatibleError, match=r"taken from another model, .*symfuse transport"):
        ours.require(Model.of(other))


def exact(checkpoint: Checkpoint, axes: tuple[str, ...]) -> Alignment:
    return random_alignment(Model.of(checkpoint).spec, 3, axes, largest=True)


@pytest.mark.parametrize(
    ("label", "axes"),
    [
        ("bert-sequence", ("h", "ffn", "residual", "pool")),
        ("gpt2-lm-untied", ("h", "ffn", "residual")),
        ("llama-biased", ("kv", "q", "ffn", "residual")),  # with scales and signs
    ],
)
def test_the_fisher_information_of_the_aligned_model_is_the_moved_one(label: str, axes: tuple[str, ...]) -> None:
    checkpoint = MODELS[label]()
    alignment = Alignment(Model.of(checkpoint).spec, exact(checkpoint, axes).elements)
    ours, expected = fisher(checkpoint), fisher(alignment(checkpoint))
    moved = transported_statistics(ours, alignment, checkpoint)
    tolerance = 1e-4 if label.startswith("llama") else 1e-9
    assert len(expected.tensors) > 20
    for name, tensor in expected.tensors.items():
        atol = tolerance * tensor.abs().max().item() + 1e-25  # that of a key's bias is zero but for rounding
        assert_close(moved.read(name), tensor, rtol=tolerance, atol=atol)
    wrong = transported_statistics(ours, alignment.inverse(), checkpoint)
    assert any(not torch.allclose(wrong.read(name), t, rtol=0.1) for name, t in expected.tensors.items())
    if label.startswith("llama"):
        assert any(isinstance(g, Monomial) and g.scale is not None for g in alignment.elements.values())


def test_a_fisher_information_is_not_rotated_nor_translated(tmp_path: Path) -> None:
    checkpoint = MODELS["bert-sequence"]()
    ours = fisher(checkpoint)
    with pytest.raises(SymmetryError, match=r"axis v\[\d\] is rotated.*Collect them again, from the aligned model"):
        transported_statistics(ours, Alignment(Model.of(checkpoint).spec, exact(checkpoint, ("v",)).elements))
    with pytest.raises(SymmetryError, match=r"translates .*value.bias through .*--no-biases"):
        transported_statistics(ours, exact(checkpoint, ("v",)))
    folder = ours.save(tmp_path / "fisher")
    alignment = exact(checkpoint, ("ffn",))
    moved = Statistics.load(transport(folder, alignment).save(tmp_path / "out"))
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(moved.read(name), alignment.move(name, ours.read(name).float()))


def test_no_squared_gradient_is_negative(tmp_path: Path) -> None:
    """Said of the file that holds it, however it is read."""
    ours = Statistics("gram", {f"{OUT}.sum": torch.tensor([-1.0])}, 1, inputs={OUT: Input(OUT, 1, 1)})
    assert ours.read(f"{OUT}.sum").item() == -1  # of others it may be
    values = torch.rand(20, 20)
    values[3, 4] = -2.5
    bad = Statistics("fisher", {QUERY: values}, 3)
    folder = Statistics("fisher", {QUERY: values.abs()}, 3).save(tmp_path / "f")
    save_file({QUERY: values}, folder / "layer-00000.safetensors")
    for found, where in ((bad, "of statistics"), (Statistics.load(folder), r"of f/layer-00000.safetensors")):
        one = found.of(QUERY)
        assert one is not None
        reads: list[Callable[[], object]] = [
            lambda one=one: one.read("fisher"),  # type: ignore[misc]
            lambda one=one: one.part("fisher", 60, 70),  # type: ignore[misc]
            lambda one=one: one.values,  # type: ignore[misc]
        ]
        for read in reads:
            with pytest.raises(CheckpointError, match=f"query.weight' {where} holds -2.5, and squared gradients are"):
                read()
        assert one.part("fisher", 0, 64).shape == (64,)


def test_the_mean_and_the_norm_are_of_the_tensors(tmp_path: Path) -> None:
    """And not of what a provenance says, which may be that of others."""
    tensors = {QUERY: torch.rand(4, 5), OUT: 100 * torch.rand(7)}
    ours = Statistics("fisher", tensors, 3, {"values": {"mean": 1.0, "norm": 1.0}})
    every = torch.cat([tensor.double().flatten() for tensor in tensors.values()])
    for found in (ours, Statistics.load(ours.save(tmp_path / "f"))):
        one = found.of(QUERY)
        assert one is not None
        assert one.values == pytest.approx({"count": 3, "mean": every.mean().item(), "norm": every.norm().item()})


class Computed(Lazy):
    """Tensors that count how often they are computed."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__({name: TensorInfo.of(tensor) for name, tensor in tensors.items()})
        self.tensors = tensors
        self.count = 0

    def wide(self, name: str) -> Tensor:
        self.count += 1
        return self.tensors[name]


def test_what_is_computed_is_computed_once_for_all_its_parts() -> None:
    tensors = Computed({QUERY: torch.rand(6, 5), OUT: torch.rand(4, 5)})
    found = Statistics("fisher", tensors, 3)
    assert found.infos.keys() == tensors.keys()
    tensors.count = 0  # the type checker of tests has looked at one
    for name, blocks in ((QUERY, 6), (OUT, 4)):
        one = found.of(name)
        assert one is not None
        parts = [one.part("fisher", 5 * i, 5 * i + 5) for i in range(blocks)]
        assert torch.equal(torch.stack(parts), tensors.tensors[name])
    assert tensors.count == 2
    with ThreadPoolExecutor(4) as pool:
        assert len({repr(one) for one in pool.map(lambda _: found.totals, range(8))}) == 1
    assert tensors.count == 4


@pytest.mark.parametrize("label", ["mixtral-lm", "olmoe-lm"])
def test_pieces_of_a_stack_have_its_information(label: str, tmp_path: Path) -> None:
    model = Model.of(open_checkpoint(MODELS[label]().save(tmp_path / "m")))
    spec, rng = model.spec, torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(model.read(name).shape, generator=rng) for name in spec.stacks}
    found = Statistics("fisher", tensors, 3)
    pieces = model.as_in(spec).spec.tensors.keys() - spec.tensors.keys()
    assert len(pieces) == sum(len(spec.stored(name)) for name in spec.stacks)
    for stack, whole in tensors.items():
        fused = stack.endswith("gate_up_proj")
        parts = [part for expert in whole for part in (expert.chunk(2) if fused else (expert,))]
        for number, part in enumerate(parts):
            one = found.of(f"{stack}.{number}", spec)
            assert one is not None
            assert torch.equal(one.read("fisher"), part)
            assert torch.equal(one.part("fisher", 7, 30), part.flatten()[7:30])
            pieces.remove(f"{stack}.{number}")
        for other in (f"{stack}.{len(parts)}", f"{stack}.x", f"{stack}.", "0"):
            assert found.of(other, spec) is None
        assert found.of(f"{stack}.0") is None  # without a declaration it has no end
    assert not pieces

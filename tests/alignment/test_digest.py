"""The canonical form and the digest: the same for every element of the group, another one for other weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import symfuse
from command import data, run
from contract.tiny import MODELS, case, model_of
from rewriting.kit import changed
from symfuse.alignment import random_alignment
from symfuse.alignment.order import canonical_frame, canonical_order
from symfuse.errors import OptionError, SymmetryError
from symfuse.groups import Centred, Orthogonal
from symfuse.model import Model

# LayerNorm with a tied head and key biases; rotary positions and gated neurons; post-norm with gauges; LayerScale.
FEW = ["gpt2-lm", "qwen3-biased", "bert-mlm", "dinov2-classification"]
MANY = [
    *FEW, "torch-relu-post", "roberta-mlm", "electra-discriminator", "deberta-mlm-v3", "vit-classification",
    "llama-lm", "gemma2-lm", "mixtral-lm", "olmo2-lm", "falcon-lm", "neox-lm", "opt-lm", "bloom-lm", "t5-lm", "clip",
    "mamba2-lm", "latent-lm", "qwen3-next-lm", "resnet-classification",
]  # fmt: skip


def moved(model: Model, seed: int, folded: Model) -> Model:
    """The model after random elements of all that may act on it as it is, or folded, which is more."""
    base = model if seed % 2 == 0 else folded
    return Model.of(random_alignment(base.spec, seed, largest=True).on(base))


def same_for_all(label: str, seeds: range) -> None:
    model = model_of(label)
    folded, _ = canonical_frame(model)
    one = symfuse.digest(model.checkpoint)
    for seed in seeds:
        other = symfuse.digest(moved(model, seed, folded).checkpoint)
        assert other.hash == one.hash, (seed, sorted(set(one.parts) - set(one.same(other))))
    assert one.margin > 1e-6
    assert one.sure > 1e-6


@pytest.mark.parametrize("label", FEW)
def test_the_digest_is_the_same_for_moved_models(label: str) -> None:
    same_for_all(label, range(10))


@pytest.mark.slow
@pytest.mark.parametrize("label", MANY)
def test_the_digest_is_the_same_for_five_hundred_moves(label: str) -> None:
    same_for_all(label, range(100, 100 + -(-500 // len(MANY))))


@pytest.mark.parametrize("label", FEW)
def test_one_unit_changed_by_a_hundredth_changes_its_part_alone(label: str) -> None:
    """One row of the up projection, of the last layer."""
    model = model_of(label)
    one = symfuse.digest(model.checkpoint)
    layouts = {name: [str(node) for node in d.layout.dims] for name, d in model.spec.tensors.items()}
    up = next(name for name in reversed(layouts) if "ffn" in layouts[name] and len(layouts[name]) > 1)
    file, dim = model.spec.file_name(up), layouts[up].index("ffn")
    for unit in range(5):
        weight = model.checkpoint[file].clone()
        weight.select(dim, unit).mul_(1.01)
        other = symfuse.digest(changed(model.checkpoint, {file: weight}))
        assert other.hash != one.hash
        assert set(one.parts) - set(one.same(other)) == {"ffn[1]"}


def test_other_models_share_nothing_that_is_trained() -> None:
    one, other = (symfuse.digest(MODELS["gpt2-lm"](seed)) for seed in (0, 1))
    assert one.hash != other.hash
    assert set(one.same(other)) <= {"fixed", "fixed[0]", "fixed[1]"}  # gains that are folded are ones


def test_swapped_rows_of_one_side_are_noticed() -> None:
    """Norms are as before: only inner products can tell."""
    model = model_of("gpt2-lm")
    name = model.spec.file_name("h.1.mlp.c_proj.weight")
    weight = model.checkpoint[name].clone()
    weight[[0, 1]] = weight[[1, 0]]
    one, other = symfuse.digest(model.checkpoint), symfuse.digest(changed(model.checkpoint, {name: weight}))
    assert set(one.parts) - set(one.same(other)) == {"ffn[1]"}


def test_ties_are_refused_and_said() -> None:
    model = model_of("llama-lm")
    n = model.spec.axes["residual"].size
    flat = torch.eye(model.spec.axes["vocab"].size, n, dtype=torch.float64)
    with pytest.raises(SymmetryError, match=r"residual: values that orient these axes tie"):
        symfuse.digest(changed(model.checkpoint, {model.spec.file_name("embed_tokens.weight"): flat}))
    with pytest.raises(SymmetryError, match=r"residual.*: values that orient these axes tie"):
        symfuse.digest(changed(model.checkpoint, {name: torch.zeros_like(t) for name, t in model.checkpoint.items()}))


def test_equal_neurons_may_change_places() -> None:
    """A tie between units that are ordered by their norms is no tie of the digest."""
    model = model_of("gpt2-lm")
    values = {}
    for part, dim in (("c_fc.weight", 1), ("c_fc.bias", 0), ("c_proj.weight", 0)):
        name = model.spec.file_name(f"h.0.mlp.{part}")
        tensor = model.checkpoint[name].clone()
        tensor.select(dim, 3).copy_(tensor.select(dim, 5))
        values[name] = tensor
    twins = Model.of(changed(model.checkpoint, values))
    one = symfuse.digest(twins.checkpoint)
    assert all(symfuse.digest(moved(twins, seed, twins).checkpoint).hash == one.hash for seed in range(4))


@pytest.mark.parametrize("label", ["gpt2-lm", "llama-lm", "bert-mlm", "dinov2-classification", "bert"])
def test_the_canonical_form_computes_the_same_and_is_one_form(label: str) -> None:
    this = case(label)
    new = symfuse.rewrite(this.checkpoint, ["canonical"])
    assert this.error(new) < this.exact
    model = model_of(label)
    other = symfuse.rewrite(
        random_alignment(model.spec, 4, None if model.spec.heads else {"qk", "v", "ffn", "h"}, largest=True).on(model),
        ["canonical"],
    )
    worst = max(float((new[name] - other[name]).abs().max()) for name in new)
    assert worst < 1e-7
    again = symfuse.rewrite(new, ["canonical"])
    assert max(float((new[name] - again[name]).abs().max()) for name in new) < 1e-7


def test_units_by_size() -> None:
    this = case("gpt2-lm")
    new = symfuse.rewrite(this.checkpoint, ["order"])
    assert this.error(new) < 1e-13
    model = Model.of(new)
    sizes = torch.stack(
        [model.read("h.0.mlp.c_fc.weight").square().sum(0), model.read("h.0.mlp.c_proj.weight").square().sum(1)]
    )
    total = sizes.sum(0) + model.read("h.0.mlp.c_fc.bias").square()
    assert bool((total.diff() <= 0).all())
    with pytest.raises(OptionError, match="canonical is the same after order; leave one of them out"):
        symfuse.rewrite(this.checkpoint, ["order", "canonical"])


@pytest.mark.parametrize("group", [Orthogonal(), Centred()])
def test_principal_axes(group: Orthogonal | Centred) -> None:
    rng = torch.Generator().manual_seed(0)
    y, vectors = torch.randn(6, 40, generator=rng).double(), torch.randn(6, 3, generator=rng).double()
    forms = []
    for seed in range(8):
        g = group.random(6, (), torch.Generator().manual_seed(seed))
        args = (g.act(y, 0),) if isinstance(group, Orthogonal) else (g.act(y, 0), g.act(vectors, 0))
        q, sure = group.principal(*args)  # type: ignore[arg-type]
        assert group.contains(q, 1e-12)
        assert float(sure) > 0
        forms.append(q.act(args[0], 0) - (q.act(args[0], 0).mean(0) if isinstance(group, Centred) else 0))
    for form in forms[1:]:
        torch.testing.assert_close(form, forms[0], rtol=0, atol=1e-10)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    MODELS["llama-lm"](0).save("a")
    MODELS["llama-lm"](1).save("c")
    done = run("rewrite", "a", "rotate=random", "heads=random", "-o", "b")
    assert done.exit_code == 0, done.output
    found = data("relate", "a", "b", "--digest")
    assert [one["digest"] for one in found["models"]] == [symfuse.digest(name).hash for name in "ab"]
    assert found["equal"]
    assert found["models"][0]["notes"] == ["fold_norms first"]
    assert not data("relate", "a", "c", "--digest")["equal"]
    assert "determined to" in run("relate", "a", "--digest").output
    assert "relate needs two models, or a folder of several; found a" in run("relate", "a").output
    assert "use --json instead of -o" in run("relate", "a", "--digest", "-o", "x").output
    order = canonical_order(Model.of(symfuse.open("a")))
    assert not order.loose

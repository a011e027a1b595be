"""Transport is an action: by g and then by h is by hg, and by the inverse back again; whatever is moved."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from contract.tiny import MODELS
from symfuse.alignment import Alignment, random_alignment
from symfuse.groups import Monomial
from symfuse.model import Model
from symfuse.spec import Spec
from symfuse.transporting import transport

SIZES = {"residual": 20, "ffn[1]": 29, "v[0]": 20, "qk[1]": 20}


@cache
def spec() -> Spec:
    return Model.of(MODELS["bert-mlm"](0)).spec


def element(seed: int) -> Alignment:
    return random_alignment(spec(), seed, largest=True)


def carried(tensors: dict[str, Tensor], by: list[Alignment], **options: str) -> dict[str, Tensor]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "thing.safetensors"
        for alignment in by:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path)
            tensors = dict(transport(path, alignment, **options).tensors)
    return tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from(sorted(SIZES)), st.sampled_from(["vector", "probe"])
)
def test_vectors_and_linear_forms(one: int, two: int, axis: str, kind: str) -> None:
    g, h = (Alignment(spec(), element(seed).elements) for seed in (one, two))
    rng = torch.Generator().manual_seed(one)
    tensors = {"v": torch.randn(3, SIZES[axis], generator=rng, dtype=torch.float64)}
    same(carried(tensors, [g, h], axis=axis, kind=kind), carried(tensors, [h @ g], axis=axis, kind=kind))
    same(carried(tensors, [g, g.inverse()], axis=axis, kind=kind), tensors)


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_moments(one: int, two: int) -> None:
    g, h = (Alignment(spec(), monomial(element(seed))) for seed in (one, two))
    rng = torch.Generator().manual_seed(two)
    tensors = {}
    for name in ("bert.encoder.layer.0.intermediate.dense.weight", "bert.encoder.layer.1.output.dense.weight"):
        m = torch.randn(spec().tensors[canonical(name)].layout.shape(spec().sizes), generator=rng, dtype=torch.float64)
        tensors |= {f"{name}.exp_avg": m, f"{name}.exp_avg_sq": m.square()}
    there = carried(tensors, [g, h])
    same(there, carried(tensors, [h @ g]))
    same(carried(tensors, [g, g.inverse()]), tensors)
    same({n: t.square() for n, t in there.items() if n.endswith("avg")},
         {n.removesuffix("_sq"): t for n, t in there.items() if n.endswith("sq")})  # fmt: skip


def monomial(alignment: Alignment) -> dict:
    return {i: g for i, g in alignment.elements.items() if isinstance(g, Monomial)}


def canonical(file: str) -> str:
    return next(name for name in spec().tensors if spec().file_name(name) == file)


@settings(deadline=None, max_examples=4)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_adapters(one: int, two: int) -> None:
    """The bias that a translation makes adds up too."""
    g, h = element(one), element(two)
    rng = torch.Generator().manual_seed(one)
    module = "base_model.model.bert.encoder.layer.0.attention.output.dense"
    tensors = {
        f"{module}.lora_A.weight": torch.randn(2, 20, generator=rng, dtype=torch.float64),
        f"{module}.lora_B.weight": torch.randn(20, 2, generator=rng, dtype=torch.float64),
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        start = folder / "start"
        start.mkdir()
        (start / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}', "utf-8")
        save_file(tensors, start / "adapter_model.safetensors")
        transport(start, g).save(folder / "g")
        there = dict(transport(folder / "g", h).tensors)
        same(there, dict(transport(start, h @ g).tensors))
        back = dict(transport(folder / "g", g.inverse()).tensors)
        bias = back.pop(f"{module}.lora_B.bias")
        same(back, tensors)
        torch.testing.assert_close(bias, torch.zeros_like(bias), rtol=0, atol=1e-9)

"""A slip in a declaration must be noticed: every tensor of a family, its layout wrong in every way.

One atom at a time is made inert (its axis carried, not moved), given the other variance where the group tells
them apart, or a product's axes are swapped. The model is then moved by a random alignment under the mutated
declaration, and its outputs must change, except where theory says that they cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny import Case, case, real

from symfuse.alignment import Alignment, random_alignment
from symfuse.spec import Axis, Declared, Instance, Layout, Spec, Variance
from symfuse.spec.layout import Atom, Node, Product

NOTICED, UNNOTICED = 1e-6, 1e-13  # measured: from 3e-2, and up to 4e-15

# One or a few models of each family that together have all its parts.
MODELS = (
    *("torch-relu-post", "torch-gelu-pre", "sceptr", "bert-pretraining", "bert-token", "bert-mlm-untied"),
    *("roberta-sequence", "roberta-mlm", "distilbert-sequence", "distilbert-mlm"),
    *("electra-generator", "electra-discriminator", "electra-sequence", "electra-choice"),
    *("deberta-mlm", "deberta-mlm-v3", "deberta-mlm-absolute", "deberta-sequence", "deberta-token"),
    *("vit", "vit-masked", "deit", "deit-teacher", "gpt2-lm", "gpt2-token"),
)

SOFTMAX = "a key's bias adds one number to all scores of a query, which the softmax ignores: it may be anything"
# Ends of names of tensors whose mutations cannot be seen, and why; in which models.
EQUIVALENT = {
    "attention.self.key.bias": ("bert", "roberta", "electra"),
    "attention.k_lin.bias": ("distilbert",),
    "attention.attention.key.bias": ("vit", "deit"),
    # With p2c the content's key also meets positions, and its bias is not free; the position's own key is.
    "attention.self.key_proj.bias": ("deberta-mlm-absolute",),
    "attention.self.pos_key_proj.bias": ("deberta",),
}
# In a fused bias only the key's part is free.
FUSED = {"in_proj_bias": ("torch", "sceptr"), "attn.c_attn.bias": ("gpt2",)}


def still(name: str) -> str:
    return f"{name}_still"


def mutants(node: Node, spec: Spec, key: str = "") -> Iterator[tuple[str, Node]]:
    """Every node that differs from this one by one slip, with what the slip is."""
    if isinstance(node, Atom):
        group = None if node.name.isdigit() else spec.axes[node.name].group
        if group is not None:
            yield f"{node} inert", Atom(still(node.name), node.variance)
        if group is not None and not group.self_dual and node.variance is not Variance.PLAIN:
            other = Variance.DUAL if node.variance is Variance.PRIMAL else Variance.PRIMAL
            yield f"{node} given the other variance", Atom(node.name, other)
        return
    for at, part in enumerate(node.parts):
        for slip, mutant in mutants(part, spec):
            parts = [*node.parts[:at], mutant, *node.parts[at + 1 :]]
            if isinstance(mutant, Atom) and mutant.name == still("h"):  # what is per head goes on unordered
                parts = [_per_still_head(p) if i > at else p for i, p in enumerate(parts)]
            yield f"{slip} in {node}", type(node)(tuple(parts))
    if isinstance(node, Product):
        yield f"{node} swapped", Product(node.parts[::-1])


def _per_still_head(node: Node) -> Node:
    return Atom(f"{node.name}_unordered", node.variance) if isinstance(node, Atom) else node


def layouts(layout: Layout, spec: Spec) -> Iterator[tuple[str, Layout]]:
    for at, dim in enumerate(layout.dims):
        for slip, mutant in mutants(dim, spec):
            yield f"{slip} of {layout}", Layout((*layout.dims[:at], mutant, *layout.dims[at + 1 :]))


def widened(g: Alignment) -> Alignment:
    """The alignment with an inert copy of every axis, and of those per head one in the heads' old order."""
    axes, elements = dict(g.spec.axes), dict(g.elements)
    for name, axis in g.spec.axes.items():
        axes[still(name)] = Axis(axis.size)
        if "h" in axis.per:
            per = tuple(still("h") if p == "h" else p for p in axis.per)
            axes[f"{name}_unordered"] = replace(axis, per=per)
            instances = [i for i in g.elements if i.axis == name]
            elements |= {Instance(f"{name}_unordered", i.index): g.elements[i] for i in instances}
    return replace(g, spec=replace(g.spec, axes=axes), elements=elements)


def mutated(g: Alignment, name: str, layout: Layout) -> Alignment:
    declared = Declared(layout, g.spec.tensors[name].index)
    return replace(g, spec=replace(g.spec, tensors={**g.spec.tensors, name: declared}))


def parameter(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The one that holds this tensor; names in memory may differ from those on disk."""
    return next(
        p for p in [*module.parameters(), *module.buffers()] if p.shape == tensor.shape and torch.equal(p, tensor)
    )


def is_free(label: str, name: str, slip: str) -> bool:
    if any(name.endswith(end) and label.startswith(models) for end, models in EQUIVALENT.items()):
        return True
    fused = any(name.endswith(end) and label.startswith(models) for end, models in FUSED.items())
    return fused and ("in h qk* in" in slip or slip.startswith("h qk* swapped"))


def errors(this: Case) -> Iterator[tuple[str, str, float]]:
    """All mutations of tensors of layer 0 and of those outside layers: tensor, slip, change of outputs."""
    true = replace(random_alignment(this.spec, 11, largest=True), shifts={})
    g, module = widened(true), real(true(this.checkpoint))
    assert this.error(module, g) < UNNOTICED
    for name, declared in this.spec.tensors.items():
        if declared.index.get("l", 0) > 0:
            continue
        tensor = this.checkpoint[this.spec.file_name(name)]
        right = g.move(name, tensor)
        held = parameter(module, right)
        for slip, layout in layouts(declared.layout, this.spec):
            wrong = mutated(g, name, layout).move(name, tensor)
            if wrong.shape == right.shape:
                held.data = wrong
                yield name, slip, this.error(module, g)
        held.data = right


@pytest.mark.parametrize("label", MODELS)
def test_every_slip_is_noticed(label: str) -> None:
    found = list(errors(case(label)))
    assert len(found) > 30
    unnoticed = [(name, slip) for name, slip, error in found if error < NOTICED]
    assert unnoticed == [(name, slip) for name, slip, _ in found if is_free(label, name, slip)]
    assert all(error < UNNOTICED for _, _, error in found if error < NOTICED)


def test_every_family_is_mutated() -> None:
    from tiny import MODELS as ALL

    assert {case(label).spec.family for label in ALL} - {case(label).spec.family for label in MODELS} == {
        "xlm-roberta",  # declared as roberta, by the same function
        "camembert",
    }

"""Which group may act on the neurons of a feed-forward block, from the name of its activation."""

from __future__ import annotations

from symfuse.errors import SpecError
from symfuse.groups import Group, Permutation, PositiveMonomial, Signed

# a(c x) = c a(x) for c > 0: neurons may be rescaled too. a(−x) = −a(x): they may be flipped.
_HOMOGENEOUS = {"relu", "leaky_relu"}
_ODD = {"tanh", "linear"}
_ELEMENTWISE = {
    "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh",
    "quick_gelu", "silu", "swish", "mish", "sigmoid", "relu2", "relu6", "gelu_10", "laplace",
    "xielu",
}  # fmt: skip

# One function under several names, so that configs which differ only in the name agree.
SAME = {"gelu_python": "gelu", "swish": "silu"} | dict.fromkeys(
    ("gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh"), "gelu_new"
)


def neurons(activation: str) -> Group:
    """The symmetry group of neurons behind an elementwise activation; SpecError for one that is not known."""
    if activation in _HOMOGENEOUS:
        return PositiveMonomial()
    if activation in _ODD:
        return Signed()
    if activation in _ELEMENTWISE:
        return Permutation()
    raise SpecError(
        f"config.json: activation {activation!r} is not known to act on each neuron by itself; known are "
        f"{', '.join(sorted(_HOMOGENEOUS | _ODD | _ELEMENTWISE))}"
    )

"""What blocks of attention and feed-forward have in common, whatever their names: maps, axes, neurons, translations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head
from symfuse.errors import SpecError
from symfuse.groups import Group, Invertible, Permutation, PositiveMonomial, Rotary, Signed
from symfuse.spec import Axis, Shift

# a(c x) = c a(x) for c > 0: neurons may be rescaled too. a(−x) = −a(x): they may be flipped.
_HOMOGENEOUS = {"relu", "leaky_relu"}
_ODD = {"tanh", "linear"}
_ELEMENTWISE = {
    "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh",
    "quick_gelu", "silu", "swish", "mish", "sigmoid", "relu2", "relu6", "gelu_10", "laplace", "xielu",
}  # fmt: skip

# One function under several names, so that configs which differ only in the name agree.
SAME = {"gelu_python": "gelu", "swish": "silu"} | dict.fromkeys(
    ("gelu_fast", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh"), "gelu_new"
)

ROTARY = Rotary()
ALIBI = "ALiBi: the slope of a head depends on its number"  # why heads stay


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


def linear(name: str, out: str, read: str = "residual*", *, bias: bool = True) -> dict[str, str]:
    """A linear map, stored [out, in]: where it writes, with its bias, and what it reads."""
    return {name + ".weight": f"{out} {read}"} | ({name + ".bias": out} if bias else {})


def norm(name: str, stream: str = "residual", *, bias: bool = True) -> dict[str, str]:
    """A LayerNorm of a stream."""
    return {name + ".weight": f"|{stream}|"} | ({name + ".bias": stream} if bias else {})


def norms(*names: str, bias: bool = True) -> dict[str, str]:
    """LayerNorms of the stream."""
    return {name: layout for one in names for name, layout in norm(one, bias=bias).items()}


def feed_forward(up: str, down: str, *, bias: bool = True) -> dict[str, str]:
    """Two maps with neurons between them."""
    return linear(up, "ffn", bias=bias) | linear(down, "residual", "ffn*", bias=bias)


def of_heads(part: str) -> tuple[str, str, str]:
    """The axes of one kind of attention: heads, and of each queries and keys, and values."""
    return (f"{part}_h", f"{part}_qk", f"{part}_v") if part else ("h", "qk", "v")


class Projections(dict[str, str]):
    """The maps of one attention, by letter: queries, keys, values, and o for that of the output. part: the word before
    its axes."""

    def __init__(self, names: Mapping[str, str], part: str = "") -> None:
        super().__init__(names)
        self.axes = of_heads(part)

    def tensors(self, stream: str = "residual", memory: str = "", *, bias: str = "qkvo") -> dict[str, str]:
        """memory: the stream that keys and values read, by default the same. bias: the letters of those with a bias."""
        (h, qk, v), memory = self.axes, memory or stream
        ends = {
            "q": (f"({h} {qk})", f"{stream}*"), "k": (f"({h} {qk}*)", f"{memory}*"), "v": (f"({h} {v})", f"{memory}*"),
            "o": (stream, f"({h} {v}*)"),
        }  # fmt: skip
        return {
            n: t for at, (out, read) in ends.items() for n, t in linear(self[at], out, read, bias=at in bias).items()
        }

    def shifts(self, *, bias: str = "qkvo") -> tuple[Shift, ...]:
        """A key's bias is free, and a value's may move into that of the output."""
        _, qk, v = self.axes
        value = value_shift(self["v"], self["o"], v)
        return (Shift(self["k"] + ".bias", f"{qk}*"), value) if "k" in bias else (value,)

    @property
    def readers(self) -> tuple[str, ...]:
        """The maps that read the stream."""
        return tuple(f"{self[at]}.weight" for at in "qkv")


def projections(at: str, *names: str, part: str = "") -> Projections:
    """The maps of an attention, from their names in its order: queries, keys, values, output."""
    return Projections({letter: at + name for letter, name in zip("qkvo", names, strict=True)}, part)


def dense_head(c: Config, dense: str, norm_name: str, decoder: str, embedding: str = "residual") -> dict[str, str]:
    """A map and its norm before the decoder of a masked language model. With a tied decoder that map writes into the
    space of the embeddings; else into its own, `lm`."""
    space = embedding if c.tied else "lm"
    return linear(dense, space) | norm(norm_name, space) | linear(decoder, "vocab", f"{space}*")


def block_axes(
    layers: int, hidden: int, heads: int, ffn: int, activation: str, head: int | None = None
) -> dict[str, Axis]:
    """The axes of a stack of such blocks. head: the size of one head, default hidden / heads.

    residual: a LayerNorm whose gain is kept allows no more than permutations, before or after the block. SpecError
    if heads of that size do not exist.
    """
    head = size_of_head(hidden, heads) if head is None else head
    return {
        "l": Axis(layers),
        "residual": Axis(hidden, Permutation()),
        "h": Axis(heads, Permutation(), per=("l",)),
        "qk": Axis(head, Invertible(), per=("l", "h")),
        "v": Axis(head, Invertible(), per=("l", "h")),
        "ffn": Axis(ffn, neurons(activation), per=("l",)),
    }


def size_of_head(hidden: int, heads: int) -> int:
    """The size that heads have if a config does not say; SpecError if there is none."""
    if hidden % heads:
        raise SpecError(f"config.json: the hidden size {hidden} is not a multiple of the number of heads, {heads}")
    return hidden // heads


def groups_of_heads(c: Config, key: str, heads: int) -> int:
    """The number of key/value heads, which is in that field; SpecError if not as many queries share each."""
    groups = c.get(key, heads)
    if not isinstance(groups, int) or groups < 1 or heads % groups:
        raise SpecError(f"config.json: num_attention_heads, {heads}, is no multiple of {key}, {groups}")
    return groups


def rotary_axes(head: int, turned: int, per: tuple[str, ...], group: Group = ROTARY) -> dict[str, Axis]:
    """The queries and keys of one head, of which positions turn so many dimensions, of an odd number one more: c, a
    plane for each frequency f, on which `group` acts; and p, what they do not turn. SpecError if there are no such
    planes in a head."""
    planes = (turned + 1) // 2
    if not 0 < 2 * planes <= head:
        raise SpecError(
            f"config.json: positions would turn {turned} of the {head} dimensions of a head, which cannot be cut into "
            "planes of two; look at the size of heads and at the share of it that is rotary"
        )
    axes = {"f": Axis(planes), "c": Axis(2, group, (*per, "f"))}
    return axes | ({"p": Axis(head - 2 * planes, Invertible(), per)} if head > 2 * planes else {})


def turned(axes: Mapping[str, Axis], size: int | None = None) -> dict[str, Axis]:
    """The axes of blocks whose queries and keys positions turn, in so many dimensions of a head, by default in all."""
    qk = axes["qk"]
    rest = {name: axis for name, axis in axes.items() if name != "qk"}
    return rest | rotary_axes(qk.size, qk.size if size is None else size, qk.per)


def key_shift(key: str, axis: str = "qk") -> Shift:
    """A key bias is free: it adds the same number to every score of a query, which the softmax ignores."""
    return Shift(key + ".bias", f"{axis}*")


def value_shift(value: str, output: str, axis: str = "v") -> Shift:
    """A value bias may move through the output projection into its bias: softmax rows sum to one."""
    return Shift(value + ".bias", axis, output + ".weight", output + ".bias")


def post_norm(
    layers: int, attention: Iterable[str], ffn: str, norms: tuple[str, str], first: str | None, last: Iterable[str]
) -> dict[str, str]:
    """Which norm each weight of a post-norm stream reads (Spec.gauges).

    attention, ffn: of a layer, by templates with {l}, the weights that read what the layer before puts out, and the one
    that reads what is between. norms: the norm after attention, and that after the feed-forward. first: that before the
    first layer, if there is one. last: what reads the last layer. All without their endings.
    """
    ends = [first, *(norms[1].format(l=i) for i in range(layers))]
    norm_of: dict[str, str | None] = {}
    for i in range(layers):
        norm_of |= {name.format(l=i): ends[i] for name in attention} | {ffn.format(l=i): norms[0].format(l=i)}
    norm_of |= dict.fromkeys(last, ends[-1])
    return {f"{reader}weight": f"{norm}.weight" for reader, norm in norm_of.items() if norm is not None}


def replaced(text: str, pieces: Mapping[str, str]) -> str:
    """A text with each old piece replaced, in the order of `pieces`."""
    for old, new in pieces.items():
        text = text.replace(old, new)
    return text


def renamed(tensors: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The same layouts under other names, of which pieces are replaced."""
    return {replaced(name, names): layout for name, layout in tensors.items()}


def with_names(family: Family, names: Mapping[str, str], prefix: str | None = None) -> Family:
    """The family with names of which pieces are replaced, in the order of `names`; and perhaps another prefix."""
    return replace(
        family.mapped(lambda name: replaced(name, names)), prefix=family.prefix if prefix is None else prefix
    )


def placed(tensors: Mapping[str, str], places: Mapping[str, str]) -> dict[str, str]:
    """The same tensors with other layouts, of which pieces are replaced."""
    return {name: replaced(layout, places) for name, layout in tensors.items()}


def absent(names: Iterable[str], layers: Iterable[int]) -> dict[str, str]:
    """The entries of a declaration for tensors that these layers do not have."""
    return {name.format(l=layer): "" for layer in layers for name in names}


# The task heads of GPT-2, GPT-NeoX, GPT-J, Falcon, OPT, BLOOM and MPT.
HEADS = {
    "causal LM": Head(("ForCausalLM",), {"lm_head.weight": "vocab residual*"}),
    "sequence": Head(("ForSequenceClassification",), {"score.weight": "labels residual*"}),
    "token": Head(("ForTokenClassification",), linear("classifier", "labels")),
    "question": Head(("ForQuestionAnswering",), linear("qa_outputs", "2")),
}
# What reads the last norm.
READERS = ("last_hidden_state", *(name for head in HEADS.values() for name in head.tensors if name.endswith("weight")))
OUTPUTS = {"last_hidden_state": "residual"}

"""Facts from names, shapes and config of a model: its sizes, as fields of the config, and the role of each tensor."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from symfuse.architectures.base import Config
from symfuse.architectures.names import HEAD
from symfuse.drafts.trace import Traced
from symfuse.errors import SpecError
from symfuse.model.undeclared import LAYER_COUNTS, head_name, is_tied

Shape = tuple[int, ...]

_LAYER = re.compile(r"(.*?)(?<![^.])(\d+)\.")  # a name up to its first number
_EXPERT = re.compile(r"(\{l\}.*experts?\.)(\d+)\.")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
NEURONS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim", "encoder_ffn_dim")
EXPERT_NEURONS = ("moe_intermediate_size", "expert_ffn_hidden_size", *NEURONS)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EMBEDDING = ("embedding_size", "input_embedding_size", "word_embed_proj_dim")

# Names of modules by role: the last part of the name, in attention and in feed-forward blocks.
_WORDS = {
    "q": "q q_proj query query_proj q_lin q_linear linear_q wq to_q",
    "k": "k k_proj key key_proj k_lin k_linear linear_k wk to_k",
    "v": "v v_proj value value_proj v_lin v_linear linear_v wv to_v",
    "qkv": "qkv qkv_proj qkv_lin qkv_linear c_attn query_key_value wqkv in_proj attn_qkv",
    "o": "o o_proj out out_proj out_lin wo to_out c_proj dense output proj linear_out",
}
ATTENTION = {word: role for role, words in _WORDS.items() for word in words.split()}
_WORDS = {
    "gate": "gate gate_proj w1 wi_0 gate_linear linear_gate fc1_g fc1_gate",
    "up": "up up_proj w3 wi_1 up_linear fc1_x fc12",
    "down": "down down_proj w2 wo fc2 c_proj fc_out dense_4h_to_h lin2 linear2 linear_2 ffn_output output dense_2",
    "router": "gate router wg classifier",
}
FEED_FORWARD = {role: set(words.split()) for role, words in _WORDS.items()}

MAPS = {*ATTENTION.values(), *FEED_FORWARD, "read"}  # roles of maps from the stream, or to it

_NORM = re.compile(r"(^|_)ln(_|\d|$)|norm")
_OF_QUERIES, _OF_KEYS = re.compile(r"^q(uery)?_|^q(ln|norm)"), re.compile(r"^k(ey)?_|^k(ln|norm)")
_EMBEDS = re.compile(r"embed|wte|wpe|position|_token$|patch")


@dataclass(frozen=True)
class Templates:
    """shapes: by template. layers, experts: how many {l} and {e} stand for, 0 where there is no such. others: by
    template the full names that have another shape, or with None are not there. names: of each tensor its template."""

    shapes: Mapping[str, Shape]
    layers: int
    experts: int
    others: Mapping[str, Mapping[str, Shape | None]]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A parsed template. module: without the kind of the tensor; words: its parts, in lower case."""

    template: str
    shape: Shape
    module: str
    kind: Literal["weight", "bias"]

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.module.lower().split("."))

    @property
    def leaf(self) -> str:
        return self.words[-1]

    @property
    def layered(self) -> bool:
        """Whether it is in a layer: of the stack, or one that is run several times."""
        return re.search(r"\{l\}|\.\d+\.", self.template) is not None


def templates(shapes: Mapping[str, Shape], layers: int | None, known: Collection[str] = ()) -> Templates:
    """The templates of these tensors. layers: as config.json counts them: the stack of one layer is one if it says so.

    The stack of layers is the list that has most tensors, of those that are known by a run if there are any; numbers
    elsewhere stay as they are.
    """
    stack, size = _stack(shapes, layers, known)
    named = {name: _template(name, stack) for name in shapes}
    indices = {int(m[2]) for text, _ in named.values() if (m := _EXPERT.search(text))}
    experts = len(indices) if indices == set(range(len(indices))) and len(indices) > 1 else 0
    shapes_of: dict[str, dict[str, Shape]] = defaultdict(dict)
    names = {name: _EXPERT.sub(r"\1{e}.", text) if experts else text for name, (text, _) in named.items()}
    for name, text in names.items():
        shapes_of[text][name] = shapes[name]
    usual = {text: Counter(named.values()).most_common(1)[0][0] for text, named in shapes_of.items()}
    others: dict[str, dict[str, Shape | None]] = {}
    for text, have in shapes_of.items():
        filled = [text.replace("{l}", str(i)) for i in range(size)] if "{l}" in text else [text]
        filled = [n.replace("{e}", str(i)) for n in filled for i in range(experts)] if "{e}" in text else filled
        if odd := {name: have.get(name) for name in filled if have.get(name) != usual[text]}:
            others[text] = odd
    return Templates(usual, size, experts, others, names)


def _stack(names: Mapping[str, Shape], layers: int | None, known: Collection[str]) -> tuple[str, int]:
    """The prefix of the names of layers, and the number of layers."""
    stacks: dict[str, list[int]] = defaultdict(list)
    found: Counter[str] = Counter()
    for name in names:
        if match := _LAYER.match(name):
            stacks[match[1]].append(int(match[2]))
            found[match[1]] += name in known
    whole = {
        at: len(set(numbers))
        for at, numbers in stacks.items()
        if set(numbers) == set(range(len(set(numbers)))) and (len(set(numbers)) > 1 or layers == 1)
    }
    at = max(whole, key=lambda one: (found[one], len(stacks[one])), default="")
    return at, whole.get(at, 0)


def _template(name: str, stack: str) -> tuple[str, int]:
    match = _LAYER.match(name)
    if not stack or match is None or match[1] != stack:
        return name, -1
    return f"{stack}{{l}}.{name[match.end() :]}", int(match[2])


def part(template: str, shape: Shape) -> Part:
    *before, last = template.split(".")
    kind: Literal["weight", "bias"] = "bias" if "bias" in last or last == "beta" else "weight"
    if last in ("weight", "bias", "gamma", "beta"):
        return Part(template, shape, ".".join(before), kind)
    stem, _, end = last.rpartition("_")
    return Part(template, shape, ".".join([*before, stem if end in ("weight", "bias") else last]), kind)


@dataclass(frozen=True)
class Size:
    """A size of this model, and the expression by which a declaration computes it from a Config c."""

    value: int
    text: str


@dataclass(frozen=True)
class Facts:
    """The input of a draft. roles: for each template its role, as far as known. traced: what a run showed, by template.
    ties: other names of one parameter → the first. buffers: names of tensors that are no parameters."""

    model_type: str
    class_name: str
    config: Mapping[str, Any]
    templates: Templates
    tied: bool
    head_name: str | None
    parts: Mapping[str, Part]
    traced: Traced = field(default_factory=Traced)
    ties: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()

    def size(self, keys: Iterable[str], value: int | None = None) -> Size | None:
        """The first of these fields of the config that is a size, and has that value if there is one; where there is no
        such field, what a run shows."""
        keys = list(keys)
        own = any(type(self.config.get(key)) is int for key in keys)
        for key in keys:
            have = (self.config if own else self.traced.config).get(key)
            if type(have) is int and have > 0 and value in (None, have):
                return Size(have, f"c.{key}" if own else str(have))
        return None

    def sized(self, value: int, keys: Iterable[str]) -> Size:
        """A size that the weights have: from the config where it has it, else as a number."""
        return self.size(keys, value) or Size(value, str(value))

    @cached_property
    def hidden(self) -> Size:
        vectors = Counter(p.shape[0] for p in self.parts.values() if p.layered and len(p.shape) == 1)
        usual = vectors.most_common(1)[0][0] if vectors else 0
        named = self.size(HIDDEN)
        shapes = {size for p in self.parts.values() for size in p.shape}
        return named if named is not None and named.value in shapes else Size(usual, str(usual))

    @cached_property
    def layers(self) -> Size:
        return self.sized(self.templates.layers, LAYER_COUNTS)

    @cached_property
    def experts(self) -> Size | None:
        named = self.size(EXPERTS)
        return self.sized(self.templates.experts, EXPERTS) if self.templates.experts else named

    @cached_property
    def roles(self) -> dict[str, str]:
        """By module: q k v qkv o, q_norm k_norm, gate up down router, read write, norm; outside of layers embed, pool,
        transform, head, project."""
        return {p.module: role for p in self.parts.values() if (role := self._role(p))}

    def apart(self, p: Part) -> bool:
        """Whether it is in another stack of layers than the main one, which is not read."""
        return self.templates.layers > 0 and p.layered and "{l}" not in p.template

    def _role(self, p: Part) -> str | None:
        if self.apart(p):
            return None
        if p.kind == "bias" and self.weight_of(p) is not None:
            return None  # that of its weight
        shown = self.traced.roles.get(p.template)
        maps = shown in MAPS and (len(p.shape) not in (2, 3) or self.hidden.value not in p.shape[-2:])
        if shown is not None and shown != "head" and not maps:
            return shown
        return self._named(p) or (None if p.layered else shown)

    def _named(self, p: Part) -> str | None:
        """The role that names and shapes suggest."""
        attention = any("attn" in word or "attention" in word for word in p.words[:-1])
        if _NORM.search(p.leaf):
            of = "q" if _OF_QUERIES.search(p.leaf) else "k" if _OF_KEYS.search(p.leaf) else ""
            return f"{of}_norm" if of and attention else "norm" if len(p.shape) == 1 else None
        if not p.layered:
            return self._outside(p)
        if len(p.shape) not in (2, 3) or any("cross" in word or word == "encoder_attn" for word in p.words):
            return None
        if attention:
            return ATTENTION.get(p.leaf)
        return self._neurons(p)

    def _neurons(self, p: Part) -> str | None:
        """The role in a feed-forward block: by shape, or by name where shapes are ambiguous."""
        hidden, (rows, columns) = self.hidden.value, p.shape[-2:]
        if self.experts and p.leaf in FEED_FORWARD["router"] and (rows, columns) == (self.experts.value, hidden):
            return "router"
        if hidden not in (rows, columns):
            return None
        if self.transposed:
            rows, columns = columns, rows
        if rows == columns or len(p.shape) == 3:
            down = p.leaf in FEED_FORWARD["down"] or p.words[-2:] == ("output", "dense")
        else:
            down = rows == hidden
        return "down" if down else next((role for role in ("gate", "up") if p.leaf in FEED_FORWARD[role]), "read")

    def _outside(self, p: Part) -> str | None:
        hidden, name = self.hidden.value, p.module.lower()
        embedding = self.embedding.value if self.embedding else hidden
        if len(p.shape) == 4 and p.shape[0] == hidden:
            return "patches"
        if len(p.shape) == 2 and p.shape == (hidden, embedding) != (hidden, hidden):
            return "project"
        named = _EMBEDS.search(name) and not HEAD.fullmatch(p.template)
        if len(p.shape) == 2 and p.shape[1] in (hidden, *self._inner) and not named:
            square = p.shape[0] in (hidden, *self._inner)
            return ("pool" if "pool" in name else "transform") if square else "head"
        return "embed" if _EMBEDS.search(name) and p.shape[-1:] in ((hidden,), (embedding,)) else None

    @cached_property
    def _inner(self) -> set[int]:
        """Sizes of norms outside of the layers, other than the stream's: of embeddings and of heads."""
        norms = (p for p in self.parts.values() if not p.layered and len(p.shape) == 1 and _NORM.search(p.leaf))
        return {p.shape[0] for p in norms} - {self.hidden.value}

    @cached_property
    def embedding(self) -> Size | None:
        """The size of embeddings, where it is not that of the stream."""
        named = self.size(EMBEDDING)
        return named if named and named.value != self.hidden.value else None

    @cached_property
    def transposed(self) -> bool:
        """Whether the maps of layers are stored [in, out]: their biases are as long as their columns."""
        if self.traced.roles:
            return any(self.parts[name].layered for name in self.traced.backwards)
        biases = {p.module: p.shape for p in self.parts.values() if p.kind == "bias" and p.layered}
        fits = [
            p.shape[1] == biases[p.module][0]
            for p in self.parts.values()
            if p.layered and p.kind == "weight" and len(p.shape) == 2 and p.shape[0] != p.shape[1]
            if len(biases.get(p.module, ())) == 1
        ]
        return bool(fits) and all(fits)

    @cached_property
    def weights(self) -> list[Part]:
        return [p for p in self.parts.values() if p.kind == "weight"]

    def weight_of(self, p: Part) -> Part | None:
        """The weight of a bias, if that is a map or a table."""
        of = self.traced.biases.get(p.template)
        weights = (w for w in self.weights if len(w.shape) > len(p.shape))
        return next((w for w in weights if w.module == p.module or w.template == of), None)

    def module(self, role: str) -> str | None:
        return next((module for module, own in self.roles.items() if own == role), None)

    def side(self, role: str, side: int = 0) -> int | None:
        """The number of outputs of the map with that role; with side 1, of inputs."""
        module = self.module(role)
        shapes = [p.shape for p in self.parts.values() if p.module == module and len(p.shape) == 2]
        return shapes[0][1 - side if self.transposed else side] if shapes else None

    @cached_property
    def heads(self) -> Size | None:
        return self.size(HEADS)

    @cached_property
    def groups(self) -> Size | None:
        """Key/value heads, where some query heads share one or the config speaks of them."""
        if self.heads is None:
            return None
        heads, (q, k, fused, read) = (
            self.heads.value,
            (self.side("q"), self.side("k"), self.side("qkv"), self.side("o", 1)),
        )
        if q and k:
            groups = k * heads // q
        elif fused and read and read % heads == 0:
            groups = (fused * heads // read - heads) // 2
        else:
            return self.size(GROUPS)
        if groups < 1 or heads % groups:
            return None
        return self.sized(groups, GROUPS) if groups != heads or self.size(GROUPS, groups) else None

    @cached_property
    def head(self) -> Size | None:
        """The size of one head; None if the rows of queries do not determine it."""
        if self.heads is None:
            return None
        groups = self.groups.value if self.groups else self.heads.value
        rows, heads = self.side("q"), self.heads.value
        if rows is None:
            rows, heads = self.side("qkv"), self.heads.value + 2 * groups
        if not rows or rows % heads:
            return None
        value, usual = rows // heads, f"{self.hidden.text} // {self.heads.text}"
        if self.config.get("head_dim") == value:
            return Size(value, f'c.get("head_dim", {usual})')
        return Size(value, usual if self.hidden.value // self.heads.value == value else str(value))

    @cached_property
    def turns(self) -> bool:
        """Whether the config has rotary positions, and not ALiBi."""
        if self.config.get("alibi"):
            return False
        keys = (key for key, value in self.config.items() if value not in (None, False))
        return any(re.search("rope|rotary", key) for key in keys) or "rotary" in str(
            self.config.get("position_embedding_type")
        )

    @cached_property
    def planes(self) -> Size:
        """The number of rotary planes of a head, if it has any."""
        assert self.head is not None
        if size := self.size(("rotary_dim",)):
            return Size(size.value // 2, f"{size.text} // 2")
        rope = self.config.get("rope_parameters")
        rope = rope if isinstance(rope, Mapping) else {}
        for before in ("partial_rotary_factor", "rotary_pct"):
            share = rope.get("partial_rotary_factor", self.config.get(before))
            if isinstance(share, float) and 0 < share < 1:
                text = f'(int(head * c.rotary_share({share}, before="{before}")) + 1) // 2'
                return Size((int(self.head.value * share) + 1) // 2, text)
        return Size(self.head.value // 2, "head // 2")


def _require_plain(what: str, name: str, pattern: str) -> None:
    if not re.fullmatch(pattern, name):
        raise SpecError(f"{what} is {name!r}, which cannot stand in a declaration; correct it first")


def gather(
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    traced: Traced | None = None,
    ties: Mapping[str, str] | None = None,
    buffers: Collection[str] = (),
) -> Facts:
    """The facts of a checkpoint with tensors of these names and shapes, by full names. SpecError for invalid names:
    they are written into a draft, which is Python."""
    traced = traced or Traced()
    config = {**config, **({"tie_word_embeddings": True} if ties else {})}
    model_type, class_name = str(config.get("model_type", "unknown")), Config(config, "").class_name
    _require_plain("config.json: model_type", model_type, r"[\w.+-]+")
    _require_plain("config.json: architectures", class_name, r"\w*")
    for name in shapes:
        _require_plain("the name of a tensor", name, r"[^\"\\{}\x00-\x1f\x7f-\x9f\u2028\u2029]+")
    counts = [config[key] for key in LAYER_COUNTS if type(config.get(key)) is int]
    kept = {name: shape for name, shape in shapes.items() if name not in buffers}
    parsed = templates(kept, next(iter(counts), None), traced.roles)
    traced = traced.renamed(parsed.names)
    parts = {template: part(template, shape) for template, shape in parsed.shapes.items()}
    return Facts(
        model_type=model_type,
        class_name=class_name,
        config=config,
        templates=parsed,
        tied=is_tied(config, shapes),
        head_name=head_name(config, shapes),
        parts={name: replace(p, kind="bias") if name in traced.biases else p for name, p in parts.items()},
        traced=traced,
        ties={parsed.names[alias]: parsed.names[name] for alias, name in (ties or {}).items()},
        buffers=tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in buffers)),
    )

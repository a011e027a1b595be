"""Which dimension of which tensor belongs to which space of a transformer, for BERT, ViT and GPT-2 of `transformers`:
what the peers (rebasin, otfusion, circuits) share. Without symfuse.

State dicts may have the names of files or of modules in memory (those of ViT differ), with the base model's prefix or
without; what is returned has the names that were given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = Mapping[str, Tensor]

# A word for each dimension. q and k: of the queries and keys of all heads, one after the other; v of the values; ffn:
# neurons. Points of the residual stream: first (embeddings), in, mid and out of a layer, last. A star: the tensor reads
# the space; bars: it only moves along (norms; what a tied decoder has to agree with). +: several in one dimension.
BERT = {
    "embeddings.word_embeddings.weight": ". first",
    "embeddings.position_embeddings.weight": ". first",
    "embeddings.token_type_embeddings.weight": ". first",
    "embeddings.LayerNorm.weight": "|first|",
    "embeddings.LayerNorm.bias": "|first|",
    "encoder.layer.#.attention.self.query.weight": "q in*",
    "encoder.layer.#.attention.self.query.bias": "q",
    "encoder.layer.#.attention.self.key.weight": "k in*",
    "encoder.layer.#.attention.self.key.bias": "k",
    "encoder.layer.#.attention.self.value.weight": "v in*",
    "encoder.layer.#.attention.self.value.bias": "v",
    "encoder.layer.#.attention.output.dense.weight": "mid v*",
    "encoder.layer.#.attention.output.dense.bias": "mid",
    "encoder.layer.#.attention.output.LayerNorm.weight": "|mid|",
    "encoder.layer.#.attention.output.LayerNorm.bias": "|mid|",
    "encoder.layer.#.intermediate.dense.weight": "ffn mid*",
    "encoder.layer.#.intermediate.dense.bias": "ffn",
    "encoder.layer.#.output.dense.weight": "out ffn*",
    "encoder.layer.#.output.dense.bias": "out",
    "encoder.layer.#.output.LayerNorm.weight": "|out|",
    "encoder.layer.#.output.LayerNorm.bias": "|out|",
    "pooler.dense.weight": ". last*",
    "pooler.dense.bias": ".",
    "cls.predictions.bias": ".",
    "cls.predictions.transform.dense.weight": "|first| last*",
    "cls.predictions.transform.dense.bias": "|first|",
    "cls.predictions.transform.LayerNorm.weight": "|first|",
    "cls.predictions.transform.LayerNorm.bias": "|first|",
    "cls.predictions.decoder.weight": ". |first|",
    "cls.predictions.decoder.bias": ".",
    "cls.seq_relationship.weight": ". .",
    "cls.seq_relationship.bias": ".",
    "qa_outputs.weight": ". last*",
    "qa_outputs.bias": ".",
    "classifier.weight": ". last*",  # unless there is a pooler
    "classifier.bias": ".",
}
VIT = {
    "embeddings.cls_token": ". . first",
    "embeddings.mask_token": ". . first",
    "embeddings.position_embeddings": ". . first",
    "embeddings.patch_embeddings.projection.weight": "first . . .",
    "embeddings.patch_embeddings.projection.bias": "first",
    "encoder.layer.#.layernorm_before.weight": "|in|",
    "encoder.layer.#.layernorm_before.bias": "|in|",
    "encoder.layer.#.attention.attention.query.weight": "q in*",
    "encoder.layer.#.attention.attention.query.bias": "q",
    "encoder.layer.#.attention.attention.key.weight": "k in*",
    "encoder.layer.#.attention.attention.key.bias": "k",
    "encoder.layer.#.attention.attention.value.weight": "v in*",
    "encoder.layer.#.attention.attention.value.bias": "v",
    "encoder.layer.#.attention.output.dense.weight": "mid v*",
    "encoder.layer.#.attention.output.dense.bias": "mid",
    "encoder.layer.#.layernorm_after.weight": "|mid|",
    "encoder.layer.#.layernorm_after.bias": "|mid|",
    "encoder.layer.#.intermediate.dense.weight": "ffn mid*",
    "encoder.layer.#.intermediate.dense.bias": "ffn",
    "encoder.layer.#.output.dense.weight": "out ffn*",
    "encoder.layer.#.output.dense.bias": "out",
    "layernorm.weight": "|last|",
    "layernorm.bias": "|last|",
    "pooler.dense.weight": ". last*",
    "pooler.dense.bias": ".",
    "classifier.weight": ". last*",
    "classifier.bias": ".",
}
GPT2 = {  # its projections are stored transposed: [in, out]
    "wte.weight": ". first",
    "wpe.weight": ". first",
    "h.#.ln_1.weight": "|in|",
    "h.#.ln_1.bias": "|in|",
    "h.#.attn.c_attn.weight": "in* q+k+v",
    "h.#.attn.c_attn.bias": "q+k+v",
    "h.#.attn.c_proj.weight": "v* mid",
    "h.#.attn.c_proj.bias": "mid",
    "h.#.ln_2.weight": "|mid|",
    "h.#.ln_2.bias": "|mid|",
    "h.#.mlp.c_fc.weight": "mid* ffn",
    "h.#.mlp.c_fc.bias": "ffn",
    "h.#.mlp.c_proj.weight": "ffn* out",
    "h.#.mlp.c_proj.bias": "out",
    "ln_f.weight": "|last|",
    "ln_f.bias": "|last|",
    "lm_head.weight": ". last*",
    "score.weight": ". last*",
    "classifier.weight": ". last*",
    "classifier.bias": ".",
}
TABLES = {"bert": BERT, "vit": VIT, "gpt2": GPT2}
PREFIXES = {"bert": "bert.", "vit": "vit.", "gpt2": "transformer."}
TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.weight": "wte.weight",
}
IN_MEMORY = {  # of ViT: the name in memory → in files
    r"^layers\.": "encoder.layer.",
    r"attention\.q_proj": "attention.attention.query",
    r"attention\.k_proj": "attention.attention.key",
    r"attention\.v_proj": "attention.attention.value",
    r"attention\.o_proj": "attention.output.dense",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
}


@dataclass(frozen=True)
class Place:
    """A dimension, or the part-th of several equal parts of it, of the tensor `name`, which belongs to a space.

    space: "residual", or the layer's "0.qk", "0.v", "0.ffn". word: of the table, without its marks. point: of the
    residual stream, 0 to twice the number of layers. role: "writes", "reads" or "along".
    """

    name: str
    dim: int
    space: str
    word: str
    point: int | None
    role: str
    part: int = 0
    parts: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the part of the tensor, its units first."""
        size = tensor.shape[self.dim] // self.parts
        return tensor.narrow(self.dim, self.part * size, size).movedim(self.dim, 0)

    def units(self, state: State) -> Tensor:
        """Units × all else, in float64."""
        found = self.of(state[self.name]).double()
        return found.reshape(len(found), -1)


def canonical(name: str, kind: str) -> tuple[str, int | None]:
    """The name in the table, and the layer."""
    name = name.removeprefix(PREFIXES[kind])
    if kind == "vit":
        for memory, file in IN_MEMORY.items():
            name = re.sub(memory, file, name)
    found = re.match(r"(encoder\.layer|h)\.(\d+)\.", name)
    if not found:
        return name, None
    return f"{found[1]}.#.{name[found.end() :]}", int(found[2])


def layers(state: State, kind: str) -> int:
    return 1 + max(layer for name in state if (layer := canonical(name, kind)[1]) is not None)


def tied(state: State, kind: str) -> dict[str, str]:
    """Tensors that are another one too, → that one."""
    names = {canonical(name, kind)[0]: name for name in state}
    found = {names[a]: names[b] for a, b in TIED.items() if a in names and b in names}
    return {a: b for a, b in found.items() if torch.equal(state[a], state[b])}


def places(state: State, kind: str) -> list[Place]:
    """All of a state dict, but those of tied tensors. KeyError for a tensor that is not in the table."""
    found, aliases, last = [], tied(state, kind), 2 * layers(state, kind)
    pooled = kind == "bert" and any("pooler." in name for name in state)
    for name in state:
        key, layer = canonical(name, kind)
        if name in aliases or (pooled and key == "classifier.weight"):
            continue
        words = TABLES[kind][key].split()
        if len(words) != state[name].ndim:
            raise ValueError(f"{name} has {state[name].ndim} dimensions, not {len(words)}")
        points = {"first": 0, "last": last}
        if layer is not None:
            points = {"in": 2 * layer, "mid": 2 * layer + 1, "out": 2 * layer + 2}
        for dim, fused in enumerate(words):
            parts = fused.split("+")
            for part, marked in enumerate(parts):
                word = marked.strip("|*")
                role = "reads" if marked.endswith("*") else "along" if marked.startswith("|") else "writes"
                if word == ".":
                    continue
                space = "residual" if word in points else f"{layer}.{'qk' if word in ('q', 'k') else word}"
                found.append(Place(name, dim, space, word, points.get(word), role, part, len(parts)))
    return found


def moved(state: State, where: Iterable[Place], change: Tensor) -> dict[str, Tensor]:
    """The state changed at each of the places: by an index (unit i is the one that was index[i]), or a matrix."""
    out = dict(state)
    for place in where:
        tensor = out[place.name].clone()
        view = place.of(tensor)
        found = view[change] if change.ndim == 1 else torch.tensordot(change.to(view.dtype), view, 1)
        view.copy_(found)
        out[place.name] = tensor
    return out


def retied(state: State, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """With tied tensors as what they are tied to."""
    return {**state, **{a: state[b] for a, b in aliases.items()}}


def distance(a: State, b: State, kind: str) -> float:
    """Squared, over all tensors, tied ones once."""
    aliases = tied(b, kind)
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in b if name not in aliases)

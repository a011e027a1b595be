"""DINOv2: ViT with a LayerScale behind each block, gated neurons in the largest, register tokens in some.
DINOv3: the same with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import (
    block_axes,
    feed_forward,
    linear,
    norms,
    placed,
    projections,
    renamed,
    turned,
    value_shift,
)
from symfuse.architectures.vit import BIASES, LAYER, OUTPUT, TENSORS, image_axes
from symfuse.architectures.vit import NAMES as PROJECTIONS
from symfuse.groups import SignedMonomial
from symfuse.spec import Axis

MLP = LAYER + "mlp."
NAMES = {
    LAYER + "layernorm_before": LAYER + "norm1",
    LAYER + "layernorm_after": LAYER + "norm2",
    LAYER + "intermediate.dense": MLP + "fc1",
    LAYER + "output.dense": MLP + "fc2",
}
SCALES = {LAYER + "layer_scale1.lambda1": OUTPUT + ".weight", LAYER + "layer_scale2.lambda1": MLP + "fc2.weight"}
GATED = {**linear(MLP + "weights_in", "(|ffn| + ffn)"), **linear(MLP + "weights_out", "residual", "ffn*")}
MASK = {"embeddings.mask_token": "1 residual"}


def _neurons(c: Config, hidden: int) -> tuple[int, bool]:
    """How many there are, and whether they are gated: then two thirds of the others, up to a multiple of eight."""
    size, gated = int(hidden * c.get("mlp_ratio", 4.0)), c.get("use_swiglu_ffn", False)
    return ((size * 2 // 3 + 7) // 8 * 8 if gated else size), gated


def _family(c: Config, prefix: str, patch: int, tokens: Mapping[str, str]) -> Family:
    """tokens: those besides the class token, which have no position."""
    hidden = c.size("hidden_size", 768)
    ffn, gated = _neurons(c, hidden)
    heads, layers = c.size("num_attention_heads", 12), c.size("num_hidden_layers", 12)
    biased = c.get("qkv_bias", True)
    axes = block_axes(layers, hidden, heads, ffn, c.get("hidden_act", "gelu"))
    tensors = renamed(TENSORS, NAMES) | dict.fromkeys(SCALES, "|residual|") | (BIASES if biased else {})
    first, scales = MLP + "fc1.weight", dict(SCALES)
    if gated:
        axes["ffn"] = replace(axes["ffn"], group=SignedMonomial())
        first, scales[LAYER + "layer_scale2.lambda1"] = MLP + "weights_in.weight", MLP + "weights_out.weight"
        tensors = {name: layout for name, layout in tensors.items() if not name.startswith(MLP)} | GATED
    return Family(
        axes=axes | image_axes(c, 1, patch=patch) | {"labels": Axis(c.labels)},
        prefix=prefix,
        tensors=tensors | dict(tokens),
        heads={
            # It reads the class token and the mean of the patches, side by side.
            "classification": Head(
                ("ForImageClassification",), linear("classifier", "labels", "(residual* + residual*)")
            )
        },
        shifts=PROJECTIONS.shifts() if biased else (),
        outputs={"last_hidden_state": "residual", "pooler_output": "residual"},
        reads={
            LAYER + "norm1.weight": PROJECTIONS.readers,
            LAYER + "norm2.weight": (first,),
            "layernorm.weight": ("last_hidden_state", "pooler_output", "classifier.weight"),
        },
        scales=scales,
    )


@architecture("dinov2")
def dinov2(c: Config) -> Family:
    return _family(c, "dinov2.", 14, MASK if c.get("use_mask_token", True) else {})


@architecture("dinov2_with_registers")
def dinov2_with_registers(c: Config) -> Family:
    registers = {"embeddings.register_tokens": "1 registers residual"} | MASK
    family = _family(c, "dinov2_with_registers.", 16, registers)
    return family.plus(axes={"registers": Axis(c.size("num_register_tokens", 4))})


BLOCK = "layer.{l}."
TURNED = projections(BLOCK + "attention.", "q_proj", "k_proj", "v_proj", "o_proj")
SIZES = {"num_hidden_layers": 12, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}


@architecture("dinov3_vit")
def dinov3_vit(c: Config) -> Family:
    """Tokens that are no patches are not turned, with which any turn of a plane commutes."""
    names = {"query_bias": "q", "key_bias": "k", "value_bias": "v", "proj_bias": "o"}
    biased = "".join(letter for field, letter in names.items() if c.get(field, field != "key_bias"))
    act, bias, gated = c.get("hidden_act", "gelu"), c.get("mlp_bias", True), c.get("use_gated_mlp", False)
    layers, hidden, heads, ffn = (c.size(key, usual) for key, usual in SIZES.items())
    axes = block_axes(layers, hidden, heads, ffn, act)
    axes |= {"ffn": replace(axes["ffn"], group=SignedMonomial())} if gated else {}
    axes |= image_axes(c, 0) | {"registers": Axis(c.get("num_register_tokens", 0))}
    first = BLOCK + ("mlp.gate_proj" if gated else "mlp.up_proj")
    return Family(
        axes=turned(axes),
        prefix="dinov3_vit.",
        tensors={
            "embeddings.cls_token": "1 1 residual",
            "embeddings.mask_token": "1 1 residual",
            "embeddings.register_tokens": "1 registers residual",
            **linear("embeddings.patch_embeddings", "residual", "channels height width"),
            **placed(TURNED.tensors(bias=biased), {"qk*": "c* f", "qk": "c f"}),
            **(linear(first, "|ffn|", bias=bias) if gated else {}),
            **feed_forward(BLOCK + "mlp.up_proj", BLOCK + "mlp.down_proj", bias=bias),
            **{f"{BLOCK}layer_scale{i}.lambda1": "|residual|" for i in (1, 2)},
            **norms(BLOCK + "norm1", BLOCK + "norm2", "norm"),
        },
        shifts=(value_shift(TURNED["v"], TURNED["o"]),) if {"v", "o"} <= set(biased) else (),
        outputs={"last_hidden_state": "residual", "pooler_output": "residual"},
        reads={
            BLOCK + "norm1.weight": TURNED.readers,
            BLOCK + "norm2.weight": tuple({first + ".weight": "", BLOCK + "mlp.up_proj.weight": ""}),
            "norm.weight": ("last_hidden_state", "pooler_output"),
        },
        scales={
            BLOCK + "layer_scale1.lambda1": TURNED["o"] + ".weight",
            BLOCK + "layer_scale2.lambda1": BLOCK + "mlp.down_proj.weight",
        },
    )

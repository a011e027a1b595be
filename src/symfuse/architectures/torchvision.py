"""The names of torch's own TransformerEncoder, as layers of BERT (post-norm) and ViT (pre-norm), and of torchvision's
ViT and ResNet. Their files have no config: they are read like a model that has one (`rewriting/like.py`)."""

from __future__ import annotations

from symfuse.architectures import bert, vit
from symfuse.architectures.blocks import replaced
from symfuse.architectures.resnet import batch_norm, torchvision_names
from symfuse.io.naming import NAMINGS, Names, Naming, of_modules

STAGES, CONVOLUTIONS = 4, 3


def _attention(at: str, names: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """A MultiheadAttention of torch, whose queries, keys and values are rows of one map."""
    fused: dict[str, tuple[str, ...]] = {
        f"{at}.in_proj_{end}": tuple(f"{names[key]}.{end}" for key in "qkv") for end in ("weight", "bias")
    }
    return fused | of_modules({f"{at}.out_proj": (names["o"],)})


def _encoder(layer: str, names: dict[str, str], *modules: str) -> dict[str, tuple[str, ...]]:
    """The layers of a TransformerEncoder. modules: what is named there linear1, linear2, norm1 and norm2."""
    own = ("linear1", "linear2", "norm1", "norm2")
    return _attention("layers.{l}.self_attn", names) | of_modules({
        f"layers.{{l}}.{one}": (layer + name,) for one, name in zip(own, modules, strict=True)
    })  # fmt: skip


BLOCK = "encoder.layers.encoder_layer_{l}."
WHOLE: dict[str, tuple[str, ...]] = {
    "class_token": ("embeddings.cls_token",),
    "encoder.pos_embedding": ("embeddings.position_embeddings",),
}
VIT = WHOLE | _attention(BLOCK + "self_attention", vit.NAMES) | of_modules({
    BLOCK + "ln_1": (vit.LAYER + "layernorm_before",), BLOCK + "ln_2": (vit.LAYER + "layernorm_after",),
    **{f"{BLOCK}mlp.{one}": (vit.LAYER + "intermediate.dense",) for one in ("0", "linear_1")},
    **{f"{BLOCK}mlp.{one}": (vit.LAYER + "output.dense",) for one in ("3", "linear_2")},
    "conv_proj": ("embeddings.patch_embeddings.projection",), "encoder.ln": ("layernorm",),
    "heads.head": ("classifier",),
})  # fmt: skip

DENSE = ("intermediate.dense", "output.dense")
NAMINGS += [
    Naming("torch.nn.TransformerEncoder", None, _encoder(
        bert.LAYER, bert.NAMES, *DENSE, "attention.output.LayerNorm", "output.LayerNorm"
    )),
    Naming("torch.nn.TransformerEncoder", None, _encoder(
        vit.LAYER, vit.NAMES, *DENSE, "layernorm_before", "layernorm_after"
    )),
    Naming("torchvision", None, VIT),
]  # fmt: skip


def _resnet() -> Names:
    own = [f"layer{stage}.{{l}}." for stage in range(1, STAGES + 1)]
    convolutions = [(f"{at}conv{i}", f"{at}bn{i}") for at in own for i in range(1, CONVOLUTIONS + 1)]
    convolutions += [("conv1", "bn1"), *((f"{at}downsample.0", f"{at}downsample.1") for at in own)]
    names = [f"{one}.weight" for one, _ in convolutions] + [*of_modules({"fc": ("fc",)})]
    names += [name for _, one in convolutions for name in batch_norm(one, "residual")]
    return {name: (replaced(name, torchvision_names(STAGES)),) for name in names}


NAMINGS.append(Naming("torchvision", None, _resnet()))

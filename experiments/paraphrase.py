"""paraphrase-MiniLM-L3-v2 (BERT, 3 layers of width 384) as a `transformers` folder, from a package that carries it in
ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.demo import packages

# Of all-MiniLM-L6-v2 but the depth; they share the vocabulary.
LAYERS = 3
POOLER = "pooler.dense."


def folder() -> Path:
    """BertModel with tokenizer, converted once.

    What was exported has no pooler, as the sentence embedding is a mean over tokens: one is drawn with seed 0, so that
    all fine-tunes begin with the same one.
    """
    import transformers

    cached = packages.cache() / f"{packages.PARAPHRASE.replace('==', '-')}-converted-1"
    if cached.is_dir():
        return cached
    (file,) = packages.fetch(packages.PARAPHRASE).glob("*/model/*.onnx")
    config = transformers.BertConfig.from_pretrained(packages.minilm(), num_hidden_layers=LAYERS)
    model = transformers.BertModel(config)
    tensors = {name.removeprefix("model.0.auto_model."): tensor for name, tensor in state_dict(file).items()}
    drawn = torch.randn(config.hidden_size, config.hidden_size, generator=torch.Generator().manual_seed(0))
    tensors[f"{POOLER}weight"] = config.initializer_range * drawn
    tensors[f"{POOLER}bias"] = torch.zeros(config.hidden_size)
    model.load_state_dict(tensors)
    with packages.publishing(cached) as scratch:
        model.save_pretrained(scratch)
        transformers.AutoTokenizer.from_pretrained(packages.minilm()).save_pretrained(scratch)
    return cached


def state_dict(file: Path) -> dict[str, Tensor]:
    """The tensors of a module that `torch.onnx` exported, by the names of its parameters.

    Initialisers keep their names, but for matrices of MatMul nodes, which are stored transposed: the bias that is added
    to the product names them.
    """
    import onnx
    from onnx import numpy_helper

    graph: Any = onnx.load(file).graph
    stored = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith("onnx::")}
    for node in graph.node:
        matrices = [stored[products[one]] for one in node.input if products.get(one) in stored]
        biases = [one for one in node.input if one in stored and one.endswith(".bias")]
        if node.op_type == "Add" and matrices and biases:
            tensors[biases[0].removesuffix("bias") + "weight"] = matrices[0].T.contiguous()
    return tensors

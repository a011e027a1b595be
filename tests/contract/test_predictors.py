"""Layers behind the last one, which predict further tokens: the stream acts on them. `transformers` runs them beside
the model (`MtpLayer`), on its embeddings and on what its last layer puts out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from contract.test_must_fail import BROKEN
from contract.tiny import case, moving, randomise, real
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.spec import BEHIND, Instance
from symfuse.verification.outputs import widened

# Before the names of such a layer, and other names where files of a family have it apart.
BEHIND_OTHERS, APART = "model.layers.2.", "mtp.layers.0."
RENAMED = {
    "mtp.layers.0.eh_proj": "mtp.fc", "mtp.layers.0.enorm": "mtp.pre_fc_norm_embedding",
    "mtp.layers.0.hnorm": "mtp.pre_fc_norm_hidden", "mtp.layers.0.post_norm": "mtp.norm",
    "model.layers.2.post_norm": "model.layers.2.shared_head.norm",
}  # fmt: skip


def file_name(at: str, name: str) -> str:
    name = at + name.replace("mtp_block.", "")
    return next((name.replace(old, new) for old, new in RENAMED.items() if name.startswith(old)), name)


def predictor(main: Any) -> MtpLayer:
    layer = main.model.layers[-1]
    norm = type(layer.input_layernorm)
    made = MtpLayer(main.config, type(layer), norm, layer_idx=1)
    return randomise(made, 3)  # type: ignore[return-value]


def in_file(layer: MtpLayer, at: str) -> dict[str, Tensor]:
    """Its tensors as files have them, experts one by one."""
    out = {}
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = (half.clone() for half in both.chunk(2))
                experts = f"{at}mlp.experts.{number}."
                out |= {f"{experts}gate_proj.weight": gate, f"{experts}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {f"{at}mlp.experts.{number}.down_proj.weight": one.clone() for number, one in enumerate(tensor)}
        else:
            out[file_name(at, name)] = tensor.clone()
    return out


def filled(layer: MtpLayer, checkpoint: Checkpoint, at: str) -> MtpLayer:
    """The layer with the tensors of a file."""
    state = layer.state_dict()
    for name, tensor in state.items():
        experts = [f"{at}mlp.experts.{i}." for i in range(len(tensor))]
        if name.endswith("experts.gate_up_proj"):
            parts = ("gate_proj", "up_proj")
            new = [torch.cat([checkpoint[f"{one}{part}.weight"] for part in parts]) for one in experts]
            tensor.copy_(torch.stack(new))
        elif name.endswith("experts.down_proj"):
            tensor.copy_(torch.stack([checkpoint[f"{one}down_proj.weight"] for one in experts]))
        else:
            tensor.copy_(checkpoint[file_name(at, name)])
    return layer


@pytest.mark.parametrize(
    ("label", "at"),
    [("glm4-moe-lm", BEHIND_OTHERS), ("latent-lm", BEHIND_OTHERS), ("qwen3-next-lm", APART), ("qwen3-5-lm", APART)],
)
def test_a_layer_behind_the_last_one_follows_the_stream(label: str, at: str) -> None:
    this = case(label)
    main: Any = real(this.checkpoint)
    layer = predictor(main)
    added = in_file(layer, at)
    if at == BEHIND_OTHERS:
        added |= {f"{at}embed_tokens.weight": this.checkpoint["model.embed_tokens.weight"].clone()}
    tensors = {**this.checkpoint, **added}
    model = Model.of(this.checkpoint.replace(tensors=tensors))
    assert sum(BEHIND in declared.index for declared in model.spec.tensors.values()) == len(added)
    assert model.spec.reads == {}  # the stream is not rotated: this layer reads it behind the last norm
    g = moving(model.spec, 1)
    moved = g.on(model)
    stream = g.elements[Instance("residual")]
    if at == BEHIND_OTHERS:
        assert torch.equal(moved[f"{at}embed_tokens.weight"], moved["model.embed_tokens.weight"])

    rng = torch.Generator().manual_seed(5)
    embeds, hidden = (torch.randn(2, 7, 24, generator=rng, dtype=torch.float64) for _ in range(2))
    with torch.no_grad(), widened():
        turned = main.model.rotary_emb(hidden, torch.arange(7)[None])

    def run(checkpoint: Checkpoint, *streams: Tensor) -> Tensor:
        with torch.no_grad(), widened():
            out: Tensor = filled(layer, checkpoint, at)(*streams, turned, None, None, None)
        return out

    before = stream.act(run(model.checkpoint, embeds, hidden), -1)
    after = run(moved, stream.act(embeds, -1), stream.act(hidden, -1))
    assert float((after - before).abs().max() / before.abs().max()) < this.exact
    left = run(moved.replace(tensors={**moved, **added}), stream.act(embeds, -1), stream.act(hidden, -1))
    assert float((left - before).abs().max() / before.abs().max()) > BROKEN

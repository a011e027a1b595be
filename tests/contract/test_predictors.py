"""Layers behind the last one, which predict further tokens: the stream acts on them. `transformers` runs them beside
the model (`MtpLayer`), on its embeddings and on what its last layer puts out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from contract.test_must_fail import BROKEN
from contract.tiny import case, moving, randomise, real
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.spec import BEHIND, Instance

AT = "model.layers.2."
EXPERTS = AT + "mlp.experts."


def file_name(name: str) -> str:
    return AT + name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")


def predictor(main: Any) -> MtpLayer:
    layer = main.model.layers[-1]
    made = MtpLayer(main.config, type(layer), type(layer.input_layernorm), layer_idx=1)
    return randomise(made, 3)  # type: ignore[return-value]


def in_file(layer: MtpLayer) -> dict[str, Tensor]:
    """Its tensors as files have them, experts one by one."""
    out = {}
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = (half.clone() for half in both.chunk(2))
                out |= {f"{EXPERTS}{number}.gate_proj.weight": gate, f"{EXPERTS}{number}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {f"{EXPERTS}{number}.down_proj.weight": one.clone() for number, one in enumerate(tensor)}
        else:
            out[file_name(name)] = tensor.clone()
    return out


def filled(layer: MtpLayer, checkpoint: Checkpoint) -> MtpLayer:
    """The layer with the tensors of a file."""
    state = layer.state_dict()
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            parts = ("gate_proj", "up_proj")
            new = [torch.cat([checkpoint[f"{EXPERTS}{i}.{part}.weight"] for part in parts]) for i in range(len(tensor))]
            tensor.copy_(torch.stack(new))
        elif name.endswith("experts.down_proj"):
            tensor.copy_(torch.stack([checkpoint[f"{EXPERTS}{i}.down_proj.weight"] for i in range(len(tensor))]))
        else:
            tensor.copy_(checkpoint[file_name(name)])
    return layer


def test_a_layer_behind_the_last_one_follows_the_stream() -> None:
    this = case("glm4-moe-lm")
    main: Any = real(this.checkpoint)
    layer = predictor(main)
    tensors = {**this.checkpoint, **in_file(layer)}
    tensors |= {f"{AT}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    model = Model.of(this.checkpoint.replace(tensors=tensors))
    assert sum(BEHIND in declared.index for declared in model.spec.tensors.values()) == len(tensors) - len(
        this.checkpoint
    )
    assert model.spec.reads == {}  # the stream is not rotated: this layer reads it behind the last norm
    g = moving(model.spec, 1)
    moved = g.on(model)
    stream = g.elements[Instance("residual")]
    assert torch.equal(moved[f"{AT}embed_tokens.weight"], moved["model.embed_tokens.weight"])

    rng = torch.Generator().manual_seed(5)
    embeds, hidden = (torch.randn(2, 7, 24, generator=rng, dtype=torch.float64) for _ in range(2))
    turned = main.model.rotary_emb(hidden, torch.arange(7)[None])

    def run(checkpoint: Checkpoint, *streams: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = filled(layer, checkpoint)(*streams, turned, None, None, None)
        return out

    before = stream.act(run(model.checkpoint, embeds, hidden), -1)
    after = run(moved, stream.act(embeds, -1), stream.act(hidden, -1))
    assert float((after - before).abs().max() / before.abs().max()) < this.exact
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(AT)}
    left = run(moved.replace(tensors={**moved, **kept}), stream.act(embeds, -1), stream.act(hidden, -1))
    assert float((left - before).abs().max() / before.abs().max()) > BROKEN

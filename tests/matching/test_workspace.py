"""A source that is moved step by step, of which nothing may be in memory."""

from __future__ import annotations

import torch

from contract.tiny import MODELS
from symfuse.matching.workspace import Workspace
from symfuse.model import Model
from symfuse.spec import Instance


def test_without_tensors_it_is_on_the_processor() -> None:
    spec = Model.of(MODELS["llama"](0)).spec
    part = Workspace(spec, {}).part([Instance("ffn", (0,))])
    assert part.tensors == {}
    assert part.device == torch.device("cpu")

"""DeBERTa, the first: DeBERTa-v2 with queries, keys and values of each head in one map, and no biases of keys."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.bert import NAMES, SELF
from symfuse.architectures.blocks import linear
from symfuse.architectures.deberta_v2 import deberta_v2, parts_of
from symfuse.errors import SpecError
from symfuse.spec import Shift


@architecture("deberta")
def deberta(c: Config) -> Family:
    if c.get("talking_head", False):
        raise SpecError("config.json: talking_head is true, which mixes heads; symfuse declares DeBERTa without it")
    family = deberta_v2(c)
    position = parts_of(c.get("pos_att_type")) if c.get("relative_attention", False) else []
    own = {SELF + "in_proj.weight": "(h (qk + qk* + v)) residual*", SELF + "q_bias": "(h qk)", SELF + "v_bias": "(h v)"}
    own |= linear(SELF + "pos_proj", "(h qk*)", bias=False) if "c2p" in position else {}
    own |= linear(SELF + "pos_q_proj", "(h qk)") if "p2c" in position else {}
    output = NAMES["o"]
    return replace(
        family,
        tensors={name: text for name, text in family.tensors.items() if not name.startswith(SELF)} | own,
        shifts=(Shift(SELF + "v_bias", "v", output + ".weight", output + ".bias"),),
    )

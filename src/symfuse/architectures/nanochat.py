"""nanochat: norms without gains, of the stream, which may be rotated as it is, and of queries and keys behind their
positions, whose planes may be turned, and not rescaled; a feed-forward without a gate."""

from __future__ import annotations

from symfuse.architectures import decoder
from symfuse.architectures.base import Config, Family, architecture
from symfuse.architectures.blocks import renamed
from symfuse.groups import Orthogonal, Phase

FEED_FORWARD = renamed(decoder.PLAIN, {"up_proj": "fc1", "down_proj": "fc2"})


@architecture("nanochat", tied=False)
def nanochat(c: Config) -> Family:
    axes = decoder.axes(c, plane=Phase(), residual=Orthogonal())
    axes |= decoder.ungated(c, c.get("hidden_act", "relu2"))
    family = decoder.family(c, axes, decoder.PROJECTIONS | FEED_FORWARD, reads={})
    return decoder.biased(family, c.get("attention_bias", False))

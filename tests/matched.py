"""Matching inside of layers, as most tests have it: attention, feed-forward and scans, whatever the models are."""

from __future__ import annotations

from functools import partial

from symfuse import api

match = partial(api.match, axes=("attention", "ffn", "scan"))

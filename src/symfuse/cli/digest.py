"""Digests of models, for `relate --digest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from symfuse.cli.app import open_model
from symfuse.output import Output


def show_digests(out: Output, models: Sequence[str]) -> None:
    """Print the digest of each model, by part; of two, which parts they share."""
    from symfuse import api

    digests = [api.digest(open_model(out, model)) for model in models]
    parts = dict.fromkeys(part for one in digests for part in one.parts)
    rows = [[part, *(one.parts.get(part, "-")[:12] for one in digests)] for part in parts]
    out.table(["part", *(f"digest of {model}" for model in models)], rows)
    for one in digests:
        out.say(f"{one.name}: {one.hash}, margin {one.margin:.1g} of a step, determined to {one.sure:.1g} ({one.at})")
        for note in one.notes:
            out.note(note)
    data: dict[str, Any] = {"kind": "digest", "models": [one.to_dict() for one in digests]}
    if len(digests) == 2:
        shared = digests[0].same(digests[1])
        alike = digests[0].hash == digests[1].hash
        out.say("the same up to symmetry" if alike else f"{len(shared)} of {len(parts)} parts are the same")
        data |= {"equal": alike, "shared": list(shared)}
    out.finish(data | out.cost())

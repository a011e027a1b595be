"""Declare a family while this process runs, by a draft, a file or data of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from symfuse.api.sources import model_of
from symfuse.architectures.binding import bind
from symfuse.architectures.own import family_of, register
from symfuse.arguments import checked
from symfuse.drafts import Draft
from symfuse.errors import OptionError
from symfuse.files import regular
from symfuse.io import open as open_checkpoint
from symfuse.io.live import carried_config, unwrap
from symfuse.io.sources import Source, opened
from symfuse.recipes.yaml_reader import read_value
from symfuse.spec import Spec


@checked
def declare(source: Source, layouts: Draft | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Spec:
    """The declaration of a model: its tensors with their layouts, and the axes with the groups that act on them.

    layouts: declare the family of this model first, while this process runs: a draft (`symfuse.suggest`), the path of
    its file (`draft.save("mine.yml")`), or the same as a mapping (docs/declare.md). It is data, no code. A module that
    carries no config is known from then on, as are all of its class and shapes: no verb asks for a `config`.

    Raises UnknownArchitectureError for a family that has none, SpecError or LayoutError if the model does not fit, and
    VerificationError for a draft that was not verified.
    """
    if layouts is None:
        return model_of(source).spec
    data, where = _data(layouts)
    family, name = family_of(data, where), data["family"]
    module = unwrap(source) if isinstance(source, torch.nn.Module) else None
    own = module is not None and carried_config(module) is None
    config = {**data.get("config", {}), "model_type": name}
    checkpoint = open_checkpoint(source, config=config) if own else opened(source)
    if checkpoint.config.get("model_type") != name:
        raise OptionError(
            f"{checkpoint.name}: model_type is {checkpoint.config.get('model_type')!r}, and {where} declares {name!r}; "
            f'open it as one: symfuse.open(…, config={{"model_type": "{name}", …}})'
        )
    spec = bind(family, name, "", list(checkpoint), checkpoint.name)
    spec.check({one: checkpoint.info(one).shape for one in checkpoint}, checkpoint.name)
    register(name, family, module if own else None, config)
    return model_of(checkpoint).spec


def declare_file(path: str) -> None:
    """Declare the family of a file, for models in files."""
    data, where = _data(path)
    family = family_of(data, where)
    register(data["family"], family, None, {})


def _data(layouts: Draft | Mapping[str, Any] | str | os.PathLike[str]) -> tuple[Mapping[str, Any], str]:
    """A declaration as data, and what messages call it."""
    if isinstance(layouts, Draft):
        return layouts.data, f"the draft of {layouts.facts.model_type}"
    if isinstance(layouts, Mapping):
        return layouts, "the declaration"
    path = Path(layouts)
    if path.suffix == ".py":
        raise OptionError(
            f"{path} is Python: import it, or write data, which are read and not run: symfuse suggest MODEL -o NAME.yml"
        )
    try:
        data = read_value(regular(path).read_text("utf-8"), str(path))
    except (OSError, ValueError) as error:  # of bytes and names of files, too
        raise OptionError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise OptionError(f"{path}: expected a declaration (family, axes, tensors: docs/declare.md)")
    return data, str(path)

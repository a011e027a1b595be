"""Names of the same tensor: prefixes of base models and of multimodal models, and old spellings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from symfuse.architectures.base import is_declared
from symfuse.architectures.binding import resolve
from symfuse.architectures.names import LEGACY
from symfuse.errors import IncompatibleError, SymfuseError
from symfuse.io import Checkpoint
from symfuse.io.installed import installed, resolved
from symfuse.io.live import spelt
from symfuse.messages import some
from symfuse.model.config import of_text, with_fields
from symfuse.model.undeclared import is_tied, other_modality
from symfuse.rewriting.rewritten import drop, renamed

# The language model inside a multimodal model, by release: prefix in the file → prefix of a text model.
WRAPPED = {
    "model.language_model.lm_head.": "lm_head.", "model.language_model.model.": "model.",
    "model.language_model.": "model.", "language_model.lm_head.": "lm_head.", "language_model.model.": "model.",
    "model.text_model.": "model.", "model.vision_tower.": "vision_tower.", "model.vision_model.": "vision_model.",
    "model.visual.": "visual.", "model.multi_modal_projector.": "multi_modal_projector.",
    "model.connector.": "connector.", "model.image_newline": "image_newline",
}  # fmt: skip
BASE_PREFIXES = ("model.", "transformer.", "backbone.", "gpt_neox.")  # and the model type's own
OLD_ENDINGS = {
    **LEGACY, "weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1",
}  # fmt: skip


def match_names(checkpoint: Checkpoint, target: Checkpoint) -> tuple[Checkpoint, str | None]:
    """The checkpoint with the names and prefixes of the target, and a note if any name changes.

    IncompatibleError if not a single tensor has the same name then.
    """
    if checkpoint.keys() == target.keys():
        return checkpoint, None
    new = _names(checkpoint, target)
    if not any(name in target for name in new):
        raise IncompatibleError(
            f"{target.name} and {checkpoint.name}: not one tensor has the same name, under any known prefix: "
            f"{some(target, 3)}, and {some(checkpoint, 3)}"
        )
    changed = [(name, old) for name, old in new.items() if name != old]
    if not changed:
        return checkpoint, None
    return renamed(checkpoint, new), _note(checkpoint, target, changed)[0]


def declared_names(checkpoint: Checkpoint, target: Checkpoint) -> list[str]:
    """A note if two models of declared families have a tensor under different names in their files."""
    try:
        ours, theirs = (resolve(c.config, c, c.name) for c in (target, checkpoint))
    except SymfuseError:
        return []  # of a model that does not fit its declaration, which is reported when it is read
    common = [name for name in theirs.tensors if name in ours.tensors]
    pairs = [(next(iter(ours.stored(name))), next(iter(theirs.stored(name)))) for name in common]
    return _note(checkpoint, target, [(new, old) for new, old in pairs if new != old])


def _note(checkpoint: Checkpoint, target: Checkpoint, changed: Sequence[tuple[str, str]]) -> list[str]:
    if not changed:
        return []
    return [
        f"{checkpoint.name}: {len(changed)} tensors are read under the names of {target.name}, such as "
        f"{changed[0][1]} as {changed[0][0]}"
    ]


def has_inside(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether a multimodal config has a language model of the type of this text model."""
    inner = _language(config)
    return inner is not None and _language(text) is None and _kind(inner) == _kind(text)


def _language(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a multimodal config that describes its language model; in old ones (Qwen2-VL) its fields are beside
    those of the other modalities. None for a text model."""
    inner = config.get("text_config", config if "vision_config" in config else None)
    return inner if isinstance(inner, Mapping) else None


def _kind(config: Mapping[str, Any]) -> str:
    """The type of a text model, without the suffix that marks it as part of another: qwen2_5_vl_text is a qwen2."""
    kind = re.sub(r"_text$|_vl(?=_|$)|(?<=glm4)v", "", str(config.get("model_type")))
    return "qwen2" if kind == "qwen2_5" else kind


@dataclass(frozen=True)
class Inside:
    """A multimodal model whose language model alone is merged, with text models. names: of the language model's
    tensors, in a text model → in the file. text: the config that it has as a text model."""

    whole: Checkpoint
    names: Mapping[str, str]
    text: Mapping[str, Any]

    def config(self, merged: Mapping[str, Any]) -> dict[str, Any]:
        """The config of the whole, with what has changed in that of the text model."""
        apart = ("model_type", "architectures")
        changed = {k: v for k, v in merged.items() if k not in apart and (k not in self.text or self.text[k] != v)}
        tied = {key: value for key, value in changed.items() if key == "tie_word_embeddings"}
        return with_fields(self.whole.config, of_text(self.whole.config, changed) | tied)


def taken_out(whole: Checkpoint, text: Checkpoint) -> tuple[Checkpoint, Inside]:
    """The language model of a multimodal model, as a text model like that one, and what puts it back."""
    names = _names(whole, text)
    inner = out_of_wrapper(renamed(whole, names), text)
    return inner, Inside(whole, {new: names[new] for new in inner}, inner.config)


def out_of_wrapper(checkpoint: Checkpoint, target: Checkpoint) -> Checkpoint:
    """The language model of a multimodal model, as a text model like the target."""
    config = (resolved(checkpoint.config) if is_declared(checkpoint.config) else None) or checkpoint.config
    text = {**(_language(config) or {}), "model_type": target.config["model_type"]}
    text.pop("vision_config", None)
    text |= {"tie_word_embeddings": is_tied(checkpoint.config, checkpoint)}
    text |= {key: target.config[key] for key in ("architectures",) if key in target.config}
    return drop(checkpoint, towers(checkpoint)).replace(config=text)


def taken_as(checkpoint: Checkpoint, target: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """A model of another type, treated as one of the target's type by the names and shapes of its tensors; and notes.

    IncompatibleError if not a single tensor has the same name.
    """
    theirs, ours = (str(c.config.get("model_type")) for c in (checkpoint, target))
    note = f"{checkpoint.name}: a {theirs} is taken as a {ours}, by the names and shapes of its tensors"
    checkpoint, renaming = match_names(checkpoint, target)
    same = {key: target.config[key] for key in ("model_type", "architectures") if key in target.config}
    return checkpoint.replace(config={**checkpoint.config, **same}), [note, *filter(None, [renaming])]


def towers(checkpoint: Checkpoint) -> list[str]:
    """The tensors of modalities other than text."""
    return [name for name in checkpoint if other_modality(name)]


def _names(checkpoint: Checkpoint, target: Checkpoint) -> dict[str, str]:
    """New name → present name: the target's name if it has that tensor, else the present one."""
    plain, there = _plain_of(checkpoint), {_plain_of(target)(name): name for name in target}
    types = {str(c.config.get("model_type")) for c in (checkpoint, target)}
    prefixes = ["", *BASE_PREFIXES, *(f"{t.replace('-', '_')}." for t in sorted(types))]

    def there_as(name: str, prefix: str) -> str | None:
        word = spelt(plain(name), prefix, there)
        return None if word is None else there[word]

    prefix = max(prefixes, key=lambda p: sum(there_as(name, p) is not None for name in checkpoint))
    new: dict[str, str] = {}
    for name in checkpoint:
        word = there_as(name, prefix) or name
        new[name if word in new else word] = name
    return new


def _plain_of(checkpoint: Checkpoint) -> Callable[[str], str]:
    """The names of a checkpoint's tensors in memory, in the installed class of a current text model."""
    known = installed(checkpoint.config)
    return cache(_plain if known is None else lambda name: _plain(known.name(name)))


def _plain(name: str) -> str:
    """The name of a tensor in a current text model, by tables."""
    for wrapped, plain in WRAPPED.items():
        if name.startswith(wrapped):
            name = plain + name.removeprefix(wrapped)
            break
    for old, new in OLD_ENDINGS.items():
        if name == old or name.endswith("." + old):
            return name.removesuffix(old) + new
    return name

"""What words such as `attention`, `ffn` or `qk` select: axes, the group of each, and ranges of layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from symfuse.errors import OptionError
from symfuse.groups import GROUPS, Group, sinkhorn, subgroups
from symfuse.messages import suggestion
from symfuse.spec import Spec, anatomy

NO_GROUP = "none"  # in the place of a group's name: the axis is not matched
# Optimal transport (Singh & Jaggi 2020) without entropy, between equal numbers of units, is the assignment.
ALIASES = {"emd": "permutation"}

# Word → axes. With the residual stream and the order of heads fixed, attention and feed-forward axes have no tensor
# part in common; all others have some in common with them.
MATCHABLE: dict[str, tuple[str, ...]] = {
    "attention": ("qk", "c", "p", "n", "s", "v", "latent", "conv", "lambda"), "ffn": ("ffn", "stem", "inner", "merged"),
    "heads": ("h", "kv", "q", "m", "books", "group"),
    "residual": ("residual", "blocks"),
    "scan": ("scanned", "states", "rank"),
    "pooler": ("pool",), "experts": ("e", "g", "narrow"), "projection": ("projection",),
    "head": ("lm", "mask", "embedding", "pre", "discriminator", "summary", "head", "projector",
             "entries", "code", "projected"),
}  # fmt: skip

# A word that is also the name of an axis (ELECTRA's "head") selects all axes of the word.
WORDS = {axis: (axis,) for group in MATCHABLE.values() for axis in group} | MATCHABLE
# "all" leaves out the projection: it transforms the output embeddings of CLIP, which a user may have stored.
WORDS["all"] = tuple(axis for word, group in MATCHABLE.items() if word != "projection" for axis in group)
AUTO = "auto"  # instead of words: `symfuse.matching.auto` chooses by the models' weights


def choose_axes(words: str | Iterable[str], spec: Spec) -> tuple[str, ...]:
    """The axes named by words such as "attention,ffn", "qk" or "all"; "auto" counts as "all". OptionError for a word
    that is not known, and for a part that the model does not have."""
    axes_by_word = {word: axes_of(word, spec.axes) for word in require_axes(words)}
    if strange := [word for word, axes in axes_by_word.items() if not axes and word not in WORDS]:
        movable = sorted({instance.axis for instance in spec.movable})
        raise OptionError(
            f"axes {strange[0]}: this {spec.family} has no such axis{suggestion(strange[0], movable)}; it has "
            f"{', '.join(movable)}"
        )
    return tuple(dict.fromkeys(axis for axes in axes_by_word.values() for axis in axes))


def axes_of(word: str, axes: Iterable[str]) -> list[str]:
    """The axes that a word selects: in every part of the model, or in one part (`vision_attention`)."""
    part, _, word = ("", "", word) if word in WORDS else word.rpartition("_")
    axes = [axis for axis in axes if axis.startswith(f"{part}_" if part else "")]
    return [axis for one in WORDS[word] for axis in axes if anatomy(axis) == one]


def word_of(axis: str) -> str | None:
    """The word of MATCHABLE that selects an axis; None if there is none."""
    return next((word for word, axes in MATCHABLE.items() if anatomy(axis) in axes), None)


def require_axes(words: str | Iterable[str]) -> list[str]:
    """The single words; OptionError for one that is not known, with the most similar one that is."""
    parts = [w.strip() for w in words.split(",")] if isinstance(words, str) else list(words)
    if parts == [AUTO]:
        return list(WORDS["all"])
    if AUTO in parts:
        raise OptionError(f"axes {', '.join(parts)}: {AUTO} stands alone; leave it out, or the others")
    if not parts:
        raise OptionError(f"no axes to match; choose from {', '.join([AUTO, *WORDS])}")
    for word in parts:
        _require_word(word, [AUTO, *WORDS])
    return parts


def _require_word(word: str, words: Sequence[str]) -> None:
    part, _, axis = word.rpartition("_")
    if word not in words and not (part and axis in WORDS):
        raise OptionError(f"axis {word!r} is not known{suggestion(word, words)}; choose from {', '.join(words)}")


def choose_groups(groups: Mapping[str, str], spec: Spec) -> dict[str, str]:
    """Axis → name of its group, from words such as {"attention": "orthogonal", "qk": "none"}. Where two words select an
    axis, the one that selects fewer axes wins. OptionError as in `require_groups`, and for axes that the model does not
    have."""
    require_groups(groups)
    movable = {instance.axis for instance in spec.movable}
    group_by_axis: dict[str, str] = {}
    named = {word: axes_of(word, spec.axes) for word in groups}
    for word in sorted(groups, key=lambda word: -len(named[word])):
        axes = [axis for axis in named[word] if axis in movable]
        if not axes:
            raise OptionError(f"groups: this {spec.family} has no axis {word!r}; it has {', '.join(sorted(movable))}")
        group_by_axis |= dict.fromkeys(axes, groups[word])
    return group_by_axis


def require_groups(groups: Mapping[str, str]) -> None:
    """OptionError for a word that is not known or a group that does not exist, with the most similar one."""
    names = [*GROUPS, *ALIASES, "sinkhorn", NO_GROUP]
    for word, name in groups.items():
        _require_word(word, list(WORDS))  # not AUTO, whose axes are not known yet
        if name not in names and sinkhorn(str(name)) is None:
            known = f"is not known{suggestion(str(name), names)}; choose from {', '.join(names)}"
            raise OptionError(f"groups: {name!r} for axis {word!r} {known}")


def limited(axis: str, declared: Group, n: int, name: str) -> Group:
    """The group of that name for an axis of n units: a subgroup of the declared one, or transport where
    `may_transport`. OptionError for others, with the names that are possible."""
    name, soft, allowed = ALIASES.get(name, name), sinkhorn(name), subgroups(declared, n)
    if soft is not None:
        if may_transport(axis, declared, n):
            return soft
        raise OptionError(
            f"groups: {name!r} does not fit axis {axis!r}: units are averaged only where they may be permuted, "
            f"heads and experts are assigned one to one; choose from {', '.join([*allowed, NO_GROUP])}"
        )
    if name not in allowed:
        raise OptionError(
            f"groups: {name!r} is no part of what may act on axis {axis!r}, {declared.name} ({declared.label}); "
            f"choose from {', '.join([*allowed, NO_GROUP])}"
        )
    return allowed[name]


def may_transport(axis: str, declared: Group, n: int) -> bool:
    """Whether the n units of an axis may be averaged: they must be permutable (planes of rotary positions are not), and
    have no axes inside, as heads and experts have."""
    outer = (*MATCHABLE["heads"], *MATCHABLE["experts"])
    return "permutation" in subgroups(declared, n) and anatomy(axis) not in outer


def choose_layers(text: str | int | Sequence[int] | None, layers: int) -> frozenset[int]:
    """The layers named by "0-4", "3", "-1" (the last), "0-2,5", "first:3" or "last:3" (earlier "head:3", "tail:3");
    None: all. Ranges include both ends. layers: their number; of a model with several parts that of the deepest.
    OptionError for layers out of range, and text that does not parse."""
    if text is None:
        return frozenset(range(layers))
    if not isinstance(text, str):
        numbers = (text,) if isinstance(text, int) else text
        selected = frozenset(i + layers if i < 0 else i for i in numbers)
    else:
        selected = frozenset().union(*(_range(part.strip(), layers) for part in text.split(",")))
    wrong = sorted(i for i in selected if i not in range(layers))
    if wrong or not selected:
        raise OptionError(f"layers {text!r}: the model has layers 0 to {layers - 1}, not {wrong or 'none'}")
    return selected


def _range(part: str, layers: int) -> range:
    if match := re.fullmatch(r"(\d+)-(\d+)", part):
        return range(int(match[1]), min(int(match[2]), layers) + 1)  # one past the end is enough to raise the error
    if match := re.fullmatch(r"\d+", part):
        return range(int(part), int(part) + 1)
    if match := re.fullmatch(r"-(\d+)", part):
        return range(layers - int(match[1]), layers - int(match[1]) + 1)
    if match := re.fullmatch(r"(first|last|head|tail):(\d+)", part):
        n = min(int(match[2]), layers + 1)
        return range(n) if match[1] in ("first", "head") else range(layers - n, layers)
    raise OptionError(f"layers {part!r} does not parse; write 0-4, 3, -1, 0-2,5, first:3 or last:3")

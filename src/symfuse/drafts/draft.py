"""A draft: a declaration for one family in memory, the trials that were made for it, and what is left to do."""

from __future__ import annotations

import keyword
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from symfuse.architectures.base import ARCHITECTURES, Family, Head
from symfuse.architectures.binding import bind
from symfuse.architectures.names import HEAD_OF, TIED_BY_DEFAULT
from symfuse.architectures.own import as_data
from symfuse.arguments import checked
from symfuse.drafts.facts import Facts
from symfuse.drafts.layouts import Choice, Layouts
from symfuse.errors import OutputError
from symfuse.groups import Group
from symfuse.io import Checkpoint
from symfuse.io.target import write_text
from symfuse.messages import shown
from symfuse.spec import Axis, NormKind, Shift, Spec, parse
from symfuse.spec.layout import SCALAR

DATA = (".yml", ".yaml")  # the endings of files of data; others are Python
_CLASS = re.compile(r"(For[A-Z]\w+|LMHeadModel|Model)$")


@dataclass(frozen=True)
class Trial:
    """A trial of random elements of a group on an axis. error: the largest relative change of an output. holds: whether
    that is rounding. how: the other choices of the trial, in words."""

    axis: str
    group: str
    error: float
    holds: bool
    how: str = ""

    def __str__(self) -> str:
        return f"{self.group}{f' ({self.how})' if self.how else ''} {self.error:.0e}"


@dataclass(frozen=True, repr=False)
class Draft:
    """A declaration of a family that symfuse does not know, made by `suggest`.

    groups: by axis what acts; None or absent: carried. shifts: biases that may be translated. reads, norm: as of
    `Family`. trials: what was tried, in order. verified: whether the real class was run, and all groups hold at once.
    reason: how it was verified, or why not. untouched: templates of tensors that the outputs did not depend on.
    `family` is the declaration, `spec()` binds it to a checkpoint, `source()` is the file to drop in, `save(path)`
    writes it; the file of a draft that is not verified refuses to be imported.
    """

    facts: Facts
    choice: Choice
    groups: Mapping[str, Group | None]
    shifts: tuple[Shift, ...] = ()
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm: NormKind = "layer"
    trials: tuple[Trial, ...] = ()
    verified: bool = False
    reason: str = ""
    untouched: tuple[str, ...] = ()

    @cached_property
    def layouts(self) -> Layouts:
        return Layouts(self.facts, self.choice)

    @property
    def unplaced(self) -> list[str]:
        """Templates of tensors with a dimension that could not be classified: no group acts on it."""
        others = (names for names in self.facts.templates.others.values())
        return [*self.layouts.unplaced, *(name for names in others for name, shape in names.items() if shape)]

    @cached_property
    def prefix(self) -> str:
        """The prefix of the base model's names in a checkpoint with a head: that of the layers."""
        names = self.facts.parts
        first = next((name.split(".")[0] for name in names if "{l}" in name), "")
        inside = [name for name in names if name.startswith(f"{first}.")]
        layers = {name for name in names if "{l}" in name}
        listed = any(name.startswith(f"{first}.{{l}}") for name in layers)  # the list of layers itself
        if not first or listed or not layers <= set(inside) or not (set(inside) - layers):
            return ""
        return f"{first}."

    @cached_property
    def parts(self) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
        """The layouts of the base model without its prefix, of its pooler, and of the head."""
        base: dict[str, str] = {}
        pooler: dict[str, str] = {}
        head: dict[str, str] = {}
        for template, text in self.layouts.tensors.items():
            name = template.removeprefix(self.prefix)
            if self.prefix and name == template:
                head[name] = text
            elif self.facts.roles.get(self.facts.parts[template].module) == "pool":
                pooler[name] = text
            else:
                base[name] = text
        for names in self.facts.templates.others.values():
            for name, shape in names.items():
                base[name.removeprefix(self.prefix)] = "" if shape is None else " ".join(map(str, shape)) or SCALAR
        embedding = next((n for n, text in base.items() if text in ("vocab residual", "vocab embedding")), None)
        alias = self.facts.head_name
        if self.facts.tied and alias == HEAD_OF and alias not in head and embedding:
            head[alias] = base[embedding] + "*"
        return base, pooler, head

    @property
    def tied(self) -> dict[str, str]:
        """The head that is the embedding, and other names of one parameter."""
        base, _, head = self.parts
        if self.facts.ties:
            names = self.facts.ties.items()
            return {a if a in head else a.removeprefix(self.prefix): n.removeprefix(self.prefix) for a, n in names}
        embedding = next((n for n, text in base.items() if text in ("vocab residual", "vocab embedding")), None)
        name = self.facts.head_name
        return {name: embedding} if self.facts.tied and name in head and name and embedding else {}

    @property
    def head_class(self) -> str:
        match = _CLASS.search(self.facts.class_name)
        return match[1] if match else self.facts.class_name

    @property
    def outputs(self) -> dict[str, str]:
        """Of a base model, or of a module of one's own: the layouts of its outputs, whose spaces may be transformed."""
        shown = self.facts.traced.outputs
        if not self.facts.class_name and self.facts.traced.roles:
            return {name: text for name, text in shown.items() if text}
        pooled = {"pooler_output": "pool"} if self.parts[1] else {}
        return ({"last_hidden_state": "residual"} if shown.get("last_hidden_state", "residual") else {}) | pooled

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """The axes in layouts, and those that these depend on."""
        sizes, texts = self.layouts.axes.sizes, self.layouts.tensors
        used = {axis for text in texts.values() for axis in parse(text).names}
        used |= set(re.findall(r"{(\w+)}", " ".join(texts))) | set(self.outputs.values())
        used |= {per for axis in used if axis in sizes for per in self.layouts.axes.per(axis)}
        return {
            name: Axis(size.value, group, self.layouts.axes.per(name) if group is not None else ())
            for name, size in sizes.items()
            if name in used
            for group in (self.groups.get(name),)
        }

    @property
    def family(self) -> Family:
        base, pooler, head = self.parts
        return Family(
            axes=self.axes,
            prefix=self.prefix,
            tensors=base,
            optional={"pooler": pooler} if pooler else {},
            heads={"head": Head((self.head_class,), head)} if head else {},
            tied=self.tied,
            shifts=self.shifts,
            outputs=self.outputs,
            reads=self.reads,
            norm=self.norm,
            scales=self.scales,
            buffers=self.facts.buffers,
        )

    @property
    def scales(self) -> dict[str, str]:
        """The gains of LayerScale, each → the weight whose output it scales."""
        pairs = self.facts.traced.scales.items() if self.reads else ()
        return {gain.removeprefix(self.prefix): weight.removeprefix(self.prefix) for gain, weight in pairs}

    @cached_property
    def coverage(self) -> dict[str, float]:
        """The share of all parameters on which a group acts, by axis; under "any" those on which one acts; under "all"
        those that are placed and on every axis of which one acts, or need not (tokens, labels)."""
        groups = {axis for axis, group in self.groups.items() if group is not None}
        names = self.facts.templates.names.items()
        counts = Counter(template for name, template in names if name not in self.facts.ties)
        shares: Counter[str] = Counter()
        for template, text in self.layouts.tensors.items():
            axes = set(parse(text).names)
            whole = axes & groups and not axes & (self.groups.keys() - groups) and template not in self.unplaced
            words = [*axes & groups, "total", *(["any"] if axes & groups else []), *(["all"] if whole else [])]
            shares.update(dict.fromkeys(words, counts[template] * math.prod(self.facts.parts[template].shape)))
        total = max(1, shares["total"])
        return {axis: shares[axis] / total for axis in ("any", "all", *(a for a in self.axes if a in groups))}

    @property
    def covers(self) -> str:
        """What the draft covers, in a sentence."""
        axes = ", ".join(f"{a} {share:.0%}" for a, share in self.coverage.items() if a not in ("any", "all"))
        some, all_ = self.coverage["any"], self.coverage["all"]
        return f"a group acts on {some:.0%} of the parameters, on every axis of {all_:.0%}{axes and f': {axes}'}"

    @property
    def data(self) -> dict[str, Any]:
        """The declaration as data, which `symfuse.declare` and `--declare` read: for models of this size."""
        config = {k: v for k, v in self.facts.config.items() if k != "model_type" and not self.facts.class_name}
        return {
            "family": self.facts.model_type,
            **({} if self.verified else {"unverified": self.reason}),
            **({"config": config} if config else {}),
            **as_data(self.family),
        }

    __repr__, _repr_html_ = shown(
        lambda self: {
            "family": self.facts.model_type,
            "verified": f"{'verified' if self.verified else 'UNVERIFIED'}: {self.reason}",
            "covers": self.covers,
        }
    )

    def spec(self, checkpoint: Checkpoint) -> Spec:
        """The declaration bound to the names of a checkpoint, with every shape checked."""
        spec = bind(self.family, self.facts.model_type, self.facts.class_name, list(checkpoint), checkpoint.name)
        spec.check({name: checkpoint.info(name).shape for name in checkpoint}, checkpoint.name)
        return spec

    def source(self) -> str:
        """A Python file in the style of `symfuse.architectures`, which declares the family when it is imported."""
        return _source(self)

    @checked
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `source()`, or `data` if the name ends in .yml or .yaml; OutputError if the file exists."""
        path = Path(path)
        if os.path.lexists(path):
            raise OutputError(f"{path} exists; choose another name for the draft, or remove it")
        as_yaml = path.suffix in DATA
        write_text(path, self._yaml() if as_yaml else self.source(), "the draft")
        return path

    def _yaml(self) -> str:
        comment = "".join(f"# {line}".rstrip() + "\n" for line in _heading(self).splitlines())
        return comment + yaml.safe_dump(
            self.data, sort_keys=False, width=120, allow_unicode=True, default_flow_style=None
        )

    @property
    def next_steps(self) -> list[str]:
        """What is left to do, in words."""
        known = ["symfuse declares this family already: that declaration is the one to use"]
        steps = known if self.facts.model_type in ARCHITECTURES else []
        steps += [f"not placed: {name}: {self.layouts.tensors.get(name, 'another shape')}" for name in self.unplaced]
        if self.unplaced:
            steps.append("find in the source of the model which spaces these write to and read, and write their axes")
        small = [axis for axis, one in self.axes.items() if axis in self.groups and one.group is None and one.size > 1]
        if small:
            steps.append(f"nothing acts on {', '.join(small)}: either that is so, or a layout of these is wrong")
        if self.untouched:
            steps.append(
                f"the outputs did not depend on {', '.join(self.untouched)}: how these move is a guess, and not tried; "
                "look at the source of the model, or give `inputs` that they take part in"
            )
        if not self.verified:
            steps.append(f"UNVERIFIED: {self.reason}; run it with random elements before you trust it")
        if not self.reads:
            steps.append(
                "if the model is pre-norm, add `reads`: then its stream can be rotated once the norms are folded"
            )
        return steps

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "suggestion",
            "family": self.facts.model_type,
            "verified": self.verified,
            "said": self.reason,
            "covers": self.coverage,
            "axes": {n: a.group.name if a.group else None for n, a in self.axes.items()},
            "biases": [[s.bias, s.axis, s.into] for s in self.shifts],
            "trials": [vars(trial) for trial in self.trials],
            "not_placed": self.unplaced,
            "next_steps": self.next_steps,
            "source": self.source(),
        }


def _source(draft: Draft) -> str:
    """The file; it raises when it is imported if the draft was not verified."""
    name = re.sub(r"\W", "_", draft.facts.model_type)
    name = f"_{name}" if not name.isidentifier() or keyword.iskeyword(name) else name
    tied = "" if draft.facts.model_type in TIED_BY_DEFAULT else ", tied=False"
    groups = sorted({type(group).__name__ for group in draft.groups.values() if group is not None})
    heads = bool(draft.parts[2])
    imports = [
        f"from symfuse.architectures.base import Config, Family, {'Head, ' if heads else ''}architecture",
        *([] if draft.verified else ["from symfuse.errors import VerificationError"]),
        *([f"from symfuse.groups import {', '.join(groups)}"] if groups else []),
        f"from symfuse.spec import Axis{', Shift' if draft.shifts else ''}",
    ]
    refusal = [] if draft.verified else [
        "raise VerificationError(",
        f'    "this draft of {draft.facts.model_type} is UNVERIFIED; check it, then remove this statement"',
        ")", "",
    ]  # fmt: skip
    return "\n".join(
        [
            f'"""{_heading(draft)}"""',
            "",
            "from __future__ import annotations",
            "",
            *imports,
            "",
            *refusal,
            *([f'LAYER = "{at}"', "", ""] if (at := _layer_prefix(draft)) else [""]),
            f'@architecture("{draft.facts.model_type}"{tied})',
            f"def {name}(c: Config) -> Family:",
            *_body(draft),
            "",
        ]
    )


def _heading(draft: Draft) -> str:
    """The docstring: what was tried, axis by axis, and what is left to do."""
    state = "VERIFIED" if draft.verified else "UNVERIFIED"
    lines = [f"{draft.facts.model_type}: drafted by `symfuse suggest` from names, shapes and config.", ""]
    lines += [f"{state}: {draft.reason}.", f"Of this model {draft.covers}.", ""]
    tried: dict[str, list[str]] = {}
    for trial in draft.trials:
        tried.setdefault(trial.axis, []).append(f"{trial}{'' if trial.holds else ' fails'}")
    lines += [f"{axis}: {'; '.join(words)}" for axis, words in tried.items()]
    lines += ["", "To do:", *(f"- {step}" for step in draft.next_steps)] if draft.next_steps else []
    text = "\n".join(part for line in lines for part in _wrapped(line)) + "\n"
    return text.replace("\\", "\\\\").replace('"""', "'''")  # what a class says of its config may be anything


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False) or [""]


def _layer_prefix(draft: Draft) -> str:
    name = next((name for name in draft.parts[0] if "{l}." in name), "")
    return name[: name.index("{l}.") + 4] if name else ""


def _nested(opening: str, lines: list[str], closing: str) -> list[str]:
    """A bracket with lines in it, which are indented; nothing where there are none."""
    return [opening, *(f"    {line}" for line in lines), closing] if lines else []


def _body(draft: Draft) -> list[str]:
    at = _layer_prefix(draft)

    def key(name: str) -> str:
        return f'LAYER + "{name.removeprefix(at)}"' if at and name.startswith(at) else f'"{name}"'

    def axis(name: str, one: Axis) -> str:
        group = f", {type(one.group).__name__}()" if one.group else ""
        comma = "," if len(one.per) == 1 else ""
        per = f", per=({', '.join(map(_quoted, one.per))}{comma})" if one.per else ""
        return f'"{name}": Axis({draft.layouts.axes.sizes[name].text}{group}{per}),'

    def shift(rule: Shift) -> str:
        names = [key(text) for text in (rule.weight, rule.into) if text is not None]
        return f"Shift({', '.join([key(rule.bias), _quoted(rule.axis), *names])}),"

    base, pooler, head = draft.parts
    others = {name.removeprefix(draft.prefix) for names in draft.facts.templates.others.values() for name in names}
    tensors = [f'{key(n)}: "{text}",' for n, text in base.items() if n not in others]
    of_head = [f'("{draft.head_class}",),', *_nested("{", [f'"{n}": "{text}",' for n, text in head.items()], "},")]
    fields = _nested("axes={", [axis(name, one) for name, one in draft.axes.items()], "},")
    fields += [f'prefix="{draft.prefix}",'] if draft.prefix else []
    fields += _nested("tensors={", [*tensors, *_others(draft, key)], "},")
    fields += [f'optional={{"pooler": {_in_a_line(pooler)}}},'] if pooler else []
    fields += _nested("heads={", _nested('"head": Head(', of_head, "),"), "},") if head else []
    fields += [f"tied={_in_a_line(draft.tied)} if c.tied else {{}},"] if draft.tied else []
    fields += _nested("shifts=(", [shift(rule) for rule in draft.shifts], "),")
    fields.append(f"outputs={_in_a_line(draft.outputs)},")
    reads = [_nested(f"{key(norm)}: (", [f"{key(n)}," for n in names], "),") for norm, names in draft.reads.items()]
    fields += _nested("reads={", [line for lines in reads for line in lines], "},")
    fields += [f'norm="{draft.norm}",'] if draft.norm != "layer" else []
    fields += _nested("scales={", [f"{key(gain)}: {key(weight)}," for gain, weight in draft.scales.items()], "},")
    fields += [f"buffers={draft.facts.buffers!r},"] if draft.facts.buffers else []
    sizes = [f"head = {draft.facts.head.text}"] if draft.facts.head and "v" in draft.axes else []
    sizes += [f"planes = {draft.facts.planes.text}"] if "f" in draft.axes else []
    return [f"    {line}" for line in [*sizes, *_nested("return Family(", fields, ")")]]


def _in_a_line(layouts: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{n}": "{text}"' for n, text in layouts.items()) + "}"


def _others(draft: Draft, key: Callable[[str], str]) -> list[str]:
    """The entries of tensors that some layers do not have, or have in another shape."""
    out = []
    for template, names in draft.facts.templates.others.items():
        at = key(template.removeprefix(draft.prefix))
        layers = sorted({int(name[len(template.split("{l}")[0]) :].split(".")[0]) for name in names})
        experts = draft.facts.templates.experts if "{e}" in template else 1
        if "{l}" in template and not any(names.values()) and len(names) == len(layers) * experts:
            names_of, over = ("l=l, e=e", f" for e in range({experts})") if "{e}" in template else ("l=l", "")
            out.append(f'**{{({at}).format({names_of}): "" for l in {layers}{over}}},')
            continue
        base = draft.parts[0]
        out += [f'{key(n)}: "{base[n]}",' for n in (name.removeprefix(draft.prefix) for name in names)]
    return out


def _quoted(text: str) -> str:
    return f'"{text}"'

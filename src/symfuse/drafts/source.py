"""A draft as a Python file in the style of `symfuse.architectures`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from symfuse.architectures.names import TIED_BY_DEFAULT

if TYPE_CHECKING:
    from symfuse.drafts.draft import Draft


def source(draft: Draft) -> str:
    """The file; it raises when it is imported if the draft was not verified."""
    name = re.sub(r"\W", "_", draft.facts.model_type)
    name = f"_{name}" if not name or name[0].isdigit() else name
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
            *_layer(draft),
            "",
            f'@architecture("{draft.facts.model_type}"{tied})',
            f"def {name}(c: Config) -> Family:",
            *_body(draft),
            "",
        ]
    )


def _heading(draft: Draft) -> str:
    """What was tried, axis by axis, and what is left to do."""
    state = "VERIFIED" if draft.verified else "UNVERIFIED"
    lines = [f"{draft.facts.model_type}: drafted by `symfuse suggest` from names, shapes and config.", ""]
    lines += [f"{state}: {draft.said}.", ""]
    tried: dict[str, list[str]] = {}
    for trial in draft.trials:
        tried.setdefault(trial.axis, []).append(f"{trial}{'' if trial.holds else ' fails'}")
    lines += [f"{axis}: {'; '.join(words)}" for axis, words in tried.items()]
    lines += ["", "To do:", *(f"- {step}" for step in draft.next_steps)]
    text = "\n".join(part for line in lines for part in _wrapped(line)) + "\n"
    return text.replace("\\", "\\\\").replace('"""', "'''")  # what a class says of its config may be anything


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 116, subsequent_indent="    ", break_on_hyphens=False) or [""]


def _layer(draft: Draft) -> list[str]:
    """The constant for what the names of layers begin with."""
    at = _layer_prefix(draft)
    return [f'LAYER = "{at}"', ""] if at else []


def _layer_prefix(draft: Draft) -> str:
    name = next((name for name in draft.parts[0] if "{l}." in name), "")
    return name[: name.index("{l}.") + 4] if name else ""


def _body(draft: Draft) -> list[str]:
    at = _layer_prefix(draft)

    def key(name: str) -> str:
        return f'LAYER + "{name.removeprefix(at)}"' if at and name.startswith(at) else f'"{name}"'

    base, pooler, head = draft.parts
    lines = [f"    head = {draft.facts.head.text}"] if draft.facts.head and "v" in draft.axes else []
    lines += [f"    planes = {draft.facts.planes.text}"] if "f" in draft.axes else []
    lines += ["    return Family(", "        axes={"]
    sizes = draft.layouts.axes.sizes
    for axis, one in draft.axes.items():
        more = f", {type(one.group).__name__}()" if one.group else ""
        comma = "," if len(one.per) == 1 else ""
        more += f", per=({', '.join(map(_quoted, one.per))}{comma})" if one.per else ""
        lines.append(f'            "{axis}": Axis({sizes[axis].text}{more}),')
    lines.append("        },")
    lines += [f'        prefix="{draft.prefix}",'] if draft.prefix else []
    others = {name.removeprefix(draft.prefix) for names in draft.facts.found.others.values() for name in names}
    lines += ["        tensors={"]
    lines += [f'            {key(n)}: "{text}",' for n, text in base.items() if n not in others]
    lines += [f"            {line}" for line in _others(draft, key)]
    lines += ["        },"]
    if pooler:
        inner = ", ".join(f'"{n}": "{text}"' for n, text in pooler.items())
        lines.append(f'        optional={{"pooler": {{{inner}}}}},')
    if head:
        lines += ["        heads={", '            "head": Head(', f'                ("{draft.head_class}",),']
        lines += ["                {", *(f'                    "{n}": "{text}",' for n, text in head.items())]
        lines += ["                },", "            ),", "        },"]
    for alias, name in draft.tied.items():
        lines.append(f'        tied={{"{alias}": "{name}"}} if c.tied else {{}},')
    if draft.shifts:
        lines.append("        shifts=(")
        for rule in draft.shifts:
            names = [key(text) for text in (rule.weight, rule.into) if text is not None]
            lines.append(f"            Shift({', '.join([key(rule.bias), _quoted(rule.axis), *names])}),")
        lines.append("        ),")
    reads: list[str] = []
    for norm, readers in draft.reads.items():
        reads += [f"            {key(norm)}: (", *(f"                {key(n)}," for n in readers), "            ),"]
    outputs = ", ".join(f'"{n}": "{text}"' for n, text in draft.outputs.items())
    lines.append(f"        outputs={{{outputs}}},")
    if reads:
        lines += ["        reads={", *reads, "        },"]
    return [*lines, *([f'        norm="{draft.norm}",'] if draft.norm != "layer" else []), "    )"]


def _others(draft: Draft, key: Callable[[str], str]) -> list[str]:
    """The entries of tensors that some layers do not have, or have in another shape."""
    out = []
    for template, names in draft.facts.found.others.items():
        at = key(template.removeprefix(draft.prefix))
        layers = sorted({int(name[len(template.split("{l}")[0]) :].split(".")[0]) for name in names})
        experts = draft.facts.found.experts if "{e}" in template else 1
        if "{l}" in template and not any(names.values()) and len(names) == len(layers) * experts:
            names_of, over = ("l=l, e=e", f" for e in range({experts})") if "{e}" in template else ("l=l", "")
            out.append(f'**{{({at}).format({names_of}): "" for l in {layers}{over}}},')
            continue
        base = draft.parts[0]
        out += [f'{key(n)}: "{base[n]}",' for n in (name.removeprefix(draft.prefix) for name in names)]
    return out


def _quoted(text: str) -> str:
    return f'"{text}"'

"""Safe YAML, with the place of every value: no Python tags, no duplicate keys, no exponential aliases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from symfuse.errors import OptionError
from symfuse.messages import suggestion

MAX_CHARACTERS = 1_000_000
MAX_VALUES = 30_000  # with aliases expanded
MAX_DEPTH = 40

_YAML = "tag:yaml.org,2002:"
_TYPED = {_YAML + name for name in ("null", "bool", "int", "float")}
# Dates and `=` are types of their own in YAML 1.1; in a recipe they are revisions and tokens.
_TEXTS = {_YAML + name for name in ("str", "timestamp", "value", "merge")}


@dataclass(frozen=True)
class Item:
    """A value with its place. value: None, a scalar, a list of Items or a dict of Items.

    place: file, line and path, such as `r.yml, line 4: models[1].parameters.weight`.
    anchored: whether it, or something in it, has a YAML anchor (`&name`).
    """

    value: Any
    where: str
    line: int | None
    path: str
    anchored: bool = False

    @property
    def place(self) -> str:
        """File, line and path, for the beginning of a message."""
        line = self.where if self.line is None else f"{self.where}, line {self.line}"
        return f"{line}: {self.path}" if self.path else line

    def fail(self, problem: str) -> NoReturn:
        """Raise OptionError about this value."""
        raise OptionError(f"{self.place}: {problem}")

    def mapping(self) -> dict[str, Item]:
        """The values by key; OptionError if this is not a mapping."""
        if not isinstance(self.value, dict):
            self.fail(f"expected a mapping (key: value), found {self._found()}")
        return self.value

    def fields(self, known: Iterable[str], refused: Mapping[str, str] | None = None) -> dict[str, Item]:
        """The values that are not null, by key. OptionError for an unknown key, with the nearest known one, and for a
        key of `refused`, with its reason."""
        known = list(known)
        for key, item in self.mapping().items():
            if key in (refused or {}):
                item.fail((refused or {})[key])
            if key not in known:
                item.fail(f"unknown key{suggestion(key, known)}; known here: {', '.join(known)}")
        return {key: item for key, item in self.mapping().items() if item.value is not None}

    def sequence(self) -> list[Item]:
        """The values of a list; OptionError if this is not a list, or empty."""
        if not isinstance(self.value, list):
            self.fail(f"expected a list, found {self._found()}")
        if not self.value:
            self.fail("the list is empty")
        return self.value

    def text(self) -> str:
        """OptionError if this is not a text, or an empty one."""
        if not isinstance(self.value, str):
            self.fail(f"expected a text, found {self._found()}{self._quotes()}")
        if not self.value.strip():
            self.fail("the text is empty")
        return self.value

    def integer(self, least: int) -> int:
        """OptionError if this is not a whole number, or less than `least`."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail(f"expected a whole number, found {self._found()}")
        if self.value < least:
            self.fail(f"{self.value} is below {least}")
        return self.value

    def number(self) -> float:
        """OptionError if this is not a number; YAML reads 1e-5 as a string."""
        try:
            if not isinstance(self.value, int | float | str) or isinstance(self.value, bool):
                raise ValueError
            return float(self.value)
        except (ValueError, OverflowError):
            self.fail(f"expected a number, found {self._found()}")

    def boolean(self) -> bool:
        """OptionError if this is neither true nor false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {self._found()}")
        return self.value

    def choice(self, known: Iterable[str]) -> str:
        """OptionError if this is not one of the known words."""
        word, known = self.text(), list(known)
        if word not in known:
            self.fail(f"{word!r} is not known{suggestion(word, known)}; choose from {', '.join(known)}")
        return word

    def scalar(self) -> str | int | float | bool:
        """OptionError if this is a list, a mapping or nothing."""
        if not isinstance(self.value, (str, int, float, bool)):
            self.fail(f"expected a single value, found {self._found()}")
        return self.value

    def plain(self) -> Any:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def _found(self) -> str:
        if self.value is None:
            return "nothing"
        words = {dict: "a mapping", list: "a list", bool: str(self.value).lower()}
        return words.get(type(self.value), repr(self.value))

    def _quotes(self) -> str:
        return "; write it in quotes" if isinstance(self.value, (bool, int, float)) else ""


@dataclass(frozen=True)
class Document:
    """A document of a YAML file. text: as in the file, with comments."""

    root: Item
    text: str


def read_documents(text: str, where: str, *, lines: bool = True) -> list[Document]:
    """The non-empty documents of a YAML text. lines: whether messages have line numbers.

    Raises OptionError with the line for invalid YAML, tags and duplicate keys, and for a text whose size, nesting, or
    number of values with aliases expanded is beyond any recipe or declaration.
    """
    if len(text) > MAX_CHARACTERS:
        raise OptionError(f"{where}: {len(text):,} characters are too many (at most {MAX_CHARACTERS:,})")
    try:
        parts = list(_compose(text))
    except RecursionError:
        raise OptionError(f"{where}: nested too deeply (at most {MAX_DEPTH} levels)") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise OptionError(f"{where}, line {line}: the character {chr(error.character)!r} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        raise OptionError(_syntax(error, where)) from None
    reader = _Reader(where, lines)
    documents = []
    for i, (node, begin, _) in enumerate(parts):
        end = parts[i + 1][2] if i + 1 < len(parts) else len(text)
        root = reader.item(node, "", None, 0)
        if root.value is not None:
            documents.append(Document(root, text[begin if i else 0 : end].lstrip("\n")))
    return documents


def read_value(text: str, where: str) -> Any:
    """The value of one YAML text, None if it is empty; raises OptionError as `read_documents` does."""
    documents = read_documents(text, where, lines=False)
    if len(documents) > 1:
        raise OptionError(f"{where}: expected one value, found {len(documents)} documents")
    return documents[0].root.plain() if documents else None


def _compose(text: str) -> Iterator[tuple[Node, int, int]]:
    """The root of each document, the position of its text, and that of the `---` before it."""
    loader = _Loader(text)
    try:
        while loader.check_node():
            begin = loader.peek_event()  # type: ignore[no-untyped-call]
            if (node := loader.get_node()) is not None:
                yield node, begin.end_mark.index, begin.start_mark.index
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Marks nodes that have an anchor, or contain one that has; aliases (`*name`) are not marked."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        alias = self.check_event(yaml.AliasEvent)
        anchor = None if alias else self.peek_event().anchor  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if not alias and (anchor is not None or hasattr(node, "anchored")):
            for one in (node, parent):
                if one is not None:
                    one.anchored = True  # type: ignore[attr-defined]
        return node


def _syntax(error: yaml.MarkedYAMLError, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    problem = error.problem or "does not parse"
    if "'\\t'" in problem:
        problem = "a tab; YAML is indented with spaces"
    context = f" ({error.context})" if error.context else ""
    return f"{where}{line}: invalid YAML: {problem}{context}"


class _Reader:
    """Nodes → Items. It counts them, since aliases may expand to exponentially many values."""

    def __init__(self, where: str, lines: bool) -> None:
        self.where = where
        self.lines = lines
        self.values = 0

    def item(self, node: Node, path: str, line: int | None, depth: int) -> Item:
        """line: of the key, if there is one."""
        own = Item(None, self.where, self._line(node) if line is None else line, path)
        self._count(own, depth)
        value: Any
        if isinstance(node, ScalarNode):
            value = self._scalar(node, own)
        elif isinstance(node, SequenceNode) and node.tag == _YAML + "seq":
            value = [self.item(part, f"{path}[{i}]", None, depth + 1) for i, part in enumerate(node.value)]
        elif isinstance(node, MappingNode) and node.tag == _YAML + "map":
            pairs = self._pairs(node, own, depth)
            below = f"{path}." if path else ""
            value = {key: self.item(part, below + key, at, depth + 1) for key, (at, part) in pairs.items()}
        else:
            self._refuse_tag(node, own)
        return Item(value, own.where, own.line, path, hasattr(node, "anchored"))

    def _pairs(self, node: MappingNode, own: Item, depth: int) -> dict[str, tuple[int | None, Node]]:
        """The line and value of each key, including those that `<<` merges from other mappings."""
        self._count(own, depth)
        pairs: dict[str, tuple[int | None, Node]] = {}
        merged: dict[str, tuple[int | None, Node]] = {}
        for key, value in node.value:
            at = Item(None, self.where, self._line(key), own.path)
            if not isinstance(key, ScalarNode):
                at.fail("a key must be a plain word")
            if key.tag == _YAML + "merge":
                for part in value.value if isinstance(value, SequenceNode) else [value]:
                    if not isinstance(part, MappingNode):
                        at.fail("`<<` merges mappings only")
                    merged = self._pairs(part, at, depth + 1) | merged
            elif key.value in pairs:
                first = "" if at.line is None else f" (first in line {pairs[key.value][0]})"
                at.fail(f"duplicate key {key.value!r}{first}")
            else:
                pairs[key.value] = (at.line, value)
        return merged | pairs

    def _scalar(self, node: ScalarNode, own: Item) -> str | int | float | bool | None:
        if node.tag in _TEXTS:
            return str(node.value)
        if node.tag not in _TYPED:
            self._refuse_tag(node, own)
        try:
            value: int | float | bool | None = SafeConstructor().construct_object(node)
        except (ValueError, LookupError, OverflowError):
            own.fail(f"{node.value[:40]!r} does not read as {node.tag.removeprefix(_YAML)}")
        return value

    def _refuse_tag(self, node: Node, own: Item) -> NoReturn:
        own.fail(f"the tag {node.tag.replace(_YAML, '!!')} is not allowed")

    def _count(self, own: Item, depth: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            own.fail(f"more than {MAX_VALUES:,} values, with aliases expanded, are too many")
        if depth > MAX_DEPTH:
            own.fail(f"nested too deeply (at most {MAX_DEPTH} levels)")

    def _line(self, node: Node) -> int | None:
        return node.start_mark.line + 1 if self.lines else None

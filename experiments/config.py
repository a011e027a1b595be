"""What a file in configs/ says: how to come by models, and the options of each study."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import finetune
import yaml

from symfuse.device import require
from symfuse.errors import OptionError

CONFIGS = Path(__file__).parent / "configs"
KEYS = ("extends", "device", "families", "tuned", "studies")


class Options(dict[str, Any]):
    """A mapping of a config. where: its place there, which is said of a key that it lacks."""

    where: str

    def __missing__(self, key: str) -> Any:
        raise OptionError(f"{self.where}: {key!r} is missing")


@dataclass(frozen=True)
class Config:
    """name: of the file. families, tuned: how to come by models. studies: the options of each that it has."""

    name: str
    path: Path
    device: str
    families: Mapping[str, Any]
    tuned: Mapping[str, Any]
    studies: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, which: str, *below: Path) -> Config:
        """By the name of a file in configs/, or by its path. One that `extends` another has its device, families and
        tuned, but what it says itself. Raises OptionError if there is no such file, if it is no YAML or extends itself
        (`below`), or for a key that is unknown or stands there twice, and a device that is not there."""
        path = Path(which) if which.endswith((".yml", ".yaml")) else CONFIGS / f"{which}.yml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yml")))
            raise OptionError(f"there is no config {which!r}: expected {known}, or the path of a file")
        if path in below:
            raise OptionError(f"{path} extends itself")
        loaded = _loaded(path)
        if strange := sorted(set(map(str, loaded)) - set(KEYS)):
            raise OptionError(f"{path}: {strange[0]!r} is no key; there are {', '.join(KEYS)}")
        base = (
            cls.read(str(loaded["extends"]), *below, path) if "extends" in loaded else cls("", path, "cpu", {}, {}, {})
        )
        parts = {key: _mappings(loaded.get(key, {}), f"{path}: {key}") for key in KEYS[2:]}
        known, tuned = ({**getattr(base, key), **parts[key]} for key in ("families", "tuned"))
        return cls(path.stem, path, str(loaded.get("device", base.device)), known, tuned, parts["studies"])

    def require_device(self) -> None:
        """Raises OptionError if there is no such device."""
        try:
            require(self.device)
        except OptionError as error:
            raise OptionError(f"{self.path}: {error}") from error

    @functools.cached_property
    def _made(self) -> dict[str, families.Family]:
        return {}

    def family(self, name: str) -> families.Family:
        """Made once: it keeps its tasks."""
        if name not in self._made:
            self._made[name] = families.family(name, self.families, self.device)
        return self._made[name]

    def tune(self, name: str) -> finetune.Tuned:
        return finetune.tuned(name, self.tuned, self.device, self.families)

    def described(self, name: str) -> Mapping[str, Any]:
        """What it says of a family or of what is fine-tuned, and of the family that this starts from."""
        about = self.tuned.get(name) or self.families.get(name, {})
        base = about.get("base")
        return {**about, "base": self.families[base]} if base in self.families else about

    def prepare(self, name: str, seed: Any) -> None:
        """Have a model there: of a family by its seed, of what is fine-tuned by domain and seed."""
        if name in self.tuned:
            self.tune(name).model(*seed)
        else:
            self.family(name).model(seed)


class _Loader(yaml.SafeLoader):
    """Of YAML without keys that stand in a mapping twice, of which the first would be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value != "<<" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    "a mapping", node.start_mark, f"has the key {key.value!r} twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text("utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is no YAML that can be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise OptionError(f"{path}: expected a mapping with {', '.join(KEYS)}, found {type(loaded).__name__}")
    return loaded


def _mappings(value: Any, where: str) -> Options:
    """A mapping of mappings, and all that are in them, with their places."""
    if not isinstance(value, dict):
        raise OptionError(f"{where}: expected a mapping, found {value!r}")
    for name, inner in value.items():
        if not isinstance(inner, dict):
            raise OptionError(f"{where}: {name}: expected a mapping, found {inner!r}")
    return _placed(value, where)


def _placed(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_placed(one, where) for one in value]
    if not isinstance(value, dict):
        return value
    options = Options({key: _placed(one, f"{where}: {key}") for key, one in value.items()})
    options.where = where
    return options

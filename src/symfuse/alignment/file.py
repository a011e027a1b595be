"""An Alignment as one safetensors file: written with a checksum, and completely checked when it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from symfuse.arguments import require_type
from symfuse.errors import CheckpointError, LayoutError
from symfuse.files import regular
from symfuse.groups import ELEMENTS, INEXACT_ELEMENTS, Coupling, Element, Sinkhorn, shapes_of, subgroups
from symfuse.io.stamp import refuse_pointer
from symfuse.messages import some, with_current_keys
from symfuse.model import TRANSPORT, VARIANTS
from symfuse.rewriting import REWRITES
from symfuse.spec import Instance, Spec, bias_of

if TYPE_CHECKING:
    from symfuse.alignment.alignment import Alignment

FORMAT = 2
CHECKSUM = "sha256"
KNOWN = (
    "format",
    "symfuse",
    "spec",
    "provenance",
    "frame",
    "variants",
    CHECKSUM,
)  # the keys that the metadata may have
KINDS: dict[str, type[Element]] = {**ELEMENTS, **INEXACT_ELEMENTS}


def to_bytes(alignment: Alignment) -> bytes:
    """The bytes of its file: the elements as tensors; the declaration, the provenance and a checksum as metadata."""
    tensors = {
        f"{instance}/{type(g).__name__.lower()}/{key}": t.contiguous()
        for instance, g in alignment.elements.items()
        for key, t in g.tensors().items()
    }
    tensors |= {f"shift/{name}": t.contiguous() for name, t in alignment.shifts.items()}
    tensors |= {f"gauge/{name}": v.contiguous() for name, v in alignment.gauges.items()}
    tensors = {key: t.clone() for key, t in tensors.items()}  # expanded identities share storage
    meta = {"spec": alignment.spec.to_json(), "provenance": dict(alignment.provenance), "frame": list(alignment.frame)}
    meta |= {"variants": list(alignment.variants)} if alignment.variants else {}
    texts = {"format": "pt", "symfuse": str(FORMAT), **{key: json.dumps(value) for key, value in meta.items()}}
    return _sorted_header(save(tensors, {**texts, CHECKSUM: _checksum(tensors, texts)}))


def read(path: Path) -> dict[str, Any]:
    """The fields of the Alignment in a file; CheckpointError if it holds something else, or a byte of it has changed.
    Files that were written before checksums were introduced are read without one."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; expected an alignment, as `symfuse align A --to B -o OUT` writes it"
        )
    refuse_pointer(path)
    try:
        with safe_open(regular(path), framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    if meta.get("symfuse") != str(FORMAT):
        raise CheckpointError(
            f"{path}: not an alignment of this version (format {FORMAT} expected, {meta.get('symfuse')} found); "
            "make it again with `symfuse align`"
        )
    if unknown := sorted(meta.keys() - KNOWN):
        raise CheckpointError(
            f"{path}: its metadata has {some(unknown)}, expected {', '.join(KNOWN)}: it is damaged, or of a later "
            "version; copy the file again, or make it again with `symfuse align`"
        )
    if meta.pop(CHECKSUM, actual := _checksum(tensors, meta)) != actual:
        raise CheckpointError(
            f"{path}: its contents do not match the checksum in its metadata, so that it has changed since it was "
            "written; copy the file again, or make it again with `symfuse align`"
        )
    try:
        return _assemble(tensors, meta)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, RecursionError, LayoutError) as error:
        why = str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path}: says that it is an alignment, but is damaged ({why}); make it again with `symfuse align`"
        ) from error


def _assemble(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an Alignment; LayoutError or ValueError if they are invalid."""
    spec = Spec.from_json(_entry(meta, "spec", dict[str, object]))
    vectors: dict[str, dict[str, Tensor]] = {"shift": {}, "gauge": {}}
    parts: dict[tuple[str, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        head, _, rest = key.partition("/")
        if head in vectors:
            _require_dtype(key, tensor, index=False)
            vectors[head][rest] = tensor
            continue
        kind, _, name = rest.partition("/")
        if kind not in KINDS:
            raise LayoutError(f"{key!r} is no name of a tensor of an alignment")
        _require_dtype(key, tensor, index=name == "index")
        _require_shape(key, tensor, spec, Instance.parse(head), KINDS[kind], name)
        parts.setdefault((head, kind), {})[name] = tensor
    elements = _elements(parts)
    undeclared = [str(i) for i in elements if i not in spec.movable]
    undeclared += [name for named in vectors.values() for name in named if name not in spec.tensors]
    if undeclared:
        raise LayoutError(f"{', '.join(undeclared)} not in the declaration")
    frame = tuple(_entry(meta, "frame", list[str]))
    variants = tuple(_entry({"variants": "[]", **meta}, "variants", list[str]))
    soft, shifts, gauges = TRANSPORT in variants, vectors["shift"], vectors["gauge"]
    wrong = [str(i) for i, g in elements.items() if not _belongs(g, spec, i, soft)]
    wrong += [name for name, t in shifts.items() if not _translates(t, spec, name)]
    wrong += [name for name, v in gauges.items() if name not in spec.gauges or not _fits(v, spec, name)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not an element of the group of that axis, or of another size")
    for what, names, known in (("rewrites", frame, [*REWRITES]), ("variants", variants, [*VARIANTS, TRANSPORT])):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{', '.join(map(str, unknown))}: no {what} that this version knows")
    return {
        "spec": spec, "elements": elements, "shifts": shifts, "gauges": gauges, "frame": frame, "variants": variants,
        "provenance": with_current_keys(_entry(meta, "provenance", dict[str, object])),
    }  # fmt: skip


def _elements(parts: Mapping[tuple[str, str], Mapping[str, Tensor]]) -> dict[Instance, Element]:
    """The elements with these tensors, by instance and kind."""
    elements: dict[Instance, Element] = {}
    for (head, kind), values in parts.items():
        instance = Instance.parse(head)
        if instance in elements:
            raise LayoutError(f"there are two elements of {head!r}")
        try:
            elements[instance] = KINDS[kind](**values)
        except TypeError as error:
            raise LayoutError(f"'{head}/{kind}' has the parts {', '.join(map(repr, values))} ({error})") from error
    return elements


def _require_dtype(key: str, tensor: Tensor, *, index: bool) -> None:
    if not (tensor.dtype == torch.int64 if index else tensor.is_floating_point()):
        raise LayoutError(f"{key!r} is {str(tensor.dtype).removeprefix('torch.')}: not the dtype of such a tensor")


def _entry(meta: Mapping[str, str], key: str, kind: Any) -> Any:
    """The value of a key of the metadata; LayoutError, which names the key, if it has another type."""
    try:
        value = json.loads(meta[key])
    except KeyError as error:
        raise LayoutError(f"its metadata has no {key!r}") from error
    except ValueError as error:
        raise LayoutError(f"{key!r} of its metadata is no JSON: {error}") from error
    require_type(value, kind, key)
    return value


def _require_shape(key: str, tensor: Tensor, spec: Spec, instance: Instance, kind: type[Element], part: str) -> None:
    """LayoutError if a part of an element does not have the shape that its axis requires. An unknown axis or part is
    reported later."""
    shapes = (
        shapes_of(kind, spec.axes[instance.axis].size, spec.batch(instance.axis)) if instance.axis in spec.axes else {}
    )
    if part in shapes and tuple(tensor.shape) != shapes[part]:
        raise LayoutError(f"{key!r} has the shape {list(tensor.shape)}, expected {list(shapes[part])} by its axis")


def _checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> str:
    """The sha256 of tensors and metadata, by name, without the checksum itself."""
    digest = hashlib.sha256(json.dumps({key: meta[key] for key in sorted(meta) if key != CHECKSUM}).encode())
    for key in sorted(tensors):
        tensor = tensors[key].contiguous()
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _belongs(element: Element, spec: Spec, instance: Instance, soft: bool) -> bool:
    """Whether an element from a file belongs to the group of its axis: then it keeps the function. soft: it may also be
    a mean of permutations, which does not."""
    axis = spec.axes[instance.axis]
    if axis.group is None or (element.size, element.batch) != (axis.size, spec.batch(instance.axis)):
        return False
    if isinstance(element, Coupling):
        return soft and "permutation" in subgroups(axis.group, axis.size) and Sinkhorn().contains(element, 1e-6)
    whole = [not tensor.is_floating_point() for key, tensor in element.tensors().items() if key == "index"]
    return all(whole) and axis.group.contains(element, 1e-6)


def _translates(shift: Tensor, spec: Spec, name: str) -> bool:
    return any(rule.bias == name for rule in spec.shifts) and _fits(shift, spec, name)


def _fits(vector: Tensor, spec: Spec, name: str) -> bool:
    """Whether a vector is finite and has the length of the bias, or of the weight, of that name."""
    bias = spec.tensors[name if name not in spec.gauges else bias_of(name)]
    return tuple(vector.shape) == bias.layout.shape(spec.sizes) and bool(vector.isfinite().all())


def _sorted_header(data: bytes) -> bytes:
    """A safetensors file with a header in fixed order: the library writes metadata in another order each time."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]

"""A run as data: what the command line prints, what `symfuse.json` and the model card hold."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from symfuse import __version__, api
from symfuse.alignment import Alignment, alignment_file
from symfuse.architectures import Model
from symfuse.architectures.reasons import reason
from symfuse.errors import CheckpointError, SymfuseError
from symfuse.evaluate import Distance
from symfuse.io import Checkpoint
from symfuse.io.companions import is_of_tokenizer
from symfuse.io.messages import first_line
from symfuse.matching import usual, word_of
from symfuse.spec import Spec
from symfuse.vocabulary import compare

_REWRITTEN = {
    "untie": "head untied",
    "fold_scales": "scales of layers folded",
    "fold_norms": "norms folded",
    "centre": "writers centred",
    "drop_gauges": "gauges dropped",
    "balance": "heads balanced",
}


def inspection(checkpoint: Checkpoint) -> dict[str, Any]:
    """What symfuse knows of a model, from its headers and config alone."""
    spec = api.declare(checkpoint)
    infos = [checkpoint.info(name) for name in checkpoint]
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in infos)
    notes = list(checkpoint.notes)
    notes += [f"{alias} is tied to {name}" for alias, name in spec.tied.items()]
    notes += _rotatable(checkpoint)
    notes += _inexact(checkpoint)
    if spec.buffers:
        notes.append(f"derived buffers are left out: {', '.join(sorted(spec.buffers))}")
    return {
        "model": checkpoint.name,
        "family": spec.family,
        "tensors": len(infos),
        "parameters": sum(info.nbytes // info.dtype.itemsize for info in infos),
        "dtypes": ", ".join(dtypes),
        "heads": sorted(spec.heads),
        "axes": _axes(spec),
        "notes": notes,
    }


def _rotatable(checkpoint: Checkpoint) -> list[str]:
    """What may become of the residual stream of a pre-norm model."""
    model = Model.of(checkpoint)
    if not model.spec.reads:
        return []
    _, frame, why = usual([model], ("residual",))
    words = ", ".join(_REWRITTEN[name] for name in frame)
    may = f"may be rotated in a frame ({words})" if frame else f"may not be rotated: {why['not rotated']}"
    streams = {atom.name: None for gain in model.spec.reads for atom in model.spec.tensors[gain].layout.atoms}
    return [f"{', '.join(streams)}: {may}"]


def _inexact(checkpoint: Checkpoint) -> list[str]:
    """What the alignment beside a moved model says of it."""
    file = alignment_file(checkpoint.folder) if isinstance(checkpoint.folder, Path) else None
    variants: tuple[str, ...] = ()
    if file is not None and file.is_file():
        with suppress(SymfuseError):  # whatever else goes by that name
            variants = Alignment.load(file).variants
    return [f"inexact: {', '.join(variants)}: moved in a way that does not keep the function"] if variants else []


def _axes(spec: Spec) -> list[dict[str, Any]]:
    touched = Counter(instance.axis for instance in spec.movable)
    used = {axis for declared in spec.tensors.values() for axis in declared.layout.names}
    rows = []
    for name, axis in spec.axes.items():
        if name not in used:
            continue
        batch = 1
        for size in spec.batch(name):
            batch *= size
        rows.append(
            {
                "axis": name,
                "size": axis.size,
                "group": axis.group.label if axis.group else "none",
                "instances": touched[name] * batch if axis.group else 0,
                "matched by": word_of(name) or "-",
                "why": reason(name, axis),
            }
        )
    if spec.shifts:
        free = sum(shift.into is None for shift in spec.shifts)
        row = {
            "axis": "biases",
            "size": "-",
            "group": "translation",
            "instances": len(spec.shifts),
            "matched by": "attention",
        }
        why = ("softmax ignores key biases; " if free else "") + "value biases may move on into the output bias"
        rows.append(row | {"why": why})
    return rows


def distances(before: Distance, after: Distance) -> dict[str, Any]:
    """Euclidean distances and cosines before and after an alignment; by axis, layer, both and tensor squared distances,
    which add up, with the share that is left, and of the whole squared distance the part's share before and after."""

    def rows(*keys: str) -> list[dict[str, Any]]:
        found, shares = [], [one.shares(*keys) for one in (before, after)]
        for (key, a), b in zip(before.by(*keys).items(), after.by(*keys).values(), strict=True):
            values = key if isinstance(key, tuple) else (key,)
            part = {
                "before": a.squared,
                "after": b.squared,
                "share": b.squared / a.squared if a.squared else 1.0,
                "of whole": [_finite(share[key]) for share in shares],
                "cosine": [_finite(a.cosine), _finite(b.cosine)],
            }
            found.append(dict(zip(keys, values, strict=True)) | part)
        return found

    return {
        "before": before.euclidean,
        "after": after.euclidean,
        "left": after.euclidean / before.euclidean if before.euclidean else 1.0,
        "relative": [before.relative, after.relative],
        "cosine": [_finite(before.cosine), _finite(after.cosine)],
        "by_axis": rows("axis"),
        "by_layer": rows("layer"),
        "by_layer_and_axis": rows("layer", "axis"),
        "by_tensor": rows("tensor"),
    }


def _finite(number: float) -> float | None:
    """None for a number that is none, as of the angle to a zero vector: JSON has no NaN."""
    return number if math.isfinite(number) else None


def alignment_run(
    source: Checkpoint,
    anchor: Checkpoint,
    alignment: Alignment,
    verified: dict[str, Any] | None,
    moved: Checkpoint | None = None,
) -> dict[str, Any]:
    """What an alignment did: by axis what was matched, how far it moved, and the largest condition number of the maps;
    distances; the proof. moved: the anchor, if it was moved too."""
    matched: dict[str, dict[str, Any]] = {}
    for step in alignment.provenance["steps"]:
        axis = step["instance"].partition("[")[0]
        row = matched.setdefault(
            axis,
            {
                "axis": axis,
                "group": step["group"],
                "units": 0,
                "moved": 0,
                "before": 0.0,
                "after": 0.0,
            },
        )
        for key in ("units", "moved", "before", "after"):
            row[key] += step[key]
    for axis, row in matched.items():
        elements = [element for instance, element in alignment.elements.items() if instance.axis == axis]
        row["condition"] = max((float(element.condition().max()) for element in elements), default=1.0)
    start, end = alignment.in_frame(source), alignment.in_frame(anchor)  # distances are between models in one frame
    return {
        "kind": "alignment",
        "symfuse": __version__,
        "source": alignment.provenance["source"],
        "anchor": alignment.provenance["anchor"],
        "options": alignment.provenance["options"],
        "matched": list(matched.values()),
        **({"descents": alignment.provenance["descents"]} if "descents" in alignment.provenance else {}),
        **({"learning": alignment.provenance["learning"]} if "learning" in alignment.provenance else {}),
        "translated biases": len(alignment.shifts),
        "frame": list(alignment.frame),
        **({"inexact": list(alignment.variants)} if alignment.variants else {}),
        "distance": distances(api.distance(start, end), api.distance(alignment(source), moved or end)),
        "verified": verified,
    }


def frame_run(source: Checkpoint, frame: Sequence[str]) -> dict[str, Any]:
    """What became of an anchor that was written in the frame of an alignment."""
    return {"kind": "frame", "symfuse": __version__, "source": source.lineage(), "frame": list(frame)}


def frame_text(frame: Sequence[str]) -> str:
    """A frame in words."""
    plain = ", ".join(_REWRITTEN[name] for name in frame)
    return f"the frame {', '.join(frame)} ({plain})" if frame else "the frame in which it was"


def model_card(run: Mapping[str, Any]) -> str:
    """README.md of an output folder, with the hub's metadata block, the recipe and the lineage."""
    lineage = run["inputs"] if "inputs" in run else [run[role] for role in ("source", "anchor") if role in run]
    names = [str(one["name"]) for one in lineage]
    relation = ["base_model_relation: merge"] if "method" in run else []
    lines = ["---", "library_name: transformers", "tags:", "- symfuse", "- merge", "base_model:"]
    lines += [f"- {json.dumps(name, ensure_ascii=False)}" for name in dict.fromkeys(names)] + [*relation, "---", ""]
    if "method" in run:
        lines += [f"A {run['method']} merge made with symfuse {__version__}.", ""]
        first = f"Aligned to `{run['anchor']}` first{_aligned_text(run['align'])}." if run["align"] else ""
        lines += [first or "Not aligned before the merge."]
        if "learned" in run:
            lines += ["", "It looked at data; what it found out is in `symfuse.json`, under `learned`."]
            lines += [f"Note: {note}." for note in run["learned"].get("notes", ())]
    elif run["kind"] == "frame":
        lines += [f"`{names[0]}` in {frame_text(run['frame'])}: the same function, to be merged with models in it."]
    elif "inexact" in run:
        under = ", ".join(run["inexact"])
        lines += [f"inexact: {under}. `{names[0]}` moved onto `{names[1]}` in a way that does not keep its function."]
    else:
        how = _aligned_text({"axes": run["options"]["axes"], "frame": run["frame"]})
        lines += [f"`{names[0]}` moved onto `{names[1]}` by its symmetries{how}."]
        if "learning" in run:
            data = run["learning"]["data"]
            lines += [f"The matching was learned on {data['data']} ({data['task']})."]
    moved = run.get("alignments", [run])
    inexact = list(dict.fromkeys(variant for one in moved for variant in one.get("inexact", ())))
    if "method" in run and inexact:
        lines += [
            f"That is inexact ({', '.join(inexact)}): models were moved in a way that does not keep their function."
        ]
    proofs = [one["verified"] for one in moved if "verified" in one]
    if proofs and all(proofs):
        worst = max(error for proof in proofs for error in proof["errors"].values())
        proved = f"That moving changed no output is proved to {worst:.0e}, before rounding ({proofs[0]['inputs']})."
        differ = f"Its outputs differ from what they were by {worst:.2g} ({proofs[0]['inputs']})."
        lines += ["", differ if inexact else proved]
    elif proofs and not inexact:
        lines += ["", "It was not checked that moving changed no output (--no-verify)."]
    weights = run.get("weights") or {}
    rows = [f"- `{name}`{f', weight {weights[name]:g}' if name in weights else ''}" for name in names]
    lines += ["", "Made from:", "", *rows, ""]
    if "tokenizer" in run:
        lines += [f"It has config and dtypes of `{run['base']}` ({run['why base']}), {run['tokenizer']}.", ""]
    if "recipe" in run:
        lines += ["```yaml", run["recipe"].rstrip(), "```", ""]
    lines += ["The whole run as data: `symfuse.json`.", ""]
    return "\n".join(lines)


def _aligned_text(align: Mapping[str, Any]) -> str:
    frame = f"; in {frame_text(align['frame'])}" if align["frame"] else ""
    return f": axes {', '.join(align['axes'])}{frame}"


def tokenizer_notes(checkpoints: Sequence[Checkpoint], base: int) -> list[str]:
    """What a user should know of tokenizers that differ, if they are not brought together: those of the base are taken,
    and row i of an embedding is merged with row i, whatever token that is."""
    taken = checkpoints[base].name
    ours = _tokenizer_files(checkpoints[base])
    notes = []
    for checkpoint in checkpoints:
        theirs = _tokenizer_files(checkpoint)
        if differ := sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]):
            notes.append(f"{', '.join(differ)} of {checkpoint.name} and {taken} differ; those of {taken} are taken")
            with suppress(SymfuseError):  # a tokenizer that cannot be read is none of the merge's
                found = compare([checkpoints[base], checkpoint])
                notes += [str(d) for d in found if d and not d.warning]  # else the merge warns of it
    return notes


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: data for name, data in checkpoint.companions().items() if is_of_tokenizer(name)}


def text_inputs(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """The lines of a text file as inputs of a model, by its own tokenizer."""
    from symfuse.evaluate.tasks.base import from_companions

    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path}: not a text file in UTF-8 that can be read ({error})") from error
    if not lines:
        raise CheckpointError(f"{path}: no lines of text in it")
    # Without files of its own, transformers makes up an empty tokenizer that knows no word.
    if not any(re.match(r"tokenizer\.|vocab|.*\.model$", file) for file in checkpoint.companions()):
        raise CheckpointError(f"{checkpoint.name}: there is no tokenizer beside its weights; add its files")
    positions = checkpoint.config.get("max_position_embeddings", checkpoint.config.get("n_positions", 128))
    try:
        tokenizer = from_companions(checkpoint, "AutoTokenizer", "tokenizer")
        if tokenizer.pad_token is None:  # GPT-2's has none; what is padded is masked
            tokenizer.pad_token = tokenizer.eos_token
        length = min(128, positions - 4)
        return dict(tokenizer(lines, return_tensors="pt", padding=True, truncation=True, max_length=length))
    except Exception as error:  # whatever the tokenizers' classes raise
        raise CheckpointError(f"{checkpoint.name}: its tokenizer cannot read the text ({first_line(error)})") from error

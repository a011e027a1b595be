"""The description of an output folder: the run as data (symfuse.json), and the model card (README.md).

A checkpoint made by a verb has a `Record` among its functions `before_save`, so that Python and the command line write
the same folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from symfuse import __version__
from symfuse.errors import masked
from symfuse.io import Checkpoint
from symfuse.io.companions import CARD, CARD_DIGEST, RUN
from symfuse.io.hub import hub_id

if TYPE_CHECKING:
    from symfuse.alignment import Alignment

REWRITTEN = {
    "untie": "head untied",
    "fold_scales": "scales of layers folded",
    "fold_norms": "norms folded",
    "centre": "writers centred",
    "drop_gauges": "gauges dropped",
    "balance": "heads and neurons balanced",
}
PAPERS = {  # of matching, by what is compared
    "weights": "Zhang et al. 2025, Beyond the permutation symmetry of transformers, arXiv 2502.00264",
    "activations": "Verma and Elbayad 2024, Merging text transformer models from different initializations, "
    "arXiv 2403.00986",
    "learned": "Theus et al. 2025, Generalized linear mode connectivity for transformers, arXiv 2506.22712",
}
TASKS = {  # the hub's name of the task, by the ending of the class's name
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}

# Alignments saved with weights are safetensors files with a suffix of their own, since serving engines load every
# *.safetensors file as weights.
SUFFIX = ".symfuse"
SUFFIXES = (SUFFIX, ".safetensors")  # of earlier versions, and saved separately
FILE = f"alignment{SUFFIX}"

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """How a checkpoint was made. kind: "alignment", "frame", "merge" or "rebase". make: makes the document (`run`),
    once, on first use or when the checkpoint is saved. made_of: its input checkpoints. alignments: by file name, saved
    with the checkpoint. frame: of the checkpoint."""

    kind: str
    make: Callable[[], Run]
    made_of: tuple[Checkpoint, ...]
    alignments: Mapping[str, Alignment] = field(default_factory=dict)
    frame: tuple[str, ...] = ()

    @cached_property
    def run(self) -> Run:
        """The run as data, the content of symfuse.json."""
        return self.make()

    def __call__(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with these files beside its weights."""
        texts = described(self.run, model_card(self.run, checkpoint))
        files = {name: text.encode() for name, text in texts.items()}
        files |= {name: alignment.to_bytes() for name, alignment in self.alignments.items()}
        return checkpoint.replace(files={**checkpoint.companions(), **files})

    def known(self, run: Run) -> Record:
        """The record with a finished document."""
        return replace(self, make=partial(dict, run))


def described(run: Run, card: str) -> dict[str, str]:
    """symfuse.json and the card of an output folder, by name."""
    card = masked(card)
    run = {**run, CARD_DIGEST: sha256(card.encode()).hexdigest()}
    return {RUN: masked(json.dumps(run, indent=2) + "\n"), CARD: card}


def record_of(checkpoint: Checkpoint) -> Record | None:
    """The record of a checkpoint, if a verb made it."""
    return next((step for step in checkpoint.before_save if isinstance(step, Record)), None)


def recorded(checkpoint: Checkpoint, record: Record | None) -> Checkpoint:
    """The checkpoint with this record instead of that of its input."""
    others = tuple(step for step in checkpoint.before_save if not isinstance(step, Record))
    return checkpoint.replace(before_save=others if record is None else (*others, record))


def lineage(checkpoints: Iterable[Checkpoint]) -> list[dict[str, Any]]:
    """The original inputs of checkpoints (those that no verb made), each once."""
    out: list[dict[str, Any]] = []
    for checkpoint in checkpoints:
        record = record_of(checkpoint)
        out += [checkpoint.lineage()] if record is None else lineage(record.made_of)
    return [one for i, one in enumerate(out) if one not in out[:i]]


def alignments_in(folder: Path) -> list[Path]:
    """The files of alignments in an output folder."""
    return sorted(path for suffix in SUFFIXES for path in folder.glob(f"alignment*{suffix}"))


def alignment_file(path: Path) -> Path:
    """The file of an alignment: the path itself, or the file in the folder that `symfuse align` wrote."""
    if not path.is_dir():
        return path
    return next((file for suffix in SUFFIXES if (file := path / f"alignment{suffix}").is_file()), path / FILE)


def record_alignment(aligned: Checkpoint, source: Checkpoint, alignment: Alignment) -> Checkpoint:
    """The aligned source with its record, or with none if the alignment does not come from matching."""
    run = partial(movement, source, alignment)
    record = Record("alignment", run, (source,), {FILE: alignment}, alignment.frame)
    return recorded(aligned, record if is_matched(alignment) else None)


def is_matched(alignment: Alignment) -> bool:
    """Whether an alignment comes from matching, and has a record of its steps."""
    return {"steps", "options", "source", "anchor"} <= alignment.provenance.keys()


def movement(source: Checkpoint, alignment: Alignment, verified: Run | None = None) -> dict[str, Any]:
    """The effect of an alignment: by axis what was matched, how much it changed, and the largest condition number of
    the maps; and the proof."""
    matched: dict[str, dict[str, Any]] = {}
    for step in alignment.provenance["steps"]:
        axis = step["instance"].partition("[")[0]
        start = {"axis": axis, "group": step["group"], "units": 0, "moved": 0, "before": 0.0, "after": 0.0}
        row = matched.setdefault(axis, start)
        for key in ("units", "moved", "before", "after"):
            row[key] += step[key]
    for axis, row in matched.items():
        elements = [element for instance, element in alignment.elements.items() if instance.axis == axis]
        row["condition"] = max((float(element.condition().max()) for element in elements), default=1.0)
    provenance = alignment.provenance
    computed = source.computed  # its own lineage would contain only its name
    return {
        "kind": "alignment",
        "symfuse": __version__,
        "source": provenance["source"] if computed else source.lineage(),
        "anchor": provenance["anchor"],
        "options": provenance["options"],
        "paper": PAPERS.get(provenance.get("from", ""), PAPERS["weights"]),
        "matched": list(matched.values()),
        **{key: provenance[key] for key in ("descents", "learning") if key in provenance},
        "translated_biases": len(alignment.shifts),
        "frame": list(alignment.frame),
        **({"inexact": list(alignment.variants)} if alignment.variants else {}),
        "verified": verified,
    }


def framed(anchor: Checkpoint, alignment: Alignment) -> Checkpoint:
    """The anchor in the frame of an alignment, with its record."""
    run = partial(frame_run, anchor, alignment.frame)
    return recorded(alignment.in_frame(anchor), Record("frame", run, (anchor,), frame=alignment.frame))


def frame_run(source: Checkpoint, frame: Sequence[str], more: Callable[[], Run] = dict) -> dict[str, Any]:
    """The document of an anchor in the frame of an alignment, or of a rewritten model. more: makes further keys."""
    return {"kind": "frame", "symfuse": __version__, "source": source.lineage(), "frame": list(frame), **more()}


def frame_text(frame: Sequence[str]) -> str:
    """A frame in words."""
    plain = ", ".join(REWRITTEN[name] for name in frame)
    return f"the frame {', '.join(frame)} ({plain})" if frame else "its original frame"


# -- the model card --------------------------------------------------------------------------------


def model_card(run: Run, checkpoint: Checkpoint) -> str:
    """README.md of an output folder: the hub's metadata, the recipe and the lineage. It contains no absolute paths: a
    local model is named by the end of its path."""
    from huggingface_hub import ModelCard

    inputs = _inputs(run)
    ids = {str(one["name"]): hub_id(one["folder"]) for one in inputs}
    names = _short(name for name, hub in ids.items() if hub is None)
    names |= {name: hub for name, hub in ids.items() if hub is not None and "/snapshots/" in name}
    title = _title(run, [str(one["name"]) for one in inputs])
    text = "\n".join([f"# {title}", "", *_body(run), "The whole run as data: `symfuse.json`.", ""])
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/.~]){re.escape(name)}(?![\w/-])", partial(_as, names[name]), text)
    text = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return str(ModelCard(f"---\n{_metadata(run, checkpoint)}\n---\n\n{text}"))


def _as(text: str, _found: object) -> str:
    return text


def _inputs(run: Run) -> list[Run]:
    return list(run["inputs"]) if "inputs" in run else [run[role] for role in ("source", "anchor") if role in run]


def _short(names: Iterable[str]) -> dict[str, str]:
    """Short unique endings of absolute paths, and of those that begin with a dot."""
    split = {name: name.split("+") for name in names}  # a model and its adapter
    local = {name: paths for name, paths in split.items() if any(re.match(r"[/.~].*\w", path) for path in paths)}
    paths = {name: [PurePath(path).parts for path in each] for name, each in local.items()}
    for count in range(1, 1 + max((len(part) for parts in paths.values() for part in parts), default=0)):
        ends = {name: ["/".join(part[-count:]).strip("/") for part in parts] for name, parts in paths.items()}
        short = {name: "+".join(end) for name, end in ends.items()}
        if len(set(short.values())) == len(short):
            return short
    return {}


def _metadata(run: Run, checkpoint: Checkpoint) -> str:
    """The metadata for the hub; of input models on the hub only the ids."""
    from huggingface_hub import ModelCardData

    inputs, merged = _inputs(run), run["kind"] == "merge"
    made_of = inputs if merged else inputs[:1]  # an aligned model has the function of its source
    bases = list(dict.fromkeys(hub for one in made_of if (hub := hub_id(one["folder"])) is not None))
    sentence = "modules.json" in checkpoint.companions()
    more = ["sentence-transformers", "sentence-similarity", "feature-extraction"] if sentence else []
    fields: dict[str, Any] = {
        "library_name": _library(checkpoint.config, sentence),
        "pipeline_tag": "sentence-similarity" if sentence else _task(checkpoint.config),
        "tags": ["symfuse", *(["merge"] if merged else []), *more],
        "base_model": bases or None,
        **({"base_model_relation": "merge"} if merged and bases else {}),
        **_licence(inputs),
    }
    return ModelCardData(**fields).to_yaml()


def _library(config: Mapping[str, Any], sentence: bool) -> str | None:
    known = {
        "_class_name": "diffusers", "architectures": "transformers", "transformers_version": "transformers",
        "auto_map": "transformers", "architecture": "timm", "model_cfg": "open_clip",
    }  # fmt: skip
    return "sentence-transformers" if sentence else next((known[key] for key in known if key in config), None)


def _task(config: Mapping[str, Any]) -> str | None:
    name = str(next(iter(config.get("architectures") or ()), ""))
    return next((task for end, task in TASKS.items() if name.endswith(end)), None)


def _licence(inputs: Iterable[Run]) -> dict[str, str]:
    """The licence of the inputs, by their own cards; none unless all have the same one."""
    keys = ("license", "license_name", "license_link")
    cards = [_card_data(one["folder"]) for one in inputs]
    licences = [{key: str(card[key]) for key in keys if card.get(key)} for card in cards]
    return licences[0] if licences[0].get("license") and all(one == licences[0] for one in licences) else {}


def _card_data(folder: str | None) -> dict[str, Any]:
    """The metadata of the card in a folder; empty if there is none or it cannot be read."""
    from huggingface_hub import metadata_load

    if folder is None or not (card := Path(folder) / CARD).is_file():
        return {}
    try:
        return dict(metadata_load(card) or {})
    except Exception:  # whatever the error: an unreadable card of an input does not stop a merge
        return {}


def _title(run: Run, names: Sequence[str]) -> str:
    if run["kind"] == "merge":
        names = list(dict.fromkeys(names))
        return f"{', '.join(names[:-1])} and {names[-1]}, merged" if len(names) > 1 else f"A merge of {names[0]}"
    if run["kind"] == "rebase":
        return f"{run['names'][0]}, moved from {run['names'][1]} onto {run['names'][2]}"
    return f"{names[0]}, aligned to {names[1]}" if run["kind"] == "alignment" else f"{names[0]}, in another frame"


def _body(run: Run) -> list[str]:
    about = {"merge": _of_merge, "frame": _of_frame, "alignment": _of_alignment, "rebase": _of_rebase}[run["kind"]]
    weights = run.get("weights") or {}
    names = [str(one["name"]) for one in _inputs(run)]
    own = {name: weights.get(name, weights.get(f"{name} (aligned)")) for name in names}
    rows = [f"- `{name}`{'' if weight is None else f', weight {weight:g}'}" for name, weight in own.items()]
    renewed = [
        f"Statistics of batch normalisation: {how}, which is inexact." for how in (run.get("batch_statistics"),) if how
    ]
    lines = [*about(run), *_proof(run), *renewed, "", "Made from:", "", *rows, ""]
    if "tokenizer" in run:
        lines += [f"It has config and dtypes of `{run['base']}` ({run['why_base']}), {run['tokenizer']}.", ""]
    papers = dict.fromkeys(one["paper"] for one in (run, *run.get("alignments", ())) if one.get("paper"))
    lines += ["Methods:", "", *(f"- {paper}" for paper in papers), ""] if papers else []
    return lines + (["```yaml", run["recipe"].rstrip(), "```", ""] if "recipe" in run else [])


def _of_merge(run: Run) -> list[str]:
    lines = [f"A {run['method']} merge made with symfuse {__version__}.", ""]
    how = f"Aligned to `{run['anchor']}` first{_aligned_text(run['align'])}." if run["align"] else ""
    lines += [how or "Not aligned before the merge."]
    if "learned" in run:
        lines += ["", "It was fitted to data; the results are in `symfuse.json`, under `learned`."]
        lines += [f"Note: {note}." for note in run["learned"].get("notes", ())]
    if variants := _inexact(run):
        lines += [f"That is inexact ({variants}): models were aligned in a way that does not keep their function."]
    return lines


def _of_frame(run: Run) -> list[str]:
    name, frame = run["source"]["name"], frame_text(run["frame"])
    moves = f", moved by its own symmetries ({', '.join(run['moves'])})" if run.get("moves") else ""
    return [f"`{name}` in {frame}{moves}: the same function, to be merged with models in it."]


def _of_alignment(run: Run) -> list[str]:
    pair = f"`{run['source']['name']}` moved onto `{run['anchor']['name']}`"
    if "inexact" in run:
        return [f"inexact: {_inexact(run)}. {pair} in a way that does not keep its function."]
    lines = [f"{pair} by its symmetries{_aligned_text({**run['options'], 'frame': run['frame']})}."]
    if "learning" in run:
        data = run["learning"]["data"]
        lines += [f"The matching was learned on {data['data']} ({data['task']})."]
    return lines


def _of_rebase(run: Run) -> list[str]:
    finetune, base, onto = (f"`{name}`" for name in run["names"])
    dial = f", the base {run['towards']:g} of the way to that of the fine-tune" if run["towards"] else ""
    lines = [
        f"What {finetune} changed of {base}, moved onto {onto} by the symmetries of these models with symfuse "
        f"{__version__} (strength {run['alpha']:g}{dial}).",
        "",
        f"{run['expect'][0].upper()}{run['expect'][1:]}.",
    ]
    return lines + ([f"It is in {frame_text(run['frame'])}."] if run["frame"] and "adapter" not in run else [])


def _inexact(run: Run) -> str:
    return ", ".join(dict.fromkeys(name for one in run.get("alignments", [run]) for name in one.get("inexact", ())))


def _proof(run: Run) -> list[str]:
    proofs = [one["verified"] for one in run.get("alignments", [run]) if "verified" in one]
    if proofs and all(proofs):
        worst = max(error for proof in proofs for error in proof["errors"].values())
        proved = f"That moving changed no output is proved to {worst:.0e}, before rounding ({proofs[0]['inputs']})."
        differ = f"That changed the outputs by {worst:.2g} ({proofs[0]['inputs']})."
        return ["", differ if _inexact(run) else proved]
    return ["", "It was not checked that moving changed no output."] if proofs and not _inexact(run) else []


def _aligned_text(align: Mapping[str, Any]) -> str:
    frame = f"; in {frame_text(align['frame'])}" if align["frame"] else ""
    return f": axes {', '.join(align['axes'])}{frame}"

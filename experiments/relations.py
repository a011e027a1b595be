"""How models are related: `symfuse.relate` on models that come from each other, and on hard pairs that do not."""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import derived
import torch
from families import Trained, unlabelled
from study import Claim, Key, Part, Row, Study, table
from train import Kind

import symfuse
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.relations import decide, evidence_of
from symfuse.relations import verdict as words
from symfuse.spec import anatomy, layer_of

sys.path.append(str(Path(__file__).parents[1] / "tests" / "reference"))
import tracing

TRUTHS = {
    "copy": words.SAME_FUNCTION, "int8": words.QUANTISED, "int4": words.QUANTISED, "bf16": words.QUANTISED,
    "pruned": words.PRUNED, "cut": words.CUT, "narrow": words.WIDTH, "wide": words.WIDTH,
}  # fmt: skip  # of all other ways: a fine-tune
APART = "apart"
PEERS = ("cosine", "Zhu, index", "Zhu, gates and ups", "CKA")
MOVE = 7  # the seed of the element that moves a model


class Relations(Study):
    """Options: families: {NAME: {bases: [seeds], ordered: [[init, order], …], distilled: [seeds]}}; published: of which
    SCEPTR checkpoints there are pairs that were trained apart."""

    name = "relations"
    paper = "own"
    title = "How two models are related"
    keys = ("family", "source", "anchor", "moved")
    known = ("families", "bases", "ordered", "distilled", "published", "tuned")
    about = """
Models that come from a base (fine-tunes short and long, low-rank, of one layer only, means of two fine-tunes, rounded
to 8 and 4 bits and to bfloat16, pruned, cut in layers, cut and widened in neurons) against that base, each as it is and
moved by a random element of the whole group; and pairs of which none comes from the other: seeds on the same data,
seeds on the same data in the same order, students of a teacher's outputs, models that come from different bases, and
published checkpoints that were trained apart. Thresholds were chosen on the rows of the half "tune" (base 0, and every
other pair that is unrelated), and all figures below are of the half "report".
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["families"].items():
            yield from ((name, "from", base) for base in about["bases"])
            yield (name, APART, 0)
        if self.options.get("published"):
            yield ("sceptr", APART, 0)

    def models(self) -> Iterator[tuple[str, Any]]:
        for name, about in self.options["families"].items():
            yield from ((name, base) for base in about["bases"])
        yield from (("sceptr", name) for pair in self.options.get("published", []) for name in pair)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        for row, source, anchor in self.pairs(part):
            if self.key(row) not in done:
                yield row | _measured(source(), anchor(), row["moved"], self._data(part[0]))

    def pairs(self, part: Part) -> Iterator[tuple[Row, Any, Any]]:
        """What is known of each pair of a part beforehand, and what opens its models."""
        name, what, base = part
        pairs = self._related(name, base) if what == "from" else self._apart(name)
        for number, (source, anchor, truth, moved) in enumerate(self._published() if name == "sceptr" else pairs):
            half = ("tune", "report")[(base if what == "from" else number) % 2]
            row = {
                "family": name,
                "source": source[0],
                "anchor": anchor[0],
                "moved": moved,
                "truth": truth,
                "half": half,
            }
            yield row, source[1], anchor[1]

    def _data(self, name: str) -> Trained | None:
        family = self.config.family(name)
        return family if isinstance(family, Trained) else None

    def _kind(self, name: str) -> Kind:
        family = self.config.family(name)
        assert isinstance(family, Trained)
        return family.kind

    def _related(self, name: str, base: int) -> Iterator[tuple[Any, Any, str, bool]]:
        kind = self._kind(name)
        for way in (*derived.WAYS, "merge"):
            for moved in (False, True):
                truth = TRUTHS.get(way, words.FINE_TUNE)
                truth = words.SAME_WEIGHTS if way == "copy" and not moved else truth
                yield (
                    (way, _opened(derived.derived, kind, way, base)),
                    (f"base {base}", _base(kind, base)),
                    truth,
                    moved,
                )

    def _apart(self, name: str) -> Iterator[tuple[Any, Any, str, bool]]:
        kind, about = self._kind(name), self.options["families"][name]
        whole = [(f"base {base}", _base(kind, base)) for base in about["bases"]]
        whole += [(f"base {i}, order of {o}", _opened(derived.base_of, kind, i, o)) for i, o in about["ordered"]]
        whole += [(f"student of {base}", _opened(derived.distilled, kind, base)) for base in about["distilled"]]
        for at, anchor in enumerate(whole):
            yield from ((source, anchor, APART, False) for source in whole[at + 1 :])
        first, second = about["bases"]
        for way in about["tuned"]:
            tuned = [(f"{way} of {base}", _opened(derived.derived, kind, way, base)) for base in (first, second)]
            yield tuned[0], whole[1], APART, False
            yield tuned[1], whole[0], APART, True
            yield tuned[0], tuned[1], APART, True

    def _published(self) -> Iterator[tuple[Any, Any, str, bool]]:
        family = self.config.family("sceptr")
        for one, other in self.options["published"]:
            truth = words.FINE_TUNE if {one, other} == {"", "finetuned"} else APART
            sides = [(seed, lambda seed=seed: family.model(seed)) for seed in (one, other)]
            yield sides[0], sides[1], truth, False

    def tables(self, rows: Sequence[Row]) -> str:
        report = [row for row in rows if row["half"] == "report"]
        return "\n\n".join([_of_kinds(report), _of_apart(report), _of_scores(report)])

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        report = [row for row in rows if row["half"] == "report"]
        area = auc([(row["summary"]["cosine"], row["truth"] != APART) for row in report])
        wrong = [row for row in report if not _is_right(row)]
        of_kind = f"{len(wrong)} of {len(report)} pairs of the half that is reported"
        return [
            Claim("related models are separated from unrelated ones (area under the ROC curve 1.000)",
                  f"{area:.3f}", area == 1.0),
            Claim("no error of kind", of_kind, not wrong),
        ]  # fmt: skip


def _opened(make: Any, *arguments: Any) -> Any:
    return lambda: symfuse.open(make(*arguments))


def _base(kind: Kind, base: int) -> Any:
    return _opened(derived.base_of, kind, base)


def _measured(source: Checkpoint, anchor: Checkpoint, moved: bool, family: Trained | None) -> Row:
    if moved:
        source = derived.moved(source, MOVE)
    a, b = Model.of(source), Model.of(anchor)
    start = time.process_time()
    evidence = evidence_of(a, b)
    spent = time.process_time() - start
    start = time.process_time()
    quick = decide(evidence_of(a, b, quick=True))
    quick_spent = time.process_time() - start
    verdict = decide(evidence)
    return {
        "verdict": verdict.kind, "moved there": verdict.moved, "details": list(verdict.details), "quick": quick.kind,
        "relate seconds": round(spent, 2), "quick seconds": round(quick_spent, 2),
        "summary": {key: round(value, 5) if value == value else None for key, value in evidence.summary().items()},
        "grid": list(evidence.grid), "peers": _peers(a, b, family),
    }  # fmt: skip


def _peers(a: Model, b: Model, family: Trained | None) -> Mapping[str, float | None]:
    shared = [n for n in a.spec.tensors if a.spec.shares(n, b.spec)]
    out: dict[str, float | None] = dict.fromkeys(PEERS)
    out["cosine"] = tracing.cosine((a.read(n), b.read(n)) for n in shared)
    if a.spec.sizes == b.spec.sizes:
        out["Zhu, index"] = tracing.by_index(_first_rows(a, b))
    if family is not None:
        batches = unlabelled(family.task("match").batches[:1])
        sides = [_heard(model, batches) for model in (b, a)]
        out["CKA"] = tracing.cka(sides[0]["stream"][0], sides[1]["stream"][0])
        gates, ups = ([side[key] for side in sides] for key in ("gate", "up"))
        if gates[0] and a.spec.sizes == b.spec.sizes:
            pairs = zip(zip(*gates, strict=True), zip(*ups, strict=True), strict=True)
            out["Zhu, gates and ups"] = tracing.by_parts(pairs)
    return out


def _first_rows(a: Model, b: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer the rows of the matrix that writes its neurons."""
    for name, declared in b.spec.tensors.items():
        if layer_of(declared.index) is None or len(declared.layout.dims) < 2:
            continue
        for axis in (axis for axis in declared.layout.names if anatomy(axis) == "ffn"):
            for at in b.spec.occurrences[name, axis]:
                if str(at.atom) == axis:
                    yield at.unfold(b.read(name)), at.unfold(a.read(name))


def _heard(model: Model, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """The last hidden states, and in gated blocks what gates and ups put out: [inputs, units], and [units, inputs]."""
    module, heard = symfuse.to_module(model.checkpoint), {"stream": [], "gate": [], "up": []}
    for name, part in module.named_modules():
        for key in ("gate", "up"):
            if name.endswith(f"mlp.{key}_proj"):
                part.register_forward_hook(
                    lambda _m, _i, out, key=key: heard[key].append(out.flatten(0, -2).T.detach())
                )
    with torch.no_grad():
        hidden = module(**batches[0], output_hidden_states=True).hidden_states[-1]
    return heard | {"stream": [hidden.flatten(0, -2)]}


def auc(scored: Sequence[tuple[float | None, bool]]) -> float:
    """The share of pairs of one that is and one that is not, in which the first has the larger score; half of ties."""
    known = [(-1e9 if score is None else score, positive) for score, positive in scored]
    yes, no = ([score for score, positive in known if positive is wanted] for wanted in (True, False))
    wins = sum((a > b) + 0.5 * (a == b) for a in yes for b in no)
    return wins / (len(yes) * len(no)) if yes and no else 1.0


def _is_right(row: Row) -> bool:
    """Whether kind and basis are right; of pairs that are not related, whether they are called so."""
    if row["truth"] == APART:
        return row["verdict"] in (words.APART, words.UNRELATED)
    return row["verdict"] == row["truth"] and bool(row["moved there"]) is row["moved"]


def _of_kinds(report: Sequence[Row]) -> str:
    lines = []
    for source in dict.fromkeys(row["source"] for row in report if row["truth"] != APART):
        own = [row for row in report if row["source"] == source and row["truth"] != APART]
        cells = [[row for row in own if row["moved"] is moved] for moved in (False, True)]
        cosines = [row["summary"]["cosine"] for row in own]
        counts = [f"{sum(map(_is_right, some))} of {len(some)}" if some else "–" for some in cells]
        lines.append([source, own[-1]["truth"], *counts, f"{min(cosines):.2f} to {max(cosines):.2f}"])
    return table(["made by", "is a", "right, as it is", "right, moved", "cosine of units"], lines)


def _of_apart(report: Sequence[Row]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in (row for row in report if row["truth"] == APART):
        groups.setdefault(_group(row), []).append(row)
    lines = [_line(title, own) for title, own in groups.items()]
    return table(["pairs that are not related", "pairs", "called related", "cosine of units"], lines)


def _group(row: Row) -> str:
    names = row["source"] + row["anchor"]
    found = {"student": "students of a teacher's outputs", "order": "seeds, some in the same order", " of ": "tuned"}
    default = "published" if row["family"] == "sceptr" else "seeds"
    return next((title for word, title in found.items() if word in names), default)


def _line(title: str, rows: Sequence[Row]) -> list[str]:
    cosines, wrong = [row["summary"]["cosine"] for row in rows], sum(not _is_right(row) for row in rows)
    return [title, str(len(rows)), str(wrong), f"{min(cosines):.2f} to {max(cosines):.2f}"]


def _of_scores(report: Sequence[Row]) -> str:
    """The area under the curve of each score, over all pairs for which it is defined."""
    lines = []
    scores = {"symfuse relate, cosine of units": lambda row: row["summary"]["cosine"]} | {
        name: (lambda row, name=name: None if row["peers"][name] is None else _score(name, row)) for name in PEERS
    }
    for name, score in scores.items():
        known = [row for row in report if score(row) is not None]
        cells = []
        for moved in (False, True):
            own = [row for row in known if row["truth"] == APART or row["moved"] is moved]
            cells.append(f"{auc([(score(row), row['truth'] != APART) for row in own]):.3f}" if own else "–")
        lines.append([name, *cells, str(len(known))])
    spent = [median(row[key] for row in report) for key in ("relate seconds", "quick seconds")]
    note = f"\n\nCPU seconds of `relate`, median: {spent[0]:.2f}, quick {spent[1]:.2f}."
    return table(["score", "area, as they are", "area, moved", "pairs"], lines) + note


def _score(name: str, row: Row) -> float:
    """Larger for models that are related."""
    value: float = row["peers"][name]
    return -value if name.startswith("Zhu") else value

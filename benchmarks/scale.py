"""What aligning a Llama of 8 billion weights takes: seconds of each layer, memory, and how both grow.

    python benchmarks/scale.py [--quick] [--work FOLDER] [--json results.json]

Makes synthetic pairs (bfloat16, sharded) in the work folder, a few layers of full width, and deletes them after each
measurement: planted ones, of which the anchor is the source moved by random elements of attention and feed-forward with
2 % of noise, and independent ones. What is timed is `symfuse align` in a process of its own. Prints Markdown tables;
what they say: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from merging import BIN, run
from torch import Tensor

import symfuse
from symfuse.alignment import Alignment, random_alignment
from symfuse.groups import Monomial
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io import open as open_checkpoint

NOISE = 0.02
LAYERS = 32  # of the model whose time is told
AXES = ("c", "v", "ffn")


@dataclass(frozen=True)
class Shape:
    """Of a Llama 3, whose heads are 128 wide, four to a key."""

    width: int
    layers: int
    vocab: int = 128256
    head: int = 128

    @property
    def ffn(self) -> int:
        return self.width * 7 // 2

    def config(self) -> dict[str, Any]:
        heads = self.width // self.head
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.width,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": heads,
            "num_key_value_heads": heads // 4, "head_dim": self.head, "vocab_size": self.vocab, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }  # fmt: skip

    def infos(self) -> dict[str, TensorInfo]:
        narrow, wide = self.width // 4, self.width
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, wide)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            shapes |= {at + f"self_attn.{p}_proj.weight": (narrow if p in "kv" else wide, wide) for p in "qkvo"}
            shapes |= {at + f"mlp.{p}_proj.weight": (self.ffn, wide) for p in ("gate", "up")}
            shapes[at + "mlp.down_proj.weight"] = (wide, self.ffn)
            shapes |= {at + f"{p}_layernorm.weight": (wide,) for p in ("input", "post_attention")}
        shapes |= {"model.norm.weight": (wide,), "lm_head.weight": (self.vocab, wide)}
        return {name: TensorInfo(torch.bfloat16, dims) for name, dims in shapes.items()}


class Drawn(Mapping[str, Tensor]):
    """Weights that are drawn when they are read: N(0, 0.02), gains around 1; of an anchor with noise on a source."""

    def __init__(self, infos: Mapping[str, TensorInfo], seed: int, source: Checkpoint | None = None) -> None:
        self.infos, self.seed, self.source = infos, seed, source
        self.numbers = {name: number for number, name in enumerate(infos)}

    def __getitem__(self, name: str) -> Tensor:
        rng = torch.Generator().manual_seed(1000 * self.seed + self.numbers[name])
        out = torch.randn(self.infos[name].shape, generator=rng)
        if self.source is not None:
            under = self.source[name].float()
            return out.mul_(NOISE * under.std()).add_(under).bfloat16()
        return (out * 0.1 + 1 if "norm" in name else out.mul_(0.02)).bfloat16()

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def make(work: Path, shape: Shape, kind: str) -> tuple[dict[str, Path], Alignment | None]:
    """source and anchor in the work folder, and what was planted."""
    models = {name: work / name for name in ("source", "anchor")}
    infos = shape.infos()

    def write(name: str, tensors: Mapping[str, Tensor]) -> None:
        checkpoint = Checkpoint(tensors, shape.config(), name=name, infos=infos)
        checkpoint.save(models[name], max_shard_size="2GB", overwrite=True, threads=1)

    write("source", Drawn(infos, 0))
    if kind == "independent":
        write("anchor", Drawn(infos, 1))
        return models, None
    source = open_checkpoint(models["source"])
    planted = random_alignment(symfuse.declare(source), 7, axes=AXES)
    write("anchor", Drawn(infos, 2, planted(source)))
    return models, planted


def recovered(found: Alignment, planted: Alignment) -> dict[str, float]:
    """The share of neurons that are at their place, and the largest error of an entry of a rotation with its scale, and
    of a neuron's factor."""
    right = total = 0
    errors = {"turns": 0.0, "factors": 0.0}
    for instance, g in planted.elements.items():
        h = found.elements[instance]
        if isinstance(g, Monomial):
            assert isinstance(h, Monomial)
            right += int((g.index == h.index).sum())
            total += g.size
            assert g.scale is not None
            factors = torch.ones_like(g.scale) if h.scale is None else h.scale
            errors["factors"] = max(errors["factors"], float((factors / g.scale - 1).abs().max()))
        else:
            errors["turns"] = max(errors["turns"], float((g.to_dense() - h.to_dense()).abs().max()))
    return {"neurons": right / total, **errors}


def measure(work: Path, shape: Shape, kind: str, options: Sequence[str]) -> dict[str, Any]:
    """One alignment, as data; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(dir=work))
    try:
        models, planted = make(folder, shape, kind)
        command = [BIN / "symfuse", "align", models["source"], "--to", models["anchor"], "-o", folder / "out"]
        found = run([*command, "--axes", "attention,ffn", "--quiet", *options])
        document = json.loads((folder / "out" / "symfuse.json").read_text())
        check = {}
        if planted is not None:
            check = recovered(Alignment.load(folder / "out" / "alignment.safetensors"), planted)
        size = sum(path.stat().st_size for path in models["source"].glob("*.safetensors"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row = {
        "kind": kind, "width": shape.width, "layers": shape.layers, "options": list(options), "gigabytes": size / 1e9,
        "wall": found.wall, "cpu": found.cpu, "peak": found.peak, "matching": document["seconds"],
        "left": document["distance"]["left"], "verified": document["verified"], "recovered": check,
    }  # fmt: skip
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "| pair | width | layers | GB each | options | wall s | of which matching | CPU s | peak GB | neurons found "
        "| error of factors, of turns | distance left | proved to | rounding |\n|---|" + "--:|" * 3 + "---|"
        + "--:|" * 9
    )  # fmt: skip
    for row in rows:
        check, proof = row["recovered"], row["verified"]
        found = [f"{check['neurons']:.2%}", f"{check['factors']:.0e}, {check['turns']:.0e}"] if check else ["", ""]
        proved = [f"{max(proof['errors'].values()):.0e}", f"{proof['rounding']:.0e}"] if proof else ["", ""]
        cells = [
            row["kind"], row["width"], row["layers"], f"{row['gigabytes']:.1f}", " ".join(row["options"]),
            f"{row['wall']:.0f}", f"{row['matching']:.0f}", f"{row['cpu']:.0f}", f"{row['peak'] / 1e9:.2f}", *found,
            f"{row['left']:.1%}", *proved,
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Of the power law that fits best, by least squares of logarithms."""
    x, y = (torch.tensor([math.log(v) for v in numbers], dtype=torch.float64) for numbers in (sizes, values))
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x @ x))


def each(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float]:
    """A line through values by number of layers: what a layer takes, and what is taken without any."""
    x, y = (torch.tensor([float(row[k]) for row in rows], dtype=torch.float64) for k in ("layers", key))
    slope = float((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum())
    return slope, float(y.mean()) - slope * float(x.mean())


def growth(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of planted pairs: by depth, by width, and the time of the whole model."""
    plain = [row for row in rows if row["kind"] == "planted"]
    by_width: dict[int, list[Mapping[str, Any]]] = {}
    for row in plain:
        by_width.setdefault(row["width"], []).append(row)
    several = {width: found for width, found in by_width.items() if len({row["layers"] for row in found}) > 1}
    yield "| width | CPU s a layer | wall s a layer | CPU s without layers | peak GB, deepest |\n|--:|--:|--:|--:|--:|"
    slopes = {}
    for width, found in sorted(several.items()):
        slopes[width], start = each(found, "cpu")
        wall, _ = each(found, "wall")
        peak = max(found, key=lambda row: int(row["layers"]))["peak"] / 1e9
        yield f"| {width} | {slopes[width]:.1f} | {wall:.1f} | {start:.1f} | {peak:.2f} |"
    if len(slopes) > 1:
        widths = list(slopes)
        law = exponent(widths, [slopes[w] for w in widths])
        last = exponent(widths[-2:], [slopes[w] for w in widths[-2:]])
        yield f"\nCPU seconds of a layer grow as width^{law:.2f}, over the two largest as width^{last:.2f}."
    for width, found in sorted(several.items()):
        if len(found) > 2:
            depths = [row["layers"] for row in found]
            start = each(found, "cpu")[1]
            law = exponent(depths, [row["cpu"] - start for row in found])
            memory = exponent(depths, [row["peak"] for row in found])
            yield f"At width {width}: CPU seconds beyond the start as depth^{law:.2f}, peak as depth^{memory:.2f}."
    if several:
        widest = max(several)
        cpu, wall = each(several[widest], "cpu"), each(several[widest], "wall")
        whole = [(slope * LAYERS + start) / 60 for slope, start in (cpu, wall)]
        yield (
            f"For {LAYERS} layers of width {widest} that makes {whole[0]:.0f} minutes of the processor, {whole[1]:.0f} "
            "by the clock."
        )


def versions() -> str:
    names = ("symfuse", "torch", "transformers", "safetensors", "scipy")
    packages = "; ".join(f"{name} {version(name)}" for name in names)
    return f"cores {os.cpu_count()}; load {os.getloadavg()}; platform {platform.platform()}; {packages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small ones, for a test")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = []
    print(versions(), "\n")
    for shape, kind, options in cases(quick=chosen.quick):
        rows.append(measure(chosen.work, shape, kind, options))
        if chosen.json:
            chosen.json.write_text(json.dumps({"versions": versions(), "rows": rows}, indent=2))
    print("\n".join([*table(rows), "", *growth(rows)]))


def cases(*, quick: bool) -> Iterator[tuple[Shape, str, tuple[str, ...]]]:
    """Three depths at each of three widths, the widest first, and an independent pair."""
    widths = (512, 1024) if quick else (4096, 2560, 1536)
    base = Shape(widths[0], 1, **({"vocab": 500, "head": 32} if quick else {}))
    limit = ("--memory", "6GB")
    for width in widths:
        for layers in (1, 2, 4):
            yield replace(base, width=width, layers=layers), "planted", limit
    yield replace(base, width=widths[0], layers=1), "independent", limit


if __name__ == "__main__":
    main()

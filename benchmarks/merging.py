"""How long merging takes and how much memory, beside mergekit and beside plain reading and writing, in the same run.

    python benchmarks/merging.py [--quick] [--warm] [--rounds 3] [--work FOLDER] [--json results.json]

Makes a base model and two fine-tunes of it (bfloat16, sharded, over 1 GB each) in the work folder, once. All that is
timed is a process of its own, started afresh. Prints Markdown tables; what they say: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from _timing import median
from safetensors.torch import save_file
from torch import Tensor

BIN = Path(sys.executable).parent
SHARD = 400 * 10**6
SLOW = 60.0  # seconds; what takes longer is run once


@dataclass(frozen=True)
class Shape:
    """Of a Llama. Its largest tensor is the embedding."""

    hidden: int = 2048
    ffn: int = 5632
    layers: int = 10
    heads: int = 32
    kv_heads: int = 4
    vocab: int = 32000

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip

    def shapes(self) -> dict[str, tuple[int, ...]]:
        keys = self.hidden // self.heads * self.kv_heads
        square, narrow = (self.hidden, self.hidden), (keys, self.hidden)
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            out |= {at + f"self_attn.{part}_proj.weight": narrow if part in "kv" else square for part in "qkvo"}
            out |= {at + f"mlp.{part}_proj.weight": (self.ffn, self.hidden) for part in ("gate", "up")}
            out[at + "mlp.down_proj.weight"] = (self.hidden, self.ffn)
            out |= {at + f"{part}_layernorm.weight": (self.hidden,) for part in ("input", "post_attention")}
        return out | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return 2 * self.vocab * self.hidden


FULL = Shape()
QUICK = Shape(hidden=256, ffn=704, layers=4, heads=8, kv_heads=2, vocab=2000)
# As many bytes in 150 tensors as in 1,500, and hardly any: what is left of a merge's time is bookkeeping.
FEW = Shape(hidden=64, ffn=176, layers=16, heads=4, kv_heads=2, vocab=256)
MANY = Shape(hidden=20, ffn=56, layers=166, heads=2, kv_heads=1, vocab=256)
LEAST = Shape(hidden=64, ffn=176, layers=1, heads=4, kv_heads=2, vocab=256)


def make(folder: Path, shape: Shape) -> dict[str, Path]:
    """base, a and b in the folder, unless they are there: the base N(0, 0.02); a and b with small changes to half of
    its entries, rounded to bfloat16."""
    models = {name: folder / name for name in ("base", "a", "b")}
    wanted = json.dumps(asdict(shape))
    done = folder / "shape.json"
    if done.is_file() and done.read_text() == wanted:
        return models
    shutil.rmtree(folder, ignore_errors=True)
    for number, (name, path) in enumerate(models.items()):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(shape.config(), indent=2))
        _save(path, shape, number if name != "base" else None)
    done.write_text(wanted)
    return models


def _save(path: Path, shape: Shape, seed: int | None) -> None:
    """Shards with an index, as checkpoints of this size have them."""
    shards: list[dict[str, Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    size = total = 0

    def flush() -> None:
        file = path / f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shards[-1], file.name))
        with file.open("rb") as written:
            os.fsync(written.fileno())  # what is not on the disk stays in the cache
        shards[-1] = {}

    for number, (name, dims) in enumerate(shape.shapes().items()):
        values = torch.randn(dims, generator=torch.Generator().manual_seed(number)) * 0.02
        if "norm" in name:
            values += 1
        if seed is not None:
            rng = torch.Generator().manual_seed(10**6 * seed + number)
            change = torch.randn(dims, generator=rng) * 0.002
            values += change * (torch.rand(dims, generator=rng) < 0.5)
        nbytes = 2 * values.numel()
        if size and size + nbytes > SHARD:
            flush()
            shards.append({})
            size = 0
        shards[-1][name] = values.bfloat16()
        size += nbytes
        total += nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def recipes(models: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """The same text for both tools."""
    names = {key: str(path) for key, path in models.items()}

    def each(**parameters: float) -> list[dict[str, Any]]:
        return [{"model": names[key], "parameters": parameters} for key in ("a", "b")]

    def about_base(method: str, **parameters: float) -> dict[str, Any]:
        return {"merge_method": method, "base_model": names["base"], "models": each(**parameters)}

    slerp = {"merge_method": "slerp", "base_model": names["a"], "models": [{"model": names["b"]}]}
    return {
        "linear": {"merge_method": "linear", "models": each(weight=0.5)},
        "slerp": slerp | {"parameters": {"t": 0.4}},
        "task_arithmetic": about_base("task_arithmetic", weight=0.5),
        "ties": about_base("ties", weight=0.5, density=0.5),
        "dare_ties": about_base("dare_ties", weight=0.5, density=0.5),
    }


INPUTS = {"linear": 2, "slerp": 2}  # the others read the base too


@dataclass(frozen=True)
class Run:
    """One process: seconds by the clock and of the processor (user and system), and its greatest resident set."""

    wall: float
    cpu: float
    peak: int


def run(command: Sequence[str | Path], *, one_thread: bool = False) -> Run:
    """Run to the end; RuntimeError with what it said last if it fails."""
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    env.pop("OMP_NUM_THREADS", None)
    if one_thread:
        env["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder) / "result", Path(folder) / "log"
        with said.open("wb") as log:
            child = [sys.executable, "-S", Path(__file__).with_name("_child.py"), result, *command]
            subprocess.run([str(part) for part in child], env=env, stdout=log, stderr=log, check=True)
        found = json.loads(result.read_text())
        if found["code"]:
            raise RuntimeError(f"{command} ended with {found['code']}:\n{said.read_text()[-2000:]}")
    return Run(found["wall"], found["cpu"], found["peak"])


def evict(folders: Sequence[Path]) -> None:
    """Drop the files from the page cache."""
    for path in (path for folder in folders for path in folder.iterdir()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def weight_files(models: Sequence[Path]) -> list[Path]:
    return sorted(path for model in models for path in model.glob("*.safetensors"))


Task = Callable[[], Run]


@dataclass(frozen=True)
class Bench:
    """A work folder, and whether inputs are dropped from the cache before each run."""

    work: Path
    cold: bool

    def task(self, command: Sequence[str | Path], inputs: Sequence[Path], *, one_thread: bool = False) -> Task:
        """OUT in a command is the output, which is removed at once."""

        def once() -> Run:
            out = self.work / "out"
            if self.cold:
                evict(inputs)
            try:
                return run([out if part == "OUT" else part for part in command], one_thread=one_thread)
            finally:
                shutil.rmtree(out, ignore_errors=True)
                out.unlink(missing_ok=True)

        return once

    def symfuse(
        self, recipe: Mapping[str, Any], inputs: Sequence[Path], *options: str, one_thread: bool = False
    ) -> Task:
        threads = ("--threads", "1") if one_thread else ()
        command = [BIN / "symfuse", "merge", self._write(recipe), "OUT", *options]
        # --threads is an option of the alignment as well, which a recipe may have
        return self.task([*command, *threads], inputs, one_thread=one_thread)

    def mergekit(self, recipe: Mapping[str, Any], inputs: Sequence[Path], *, one_thread: bool = False) -> Task:
        return self.task([BIN / "mergekit-yaml", self._write(recipe), "OUT"], inputs, one_thread=one_thread)

    def floor(self, inputs: Sequence[Path], *, direct: bool) -> Task:
        size = sum(path.stat().st_size for path in weight_files(inputs[:1]))
        script = Path(__file__).with_name("_floor.py")
        return self.task(
            [sys.executable, script, "direct" if direct else "buffered", "OUT", str(size), *weight_files(inputs)],
            inputs,
        )

    def _write(self, recipe: Mapping[str, Any]) -> Path:
        text = yaml.safe_dump(dict(recipe), sort_keys=False)
        path = self.work / f"{zlib.crc32(text.encode()):08x}.yml"
        path.write_text(text)
        return path


Runs = dict[str, list[Run]]


def interleave(tasks: Mapping[str, Task], rounds: int) -> Runs:
    """Every task once per round, in a new order; those that take longer than SLOW in the first round only."""
    runs: Runs = {name: [] for name in tasks}
    order = random.Random(0)
    for number in range(rounds):
        for name in order.sample(list(tasks), len(tasks)):
            if number == 0 or runs[name][0].wall < SLOW:
                runs[name].append(tasks[name]())
                print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return runs


def middle(runs: Sequence[Run]) -> Run:
    return Run(
        median([r.wall for r in runs]), median([r.cpu for r in runs]), max(r.peak for r in runs)
    )  # fmt: skip


# -- what is measured ------------------------------------------------------------------------------


def method_tasks(bench: Bench, models: Mapping[str, Path], *, peer: bool) -> dict[str, Task]:
    """ "tool, method, threads"; the floors by number of inputs."""
    tasks: dict[str, Task] = {}
    for count in (2, 3):
        inputs = [models[name] for name in ("a", "b", "base")[:count]]
        for direct in (False, True):
            tasks[f"floor, {count}, {'direct' if direct else 'buffered'}"] = bench.floor(inputs, direct=direct)
    for method, recipe in recipes(models).items():
        inputs = [models[name] for name in ("a", "b", "base")[: INPUTS.get(method, 3)]]
        for one in (True, False):
            threads = "1" if one else "all"
            tasks[f"symfuse, {method}, {threads}"] = bench.symfuse(recipe, inputs, one_thread=one)
            if peer:
                tasks[f"mergekit, {method}, {threads}"] = bench.mergekit(recipe, inputs, one_thread=one)
        if method == "linear":
            tasks[f"symfuse --no-direct, {method}, all"] = bench.symfuse(recipe, inputs, "--no-direct")
    return tasks


def methods_table(runs: Runs) -> Iterator[str]:
    yield (
        "| method | threads | CPU s: symfuse | mergekit | × | wall s: symfuse | mergekit | × | peak MB: symfuse "
        "| mergekit | symfuse wall × floor |\n|---|---|" + "--:|" * 9
    )
    for name in [name for name in runs if name.startswith("symfuse, ")]:
        _, method, threads = name.split(", ")
        ours, theirs = middle(runs[name]), runs.get(f"mergekit, {method}, {threads}")
        floor = middle(runs[f"floor, {INPUTS.get(method, 3)}, direct"]).wall
        peer = middle(theirs) if theirs else None
        cells = [
            *(f"{ours.cpu:.2f}", *_beside(peer and peer.cpu, ours.cpu)),
            *(f"{ours.wall:.2f}", *_beside(peer and peer.wall, ours.wall)),
            *(f"{ours.peak / 1e6:.0f}", "" if peer is None else f"{peer.peak / 1e6:.0f}"),
            f"{ours.wall / floor:.2f}",
        ]
        yield f"| {method} | {threads} | " + " | ".join(cells) + " |"


def _beside(theirs: float | None, ours: float) -> tuple[str, str]:
    return ("", "") if theirs is None else (f"{theirs:.2f}", f"{theirs / ours:.1f}")


def plain_table(runs: Runs) -> Iterator[str]:
    yield "| | runs | wall s | least to greatest | CPU s | least to greatest | peak MB |\n|---|--:|--:|--:|--:|--:|--:|"
    for name, found in runs.items():
        one = middle(found)
        wall, cpu = (_span([getattr(r, key) for r in found]) for key in ("wall", "cpu"))
        yield f"| {name} | {len(found)} | {one.wall:.2f} | {wall} | {one.cpu:.2f} | {cpu} | {one.peak / 1e6:.0f} |"


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def memory(bench: Bench, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Peak resident set of linear over models of several sizes, of 2 and 3 inputs."""
    rows = []
    for shape in shapes:
        models = make(bench.work / f"llama-{shape.hidden}-{shape.layers}", shape)
        for count in (2, 3):
            chosen = [models[name] for name in ("a", "b", "base")[:count]]
            recipe = {
                "merge_method": "linear",
                "models": [{"model": str(m), "parameters": {"weight": 1}} for m in chosen],
            }
            found = bench.symfuse(recipe, chosen)()
            size = sum(path.stat().st_size for path in weight_files(chosen[:1]))
            bound = (count + 2) * shape.largest + 400 * 10**6
            rows.append({"size": size, "models": count, "peak": found.peak, "bound": bound})
    return rows


def bookkeeping(bench: Bench, *, peer: bool, rounds: int) -> list[dict[str, Any]]:
    """Processor time of models of hardly any bytes, and of each tensor more than the next smaller one has.

    The least of all rounds: starting up takes ten times as long, and varies by as much as is looked for.
    """
    tools: dict[str, Callable[..., Task]] = {"symfuse": bench.symfuse} | ({"mergekit": bench.mergekit} if peer else {})
    shapes = {len(shape.shapes()): shape for shape in (LEAST, FEW, MANY)}
    tasks: dict[str, Task] = {}
    for count, shape in shapes.items():
        models = make(bench.work / f"tiny-{shape.layers}", shape)
        for tool, task in tools.items():
            tasks[f"{tool}, {count}"] = task(recipes(models)["linear"], [], one_thread=True)
    runs = interleave(tasks, rounds)
    rows = []
    for tool in tools:
        before: tuple[int, float] | None = None
        for count in shapes:
            seconds = min(found.cpu for found in runs[f"{tool}, {count}"])
            each = None if before is None else 1000 * (seconds - before[1]) / (count - before[0])
            rows.append({"tool": tool, "tensors": count, "cpu": seconds, "ms each": each})
            before = count, seconds
    return rows


def environment() -> dict[str, Any]:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    packages = {name: of(name) for name in ("symfuse", "mergekit", "torch", "safetensors", "transformers")}
    return {
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        **packages,
    }


def measure(bench: Bench, *, quick: bool, rounds: int) -> dict[str, Any]:
    """All sections, printed as they come, and their data."""
    peer = (BIN / "mergekit-yaml").exists()
    shape = QUICK if quick else FULL
    models = make(bench.work / f"llama-{shape.hidden}-{shape.layers}", shape)
    size = sum(path.stat().st_size for path in weight_files([models["a"]]))
    tensors = len(shape.shapes())
    cache = "dropped from the cache before each run" if bench.cold else "in the cache"
    print(f"Models of {size / 1e9:.2f} GB, {tensors} tensors, bfloat16, shards of 400 MB; inputs {cache}.\n")

    tools = {"symfuse": BIN / "symfuse"} | ({"mergekit": BIN / "mergekit-yaml"} if peer else {})
    help_runs = interleave({f"{tool} --help": bench.task([path, "--help"], []) for tool, path in tools.items()}, rounds)
    runs = interleave(method_tasks(bench, models, peer=peer), rounds)
    _print("Methods", methods_table(runs))
    _print("All rows", plain_table(help_runs | runs))

    sizes = [shape] if quick else [Shape(layers=1), Shape(layers=4), FULL]
    used = memory(bench, sizes)
    _print("Peak resident memory of linear", _memory_table(used))
    tiny = bookkeeping(bench, peer=peer, rounds=2 * rounds)
    _print("Bookkeeping", _bookkeeping_table(tiny))
    data = {name: [asdict(r) for r in found] for name, found in (help_runs | runs).items()}
    return {"bytes": size, "cold": bench.cold, "runs": data, "memory": used, "bookkeeping": tiny}


def _print(title: str, lines: Iterator[str]) -> None:
    print(f"### {title}\n\n" + "\n".join(lines) + "\n", flush=True)


def _memory_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| GB each | models | peak MB | bound MB: (k + 2) × largest tensor + 400 |\n|--:|--:|--:|--:|"
    for row in rows:
        yield f"| {row['size'] / 1e9:.2f} | {row['models']} | {row['peak'] / 1e6:.0f} | {row['bound'] / 1e6:.0f} |"


def _bookkeeping_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| tool | tensors | CPU s | ms for each tensor more |\n|---|--:|--:|--:|"
    for row in rows:
        each = "" if row["ms each"] is None else f"{row['ms each']:.2f}"
        yield f"| {row['tool']} | {row['tensors']} | {row['cpu']:.2f} | {each} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="models of a few MB: does it run?")
    parser.add_argument("--warm", action="store_true", help="leave the inputs in the page cache")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds, default 3")
    parser.add_argument("--work", type=Path, help="where models are made and kept; default: $SYMFUSE_CACHE/benchmarks")
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    args = parser.parse_args()
    cache = Path(os.environ.get("SYMFUSE_CACHE", Path.home() / ".cache" / "symfuse"))
    work = (args.work or cache / "benchmarks").absolute()
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < (10**9 if args.quick else 12 * 10**9):
        raise SystemExit(f"{work}: {free / 1e9:.1f} GB free, 12 are needed; choose another folder with --work")
    machine = environment()
    print("    python benchmarks/merging.py " + " ".join(["--quick"] * args.quick + ["--warm"] * args.warm) + "\n")
    print("; ".join(f"{key} {value}" for key, value in machine.items()) + "\n")
    data = measure(Bench(work, cold=not args.warm), quick=args.quick, rounds=args.rounds)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, **data}, indent=1))


if __name__ == "__main__":
    main()

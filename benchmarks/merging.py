"""Merging, from files to files."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from _harness import BIN, HERE, Benchmark, Call, Case, Goal, Plan, process
from _models import fresh, once, weights
from safetensors.torch import save_file
from torch import Tensor

SHARD = 400 * 10**6
COPY, CACHED = "plain reading and writing", "… through the page cache"
OURS, PEER = "symfuse", "mergekit"
LONG = ("ties", "dare_ties")  # of mergekit, minutes on large models


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

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
    def gigabytes(self) -> float:
        return float(f"{2 * sum(math.prod(dims) for dims in self.shapes().values()) / 1e9:.2g}")


# By what they weigh in bfloat16, about 0.1, 0.35 and 1.1 GB; and as many tensors as models of a hundred layers have,
# with hardly any bytes: what is left of a merge's time is bookkeeping.
SIZES = (
    Shape(hidden=512, ffn=1408, layers=8, heads=8, kv_heads=4),
    Shape(layers=1),
    Shape(),
)
LARGE = Shape(layers=34)  # 3.3 GB, of which starting a process is little
QUICK = tuple(Shape(hidden=128, ffn=352, layers=n, heads=4, kv_heads=2, vocab=1000) for n in (1, 2, 4))
MANY = Shape(hidden=20, ffn=56, layers=166, heads=2, kv_heads=1, vocab=256)


SEEDS = {"a": 1, "b": 2, "base": 0}
INPUTS = {"linear": 2, "slerp": 2}  # the others read the base too


def make(folder: Path, shape: Shape, method: str = "ties") -> dict[str, Path]:
    """a, b and, where a method looks at it, the base in the folder, unless they are there: the base N(0, 0.02); a and b
    with small changes to half of its entries, rounded to bfloat16."""
    names = list(SEEDS)[: INPUTS.get(method, 3)]
    return {name: fine_tune(folder, shape, name, SEEDS[name]) for name in names}


def fine_tune(folder: Path, shape: Shape, name: str, seed: int) -> Path:
    """One of them: the base itself with seed 0."""
    return once(folder / name, {**asdict(shape), "seed": seed}, partial(_save, shape=shape, seed=seed))


def _save(path: Path, shape: Shape, seed: int) -> None:
    """Shards with an index, as checkpoints of this size have them."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2))
    shards: list[dict[str, Tensor]] = [{}]
    weight_map: dict[str, str] = {}
    size = total = 0

    def flush() -> None:
        file = path / f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shards[-1], file.name))
        shards[-1] = {}

    for number, (name, dims) in enumerate(shape.shapes().items()):
        values = torch.randn(dims, generator=torch.Generator().manual_seed(number)) * 0.02
        if "norm" in name:
            values += 1
        if seed:
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


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """The same text for both tools, of models in the folder."""
    names = {name: str(folder / name) for name in SEEDS}

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


def rows(plan: Plan, shape: Shape, method: str, peer: bool, threads: int) -> dict[str, Call]:
    folder = plan.work / f"llama-{shape.hidden}-{shape.layers}"
    inputs = list(make(folder, shape, method).values())
    recipe = yaml.safe_dump(recipes(folder)[method], sort_keys=False)
    file = plan.work / f"{zlib.crc32(recipe.encode()):08x}.yml"
    file.write_text(recipe)
    out = plan.work / "out"

    def run(*command: str | Path) -> Call:
        return fresh(lambda: process(command, threads=threads), inputs, out)

    size = str(sum(path.stat().st_size for path in weights(inputs[:1])))

    def copy(how: str) -> Call:
        return run(sys.executable, "-S", HERE / "_copy.py", how, out, size, *weights(inputs))

    # --threads is an option of the alignment as well, which a recipe may have
    found = {COPY: copy("direct"), OURS: run(BIN / "symfuse", "merge", file, out, "--threads", str(threads))}
    if method == "linear":
        found[CACHED] = copy("buffered")
    if peer and (BIN / "mergekit-yaml").exists():
        found[PEER] = run(BIN / "mergekit-yaml", file, out)
    return found


def cases(plan: Plan) -> Iterator[Case]:
    shapes = QUICK if plan.quick else SIZES
    for shape in shapes:
        for method in ("linear", "slerp", "task_arithmetic", "ties", "dare_ties"):
            peer = shape == shapes[0] if plan.quick else shape != shapes[-1] or method not in LONG
            yield Case({"GB": shape.gigabytes}, {"method": method}, partial(rows, plan, shape, method, peer))
    if not plan.quick:
        yield Case({"GB": LARGE.gigabytes}, {"method": "linear"}, partial(rows, plan, LARGE, "linear", False))
    tensors = {"method": f"linear, {len(MANY.shapes())} small tensors"}
    yield Case({"GB": MANY.gigabytes}, tensors, partial(rows, plan, MANY, "linear", not plan.quick))


BENCHMARK = Benchmark(
    title="Merging",
    about="""`symfuse merge recipe.yml OUT` and `mergekit-yaml` with the same recipe, each as a process from start to
end: two Llamas in bfloat16, with their base for task vectors, in shards of 400 MB, dropped from the page cache before
each run. The floor reads the same files and writes and syncs as many bytes past the cache, with nothing but the
standard library. mergekit runs TIES and DARE-TIES only where that does not take minutes.""",
    cases=cases,
    ours=OURS,
    floor=COPY,
    peers=(PEER,),
    goals=(
        Goal(OURS, COPY, 1.15, by="wall", where={"method": "linear"}),
        *(Goal(PEER, OURS, 6, least=True, where={"method": method}) for method in LONG),
        *(
            Goal(PEER, OURS, 2, least=True, where={"method": method})
            for method in ("linear", "slerp", "task_arithmetic")
        ),
    ),
    warm=False,
)

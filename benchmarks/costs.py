"""What models of any size take: time, memory, disk and network, on one machine and on many, of what small ones took.

    python benchmarks/costs.py [--constants benchmarks/data/scale.json]

The work is read off the real declarations (which tensor is in which axis, which group solves it, `workspace`) of models
that are never made: only their names and shapes exist. The seconds are those that `scale.py` measured. Prints Markdown
tables; what they say, and what is measured, extrapolated and assumed: docs/scale.md.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from _harness import ABOVE, NUMBER, read_json
from torch import Tensor

from symfuse.groups import Conformal, Orthogonal
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.shards import parse_size, plan_shards
from symfuse.matching.problem import Problem, problem_of
from symfuse.merging.stream import PIECE
from symfuse.model import Model
from symfuse.recipes.check.facts import COPIES
from symfuse.stats.weights import workspace

DATA = Path(__file__).parent / "data" / "scale.json"
SHARD = "5GB"


@dataclass(frozen=True)
class Constants:
    """Measured by `scale.py`; seconds are of one core. floats, doubles: products of matrices, operations a second.
    svd: seconds for one matrix of 128 × 128. assigned: seconds for `units` units of independent networks, which grow as
    a power of them. matched: of what matching takes beside products and solvers, seconds for each byte of the tensors
    it looks at. moved: for each byte of a model that is moved and written. merged: for each byte that a method reads
    and writes. proved: for each weight of a layer, in three runs. began: until a verb begins. resident: bytes then."""

    floats: float
    doubles: float
    svd: float
    assigned: float
    units: int
    power: float
    matched: float
    moved: float
    merged: Mapping[str, float]
    proved: float
    began: float
    resident: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Constants:
        return cls(**{field.name: data[field.name] for field in fields(cls)})

    @classmethod
    def load(cls, place: str) -> Constants:
        """From a file of `scale.py`; a type for argparse."""
        return cls.of(read_json(place, {"constants": CONSTANTS})["constants"])


# As `read_json` checks them; by rates and units is divided.
CONSTANTS = dict.fromkeys((field.name for field in fields(Constants)), NUMBER) | {
    **dict.fromkeys(("floats", "doubles", "units"), ABOVE), "merged": {"linear": NUMBER, "ties": NUMBER},
}  # fmt: skip


# ---- models that are never made


@dataclass(frozen=True)
class Shape:
    """A model's config and its tensors in files. kind: of symfuse's declarations. experts: 0, each token passes through
    all of a layer. dense: layers without experts, first ones, of `wide` neurons."""

    kind: str
    width: int
    layers: int
    ffn: int
    heads: int
    narrow: int  # heads of keys and values
    vocab: int
    head: int = 128
    experts: int = 0
    dense: int = 0
    wide: int = 0

    def config(self) -> dict[str, Any]:
        classes = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
        found = {
            "architectures": [classes[self.kind]], "model_type": self.kind, "hidden_size": self.width,
            "intermediate_size": self.wide or self.ffn, "num_hidden_layers": self.layers, "hidden_act": "silu",
            "num_attention_heads": self.heads, "num_key_value_heads": self.narrow, "head_dim": self.head,
            "vocab_size": self.vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
            "tie_word_embeddings": False, "dtype": "bfloat16",
        }  # fmt: skip
        if self.kind == "mixtral":
            found |= {"num_local_experts": self.experts, "num_experts_per_tok": 2}
        if self.kind == "qwen3_moe":
            found |= {"num_experts": self.experts, "num_experts_per_tok": 8, "moe_intermediate_size": self.ffn}
            found |= {"mlp_only_layers": list(range(self.dense)), "decoder_sparse_step": 1}
        return found

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        rows, few, wide = self.heads * self.head, self.narrow * self.head, self.width
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, wide)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            shapes |= {f"{at}self_attn.{p}_proj.weight": (few if p in "kv" else rows, wide) for p in "qkv"}
            shapes[f"{at}self_attn.o_proj.weight"] = (wide, rows)
            if self.kind == "qwen3_moe":
                shapes |= {f"{at}self_attn.{p}_norm.weight": (self.head,) for p in "qk"}
            shapes |= self._feed_forward(at, i)
            shapes |= {f"{at}{p}_layernorm.weight": (wide,) for p in ("input", "post_attention")}
        shapes |= {"model.norm.weight": (wide,), "lm_head.weight": (self.vocab, wide)}
        return {name: TensorInfo(torch.bfloat16, dims) for name, dims in shapes.items()}

    def _feed_forward(self, at: str, layer: int) -> dict[str, tuple[int, ...]]:
        sparse = self.experts and layer >= self.dense
        block = f"{at}block_sparse_moe." if self.kind == "mixtral" else f"{at}mlp."
        pieces = ("w1", "w3", "w2") if self.kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        n = self.ffn if sparse or not self.wide else self.wide
        found: dict[str, tuple[int, ...]] = {f"{block}gate.weight": (self.experts, self.width)} if sparse else {}
        for place in [f"experts.{e}." for e in range(self.experts)] if sparse else [""]:
            for piece in pieces:
                down = piece == pieces[2]
                found[f"{block}{place}{piece}.weight"] = (self.width, n) if down else (n, self.width)
        return found


# Of published configs. The last has the sizes of DeepSeek-V3, in a family that symfuse has a declaration for: grouped
# heads in the place of latent attention, and no shared expert.
SHAPES = {
    "Llama 3 8B": Shape("llama", 4096, 32, 14336, 32, 8, 128256),
    "Llama 3 70B": Shape("llama", 8192, 80, 28672, 64, 8, 128256),
    "Llama 3 405B": Shape("llama", 16384, 126, 53248, 128, 8, 128256),
    "Mixtral 8x22B": Shape("mixtral", 6144, 56, 16384, 48, 8, 32000, experts=8),
    "256 experts, 670B": Shape("qwen3_moe", 7168, 61, 2048, 64, 8, 129280, experts=256, dense=3, wide=18432),
}


class Unmade(Mapping[str, Tensor]):
    """Tensors of which nothing but the shape is there."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos

    def __getitem__(self, name: str) -> Tensor:
        return torch.zeros((), dtype=self.infos[name].dtype).expand(self.infos[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


@cache
def declared(shape: Shape) -> tuple[Model, Problem]:
    """The model, and what `--axes attention,ffn` solves in it."""
    infos = shape.infos
    model = Model.of(Checkpoint(Unmade(infos), shape.config(), name=shape.kind, infos=infos))
    return model, problem_of(model, model, ("attention", "ffn"), None, scaling=True, frame=())


# ---- work


@dataclass(frozen=True)
class Task:
    """What one core does in one go: seconds, bytes in memory, bytes read and written."""

    seconds: float
    memory: int
    read: int
    written: int = 0


def matching(shape: Shape, c: Constants, related: bool) -> list[Task]:
    """A task for each axis of each layer. related: one is a fine-tune of the other, of whose units most can be read off
    their scores; else an assignment is to be solved."""
    model, problem = declared(shape)
    tasks = []
    for instance, group in problem.groups.items():
        n, batch = model.spec.axes[instance.axis].size, math.prod(model.spec.batch(instance.axis))
        numel = [_numel(model, name) for name in model.spec.movable[instance]]
        streams = group.streams(n) and batch == 1
        seconds = 2 * n * sum(numel) / (c.floats if streams else c.doubles) + 2 * 2 * sum(numel) * c.matched
        if isinstance(group, Orthogonal | Conformal):
            seconds += batch * c.svd * (n / 128) ** 3
        elif not related and n > 2:
            seconds += batch * c.assigned * (n / c.units) ** c.power
        tasks.append(Task(seconds, workspace(problem.source.spec, instance, group), 2 * 2 * sum(numel)))
    return tasks


def _numel(model: Model, name: str) -> int:
    return math.prod(model.spec.tensors[name].layout.shape(model.spec.sizes))


def moving(shape: Shape, c: Constants, files: bool) -> list[Task]:
    """A task for each tensor, or for each file. What is one tensor in memory, such as a stack of experts, is moved as a
    whole, as it is stored and in float32 before and after: by whoever writes some of it. What is in no layer stays."""
    whole: dict[str, list[TensorInfo]] = {}
    for name, info in shape.infos.items():
        whole.setdefault(_in_memory(name), []).append(info)

    def task(names: Collection[str], written: int) -> Task:
        numel = {name: sum(info.numel for info in whole[name]) for name in names}
        memory = max(n * (10 if ".layers." in name else 2) for name, n in numel.items())
        read = sum(info.nbytes for name in names for info in whole[name])
        return Task(c.moved * read, memory, read, written)

    if not files:
        return [task([name], sum(info.nbytes for info in pieces)) for name, pieces in whole.items()]
    return [task({*map(_in_memory, part)}, sum(info.nbytes for info in part.values())) for part in _files(shape)]


def _in_memory(name: str) -> str:
    """What a tensor of a file is part of."""
    stacks = {"w1": "in", "w3": "in", "gate_proj": "in", "up_proj": "in", "w2": "out", "down_proj": "out"}
    return re.sub(r"experts\.\d+\.(\w+)", lambda found: f"experts.{stacks[found[1]]}", name)


def merging(shape: Shape, c: Constants, method: str, models: int, files: bool) -> list[Task]:
    """A task for each tensor, or for each file; of which a method holds some blocks."""
    parts = [list(part.values()) for part in _files(shape)] if files else [[info] for info in shape.infos.values()]
    return [
        Task(c.merged[method] * (models + 1) * size, COPIES * PIECE * 4 * (models + 2), models * size, size)
        for size in (sum(info.nbytes for info in part) for part in parts)
    ]


def _files(shape: Shape) -> list[Mapping[str, TensorInfo]]:
    return list(plan_shards(shape.infos, parse_size(SHARD)).values())


def proof(shape: Shape, c: Constants) -> Task:
    """Layer by layer, in this process, whoever does the rest: of each layer the weights as read and as they run."""
    model, _ = declared(shape)
    inner = [sum(_numel(model, name) for name in names) for names in _by_layer(model)]
    return Task(c.proved * sum(inner), 2 * 8 * max(inner), 3 * 2 * sum(inner))


def _by_layer(model: Model) -> list[list[str]]:
    out: dict[str, list[str]] = {}
    for name in model.spec.tensors:
        numbers = [word for word in name.split(".") if word.isdigit()]
        if numbers:
            out.setdefault(numbers[0], []).append(name)
    return list(out.values())


# ---- machines


@dataclass(frozen=True)
class Cluster:
    """Machines alike. disk: bytes a second that one reads or writes, of its own disk, or over its network of the store
    that all share. store: that the store gives to all of them together."""

    machines: int
    cores: int
    memory: float
    disk: float = 1e9
    store: float = 10e9

    @property
    def bandwidth(self) -> float:
        return self.disk if self.machines == 1 else min(self.machines * self.disk, self.store)


@dataclass(frozen=True)
class Cost:
    """seconds: by the clock. busy: of processors. memory: of the fullest machine. limit: what keeps it from being
    quicker with more machines."""

    seconds: float
    busy: float
    memory: float
    read: int
    written: int
    limit: str


def spend(tasks: Sequence[Task], cluster: Cluster, c: Constants) -> Cost:
    """As executors do it: a task to the first free core of a machine that has the memory for it, one at least."""
    busy = sum(task.seconds for task in tasks)
    read, written = sum(task.read for task in tasks), sum(task.written for task in tasks)
    clock, peak, room = 0.0, 0.0, cluster.memory - c.resident
    short = False  # of memory, while there are cores
    running: list[tuple[float, int, int]] = []  # end, machine, memory
    free, used = [cluster.cores] * cluster.machines, [0.0] * cluster.machines
    for task in tasks:
        while True:
            able = [m for m in range(cluster.machines) if free[m] and (used[m] + task.memory <= room or not used[m])]
            if able:
                break
            short |= any(free)
            clock, machine, memory = heapq.heappop(running)
            free[machine] += 1
            used[machine] -= memory
        machine = max(able, key=lambda m: free[m])
        free[machine] -= 1
        used[machine] += task.memory
        peak = max(peak, used[machine])
        heapq.heappush(running, (clock + task.seconds, machine, task.memory))
    computed, moved = max((end for end, _, _ in running), default=0.0), (read + written) / cluster.bandwidth
    longest = max((task.seconds for task in tasks), default=0.0)
    limit = "longest task" if longest > 0.5 * computed else "memory" if short else "CPU"
    limit = "disk" if moved > computed else limit
    return Cost(max(computed, moved), busy, peak + c.resident, read, written, limit)


def alone(task: Task, cluster: Cluster, c: Constants) -> Cost:
    """What the process that was begun does itself."""
    one = replace(cluster, machines=1, cores=1)
    return replace(spend([task], one, c), limit="one process")


# ---- tables

MACHINES = (
    ("2 cores, 16 GB", Cluster(1, 2, 16e9)),
    ("16 cores, 128 GB", Cluster(1, 16, 128e9)),
    ("64 cores, 1 TB", Cluster(1, 64, 1024e9)),
    ("8 × 16 cores, 128 GB", Cluster(8, 16, 128e9)),
    ("32 × 64 cores, 1 TB", Cluster(32, 64, 1024e9)),
)


def jobs(shape: Shape, c: Constants, files: bool) -> dict[str, Task | list[Task]]:
    """Of each job the tasks, or the one that is done in this process. Threads of one machine take tensors, tasks of
    many take files."""
    return {
        "match, fine-tunes": matching(shape, c, related=True),
        "match, independent": matching(shape, c, related=False),
        "prove": proof(shape, c),
        "transform and write": moving(shape, c, files),
        "merge 2, linear": merging(shape, c, "linear", 2, files),
        "merge 3, TIES": merging(shape, c, "ties", 3, files),
    }


def price(work: Task | list[Task], cluster: Cluster, c: Constants) -> Cost:
    return spend(work, cluster, c) if isinstance(work, list) else alone(work, cluster, c)


def spoken(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def tables(c: Constants) -> Iterator[str]:
    yield "| model | weights | GB | files | independent tasks | memory of the largest, GB |\n|---|" + "--:|" * 5
    for name, shape in SHAPES.items():
        infos, tasks = shape.infos, matching(shape, c, related=True)
        size = sum(info.nbytes for info in infos.values())
        yield (
            f"| {name} | {sum(i.numel for i in infos.values()) / 1e9:.0f} · 10⁹ | {size / 1e9:.0f} | "
            f"{len(_files(shape))} | {len(tasks)} | {max(task.memory for task in tasks) / 1e9:.1f} |"
        )
    for name, shape in SHAPES.items():
        work = {files: jobs(shape, c, files) for files in (False, True)}
        found = {
            title: {job: price(tasks, cluster, c) for job, tasks in work[cluster.machines > 1].items()}
            for title, cluster in MACHINES
        }
        yield f"\n**{name}**\n"
        yield "| | core hours | GB read, written | " + " | ".join(found) + " |\n|---|" + "--:|" * (len(found) + 2)
        for job, cost in found[MACHINES[0][0]].items():
            cells = []
            for title, cluster in MACHINES:
                one = found[title][job]
                memory = f"{one.memory / 1e9:.0f} GB"
                memory = memory if one.memory <= cluster.memory else f"**{memory}**"
                cells.append(f"{spoken(one.seconds)}, {memory} ({one.limit})")
            gigabytes = f"{cost.read / 1e9:.0f}, {cost.written / 1e9:.0f}"
            yield f"| {job} | {cost.busy / 3600:.2g} | {gigabytes} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constants", type=Constants.load, default=str(DATA), help="a file of scale.py")
    print("\n".join(tables(parser.parse_args(arguments).constants)))


if __name__ == "__main__":
    main()

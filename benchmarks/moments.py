"""How long moments of activations take, against the forward passes alone: python benchmarks/moments.py [--rounds 7]

A BERT and a GPT-2 of 6 layers, 384 wide, without heads, of random weights: two of each are run on the same batches,
plainly and with the moments of all axes taken, in turns in the same run. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence

import torch
import transformers
from _timing import Task, interleave, median, ratio, spread
from torch import Tensor, nn

import symfuse
from symfuse.architectures import resolve
from symfuse.groups import Group
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import listen, moments_of
from symfuse.stats.places import Place, places

ROWS, LENGTH, BATCHES = 32, 64, 2
VOCABULARY = 1000
FORWARD = "forward passes"


def bert(layers: int, width: int) -> transformers.BertModel:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 32),
        intermediate_size=4 * width,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2(layers: int, width: int) -> transformers.GPT2Model:
    heads = max(1, width // 32)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=heads)
    return transformers.GPT2Model(config)


KINDS = {"BERT": bert, "GPT-2": gpt2}


def texts(count: int, rows: int, length: int) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (count, rows, length), generator=rng)
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def declared(module: nn.Module) -> tuple[Spec, dict[Instance, Group]]:
    """The declaration of a module, and the group of each of its axes, without scales as they are by default."""
    config = module.config.to_dict() | {"architectures": [type(module).__name__]}  # type: ignore[union-attr, operator]
    spec = resolve(config, list(module.state_dict()))
    found = ((instance, spec.axes[instance.axis].group) for instance in spec.movable)
    return spec, {instance: group.without_scaling() for instance, group in found if group is not None}


def tasks(modules: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Task]:
    """Of two models: plain runs, the Gram products alone of numbers that lie ready, and moments."""
    anchor, source = modules
    spec, groups = declared(anchor)
    where = places(spec, anchor, groups)
    wanted: list[Place] = list(dict.fromkeys(place for found in where.values() for place in found))
    positions = batches[0]["input_ids"].numel()
    ready = {p.layout.shape(spec.sizes)[0]: torch.randn(positions, p.layout.shape(spec.sizes)[0]) for p in wanted}

    def forward() -> None:
        with torch.inference_mode():
            for batch in batches:
                for module in modules:
                    module(**batch)

    def products() -> None:
        for _ in batches:
            for place in wanted:
                x = ready[place.layout.shape(spec.sizes)[0]]
                torch.mm(x.T, x)

    def moments() -> None:
        heard = listen(spec, anchor, source, batches, wanted)
        for instance, found in where.items():
            moments_of(spec, instance, {place: heard[place] for place in found}, groups[instance])

    return {
        FORWARD: forward,
        "Gram products alone": products,
        "forward passes with listening": lambda: listen(spec, anchor, source, batches, wanted),
        "moments of all axes": moments,
    }


def table(name: str, layers: int, width: int, batches: Sequence[Mapping[str, Tensor]], rounds: int) -> str:
    torch.manual_seed(0)
    modules = [KINDS[name](layers, width).eval() for _ in range(2)]
    times = interleave(tasks(modules, batches), rounds)
    lines = [f"| {name} | seconds | ± | × {FORWARD} | × {FORWARD}, CPU |", "|---|--:|--:|--:|--:|"]
    for task, wall in times.wall.items():
        ratios = [ratio(one, task, FORWARD) for one in (times.wall, times.cpu)]
        lines.append(f"| {task} | {median(wall):.3f} | {spread(wall):.0%} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, default 7")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = f"torch {torch.__version__}; transformers {transformers.__version__}; symfuse {symfuse.__version__}"
    print(f"cores {os.cpu_count()}; load {os.getloadavg()}; platform {platform.platform()}; {versions}")
    shape = f"{BATCHES} batches of {ROWS} texts of {LENGTH} tokens"
    print(f"{options.layers} layers, {options.width} wide; {shape}; {options.rounds} rounds\n")
    for name in KINDS:
        print(table(name, options.layers, options.width, texts(BATCHES, ROWS, LENGTH), options.rounds), flush=True)


if __name__ == "__main__":
    main()

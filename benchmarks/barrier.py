"""A barrier of 11 points against 11 plain evaluations of the model on the same batches: python benchmarks/barrier.py

The floor is the task called 11 times on one live module; the barrier also forms the weights of every point from two
files, after it has opened them and built the module. Peaks are of processes of their own, each with one model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _timing
import torch

import symfuse
from symfuse.evaluate import Task, make_task, measure, read_records

POINTS = 11
HERE = Path(__file__).parent


def bert(folder: Path, layers: int, width: int, seed: int) -> Path:
    """A BERT of random weights with a tokenizer of whole words, as a folder."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(30000))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)
    return folder


def words(count: int, length: int) -> list[dict[str, str]]:
    rng = torch.Generator().manual_seed(0)
    draws = torch.randint(0, 30000, (count, length), generator=rng).tolist()
    return [{"text": " ".join(f"w{i}" for i in row)} for row in draws]


def task(folder: Path, texts: int) -> Task:
    return make_task("masked-lm", read_records(words(texts, 64)), symfuse.open(folder), batch_size=16)


def peak(kind: str, a: Path, b: Path, texts: int) -> float:
    """MB of a process that does one thing."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--child", kind, str(a), str(b), str(texts)]
        subprocess.run([sys.executable, str(HERE / "_child.py"), str(result), *command], check=True)
        return float(json.loads(result.read_text())["peak"]) / 1e6


def child(kind: str, a: str, b: str, texts: str) -> None:
    torch.set_num_threads(1)
    loss = task(Path(b), int(texts))
    if kind == "plain":
        measure(loss, symfuse.to_module(b))
    else:
        symfuse.barrier(a, b, loss, points=3, refine=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for label, layers, width in (("BERT 6 x 384", 6, 384), ("BERT-base", 12, 768)):
        with tempfile.TemporaryDirectory() as root:
            a, b = (bert(Path(root) / name, layers, width, seed) for seed, name in enumerate("ab"))
            loss = task(b, options.texts)
            module = symfuse.to_module(b)

            def plain(loss: Task = loss, module: torch.nn.Module = module) -> None:
                for _ in range(POINTS):
                    measure(loss, module)

            def path(a: Path = a, b: Path = b, loss: Task = loss) -> None:
                symfuse.barrier(a, b, loss, points=POINTS, refine=0)

            times = _timing.interleave({"plain": plain, "barrier": path}, options.rounds)
            del module
            rows.append(
                {
                    "model": label,
                    "plain": _timing.median(times.wall["plain"]),
                    "barrier": _timing.median(times.wall["barrier"]),
                    "ratio": _timing.ratio(times.wall, "barrier", "plain"),
                    "cpu ratio": _timing.ratio(times.cpu, "barrier", "plain"),
                    "peak plain": peak("plain", a, b, options.texts),
                    "peak barrier": peak("barrier", a, b, options.texts),
                }
            )
    print(f"{options.texts} texts of 64 tokens, one thread, {options.rounds} rounds, torch {torch.__version__}\n")
    print("| model | 11 evaluations | barrier of 11 points | ratio | by CPU | peak, one evaluation | peak, barrier |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['model']} | {r['plain']:.1f} s | {r['barrier']:.1f} s | {r['ratio']:.3f} | {r['cpu ratio']:.3f} "
            f"| {r['peak plain']:.0f} MB | {r['peak barrier']:.0f} MB |"
        )


if __name__ == "__main__":
    main()

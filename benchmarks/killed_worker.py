"""Models of the shape of RoBERTa-base, aligned and merged on a Ray cluster of three processes of this machine, of
which one is killed (SIGKILL) while it matches, and another while it writes; and the same by threads.
docs/distributed.md shows what it printed.

    python benchmarks/killed_worker.py [FOLDER] [--layers 12] [--width 768] [--words 50265]
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from _models import random_model, roberta

import symfuse
from symfuse.executors import Executor, Ray

AFTER = 4  # so many items of a stage, the process that finished the last is killed
LATER = 0.2  # seconds, when it has its next


class Killing:
    """Prints what is finished, and kills one process in each stage."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.finished = 0

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.start:6.1f} s  {text}", flush=True)

    def stage(self, name: str) -> None:
        self.finished = 0
        self.say(f"-- {name}")

    def follow(self, text: str) -> None:
        self.say(text)
        self.finished += 1
        if self.finished == AFTER:
            threading.Timer(LATER, self.kill, [int(text.rpartition(" ")[2])]).start()

    def kill(self, process: int) -> None:
        self.say(f"** kill -9 {process}")
        os.kill(process, signal.SIGKILL)


def job(models: tuple[Path, Path], out: Path, executor: Executor | None, stage: Killing) -> None:
    """Align the first to the second, and merge them."""
    a, b = map(symfuse.open, models)
    stage.stage("matching attention and feed-forward")
    alignment = symfuse.match(a, to=b, axes=("attention", "ffn"), executor=executor)
    stage.stage("writing the merge, dare_ties")
    merged = symfuse.merge([b, alignment(a), b], method="dare_ties", base=0, parameters={"density": 0.5})
    merged.save(out, max_shard_size="50MB", extra={"alignment.symfuse": alignment.to_bytes()}, executor=executor)
    stage.say("done")


def run(folder: Path, layers: int, width: int, words: int) -> None:
    config = roberta(width, layers, words, 514)
    models = folder / "a", folder / "b"
    for seed, model in enumerate(models):
        random_model(config, seed).checkpoint.save(model)
    print("threads of this process:")
    job(models, folder / "threads", None, Killing())
    print("\nthree processes of a Ray cluster:")
    killing = Killing()
    with Ray(workers=3, say=killing.say, follow=killing.follow) as ray:
        ray.connect()
        killing.say("the cluster is there")
        job(models, folder / "ray", ray, killing)
        print(f"\n{ray.summary()}")
    same = [(folder / "ray" / path.name).read_bytes() == path.read_bytes() for path in (folder / "threads").iterdir()]
    print(f"{len(same)} files, of which {sum(same)} are the same bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--words", type=int, default=50265)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run(given.folder or Path(scratch), given.layers, given.width, given.words)


if __name__ == "__main__":
    main()

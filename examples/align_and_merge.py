"""Two small BERTs, one moved far away without changing what it computes; found again, merged, loaded. A few seconds.

python examples/align_and_merge.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

import symfuse
from symfuse.alignment import random_alignment


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=80
    )
    BertModel(config).save_pretrained(folder / "a")

    a = symfuse.open(folder / "a")
    far_away = random_alignment(symfuse.declare(a), seed=1, axes=("qk", "v", "ffn"))
    b = symfuse.open(far_away(a).save(folder / "b"))
    print(f"b is a in another basis: distance {symfuse.relate(b, a).distance.relative:.2f} of the norm,", end=" ")
    print(f"outputs differ by {symfuse.verify(a, b).worst:.0e}")

    alignment = symfuse.match(b, to=a)
    moved = alignment(b)
    print(f"aligned: distance {symfuse.relate(moved, a).distance.relative:.0e}")

    symfuse.merge([b, a]).save(folder / "plain")
    symfuse.merge([moved, alignment.in_frame(a)]).save(folder / "merged")
    for name in ("plain", "merged"):
        change = symfuse.verify(a, folder / name).worst
        loaded = type(AutoModel.from_pretrained(folder / name)).__name__
        print(f"{name} average, a {loaded}: outputs differ from a's by {change:.0e}")

    alignment.save(folder / "alignment.safetensors")
    back = symfuse.Alignment.load(folder / "alignment.safetensors").inverse()
    print(f"and back: {symfuse.relate(back(moved), b).distance.relative:.0e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))

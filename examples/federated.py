"""Federated averaging of clients that begin with different seeds: with and without matching. A minute on two cores.

python examples/federated.py [FOLDER] [--quick] [--seed N]

Four clients have handwritten digits of their own (scikit-learn's), mostly of some classes each. In every round each
client trains the server's model on its data (in the first round a model of its own), and the server's new model is the
average, weighted by the number of images (McMahan et al. 2017, algorithm 1). Three ways: the first models are from
different seeds and are averaged as they are; they are first aligned to client 0's by their symmetries
(`symfuse.align`); they are all from one seed, which is what federated learning usually asks for.

What it shows (docs/federated.md has figures of three seeds): matching gives the server a better model in the first two
rounds, as the clients' bases differ. After one round all clients have the server's basis: averaging as they are catches
up by the fourth round, and in the fifth is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import symfuse

CONFIG = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8,
    "patch_size": 2, "num_channels": 1, "num_labels": 10, "hidden_dropout_prob": 0.0,
}  # fmt: skip
CLIENTS, BATCH, RATE = 4, 32, 3e-3
STEPS, QUICK = (150, 40, 40, 40, 40), (3, 2)  # of a client, by round
MIXED = 1.0  # the clients' classes are drawn from a Dirichlet distribution with this parameter (Hsu et al. 2019)
TEST, PUBLIC = 500, 200  # images: held out; and without labels, known to the server, for activations to be matched on

Data = tuple[Tensor, Tensor]


def digits(seed: int) -> tuple[list[Data], Tensor, Data]:
    """The data of each client, public images, and the held-out test data: images [N, 1, 8, 8] and labels [N]."""
    rng = np.random.default_rng(seed)
    found = load_digits()
    order = rng.permutation(len(found.target))
    images = torch.tensor(found.images[order] / 8 - 1, dtype=torch.float32)[:, None]
    labels = torch.tensor(found.target[order])
    own = np.arange(TEST + PUBLIC, len(labels))
    shares = rng.dirichlet([MIXED] * CLIENTS, size=10).cumsum(1)
    parts: list[list[int]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        of = own[labels[own].numpy() == label]
        for part, rows in zip(parts, np.split(of, (shares[label, :-1] * len(of)).astype(int)), strict=True):
            part += rows.tolist()
    public = images[TEST : TEST + PUBLIC]
    return [(images[part], labels[part]) for part in parts], public, (images[:TEST], labels[:TEST])


def fresh(seed: int) -> symfuse.Checkpoint:
    torch.manual_seed(seed)
    return symfuse.open(ViTForImageClassification(ViTConfig(**CONFIG)))


def trained(model: symfuse.Checkpoint, data: Data, steps: int, seed: int) -> symfuse.Checkpoint:
    """The model after so many steps of Adam on a client's data."""
    module = symfuse.to_module(model).train()
    adam = torch.optim.Adam(module.parameters(), lr=RATE)
    torch.manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (BATCH,))
        loss = module(pixel_values=data[0][rows], labels=data[1][rows]).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
    return symfuse.open(module.eval())


@torch.no_grad()
def accuracy(model: symfuse.Checkpoint, data: Data) -> float:
    logits = symfuse.to_module(model)(pixel_values=data[0]).logits
    return (logits.argmax(-1) == data[1]).float().mean().item()


def rounds(way: str, steps: Sequence[int], seed: int) -> Iterator[float]:
    """The server's accuracy on the test data after each round. steps: of each client, by round."""
    clients, public, test = digits(seed)
    samples = [len(labels) for _, labels in clients]
    models = [fresh(1000 * seed + (0 if way == "one seed" else i)) for i in range(CLIENTS)]
    server = None
    for number, count in enumerate(steps):
        models = [trained(models[i], clients[i], count, 100 * number + i) for i in range(CLIENTS)]
        if way == "matched":
            anchor = models[0] if server is None else server
            models = list(symfuse.align([anchor, *models], 0, data=[{"pixel_values": public}]).checkpoints[1:])
        server = symfuse.merge(models, method="fedavg", parameters={"samples": samples})
        yield accuracy(server, test)
        models = [server] * CLIENTS


WAYS = ("not matched", "matched", "one seed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = QUICK if options.quick else STEPS
    found = {way: list(rounds(way, steps, options.seed)) for way in WAYS}
    print("round  " + "  ".join(f"{way:>11}" for way in WAYS))
    for number in range(len(steps)):
        print(f"{number + 1:>5}  " + "  ".join(f"{found[way][number]:>11.3f}" for way in WAYS))


if __name__ == "__main__":
    main()

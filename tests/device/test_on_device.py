"""Everything that takes a device, on a pretended one (`device.pretend`): the same numbers as on the processor, bit for
bit, from tensors that are never mixed, and results that are back on the processor.

What memory a tensor lies in decides bits too (24 bytes into a file or 64 bytes aligned): models are in memory here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from command import done
from contract.tiny import MODELS
from device import pretend
from device.pretend import CUDA, DeviceError, Moves, on_both, pretended
from matching.learned import learning_cases
from methods.guided_cases import write
from methods.test_devices import merged
from methods.tuned import classifier, data, near
from rewriting.kit import ALL, SCALED
from symfuse import api
from symfuse.alignment import Alignment
from symfuse.groups import GROUPS, Element, Moments, PartMoments, Permutation, compose, objective, scaled
from symfuse.io import Checkpoint
from symfuse.matching.learned import Learning
from symfuse.merging import Source, Stream
from symfuse.methods import METHODS
from symfuse.model import Model
from symfuse.stats import weight_moments


@cache
def pair(label: str) -> tuple[Checkpoint, Checkpoint]:
    return MODELS[label](0).replace(name="a"), MODELS[label](1).replace(name="b")


def values(tensors: Any) -> dict[str, bytes]:
    """The bits of tensors, which must be of the processor."""
    assert all(type(tensors[name]) is Tensor for name in tensors)
    return {name: tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in tensors}


def alike(alignment: Callable[[str], Alignment]) -> Moves:
    """An alignment is the same on both; what was copied for it."""
    plain, there, moves = on_both(alignment)
    assert plain.elements
    for element in there.elements.values():
        values(element.tensors())
    values(there.shifts)
    assert there.to_bytes() == plain.to_bytes()
    assert moves.there
    return moves


SLOW = pytest.mark.slow


def fast(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Cases as parameters of a test, of which some are no slow test."""
    return [pytest.param(one, marks=() if one in names else SLOW) for one in cases]


# ---- matching

# One of each kind of layout and frame: with the axes, and how many starts where axes meet (the third is random).
MATCHED = [
    ("mixtral-lm", "experts,ffn", 1),
    *(pytest.param(*one, marks=SLOW) for one in (
        ("llama-lm", "heads,attention", 1),
        ("bert-mlm", "all", 3), ("gpt2-lm", "all", 1), ("dinov2-gated", "all", 1), ("qwen3-lm", "heads,attention", 1),
        ("falcon-grouped", "attention,ffn", 1), ("t5-lm", "attention,ffn", 1), ("siglip", "attention,ffn", 1),
        ("beit-shared", "attention,ffn", 1), ("clip", "attention,ffn", 1),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("label", "axes", "starts"), MATCHED)
def test_models_are_matched_there(label: str, axes: str, starts: int) -> None:
    a, b = pair(label)
    alike(lambda device: api.match(a, b, axes=axes, starts=starts, device=device))


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_every_group_solves_and_acts_there(name: str) -> None:
    group, rng = GROUPS[name], torch.Generator().manual_seed(0)
    n = group.size or 6
    x, y = (torch.randn(3, n, 11, generator=rng, dtype=torch.float64) for _ in range(2))
    own = (x @ x.mT, y @ y.mT) if group.gram else (x.square().sum(-1), y.square().sum(-1))
    given, other = Moments(x @ y.mT, *own), group.random(n, (3,), rng)
    plain_too = {"permutation", "signed", "monomial", "signed-monomial"}  # those that gates feel

    def found(device: str) -> dict[str, bytes]:
        m, w = given.to(device), x.to(device)
        parts: PartMoments = {"primal": m, "dual": m} | ({"plain": m} if name in plain_too else {})
        best, g = group.best(parts), other.to(device)
        assert all(group.contains(one, 1e-6) for one in (best, g))
        assert not g.is_identity()
        out = {
            "best": best.to_dense(), "alone": group.best({"dual": m}).act(w, 1), "acts": (g @ best).dual().act(w, 1),
            "inverse": compose(g.inverse(), g).act(w, 1), "objective": objective(g, parts), "inner": g.inner(m.xy),
            "condition": g.condition(), "worth": group.reach(m.xy, m.xy if "plain" in parts else None),
        }  # fmt: skip
        if shapes := group.tangent(n):
            near = group.near({key: torch.full((3, *shape), 0.1, device=w.device) for key, shape in shapes.items()})
            out["near"] = near.act(w, 1)
        assert all(t.device == w.device for t in out.values())
        return values({key: t.cpu() for key, t in out.items()})

    plain, there, _ = on_both(found)
    assert plain == there


GROUPS_OF = [{"qk": "invertible", "v": "orthogonal"}, {"ffn": "sinkhorn"}, {"qk": "signed", "v": "monomial"}]


@pytest.mark.parametrize("groups", fast(GROUPS_OF, GROUPS_OF[0]))
def test_with_every_kind_of_group(groups: dict[str, str]) -> None:
    a, b = pair("bert-mlm")
    alike(lambda device: api.match(a, b, axes=tuple(groups), groups=groups, device=device))


def test_with_rescaled_and_signed_units() -> None:
    a, b = pair("torch-relu-post")
    alike(lambda device: api.match(a, b, axes="ffn", device=device))
    a, b = pair("llama-lm")
    alike(lambda device: api.match(a, b, axes="ffn", device=device))


def test_wide_layers_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "LARGE", 8)
    a, b = pair("torch-relu-post")
    alike(lambda device: api.match(a, b, axes="ffn", device=device))


def test_each_weight_is_taken_there_once_and_only_scores_come_back() -> None:
    a, b = pair("torch-relu-post")
    taken: list[str] = []

    def read(model: Model, name: str) -> Tensor:
        taken.append(name)
        return model.scanned(name)

    with pretended() as device:
        theirs, ours = (Model.of(model).on("cuda") for model in (b, a))
        instance = next(i for i in ours.spec.movable if i.axis == "ffn")
        reads = (partial(read, theirs), partial(read, ours))
        moments = weight_moments(ours.spec, instance, *reads, Permutation())
        assert taken == [name for name in ours.spec.movable[instance] for _ in reads]
        assert not device.moves.back
        found = Permutation().best(moments)
        assert found.device == CUDA
        assert max(device.moves.back) == found.size**2


@pytest.mark.parametrize("options", fast([{}, {"kind": "covariance"}, {"residual": "weighted-scalar"}], {}))
def test_activations_are_heard_there(options: dict[str, Any]) -> None:
    a, b = pair("bert-mlm")
    rng = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(61, (3, 9), generator=rng), "attention_mask": torch.ones(3, 9).long()}]
    batches[0]["attention_mask"][0, 5:] = 0
    alike(lambda device: api.match(a, b, data=batches, without=[2, 3], device=device, **{"axes": "all"} | options))


@SLOW
def test_many_models_and_their_mean() -> None:
    a, b = pair("bert-mlm")
    models = [a, b, MODELS["bert-mlm"](2)]

    def aligned(anchor: Any, device: str) -> list[bytes]:
        found = api.align(models, anchor, axes="ffn", device=device)
        return [g.to_bytes() for g in found.alignments if g is not None]

    for anchor in ("universe", None):
        plain, there, _ = on_both(lambda device, anchor=anchor: aligned(anchor, device))
        assert plain == there


@SLOW
@pytest.mark.parametrize("permutations", ["kept", "straight-through"])
def test_a_matching_is_learned_there(permutations: str) -> None:
    source, anchor, task = learning_cases.model("bert", 1), learning_cases.model("bert"), learning_cases.task("bert")

    def learned(device: str) -> Alignment:
        own = Learning(task, steps=2, every=1, points=3, permutations=permutations, device=device)
        return api.match(source, anchor, axes="attention", learn=own, device=device)

    moves = alike(learned)
    assert len(moves.there) > 100  # the weights of both models, and batches


# ---- moving and merging


def test_models_are_moved_where_they_are_read_to_and_written_from_there(tmp_path: Path) -> None:
    a, b = pair("bert-mlm")
    alignment = api.match(a, b, axes="all")

    def written(device: str) -> bytes:
        folder = alignment(a.on(device)).save(tmp_path / device)
        return (folder / "model.safetensors").read_bytes()

    plain, there, moves = on_both(written)
    assert plain == there
    assert len(moves.there) >= len(a)
    g, h, _ = on_both(lambda device: api.relate(alignment(a.on(device)), b.on(device)).distance.pieces)
    assert g == h


REWRITES: dict[str, tuple[str, ...]] = {
    "gpt2-sequence": ALL, "dinov2-classification": SCALED, "torch-relu-post": ("balance",), "llama-lm": ("balance",),
}  # fmt: skip


@pytest.mark.parametrize("label", fast(REWRITES, "gpt2-sequence"))
def test_a_frame_is_computed_there(label: str) -> None:
    model = pair(label)[0]
    if label == "gpt2-sequence":  # of which a head makes up for gains of zero, by least squares
        gain = model["transformer.ln_f.weight"].clone()
        gain[[3, 7]] = 0
        model = model.replace(tensors={**model, "transformer.ln_f.weight": gain})
    alignment = Alignment(Model.of(model).spec, {}, frame=REWRITES[label])
    plain, there, _ = on_both(
        lambda device: values({name: t.cpu() for name, t in alignment.in_frame(model.on(device)).items()})
    )
    assert plain == there
    assert any(plain[name] != one for name, one in values(model).items())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_merges_there(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        plain, there, _ = on_both(lambda device, dtype=dtype: merged(name, device, dtype))
        assert type(there) is Tensor
        assert torch.equal(plain, there)


@pytest.mark.parametrize("method", fast(["linear", "ties"], "linear"))
def test_moved_models_are_merged_there(method: str, tmp_path: Path) -> None:
    a, b = pair("bert-mlm")
    alignment = api.match(a, b, axes="attention,ffn")
    given: dict[str, Any] = {"linear": {"weights": [0.3, 0.7]}, "ties": {"base": 1}}[method]

    def written(device: str) -> bytes:
        models = [alignment(a.on(device)), b, *([MODELS["bert-mlm"](2)] if method == "ties" else [])]
        merge = api.merge(models, method=method, device=device, **given)
        assert type(merge[next(iter(merge))]) is Tensor  # however it is read
        return (merge.save(tmp_path / device) / "model.safetensors").read_bytes()

    plain, there, _ = on_both(written)
    assert plain == there


def test_each_block_goes_there_once_and_comes_back_once() -> None:
    tensors = [torch.randn(7, 5) for _ in range(2)]
    with pretended() as device:
        stream = Stream("w", (7, 5), [Source.of(t) for t in tensors], block=10, device="cuda")
        out = torch.cat(list(stream.fetched(METHODS["linear"](stream, {"weight": [0.5, 0.5], "normalize": True}))))
    assert device.moves.there == [10, 10] * 3 + [5, 5]
    assert device.moves.back == [10, 10, 10, 5]
    torch.testing.assert_close(out, torch.stack(tensors).mean(0))


def test_the_next_block_is_on_its_way_while_one_is_used() -> None:
    """Read and sent before the arithmetic on the one before; fetched while the next is made."""
    said: list[str] = []
    tensor = torch.ones(3, 2)

    def read(start: int, stop: int) -> Tensor:
        said.append(f"read {start // 2}")
        return tensor.view(-1)[start:stop]

    def doubled(stream: Stream) -> Iterator[Tensor]:
        for block in stream:
            said.append(f"use {block.index}")
            yield 2 * block.tensors[0]

    with pretended():
        stream = Stream("w", (3, 2), [Source(read)], block=2, device="cuda")
        for number, block in enumerate(stream.fetched(doubled(stream))):
            said.append(f"got {number}")
            assert torch.equal(block, torch.full((1, 2), 2.0))
    assert said == ["read 0", "read 1", "use 0", "read 2", "use 1", "got 0", "use 2", "got 1", "got 2"]
    said.clear()
    here = Stream("w", (3, 2), [Source(read)], block=2)
    list(here.fetched(doubled(here)))
    assert said == ["read 0", "use 0", "read 1", "use 1", "read 2", "use 2"]  # nothing of it without a device


# ---- running models

TASKS: dict[str, Callable[[Sequence[Checkpoint], Any, str], Any]] = {
    "score": lambda m, t, device: api.evaluate(m[1], t, device=device).to_dict(),
    "ensemble": lambda m, t, device: api.evaluate(m, t, device=device).to_dict(),
    "barrier": lambda m, t, device: api.barrier(m[1], m[2], t, points=3, refine=0, device=device).to_dict(),
    "landscape": lambda m, t, device: api.landscape({c.name: c for c in m}, t, steps=2, device=device).to_dict(),
    "fisher": lambda m, t, device: values(api.collect(m[1], t, "fisher", device=device).tensors),
    "gram": lambda m, t, device: values(api.collect(m[1], t, "gram", device=device).tensors),
    "fisher merge": lambda m, t, device: values(api.merge(m[1:], method="fisher", data=t, device=device)),
    "regmean": lambda m, t, device: values(api.merge(m[1:], method="regmean", data=t, device=device)),
    "greedy soup": lambda m, t, device: values(api.merge(m[1:], method="greedy_soup", data=t, device=device)),
    "ot": lambda m, t, device: values(api.merge(m[1:], method="ot", data=t, device=device)),
    "adamerging": lambda m, t, device: values(
        api.merge(m, base=0, method="adamerging", data=t, device=device, parameters={"steps": 2})
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", fast(TASKS, "barrier", "gram", "adamerging"))
def test_models_are_run_there(what: str) -> None:
    base = classifier()
    models, task = [base, near(base, 0), near(base, 1)], data(base)
    plain, there, moves = on_both(lambda device: TASKS[what](models, task, device))
    assert plain == there
    assert moves.there


COMMANDS = {
    "align": ("align", "a", "--to", "b", "--axes", "attention"),
    "merge": ("merge", "a", "b", "--align", "ffn"),
    "collect": ("collect", "a", "--data", "a.csv", "--limit", "4"),
    "evaluate": ("evaluate", "a", "--data", "a.csv", "--limit", "4"),
    "barrier": ("barrier", "a", "b", "--data", "a.csv", "--limit", "4", "--points", "3", "--align", "ffn"),
    "distance": ("relate", "a", "b", "--axes", "ffn"),
}


@SLOW
def test_recipes_and_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same to rounding: read from files, tensors lie otherwise in memory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    recipe = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "align": {"axes": "attention"}}

    def merge(device: str) -> dict[str, Tensor]:
        return dict(api.merge_recipe(recipe, device=device))

    plain, there, moves = on_both(merge)
    assert moves.there
    torch.testing.assert_close(there, plain, rtol=1e-12, atol=1e-12)
    for name, command in COMMANDS.items():
        with pretended() as device:
            done(*command, "-o", name, "--device", "cuda:0")
        assert device.moves.there, name
    assert json.loads((tmp_path / "merge" / "symfuse.json").read_text("utf-8"))["merged"] == "0.5·a + 0.5·b"


# ---- what must fail


STRAY: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an identity": lambda patch: patch.setattr(Element, "to", lambda self, _device: self),
    "an index": lambda patch: patch.setattr(
        scaled, "identity_index", lambda n, batch, _device=None: torch.arange(n).expand(*batch, n)
    ),
    "a sum": lambda patch: patch.setattr(
        Tensor, "new_empty", lambda t, *shape, dtype=None: torch.empty(*shape, dtype=dtype or t.dtype)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", STRAY)
def test_a_kernel_with_a_stray_tensor_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made where nobody says: on the processor."""
    a, b = pair("bert-mlm")
    groups = {"v": "scaling", "qk": "orthogonal"}
    with pretended():
        api.match(a, b, axes="attention", groups=groups, device="cuda")
        STRAY[what](monkeypatch)
        with pytest.raises(DeviceError, match="is on the processor"):
            api.match(a, b, axes="attention", groups=groups, device="cuda")


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_transfers_that_nobody_waits_for_are_caught(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def transferred() -> None:
        stream = Stream("w", (4, 3), [Source.of(torch.ones(4, 3))], block=3, device="cuda")
        list(stream.fetched(block.tensors[0] + 1 for block in stream))

    with pretended():
        transferred()
        monkeypatch.setattr(pretend.Stream, forgotten, lambda *_: None)
        with pytest.raises(DeviceError, match="was not waited for"):
            transferred()


def test_a_method_that_overwrites_what_is_fetched_is_caught() -> None:
    """Its blocks are still on their way to the host while it makes the next ones."""
    with pretended():
        stream = Stream("w", (4, 3), [Source.of(torch.ones(4, 3))], block=3, device="cuda")
        kept = torch.zeros(1, 3, device="cuda")
        with pytest.raises(DeviceError, match="is overwritten, and another stream reads it"):
            list(stream.fetched(kept.copy_(block.tensors[0]) for block in stream))

"""Modules of one's own: a draft places what it has never seen by what reads what; once declared, no verb asks for a
config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import symfuse
from command import done, run
from contract.tiny import moving
from drafts.own import GPT, Nameless, TransformerWrapper, VisionTransformer
from symfuse.alignment import random_alignment
from symfuse.architectures import ARCHITECTURES, own
from symfuse.drafts import Draft
from symfuse.errors import CheckpointError, LayoutError, OptionError, SpecError, SymfuseError, VerificationError
from symfuse.model import Model
from symfuse.rewriting import canonical

IDS = torch.randint(0, 31, (3, 7), generator=torch.Generator().manual_seed(0))
INPUTS: dict[type[nn.Module], dict[str, Any]] = {Nameless: {"inputs": {"ids": IDS}}}
COMMON = {"v": "invertible", "h": "permutation"}
FOUND = {
    GPT: COMMON | {"qk": "invertible", "ffn": "permutation", "residual": "permutation"},
    VisionTransformer: COMMON | {"qk": "invertible", "ffn": "permutation", "residual": "permutation"},
    TransformerWrapper: {
        "v": "invertible", "c": "rotary", "kv": "permutation", "q": "permutation", "ffn": "signed-monomial",
        "residual": "signed",
    },
    Nameless: COMMON | {"qk": "invertible", "ffn": "monomial", "residual": "signed"},
}  # fmt: skip
# Of each an axis with the nearest larger group, which changes the outputs.
TOO_LARGE = [
    (GPT, "residual", "signed"), (GPT, "ffn", "signed"), (VisionTransformer, "residual", "signed"),
    (VisionTransformer, "ffn", "signed"), (TransformerWrapper, "c", "invertible"), (Nameless, "ffn", "signed"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _declarations() -> Iterator[None]:
    """What a test declares is undone."""
    before, configs = dict(ARCHITECTURES), dict(own._configs)
    yield
    ARCHITECTURES.clear()
    ARCHITECTURES.update(before)
    own._configs.clear()
    own._configs.update(configs)


def suggested(kind: type[nn.Module], seed: int = 0) -> tuple[nn.Module, Draft]:
    torch.manual_seed(seed)
    module = kind()
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return module, symfuse.suggest(module, **INPUTS.get(kind, {}))


def error_of(module: nn.Module, alignment: symfuse.Alignment, kind: type[nn.Module]) -> float:
    """The largest relative change of an output of the module, in float64."""
    wide = symfuse.open(module).to(torch.float64)
    inputs = INPUTS.get(kind, {}).get("inputs")
    return symfuse.verify(wide, alignment(wide), alignment, inputs=inputs).worst


@pytest.mark.parametrize("kind", FOUND)
def test_what_reads_what_is_traced(kind: type[nn.Module]) -> None:
    """Everything is placed, in the largest groups that hold; all of them at once change no output."""
    module, draft = suggested(kind)
    assert draft.verified
    assert not draft.unplaced
    groups = {axis: one.group.name for axis, one in draft.axes.items() if one.group is not None}
    assert groups == FOUND[kind]
    spec = symfuse.declare(module, draft)
    assert error_of(module, moving(spec, 5), kind) < 1e-13


def test_a_draft_is_shown_in_a_line() -> None:
    _, draft = suggested(GPT)
    assert repr(draft).startswith("Draft(GPT, verified: run as the real class with random weights, in float64, a group")
    assert len(repr(draft)) < 300


def test_a_live_module_with_a_config_of_its_own_is_brought_into_the_frame() -> None:
    """`in_frame` takes what the call takes: a module is opened by its declaration, whatever its `config` is."""
    (a, draft), (b, _) = suggested(GPT), suggested(GPT, 1)
    b.config = object()
    symfuse.declare(a, draft)
    alignment = symfuse.match(a, b)
    assert "fold_norms" in alignment.frame
    merged = symfuse.merge([alignment(a), alignment.in_frame(b)], weights=[0, 1])
    assert symfuse.verify(symfuse.open(b), merged, alignment).worst < 1e-5


@pytest.mark.parametrize("kind", FOUND)
def test_the_stream_is_rotated_once_the_norms_are_folded(kind: type[nn.Module]) -> None:
    module, draft = suggested(kind)
    symfuse.declare(module, draft)
    wide = symfuse.open(module).to(torch.float64)
    folded = canonical(Model.of(wide), ("untie", "fold_scales", "fold_norms", "centre"))
    rotation = random_alignment(folded.spec, 1, {"residual"}, largest=True)
    inputs = INPUTS.get(kind, {}).get("inputs")
    after = rotation.on(folded)
    assert symfuse.verify(wide, after, rotation, inputs=inputs, tolerance=1e-12).equal
    assert not after[last(draft)].equal(folded.read(last(draft).removeprefix(draft.prefix)))


def last(draft: Draft) -> str:
    """A weight that reads a norm, by its name in layer 0."""
    reader = next(iter(draft.reads.values()))[0]
    return draft.prefix + reader.format(l=0)


@pytest.mark.parametrize(("kind", "axis", "group"), TOO_LARGE)
def test_a_larger_group_changes_the_outputs(kind: type[nn.Module], axis: str, group: str) -> None:
    module, draft = suggested(kind)
    data = copy.deepcopy(draft.data)
    data["axes"][axis]["group"] = group
    try:
        spec = symfuse.declare(module, data)
        wrong = random_alignment(spec, 2, {axis})
    except SymfuseError:
        pytest.fail("the wrong declaration was refused before it was run")
    assert error_of(module, wrong, kind) > 1e-3


def test_no_verb_asks_for_a_config(tmp_path: Path) -> None:
    a, b = suggested(GPT)[0], suggested(GPT, 1)[0]
    with pytest.raises(OptionError, match=r"GPT has no config of its own, and is not declared: .*symfuse\.suggest"):
        symfuse.align([a, b])
    symfuse.declare(a, symfuse.suggest(a))
    ids = IDS.repeat(2, 1)
    task = symfuse.task("causal-lm", [{"idx": part, "labels": part} for part in ids.split(2)], a)
    learned = symfuse.match(a, to=b, axes=["qk", "v", "ffn"], learn=symfuse.Learning(task, steps=2))
    matched = symfuse.match(a, to=b, data=task)
    full = symfuse.match(a, to=b, axes="all")
    for alignment in (learned, matched, full):
        assert symfuse.prove(a, alignment).exact.worst < 1e-12
        assert symfuse.verify(a, alignment(a), alignment).equal
    before = symfuse.relate(a, b, full).distance
    assert before.after is not None
    assert before.after.euclidean < before.euclidean
    barrier = symfuse.barrier(a, b, task, {"learned": learned, "full": full}, points=3, refine=0)
    ends = [curve.ends for curve in barrier.curves.values()]
    torch.testing.assert_close(torch.tensor(ends), torch.tensor(ends[:1]).expand(len(ends), 2))
    merged = symfuse.merge([learned(a), b])
    module = symfuse.to_module(merged)
    assert type(module) is GPT
    halves = (learned(a)["transformer.wpe.weight"] + dict(b.named_parameters())["transformer.wpe.weight"]) / 2
    torch.testing.assert_close(module.state_dict()["transformer.wpe.weight"], halves)
    merged.save(tmp_path / "merged")
    assert symfuse.declare(tmp_path / "merged").family == "GPT"


def test_the_encoder_of_torch_needs_neither_config_nor_declaration() -> None:
    def encoder(seed: int) -> nn.TransformerEncoder:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(24, 4, 29, norm_first=True, activation="gelu")
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(24), enable_nested_tensor=False).eval()

    a, b = encoder(0), encoder(1)
    alignment = symfuse.match(a, to=b, axes="all")
    assert symfuse.declare(a).axes["ffn"].group is not None
    assert symfuse.prove(a, alignment).exact.worst < 1e-13
    assert type(symfuse.to_module(symfuse.merge([alignment(a), b]))) is nn.TransformerEncoder
    a.layers[0].activation = torch.sin
    with pytest.raises(SpecError, match="activation 'sin' is not known"):
        symfuse.declare(a)


def test_the_share_that_a_draft_covers_is_counted() -> None:
    """By hand: of a table, two maps of five neurons, and a map of which nothing is known."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
            self.up, self.down = nn.Linear(7, 5, bias=False), nn.Linear(5, 7, bias=False)
            self.aside = nn.Linear(3, 2, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            return self.head(x + self.down(torch.tanh(self.up(x))))

    draft = symfuse.suggest(Small())
    total = 11 * 7 + 11 * 7 + 35 + 35 + 6
    assert draft.unplaced == ["aside.weight"]
    assert draft.coverage == pytest.approx(
        {"any": 1 - 6 / total, "all": 1 - 6 / total, "residual": 1 - 6 / total, "ffn": 70 / total}
    )
    assert draft.covers.startswith("a group acts on 97% of the parameters, on every axis of 97%: residual 97%")


def test_a_file_declares_as_the_draft_does(tmp_path: Path) -> None:
    module, draft = suggested(TransformerWrapper)
    spec = symfuse.declare(module, draft)
    path = draft.save(tmp_path / "mine.yml")
    ARCHITECTURES.pop("TransformerWrapper")
    own._configs.clear()
    assert symfuse.declare(module, path).to_json() == spec.to_json()
    assert symfuse.declare(module, draft.data).to_json() == spec.to_json()
    assert "scan" not in path.read_text("utf-8")


GOOD = {"family": "mine", "axes": {"r": {"size": 4, "group": "signed"}}, "tensors": {"weight": "r 3", "bias": "r"}}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tensor": {}}, LayoutError, "unknown key 'tensor'.*'tensors'"),
        ({"axes": {"r": {"size": 4, "group": "signd"}}}, LayoutError, r"axes.r is of size 4 with group 'signd'; known"),
        ({"axes": {"r": {"size": "4"}}}, LayoutError, r"axes.r.size' is \"4\", expected a whole number"),
        ({"axes": {"r": {"size": 4, "grup": "signed"}}}, LayoutError, "axes.r: unknown key 'grup'"),
        ({"axes": {}}, LayoutError, "axis 'r' is not declared"),
        ({"tensors": {"weight": "r 3"}}, SpecError, "not declared: bias"),
        ({"tensors": {"weight": "r 4", "bias": "r"}}, LayoutError, r"weight: .*\(4, 3\)"),
        ({"tensors": {"weight": "r (3", "bias": "r"}}, LayoutError, r"r \(3"),
        ({"shifts": [{"bias": "bias", "axis": 3}]}, LayoutError, r"shifts\.axis' is 3, expected a text"),
        ({"shifts": [["bias", "r"]]}, LayoutError, "shifts' is .*, expected an object"),
        ({"family": ""}, LayoutError, "'family' is empty"),
        ({"norm": "rsm"}, LayoutError, "norm is 'rsm'; known are layer"),
        ({"axes": {"r": 4, "l": 10**9}}, LayoutError, "axes: l is in no name and in no layout"),
        ({"axes": {"r": {"size": 4, "per": ["r"]}}}, LayoutError, "r per r is a circle"),
        ({"axes": {"r": {"size": 4, "per": ["s"]}}}, LayoutError, "axes.r: per 's' is not declared"),
        *(
            ({"tensors": {name: "r"}}, LayoutError, "tensors: .*in braces only an axis may stand")
            for name in ("{", "{}", "{r!r}", "{r:>9}", "{r.size}")
        ),
        ({"tensors": {"weight": "(" * 3000}}, LayoutError, "tensors: weight: .*more than 400 axes and signs"),
        ({"tensors": {"weight": "(1 + 1) " * 40}}, LayoutError, "tensors: weight: .*more than 10,000 parts"),
        ({"shifts": [{"bias": "bias", "axis": "q"}]}, LayoutError, "shifts: bias: axis 'q' is not in its layout"),
        ({"shifts": [{"bias": "bais", "axis": "r"}]}, LayoutError, "'bais' is no tensor .*did you mean 'bias'"),
        ({"reads": {"weight": ["wieght"]}}, LayoutError, "reads: wieght: .*did you mean 'weight'"),
        ({"stacks": {"weight": ["{q}"]}}, LayoutError, "stacks: {q}: axis 'q' is not declared"),
        ({"outputs": {"output": "q"}}, LayoutError, "outputs: output: axis 'q' is not declared"),
        ({"buffers": ["b*"]}, LayoutError, "tensors: bias is one of the `buffers`"),
        ({"unverified": "it was not run"}, VerificationError, "UNVERIFIED .it was not run.; check it"),
    ],
)
def test_a_wrong_declaration_is_one_error_and_declares_nothing(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    module = nn.Linear(3, 4)
    with pytest.raises(error, match=words):
        symfuse.declare(module, GOOD | change)
    assert "mine" not in ARCHITECTURES
    assert symfuse.declare(module, GOOD).axes["r"].size == 4
    with pytest.raises(OptionError, match="Linear has no config"):  # one of other shapes is not declared by this
        symfuse.declare(nn.Linear(4, 4))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 5, 3), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


def convolutions(first: str, second: str, group: str) -> dict[str, Any]:
    norm = {f"norm.{name}": first for name in ("weight", "bias", "running_mean", "running_var")}
    return {
        "family": "Convolutions",
        "axes": {first: {"size": 6, "group": group}, second: {"size": 5, "group": "monomial"}},
        "tensors": {
            "first.weight": f"{first} 3 3 3", "first.bias": first, **norm, "norm.num_batches_tracked": "()",
            "second.weight": f"{second} {first}* 3 3", "second.bias": second,
            "head.weight": f"4 {second}*", "head.bias": "4",
        },
    }  # fmt: skip


def test_a_network_without_layers_is_declared_as_data() -> None:
    """Proved on images in float32; with one group larger it is not. Axes of other names are never matched."""
    a, b, images = Convolutions(), Convolutions(), {"x": torch.randn(2, 3, 8, 8)}
    symfuse.declare(a, convolutions("u", "w", "permutation"))
    with pytest.raises(OptionError, match="it has u, w, whose names end in no word that is matched"):
        symfuse.match(a, b)
    spec = symfuse.declare(a, convolutions("first_inner", "second_inner", "permutation"))
    assert symfuse.prove(a, random_alignment(spec, 1), inputs=images).exact.worst < 1e-13
    assert len(symfuse.match(a, b).elements) == 2
    wrong = random_alignment(symfuse.declare(a, convolutions("first_inner", "second_inner", "monomial")), 1)
    with pytest.raises(VerificationError):
        symfuse.prove(a, wrong, inputs=images)


def test_what_is_no_declaration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yml").write_text("- 1")
    (tmp_path / "tag.yml").write_text("family: !!python/object/apply:os.getcwd []")
    (tmp_path / "code.py").write_text("raise SystemError")
    for name, words in (
        ("list.yml", "expected a declaration"), ("tag.yml", r"tag \S+ is not allowed$"),
        ("code.py", "is Python: import it"), ("absent.yml", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=words):
            symfuse.declare(nn.Linear(3, 4), tmp_path / name)
        assert run("inspect", "model", "--declare", str(tmp_path / name)).exit_code == 2
    (tmp_path / "empty.yml").write_text("axes: {}")
    assert "'family' is missing" in run("align", "a", "--to", "b", "--declare", str(tmp_path / "empty.yml")).stderr
    other = symfuse.open(nn.Linear(3, 4), config={"model_type": "other"})
    with pytest.raises(OptionError, match="model_type is 'other', and the declaration declares 'mine'"):
        symfuse.declare(other, GOOD)


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of models in files, of which one module was drafted: aligned, and known in this process only."""
    monkeypatch.chdir(tmp_path)
    a, draft = suggested(GPT)
    b, _ = suggested(GPT, 1)
    draft.save("gpt.yml")
    for module, name in ((a, "a"), (b, "b")):
        symfuse.open(module, config={"model_type": "GPT", "tie_word_embeddings": True}).save(name)
    assert "--declare uses" in run("align", "a", "--to", "b", "-o", "c", "--no-verify").stderr
    said = done("align", "a", "--to", "b", "-o", "c", "--declare", "gpt.yml", "--no-verify").stdout
    assert "ffn" in said
    assert "permutation" in done("inspect", "c", "--declare", "gpt.yml").stdout
    said = done("rewrite", "a", "balance", "-o", "d", "--declare", "gpt.yml", "--no-verify").stdout
    assert "heads and neurons balanced" in said
    saved = symfuse.open("c")
    alignment = symfuse.match(symfuse.open("a"), to=symfuse.open("b"))
    expected = alignment(symfuse.open("a"))
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


class Odd(nn.Module):
    """A map whose output is made by a function."""

    def __init__(self, put_out: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.put_out = nn.Linear(5, 7), nn.Linear(7, 5), put_out

    def forward(self, x: Tensor) -> Any:
        return self.put_out(self.second(self.first(x).relu()))


class Whole(Odd):
    """One that cannot be copied."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(f"one is enough ({memo})"[:13])


class Packed(Odd):
    """One that keeps something else than tensors, as quantised ones do."""

    def __init__(self, put_out: Callable[[Tensor], Any]) -> None:
        super().__init__(put_out)
        self.first = Kept(5, 7)


class Kept(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"bits": 8}


def test_modules_that_cannot_be_run_are_drafted_unverified() -> None:
    plain, complex_, unsigned = (Odd(lambda x: x) for _ in range(3))
    unsigned.forward = nn.functional.linear  # without a signature, as those of TorchScript
    complex_.gain = nn.Parameter(torch.ones(5, dtype=torch.complex64))
    for module, why in (
        (Odd(lambda _: None), "returns no tensors"),
        (Odd(lambda x: x.to_sparse()), "returns no tensors"),
        (complex_, "holds complex weights"),
        (Whole(lambda x: x), "cannot be copied: one is enough"),
        (unsigned, "no inputs for"),
    ):  # fmt: skip
        draft = symfuse.suggest(module)
        assert not draft.verified
        assert why in draft.reason
    assert symfuse.suggest(Odd(lambda x: {3: x})).reason == symfuse.suggest(Odd(lambda x: {"3": x})).reason
    plain.lazy = nn.LazyLinear(3)
    with pytest.raises(CheckpointError, match=r"lazy\.weight, lazy\.bias without a shape before the first run"):
        symfuse.suggest(plain)
    with pytest.raises(CheckpointError, match=r"something else than tensors: first\._extra_state; is it quantised"):
        symfuse.suggest(Packed(lambda x: x))


def test_the_source_of_a_draft_is_python() -> None:
    """Of a module that is there twice, and of a family whose name is a word of Python."""
    twice = Odd(lambda x: x)
    twice.third = twice.first
    for name in ("None", "class", "4-x"):
        source = symfuse.suggest(twice, config={"model_type": name}).source()
        assert "tied=" in source
        compile(source, name, "exec")

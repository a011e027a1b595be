"""D16, D17, D37–D40, D42, D43: arguments of the public functions, labels, and modules of one's own."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import transformers
import yaml
from torch import Tensor, nn

import symfuse
from command import done, run
from contract.tiny import MODELS
from recipes.llama import llama
from symfuse import api
from symfuse.adapters.extraction import Adapter
from symfuse.alignment import Alignment
from symfuse.arguments import checked
from symfuse.drafts import Draft
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, OutputError
from symfuse.evaluation import Task
from symfuse.io import Checkpoint
from symfuse.stats.statistics import Statistics
from symfuse.transporting.result import Transported

LABEL = "gpt2-lm-untied"
VERBS = [name for name in symfuse.__all__ if inspect.isfunction(getattr(symfuse, name))]


@pytest.fixture(scope="module")
def pair() -> tuple[Checkpoint, Checkpoint]:
    return MODELS[LABEL](0), MODELS[LABEL](1)


def memory(model: Checkpoint, **options: Any) -> Task:
    """A task on tensors in memory, of any text model."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (2, 7), generator=rng)
    labels = torch.randint(0, 3, (2,), generator=rng)
    return symfuse.task(None, [{"input_ids": ids % model.config["vocab_size"], "labels": labels, **options}], model)


@pytest.fixture(scope="module")
def valid(pair: tuple[Checkpoint, Checkpoint]) -> dict[str, Any]:
    """A value for each parameter that some verb cannot do without."""
    a, b = pair
    return {
        "source": a, "to": b, "sources": [a, b], "a": a, "b": b, "before": a, "after": b, "models": {"a": a, "b": b},
        "loss": lambda _module: 1.0, "alignment": symfuse.match(a, to=b, axes="ffn"), "recipe": {}, "model": a,
        "name": None, "data": memory(a), "thing": "adapter", "runs": ["run"], "output": "page.html",
        "rewrites": ["untie"], "finetuned": a, "base": b, "finetune": a, "onto": b,
    }  # fmt: skip


def required(verb: str) -> list[str]:
    parameters = inspect.signature(getattr(symfuse, verb)).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


@pytest.mark.parametrize("verb", VERBS)
def test_d37_d38_no_argument_of_another_type_gets_into_any_verb(verb: str, valid: Mapping[str, Any]) -> None:
    function = getattr(symfuse, verb)
    hints = get_type_hints(function)
    tried = 0
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Any or parameter.kind is parameter.VAR_KEYWORD:
            continue
        given = {one: valid[one] for one in required(verb)} | {name: object()}
        with pytest.raises(OptionError, match=rf"^{verb}: {name} is an object; expected \S"):
            function(**given)
        tried += 1
    assert tried > 0


@pytest.mark.parametrize("verb", VERBS)
def test_d37_a_text_is_no_list(verb: str, valid: Mapping[str, Any]) -> None:
    function = getattr(symfuse, verb)
    for name, hint in get_type_hints(function).items():
        if str(hint).startswith(("collections.abc.Sequence", "collections.abc.Iterable")):
            given = {one: valid[one] for one in required(verb)} | {name: "ab"}
            with pytest.raises(OptionError, match=rf"^{verb}: {name} is 'ab'; expected a list, each of it "):
                function(**given)


METHODS = [
    (owner, name)
    for owner in (Adapter, Alignment, Checkpoint, Draft, Statistics, Transported)
    for name in ("save", "load", "push_to_hub")
    if hasattr(owner, name)
]


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda one: getattr(one, "__name__", one))
def test_d37_no_argument_of_another_type_gets_into_what_writes_and_reads(owner: type, name: str) -> None:
    function = getattr(owner, name)
    method = functools.partial(function, object.__new__(owner)) if inspect.isfunction(function) else function
    signature, tried = inspect.signature(method), 0
    first = next(iter(signature.parameters))
    for one, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for wrong in (object(), *([None] if parameter.default is parameter.empty else [])):
            with pytest.raises(OptionError, match=rf"^{name}: {one} is (an object|None); expected \S"):
                method(**{first: "out", one: wrong})
            tried += 1
    assert tried > 1
    if name != "push_to_hub":  # which takes the options of save
        with pytest.raises(OptionError, match=rf"^{name} has no option 'ovewrite'.*it has {first}"):
            method("out", ovewrite=True)


def test_d37_names_with_a_nul_and_texts_for_paths(
    pair: tuple[Checkpoint, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = pair
    alignment = symfuse.match(a, b, axes="ffn")
    for save in (a.save, alignment.save):
        with pytest.raises(OutputError, match=r"cannot be written: .*null"):
            save("x\0")
    with pytest.raises(CheckpointError, match="does not exist; expected an alignment"):
        Alignment.load("x\0")
    with pytest.raises(OptionError, match=r"^save: threads is 'x'; expected a whole number or None"):
        a.save("q", threads="x")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    assert Alignment.load(alignment.save("mine.safetensors")).elements.keys() == alignment.elements.keys()


def test_d37_the_reported_calls(pair: tuple[Checkpoint, Checkpoint]) -> None:
    a, b = pair
    with pytest.raises(OptionError, match=r"^align: sources is 'a'; expected a list, each of it a model"):
        symfuse.align("a", "b")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^merge: sources is 'a'"):
        symfuse.merge("a")
    with pytest.raises(OptionError, match=r"^merge: sources is \[a \w+, 3\]"):
        symfuse.merge([a, 3])  # type: ignore[list-item]
    with pytest.raises(OptionError, match=r"^match: variants is 'transport'"):
        symfuse.match(a, b, variants="transport")
    with pytest.raises(OptionError, match=r"^merge: weights is '0.5'"):
        symfuse.merge([a, b], weights="0.5")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^evaluate: loss is None; expected a task \(symfuse.task\) or a function"):
        symfuse.evaluate(a, None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^match: data is an object; expected a task"):
        symfuse.match(a, b, data=object())  # type: ignore[arg-type]
    assert symfuse.merge((a, b), weights=(0.25, 0.75))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a, b: symfuse.match(a, b, scalin=False), "no option 'scalin' (did you mean 'scaling'?)"),
        (lambda a, b: symfuse.merge([a, b], wieght=[1, 1]), "merge has no option 'wieght'"),
        (lambda a, b: symfuse.merge([a, b], density=0.5), 'written together: parameters={"density": …}'),
        (lambda a, b: symfuse.merge([a, b], parameters={"wieght": [1, 1]}), "(did you mean 'weight'?)"),
        (lambda a, b: symfuse.match(a, b, kind="pearson"), "match: 'kind': of matching from activations; add data"),
        (lambda a, b: symfuse.match(a, b, data=[{"input_ids": torch.ones(1, 2).long()}], one_pass=True), "'one_pass'"),
        (lambda a, b: symfuse.align([a, b], scalin=False), "(did you mean 'scaling'?)"),
        (lambda a, b: symfuse.merge([a, b], wieghts=[1, 1]), "(did you mean 'weights'?)"),
        (lambda a, _: symfuse.evaluate(a, lambda _m: 1.0, devise="cpu"), "(did you mean 'device'?)"),
        (lambda a, b: symfuse.barrier(a, b, lambda _m: 1.0, pionts=3), "(did you mean 'points'?)"),
        (lambda a, b: symfuse.barrier(a, b, lambda _m: 1.0, points="3"), "points is '3'; expected a whole number"),
        (lambda a, b: symfuse.landscape({"a": a, "b": b}, lambda _m: 1.0, stesp=3), "(did you mean 'steps'?)"),
        (lambda a, b: symfuse.verify(a, b, tolerence=1.0), "(did you mean 'tolerance'?)"),
        (lambda a, b: symfuse.match(a, b, scaling=1), "match: scaling is 1; expected True or False or None"),
        (lambda a, b: symfuse.merge([a, b], base=True), "merge: base is True; expected a whole number or None"),
    ],
)
def test_d38_unknown_options_are_named_with_the_nearest(
    call: Callable[..., Any], says: str, pair: tuple[Checkpoint, Checkpoint]
) -> None:
    with pytest.raises(OptionError) as caught:
        call(*pair)
    assert says in str(caught.value)


def test_d38_what_fits_a_signature_goes_through() -> None:
    @checked
    def function(
        numbers: Sequence[float],
        names: Mapping[str, int] | None = None,
        *,
        run: Callable[[int], int] = abs,
        **more: Any,
    ) -> tuple[Any, ...]:
        return numbers, names, run, more

    assert function([1, 2.5], {"a": 1}, run=len, other=3) == ([1, 2.5], {"a": 1}, len, {"other": 3})
    for wrong in ([1, "2"], {1: 2}, 3, "12", [True]):
        with pytest.raises(OptionError, match=r"^function: numbers is "):
            function(wrong)
    with pytest.raises(OptionError, match=r"names is \{'a': 'b'\}; expected a mapping \(each value a whole"):
        function([], {"a": "b"})
    with pytest.raises(TypeError, match="missing a required argument"):
        function()  # type: ignore[call-arg]
    assert api.merge.__name__ == "merge"


# ---- D16: labels


def classifier(folder: Path, seed: int, *labels: str) -> Checkpoint:
    torch.manual_seed(seed)
    named = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, **named
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return symfuse.open(folder, name=folder.name)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (("c", "b", "d"), "the label 'a' is number 0 in one, is not in the other"),
        (("a", "b", "d"), "the label 'c' is number 2 in one, is not in the other"),
        (("c", "a", "b"), "the label 'a' is number 0 in one, 1 in the other"),
    ],
)
def test_d16_labels_that_overlap_and_differ_are_refused(other: tuple[str, ...], says: str, tmp_path: Path) -> None:
    a, b = classifier(tmp_path / "a", 0, "a", "b", "c"), classifier(tmp_path / "b", 1, *other)
    with pytest.raises(IncompatibleError) as caught:
        symfuse.merge([a, b])
    assert says in str(caught.value)
    assert "--task-heads" in str(caught.value)
    assert "drop" in str(caught.value)
    refused = run("merge", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out"))
    assert (refused.exit_code, (tmp_path / "out").exists()) == (5, False)
    assert run("check", str(tmp_path / "a"), str(tmp_path / "b")).exit_code == 5
    kept = symfuse.merge([a, b], heads=1)
    assert torch.equal(kept["classifier.weight"], b["classifier.weight"])
    assert "classifier.weight" not in symfuse.merge([a, b], heads="drop")
    with pytest.raises(IncompatibleError, match="mixes the rows of different labels"):
        symfuse.barrier(a, b, memory(a))
    with pytest.raises(IncompatibleError, match="the mean of their predictions is of different labels"):
        symfuse.evaluate([a, b], memory(a))


@pytest.mark.parametrize("other", [("a", "b", "c"), ("LABEL_0", "LABEL_1", "LABEL_2"), ("x", "y", "z")])
def test_d16_labels_that_agree_or_share_no_name_are_merged_with_a_note(other: tuple[str, ...], tmp_path: Path) -> None:
    a, b = classifier(tmp_path / "a", 0, "a", "b", "c"), classifier(tmp_path / "b", 1, *other)
    merged = symfuse.merge([a, b])
    torch.testing.assert_close(merged["classifier.weight"], (a["classifier.weight"] + b["classifier.weight"]) / 2)
    assert any("label2id" in note for note in merged.notes) == (other != ("a", "b", "c"))
    said = done("merge", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out")).stdout
    assert ("label2id" in said) == (other != ("a", "b", "c"))


# ---- D17, D39, D40: merges


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llamas")
    llama(root / "a", 0)
    llama(root / "b", 1)
    llama(root / "fewer", 2, num_attention_heads=2, head_dim=16)
    llama(root / "more", 3, num_key_value_heads=4)
    return root


def test_d17_two_spellings_of_one_parameter(llamas: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(llamas)
    with pytest.raises(OptionError, match="weights and weight are one parameter"):
        symfuse.merge(["a", "b"], weights=[0.5, 0.5], parameters={"weight": [1, 3]})
    out = str(tmp_path / "out")
    for words, says in (
        (["--weights", "0.5,0.5", "--set", "weight=1,3"], "--weights and --set weight="),
        (["--no-normalize", "--set", "normalize=true"], "--no-normalize and --set normalize="),
        (["--set", "weight=1,3", "--set", "weight=1,2"], "--set weight= is given twice"),
    ):
        result = run("merge", "a", "b", "-o", out, *words)
        assert result.exit_code == 2
        assert says in result.stderr
    twice = {"merge_method": "linear", "tokenizer": {"source": "union"}, "tokenizer_source": "union",
             "models": [{"model": "a", "parameters": {"weight": 1}}]}  # fmt: skip
    with pytest.raises(OptionError, match="both tokenizer and tokenizer_source"):
        symfuse.merge_recipe(twice)
    (tmp_path / "r.yml").write_text("merge_method: linear\nmodels: [{model: a, parameters: {weight: 1, weight: 2}}]\n")
    with pytest.raises(OptionError, match="duplicate key 'weight'"):
        symfuse.merge_recipe(tmp_path / "r.yml")
    assert not Path(out).exists()


def test_d39_one_path_as_base_and_as_model(llamas: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(llamas)
    for method in ("slerp", "ties", "dare_ties", "task_arithmetic"):
        result = run("merge", "a", "a", "--method", method, "--base", "1", "-o", str(tmp_path / "out"))
        assert result.exit_code == 2
        assert "a is both the base and a model that is merged with it" in result.stderr
    alone = {"merge_method": "ties", "base_model": "a", "models": [{"model": "a"}]}
    with pytest.raises(OptionError, match="a is the base and the only model"):
        symfuse.merge_recipe(alone)
    (tmp_path / "r.yml").write_text(yaml.safe_dump(alone), "utf-8")
    assert run("check", str(tmp_path / "r.yml")).exit_code != 0
    done("merge", "a", "a", "-o", str(tmp_path / "mean"))  # which compares nothing to a base
    done("merge", "a", "b", "--method", "ties", "--base", "1", "-o", str(tmp_path / "ties"))


@pytest.mark.parametrize(
    ("other", "field"), [("fewer", "num_attention_heads: 4 and 2"), ("more", "num_key_value_heads: 2 and 4")]
)
def test_d40_head_counts_name_the_fields(
    other: str, field: str, llamas: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(llamas)
    out = str(tmp_path / "out")
    for words in (["merge", "a", other, "-o", out], ["align", "a", "--to", other, "-o", out], ["relate", "a", other]):
        result = run(*words)
        assert result.exit_code == 5
        assert field in result.stderr
    with pytest.raises(IncompatibleError, match=field):
        symfuse.merge(["a", other])


# ---- D42, D43: modules of one's own


class Own(nn.Module):
    """A residual network that is no class of transformers. gives: what its forward returns."""

    def __init__(self, gives: Callable[[Tensor], Any] = lambda y: {"y": y}) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 13)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(13, 29), "down": nn.Linear(29, 13)}) for _ in range(2)
        )
        self.head = nn.Linear(13, 3)
        self.gives = gives

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))  # type: ignore[index]
        return self.gives(self.head(x))


OWN = {"model_type": "own", "hidden_size": 13, "intermediate_size": 29, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "gives", [lambda y: y, lambda y: (y, None), lambda y: [y, y + 1]], ids=["tensor", "tuple", "list"]
)
def test_d42_a_draft_of_a_module_that_returns_no_mapping(gives: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 7, 5)}
    expected = symfuse.suggest(Own(), config=OWN, inputs=inputs)
    found = symfuse.suggest(Own(gives), config=OWN, inputs=inputs)
    groups = [{axis: group and group.name for axis, group in draft.groups.items()} for draft in (expected, found)]
    assert groups[0] == groups[1]
    assert found.verified == expected.verified
    assert "does not run" not in found.reason


def test_d42_what_cannot_be_run_is_said() -> None:
    assert (
        "it returns no tensors"
        in symfuse.suggest(Own(lambda _y: None), config=OWN, inputs={"x": torch.ones(2, 5)}).reason
    )
    assert "does not run on these inputs" in symfuse.suggest(Own(), config=OWN, inputs={"z": torch.ones(2, 5)}).reason
    assert symfuse.suggest(Own(), config={"model_type": "own"}).verified  # what runs is found by trying

    class Two(Own):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x + y)

    assert "give it `inputs`" in symfuse.suggest(Two(), config={"model_type": "own"}).reason


def test_d43_modules_of_ones_own() -> None:
    a, b = Own(), Own()
    alignment = symfuse.match(*(MODELS[LABEL](seed) for seed in (0, 1)), axes="ffn")
    for call in (
        lambda: symfuse.verify(a, b), lambda: symfuse.relate(a, b).distance, lambda: symfuse.merge([a, b]),
        lambda: symfuse.barrier(a, b, lambda _m: 1.0, {"x": alignment}),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=r"Own has no config of its own, and is not declared: .* symfuse\.open\("):
            call()
    x = torch.randn(4, 5)

    def outputs(checkpoint: Checkpoint) -> dict[str, Tensor]:
        module = Own()
        module.load_state_dict(dict(checkpoint))
        with torch.no_grad():
            return dict(module(x))

    assert symfuse.verify(a, a, runner=outputs).equal
    assert not symfuse.verify(a, b, runner=outputs).equal
    opened = [symfuse.open(module, config=OWN) for module in (a, b)]  # as the message says
    merged = symfuse.merge(opened)
    torch.testing.assert_close(merged["head.weight"], (a.head.weight + b.head.weight).detach() / 2)
    assert json.dumps(dict(merged.config))
    assert (
        symfuse.barrier(a, b, lambda module: module(x)["y"].square().mean(), points=3, refine=0).curves["none"].points
    )

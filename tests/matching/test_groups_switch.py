"""The group of each axis by switch: what is a subgroup of what, what it finds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command import done, run
from contract.tiny import MODELS
from symfuse import api
from symfuse.alignment import Alignment, random_alignment
from symfuse.errors import OptionError
from symfuse.groups import (
    ELEMENTS,
    GROUPS,
    Conformal,
    Group,
    Invertible,
    Linear,
    Monomial,
    Permutation,
    Similarity,
    compose,
    subgroups,
)
from symfuse.io import Checkpoint
from symfuse.matching import choose_axes, choose_groups
from symfuse.recipes import Align, parse_recipe
from symfuse.spec import Spec

WITHIN = [(GROUPS[name], one) for name in GROUPS for one in subgroups(GROUPS[name]).values()]
NOT_WITHIN = [
    (GROUPS[name], one) for name in GROUPS for one in GROUPS.values() if one.name not in subgroups(GROUPS[name])
]
AS_GIVEN = (("permutation", "signed", "orthogonal", "conformal", "invertible"), ("scaling", "monomial", "invertible"))


def names(pair: tuple[Group, Group]) -> str:
    return "-".join(group.name for group in pair)


def pair(label: str = "bert-mlm") -> tuple[Checkpoint, Checkpoint]:
    return MODELS[label](seed=0), MODELS[label](seed=5)


def fitting(*groups: Group) -> int:
    """The size of an axis on which all of them act."""
    return next((group.size for group in groups if group.size is not None), 5)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- what is a subgroup of what --------------------------------------------------------------------


@pytest.mark.parametrize("given", WITHIN, ids=names)
def test_a_group_contains_the_elements_of_its_subgroups(given: tuple[Group, Group]) -> None:
    group, smaller = given
    n = fitting(*given)
    for seed in range(3):
        assert group.contains(smaller.random(n, (2,), generator(seed)), 1e-9)
    assert group.contains(smaller.identity(n, (2,)), 1e-9)


@pytest.mark.parametrize("given", NOT_WITHIN, ids=names)
def test_no_subgroup_is_left_out(given: tuple[Group, Group]) -> None:
    group, other = given
    n = fitting(*given)
    assert not all(group.contains(other.random(n, (2,), generator(seed)), 1e-9) for seed in range(3))


def test_of_an_axis_only_the_subgroups_that_fit() -> None:
    assert subgroups(Conformal()).keys() - subgroups(Conformal(), 5).keys() == {"rotary", "phase"}
    assert subgroups(Conformal(), 2) == subgroups(Conformal())
    with pytest.raises(OptionError, match=r"'phase' is no part of what may act on axis 'qk', invertible"):
        api.match(*pair(), groups={"qk": "phase"})


def test_what_is_usual_and_what_keeps_norms_are_subgroups() -> None:
    for group in GROUPS.values():
        assert {group.usual().name, group.without_scaling().name} <= subgroups(group).keys()
    assert Invertible().usual() == Conformal()


@pytest.mark.parametrize("first", ELEMENTS)
@pytest.mark.parametrize("then", ELEMENTS)
def test_elements_of_two_kinds_are_composed(then: str, first: str) -> None:
    of = {"monomial": GROUPS["signed"], "similarity": GROUPS["conformal"], "linear": GROUPS["invertible"]}
    g, h = of[then].random(5, (2,), generator(1)), of[first].random(5, (2,), generator(2))
    both, w = compose(g, h), torch.randn(2, 5, 3, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(both.act(w, 1), g.act(h.act(w, 1), 1))
    torch.testing.assert_close(both.dual().act(w, 1), g.dual().act(h.dual().act(w, 1), 1))
    largest = max(then, first, key=["monomial", "similarity", "linear"].index)
    assert type(both) is ELEMENTS[largest]  # none wider than it must be


def test_scaled_units_and_a_rotation_make_a_linear_map() -> None:
    g = compose(GROUPS["scaling"].random(5, (), generator()), GROUPS["orthogonal"].random(5, (), generator()))
    assert isinstance(g, Linear)
    assert Invertible().contains(g, 1e-12)


@pytest.mark.parametrize("name", GROUPS)
def test_the_condition_is_that_of_the_matrix(name: str) -> None:
    g = GROUPS[name].random(fitting(GROUPS[name]), (2,), generator())
    torch.testing.assert_close(g.condition(), torch.linalg.cond(g.to_dense()))


# -- what it finds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm"])
@pytest.mark.parametrize("ascending", AS_GIVEN, ids="<".join)
def test_a_larger_group_brings_heads_no_less_near(label: str, ascending: tuple[str, ...], tmp_path: Path) -> None:
    source, anchor = pair(label)
    left = []
    for name in ascending:
        options = {"axes": "qk,v", "biases": False, "groups": {"attention": name}}
        alignment = api.match(source, anchor, threads=1, **options)
        assert all(GROUPS[name].contains(g, 1e-9) for g in alignment.elements.values())
        assert all(Invertible().contains(g, 1e-9) for g in alignment.elements.values())
        assert {step["group"] for step in alignment.provenance["steps"]} == {GROUPS[name].label}
        assert api.prove(source, alignment).exact.equal
        again = Alignment.load(alignment.save(tmp_path / f"{name}.safetensors"))
        torch.testing.assert_close(dict(again(source)), dict(alignment(source)), rtol=0, atol=1e-13)
        left.append(sum(step["after"] for step in alignment.provenance["steps"]))
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.99 * left[0]


def test_what_is_found_is_the_best_of_that_group() -> None:
    """The same as where no more is declared."""
    source, anchor = pair()
    spec = api.declare(source)
    found = api.match(source, anchor, axes="qk", biases=False, groups={"qk": "permutation"})
    assert found.elements
    for instance, g in found.elements.items():
        assert isinstance(g, Monomial)
        dense = g.to_dense()
        for seed in range(20):
            other = Permutation().random(g.size, g.batch, generator(seed))
            gaps = [_gap(spec, found, source, anchor, instance.index[0], h) for h in (dense, other.to_dense())]
            assert gaps[0] <= gaps[1]


def _gap(
    spec: Spec, found: Alignment, source: Checkpoint, anchor: Checkpoint, layer: int, dense: torch.Tensor
) -> float:
    total = 0.0
    for part in ("query", "key"):
        name = spec.file_name(f"encoder.layer.{layer}.attention.self.{part}.weight")
        heads = [t.double().reshape(*dense.shape[:2], -1) for t in (source[name], anchor[name])]
        total += float((dense @ heads[0] - heads[1]).square().sum())
    return total


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "deberta"])
def test_invertible_maps_inside_heads_are_found_again(label: str) -> None:
    anchor = MODELS[label](seed=0)
    spec = api.declare(anchor)
    source = random_alignment(spec, 3, ("qk", "v", "ffn", "h"), largest=True)(anchor)
    far = api.relate(source, anchor).distance.euclidean
    left = {}
    for name in ("conformal", "invertible"):
        found = api.match(source, anchor, axes="attention,ffn,heads", groups={"attention": name}, threads=1)
        assert api.prove(source, found).exact.equal
        left[name] = api.relate(found(source), anchor).distance.euclidean
    assert left["invertible"] < 1e-9 * far
    assert left["conformal"] > 0.05 * far


def test_usually_heads_are_rotated_and_scaled() -> None:
    source, anchor = pair()
    usual = api.match(source, anchor, axes="attention")
    assert {type(g) for g in usual.elements.values()} == {Similarity}
    named = api.match(source, anchor, axes="attention", groups={"qk": "conformal", "v": "conformal"})
    assert {str(i): g.tensors() for i, g in usual.elements.items()}.keys() == {str(i) for i in named.elements}
    for instance, g in usual.elements.items():
        assert all(torch.equal(t, named.elements[instance].tensors()[key]) for key, t in g.tensors().items())


def test_random_elements_are_of_what_is_usual_or_of_all_that_may_act() -> None:
    spec = api.declare(pair()[0])
    for largest, kind in ((False, Similarity), (True, Linear)):
        g = random_alignment(spec, 3, {"qk", "v"}, largest=largest)
        assert {type(element) for element in g.elements.values()} == {kind}
        assert max(float(element.condition().max()) for element in g.elements.values()) <= 4


def test_without_scaling_is_the_groups_that_keep_norms() -> None:
    source, anchor = pair("torch-relu-post")
    inside = {"axes": "attention,ffn"}
    short = api.match(source, anchor, scaling=False, **inside)
    named = api.match(source, anchor, groups={"attention": "orthogonal", "ffn": "permutation"}, **inside)
    moved = [dict(g(source)) for g in (short, named)]
    assert all(torch.equal(t, moved[1][name]) for name, t in moved[0].items())
    scaled = api.match(source, anchor, scaling=False, groups={"qk": "conformal"}, **inside)
    with_scale = {i.axis for i, g in scaled.elements.items() if isinstance(g, Similarity) and g.scale is not None}
    assert with_scale == {"qk"}  # what is named goes before the shorthand


# -- words -----------------------------------------------------------------------------------------


def test_a_word_for_fewer_axes_goes_first() -> None:
    spec = api.declare(pair()[0])
    for groups in ({"attention": "orthogonal", "qk": "none"}, {"qk": "none", "attention": "orthogonal"}):
        assert choose_groups(groups, spec) == {"qk": "none", "v": "orthogonal"}
    assert choose_groups({"heads": "permutation"}, spec) == {"h": "permutation"}
    assert choose_groups({}, spec) == {}


def test_an_axis_that_is_named_is_matched_and_none_takes_one_out() -> None:
    source, anchor = pair()
    found = api.match(source, anchor, axes="ffn", groups={"qk": "orthogonal"})
    assert {i.axis for i in found.elements} == {"ffn", "qk"}
    assert found.provenance["options"]["axes"] == ["ffn", "qk"]
    assert found.provenance["options"]["groups"] == {"qk": "orthogonal"}
    found = api.match(source, anchor, axes="attention,ffn", groups={"attention": "none"})
    assert {i.axis for i in found.elements} == {"ffn"}
    assert not found.shifts


def test_a_pre_norm_stream_that_is_permuted_needs_no_frame() -> None:
    source, anchor = pair("gpt2-lm")
    permuted = api.match(source, anchor, groups={"residual": "permutation"}, starts=1, threads=1)
    assert permuted.frame == ()
    assert {type(g) for i, g in permuted.elements.items() if i.axis == "residual"} <= {Monomial}
    assert api.prove(source, permuted).exact.equal
    turned = api.match(source, anchor, axes="residual", groups={"residual": "centred"}, starts=1, threads=1)
    assert turned.frame != ()
    assert {type(g) for g in turned.elements.values()} == {Similarity}


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"qk": "ortogonal"}, r"'ortogonal' for axis 'qk' is not known \(did you mean 'orthogonal'\?\)"),
        ({"qkk": "orthogonal"}, r"axis 'qkk' is not known \(did you mean 'qk'\?\)"),
        ({"ffn": "orthogonal"}, r"'orthogonal' is no part .* axis 'ffn', permutation .*choose from permutation, none"),
        ({"h": "invertible"}, r"'invertible' is no part of .* axis 'h'"),
        ({"all": "orthogonal"}, r"'orthogonal' is no part of .* axis 'ffn'"),
        ({"residual": "signed"}, r"axis 'residual', centred .*choose from centred, permutation, sign, none"),
        ({"pooler": "signed"}, r"this gpt2 has no axis 'pooler'; it has ffn, h, qk, residual, v"),
        ({"all": "none"}, r"every axis is taken out"),
        ({"qk": ""}, r"'' for axis 'qk' is not known; choose from permutation"),
    ],
)
def test_what_cannot_be_had(groups: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        api.match(*pair("gpt2-lm"), groups=groups)


# -- command line and recipes ----------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, checkpoint in zip("ab", pair(), strict=True):
        checkpoint.to(torch.float32).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_on_the_command_line(models: Path) -> None:
    groups = ("--group", "attention=invertible", "--group", "residual = permutation")
    found = json.loads(
        done(
            "align", "a", "--to", "b", "-o", "out", "--axes", "attention,ffn", "--threads", "1", *groups, "--json"
        ).stdout
    )
    assert found["options"]["groups"] == {"attention": "invertible", "residual": "permutation"}
    assert found["options"]["axes"] == ["qk", "v", "ffn", "residual"]
    rows = {row["axis"]: row for row in found["matched"]}
    assert rows["qk"]["group"] == "invertible map"
    elements = Alignment.load("out/alignment.symfuse").elements
    worst = max(float(g.condition().max()) for i, g in elements.items() if i.axis == "qk")
    assert rows["qk"]["condition"] == pytest.approx(worst)
    assert worst > 1.01
    assert rows["ffn"]["condition"] == 1
    assert (
        "condition"
        in done("align", "a", "--to", "b", "-o", "again", "--axes", "ffn", "--group", "qk=invertible").stdout
    )
    for option in ("qk", "qk=orthogonal=", "=orthogonal", "qk=ortogonal"):
        result = run("align", "a", "--to", "b", "-o", "no", "--group", option)
        assert result.exit_code == 2
        assert "expected AXIS=GROUP" in result.stderr or "not known" in result.stderr
    result = run("align", "a", "--to", "b", "-o", "no", "--group", "qk=signed", "--group", "qk=none")
    assert "once for each axis" in result.stderr
    assert not Path("no").exists()


def test_in_a_recipe(models: Path) -> None:
    done("merge", "a", "b", "-o", "out", "--align", "attention,ffn", "--group", "qk=orthogonal", "--group", "v=none")
    data = json.loads(Path("out/symfuse.json").read_text("utf-8"))
    recipe = parse_recipe(data["recipe"])
    assert recipe.align == Align(axes=("attention", "ffn"), groups={"qk": "orthogonal", "v": "none"})
    assert data["alignments"][0]["options"]["groups"] == {"qk": "orthogonal", "v": "none"}
    assert {row["axis"] for row in data["alignments"][0]["matched"]} == {"qk", "ffn"}
    Path("again.yml").write_text(data["recipe"], "utf-8")
    text = done("check", "again.yml", "--no-sample").stdout
    assert "qk by orthogonal, v by none" in text
    done("merge", "again.yml", "again")
    assert Path("again/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    assert "--group: without --align" in run("merge", "a", "b", "-o", "no", "--group", "qk=none").stderr
    assert "`align: {groups: …}`" in run("merge", "again.yml", "no", "--group", "qk=none").stderr


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("{qk: ortogonal}", r"line 4: align.groups.qk: groups: 'ortogonal' .*did you mean 'orthogonal'"),
        ("{qkk: none}", r"line 4: align.groups.qkk: axis 'qkk' is not known \(did you mean 'qk'\?\)"),
        ("[qk]", r"line 4: align.groups"),
        ("{qk: 1}", r"line 4: align.groups.qk"),
    ],
)
def test_a_recipe_is_refused_with_its_line(block: str, words: str) -> None:
    text = f"merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\nalign:\n  groups: {block}\n"
    with pytest.raises(OptionError, match=words):
        parse_recipe(text)


def test_check_and_merge_refuse_an_axis_that_is_not_there(models: Path) -> None:
    text = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nalign:\n  groups: {pooler: signed}\n"
    Path("recipe.yml").write_text(text, "utf-8")
    for command in (("check", "recipe.yml", "--no-sample"), ("merge", "recipe.yml", "no")):
        result = run(*command)
        assert result.exit_code != 0
        assert "no axis 'pooler'" in result.output + result.stderr
        assert "line 4" in result.output + result.stderr
    assert not Path("no").exists()


def test_every_word_of_axes_is_one_of_groups() -> None:
    spec = api.declare(pair()[0])
    for word in ("attention", "ffn", "heads", "residual", "all"):
        movable = {instance.axis for instance in spec.movable}
        chosen = tuple(axis for axis in choose_axes(word, spec) if axis in movable)
        assert tuple(choose_groups({word: "none"}, spec)) == chosen

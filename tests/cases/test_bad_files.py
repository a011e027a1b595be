"""Files that are damaged, or made to harm: one message that names the file and the field, before any time or memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import symfuse
from attacks import kinds
from command import run
from symfuse.adapters.config import module_pattern
from symfuse.errors import LONGEST, CheckpointError, DataError, OptionError, SymfuseError, printable
from symfuse.evaluation.data.reading import open_image
from symfuse.io import Checkpoint
from symfuse.reports.collect import read
from symfuse.spec import parse
from symfuse.stats.statistics import Statistics

HIDDEN = "\u202e\u2066\x1b[2J\r\x07\ufeff"  # turns the line, clears the terminal, shows nothing
SHOWN = r"\u202e\u2066\x1b[2J\r\x07\ufeff"


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("valid")
    kinds.prepare(folder, families=("bert",))
    return folder


@pytest.fixture
def folder(valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: models a and b, an adapter, statistics, an alignment, recipe.yml."""
    shutil.copytree(valid, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(code: int, words: str, *command: str) -> None:
    """The command ends with that code and one message that has the words, and leaves no output."""
    result = run(*command)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stderr.count("symfuse: ") == 1
    assert not Path("out").exists()


def works(*command: str) -> None:
    result = run(*command)
    assert result.exit_code == 0, result.output


def edit(file: str, **fields: Any) -> None:
    path = Path(file)
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")


MERGE = ("merge", "a", "b", "-o", "out")
MOVE = ("transport", "fisher", "-o", "out", "--base", "a")


# -- what is no file -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_blocks_or_never_ends_is_not_read(folder: Path, what: str) -> None:
    os.mkfifo("file.yml") if what == "pipe" else Path("file.yml").symlink_to("/dev/zero")
    words = f"it is a {what}, expected a file"
    refused(2, words, "merge", "file.yml", "out")
    refused(2, words, "inspect", "a", "--declare", "file.yml")
    refused(3, words, "verify", "a", "a", "--text", "file.yml")
    refused(3, words, *MOVE, "--by", "file.yml")
    refused(2, words, *MOVE, "--by", "alignment.safetensors", "--names", "file.yml")
    with pytest.raises(DataError, match=words):
        open_image("file.yml", "row 1")


# -- headers and configs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dtype", ["F32"], """.dtype' is ["F32"], expected a text"""),
        ("dtype", {}, ".dtype' is {}, expected a text"),
        ("shape", {"0": 1}, """.shape' is {"0": 1}, expected a list"""),
        ("shape", [True], ".shape[0]' is true, expected a whole number"),
        ("shape", [-1], "has negative numbers"),
        ("data_offsets", [0, 1, 2], ".data_offsets' is [0, 1, 2], expected a list of 2"),
        ("data_offsets", None, ".data_offsets' is null, expected a list"),
    ],
)
def test_d25_an_entry_of_a_header_of_another_type(folder: Path, field: str, value: object, words: str) -> None:
    works("inspect", "a")
    path = folder / "a" / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    next(entry for name, entry in header.items() if name != "__metadata__")[field] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    refused(3, words, *MERGE)


@pytest.mark.parametrize("value", [[], {}, 0, False, ["bert"]])
@pytest.mark.parametrize("nested", [False, True])
def test_d26_a_model_type_that_is_no_name(folder: Path, value: object, nested: bool) -> None:
    edit("a/config.json", **({"text_config": {"model_type": value}} if nested else {"model_type": value}))
    refused(3, f"a: config.json has model_type {value!r}, expected a name in quotes", *MERGE)
    edit("a/config.json", model_type="unheard_of", text_config={"model_type": "unheard_of"})
    works("check", "a", "a")  # without a declaration


@pytest.mark.parametrize("family", ["bert", "unheard_of"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 5),
        ("architectures", True),
        ("id2label", ["a"]),
        ("id2label", "a"),
        ("rope_parameters", {"rope_type": ["x"]}),
    ],
)
def test_d26_fields_of_every_model(folder: Path, family: str, field: str, value: object) -> None:
    """One message, or none where the field does not matter: no traceback, for undeclared models too."""
    edit("a/config.json", model_type=family, **{field: value})
    edit("b/config.json", model_type=family)
    for command in (MERGE, ("check", "a", "b")):
        result = run(*command)
        assert result.exit_code in (0, 4, 5), result.output
        assert isinstance(result.exception, SystemExit | None)


def test_d26_a_config_that_is_a_tower(folder: Path) -> None:
    tower: Any = 1
    for _ in range(200):
        tower = {"a": tower}
    edit("a/config.json", more=tower)
    refused(3, "config.json cannot be read as JSON: it is nested more than 50 levels deep", *MERGE)


def test_d41_a_parameter_of_size_zero(folder: Path) -> None:
    assert parse("1 0 residual").shape({"residual": 32}) == (1, 0, 32)
    with pytest.raises(symfuse.errors.LayoutError):
        parse("1 01 residual")
    for name in "ab":
        path = folder / name / "model.safetensors"
        save_file(load_file(path) | {"embeddings.register_tokens": torch.zeros(1, 0, 12)}, path)
        edit(f"{name}/config.json", model_type="vjepa2")
    works(*MERGE)
    assert load_file("out/model.safetensors")["embeddings.register_tokens"].shape == (1, 0, 12)


# -- recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["2024-13-45", "!!int x", "!!timestamp x", "!!float x", "9" * 400, "9" * 5_000, "1" + ":1" * 400 + ".0"]
)
def test_d28_values_of_options_that_do_not_read(folder: Path, value: str) -> None:
    """As in a recipe, in which they stand under a key."""
    refused(2, "weight", "merge", "a", "b", "-o", "out", "--set", f"weight={value}")
    recipe = f"merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\nparameters:\n  weight: {value}\n"
    Path("recipe.yml").write_text(recipe)
    refused(2, "weight", "merge", "recipe.yml", "out")


def test_d28_a_recipe_that_is_written_again_keeps_its_texts(folder: Path) -> None:
    """In braces, so that what the options say is not added below; `2024-13-45` is the text of a name."""
    recipe = "{name: 2024-13-45, merge_method: linear, models: [{model: a}, {model: b}]}"
    Path("recipe.yml").write_text(recipe)
    works("merge", "recipe.yml", "out", "--seed", "3", "-q")
    assert "name: 2024-13-45" in Path("out/symfuse.json").read_text().replace("'", "")


@pytest.mark.parametrize("verb", ["check", "merge"])
def test_d28_padding_without_end(folder: Path, verb: str) -> None:
    def recipe(multiple: int) -> None:
        tokenizer = f"tokenizer: {{source: union, pad_to_multiple_of: {multiple}}}"
        Path("recipe.yml").write_text(f"merge_method: linear\nmodels: [{{model: a}}, {{model: b}}]\n{tokenizer}\n")

    more = ("out",) if verb == "merge" else ()
    recipe(999999999999)
    result = run(verb, "recipe.yml", *more)
    assert result.exit_code == 2
    words = "recipe.yml, line 3: tokenizer.pad_to_multiple_of: pad_to_multiple_of is 999999999999, expected a whole "
    assert f"{words}number from 1 to 65536" in result.output
    recipe(64)
    works(verb, "recipe.yml", *more)


def test_d28_a_vocabulary_without_end(folder: Path) -> None:
    works("check", "a", "b", "--tokenizer", "union")
    edit("a/config.json", vocab_size=10**13, model_type="unheard_of", architectures=["Nothing"])
    result = run("check", "a", "a", "--tokenizer", "union")
    assert result.exit_code != 0
    assert "vocab_size" in result.output


@pytest.mark.parametrize("verb", ["check", "merge"])
@pytest.mark.parametrize("family", ["bert", "unheard_of"])
def test_d29_layers_without_end(folder: Path, verb: str, family: str) -> None:
    def recipe(stop: int) -> None:
        layers = f"[{{sources: [{{model: a, layer_range: [0, {stop}]}}]}}]"
        Path("recipe.yml").write_text(f"merge_method: passthrough\nslices: {layers}\n")

    edit("a/config.json", model_type=family)
    more = ("out",) if verb == "merge" else ()
    for stop in (3, 10**12):
        recipe(stop)
        result = run(verb, "recipe.yml", *more)
        assert result.exit_code == 2
        assert f"layer_range [0, {stop}] of a, which has 2 layers (0 to 1;" in result.output
        assert "recipe.yml, line 2: slices[0].sources[0].layer_range" in result.output
    recipe(2)
    works(verb, "recipe.yml", *more)


# -- statistics ---------------------------------------------------------------------------------------


def statistics(folder: Path, kind: str, **fields: Any) -> Path:
    path = folder / kind / "statistics.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")
    return path.parent


@pytest.mark.parametrize("key", ["model", "moved_from", "by"])
@pytest.mark.parametrize("value", ["x", 3, ["a"], {"model": "x"}])
def test_d31_a_lineage_that_is_no_object(folder: Path, key: str, value: object) -> None:
    provenance = json.loads((folder / "fisher/statistics.json").read_text("utf-8"))["provenance"]
    Statistics.load(folder / "fisher")
    statistics(folder, "fisher", provenance=provenance | {key: value})
    words = f"'statistics.json.provenance.{key}{'.model' if isinstance(value, dict) else ''}' is "
    refused(3, words, *MERGE, "--method", "fisher", *("--statistics", "fisher") * 2)


@pytest.mark.parametrize("kind", ["fisher", "gram"])
@pytest.mark.parametrize("count", [0, -1])
def test_d18_statistics_of_nothing(folder: Path, kind: str, count: int) -> None:
    with pytest.raises(CheckpointError, match="'count' or 'inputs' make no sense"):
        Statistics.load(statistics(folder, kind, count=count))


GRAMS: Mapping[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "negative": (lambda g: g * -0.999, "on its diagonal, where sums of squares are"),
    "asymmetric": (
        lambda g: g + torch.ones_like(g).triu(1),
        "is not symmetric: entries that should be equal differ by 1",
    ),
    "no covariance": (
        lambda g: g - 9 * g.diagonal().amax() * (1 - torch.eye(len(g))),
        "larger than all on its diagonal",
    ),
}


@pytest.mark.parametrize("what", GRAMS)
def test_d18_a_gram_matrix_that_cannot_be_one(folder: Path, what: str) -> None:
    change, words = GRAMS[what]
    merge = ("merge", "a", "a", "-o", "out", "--method", "regmean", *("--statistics", "gram") * 2)
    works("check", *merge[1:3], *merge[5:])
    path = folder / "gram" / "layer-00001.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".gram"))
    save_file({**tensors, name: tensors[name] * (1 + 1e-6)}, path)
    works(*merge)  # rounding is let pass
    shutil.rmtree("out")
    save_file({**tensors, name: change(tensors[name])}, path)
    refused(3, words, *merge)


def test_d18_squared_gradients_below_zero(folder: Path) -> None:
    path = folder / "fisher" / "layer-00001.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: -tensors[name]}, path)
    refused(3, "squared gradients are at least 0", "merge", "a", "a", "-o", "out", *("--method", "fisher"),
            *("--statistics", "fisher") * 2)  # fmt: skip


# -- weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_d32_a_layer_whose_squares_overflow(which: int) -> None:
    a = kinds.shape_of(kinds.LLAMA)

    def times(factor: float) -> list[Checkpoint]:
        tensors = {n: t * factor if n.startswith("model.layers.1.") and t.ndim == 2 else t for n, t in a.items()}
        pair = [kinds.near(a, 1), a.replace(tensors=tensors, name="big")]
        return pair[::-1] if which else pair

    with pytest.raises(CheckpointError, match=r"overflow in float32; the largest weight is .*e\+20, in 'layers.1"):
        symfuse.match(*times(1e20), axes="residual,ffn", starts=1, threads=1)
    wide = [one.to(torch.float64) for one in times(1e20)]  # the way out that the message names
    for pair in (wide, times(1e15)):
        found = symfuse.match(*pair, axes="residual,ffn", starts=1, threads=1)
        after = symfuse.relate(found(pair[0]), found.in_frame(pair[1])).distance.whole.squared
        assert 0 < after < float("inf")


# -- adapters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["(a+)+x", "((.|.)*)*x", "(?:(?:e?)*)*x", ".*.*.*.*.*.*.*.*.*x", r"(\w+\.?)+x"])
def test_d36_patterns_that_never_end(folder: Path, key: str, pattern: str) -> None:
    """`re` needs hours for each of these."""
    edit("adapter/adapter_config.json", **{key: {pattern: 5}})
    refused(3, f"adapter_config.json: {key}: the pattern", "merge", "a+adapter", "b", "-o", "out")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("query", "a.query query"),
        ("layer.1.query", "x.layer.1.query layerx1yquery"),
        (r"layer\.(0|1|1\d)\..*(query|key)", "layer.0.query a.layer.1.b.key layer.12.x.key"),
        (r".*\.[2-4]\.\w+", "a.3.b_c x.2.y"),
        (r"(?:mlp\.)?up_proj", "mlp.up_proj up_proj"),
        (r"^layers\.\d+\.q", "layers.10.q"),
        (r"[^.]+", "q layer"),
        (r"a{2,3}b*?", "aa aaab"),
    ],
)
def test_d36_patterns_match_as_peft_matches_them(pattern: str, names: str) -> None:
    other = pytest.importorskip("peft.utils.other", reason="peft is not installed")
    fits = module_pattern(pattern)
    near = [
        *names.split(),
        "a.b",
        "layer.5.query",
        "xquery",
        "layer.1.querys",
        "a.9.b",
        "amlp.up_proj",
        "aaaa",
        "",
        "a",
    ]
    for name in near:
        assert fits(name) == (other.get_pattern_key([pattern], name) == pattern or name == pattern), name
    assert all(map(fits, names.split()))


@pytest.mark.parametrize("pattern", ["(?=a)a", r"(a)\1", "(?i:a)", "a*+", "(" * 60 + "a" + ")*" * 60])
def test_d36_patterns_that_are_not_matched_are_refused(folder: Path, pattern: str) -> None:
    edit("adapter/adapter_config.json", rank_pattern={pattern: 5})
    refused(3, "adapter_config.json: rank_pattern: the pattern", "merge", "a+adapter", "b", "-o", "out")


# -- what is shown -------------------------------------------------------------------------------------


def test_d45_names_in_messages_tables_and_pages(folder: Path) -> None:
    path = folder / "a" / "model.safetensors"
    save_file(load_file(path) | {f"odd{HIDDEN}": torch.zeros(2)}, path)
    result = run("merge", "a", "b", "-o", "out", "--foreign", "refuse")
    assert result.exit_code != 0
    assert f"odd{SHOWN}" in result.stderr
    assert not set(HIDDEN) & set(result.output) - set("[2J")
    shutil.copytree("b", f"b{HIDDEN}")
    for command in (("inspect",), ("relate", "b"), ("verify", "b"), ("check", "b")):
        shown = run(*command, f"b{HIDDEN}")
        assert shown.exit_code == 0, shown.output
        assert not set("\u202e\x1b\r\x07\ufeff") & set(shown.output)
        assert command[0] in ("verify", "relate") or SHOWN in shown.output.replace("\n", "")


def test_d45_brackets_in_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from symfuse.output import Output

    Output(as_json=False, quiet=False).table(["[b]name"], [["[/red]x"], [f"[bold]{HIDDEN}"]], "[link=x]title")
    out = capsys.readouterr().out
    assert all(words in out for words in ("[b]name", "[/red]x", f"[bold]{SHOWN}", "[link=x]title"))


def test_d45_a_page(folder: Path) -> None:
    from symfuse.reports.page import page

    model = {"name": f"m{HIDDEN}", "count": 3, "loss": 0.5, "metrics": {f"f1{HIDDEN}": 0.25}}
    document = {"kind": "evaluation", "task": {"task": f"t{HIDDEN}"}, "models": [model, {**model, "name": "n"}]}
    place = folder / "evaluation.json"
    place.write_text(json.dumps(document), "utf-8")
    assert read(place)["models"][0]["metrics"] == {f"f1{SHOWN}": 0.25}
    made = page([place], title=f"title{HIDDEN}")
    body = made[made.index("<body") :]
    assert f"title{SHOWN}" in body
    assert f"m{SHOWN}" in body
    shown = body[: body.index("<script")]
    assert not set("\u202e\u2066\x1b\r\x07\ufeff") & set(shown)


@pytest.mark.parametrize("error", [SymfuseError, CheckpointError, OptionError])
def test_d45_every_message_is_printable_and_of_bounded_length(error: type[SymfuseError]) -> None:
    assert str(error(f"a{HIDDEN}b\nc\td")) == f"a{SHOWN}b\nc\td"
    long = str(error("x" * 100_000 + "the way out"))
    assert len(long) == LONGEST
    assert long.endswith("the way out")
    assert printable("naïve 名前 \u05e9\u05dd 😀 \u200c") == "naïve 名前 \u05e9\u05dd 😀 \u200c"

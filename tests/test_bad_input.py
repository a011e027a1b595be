"""Bad input, through the command line and the API: one message, an exit code, and nothing changed or left behind."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

import symfuse
from covering import covering
from symfuse.alignment import Alignment, random_alignment
from symfuse.cli import main
from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.io import Checkpoint
from symfuse.modules import live
from symfuse.verification import random_inputs, run

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17,
    "max_position_embeddings": 23, "pad_token_id": 0,
}  # fmt: skip
QUERY = "encoder.layer.0.attention.self.query.weight"
NORM = "embeddings.LayerNorm.weight"


def model(class_name: str = "BertModel", seed: int = 0, **options: Any) -> Checkpoint:
    family = next(f for f in ("Bert", "Roberta", "DebertaV2", "ViT") if class_name.startswith(f))
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    rng = torch.Generator().manual_seed(seed)
    module = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for name, p in module.named_parameters():
            gain = p.ndim == 1 and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=rng) * 0.3 + (1.0 if gain else 0.0))
    return symfuse.open(module, name=f"{class_name}-{seed}")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two models, a and b."""
    monkeypatch.chdir(tmp_path)
    model(seed=1).save("a")
    model(seed=2).save("b")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def refused(folder: Path, code: int, words: str, *args: str) -> str:
    """The command ends with that code and one message that has the words; no file is another one afterwards."""
    before = contents(folder)
    result = CliRunner().invoke(main, args)
    assert result.exit_code == code, result.output
    assert result.stderr.count("symfuse: ") == 1
    assert words in result.stderr
    assert contents(folder) == before
    return result.stderr


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# ---- configs


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", "3", "num_attention_heads is '3', expected a positive integer"),
        ("num_attention_heads", None, "expected a positive integer"),
        ("num_attention_heads", 0, "expected a positive integer"),
        ("num_attention_heads", -3, "expected a positive integer"),
        ("num_attention_heads", 3.0, "expected a positive integer"),
        ("num_attention_heads", True, "expected a positive integer"),
        ("num_attention_heads", 5, "the hidden size 12 is not a multiple of the number of heads, 5"),
        ("num_attention_heads", 10**9, "is not a multiple"),
        ("hidden_size", [12], "hidden_size is [12], expected a positive integer"),
        ("hidden_size", 10**9 - 1, "999999999, but 12"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, expected at most 10,000 layers"),
        ("num_hidden_layers", 10**4, "config.json says 10000 of 'l' (layers), and there are 39 tensors"),
        ("type_vocab_size", "2", "type_vocab_size is '2', expected an integer"),
        ("hidden_act", 5, "hidden_act is 5, expected a name in quotes"),
        ("id2label", [1], "id2label is [1], expected a JSON object"),
        ("num_labels", 10**9, "num_labels is 1000000000, expected 2, as id2label has"),
        ("architectures", "BertModel", "architectures is 'BertModel', expected a list"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false', expected true or false"),
    ],
)
def test_config_values_of_the_wrong_kind(folders: Path, verb: str, key: str, value: object, words: str) -> None:
    """Not a traceback, and no billion of names or numbers: the model, the field, what was found and expected."""
    more = {"id2label": {"0": "x", "1": "y"}} if key == "num_labels" else {}
    configure(folders / "a", **more, **{key: value})
    assert "a: " in refused(folders, 4, words, verb, "a", *(["a"] if verb == "verify" else []))


@pytest.mark.parametrize(("key", "value"), [("image_size", "8"), ("image_size", [8]), ("patch_size", [0, 4])])
def test_sizes_of_images(tmp_path: Path, key: str, value: object) -> None:
    model("ViTModel", image_size=[8, 12], patch_size=4).save(tmp_path / "v")
    configure(tmp_path / "v", **{key: value})
    refused(tmp_path, 4, "expected a positive integer, or a list of two", "inspect", str(tmp_path / "v"))


@pytest.mark.parametrize("value", [["bert"], {"a": 1}, 5])
def test_a_model_type_that_is_no_name(folders: Path, value: object) -> None:
    configure(folders / "a", model_type=value)
    refused(folders, 3, "config.json has model_type", "inspect", "a")


@pytest.mark.parametrize("name", ["Nonsense", "BertConfig", "pipeline"])
def test_architectures_that_name_no_model_class(folders: Path, name: str) -> None:
    """Silently running the base model would prove less than it says."""
    configure(folders / "a", architectures=[name])
    refused(folders, 3, f"names {name!r}, which is not a model class", "align", "a", "--to", "b", "-o", "out")


def test_what_transformers_does_not_take(folders: Path) -> None:
    configure(folders / "a", hidden_dropout_prob="much")
    refused(folders, 3, "a: transformers", "verify", "a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "cannot be read as JSON: maximum recursion"),
        ('{"model_type": "bert", "hidden_size": 12, "hidden_size": 24}', "key 'hidden_size' occurs twice"),
    ],
)
def test_json_that_is_none(folders: Path, text: str, words: str) -> None:
    (folders / "a" / "config.json").write_text(text, "utf-8")
    refused(folders, 3, words, "inspect", "a")


@pytest.mark.parametrize(
    ("key", "ours", "theirs"),
    [
        ("hidden_act", "gelu", "silu"),
        ("layer_norm_eps", 1e-12, 1e-5),
        ("is_decoder", False, True),
        ("position_embedding_type", "absolute", "relative_key"),
    ],
)
@pytest.mark.parametrize("verb", ["align", "merge", "relate"])
def test_c47_c60_functions_that_differ_in_the_config_only(
    folders: Path, verb: str, key: str, ours: object, theirs: object
) -> None:
    configure(folders / "b", **{key: theirs})
    args = {"align": ["a", "--to", "b", "-o", "out"], "merge": ["a", "b", "-o", "out"], "relate": ["a", "b"]}
    words = f"config.json differs in {key}: {ours!r} and {theirs!r}"
    refused(folders, 5, words, verb, *args[verb])


def test_c47_one_function_under_two_names() -> None:
    a, b = (model(seed=i) for i in (1, 2))
    renamed = b.replace(config={**b.config, "hidden_act": "gelu_python"})
    assert symfuse.relate(a, renamed).distance.whole.squared == symfuse.relate(a, b).distance.whole.squared


# ---- weights


@pytest.mark.parametrize(
    ("name", "value"),
    covering(
        [QUERY, NORM, "embeddings.position_embeddings.weight", "pooler.dense.weight"], [float("nan"), float("inf")]
    ),
)
def test_c77_nan_anywhere(folders: Path, name: str, value: float) -> None:
    edit(folders / "a", lambda t: t[name].view(-1)[:1].fill_(value))
    for args in (("align", "a", "--to", "b"), ("align", "b", "--to", "a"), ("merge", "a", "b", "--align", "ffn")):
        for more in ((), ("--no-verify",)):
            refused(folders, 3, f"{name!r} of a", *args, "-o", "out", *more)


def test_c77_nan_in_a_head_that_is_kept_as_it_is(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        model("BertForSequenceClassification", seed).save(tmp_path / name)
    edit(tmp_path / "a", lambda t: t["classifier.bias"].fill_(float("nan")))
    a, b, out = (str(tmp_path / name) for name in ("a", "b", "out"))
    refused(tmp_path, 3, f"'classifier.bias' of {a}", "merge", a, b, "-o", out, "--task-heads", "1")


def test_messages_on_shapes_name_the_model(folders: Path) -> None:
    edit(folders / "b", lambda t: t.update({QUERY: torch.zeros(0)}))
    refused(folders, 4, f"b: {QUERY} in model.safetensors has shape (0,), expected (", "merge", "a", "b", "-o", "out")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_weights_that_are_no_floats_are_not_rotated(folders: Path, dtype: torch.dtype) -> None:
    edit(folders / "a", lambda t: t.update({QUERY: t[QUERY].to(dtype)}))
    words = "a: expected floating-point weights, found " + QUERY
    refused(folders, 3, words, "align", "a", "--to", "b", "-o", "out", "--no-verify")
    refused(folders, 3, words, "align", "b", "--to", "a", "-o", "out", "--no-verify")
    alignment = random_alignment(symfuse.declare("b"), 0)
    with pytest.raises(CheckpointError, match="expected floating-point weights"):
        alignment("a")


def test_a_moved_tensor_that_does_not_fit_its_dtype(folders: Path) -> None:
    """60000 fits in float16, and a rotation of two of them does not; without the proof as well."""
    edit(folders / "a", lambda t: t.update({n: x.sign().mul(6e4).half() for n, x in t.items() if "self.query" in n}))
    words = "the aligned tensor does not fit in float16, the dtype of a"
    for more in ((), ("--no-verify",)):
        refused(folders, 5, words, "align", "a", "--to", "b", "-o", "out", "--no-scaling", *more)


def test_c09_a_stored_alias_that_is_another_tensor(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        model("BertForMaskedLM", seed).save(tmp_path / name)
    alias = "cls.predictions.decoder.weight"
    edit(tmp_path / "a", lambda t: t.update({alias: torch.zeros(31, 12)}))
    paths = [str(tmp_path / name) for name in ("a", "b", "out")]
    words = f"a: {alias} is bert.embeddings.word_embeddings.weight by config.json"
    refused(tmp_path, 4, words, "merge", *paths[:2], "-o", paths[2])
    words = f"a: {alias} is bert.embeddings.word_embeddings.weight by config.json"
    refused(tmp_path, 4, words, "align", paths[0], "--to", paths[1], "-o", paths[2])


def test_c103_a_pickle_gives_one_message_and_no_advice_to_run_it(folders: Path) -> None:
    marker = folders / "marker"

    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    (folders / "a" / "model.safetensors").unlink()
    (folders / "a" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(), protocol=4))
    message = refused(folders, 3, "pytorch_model.bin was not loaded", "inspect", "a")
    assert not marker.exists()
    assert message.count("\n") == 1
    assert "weights_only" not in message


def test_a_header_that_is_a_tower(folders: Path) -> None:
    header = b"[" * 100_000
    (folders / "a" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folders, 3, "has a header that is not JSON", "inspect", "a")


# ---- options and paths


@pytest.mark.parametrize("layers", ["0-99999999999", "last:99999999999", "first:99999999999"])
def test_ranges_of_layers_that_fill_the_memory(folders: Path, layers: str) -> None:
    refused(folders, 2, "the model has layers 0 to 1", "relate", "a", "b", "--layers", layers)


def test_weights_whose_sum_is_no_number(folders: Path) -> None:
    words = "weight is 1e+308, expected a finite number between -3.4e+38 and 3.4e+38"
    refused(folders, 2, words, "merge", "a", "b", "-o", "out", "--weights", "1e308,1e308")


def test_a_shard_size_that_is_no_number(folders: Path) -> None:
    size = "9" * 400 + "GB"
    refused(folders, 2, "is not a size", "merge", "a", "b", "-o", "out", "--max-shard-size", size)


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1"])
def test_tolerances_that_decide_nothing(folders: Path, tolerance: str) -> None:
    refused(folders, 2, "it must be a number from 0 on", "verify", "a", "a", f"--tolerance={tolerance}")


def test_names_that_are_too_long(folders: Path) -> None:
    refused(folders, 3, "File name too long", "inspect", "x" * 300)
    refused(folders, 8, "File name too long", "merge", "a", "b", "-o", "x" * 300)


@pytest.mark.parametrize(("file", "data"), [("tokenizer.json", b"{}"), ("vocab.txt", b"\xff\xfe\x00")])
def test_a_tokenizer_that_is_none(folders: Path, file: str, data: bytes) -> None:
    (folders / "a" / file).write_bytes(data)
    (folders / "lines.txt").write_text("two words\n", "utf-8")
    refused(folders, 3, "a: its tokenizer cannot read the text", "verify", "a", "a", "--text", "lines.txt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_standard_output_on_a_full_disk(folders: Path) -> None:
    command = [sys.executable, "-c", "from symfuse.cli import main; main()", "inspect", "a"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ}, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("symfuse: [Errno 28]")


@pytest.mark.parametrize("positions", [1, 3, 5])
def test_models_too_small_for_the_usual_inputs(positions: int) -> None:
    this = model(max_position_embeddings=positions, vocab_size=3)
    inputs = random_inputs(live(this), this.config)
    assert inputs["input_ids"].shape == (3, 1)
    assert bool(inputs["attention_mask"].any(1).all())
    assert all(t.isfinite().all() for t in run(live(this), inputs).values())


# ---- the API


FOREIGN: Mapping[str, Callable[[], Checkpoint]] = {
    "family": lambda: model("RobertaModel", pad_token_id=1),
    "heads behind equal shapes": lambda: model(num_attention_heads=4),
    "activation": lambda: model(hidden_act="relu"),
    "layers": lambda: model(num_hidden_layers=3),
    "neurons": lambda: model(intermediate_size=18),
    "width": lambda: model(hidden_size=15),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_an_alignment_of_other_models_is_neither_applied_nor_composed(what: str) -> None:
    alignment, other = random_alignment(symfuse.declare(model()), 0), FOREIGN[what]()
    with pytest.raises(IncompatibleError, match="this alignment of a bert"):
        alignment(other)
    with pytest.raises(IncompatibleError, match="this alignment of a"):
        _ = alignment @ random_alignment(symfuse.declare(other), 0)


def saved(tmp_path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """An alignment file in which tensors were changed."""
    path = symfuse.match(model(seed=1), to=model(seed=2)).save(tmp_path / "alignment.safetensors")
    with symfuse.alignment.file.safe_open(path, "pt") as file:
        meta = {key: value for key, value in file.metadata().items() if key != "sha256"}  # as before checksums
    tensors = load_file(path)
    change(tensors)
    save_file({key: t.clone() for key, t in tensors.items()}, path, meta)
    return path


MATRIX, INDEX = "qk[0]/similarity/matrix", "ffn[0]/monomial/index"
SHIFT = "shift/encoder.layer.0.attention.self.key.bias"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (MATRIX, lambda t: t * float("nan")),
        (MATRIX, torch.ones_like),
        (MATRIX, lambda t: t[:1]),
        (MATRIX, lambda t: t[..., :2]),
        (INDEX, lambda t: t + 1),
        (INDEX, torch.zeros_like),
        (INDEX, lambda t: t[:5]),
        (INDEX, lambda t: t.double()),
        (SHIFT, lambda t: t / 0),
        (SHIFT, lambda t: t[:3]),
        ("shift/embeddings.LayerNorm.bias", lambda _: torch.ones(12)),
    ],
)
def test_alignment_files_with_elements_that_keep_no_function(
    tmp_path: Path, key: str, change: Callable[[Tensor], Tensor]
) -> None:
    path = saved(tmp_path, lambda t: t.update({key: change(t.get(key, torch.zeros(1)))}))
    with pytest.raises(CheckpointError, match="is damaged"):
        Alignment.load(path)


def test_a_loaded_alignment_does_not_hang_on_its_file(tmp_path: Path) -> None:
    path = saved(tmp_path, lambda _: None)
    loaded = Alignment.load(path)
    before = {i: g.to_dense() for i, g in loaded.elements.items()}
    symfuse.match(model(seed=3), to=model(seed=4)).save(path)
    assert all(torch.equal(g.to_dense(), before[i]) for i, g in loaded.elements.items())


@pytest.mark.parametrize("options", [{"axes": []}, {"layers": []}])
def test_nothing_to_match(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        symfuse.match(model(seed=1), to=model(seed=2), **options)


def test_nothing_to_compare() -> None:
    with pytest.raises(IncompatibleError, match="no outputs to compare"):
        symfuse.verify(model(), model(), runner=lambda _: {})

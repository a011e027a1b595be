"""What is attacked: for each kind of input valid tiny ones, how a mutant of one is written, and which verbs read it."""

from __future__ import annotations

import json
import random
import shutil
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

import symfuse
from attacks import mutants
from symfuse.alignment import random_alignment
from symfuse.cli import main
from symfuse.io import Checkpoint
from symfuse.model import Model
from symfuse.stats.statistics import Input, Statistics

BERT: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 17, "max_position_embeddings": 23, "type_vocab_size": 2,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0, "tie_word_embeddings": True,
    "id2label": {"0": "x", "1": "y"}, "label2id": {"x": 0, "y": 1}, "is_decoder": False, "dtype": "float32",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 17,
    "max_position_embeddings": 23, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": [2],
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **LLAMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": True,
    "query_pre_attn_scalar": 6, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **LLAMA, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 3, "head_dim": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "norm_topk_prob": False, "use_sliding_window": False, "max_window_layers": 2,
}  # fmt: skip
CONFIGS = {"bert": BERT, "llama": LLAMA, "gemma": GEMMA, "moe": MIXTRAL}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "base_model_name_or_path": "a", "r": 2, "lora_alpha": 4,
    "target_modules": ["query", "value"], "rank_pattern": {"layer.1.attention.self.query": 3},
    "alpha_pattern": {"query": 8.5}, "use_rslora": False, "fan_in_fan_out": False, "bias": "none",
    "modules_to_save": None, "init_lora_weights": True, "layers_to_transform": None, "layers_pattern": None,
    "exclude_modules": None, "lora_dropout": 0.1, "inference_mode": True, "revision": None,
}  # fmt: skip
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + i) for i in range(26))]
RECIPES = (
    "merge_method: linear\nmodels:\n- {model: a, parameters: {weight: 0.3}}\n- model: b\n  parameters:\n"
    "    weight:\n    - {filter: attention, value: [0.2, 0.8]}\n    - value: 0.7\nparameters: {normalize: true}\n"
    "dtype: float32\n",
    "merge_method: ties\nbase_model: a\nmodels: [{model: b, parameters: {weight: 1, density: [0.5, 1.0]}}, a]\n"
    "seed: 3\nout_dtype: bfloat16\nheads: average\nforeign: refuse\n".replace(", a]", "]"),
    "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 2]}]\n"
    "- sources: [{model: b, layer_range: [1, 2], parameters: {scale: [{filter: query, value: 0.5}, {value: 1}]}}]\n",
    "merge_method: slerp\nbase_model: a\nslices:\n- sources: &s\n  - {model: a, layer_range: [0, 2]}\n"
    "  - {model: b, layer_range: [0, 2]}\nparameters: {t: [{filter: attention, value: [0, 0.5, 1]}, {value: 0.5}]}\n"
    "tokenizer_source: base\n",
    "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1.0}\ntokenizer:\n  source: union\n"
    "  tokens:\n    a: {source: a}\n    b: {source: {kind: model_token, model: b, token: c}, force: true}\n"
    "    d: {source: {kind: zero}}\n  pad_to_multiple_of: 8\nchat_template: auto\n",
    "merge_method: linear\nmodels: [a, b]\nalign: {axes: [attention, ffn], anchor: 1, scaling: false, layers: '0-1',\n"
    "  groups: {qk: orthogonal}, one_pass: true, biases: false}\n".replace("[a, b]", "[{model: a}, {model: b}]"),
    "name: one\nmerge_method: linear\nmodels: [{model: a}, {model: b}]\n---\nmerge_method: task_arithmetic\n"
    "base_model: a\nmodels: [{model: one, parameters: {weight: 0.5}}, {model: b}]\n",
    "merge_method: linear\nmodules:\n  encoder:\n    slices:\n    - sources: [{model: a, layer_range: [0, 1]},"
    " {model: b, layer_range: [1, 2]}]\n  embeddings:\n    models: [{model: a}, {model: b}]\n  pooler:\n"
    "    models: [{model: a}, {model: b}]\n",
    "merge_method: linear\nmodels:\n- model: {model: {path: a}, lora: adapter}\n- model: b\n",
    "x: &x [lol, lol, lol, lol]\ny: &y [*x, *x, *x, *x]\nmerge_method: linear\nmodels: [*y, *y, *y]\n",
)
URLS = (
    *("memory://attacks/a", "memory:///attacks/a/", "file://localhost/x/y", "local:///x%20y", "http://127.0.0.1:1/m"),
    *(
        "https://user:word@127.0.0.1:1/m?q=1#f",
        "s3://bucket/m",
        "zip://a::memory://b",
        "hf://org/name",
        "gs:/x",
        "abfs://c@d/e",
    ),
    *("memory://attacks/a@main", "org/name@v1", "ftp://u:p@127.0.0.1:1/x", "data:,x", "dir://x::memory://attacks"),
)

Verbs = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Kind:
    """files: those of a folder with valid input that are mutated, each by one way. verbs: command lines, of which each
    mutant meets the first and one of the others."""

    files: Callable[[Path, random.Random], None]
    verbs: Verbs


def shape_of(config: dict[str, Any]) -> Checkpoint:
    """A model of that config with random weights, gains about 1."""
    import transformers

    settings = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    name = config["architectures"][0]
    made = transformers.AutoConfig.for_model(config["model_type"], **settings)
    module = getattr(transformers, name)(made)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * 0.3 + float(p.ndim == 1))
    return symfuse.open(module, config=config, name="a")


def near(a: Checkpoint, seed: int) -> Checkpoint:
    rng = torch.Generator().manual_seed(seed)
    return a.replace(tensors={n: t + 0.05 * torch.randn(t.shape, generator=rng) for n, t in a.items()}, name="b")


def prepare(folder: Path, families: Iterable[str] = CONFIGS) -> None:
    """Everything valid: models a and b (and those of other families), their tokenizers, an adapter, an alignment,
    statistics, a recipe."""
    for family in families:
        a = shape_of(CONFIGS[family])
        place = folder if family == "bert" else folder / family
        for name, model in (("a", a), ("b", near(a, 1))):
            model.save(place / name)
    vocabulary = "\n".join(TOKENS) + "\n"
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 23}
    for name in "ab":
        (folder / name / "vocab.txt").write_text(vocabulary, "utf-8")
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    model = Model.of(symfuse.open(folder / "a", name="a"))
    _adapter(folder / "adapter", model.checkpoint)
    random_alignment(model.spec, 1).save(folder / "alignment.safetensors")
    _statistics(folder, model)
    (folder / "recipe.yml").write_text(RECIPES[0], "utf-8")


def _adapter(folder: Path, base: Checkpoint) -> None:
    tensors = {}
    for layer in range(2):
        for target in ("query", "value"):
            key = f"base_model.model.encoder.layer.{layer}.attention.self.{target}"
            rank = 3 if (layer, target) == (1, "query") else 2
            tensors[f"{key}.lora_A.weight"] = torch.full((rank, 12), 0.1)
            tensors[f"{key}.lora_B.weight"] = torch.full((12, rank), 0.2)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER), "utf-8")


def _statistics(folder: Path, model: Model) -> None:
    lineage = {"model": model.checkpoint.lineage(compute=True), "options": {"seed": 0, "labels": "model"}}
    of = {name: model.checkpoint[model.spec.file_name(name)] for name in model.spec.tensors}
    squares = {name: tensor.square() for name, tensor in of.items()}
    Statistics("fisher", squares, 7, lineage).save(folder / "fisher")
    weights = [name for name, tensor in of.items() if tensor.ndim == 2 and ".layer." in name]
    grams, inputs = {}, {}
    for number, name in enumerate(weights):
        x = torch.randn(40, of[name].shape[1], generator=torch.Generator().manual_seed(number))
        grams |= {f"{name}.gram": x.T @ x, f"{name}.sum": x.sum(0)}
        inputs[name] = Input(name, 1, 40)
    Statistics("gram", grams, 7, lineage, inputs).save(folder / "gram")


# -- how mutants are written ------------------------------------------------------------------------


def _bytes(folder: Path, rng: random.Random, *ways: tuple[str, Callable[[bytes, random.Random], bytes]]) -> None:
    name, way = rng.choice(ways)
    path = folder / name
    path.write_bytes(way(path.read_bytes(), rng))


def _json(data: bytes, rng: random.Random) -> bytes:
    return mutants.json_bytes(json.loads(data), rng)


def _metadata(data: bytes, rng: random.Random) -> bytes:
    """A mutant of the JSON inside the metadata of a safetensors header."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    key = rng.choice(sorted(header["__metadata__"]))
    try:
        inner = json.loads(header["__metadata__"][key])
    except ValueError:
        inner = header["__metadata__"][key]
    header["__metadata__"][key] = mutants.as_json(mutants.document(inner, rng), rng)
    written = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(written).to_bytes(8, "little") + written + data[end:]


def _headers(folder: Path, rng: random.Random) -> None:
    _bytes(folder, rng, *[("a/model.safetensors", mutants.safetensors)] * 4, ("a/model.safetensors", mutants.values))


def _configs(folder: Path, rng: random.Random) -> None:
    family = rng.choice(sorted(CONFIGS))
    if family != "bert":
        for name in "ab":
            shutil.rmtree(folder / name)
            shutil.copytree(folder.parent / "valid" / family / name, folder / name)
    data = mutants.json_bytes(CONFIGS[family], rng)
    for name in rng.choice(("a", "ab", "ab")):
        (folder / name / "config.json").write_bytes(data)


def _alignments(folder: Path, rng: random.Random) -> None:
    place = "alignment.safetensors"
    _bytes(folder, rng, (place, mutants.safetensors), *[(place, _metadata)] * 3, (place, mutants.values))


def _saved(folder: Path, rng: random.Random) -> None:
    kind = rng.choice(("fisher", "gram"))
    files = [f"{kind}/{path.name}" for path in sorted((folder / kind).glob("*.safetensors"))]
    ways = [(name, way) for name in files for way in (mutants.safetensors, mutants.values, mutants.values)]
    _bytes(folder, rng, *[(f"{kind}/statistics.json", _json)] * len(ways), *ways)


def _recipes(folder: Path, rng: random.Random) -> None:
    given = rng.choice(RECIPES)
    if rng.random() < 0.7:
        documents = [mutants.document(one, rng) for one in yaml.safe_load_all(given)]
        if rng.random() < 0.3:  # JSON is YAML
            data = "\n---\n".join(mutants.as_json(one, rng) for one in documents)
        else:
            data = yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=rng.random() < 0.5)
    else:
        data = mutants.text(given, rng)
    (folder / "recipe.yml").write_bytes(data.encode("utf-8", "surrogatepass"))


def _adapters(folder: Path, rng: random.Random) -> None:
    weights = "adapter/adapter_model.safetensors"
    config = ("adapter/adapter_config.json", _json)
    _bytes(folder, rng, config, config, (weights, mutants.safetensors), (weights, mutants.values))


def _urls(folder: Path, rng: random.Random) -> None:
    url = mutants.text(rng.choice(URLS), rng) if rng.random() < 0.95 else rng.choice(URLS)
    (folder / "arguments").write_text(url[:2000].replace("\x00", ""), "utf-8", "surrogatepass")


MERGE = ("merge", "recipe.yml", "out", "--threads", "1")
CHECK = ("check", "recipe.yml")
PAIR: Verbs = (
    CHECK,
    MERGE,
    ("merge", "a", "b", "-o", "out", "--threads", "1", "--method", "ties"),
    ("check", "a", "b", "--tokenizer", "union"),
    ("align", "a", "--to", "b", "-o", "out", "--axes", "attention,ffn", "--threads", "1"),
    ("verify", "a", "a"),
    ("relate", "a", "b"),
    ("inspect", "a"),
)
KINDS: dict[str, Kind] = {
    "headers": Kind(_headers, PAIR),
    "configs": Kind(_configs, PAIR),
    "alignments": Kind(
        _alignments,
        (
            ("transport", "fisher", "--by", "alignment.safetensors", "-o", "out", "--base", "a"),
            ("transport", "adapter", "--by", "alignment.safetensors", "-o", "out", "--base", "a"),
            ("report", "alignment.safetensors", "-o", "page.html"),
            ("apply",),
        ),
    ),
    "statistics": Kind(
        _saved,
        (
            ("merge", "a", "b", "-o", "out", "--method", "fisher", *("--statistics", "fisher") * 2, "--threads", "1"),
            ("merge", "a", "a", "-o", "out", "--method", "fisher", *("--statistics", "fisher") * 2, "--threads", "1"),
            ("merge", "a", "a", "-o", "out", "--method", "regmean", *("--statistics", "gram") * 2, "--threads", "1"),
            ("transport", "fisher", "--by", "alignment.safetensors", "-o", "out", "--base", "a"),
            ("transport", "gram", "--by", "alignment.safetensors", "-o", "out", "--base", "a"),
        ),
    ),
    "recipes": Kind(_recipes, (CHECK, MERGE)),
    "adapters": Kind(
        _adapters,
        (
            ("merge", "a+adapter", "b", "-o", "out", "--threads", "1"),
            ("check", "a+adapter", "b"),
            ("inspect", "adapter"),
            ("transport", "adapter", "--by", "alignment.safetensors", "-o", "out", "--base", "a"),
        ),
    ),
    "urls": Kind(
        _urls, (("inspect", "@"), ("check", "@", "a"), ("merge", "a", "b", "-o", "@"), ("merge", "@", "a", "-o", "out"))
    ),
}


# -- one mutant through its verbs --------------------------------------------------------------------


def attack(kind: str, seed: int, valid: Path, folder: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Write the mutant of that seed into a copy of the valid input, `folder`, which is the working folder; the verbs
    that it meets and what is wrong with each one's end, if anything is."""
    rng = random.Random(f"{kind} {seed}")
    refresh(valid, folder)
    KINDS[kind].files(folder, rng)
    first, *others = KINDS[kind].verbs
    for verb in (first, rng.choice(others)):
        shutil.rmtree(folder / "out", ignore_errors=True)
        yield verb, problem(verb, folder)


def warm(kind: str, folder: Path) -> None:
    """Every verb of a kind once, on valid input: what libraries load and keep is then there."""
    shutil.copytree(folder.parent / "valid", folder, dirs_exist_ok=True)
    (folder / "arguments").write_text("memory://attacks/a", "utf-8")
    for verb in KINDS[kind].verbs:
        shutil.rmtree(folder / "out", ignore_errors=True)
        problem(verb, folder)
    for config in CONFIGS.values() if kind == "configs" else ():
        shape_of(config)


def refresh(valid: Path, folder: Path) -> None:
    """A fresh copy of the valid input, without the models of other families."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.copytree(valid, folder, dirs_exist_ok=True, ignore=lambda *_: CONFIGS)


def problem(verb: tuple[str, ...], folder: Path) -> str:
    """Nothing, if a verb works or ends with one clear message; else what it does."""
    if verb == ("apply",):
        return _apply(folder)
    arguments = folder / "arguments"
    given = arguments.read_text("utf-8", "surrogatepass") if arguments.exists() else ""
    with warnings.catch_warnings(action="ignore"):
        result = CliRunner().invoke(main, [given if part == "@" else part for part in verb])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))
    return unclear(result.exit_code, result.stdout, result.stderr)


def _apply(folder: Path) -> str:
    from symfuse.alignment import Alignment
    from symfuse.errors import SymfuseError

    try:
        alignment = Alignment.load(folder / "alignment.safetensors")
        for moved in (alignment, alignment.inverse(), alignment @ alignment.inverse()):
            moved(symfuse.open(folder / "a")).save(folder / "out", overwrite=True, threads=1)
        Alignment.load(alignment.save(folder / "again.safetensors"))
    except SymfuseError as error:
        return unclear(error.exit_code, "", f"symfuse: {error}")
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


def unclear(code: int, stdout: str, stderr: str) -> str:
    """What keeps the end of a verb from being a clear one."""
    if "Traceback" in stdout + stderr:
        return f"a traceback is printed: {stderr}"
    found = [line for line in stderr.splitlines() if line.startswith(("symfuse: ", "Error: "))]
    errors = [line for line in found if not line.startswith(("symfuse: note", "symfuse: warning"))]
    if code not in (0, 7) and len(errors) != 1 and not ("problems" in stdout or "cannot" in stdout):
        return f"exit {code} with {len(errors)} messages: {stdout[-500:]}{stderr[-2000:]}"
    if signs := {
        sign for sign in stdout + stderr if sign not in "\n\t" and unicodedata.category(sign) in ("Cc", "Cf", "Cs")
    }:
        return f"prints {sorted(map(ascii, signs))}: {stdout[-300:] + stderr[-700:]!a}"
    if len(stderr) > 4_000:
        return f"a message of {len(stderr)} characters: {stderr[:500]}"
    return ""

"""Where symfuse and mergekit write the same model from the same recipe, and where they do not.

    python benchmarks/agreement.py > docs/agreement.md

Runs both, in this process, over tiny random Llamas that are made on the spot; mergekit is that of the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from symfuse.errors import SymfuseError
from symfuse.recipes import read_recipes
from symfuse.recipes.run import run

RECIPES = Path(__file__).parents[1] / "tests" / "recipes"
NAMES = ("base", "a", "b", "c", "d", "chat", "instruct")
WORDS = ["<unk>", "<s>", "</s>", "<|tool|>", *(f"t{i}" for i in range(60))]
EXTRA = {
    "chat": ["<|im_start|>", "<|im_end|>"],
    "instruct": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
# Recipes that are not for two tools and Llamas.
NOT_BOTH = {
    "align.yml": "`align`, `seed` and `heads` are keys of symfuse",
    "references.yml": "revisions are those of a hub",
    "modules.yml": "an encoder and a decoder, which Llamas do not have",
    "several_final.yml": "ends with a method that draws random numbers: see above",
}


def _each(*names: str, **parameters: Sequence[float]) -> list[dict[str, Any]]:
    values = [{key: value[i] for key, value in parameters.items()} for i in range(len(names))]
    return [{"model": n} | ({"parameters": v} if v else {}) for n, v in zip(names, values, strict=True)]


def _about_base(name: str, shared: Mapping[str, Any] | None = None, **parameters: Sequence[float]) -> dict[str, Any]:
    count = len(next(iter(parameters.values()))) if parameters else 3
    models = _each(*"abc"[:count], **parameters)
    recipe: dict[str, Any] = {"merge_method": name, "base_model": "base", "models": models}
    return recipe | ({"parameters": dict(shared)} if shared else {})


# Every method that draws no random numbers. Equal weights and other defaults would hide mistakes.
METHODS: dict[str, dict[str, Any]] = {
    "linear": {"merge_method": "linear", "models": _each("a", "b", "c", weight=(0.5, 0.3, 0.7))},
    "linear, not normalized": {
        "merge_method": "linear",
        "models": _each("a", "b", weight=(0.5, 0.3)),
        "parameters": {"normalize": False},
    },
    "slerp": {
        "merge_method": "slerp",
        "base_model": "a",
        "models": _each("a", "d"),
        "parameters": {"t": [{"filter": "mlp", "value": [0, 0.3, 1]}, {"value": 0.4}]},
    },
    "nuslerp": {"merge_method": "nuslerp", "models": _each("a", "d", weight=(0.7, 0.4))},
    "nuslerp, base": _about_base("nuslerp", weight=(0.7, 0.4)),
    "nuslerp, by row": _about_base(
        "nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}, weight=(0.7, 0.4)
    ),
    "nuslerp, by column": _about_base("nuslerp", {"nuslerp_flatten": False}, weight=(0.7, 0.4)),
    "multislerp": {"merge_method": "multislerp", "models": _each("a", "b", "d", weight=(0.5, 0.3, 0.7))},
    "multislerp, base": _about_base("multislerp", weight=(0.5, 0.3, 0.7)),
    "karcher": {"merge_method": "karcher", "models": _each("a", "b", "d"), "parameters": {"max_iter": 50}},
    "task_arithmetic": _about_base("task_arithmetic", {"lambda": 0.8}, weight=(0.5, 0.3, 0.7)),
    "task_arithmetic, normalized": _about_base("task_arithmetic", {"normalize": True}, weight=(0.5, 0.3, 0.7)),
    "ties": _about_base("ties", {"lambda": 0.9}, weight=(0.5, 0.3, 0.7), density=(0.5, 0.6, 0.4)),
    "ties, rescaled": _about_base("ties", {"rescale": True}, weight=(0.5, 0.3, 0.7), density=(0.5, 0.6, 0.4)),
    "ties, not normalized": _about_base("ties", {"normalize": False}, weight=(0.5, 0.3), density=(0.5, 0.6)),
    "breadcrumbs": _about_base("breadcrumbs", weight=(0.5, 0.3), density=(0.9, 0.6), gamma=(0.01, 0.1)),
    "breadcrumbs_ties": _about_base("breadcrumbs_ties", weight=(0.5, 0.3), density=(0.9, 0.6), gamma=(0.01, 0.1)),
    "model_stock": _about_base("model_stock"),
    "model_stock, filter-wise": _about_base("model_stock", {"filter_wise": True}),
    "sce": _about_base("sce", {"select_topk": 0.4}),
    "sce, all": _about_base("sce"),
    "nearswap": {
        "merge_method": "nearswap", "base_model": "a", "models": _each("a", "b"), "parameters": {"t": 0.005},
    },
    "arcee_fusion": {"merge_method": "arcee_fusion", "base_model": "a", "models": _each("a", "b")},
    "ram": _about_base("ram", {"epsilon": 0.005}),
    "ramplus_tl": _about_base("ramplus_tl", {"epsilon": 0.005, "r": 0.3, "alpha": 0.4}),
    "passthrough, slices": {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 2]}]},
            {"sources": [{"model": "b", "layer_range": [1, 3], "parameters": {"scale": 0.5}}]},
        ],
    },
}  # fmt: skip
CLOSE = 1e-5
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")


def make_models(folder: Path, dtype: torch.dtype, layers: int = 3) -> None:
    """The models of NAMES, relatives (base plus noise, of which a third is zero) but for d, which is on its own;
    and an adapter of a."""
    import transformers

    for number, name in enumerate(NAMES):
        rng = torch.Generator().manual_seed(number)
        words = WORDS + EXTRA.get(name, [])
        config = transformers.LlamaConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                shared = torch.Generator().manual_seed(sum(map(ord, key)) + 10**6 * (name == "d"))
                rows = 64 if tensor.shape[0] > 64 and ("embed" in key or "head" in key) else tensor.shape[0]
                own = torch.randn((rows, *tensor.shape[1:]), generator=shared) * 0.1
                tensor[:rows] = own + 1 if "norm" in key else own
                noise = torch.randn(tensor.shape, generator=rng) * 0.02
                tensor.add_(noise * (torch.rand(tensor.shape, generator=rng) < 2 / 3), alpha=float(name != "base"))
        model.to(dtype).save_pretrained(folder / name)
        _tokenizer(words).save_pretrained(folder / name)
    _save_adapter(folder, dtype)


def _tokenizer(words: Sequence[str]) -> Any:
    import tokenizers
    import transformers

    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens([word for word in words if word.startswith("<")])
    out = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    out.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return out


def _save_adapter(folder: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(99)
    part = "base_model.model.model.layers.1.mlp.up_proj"
    factors = {"lora_A": torch.randn(4, 32, generator=rng), "lora_B": torch.randn(48, 4, generator=rng)}
    (folder / "adapter").mkdir()
    tensors = {f"{part}.{key}.weight": (value * 0.1).to(dtype) for key, value in factors.items()}
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder / "a"), "layers_to_transform": [1],
    }  # fmt: skip
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def located(text: str, folder: Path) -> str:
    """A recipe in which the models' names are folders."""
    names = "|".join((*NAMES, "adapter"))
    text = re.sub(rf"\btiny/({names})\b", rf"{folder}/\1", text)
    return re.sub(rf"(\b(?:base_)?model: )({names})(?=[\s,}}]|$)", rf"\g<1>{folder}/\2", text, flags=re.MULTILINE)


def run_ours(recipe: Path, out: Path) -> None:
    run(read_recipes(recipe)).checkpoint.save(out)


def run_theirs(recipe: Path, out: Path) -> None:
    """mergekit's own functions behind `mergekit-yaml`, and behind `mergekit-multi` if there are several recipes."""
    from mergekit.config import MergeConfiguration
    from mergekit.graph import Executor
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions
    from mergekit.scripts import multimerge

    text = recipe.read_text()
    options = MergeOptions(random_seed=0, quiet=True, write_model_card=False, lora_merge_cache=str(out.parent / "lora"))
    if len(list(yaml.safe_load_all(text))) == 1:
        run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), options=options)
        return
    between = out.with_name("between")
    configs, needed = multimerge.load_config(text, str(between))
    tasks = multimerge.make_tasks(configs, needed, options, str(between), str(out), lazy=False)
    Executor(tasks, math_device="cpu", storage_device="cpu").execute()
    if None not in configs:
        (between / _last(needed)).rename(out)


def _last(needed: Mapping[str | None, set[str]]) -> str:
    (name,) = (name for name in needed if name and not any(name in others for others in needed.values()))
    return name


@dataclass(frozen=True)
class Agreement:
    """keys: whether the tensors' names, shapes and dtypes are the same. config: keys of config.json that differ.
    difference: the largest, as a share of the largest value of its tensor. where: that tensor. equal: the share of
    elements that are the same number. apart: how many differ by more than CLOSE of that largest value."""

    keys: bool
    config: tuple[str, ...]
    difference: float
    where: str
    equal: float
    apart: int


def compare(ours: Path, theirs: Path) -> Agreement:
    """Two folders."""
    a, b = tensors(ours), _reordered(tensors(theirs), theirs, ours)
    keys = {n: (t.shape, t.dtype) for n, t in a.items()} == {n: (t.shape, t.dtype) for n, t in b.items()}
    largest, where, same, count, apart = 0.0, "", 0, 0, 0
    for name in sorted(a.keys() & b.keys()):
        x, y = a[name].double(), b[name].double()
        count += x.numel()
        if x.shape != y.shape:
            largest, where = float("inf"), name
            continue
        same += int(torch.count_nonzero(a[name] == b[name]))
        shares = (x - y).abs() / y.abs().max().clamp(min=1e-30)
        apart += int(torch.count_nonzero(shares > CLOSE))
        difference = float(shares.max())
        if difference > largest:
            largest, where = difference, name
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    absent = object()
    config = sorted(k for k in first | second if first.get(k, absent) != second.get(k, absent))
    return Agreement(keys, tuple(config), largest, where, same / max(1, count), apart)


def _reordered(values: dict[str, Tensor], folder: Path, like: Path) -> dict[str, Tensor]:
    """With each token's rows where another folder has them: mergekit's union numbers new tokens in a random order."""
    if not all((f / "tokenizer.json").exists() for f in (folder, like)):
        return values
    own, wanted = (_vocabulary(f / "tokenizer.json") for f in (folder, like))
    if own == wanted or own.keys() != wanted.keys():
        return values
    out = dict(values)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = values[name].clone()
        for token, row in wanted.items():
            out[name][row] = values[name][own[token]]
    return out


def _vocabulary(file: Path) -> dict[str, int]:
    tokenizer = json.loads(file.read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {**tokenizer["model"]["vocab"], **added}


def tensors(folder: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            out |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return out


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """mergekit and its libraries write to all streams."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def agreement(recipe: str, models: Path) -> Agreement | str:
    """What both make of the text of a recipe, or the error of the one that does not run it."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        work = Path(folder)
        file = work / "recipe.yml"
        file.write_text(located(recipe, models))
        try:
            run_theirs(file, work / "theirs")
        except Exception as error:  # whatever it raises is its answer
            return _answer("mergekit", error, models, work)
        try:
            run_ours(file, work / "ours")
        except SymfuseError as error:
            return _answer("symfuse", error, models, work)
        return compare(work / "ours", work / "theirs")


def in_float32(recipe: str, stored: torch.dtype) -> str:
    """The recipe with mergekit told to compute in float32, and to write what it would have written."""
    parts = list(yaml.safe_load_all(recipe))
    for part in parts:
        wanted = part.get("out_dtype") or part.get("dtype") or str(stored)
        part |= {"dtype": "float32", "out_dtype": wanted.removeprefix("torch.")}
    return str(yaml.safe_dump_all(parts, sort_keys=False))


def _answer(tool: str, error: Exception, *folders: Path) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = f"{tool}: {type(error).__name__}: {lines[0]}"
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return text[:300].replace("|", "\\|")


def text_of(recipe: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(recipe), sort_keys=False))


@dataclass(frozen=True)
class Kept:
    """Of a random method, one model: the share of changed entries that is kept, and the mean of what is added, as a
    share of the task vector (1: the expectation is the task vector)."""

    rate: float
    expectation: float


def kept(method: str, density: float, models: Path) -> dict[str, Kept]:
    """By tool. The models have zeros in their task vectors, of which nobody can say whether they were kept."""
    recipe = _about_base(method, weight=(1.0,), density=(density,))
    base, other = tensors(models / "base"), tensors(models / "a")
    out = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        file = Path(folder) / "recipe.yml"
        file.write_text(located(text_of(recipe), models))
        for name, run in (("symfuse", run_ours), ("mergekit", run_theirs)):
            run(file, Path(folder) / name)
            merged = tensors(Path(folder) / name)
            added = torch.cat([(merged[n].double() - base[n].double()).flatten() for n in base])
            delta = torch.cat([(other[n].double() - base[n].double()).flatten() for n in base])
            changed = delta.abs() > 1e-4
            rate = float((added[changed].abs() > 1e-6).double().mean())
            out[name] = Kept(rate, float(added @ delta / (delta @ delta)))
    return out


INTRODUCTION = """\
The same recipe is run through both tools, on tiny random Llamas (width 32, feed-forward 48, 4 heads and 2 for keys, 3
layers, 64 tokens). `base` has the relatives `a`, `b` and `c`; `d` is unrelated. Seeds are 0 to 6, and 0 for mergekit.

- Compared are names, shapes and dtypes of the tensors, the keys of config.json, and the values. "largest difference"
  is relative to the largest value of its tensor. "same bits" is the share of elements that are the same number.
- The columns "in float32" repeat this with `dtype: float32` and the same `out_dtype` as before: mergekit then
  computes as symfuse always does.
- One step of bfloat16 is 3.9e-03 to 7.8e-03 of a value, one of float16 4.9e-04 to 9.8e-04.
- Where half-precision task vectors are selected by magnitude, many magnitudes are equal, and the two tools keep
  different entries. Every difference of ties and breadcrumbs in float32 is at such an entry (one in sce changes the
  weights of its whole tensor). arcee_fusion differs in the few entries that are at its threshold up to the rounding
  of mergekit's divergences.
"""

# Deliberate differences. The docstrings of the code say the same.
CHOICES = """\
**Arithmetic.** Half-precision inputs are merged in float32, or in float64 if intermediate values do not fit into
float32. Wider inputs, and everything that is computed before the merge (adapters, alignments, vocabularies), use
float64. Results are rounded once, to the output's dtype. Most methods of mergekit compute in `dtype`, or in the
stored dtype: for bfloat16 models, with a chain of bfloat16 roundings. Here `dtype` and `out_dtype` both mean the
output's dtype. Where all models have the same value in an entry and the weights sum to one, that value is copied
exactly. All tensors have the announced dtype: mergekit's arcee_fusion and ramplus_tl write float32 for bfloat16
models, with a config that says bfloat16. Sums do not depend on the order in which models are listed.

**Random methods.** DARE divides what it keeps by its density, DELLA by each entry's own probability, so that the
expectation is the task vector, as in the papers; mergekit's `rescale` restores a norm of the tensor instead. Masks
depend only on the seed, names and blocks: the bytes are the same for any number of threads and shards. DELLA refuses
an epsilon that makes probabilities reach 0 or 1. A single entry in a row has the mean probability.

**Selection.** Of equal magnitudes the first in stored order are kept, and exactly as many as the density requires:
max(1, int(density·n)) in TIES, int(density·n) in breadcrumbs, which drops fewer outliers rather than keep fewer. A
density of 0 adds nothing and has no vote. arcee_fusion takes quantiles of all values, where mergekit samples a
million values of larger tensors at random; it sums divergences in float64. nearswap moves by up to `t` however small
that is (mergekit: at least 1e-6 in its divisor). sce weights vectors by their energy however small they are.

**Degenerate inputs have a defined result**: on a straight line if two vectors are parallel, opposite, or one is zero
(nuslerp of rows: mergekit draws an arc of 90 degrees to a zero vector); karcher leaves zero tensors out of the
direction; model_stock returns the base for opposite vectors; equal and single inputs are returned unchanged.

**Refused here, accepted without a message by mergekit:** unknown keys (the error names the closest valid key), keys
that appear twice or have no effect (`residual_weight`); a parameter of the whole merge under one model; weights that
sum to zero or less where they are to be normalised (`normalize: false` uses them as they are); NaN and infinity in
inputs and results; configs that compute different functions (rope base, activation, norms: `--force-config`, or
`force_config: true` in the recipe); a target folder that exists (`--overwrite`). `int8_mask` is accepted and has no
effect.

**Vocabulary.** The rule for rows is mergekit's. New tokens of a union are numbered in the order of the models (in
mergekit in a random order, different in each run: the comparison above is by token). New padding rows are the mean of
all others.

**Config.** It is that of the base model, or of the first model if there is no base; the summary prints which. Its
dtype is that of the tensors.
"""

HEAD = (
    "| {} | tensors | config.json | largest difference | same bits | in float32 | same bits |\n"
    "|---|---|---|--:|--:|--:|--:|"
)


def _row(name: str, recipe: str, models: Path, stored: torch.dtype) -> str:
    results = [agreement(text, models) for text in (recipe, in_float32(recipe, stored))]
    cells: list[str] = []
    for number, result in enumerate(results):
        if isinstance(result, str):
            return f"| {name} | {result} |  |  |  |  |  |"
        if number == 0:
            config = ", ".join(f"`{key}`" for key in result.config) or "same"
            cells += ["same" if result.keys else "**differ**", config]
        cells += [f"{result.difference:.1e}", f"{result.equal:.2%}"]
    return f"| {name} | " + " | ".join(cells) + " |"


def report(dtypes: Sequence[torch.dtype]) -> Iterator[str]:
    """The page, in parts."""
    tools = ("symfuse", "mergekit", "torch", "transformers", "safetensors")
    yield "# Agreement with mergekit\n"
    yield "    python benchmarks/agreement.py > docs/agreement.md\n"
    yield "; ".join(f"{tool} {version(tool)}" for tool in tools) + f"; Python {platform.python_version()}.\n"
    yield INTRODUCTION
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            with quiet():
                make_models(Path(folder), dtype)
            yield f"## Methods, {str(dtype).removeprefix('torch.')}\n\n" + HEAD.format("method")
            for name, recipe in METHODS.items():
                yield _row(name, text_of(recipe), Path(folder), dtype)
            yield ""
            if dtype == torch.float32:
                yield _random(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            make_models(Path(folder), torch.float32, layers=40)
        yield "## Recipes of tests/recipes, float32 models of 40 layers\n\n" + HEAD.format("recipe")
        for path in sorted(RECIPES.glob("*.yml")):
            if path.name in NOT_BOTH:
                yield f"| {path.name} | {NOT_BOTH[path.name]} |  |  |  |  |  |"
            else:
                yield _row(path.name, path.read_text(), Path(folder), torch.float32)
        yield ""
    yield "## What differs by choice\n\n" + CHOICES


def _random(models: Path) -> str:
    lines = [
        "## Random methods\n",
        'One model, weight 1, float32. "kept" is the share of its changed entries that is kept. "added" is the added '
        "vector, projected onto the task vector, as a share of it (1 is the paper's expectation).\n",
        "| method | density | kept: symfuse | mergekit | added: symfuse | mergekit |\n|---|--:|--:|--:|--:|--:|",
    ]
    for method in RANDOM:
        for density in (0.3, 0.7):
            found = kept(method, density, models)
            a, b = found["symfuse"], found["mergekit"]
            lines.append(
                f"| {method} | {density} | {a.rate:.3f} | {b.rate:.3f} | {a.expectation:.3f} | {b.expectation:.3f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the models, default float32,bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in report([getattr(torch, name) for name in args.dtypes.split(",")]):
        sys.stdout.write(part + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

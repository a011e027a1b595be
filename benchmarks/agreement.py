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
from symfuse.pipeline import merge_recipes
from symfuse.recipe import read_recipes

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
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")


def make_models(folder: Path, dtype: torch.dtype, layers: int = 3) -> None:
    """The models of NAMES, relatives (base plus noise, of which two thirds are zero) but for d, which is on its own;
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
                tensor.add_(noise * (torch.rand(tensor.shape, generator=rng) < 1 / 3), alpha=float(name != "base"))
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
    merge_recipes(read_recipes(recipe)).save(out)


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
    final = None if None in configs else _last(needed)
    tasks = multimerge.make_tasks(configs, needed, options, str(between), str(out), lazy=False)
    Executor(
        list(tasks.values()) if isinstance(tasks, dict) else tasks, math_device="cpu", storage_device="cpu"
    ).execute()
    if final is not None:
        (between / final).rename(out)


def _last(needed: Mapping[str | None, set[str]]) -> str:
    (name,) = (name for name in needed if name and not any(name in others for others in needed.values()))
    return name


@dataclass(frozen=True)
class Agreement:
    """keys: whether the tensors' names, shapes and dtypes are the same. config: keys of config.json that differ.
    difference: the largest, as a share of the largest value of its tensor. where: that tensor. equal: the share of
    elements with the same bits."""

    keys: bool
    config: tuple[str, ...]
    difference: float
    where: str
    equal: float


def compare(ours: Path, theirs: Path) -> Agreement:
    """Two folders."""
    a, b = tensors(ours), tensors(theirs)
    keys = {n: (t.shape, t.dtype) for n, t in a.items()} == {n: (t.shape, t.dtype) for n, t in b.items()}
    largest, where, same, count = 0.0, "", 0, 0
    for name in sorted(a.keys() & b.keys()):
        x, y = a[name].double(), b[name].double()
        count += x.numel()
        if x.shape != y.shape:
            largest, where = float("inf"), name
            continue
        same += int(torch.count_nonzero(a[name] == b[name]))
        difference = float((x - y).abs().max() / y.abs().max().clamp(min=1e-30))
        if difference > largest:
            largest, where = difference, name
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    absent = object()
    config = sorted(k for k in first | second if first.get(k, absent) != second.get(k, absent))
    return Agreement(keys, tuple(config), largest, where, same / max(1, count))


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


# What differs on purpose; the docstrings of the code say the same where it is done.
CHOICES = """\
**Arithmetic.** Half-precision inputs are merged in float32, wider ones (and what is computed before the merge: adapters,
alignments, vocabularies) in float64, and rounded once, to the output's dtype. mergekit computes in the recipe's `dtype`
or the stored one, so that a bfloat16 merge there is a chain of bfloat16 roundings. Where all models agree in an entry
and the weights sum to one, the entry is written with its own bits. `dtype` and `out_dtype` are both the output's dtype
and never that of the computation.

**Random methods.** DARE divides what it keeps by its density, DELLA by each entry's own probability, so that the
expectation is the task vector, as in the papers; mergekit's `rescale` restores a norm of the tensor as drawn. Masks
depend on seed, names and block alone, and so are the same for any number of threads or shards and any order of models.
DELLA refuses an `epsilon` that gives probabilities outside 0 and 1.

**Selection.** TIES keeps exactly `max(1, int(density·n))` entries, of equal ones the first in stored order; of
bfloat16 inputs, whose differences tie often, mergekit keeps those that its sort happens to leave there. A density of 0
contributes nothing. `arcee_fusion` takes quantiles of all values, where mergekit draws a million of larger tensors at
random. `nearswap` has no least distance (mergekit: 1e-6). `sce` counts the entries to select among those whose
variance is not zero, and divides no small weights by a floor.

**Degenerate inputs** have defined results: equal, opposite and zero tensors, weights that sum to zero (refused where
dividing by them would be asked for), densities of 0 and 1.

**Refused here, taken without a word there:** unknown keys (with the nearest known one) and keys that do nothing; a
parameter of the whole merge given for one model, and the reverse of a type; NaN and infinity; two models of different
rope bases, activations or norms (`--force-config` overrides that); a target folder that is not empty; integers that
differ; a base model that a method has no use for; rows of an embedding that the tokenizer does not explain.

**Config and files.** The config is that of the base model, else of the first model; `dtype` is that of most bytes
written. Vocabulary rows follow mergekit's rule, but new padding rows are the mean of the others.
"""


def _row(name: str, results: Sequence[Agreement | str]) -> str:
    cells = []
    for result in results:
        if isinstance(result, str):
            cells += [f"— {result}", "", "", ""]
            continue
        config = ", ".join(f"`{key}`" for key in result.config) or "same"
        cells += [
            "same" if result.keys else "**differ**", config, f"{result.difference:.1e}", f"{result.equal:.1%}",
        ]  # fmt: skip
    return f"| {name} | " + " | ".join(cells) + " |"


HEAD = "| {} | tensors | config.json | largest difference | same bits |\n|---|---|---|--:|--:|"


def report(dtypes: Sequence[torch.dtype]) -> Iterator[str]:
    """The page, in parts."""
    tools = ("symfuse", "mergekit", "torch", "transformers", "safetensors")
    yield "# Agreement with mergekit\n"
    yield "    python benchmarks/agreement.py > docs/agreement.md\n"
    yield "; ".join(f"{tool} {version(tool)}" for tool in tools) + f"; Python {platform.python_version()}.\n"
    yield (
        "The same recipe through both, over tiny random Llamas (width 32, feed-forward 48, 4 heads and 2 for keys, 3 "
        "layers, 64 tokens; `base`, relatives `a`, `b` and `c`, a stranger `d`; seeds 0 to 6, and 0 for mergekit). "
        "The largest difference is relative to the largest value of its tensor. Names, shapes and dtypes of tensors "
        "are compared, and the keys of config.json.\n"
    )
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as folder:
            with quiet():
                make_models(Path(folder), dtype)
            yield f"## Methods, {str(dtype).removeprefix('torch.')}\n\n" + HEAD.format("method")
            for name, recipe in METHODS.items():
                yield _row(name, [agreement(text_of(recipe), Path(folder))])
            yield ""
            if dtype == torch.float32:
                yield _random(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            make_models(Path(folder), torch.float32, layers=40)
        yield "## Recipes of tests/recipes, float32 models of 40 layers\n\n" + HEAD.format("recipe")
        for path in sorted(RECIPES.glob("*.yml")):
            if path.name in NOT_BOTH:
                yield _row(path.name, [NOT_BOTH[path.name]])
            else:
                yield _row(path.name, [agreement(path.read_text(), Path(folder))])
        yield ""
    yield "## What differs by choice\n\n" + CHOICES


def _random(models: Path) -> str:
    lines = [
        "## Random methods\n",
        "One model, weight 1, float32: the share of its changed entries that is kept, and what is added as a share of "
        "the task vector (projected onto it; 1 is the paper's expectation).\n",
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

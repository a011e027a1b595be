"""The models, their differences and the cost of the output, from headers, configs and tokenizer files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from symfuse import adapters
from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint
from symfuse.io.direct import PIECE
from symfuse.io.shards import parse_size, plan_shards
from symfuse.matching.axes import axes_of
from symfuse.merging import Output
from symfuse.merging.engine import effective_weights
from symfuse.merging.stream import PIECE as BLOCK
from symfuse.model import Model
from symfuse.model.config import differences, text_config
from symfuse.model.undeclared import is_tied
from symfuse.recipes.check.report import Cost, Field, ModelFacts, Resolved, Tokens
from symfuse.recipes.schema import ModelRef, Recipe
from symfuse.rewriting.ties import tied_heads
from symfuse.rewriting.vocabulary import compare_tokenizers, has_tokenizer, read_tokenizer
from symfuse.rewriting.vocabulary.tokenizer import without_rows

START = 250_000_000  # bytes in use once everything is imported (200 MB measured), rounded up
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
SPEED = 500e6  # bytes per second, read and written together, of element-wise methods on two cores and a local disk
# A method on k models holds (k + 2)·n blocks at once, in addition to START and not counting mapped files. Measured on
# two threads in bfloat16: linear n = 2, task_arithmetic 2.6, karcher 1.6, ram 3.3, ties and breadcrumbs 3.7,
# dare_linear 4.5, dare_ties 5.9, sce and arcee_fusion 6.2, della 7, della_linear 8.8.
LEAN = {"linear", "soup", "passthrough", "task_arithmetic"}
LEAN_COPIES, COPIES = 3, 9
# Methods that need whole matrices: copies in float64, for each model and the base (measured 3.5 and 5.7).
WHOLE = {"tsv": 6, "iso_c": 4, "iso_cts": 6}


def model_facts(ref: ModelRef, checkpoint: Checkpoint, model: Model | None, gives: Sequence[str]) -> ModelFacts:
    """model: None if its tensors are not those of its family."""
    infos = [checkpoint.info(name) for name in checkpoint]
    axes = {} if model is None else model.spec.axes
    names = axes_of("all", axes)
    return ModelFacts(
        name=str(ref),
        family=str(checkpoint.config.get("model_type", "unknown")),
        declared=model is not None and model.declared,
        alignment=", ".join(names) if model is not None and model.declared else "none: by names and shapes",
        parameters=sum(info.numel for info in infos),
        bytes=sum(info.nbytes for info in infos),
        dtypes=dtypes_of(checkpoint),
        tied=is_tied(checkpoint.config, checkpoint) if model is None or not model.declared else bool(tied_heads(model)),
        vocabulary=_rows(checkpoint),
        layers=None if model is None else model.spec.depth or None,
        tokenizer=has_tokenizer(checkpoint),
        adapter=adapter_of(ref),
        buffers=[] if model is None else sorted(name for name in model.spec.buffers if name in checkpoint),
        gives=list(gives),
    )


def _rows(checkpoint: Checkpoint) -> int | None:
    rows = text_config(checkpoint.config).get("vocab_size", checkpoint.config.get("vocab_size"))
    return rows if type(rows) is int else None


def dtypes_of(checkpoint: Checkpoint) -> dict[str, int]:
    """The number of tensors of each dtype, the most frequent first."""
    counts = Counter(str(checkpoint.info(name).dtype).removeprefix("torch.") for name in checkpoint)
    return dict(counts.most_common())


def adapter_of(ref: ModelRef) -> str | None:
    """The adapter that is added to this model, or the model itself if it is an adapter (added to its base)."""
    if ref.adapter is not None:
        return str(ref.adapter)
    return ref.path if Path(ref.path).is_dir() and adapters.is_adapter(Path(ref.path)) else None


def contradicted_dtype(checkpoint: Checkpoint) -> str | None:
    """A warning if the dtype in config.json is not the one that most bytes are stored in."""
    named = text_config(checkpoint.config).get("dtype") or checkpoint.config.get("torch_dtype")
    named = str(named or checkpoint.config.get("dtype") or "").removeprefix("torch.")
    sizes: Counter[str] = Counter()
    for info in map(checkpoint.info, checkpoint):
        if info.dtype.is_floating_point:
            sizes[str(info.dtype).removeprefix("torch.")] += info.nbytes
    if not sizes or named in ("", "auto") or sizes.most_common(1)[0][0] == named:
        return None
    words = ", ".join(f"{n / sum(sizes.values()):.0%} {dtype}" for dtype, n in sizes.most_common())
    return (
        f"{checkpoint.name}: config.json has dtype {named}, but the tensors are stored as {words}; the result keeps "
        "the dtype of each tensor (set `dtype` for a single one), and its config.json names the most frequent"
    )


def config_fields(checkpoints: Sequence[Checkpoint]) -> list[Field]:
    """The fields in which the first config differs from the others, those that matter first."""
    first, *others = checkpoints
    out = []
    for other in others:
        if first.config.get("model_type") == other.config.get("model_type"):
            names = [first.name, other.name]
            out += [Field(names, d.field, d.ours, d.theirs, d.matters) for d in differences(first, other)]
    return sorted(out, key=lambda one: not one.matters)


def tokenizer_differences(
    checkpoints: Sequence[Checkpoint], reconciled: bool, warn: Callable[[str], None]
) -> list[Tokens]:
    """How tokenizers differ, token by token. reconciled: whether the recipe maps them to one vocabulary."""
    theirs = []
    for checkpoint in filter(has_tokenizer, checkpoints):
        try:
            theirs.append(read_tokenizer(checkpoint))
        except SymfuseError as error:
            warn(f"not compared with other tokenizers: {error}")
            continue
        rows = _rows(checkpoint)
        if not reconciled and rows is not None and (fault := without_rows(theirs[-1], rows)):
            warn(fault)  # no error: rows are merged by index, and texts may not use these tokens
    differences = [difference for difference in compare_tokenizers(theirs) if difference]
    for d in () if reconciled else differences:
        if d.warning:
            warn(d.warning)
    return [
        Tokens(
            [d.model, d.other], d.same, len(d.renumbered), len(d.only_model), len(d.only_other), len(d.mixed), str(d)
        )
        for d in differences
    ]


def gives(models: Mapping[ModelRef, Checkpoint], template: ModelRef, recipe: Recipe) -> dict[ModelRef, list[str]]:
    """What the result takes from each model. A tokenizer built from several models belongs to none of them."""
    out: dict[ModelRef, list[str]] = {ref: [] for ref in models}
    if template in models:
        out[template] = ["config", "names", "dtypes"]
    source = "base" if recipe.tokenizer is None else recipe.tokenizer.source
    giver = template if source == "base" else source
    if isinstance(giver, ModelRef) and giver in models and has_tokenizer(models[giver]):
        out[giver].append("tokenizer")
    return out


def cost(
    merged: Checkpoint, outputs: Mapping[str, Output], moved: Collection[str], *, shard: int | str, threads: int | None
) -> Cost:
    """The predicted cost. moved: names of models whose tensors are computed whole: aligned ones, and those with an
    adapter.

    A worker holds, for an element-wise method on k tensors, k + 2 blocks (2¹⁹ values, or a row) in the working dtype,
    COPIES times; for methods of WHOLE, whole matrices; for each moved model, a tensor and a copy; and a piece to write.
    In the worst case all workers hold the largest tensors at the same time.
    """
    infos = {name: merged.info(name) for name in merged}
    workers = min(len(infos), threads or max(2, os.cpu_count() or 1))
    peaks = sorted((_held(output, moved) for output in outputs.values()), reverse=True)[:workers]
    method = next((output.method.name for output in outputs.values() if output.method is not None), "copy")
    how = f"whole matrices ({method})" if method in WHOLE else "blocks"
    how += f" and whole tensors of {', '.join(sorted(moved))}" if moved else ""
    guided = any(output.method is not None and output.method.learn is not None for output in outputs.values())
    others = ["matching"] * bool(moved) + ["learning from data"] * guided
    size = sum(info.nbytes for info in infos.values())
    read = sum(t.info.nbytes for o in outputs.values() for t in o.inputs)
    config = text_config(merged.config)
    layers = next((config[key] for key in LAYERS if type(config.get(key)) is int), None)
    return Cost(
        tensors=len(infos),
        bytes=size,
        files=len(plan_shards(infos, parse_size(shard))),
        dtypes=dict(Counter(str(i.dtype).removeprefix("torch.") for i in infos.values()).most_common()),
        layers=layers,
        read=read,
        written=size,
        threads=workers,
        memory=START + workers * PIECE + sum(peaks),
        memory_of=f"{workers} threads, {how}" + (f"; {' and '.join(others)} not counted" if others else ""),
        disk_needed=size + size // 100,
        disk_free=None,
        seconds=(read + size) / SPEED,
        speed=f"at {SPEED / 1e9:g} GB/s read and written, assumed; without "
        + (" and ".join(others) or ("decompositions" if method in WHOLE else "start-up")),
    )


def _held(output: Output, moved: Collection[str]) -> int:
    terms = [*output.terms, *([output.base] if output.base else [])]
    infos = [term.info for term in terms]
    half = all(i.dtype.itemsize <= 2 for i in infos) and all(t.stored for t in terms)
    computed = [t for t in terms if t.checkpoint.name in moved]
    item = 4 if half and not computed else 8
    numel = output.info.numel
    whole = 2 * numel * 8 * len(computed)
    if output.method is None:
        return whole + min(numel, BLOCK) * item
    if output.method.name in WHOLE and len(output.info.shape) in (2, 3):
        return whole + numel * 8 * len(terms) * WHOLE[output.method.name]
    columns = output.info.shape[-1] if len(output.info.shape) > 1 else math.prod(output.info.shape)
    block = min(numel, max(1, BLOCK // max(1, columns)) * columns)
    copies = LEAN_COPIES if output.method.name in LEAN else COPIES
    return whole + int(block * item * (len(terms) + 2) * copies)


def weights_of(outputs: Mapping[str, Output]) -> dict[str, list[float]]:
    """The smallest and the largest effective weight of each model; empty if the method has no weights."""
    out: dict[str, list[float]] = {}
    for output in outputs.values():
        guided = output.method is not None and output.method.learn is not None  # its weights are not known yet
        weights = None if output.method is None or guided else effective_weights(output)
        for term, weight in zip(output.terms, weights or (), strict=False):
            low, high = out.setdefault(term.checkpoint.name, [weight, weight])
            out[term.checkpoint.name] = [min(low, weight), max(high, weight)]
    return out


def resolved(outputs: Mapping[str, Output]) -> list[Resolved]:
    """The first, the middle and the last merged tensor, with their parameters."""
    names = [name for name, output in outputs.items() if output.method is not None]
    examples = dict.fromkeys(names[i] for i in (0, len(names) // 2, len(names) - 1)) if names else {}
    return [
        Resolved(
            name,
            [term.checkpoint.name for term in outputs[name].terms],
            effective_weights(outputs[name]),
            dict(outputs[name].parameters or {}),
        )
        for name in examples
    ]

"""What each model is, and what differs between them, from headers, configs and tokenizer files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from symfuse import adapters
from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint
from symfuse.matching.axes import axes_of
from symfuse.model import Model
from symfuse.model.config import differences, text_config
from symfuse.model.undeclared import is_tied
from symfuse.recipes.check.report import Field, ModelFacts, Tokens
from symfuse.recipes.schema import ModelRef, Recipe
from symfuse.rewriting.ties import tied_heads
from symfuse.rewriting.vocabulary import compare_tokenizers, has_tokenizer, read_tokenizer
from symfuse.rewriting.vocabulary.tokenizer import without_rows


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
    """How many tensors there are of each dtype, the most frequent first."""
    counts = Counter(str(checkpoint.info(name).dtype).removeprefix("torch.") for name in checkpoint)
    return dict(counts.most_common())


def adapter_of(ref: ModelRef) -> str | None:
    """The adapter that is added to this model, or that it is with the base which its own config names."""
    if ref.adapter is not None:
        return str(ref.adapter)
    return ref.path if Path(ref.path).is_dir() and adapters.is_adapter(Path(ref.path)) else None


def contradicted_dtype(checkpoint: Checkpoint) -> str | None:
    """A warning if config.json names a dtype that no tensor, or not the most, is stored in."""
    said = text_config(checkpoint.config).get("dtype") or checkpoint.config.get("torch_dtype")
    said = str(said or checkpoint.config.get("dtype") or "").removeprefix("torch.")
    sizes: Counter[str] = Counter()
    for info in map(checkpoint.info, checkpoint):
        if info.dtype.is_floating_point:
            sizes[str(info.dtype).removeprefix("torch.")] += info.nbytes
    if not sizes or said in ("", "auto") or sizes.most_common(1)[0][0] == said:
        return None
    words = ", ".join(f"{n / sum(sizes.values()):.0%} {dtype}" for dtype, n in sizes.most_common())
    return (
        f"{checkpoint.name}: config.json says dtype {said}, and of the bytes of the tensors {words}; the result has "
        "dtypes tensor by tensor (set `dtype` for one), and its config.json names the most frequent"
    )


def config_fields(checkpoints: Sequence[Checkpoint]) -> list[Field]:
    """The fields in which the first config differs from the others, those that matter first."""
    first, *others = checkpoints
    out = []
    for other in others:
        if first.config.get("model_type") == other.config.get("model_type"):
            names = [first.name, other.name]
            out += [Field(names, d.field, d.ours, d.theirs, d.matters) for d in differences(first, other)]
    return sorted(out, key=lambda found: not found.matters)


def tokenizer_differences(checkpoints: Sequence[Checkpoint], given: bool, warn: Callable[[str], None]) -> list[Tokens]:
    """How tokenizers differ, token by token. given: the recipe says what becomes of vocabularies."""
    theirs = []
    for checkpoint in filter(has_tokenizer, checkpoints):
        try:
            theirs.append(read_tokenizer(checkpoint))
        except SymfuseError as error:
            warn(f"not compared with other tokenizers: {error}")
            continue
        rows = _rows(checkpoint)
        if not given and rows is not None and (fault := without_rows(theirs[-1], rows)):
            warn(fault)  # no error: rows are merged by number, and a text may do without these tokens
    found = [difference for difference in compare_tokenizers(theirs) if difference]
    for d in () if given else found:
        if d.warning:
            warn(d.warning)
    return [
        Tokens(
            [d.model, d.other], d.same, len(d.renumbered), len(d.only_model), len(d.only_other), len(d.mixed), str(d)
        )
        for d in found
    ]


def gives(models: Mapping[ModelRef, Checkpoint], template: ModelRef, recipe: Recipe) -> dict[ModelRef, list[str]]:
    """What the result has of each model; a tokenizer that is put together, or that of shared rows, is no one's here."""
    out: dict[ModelRef, list[str]] = {ref: [] for ref in models}
    if template in models:
        out[template] = ["config", "names", "dtypes"]
    source = "base" if recipe.tokenizer is None else recipe.tokenizer.source
    giver = template if source == "base" else source
    if isinstance(giver, ModelRef) and giver in models and has_tokenizer(models[giver]):
        out[giver].append("tokenizer")
    return out

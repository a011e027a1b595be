"""Whole fine-tunes: B + b (g(A) − B) + α (g(FT) − g(A)), tensor by tensor when it is read.

The difference is taken after the alignment, so that what an alignment does beside its linear part (folded norms,
translated biases) is that of the fine-tune, and the result is g(FT) where B is g(A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from symfuse.alignment import Alignment
from symfuse.errors import IncompatibleError
from symfuse.guard import guarded
from symfuse.io import Checkpoint
from symfuse.matching.auto import SAME_BASIS, cosine
from symfuse.merging.engine import Merged, Output, Term, typed
from symfuse.methods import lookup
from symfuse.model import Model
from symfuse.model.config import differences
from symfuse.model.model import let_pass, require_same_sizes
from symfuse.recipes.align import match_pair
from symfuse.recipes.stage import files_in, vocabulary_tensors
from symfuse.rewriting.ties import match_ties
from symfuse.rewriting.vocabulary import TokenSource, Vocabulary, build, has_tokenizer, read_tokenizer, rewrite
from symfuse.widths.match import match_alike

# What a config says of a task head, beside its class.
HEAD_FIELDS = ("architectures", "num_labels", "id2label", "label2id", "problem_type", "classifier_dropout")


@dataclass(frozen=True)
class Moved:
    """g(FT), g(A) and B in the frame of g, with equal vocabularies. notes: messages for the user."""

    finetune: Model
    base: Model
    onto: Model
    alignment: Alignment
    notes: tuple[str, ...] = ()


def move_all(
    finetune: Checkpoint, base: Checkpoint, onto: Checkpoint, alignment: Alignment | None = None, **options: Any
) -> Moved:
    """The fine-tune and its base, moved to B by the alignment, or by one that is matched now: widened first if B is
    wider. options: of `match_pair`.

    Raises IncompatibleError for models of other families or depths, for a fine-tune that is not one of that base by its
    shapes, and for vocabularies that differ where there is no tokenizer.
    """
    models = [Model.of(checkpoint) for checkpoint in (onto, base, finetune)]
    notes = [_require_alike(models[1], models[2], widths=False), _require_alike(models[0], models[1], widths=True)]
    if (alike := cosine(models[1], models[2])) < SAME_BASIS:
        notes.append(
            (
                f"{finetune.name} has a cosine of {alike:.2f} with {base.name}: it does not look like a fine-tune of "
                "it, and only the difference of a model and its fine-tune can be moved",
            )
        )
    differ = _vocabularies_differ([onto, base, finetune])
    if sizes(models[0]) != sizes(models[1]):
        if alignment is not None:
            raise IncompatibleError(
                f"{onto.name} has other widths than {base.name}, and the alignment is of models of one width; leave it "
                "out, so that one is matched"
            )
        data = options.pop("batches", None)
        if data is not None or differ:
            what = "data" if data is not None else "vocabularies that differ"
            raise IncompatibleError(f"{onto.name} has other widths than {base.name}, which does not go with {what}")
        wide, alignment, alike_wide = match_alike(models[1], models[0], **_of_widths(options))
        base, finetune = wide.checkpoint, alike_wide(models[2]).checkpoint
        notes.append((f"{finetune.name} and {base.name} are widened to {onto.name}, exactly (docs/widths.md)",))
    elif alignment is None:
        source, anchor = _of_common_tokens(base, onto) if differ else (base, onto)
        alignment = match_pair(Model.of(source), Model.of(anchor), **options)
    there = [alignment.in_frame(onto), alignment(base), alignment(finetune)]
    return _together(there, alignment, [note for some in notes for note in some], differ)


def _of_widths(options: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in options.items() if key != "learning"}
    return own | ({"axes": "all"} if own.get("axes") == "auto" else {})


def _together(there: list[Checkpoint], alignment: Alignment, notes: list[str], differ: bool) -> Moved:
    """With equal ties and vocabularies."""
    there, of_ties = match_ties(there)
    if differ:
        there, of_rows = _in_one_vocabulary(there)
        notes = [*notes, *of_rows]
    onto, base, finetune = (Model.of(checkpoint) for checkpoint in there)
    return Moved(finetune, base, onto, alignment, (*notes, *of_ties))


def _require_alike(first: Model, second: Model, *, widths: bool) -> tuple[str, ...]:
    """Notes on configs that differ; IncompatibleError for models of different families and, unless `widths`, sizes."""
    pair = f"{first.name} and {second.name}"
    if first.spec.family != second.spec.family:
        raise IncompatibleError(
            f"{pair}: one is a {first.spec.family}, the other a {second.spec.family}; a fine-tune moves between models "
            "of one family"
        )
    apart = sizes(first) != sizes(second)
    if apart and not widths:
        require_same_sizes(_wordless(first), _wordless(second), pair, layers=True, force_config=False)
    fields = [] if apart else differences(first.checkpoint, second.checkpoint)
    return tuple(let_pass([d for d in fields if "vocab" not in d.field], pair, False, True))


def _wordless(model: Model) -> Model:
    """Without the axis of the vocabulary, whose sizes may differ."""
    axes = {name: axis for name, axis in model.spec.axes.items() if name != "vocab"}
    return replace(model, spec=replace(model.spec, axes=axes))


def sizes(model: Model) -> dict[str, int]:
    """The sizes of all axes that are not of the vocabulary or a head."""
    heads = {a for name in model.spec.heads for a in model.spec.tensors[name].layout.names}
    others = {a for n, d in model.spec.tensors.items() if n not in model.spec.heads for a in d.layout.names}
    return {axis: size for axis, size in model.spec.sizes.items() if axis != "vocab" and axis not in heads - others}


# -- vocabularies ----------------------------------------------------------------------------------


def _vocabularies_differ(checkpoints: Sequence[Checkpoint]) -> bool:
    """Whether rows have to be carried by token. IncompatibleError if they have to, and there are no tokenizers."""
    counts = {one.name: {one.info(n).shape[d] for n, d in vocabulary_tensors(one).items()} for one in checkpoints}
    if all(has_tokenizer(one) for one in checkpoints) and all(counts.values()):
        tokens = [read_tokenizer(one).tokens for one in checkpoints]
        return any(other != tokens[0] for other in tokens[1:]) or len({str(count) for count in counts.values()}) > 1
    if len({str(count) for count in counts.values() if count}) > 1:
        raise IncompatibleError(
            f"the vocabularies differ ({', '.join(f'{name}: {max(c)} rows' for name, c in counts.items() if c)}); rows "
            "are carried by token, for which each model needs its tokenizer: put its files beside the weights"
        )
    return False


def _of_common_tokens(base: Checkpoint, onto: Checkpoint) -> list[Checkpoint]:
    """For matching: with the tokens of B, those that A has not being zero in both."""
    known = read_tokenizer(base).tokens
    absent = [token for token in read_tokenizer(onto).tokens if token not in known]
    zero = {token: TokenSource("zero", force=True) for token in absent}
    both = [onto.replace(name=f"{onto.name} (onto)"), base]
    onto, base = rewrite(both, build(both, 0, base=0, tokens=zero), vocabulary_tensors)
    return [base, onto]


def _in_one_vocabulary(there: Sequence[Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    """B, g(A) and g(FT) with the tokens of B, and those that the fine-tune added: whose rows are the fine-tune's. The
    rows that A has not are those of B in all three, so that nothing is added to them."""
    names = [f"{one.name} ({role})" for one, role in zip(there, ("onto", "base", "fine-tune"), strict=True)]
    named = [one.replace(name=name) for one, name in zip(there, names, strict=True)]
    ours, old, new = (read_tokenizer(one).tokens for one in named)
    tokens = {token: TokenSource("model", names[2]) for token in new if token not in old and token not in ours}
    tokens |= {token: TokenSource("model", names[1]) for token in ours if token in old and token not in new}
    vocabulary = build(named, 0, base=0, tokens=tokens)
    out = rewrite(named, vocabulary, vocabulary_tensors)
    files = files_in(vocabulary, there[0])
    out = [one.replace(name=old.name) for one, old in zip(out, there, strict=True)]
    return [out[0].replace(files=files), *out[1:]], _of_rows(vocabulary, there[0].name, tokens, new, old)


def _of_rows(vocabulary: Vocabulary, onto: str, tokens: Any, new: Any, old: Any) -> list[str]:
    added = sum(token in new and token not in old for token in tokens)
    return [
        f"rows of the vocabulary are carried by token: {vocabulary.size} rows, the tokens of {onto} and {added} that "
        "the fine-tune added"
    ]


# -- the result ------------------------------------------------------------------------------------


def combined(moved: Moved, alpha: float, towards: float, device: str, inputs: Sequence[Checkpoint]) -> Checkpoint:
    """B + towards·(g(A) − B) + alpha·(g(FT) − g(A)), in the dtypes of B; a head and other tensors that A or B has not
    are those of g(FT), with its class. inputs: the models as they were opened, B first."""
    onto, finetune = moved.onto, moved.finetune
    own = all(finetune.spec.shares(name, onto.spec) or name in finetune.spec.tied for name in finetune.spec.tensors)
    like = onto if own else finetune
    models = [model.as_in(like.spec) for model in (onto, finetune, moved.base)]
    spec = models[0 if own else 1].spec
    weights = [1.0 - towards, alpha, towards - alpha]
    outputs = {}
    for name in spec.tensors:
        if name in spec.tied:
            continue
        holders = [model for model in models if name in model.spec.tensors and spec.shares(name, model.spec)]
        terms = tuple(Term(one.checkpoint, one.spec.file_name(name)) for one in holders)
        floats = terms[0].info.dtype.is_floating_point
        alone = len(terms) < len(models) or not floats
        term = terms[holders.index(models[1])] if alone and models[1] in holders and floats else terms[0]
        if alone:
            info = typed(term.info, _dtype(onto)) if term.checkpoint is models[1].checkpoint else term.info
            outputs[spec.file_name(name)] = Output(info, (term,))
        else:
            parameters = {"weight": weights, "normalize": False}
            outputs[spec.file_name(name)] = Output(terms[0].info, terms, None, lookup("linear"), parameters)
    config = dict(onto.checkpoint.config)
    if not own:
        config = {k: v for k, v in config.items() if k not in HEAD_FIELDS}
        config |= {k: v for k, v in finetune.checkpoint.config.items() if k in HEAD_FIELDS}
        pad = finetune.checkpoint.config.get("pad_token_id")
        config |= {"pad_token_id": pad} if config.get("pad_token_id") is None and pad is not None else {}
    tensors = Merged(outputs, device=device)
    name = f"{inputs[-1].name} on {inputs[0].name}"
    out = onto.checkpoint.replace(tensors=tensors, config=config, name=name, before_save=())
    out = out.replace(sources=[folder for one in inputs for folder in one.sources])
    return guarded(out, [inputs[0] if own else inputs[-1]])


def _dtype(model: Model) -> Any:
    """Of the floating-point tensors."""
    return next(info.dtype for info in model.checkpoint.infos.values() if info.dtype.is_floating_point)

"""Whole fine-tunes: B + b (g(A) − B) + α (g(FT) − g(A)), tensor by tensor when it is read.

The difference is taken after the alignment, so that what an alignment does beside its linear part (folded norms,
translated biases) is that of the fine-tune, and the result is g(FT) where B is g(A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from symfuse.alignment import Alignment
from symfuse.errors import IncompatibleError
from symfuse.guard import guarded
from symfuse.io import Checkpoint
from symfuse.matching.auto import SAME_BASIS, cosine
from symfuse.merging.engine import Merged, Output, Term, typed
from symfuse.messages import some
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
    """g(FT), g(A) and B in the frame of g, with equal vocabularies. by_token: whether rows were carried by token.
    notes: messages for the user."""

    finetune: Model
    base: Model
    onto: Model
    alignment: Alignment
    by_token: bool = False
    notes: tuple[str, ...] = ()


def move_all(
    finetune: Checkpoint,
    base: Checkpoint,
    onto: Checkpoint,
    alignment: Alignment | None = None,
    *,
    adapter: bool = False,
    **options: Any,
) -> Moved:
    """The fine-tune and its base, moved to B by the alignment, or by one that is matched now: widened first if B is
    wider. adapter: whether the change is one, of B as wide as A. options: of `match_pair`.

    Raises IncompatibleError for models of other families or depths, for a fine-tune that is not one of that base by its
    shapes, and for vocabularies that differ where there is no tokenizer.
    """
    b, a, ft = (Model.of(checkpoint) for checkpoint in (onto, base, finetune))
    notes = [*_require_one_family(a, ft), *_require_one_family(b, a)]
    if not _same_sizes(a, ft):
        require_same_sizes(a, ft, f"{base.name} and {finetune.name}", layers=True, force_config=False)
    if (alike := cosine(a, ft)) < SAME_BASIS:
        notes.append(
            f"{finetune.name} has a cosine of {alike:.2f} with {base.name}: it does not look like a fine-tune of it, "
            "and only the difference of a model and its fine-tune can be moved"
        )
    differ = _vocabularies_differ([onto, base, finetune])
    if not _same_sizes(a, b):
        given = {"a known alignment": alignment is not None, "an adapter (merge it into its base)": adapter}
        given |= {word: word in options for word in ("batches", "learning")} | {"other vocabularies": differ}
        if wrong := [what for what, there in given.items() if there]:
            raise IncompatibleError(
                f"{onto.name} has other widths than {base.name}, which are matched by weights alone and do not go with "
                f"{some(wrong)}; leave that out, or give models of one width"
            )
        options |= {"axes": "all"} if options["axes"] == "auto" else {}
        wide, alignment, widen_alike = match_alike(a, b, **options)
        base, finetune = wide.checkpoint, widen_alike(ft).checkpoint
        notes.append(f"{ft.name} and {a.name} are widened to {b.name}, exactly (docs/widths.md)")
    elif alignment is None:
        source, anchor = _of_common_tokens(base, onto) if differ else (base, onto)
        alignment = match_pair(Model.of(source), Model.of(anchor), **options)
    there, of_ties = match_ties([alignment.in_frame(onto), alignment(base), alignment(finetune)])
    there, of_rows = _in_one_vocabulary(there) if differ else (there, [])
    onto, base, finetune = there
    return Moved(Model.of(finetune), Model.of(base), Model.of(onto), alignment, differ, (*notes, *of_ties, *of_rows))


def _require_one_family(first: Model, second: Model) -> list[str]:
    """Notes on configs that differ; IncompatibleError for models of different families."""
    pair = f"{first.name} and {second.name}"
    if first.spec.family != second.spec.family:
        raise IncompatibleError(
            f"{pair}: one is a {first.spec.family}, the other a {second.spec.family}; a fine-tune moves between models "
            "of one family"
        )
    fields = differences(first.checkpoint, second.checkpoint) if _same_sizes(first, second) else []
    return let_pass([d for d in fields if "vocab" not in d.field], pair, force_config=False, layers=True)


def _same_sizes(first: Model, second: Model) -> bool:
    """Whether two models have the same sizes, those of the vocabulary and of task heads aside."""
    ours, theirs = ({n: a for n, a in m.spec.sizes.items() if n not in _of_heads(m)} for m in (first, second))
    return all(theirs[axis] == size for axis, size in ours.items() if axis in theirs)


def _of_heads(model: Model) -> set[str]:
    """The axis of the vocabulary, and those of task heads alone."""
    tensors, heads = model.spec.tensors, model.spec.heads
    others = {axis for name in tensors.keys() - heads for axis in tensors[name].layout.names}
    return {"vocab", *(axis for name in heads for axis in tensors[name].layout.names if axis not in others)}


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
    onto, base = _rows(both, build(both, 0, base=0, tokens=zero))
    return [base, onto]


def _in_one_vocabulary(there: Sequence[Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    """B, g(A) and g(FT) with the tokens of B, and those that the fine-tune added: whose rows are the fine-tune's. The
    rows that A has not are those of B in all three, so that nothing is added to them."""
    names = [f"{one.name} ({role})" for one, role in zip(there, ("onto", "base", "fine-tune"), strict=True)]
    named = [one.replace(name=name) for one, name in zip(there, names, strict=True)]
    ours, old, new = (read_tokenizer(one).tokens for one in named)
    tokens = {token: TokenSource("model", names[2]) for token in new if token not in old and token not in ours}
    note = f"rows are carried by token: the {len(ours)} of {there[0].name}, and {len(tokens)} that the fine-tune added"
    tokens |= {token: TokenSource("model", names[1]) for token in ours if token in old and token not in new}
    vocabulary = build(named, 0, base=0, tokens=tokens)
    out = [one.replace(name=was.name) for one, was in zip(_rows(named, vocabulary), there, strict=True)]
    return [out[0].replace(files=files_in(vocabulary, there[0])), *out[1:]], [note]


def _rows(checkpoints: Sequence[Checkpoint], vocabulary: Vocabulary) -> list[Checkpoint]:
    return rewrite(checkpoints, vocabulary, vocabulary_tensors)


# -- the result ------------------------------------------------------------------------------------


def combined(moved: Moved, alpha: float, towards: float, device: str, inputs: Sequence[Checkpoint]) -> Checkpoint:
    """B + towards·(g(A) − B) + alpha·(g(FT) − g(A)), in the dtypes of B; a head and other tensors that A or B has not
    are those of g(FT), with its class. inputs: the models as they were opened, B first."""
    onto, finetune = moved.onto, moved.finetune
    own = all(finetune.spec.shares(name, onto.spec) or name in finetune.spec.tied for name in finetune.spec.tensors)
    like = onto if own else finetune
    dtype = next(info.dtype for info in onto.checkpoint.infos.values() if info.dtype.is_floating_point)
    models = [model.as_in(like.spec) for model in (onto, finetune, moved.base)]
    spec = models[0 if own else 1].spec
    parameters = {"weight": [1.0 - towards, alpha, towards - alpha], "normalize": False}
    outputs = {}
    for name in (one for one in spec.tensors if one not in spec.tied):
        terms = [Term(m.checkpoint, m.spec.file_name(name)) for m in models if spec.shares(name, m.spec)]
        file = spec.file_name(name)
        if len(terms) == len(models) and terms[0].info.dtype.is_floating_point:
            outputs[file] = Output(terms[0].info, tuple(terms), None, lookup("linear"), parameters)
        else:
            term = next((one for one in terms if one.checkpoint is models[1].checkpoint), terms[0])
            outputs[file] = Output(typed(term.info, dtype), (term,))
    config = dict(onto.checkpoint.config)
    if not own:
        theirs = finetune.checkpoint.config
        config = {key: value for key, value in config.items() if key not in HEAD_FIELDS}
        config |= {key: theirs[key] for key in HEAD_FIELDS if key in theirs}
        if config.get("pad_token_id") is None and theirs.get("pad_token_id") is not None:
            config["pad_token_id"] = theirs["pad_token_id"]
    name, sources = f"{inputs[-1].name} on {inputs[0].name}", [folder for one in inputs for folder in one.sources]
    tensors = Merged(outputs, device=device)
    out = onto.checkpoint.replace(tensors=tensors, config=config, name=name, sources=sources, before_save=())
    return guarded(out, [inputs[0] if own else inputs[-1]])

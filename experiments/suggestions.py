"""Writes docs/suggestions.md: what `symfuse.suggest` finds of every type of the installed transformers.

    make suggestions            # types that have a row are not run again
    make suggestions TYPES="mamba vit"

Each type is made as a tiny random model of one class, its declaration is hidden if it has one, and a draft is made of
it in a process of its own, which is ended after 60 seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from symfuse.architectures import ARCHITECTURES
from symfuse.drafts import Draft, draft_of
from symfuse.errors import SymfuseError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.messages import first_line

HERE = Path(__file__).parent
DATA, PAGE = HERE / "data/suggestions.json", HERE.parent / "docs/suggestions.md"
SECONDS, LARGEST = 60, 30_000_000
# Of a type's classes the one for the first of these tasks.
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "CTC",
    "AUDIO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT",
)  # fmt: skip
# Sizes of a tiny model, by how the field of its config is called; the first that fits counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_)?(key_value_heads|kv_heads)|n_head_kv", 2),
    (r"(num_|n_)?(\w+_)?(attention_)?heads?|num_heads|n_head", 4),
    (r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|n_layer|depth|num_blocks", 2),
    (r"vocab_size", 61),
    (r"intermediate_size|(\w+_)?ffn_(hidden_size|dim|size)|n_inner|d_ff|hidden_dim|mlp_dim", 29),
    (r"moe_intermediate_size|shared_expert_intermediate_size", 13),
    (r"hidden_size|n_embd|d_model|dim|embed_dim|projection_dim|text_embed_dim|vision_embed_dim", 24),
    (r"head_dim|d_kv", 6),
    (r"rotary_dim", 4),
    (r"(vision_|text_)?out_hidden_size|condition_dim|text_hidden_size", 24),
    (r"max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len", 64),
    (r"type_vocab_size", 3),
    (r"(num_|n_)?(local_|routed_|moe_)?(num_)?experts", 4),
    (r"num_experts_per_tok|moe_top_?k|num_selected_experts", 2),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_nextn_predict_layers", 0),
)


def classes() -> dict[str, str]:
    """By model type the class that is drafted."""
    out: dict[str, str] = {}
    for task in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS), "MODEL_MAPPING_NAMES"):
        for model_type, names in getattr(modeling_auto, task).items():
            out.setdefault(model_type, names if isinstance(names, str) else names[0])
    return {model_type: name for model_type, name in out.items() if hasattr(transformers, name)}


def shrunk(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The config of a tiny model: every size that is known by its name, in the configs of parts too."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("stage_names", "out_features", "out_indices", "per_layer_config"):  # they follow from the layers
            continue
        if isinstance(value, dict) and key.endswith("_config"):
            out[key] = shrunk(value, sizes)
        elif type(value) is int and key.endswith("_token_id"):
            out[key] = min(value, 3)
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            out[key] = value[-2:]
        elif key in sizes and type(value) is int:
            out[key] = sizes[key]
        elif type(value) is int:
            out[key] = next((size for name, size in SIZES if re.fullmatch(name, key) and value), value)
        else:
            out[key] = value
    return out


# Where the class does not accept these sizes: other ones.
WAYS: tuple[dict[str, int], ...] = (
    {}, {"num_key_value_heads": 4, "n_kv_heads": 4, "ffn_dim": 28, "intermediate_size": 48},
    {"hidden_size": 64, "d_model": 64, "num_key_value_heads": 4, "intermediate_size": 128, "head_dim": 16},
)  # fmt: skip


def tiny(model_type: str, name: str, sizes: Mapping[str, int]) -> Checkpoint:
    """A tiny random model of a class, as a checkpoint."""
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind.from_dict(shrunk(kind().to_dict(), sizes))
    with torch.device("meta"):
        count = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if count > LARGEST:
        raise ValueError(f"its tiny model has {count:,} parameters")
    config.architectures = [name]
    config._attn_implementation = "eager"
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return open_checkpoint(getattr(transformers, name)(config), name=name)


def row(model_type: str, name: str) -> dict[str, Any]:
    """What a draft of that type finds, as data: of the first sizes with which its class runs."""
    ARCHITECTURES.pop(model_type, None)
    first: dict[str, Any] = {}
    for way in WAYS:
        start = time.perf_counter()
        try:
            checkpoint = tiny(model_type, name, way)
        except Exception as error:  # whatever that class raises of a config that it does not like
            first = first or {"class": name, "draft": "no tiny model", "why": first_line(error)[:160]}
            continue
        try:
            draft = draft_of(checkpoint)
        except SymfuseError as error:
            first = {"class": name, "draft": "not", "why": first_line(error)[:160]}
            continue
        one = {"class": name, **found(draft), "seconds": round(time.perf_counter() - start, 1)}
        if draft.trials:
            return one
        first = one if first.get("draft", "no tiny model") == "no tiny model" else first
    return first


def found(draft: Draft) -> dict[str, Any]:
    acting = sorted(axis for axis, one in draft.axes.items() if one.group is not None)
    still = [axis for axis, one in draft.axes.items() if axis in draft.groups and one.group is None and one.size > 1]
    if not draft.verified:
        return {"draft": "not", "why": draft.reason[:160]}
    why = [f"not placed: {len(draft.unplaced)} names"] if draft.unplaced else []
    why += [f"nothing acts on {', '.join(still)}"] if still else []
    return {
        "draft": "in part" if why else "in full",
        "any": round(draft.coverage["any"], 3),
        "all": round(draft.coverage["all"], 3),
        "axes": ", ".join(acting),
        "rotated": bool(draft.reads),
        "why": "; ".join(why),
    }


def _answer(model_type: str, name: str, to: Any) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    to.send(row(model_type, name))


def bounded(model_type: str, name: str) -> dict[str, Any]:
    """`row`, in a process that is ended when its time is over."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(model_type, name, there))
    process.start()
    there.close()
    try:
        if here.poll(SECONDS):
            return dict(here.recv())
        return {"class": name, "draft": "not", "why": f"not done after {SECONDS} s"}
    except EOFError:
        return {"class": name, "draft": "not", "why": "its process ended"}
    finally:
        process.kill()
        process.join()


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def page(rows: Mapping[str, Mapping[str, Any]], total: int, declared: set[str]) -> str:
    made = {kind: one for kind, one in rows.items() if one["draft"] != "no tiny model"}
    counts = Counter((kind in declared, one["draft"]) for kind, one in made.items())

    def line(known: bool) -> str:
        each = [f"{counts[known, word]} {word}" for word in ("in full", "in part", "not")]
        return f"- {'declared' if known else 'undeclared'}: {', '.join(each)}"

    def cells(kind: str, one: Mapping[str, Any]) -> list[str]:
        share = [f"{one[key]:.0%}" if key in one else "–" for key in ("any", "all")]
        rotated = "–" if "rotated" not in one else "yes" if one["rotated"] else "no"
        why = str(one.get("why", "")).replace("|", r"\|").replace("\n", " ")
        known = "yes" if kind in declared else "no"
        return [
            kind,
            one["class"],
            known,
            one["draft"],
            *share,
            one.get("axes", "–"),
            rotated,
            str(one.get("seconds", "–")),
            why,
        ]

    head = ["model_type", "class", "declared", "draft", "any", "all", "axes", "rotated", "seconds", "why not more"]
    left = [[kind, one["class"], str(one["why"]).replace("|", r"\|")] for kind, one in rows.items() if kind not in made]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    text = f"""# What `symfuse suggest` finds

Made by `make suggestions`; do not edit. Every type of the installed transformers that has a class is made as a tiny
random model of one class; if it is declared, its declaration is hidden; and a draft is made ([suggest.md](suggest.md)).
*In full*: verified in float64, with every tensor placed and a group on every axis. *In part*: verified, and the last
column says what is missing, which may be so because the class has no such symmetry (heads under ALiBi). *Any*: the
share of parameters on which a group acts; *all*: of those that are placed, on every axis of which one acts. *Rotated*:
whether the norms fold, so that the stream may be rotated. Seconds are of one thread of a busy machine, at low priority;
a draft is stopped after {SECONDS}.

{versions}: {len(rows)} of {total} types have a row. Of {len(left)} of these no tiny model could be made (sizes that the
class does not accept, or a package that it needs): see the second table. Of the other {len(made)} the drafts are

{line(False)}
{line(True)}
"""
    tables = markdown(head, [cells(kind, one) for kind, one in sorted(made.items())])
    return f"{text}\n{tables}\n\n## Without a tiny model\n\n{markdown(['model_type', 'class', 'why'], sorted(left))}\n"


def main(asked: list[str]) -> None:
    kinds, declared = classes(), set(ARCHITECTURES)
    rows: dict[str, dict[str, Any]] = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {}
    order = sorted(kinds, key=lambda kind: (kind in declared, kind))
    for kind in asked or [kind for kind in order if kind not in rows]:
        rows[kind] = bounded(kind, kinds[kind])
        print(kind, rows[kind], flush=True)
        DATA.write_text(json.dumps(dict(sorted(rows.items())), indent=0) + "\n", "utf-8")
        PAGE.write_text(page(rows, len(kinds), declared), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The verbs of symfuse for folders, state dicts and live modules, their types, and what the command line needs beside
them: it imports nothing that is further in."""

from __future__ import annotations

from symfuse.adapters import Adapter, extract_lora
from symfuse.alignment import Alignment
from symfuse.alignment.digest import Digest
from symfuse.api.aligning import Aligned, align, match, nearest, widen
from symfuse.api.declaring import declare, declare_file
from symfuse.api.measuring import barrier, evaluate, relate, renew_statistics, task, task_of_models
from symfuse.api.merging import check, collect, merge, merge_recipe
from symfuse.api.models import digest, rewrite, suggest, to_module
from symfuse.api.rebasing import Rebased, is_adapter_folder, rebase
from symfuse.api.sources import models_in
from symfuse.device import require
from symfuse.drafts import Draft
from symfuse.evaluation import Barrier, Distance, Landscape, Score, Task, landscape
from symfuse.executors import Ray, keep_freed_memory
from symfuse.io import Checkpoint, check_target, is_other
from symfuse.io import open as open_checkpoint
from symfuse.io.hub import require_upload, upload
from symfuse.io.partial import together
from symfuse.io.remote import Place, Remote, place_of
from symfuse.io.shards import parse_size
from symfuse.io.sources import Source
from symfuse.io.target import check_space, overlap
from symfuse.matching.axes import AUTO, WORDS, require_axes
from symfuse.matching.learned import Learning, Progress
from symfuse.methods import METHODS, lookup
from symfuse.recipes import Recipe, events, parse_recipe, read_recipes, recipe_of
from symfuse.recipes.adapters import MergedAdapter, merge_adapters
from symfuse.recipes.align import How
from symfuse.recipes.check import Report, Target, check_all
from symfuse.recipes.run import Shown, run
from symfuse.recipes.yaml_reader import read_value
from symfuse.relations import Relation, Relations
from symfuse.relations.verdict import OTHER as NOT_COMPARABLE
from symfuse.spec import Spec
from symfuse.stats.statistics import Statistics
from symfuse.transporting import Transported, aligned_model_of, transport
from symfuse.verification import Proof, Verification, prove, verify

open = open_checkpoint  # noqa: A001 - symfuse.open: who gets it here has every declaration

__all__ = [
    "AUTO", "METHODS", "NOT_COMPARABLE", "WORDS", "Adapter", "Aligned", "Alignment", "Barrier", "Checkpoint",
    "Digest", "Distance", "Draft", "How", "Landscape", "Learning", "MergedAdapter", "Place", "Progress", "Proof",
    "Ray", "Rebased", "Recipe", "Relation", "Relations", "Remote", "Report", "Score", "Shown", "Source", "Spec",
    "Statistics", "Target", "Task", "Transported", "Verification", "align", "aligned_model_of", "barrier", "check",
    "check_all", "check_space", "check_target", "collect", "declare", "declare_file", "digest", "evaluate",
    "events", "extract_lora", "is_adapter_folder", "is_other", "keep_freed_memory", "landscape", "lookup", "match",
    "merge", "merge_adapters", "merge_recipe", "models_in", "nearest", "open", "open_checkpoint", "overlap",
    "parse_recipe", "parse_size", "place_of", "prove", "read_recipes", "read_value", "rebase", "recipe_of",
    "relate", "renew_statistics", "require", "require_axes", "require_upload", "rewrite", "run", "suggest", "task",
    "task_of_models", "to_module", "together", "transport", "upload", "verify", "widen",
]  # fmt: skip

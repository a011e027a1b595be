"""The verb extract-lora: extract what a fine-tune changed, as an adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from symfuse.cli.app import NEW_FOLDER, common, main, open_model
from symfuse.cli.mergekit import Extracting
from symfuse.output import Output

DTYPES = ("float32", "bfloat16", "float16", "float64")


@main.command("extract-lora", cls=Extracting)
@click.argument("finetuned")
@click.option("--base", required=True, help="The model that FINETUNED was tuned from.")
@click.option("--output", "-o", required=True, type=NEW_FOLDER, help="Write this new folder.")
@click.option("--rank", type=click.IntRange(1), default=128, show_default=True, help="Limit the rank of each matrix.")
@click.option("--alpha", type=click.IntRange(1), help="Set lora_alpha. Default: the rank (a scale of one).")
@click.option(
    "--module",
    "modules",
    multiple=True,
    help="Extract only these layers: ends of names, or patterns, comma-separated. Repeatable.",
)
@click.option("--exclude", multiple=True, help="Skip these layers; written as for --module.")
@click.option("--save-rest", is_flag=True, help="Save what has no low rank (embeddings, norms) as whole tensors.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Save the adapter in this dtype."
)
@common
def extract_lora(
    finetuned: str,
    base: str,
    output: Path,
    rank: int,
    alpha: int | None,
    modules: tuple[str, ...],
    exclude: tuple[str, ...],
    save_rest: bool,
    dtype: str,
    out: Output,
) -> None:
    """Extract what FINETUNED changed, as a LoRA adapter.

    Writes an adapter for peft, computed by truncated singular value decomposition. Where a difference has a lower rank
    than --rank, its adapter has that rank.
    """
    import torch

    from symfuse import api
    from symfuse.messages import some

    tuned, start = open_model(out, finetuned), open_model(out, base)
    api.check_target(output, overwrite=None, inputs=(*start.sources, *tuned.sources))  # before the work
    adapter = api.extract_lora(
        tuned,
        start,
        rank,
        modules=_listed(modules),
        exclude=_listed(exclude),
        alpha=alpha,
        dtype=getattr(torch, dtype),
        save_rest=save_rest,
    )
    adapter.save(output)
    lower = {module: factors.rank for module, factors in adapter.factors.items() if factors.rank < rank}
    if lower:
        words = some([f"{module} has {result}" for module, result in lower.items()], 3)
        out.note(f"{len(lower)} differences, and so their adapters, have a lower rank than {rank}: {words}")
    for line in adapter.report():
        out.say(line)
    out.say(f"written to {output}")
    out.finish({"output": str(output), "error": adapter.error, "lower_rank": lower, "report": adapter.report()})


def _listed(texts: Sequence[str]) -> list[str]:
    """The words between commas; a comma inside {braces} or [brackets] belongs to a pattern."""
    return [word.strip() for text in texts for word in re.split(r",(?![^{\[]*[}\]])", text) if word.strip()]

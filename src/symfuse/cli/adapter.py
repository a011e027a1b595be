"""The verb extract-lora: what a fine-tune changed, as an adapter."""

from __future__ import annotations

from pathlib import Path

import click

from symfuse.cli.app import common, main, open_model
from symfuse.output import Output


@main.command("extract-lora")
@click.argument("finetuned")
@click.option("--base", required=True, help="The model that it was tuned from.")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="The new folder.")
@click.option("--rank", required=True, type=click.IntRange(1), help="Of each adapter matrix.")
@click.option("--alpha", type=click.IntRange(1), help="lora_alpha. Default: the rank, a scale of one.")
@click.option("--module", "modules", multiple=True, help="Only these layers (ends of names, or patterns).")
@click.option("--exclude", multiple=True, help="Not these.")
@click.option("--save-rest", is_flag=True, help="Keep what has no low rank (embeddings, norms) as whole tensors.")
@click.option("--dtype", default="float32", show_default=True, help="Of the adapter.")
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
    as_json: bool,
    quiet: bool,
) -> None:
    """The difference of FINETUNED from its base as a LoRA adapter (peft), by truncated SVD."""
    import torch

    from symfuse import adapters
    from symfuse.errors import OptionError

    out = Output(as_json, quiet)
    if not isinstance(found := getattr(torch, dtype, None), torch.dtype) or not found.is_floating_point:
        raise OptionError(f"--dtype {dtype!r}: expected float32, bfloat16, float16 or float64")
    tuned, start = open_model(out, finetuned), open_model(out, base)
    adapter = adapters.extract(
        tuned, start, rank, modules=modules, exclude=exclude, alpha=alpha, dtype=found, save_rest=save_rest
    )
    adapter.save(output)
    for line in adapter.report():
        out.say(line)
    out.say(f"written to {output}")
    out.finish({"output": str(output), "error": adapter.error, "report": adapter.report()})

"""Proof by evaluation: two checkpoints run as the real class on the same inputs, and their outputs compared.

An output that lives in a moved space (a base model's hidden states under a residual permutation) is compared after
the same element has acted on the original's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, VerificationError
from symfuse.io import Checkpoint
from symfuse.io.messages import first_line
from symfuse.modules import live

Outputs = Mapping[str, Tensor]

# Largest relative difference of outputs that rounding alone explains: a few dozen times what rounding the weights of
# real encoders costs (1e-7, 2e-4 and 1e-3), and for float64 a thousand times the error of exact moves. In half
# precision this can hide small mistakes: `prove` looks at an alignment before it is rounded.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# How the names of norms end that `transformers` computes in float32 whatever the model's dtype, and of attention whose
# softmax it does.
IN_FLOAT32 = ("RMSNorm", "T5LayerNorm", "CohereLayerNorm", "BloomAttention", "MptAttention")


@dataclass(frozen=True)
class Verification:
    """errors: for each output field the largest difference, relative to the largest entry of the original's.
    tolerance: what was allowed. inputs: a sentence on what was fed."""

    errors: Mapping[str, float]
    tolerance: float
    inputs: str

    @property
    def worst_output(self) -> str:
        """The output that differs most; one with NaN before all others."""
        return max(self.errors, key=lambda name: math.inf if math.isnan(self.errors[name]) else self.errors[name])

    @property
    def worst(self) -> float:
        return self.errors[self.worst_output]

    @property
    def equal(self) -> bool:
        return self.worst <= self.tolerance  # NaN compares false

    def raise_if_different(self, what: str) -> None:
        if not self.equal:
            raise VerificationError(self.difference(what))

    def difference(self, what: str) -> str:
        return (
            f"{what}: output {self.worst_output!r} differs by {self.worst:.2e} relative to its largest entry, "
            f"{self.tolerance:.0e} allowed ({self.inputs}); nothing was written"
        )


def random_inputs(module: torch.nn.Module, config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Seeded inputs for a live module: token ids with padding, pixels, or hidden states, by what it takes."""
    rng = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    main = getattr(module, "main_input_name", None)
    if main is None:
        return {"src": torch.randn(3, 7, config["hidden_size"], generator=rng, dtype=dtype)}
    if main == "pixel_values":
        size = config.get("image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        return {main: torch.randn(2, config.get("num_channels", 3), height, width, generator=rng, dtype=dtype)}
    if main != "input_ids":
        raise OptionError(f"verify knows no inputs for {type(module).__name__} (it reads {main!r}); give it `inputs`")
    length = max(1, min(16, config.get("max_position_embeddings", config.get("n_positions", 16)) - 4))
    ids = torch.randint(min(5, config["vocab_size"] - 1), config["vocab_size"], (3, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, max(1, length // 2) :] = 0
    if type(module).__name__.endswith("ForMultipleChoice"):  # it takes [batch, choices, length]
        return {"input_ids": ids[None], "attention_mask": mask[None]}
    return {"input_ids": ids, "attention_mask": mask}


def computes_in(module: torch.nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The coarsest dtype in which a live module of this dtype computes: float32 if it has norms that cast to it."""
    casts = any(
        type(part).__name__.endswith(IN_FLOAT32) and not isinstance(part, torch.nn.RMSNorm)  # torch's own does not
        for part in module.modules()
    )
    return torch.float32 if casts and dtype == torch.float64 else dtype


def run(module: torch.nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All floating-point outputs of a live module by field name; positions that are masked out are set to zero."""
    with torch.inference_mode():
        if "src" in inputs:
            return {"output": module(inputs["src"])}
        out = module(**inputs)
    mask = inputs.get("attention_mask")
    fields = {}
    for name, value in out.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            aligned = mask is not None and value.ndim == 3 and value.shape[:2] == mask.shape
            fields[name] = value * mask[..., None].to(value.dtype) if aligned and mask is not None else value
    return fields


def compare(before: Outputs, after: Outputs) -> dict[str, float]:
    """For each field the largest absolute difference over the largest absolute entry of `before`.

    Raises IncompatibleError if the outputs are not the same fields of the same shapes.
    """
    if not before:
        raise IncompatibleError("the models have no outputs to compare")
    shapes, others = ({name: tuple(t.shape) for name, t in fields.items()} for fields in (before, after))
    if shapes != others:
        raise IncompatibleError(f"the models do not have the same outputs: {shapes} and {others}")
    return {
        name: ((after[name] - value).abs().max() / value.abs().max().clamp_min(1e-300)).item()
        for name, value in before.items()
    }


def verify(
    before: Checkpoint,
    after: Checkpoint,
    alignment: Alignment | None = None,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Outputs] | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Whether two checkpoints compute the same function, on `inputs` (default: seeded random ones).

    dtype: in which both are run. alignment: how `after` came about, if outputs in moved spaces are to be undone.
    runner: runs a checkpoint, for models that `transformers` does not have. tolerance: default by the coarsest
    dtype, stored or computed in (TOLERANCE). Raises CheckpointError if a model cannot be run, IncompatibleError if the
    second does not take the inputs, or does not have the outputs, of the first.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise OptionError(f"tolerance {tolerance}: it must be a number from 0 on, such as 1e-6")
    bench = _Bench(inputs, runner, dtype)
    expected = _moved(bench.run(before), alignment)
    errors = compare(expected, bench.run(after, alignment))
    if tolerance is None:
        stored = {info.dtype for c in (before, after) for name in c if (info := c.info(name)).dtype in TOLERANCE}
        tolerance = max(TOLERANCE[d] for d in stored | {bench.computed_in})
    return Verification(errors, tolerance, bench.what)


@dataclass(frozen=True)
class Proof:
    """exact: source and moved model before anything is rounded, in float64. rounding: what casting the moved weights to
    the dtypes of the source changes beside that, in the same units."""

    exact: Verification
    rounding: float


def prove(
    source: Checkpoint,
    alignment: Alignment,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Outputs] | None = None,
) -> Proof:
    """Whether an alignment leaves the function of its source, whatever the dtype that it is stored in.

    The source is widened to float64, moved and run: an exact symmetry shows 1e-15, or with norms that cast to float32
    its rounding. That the moved weights are then rounded to the stored dtype is measured apart. Raises
    VerificationError if the function changed.
    """
    bench = _Bench(inputs, runner, torch.float64)
    wide = source.to(torch.float64)
    expected = _moved(bench.run(wide), alignment)
    errors = compare(expected, bench.run(alignment(wide), alignment))
    exact = Verification(errors, TOLERANCE[bench.computed_in], bench.what)
    if not exact.equal:
        own = compare(expected, _moved(bench.run(_nudged(wide)), alignment))[exact.worst_output]
        raise VerificationError(f"{exact.difference(f'{source.name} after alignment')}{_hint(exact.worst, own)}")
    stored = Verification(compare(expected, bench.run(alignment(source), alignment)), math.inf, bench.what)
    return Proof(exact, stored.worst)


# A difference of up to so many times what the last bits of the weights make is theirs: a move rounds a few times more.
_MAGNIFIED = 100


def _nudged(wide: Checkpoint) -> Checkpoint:
    """A model in float64 with the last bit of every weight changed at random."""
    rng = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.float64).eps
    tensors = {
        name: t * (1 + eps * torch.randint(-1, 2, t.shape, generator=rng, dtype=t.dtype))
        if t.is_floating_point()
        else t
        for name, t in wide.items()
    }
    return wide.replace(tensors=tensors)


def _hint(found: float, own: float) -> str:
    """What to do about a difference, given the one that the last bits of the model's own weights make."""
    if not found <= _MAGNIFIED * own:
        return ""
    return (
        f". Changes in the last bit of its own weights change that output by {own:.2e}: the model magnifies rounding "
        "(norms of what hardly varies, very large weights), so that this is no sign of a wrong alignment. Without "
        "translations (--no-biases, biases=False) or scales (--no-scaling) there may be less of it; --no-verify leaves "
        "the proof out"
    )


class _Bench:
    """Runs checkpoints on the same inputs: those given, or seeded random ones that suit the first.

    computed_in: the coarsest dtype in which a module that was run computed."""

    def __init__(
        self,
        inputs: Mapping[str, Tensor] | None,
        runner: Callable[[Checkpoint], Outputs] | None,
        dtype: torch.dtype,
    ) -> None:
        self.inputs = inputs
        self.runner = runner
        self.dtype = self.computed_in = dtype
        self.first: str | None = None
        given = inputs is not None or runner is not None
        self.what = "the given inputs" if given else "seeded random inputs"
        self.what += "" if runner is not None else f", run in {str(dtype).removeprefix('torch.')}"

    def run(self, checkpoint: Checkpoint, alignment: Alignment | None = None) -> Outputs:
        """The outputs of a checkpoint; of a moved one on inputs that are moved along."""
        if self.runner is not None:
            return self.runner(checkpoint)
        module = live(checkpoint, self.dtype)
        self.computed_in = computes_in(module, self.computed_in)
        if self.inputs is None:
            self.inputs = random_inputs(module, checkpoint.config)
        try:
            outputs = run(module, _moved(self.inputs, alignment))
        except Exception as error:  # whatever that class raises
            if self.first is None:
                raise CheckpointError(f"{checkpoint.name} does not run on {self.what}: {first_line(error)}") from error
            raise IncompatibleError(
                f"{checkpoint.name} does not run on the inputs of {self.first}: {first_line(error)}"
            ) from error
        self.first = self.first or checkpoint.name
        return outputs


def _moved(fields: Mapping[str, Tensor], alignment: Alignment | None) -> dict[str, Tensor]:
    """Let the alignment act on the last dimension of the fields that live in a moved space."""
    if alignment is None:
        return dict(fields)
    out = dict(fields)
    for name, layout in alignment.spec.outputs.items():
        (atom,) = layout.atoms()
        element = alignment.elements.get(alignment.spec.instance(atom.name, {}))
        if name in fields and element is not None:
            out[name] = element.part(atom.variance.value).act(fields[name], -1)
    return out

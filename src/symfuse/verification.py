"""Proof by evaluation: two checkpoints run as the real class on the same inputs, and their outputs compared.

An output that lives in a moved space (a base model's hidden states under a residual permutation) is compared after
the same element has acted on the original's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.architectures import Model
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, VerificationError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.memory import budget
from symfuse.io.messages import first_line, some
from symfuse.modules import live
from symfuse.paging import paged

Outputs = Mapping[str, Tensor]

# Largest relative difference of outputs that rounding alone explains: a few dozen times what rounding the weights of
# real encoders costs (1e-7, 2e-4 and 1e-3), and for float64 a thousand times the error of exact moves. In half
# precision this can hide small mistakes: `prove` looks at an alignment before it is rounded.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# How the names of norms end that `transformers` computes in float32 whatever the model's dtype, and of attention in
# which it does the softmax or the turning of planes.
IN_FLOAT32 = (
    "RMSNorm", "T5LayerNorm", "CohereLayerNorm", "OlmoLayerNorm", "BloomAttention", "MptAttention",
    "ModernBertAttention",
)  # fmt: skip


# What models with a head put out beside it of the base model, whose basis is nobody's concern.
UNDER_A_HEAD = {"encoder_last_hidden_state"}


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
    """Seeded inputs for a live module, by what it takes: token ids with padding, pixels, sounds, or hidden states; for
    an encoder and a decoder those of both."""
    rng = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    main = getattr(module, "main_input_name", None)
    if main is None:
        if not isinstance(config.get("hidden_size"), int):
            raise OptionError(f"no inputs for {type(module).__name__} are known; give it `inputs`, by name")
        return {"src": torch.randn(3, 7, config["hidden_size"], generator=rng, dtype=dtype)}
    unsaid = "vision_config" in config or "vocab_size" not in config  # it need not say what is usual
    if unsaid and hasattr(getattr(module, "config", None), "to_dict"):
        config = module.config.to_dict()  # type: ignore[operator, union-attr]
    text, vision = (config.get(f"{part}_config", config) for part in ("text", "vision"))
    if main == "pixel_values":
        return {main: _pixels(vision, rng, dtype)}
    if main == "input_features" and "max_source_positions" in config:
        shape = (2, config["num_mel_bins"], 2 * config["max_source_positions"])  # the second convolution halves it
        sounds = torch.randn(shape, generator=rng, dtype=dtype)
        return {main: sounds, **_decoder_inputs(config, config["max_target_positions"], len(sounds), rng)}
    if main != "input_ids":
        raise OptionError(f"verify knows no inputs for {type(module).__name__} (it reads {main!r}); give it `inputs`")
    length = max(1, min(16, text.get("max_position_embeddings", text.get("n_positions", 16)) - 4))
    ids = torch.randint(min(5, text["vocab_size"] - 1), text["vocab_size"], (3, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, max(1, length // 2, length - _widest_padding(module, length)) :] = 0
    if type(module).__name__.endswith("ForMultipleChoice"):  # it takes [batch, choices, length]
        return {"input_ids": ids[None], "attention_mask": mask[None]}
    ends = {end for part in module.modules() if isinstance(end := getattr(part, "eos_token_id", None), int)}
    for end in ends:  # a model that is read at the end of a text (CLIP)
        ids[torch.arange(len(ids)), mask.sum(1) - 1] = min(end, text["vocab_size"] - 1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    takes = inspect.signature(module.forward).parameters
    if "pixel_values" in takes and vision is not config:
        return inputs | {"pixel_values": _pixels(vision, rng, dtype)}
    if "decoder_input_ids" not in takes:
        return inputs
    if type(module).__name__.endswith("ForSequenceClassification"):  # its decoder reads the same, up to the one end
        ids[ids == config["eos_token_id"]] = 0
        ids[torch.arange(len(ids)), mask.sum(1) - 1] = config["eos_token_id"]
        return inputs
    return inputs | _decoder_inputs(config, length, len(ids), rng)


def _pixels(config: Mapping[str, Any], rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    size = config.get("image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(2, config.get("num_channels", 3), height, width, generator=rng, dtype=dtype)


def _decoder_inputs(config: Mapping[str, Any], longest: int, batch: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Token ids for a decoder, with padding: fewer than the encoder has, so that no mask fits the other's outputs."""
    length = max(1, min(16, longest) - 3)
    words = config.get("decoder_vocab_size") or config["vocab_size"]
    ids = torch.randint(min(5, words - 1), words, (batch, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, max(1, length // 2) :] = 0
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def _widest_padding(module: torch.nn.Module, length: int) -> int:
    """Behind so much padding every row of scores still has a key: a row without one is NaN in classes that mask by the
    least number of float64 and take the softmax in float32 (Gemma 2)."""
    window = getattr(getattr(module, "config", None), "sliding_window", None)
    return max(0, int(window) - 1) if window else length  # of Qwen2's mixtures 0 is none


def computes_in(module: torch.nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The coarsest dtype in which a live module of this dtype computes: float32 if it has norms that cast to it."""
    casts = any(
        type(part).__name__.endswith(IN_FLOAT32) and not isinstance(part, torch.nn.RMSNorm)  # torch's own does not
        for part in module.modules()
    )
    return torch.float32 if casts and dtype == torch.float64 else dtype


def run(module: torch.nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point outputs of a live module by field name: those of the base model if it has no head. Positions
    that are masked out are set to zero."""
    with torch.inference_mode():
        if "src" in inputs:
            return {"output": module(inputs["src"])}
        out = _by_name(module(**inputs))
    masks = {
        inputs[name].shape: inputs[name] for name in ("attention_mask", "decoder_attention_mask") if name in inputs
    }
    headed = any(name.endswith("logits") for name in out)
    fields = {}
    for name, value in out.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()) or (headed and name in UNDER_A_HEAD):
            continue
        mask = masks.get(value.shape[:2]) if value.ndim == 3 else None
        fields[name] = value if mask is None else value * mask[..., None].to(value.dtype)
    return fields


def _by_name(out: Any) -> Mapping[str, Any]:
    """The outputs of a module by name; those of one that returns a tensor or a tuple by their places."""
    if isinstance(out, Mapping):
        return out
    parts = [out] if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else []
    return {"output" if len(parts) == 1 else f"output {i}": part for i, part in enumerate(parts)}


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
    the dtypes of the source changes beside that, in the same units. rounded_to: these dtypes, by name."""

    exact: Verification
    rounding: float
    rounded_to: str


def prove(
    source: Checkpoint,
    alignment: Alignment,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    runner: Callable[[Checkpoint], Outputs] | None = None,
    memory: int | None = None,
) -> Proof:
    """Whether an alignment leaves the function of its source, whatever the dtype that it is stored in.

    The source is widened to float64, moved and run: an exact symmetry shows 1e-15, or with norms that cast to float32
    its rounding. That the moved weights are then rounded to the stored dtype is measured apart. memory: bytes (default:
    a share of what is free); a model that takes more in float64 is run layer by layer, each read when it runs, and on
    WORDS of its vocabulary, if no inputs are given. Raises VerificationError if the function changed.
    """
    bench = _Bench(inputs, runner, torch.float64, memory)
    if bench.pages(source) and inputs is None:
        source = bench.few_words(source)
    wide = source.to(torch.float64)
    expected = _moved(bench.run(wide), alignment)
    errors = compare(expected, bench.run(alignment(wide), alignment))
    exact = Verification(errors, TOLERANCE[bench.computed_in], bench.what)
    if not exact.equal:
        own = compare(expected, _moved(bench.run(wide.replace(tensors=_Nudged(wide))), alignment))[exact.worst_output]
        raise VerificationError(f"{exact.difference(f'{source.name} after alignment')}{_hint(exact.worst, own)}")
    stored = Verification(compare(expected, bench.run(alignment(source), alignment)), math.inf, bench.what)
    dtypes = dict.fromkeys(info.dtype for name in source if (info := source.info(name)).dtype.is_floating_point)
    return Proof(exact, stored.worst, ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))


# Of a model that is run layer by layer: words enough for the inputs, in place of an embedding and a head that can be
# larger than all else. Rows of words are moved alike, or not at all, so that the others show nothing new.
WORDS = 2048
LAYERWISE = ", layer by layer"

# A difference of up to so many times what the last bits of the weights make is theirs: a move rounds a few times more.
_MAGNIFIED = 100


class _Nudged(Mapping[str, Tensor]):
    """The tensors of a model in float64 with the last bit of every weight changed at random."""

    def __init__(self, wide: Checkpoint) -> None:
        self.wide = wide
        self.seeds = {name: seed for seed, name in enumerate(wide)}

    def __getitem__(self, name: str) -> Tensor:
        t = self.wide[name]
        if not t.is_floating_point():
            return t
        rng = torch.Generator().manual_seed(self.seeds[name])
        return t * (1 + torch.finfo(t.dtype).eps * torch.randint(-1, 2, t.shape, generator=rng, dtype=t.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self.seeds)

    def __len__(self) -> int:
        return len(self.seeds)


class _FirstRows(Mapping[str, Tensor]):
    """The tensors of a model, some without their last rows. infos: what they are."""

    def __init__(self, whole: Checkpoint, infos: Mapping[str, TensorInfo]) -> None:
        self.whole = whole
        self.infos = infos

    def __getitem__(self, name: str) -> Tensor:
        info = self.infos[name]
        return self.whole[name] if info == self.whole.info(name) else self.wide(name).to(info.dtype)

    def wide(self, name: str) -> Tensor:
        info = self.infos[name]
        return self.whole.part(name, 0, info.numel).reshape(info.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


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
        memory: int | None = None,
    ) -> None:
        self.inputs = inputs
        self.runner = runner
        self.dtype = self.computed_in = dtype
        self.memory = budget() if memory is None else memory
        self.first: str | None = None
        given = inputs is not None or runner is not None
        self.what = "the given inputs" if given else "seeded random inputs"
        self.what += "" if runner is not None else f", run in {str(dtype).removeprefix('torch.')}"

    def pages(self, checkpoint: Checkpoint) -> bool:
        """Whether a model is run layer by layer: weights as they are read and those of the module do not fit."""
        infos = [checkpoint.info(name) for name in checkpoint]
        found = self.runner is None and 2 * sum(info.numel for info in infos) * self.dtype.itemsize > self.memory
        if found and LAYERWISE not in self.what:
            self.what += LAYERWISE
        return found

    def few_words(self, checkpoint: Checkpoint) -> Checkpoint:
        """The model with the first rows of its embeddings and heads alone, if those are rows of a larger vocabulary."""
        spec = Model.of(checkpoint).spec
        size = spec.sizes.get("vocab", 0)
        layouts = {spec.file_name(name): declared.layout for name, declared in spec.tensors.items()}
        of = {file: layout for file, layout in layouts.items() if "vocab" in layout.names}
        rows = all(str(layout).split()[0] == "vocab" for layout in of.values())
        if size <= WORDS or not rows or checkpoint.config.get("vocab_size") != size:
            return checkpoint
        self.what += f", on {WORDS} of a vocabulary of {size}"
        ids = {key: n % WORDS for key, n in checkpoint.config.items() if key.endswith("_token_id") and type(n) is int}
        infos = {name: checkpoint.info(name) for name in checkpoint}
        infos |= {file: TensorInfo(infos[file].dtype, (WORDS, *infos[file].shape[1:])) for file in of if file in infos}
        config = {**checkpoint.config, **ids, "vocab_size": WORDS}
        return checkpoint.replace(tensors=_FirstRows(checkpoint, infos), config=config, infos=infos)

    def run(self, checkpoint: Checkpoint, alignment: Alignment | None = None) -> Outputs:
        """The outputs of a checkpoint; of a moved one on inputs that are moved along."""
        if self.runner is not None:
            return self.runner(checkpoint)
        module = (paged if self.pages(checkpoint) else live)(checkpoint, self.dtype)
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
        if self.first is None:
            self.first = checkpoint.name
            _refuse_nan(outputs, f"{checkpoint.name} on {self.what}")
        return outputs


def _refuse_nan(outputs: Outputs, what: str) -> None:
    """CheckpointError for a model of which nothing can be proved, since it puts out NaN itself."""
    if names := [name for name, value in outputs.items() if bool(value.isnan().any())]:
        raise CheckpointError(
            f"{what}: output {some(names)} has NaN before anything is moved. A row of scores whose keys are all masked "
            "makes one in some classes (padding on the left, or wider than the sliding window of the model): give "
            "inputs without such padding"
        )


def _moved(fields: Mapping[str, Tensor], alignment: Alignment | None) -> dict[str, Tensor]:
    """Let the alignment act on the last dimension of the fields that live in a moved space."""
    if alignment is None:
        return dict(fields)
    out = dict(fields)
    for name, layout in alignment.spec.outputs.items():
        (atom,) = layout.atoms
        element = alignment.elements.get(alignment.spec.instance(atom.name, {}))
        if name in fields and element is not None:
            out[name] = element.part(atom.variance.value).act(fields[name], -1)
    return out

"""Proof by evaluation: two checkpoints run as the real class on the same inputs, and their outputs compared.

An output that lives in a moved space (a base model's hidden states under a residual permutation) is compared after
the same element has acted on the original's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symfuse.alignment import Alignment
from symfuse.architectures import ARCHITECTURES
from symfuse.errors import CheckpointError, IncompatibleError, OptionError, SpecError, VerificationError
from symfuse.io import Checkpoint, TensorInfo
from symfuse.io.memory import budget
from symfuse.messages import first_line, some
from symfuse.model import Model, as_declared
from symfuse.model.config import OF_HEADS, differences, text_config
from symfuse.modules import live, name_parameters, with_defaults
from symfuse.modules.paging import paged
from symfuse.verification.coverage import Changed, Reach, Reads, changes, long_inputs

Outputs = Mapping[str, Tensor]

# Largest relative difference of outputs that rounding alone explains: a few dozen times what rounding the weights of
# real encoders costs (1e-7, 2e-4 and 1e-3), and for float64 a thousand times the error of exact moves. In half
# precision this can hide small mistakes: `prove` looks at an alignment before it is rounded.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# How the names of classes end that `transformers` computes in float32 whatever the model's dtype.
IN_FLOAT32 = ("RMSNorm", *sorted({name for one in ARCHITECTURES.values() for name in one.float32}))


# What models with a head put out beside it of the base model, whose basis is nobody's concern.
UNDER_A_HEAD = {"encoder_last_hidden_state"}


@dataclass(frozen=True)
class Verification:
    """errors: for each output field the largest difference, relative to the largest entry in the original's: of its
    row for `verify`, of all for `prove`.
    tolerance: what was allowed. inputs: a sentence on what was fed. config: the fields of config.json that differ and
    change what the same weights compute. unread: tensors of which single rows differ that no input read, with these
    rows. coverage: of tables (embeddings, positions, experts) how many rows were read, and of how many; of "positions"
    how many were run; tensors of which nothing was read count 0."""

    errors: Mapping[str, float]
    tolerance: float
    inputs: str
    config: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    coverage: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def worst_output(self) -> str:
        """The output that differs most; one with NaN before all others."""
        return max(self.errors, key=lambda name: math.inf if math.isnan(self.errors[name]) else self.errors[name])

    @property
    def worst(self) -> float:
        return self.errors[self.worst_output]

    @property
    def equal(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    @property
    def differences(self) -> list[str]:
        """Every reason why the models are not equal."""
        outputs = f"output {self.worst_output!r} differs by {self.worst:.2e}, {self.tolerance:.0e} allowed"
        found = [] if self.worst <= self.tolerance else [outputs]  # NaN compares false
        found += [f"config.json differs in {text}" for text in self.config]
        return found + [f"rows differ that no input reads: {text}" for text in self.unread]

    @property
    def seen(self) -> str:
        """How much of tables and positions was read, in words; empty if that is not known."""
        whole = sum(read == of for read, of in self.coverage.values())
        parts = [f"{read} of {of} rows of {name}" for name, (read, of) in self.coverage.items() if 0 < read < of]
        none = [name for name, (read, _) in self.coverage.items() if not read]
        parts += [f"all rows of {whole} table{'s' if whole > 1 else ''}"] if whole else []
        return "; ".join([*parts, *([f"nothing of {some(none)}"] if none else [])])

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


def compare(before: Outputs, after: Outputs, *, by_row: bool = False) -> dict[str, float]:
    """For each field the largest absolute difference over the largest absolute entry of `before`; by_row: over that of
    the same row, such as the logits of one position, of rows of more than one entry.

    Raises IncompatibleError if the outputs are not the same fields of the same shapes.
    """
    if not before:
        raise IncompatibleError("the models have no outputs to compare")
    shapes, others = ({name: tuple(t.shape) for name, t in fields.items()} for fields in (before, after))
    if shapes != others:
        raise IncompatibleError(f"the models do not have the same outputs: {shapes} and {others}")
    return {name: _difference(value, after[name], by_row) for name, value in before.items()}


# A row of outputs that is all but zero holds the rounding of what was added to make it.
_LEAST = 1e-3

_ROWS = 256  # compared at once


def _difference(before: Tensor, after: Tensor, by_row: bool) -> float:
    if not before.numel():
        return 0.0
    width = before.shape[-1] if before.ndim else 1
    least = before.abs().max() * (_LEAST if by_row and width > 1 else 1)
    rows, others = before.reshape(-1, width), after.reshape(-1, width)
    worst = before.new_zeros(())
    for start in range(0, len(rows), _ROWS):
        one, other = (t[start : start + _ROWS] for t in (rows, others))
        scale = one.abs().amax(1, keepdim=True).clamp_min(least).clamp_min(1e-300)
        worst = torch.maximum(worst, ((other - one).abs() / scale).max())  # of a number and NaN it is NaN
    return worst.item()


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
    """Whether two checkpoints compute the same function, on `inputs` (default: seeded random ones, of which some have
    padding, and some reach as far as is affordable: `symfuse.verification.coverage.long_inputs`).

    Configs are compared as for a merge, and the tensors that both have row by row: rows of a table that differ where
    others do not are among the inputs, and make the models differ if no input reads them. dtype: in which both are run.
    alignment: how `after` came about, if outputs in moved spaces are to be undone. runner: runs a checkpoint, for
    models that `transformers` does not have. tolerance: default by the coarsest dtype of the tensors that differ, or
    computed in (TOLERANCE). Raises CheckpointError if a model cannot be run, IncompatibleError if the second does not
    take the inputs, or does not have the outputs, of the first.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise OptionError(f"tolerance {tolerance}: it must be a number from 0 on, such as 1e-6")
    edits: Mapping[str, Changed] = {}
    if runner is None:
        with suppress(IncompatibleError):  # an alignment that its declaration refuses is judged by outputs alone
            edits = _edits(before if alignment is None else alignment(before), after)
    bench = _Bench(inputs, runner, dtype, compared=(before, after), words=_words(before, edits))
    expected = [_moved(outputs, alignment) for outputs in bench.run(before)]
    errors = _worst(expected, bench.run(after, alignment), by_row=True)
    if tolerance is None:
        tolerance = max(TOLERANCE[d] for d in _differing_dtypes(before, after) | {bench.computed_in})
    unread = bench.unread(edits, tolerance)
    return Verification(errors, tolerance, bench.what, _deciding(before, after), unread, bench.coverage())


def _worst(before: Sequence[Outputs], after: Sequence[Outputs], *, by_row: bool = False) -> dict[str, float]:
    """`compare` of each of several outputs: the largest of each field."""
    found = [compare(one, other, by_row=by_row) for one, other in zip(before, after, strict=True)]
    return {
        name: max((errors[name] for errors in found), key=lambda e: math.inf if math.isnan(e) else e)
        for name in found[0]
    }


def _edits(before: Checkpoint, after: Checkpoint) -> dict[str, Changed]:
    try:
        return changes(as_declared(before), as_declared(after))
    except SpecError:  # not of their families, or not of one: whether they run will show
        return {}


def _words(before: Checkpoint, edits: Mapping[str, Changed]) -> list[int]:
    """The rows of tables of the vocabulary in which the models differ, those that differ most first."""
    size = text_config(before.config).get("vocab_size")
    found = [changed.rows for changed in edits.values() if len(changed.rows) == size]
    if not found:
        return []
    rows = torch.stack(found).amax(0)
    order: list[int] = rows.argsort(descending=True)[: int(rows.count_nonzero())].tolist()
    return order


def _differing_dtypes(before: Checkpoint, after: Checkpoint) -> set[torch.dtype]:
    """The dtypes of the tensors that differ, or that only one of the models has in that shape."""
    shared = {name for name in before if name in after and before.info(name).shape == after.info(name).shape}
    found = {d for changed in changes(before, after).values() for d in changed.dtypes}
    found |= {c.info(name).dtype for c in (before, after) for name in c if name not in shared}
    return found & TOLERANCE.keys()


def _deciding(before: Checkpoint, after: Checkpoint) -> tuple[str, ...]:
    """The fields of the configs that decide what the same weights compute, and differ. Where the weights have other
    shapes (widened models), whole numbers are no difference: their sizes show in the run."""
    if before.config.get("model_type") != after.config.get("model_type"):
        return ()
    resized = any(name in after and before.info(name).shape != after.info(name).shape for name in before)
    found = [d for d in differences(*map(with_defaults, (before, after))) if d.matters and d.field not in OF_HEADS]
    return tuple(str(d) for d in found if not (resized and type(d.ours) is type(d.theirs) is int))


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
    expected = [_moved(outputs, alignment) for outputs in bench.run(wide)]
    errors = _worst(expected, bench.run(alignment(wide), alignment))
    exact = Verification(errors, TOLERANCE[bench.computed_in], bench.what)
    if not exact.equal:
        nudged = bench.run(wide.replace(tensors=_Nudged(wide)))
        own = _worst(expected, [_moved(outputs, alignment) for outputs in nudged])[exact.worst_output]
        raise VerificationError(f"{exact.difference(f'{source.name} after alignment')}{_hint(exact.worst, own)}")
    stored = Verification(_worst(expected, bench.run(alignment(source), alignment)), math.inf, bench.what)
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

    compared: two models of which all is to be seen, on long inputs too, with `words`; what the first reads is recorded.
    computed_in: the coarsest dtype in which a module that was run computed."""

    def __init__(
        self,
        inputs: Mapping[str, Tensor] | None,
        runner: Callable[[Checkpoint], Outputs] | None,
        dtype: torch.dtype,
        memory: int | None = None,
        compared: Sequence[Checkpoint] = (),
        words: Sequence[int] = (),
    ) -> None:
        self.inputs = None if inputs is None else [inputs]
        self.runner = runner
        self.dtype = self.computed_in = dtype
        self.memory = budget() if memory is None else memory
        self.compared = compared
        self.words = words
        self.reads: Reads | None = None
        self.positions: tuple[int, int] | None = None
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

    def run(self, checkpoint: Checkpoint, alignment: Alignment | None = None) -> list[Outputs]:
        """The outputs of a checkpoint on each of the inputs; of a moved one on inputs that are moved along."""
        if self.runner is not None:
            return [self.runner(checkpoint)]
        module = (paged if self.pages(checkpoint) else live)(checkpoint, self.dtype)
        self.computed_in = computes_in(module, self.computed_in)
        if self.first is not None:
            try:
                return [run(module, _moved(fields, alignment)) for fields in self.inputs or ()]
            except Exception as error:  # whatever that class raises
                what = f"{checkpoint.name} does not run on the inputs of {self.first}: {first_line(error)}"
                raise IncompatibleError(what) from error
        self.first = checkpoint.name
        with self._recording(module, checkpoint):
            outputs = self._first(module, checkpoint)
        for fields in outputs:
            _refuse_nan(fields, f"{checkpoint.name} on {self.what}")
        return outputs

    def _first(self, module: torch.nn.Module, checkpoint: Checkpoint) -> list[Outputs]:
        given = self.inputs is not None
        self.inputs = self.inputs or [random_inputs(module, checkpoint.config)]
        try:
            outputs: list[Outputs] = [run(module, fields) for fields in self.inputs]
        except Exception as error:
            raise CheckpointError(f"{checkpoint.name} does not run on {self.what}: {first_line(error)}") from error
        return outputs if given or not self.compared else outputs + self._longer(module)

    def _longer(self, module: torch.nn.Module) -> list[Outputs]:
        """The outputs on long inputs, which are added to the others. A module that counts positions from its padding
        token on takes fewer than its config says."""
        configs = [checkpoint.config for checkpoint in self.compared]
        pads = [pad for config in configs if type(pad := config.get("pad_token_id")) is int]
        assert self.inputs is not None
        for less in (0, 1 + max(pads, default=0)):
            longer = long_inputs(module, configs, self.inputs[0], self.words, less)
            try:
                outputs: list[Outputs] = [run(module, fields) for fields in longer]
            except IndexError:
                continue
            except Exception as error:
                self.what += f", none longer as the class does not take them ({first_line(error)})"
                return []
            self.inputs += longer
            if longer:
                self.positions = Reach.of(module).run(longer)
            return outputs
        return []

    @contextmanager
    def _recording(self, module: torch.nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
        if not self.compared:
            yield
            return
        whole = as_declared(checkpoint)
        shapes = {name: whole.info(name).shape for name in name_parameters(module, whole)}
        self.reads = Reads({name: math.prod(shape[:1]) for name, shape in shapes.items()})
        with self.reads:
            yield

    def unread(self, edits: Mapping[str, Changed], tolerance: float) -> tuple[str, ...]:
        """The rows that differ where others do not, and that the first model did not read."""
        rows = {} if self.reads is None else self.reads.rows
        found = {name: changed.edited(tolerance) & ~rows[name] for name, changed in edits.items() if name in rows}
        return tuple(
            f"{some(map(str, rows.nonzero().flatten().tolist()))} of {name}"
            for name, rows in found.items()
            if rows.any()
        )

    def coverage(self) -> dict[str, tuple[int, int]]:
        run = {} if self.positions is None else {"positions": self.positions}
        return run if self.reads is None else run | self.reads.counts()


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

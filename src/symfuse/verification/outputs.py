"""The outputs of a live module on random inputs that suit it, and the distance between the outputs of two modules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from symfuse.errors import IncompatibleError, OptionError
from symfuse.io.live import carried_config
from symfuse.verification.guess import guessed
from symfuse.verification.images import image_token, with_images

Outputs = Mapping[str, Tensor]

_GIVE = "from Python give it `inputs`, by name"

FRAMES = 12  # vectors that the inputs of a speech encoder give

# Outputs of the base model that models with a head return too: whatever the basis, nothing reads them.
UNDER_A_HEAD = {"encoder_last_hidden_state"}


def random_inputs(module: torch.nn.Module, config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Seeded inputs for a live module, by what it takes: token ids with padding, images among them where
    placeholders stand for these, pixels, sounds, or hidden states; for an encoder-decoder those of both. Where config
    and class do not tell, the first that it runs on (`guessed`); OptionError if there are none."""
    main = getattr(module, "main_input_name", None)
    with suppress(KeyError):  # a field that most configs have
        if main is not None and (inputs := _usual(module, main, config, seed)):
            return inputs
    if (own := guessed(module, config.get("hidden_size"), seed)) is None:
        reads = f" (it reads {main!r})" if main else ""
        raise OptionError(f"no inputs for {type(module).__name__} are known{reads}; {_GIVE}")
    return own


def _usual(module: torch.nn.Module, main: str, config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """The inputs of a class of transformers; none for a main input that is not known."""
    rng = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    unsaid = "vision_config" in config or "vocab_size" not in config  # it need not say what is usual
    if unsaid and (own := carried_config(module)) is not None:
        config = own.to_dict()
    text, vision = (config.get(f"{part}_config") or config for part in ("text", "vision"))
    takes = inspect.signature(module.forward).parameters
    main = main if main in takes or "pixel_values" not in takes else "pixel_values"
    if main == "pixel_values" and "spatial_shapes" in takes:
        return _patches(vision, rng, dtype)
    if main == "pixel_values":
        pixels = {main: _pixels(vision, rng, dtype)}
        return pixels | {"noise": _order_of_patches(vision, rng, dtype)} if "noise" in takes else pixels
    if main == "input_values":
        return {main: _sounds(config, rng, dtype)}
    if main == "input_features" and "max_source_positions" in config:
        shape = (2, config["num_mel_bins"], 2 * config["max_source_positions"])  # the second convolution halves it
        sounds = torch.randn(shape, generator=rng, dtype=dtype)
        return {main: sounds, **_decoder_inputs(config, config["max_target_positions"], len(sounds), rng)}
    if main != "input_ids":
        return {}
    length = max(1, min(16, text.get("max_position_embeddings", text.get("n_positions", 16)) - 4))
    ids = torch.randint(min(5, text["vocab_size"] - 1), text["vocab_size"], (3, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, max(1, length // 2) :] = 0
    if type(module).__name__.endswith("ForMultipleChoice"):  # it takes [batch, choices, length]
        return {"input_ids": ids[None], "attention_mask": mask[None]}
    ends = {end for part in module.modules() if isinstance(end := getattr(part, "eos_token_id", None), int)}
    for end in ends:  # a model that is read at the end of a text (CLIP)
        ids[torch.arange(len(ids)), mask.sum(1) - 1] = min(end, text["vocab_size"] - 1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "global_attention_mask" in takes:  # the first token, so that the maps of such tokens are read
        inputs["global_attention_mask"] = (torch.arange(length) == 0).long().expand_as(ids)
    if image_token(module, config) is not None:
        return with_images(module, config, inputs, rng)
    if "spatial_shapes" in takes:
        return inputs | _patches(vision, rng, dtype)
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


def _patches(config: Mapping[str, Any], rng: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two images of other shapes, cut into patches, with padding (SigLIP 2)."""
    shapes = torch.tensor([[2, 3], [4, 2]])
    length = int(shapes.prod(1).max())
    values = torch.randn(2, length, config["num_channels"] * config["patch_size"] ** 2, generator=rng, dtype=dtype)
    mask = (torch.arange(length) < shapes.prod(1)[:, None]).long()
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _order_of_patches(config: Mapping[str, Any], rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """What decides which patches are masked, else drawn anew in each run (ViT-MAE)."""
    sizes = (config.get("image_size", 224), config.get("patch_size", 16))
    image, patch = ((size, size) if isinstance(size, int) else size for size in sizes)
    return torch.rand(2, (image[0] // patch[0]) * (image[1] // patch[1]), generator=rng, dtype=dtype)


def _sounds(config: Mapping[str, Any], rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A spectrogram, or sounds as long as the convolutions need to give FRAMES vectors."""
    if "num_mel_bins" in config:
        return torch.randn(2, config["max_length"], config["num_mel_bins"], generator=rng, dtype=dtype)
    length = FRAMES
    for kernel, stride in zip(reversed(config["conv_kernel"]), reversed(config["conv_stride"]), strict=True):
        length = (length - 1) * stride + kernel
    return torch.randn(2, length, generator=rng, dtype=dtype)


def _decoder_inputs(config: Mapping[str, Any], longest: int, batch: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Token ids for a decoder, with padding: fewer than the encoder has, so that masks cannot be mixed up."""
    length = max(1, min(16, longest) - 3)
    words = config.get("decoder_vocab_size") or config["vocab_size"]
    ids = torch.randint(min(5, words - 1), words, (batch, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[1, max(1, length // 2) :] = 0
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def run(module: torch.nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point outputs of a live module by field name: those of the base model if it has no head. Masked
    positions are set to zero. A module in float64 is run in float64 throughout (`_Widened`)."""
    wide = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    with torch.inference_mode(), widened() if wide else nullcontext():
        out = by_name(module(**inputs))
    masks = {
        inputs[name].shape: inputs[name] for name in ("attention_mask", "decoder_attention_mask") if name in inputs
    }
    headed = any(name.endswith("logits") for name in out)
    fields = {}
    for name, value in out.items():
        dense = isinstance(value, Tensor) and value.layout is torch.strided and value.is_floating_point()
        if not dense or (headed and name in UNDER_A_HEAD):
            continue
        mask = masks.get(value.shape[:2]) if value.ndim == 3 else None
        fields[name] = value if mask is None else value * mask[..., None].to(value.dtype)
    return fields


@contextmanager
def widened() -> Iterator[None]:
    """As `_Widened`, with float64 as torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)


class _Widened(TorchFunctionMode):
    """Float64 wherever a class asks for float32, whatever the dtype of its weights: in norms, in the softmax, in the
    angles of positions, in constants. A symmetry is then exact to 1e-13 in every class; what float32 would round is
    no longer larger than what a slight mistake changes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].to(torch.float64, copy=True)  # a copy as ever: views of it may need its strides
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*wide, **named)


def by_name(out: Any) -> Mapping[str, Any]:
    """The outputs of a module by name; if it returns a tensor or a tuple, by position."""
    if isinstance(out, Mapping):
        return {str(name): part for name, part in out.items()}
    parts = [out] if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else []
    return {"output" if len(parts) == 1 else f"output {i}": part for i, part in enumerate(parts)}


def compare(before: Outputs, after: Outputs, *, by_row: bool = False) -> dict[str, float]:
    """For each field the largest absolute difference over the largest absolute entry of `before`. by_row: over that of
    the same row, such as the logits of one position, for rows of more than one entry.

    Raises IncompatibleError if the outputs do not have the same fields and shapes.
    """
    if not before:
        raise IncompatibleError("the models have no outputs to compare")
    shapes, others = ({name: tuple(t.shape) for name, t in fields.items()} for fields in (before, after))
    if shapes != others:
        raise IncompatibleError(f"the models do not have the same outputs: {shapes} and {others}")
    return {name: _difference(value, after[name], by_row) for name, value in before.items()}


# A row of outputs that is nearly zero holds the rounding errors of the terms that were added.
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


def worst(before: Sequence[Outputs], after: Sequence[Outputs], *, by_row: bool = False) -> dict[str, float]:
    """The largest result of `compare` over several outputs, for each field."""
    compared = [compare(one, other, by_row=by_row) for one, other in zip(before, after, strict=True)]
    return {
        name: max((errors[name] for errors in compared), key=lambda e: math.inf if math.isnan(e) else e)
        for name in compared[0]
    }

"""Recompute the running statistics of batch normalisation from data (REPAIR; Jordan et al. 2023). Interpolated
statistics are not those of the interpolated network, whose activations have a smaller variance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from symfuse.errors import OptionError, SymfuseError
from symfuse.evaluation.task import Batch
from symfuse.evaluation.tasks.base import NOT_INPUTS, at
from symfuse.io import Checkpoint
from symfuse.messages import first_line
from symfuse.modules import live, stored_names
from symfuse.rewriting.rewritten import with_values
from symfuse.runs import record_of, recorded


def normalising(module: nn.Module) -> list[Any]:
    """Its layers that have running statistics."""
    kind = nn.modules.batchnorm._NormBase
    return [part for part in module.modules() if isinstance(part, kind) and part.track_running_stats]


def renew_statistics(module: nn.Module, batches: Iterable[Batch]) -> int:
    """Measure the running statistics of all batch normalisation again, as means over the batches (of module inputs by
    name). Returns the number of layers that have them. All other parts stay in evaluation mode, and all modes are
    restored. OptionError for batches that the module does not accept, for none, and for statistics that are not
    finite."""
    layers = normalising(module)
    if not layers:
        return 0
    before = [(layer, layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a mean over all batches
        layer.train()
    seen = 0
    try:
        with torch.no_grad():
            for batch in batches:
                module(**{name: at(module, field) for name, field in batch.items() if name not in NOT_INPUTS})
                seen += 1
    except SymfuseError:
        raise
    except Exception as error:  # whatever that module raises
        takes = ", ".join(inspect.signature(module.forward).parameters)
        raise OptionError(
            f"renew: {type(module).__name__} does not take these batches ({first_line(error)}); they are its inputs by "
            f"name, and it takes {takes}"
        ) from error
    finally:
        for layer, training, momentum in before:
            layer.training, layer.momentum = training, momentum
    if not seen:
        raise OptionError("there are no batches to take the statistics of batch normalisation from")
    if not all(bool(one.isfinite().all()) for layer in layers for one in layer.buffers(recurse=False)):
        raise OptionError("renew: the statistics of these batches are not finite; a batch is empty, or holds NaN")
    return len(layers)


def renewed(
    checkpoint: Checkpoint, batches: Sequence[Batch], data: str, build: Callable[[Checkpoint], nn.Module] | None = None
) -> Checkpoint:
    """The model with running statistics from these batches. This changes its function, as its record notes, if it has
    one. data: where they come from. build: makes the module of models that `transformers` does not
    have. OptionError if it has no batch normalisation, and as of `renew_statistics`."""
    module = live(checkpoint, torch.float32) if build is None else build(checkpoint).eval()
    if not renew_statistics(module, batches):
        raise OptionError(
            f"{checkpoint.name} has no batch normalisation with running statistics; there is nothing to renew"
        )
    files, values = stored_names(module, checkpoint), {}
    for layer in normalising(module):
        for leaf, tensor in layer.named_buffers(recurse=False):
            file = files[id(layer), leaf]
            values[file] = tensor.detach().to(checkpoint.info(file).dtype)
    result, record = with_values(checkpoint, values), record_of(checkpoint)
    how = f"taken anew from {len(batches)} batches of {data}"
    return result if record is None else recorded(result, record.known({**record.run, "batch_statistics": how}))

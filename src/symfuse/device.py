"""Where models are read to, and so where all that is made of them is computed: the processor, or a CUDA device.

What a checkpoint gives arrives there (`Checkpoint.on`), everything downstream follows its inputs, and what is kept, an
alignment or a file, comes back (`Alignment.to`). Nothing else names a device. And how much memory there is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from symfuse.errors import OptionError

CPU = "cpu"
SHARE = 0.75  # of what is free, that work takes by default: the rest is for files in the cache and for others
UNKNOWN = 4 * 2**30  # where the system does not say


def require(name: str) -> str:
    """The full name of a device that is here, such as cuda:0 for cuda; OptionError if there is none of that name, or it
    cannot compute in float64, which all moments and factorisations are in."""
    if name == CPU:
        return CPU
    kind, colon, number = name.partition(":")
    if kind == "mps":
        raise _unusable(name, "moments and factorisations are in float64, which Apple's GPUs do not have")
    if kind != "cuda" or bool(colon) != number.isdecimal():
        raise OptionError(f"device {name!r} cannot be used (expected cpu, cuda, or cuda:1 for the second GPU)")
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "there is no GPU, or no driver for it" if built else f"torch {torch.__version__} is built without CUDA"
        raise _unusable(name, why)
    count = torch.cuda.device_count()
    at = int(number) if number else torch.cuda.current_device()
    if at >= count:
        raise _unusable(name, f"there {'is' if count == 1 else 'are'} {', '.join(f'cuda:{i}' for i in range(count))}")
    return f"cuda:{at}"


def _unusable(name: str, why: str) -> OptionError:
    return OptionError(f"device {name!r} cannot be used ({why}); leave it out, to compute on the processor")


def budget(device: str = CPU) -> int:
    """Bytes that may be used unless somebody says otherwise: a share of what is free, or of what the limit of this
    control group leaves (Linux), or else of half of what is installed. device: of whose memory."""
    if device != CPU:
        import torch

        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    found = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not found:
        with suppress(AttributeError, OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return int(SHARE * min(found, default=UNKNOWN))

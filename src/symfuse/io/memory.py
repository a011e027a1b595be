"""How much memory there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from symfuse.device import CPU

SHARE = 0.75  # of what is free, that work takes by default: the rest is for files in the cache and for others
UNKNOWN = 4 * 2**30  # where the system does not say


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

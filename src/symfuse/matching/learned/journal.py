"""The state of a learning run in a file, from which a stopped run continues with the same result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symfuse.errors import OutputError
from symfuse.files import regular


@dataclass
class Run:
    """A learning run, finished or not.

    history: one (step, mean loss since the last entry, barrier on the validation data, criterion) for each validation;
    the step with the least criterion is kept. ends: the losses of the models themselves. best: the parameters of the
    step that is kept, by model.
    """

    step: int = 0
    history: list[tuple[int, float, float, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    best: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def least(self) -> float:
        """The least criterion so far; infinite before any is measured."""
        return min((measured for *_, measured in self.history), default=math.inf)


class Journal:
    """The state of a run in a file, or nowhere if the path is None. about: JSON data that identify the run."""

    def __init__(
        self,
        path: Path | str | None,
        about: Mapping[str, Any],
        leaves: Sequence[Mapping[str, Tensor]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.leaves, self.optimizer = leaves, optimizer
        self.about = json.dumps(about, sort_keys=True)

    def load(self) -> Run | None:
        """The run so far; parameters and optimizer are set to its state. OutputError if the file is of another run."""
        if self.path is None:
            return None
        try:
            if not self.path.exists():
                return None
            state = torch.load(regular(self.path), map_location="cpu", weights_only=True)
            if state["about"] != self.about:
                raise OutputError(
                    f"{self.path}: the journal of another learning (other models, data or options); name another file "
                    "to start anew"
                )
            for own, kept in zip(self.leaves, state["leaves"], strict=True):
                for name, leaf in own.items():
                    leaf.data.copy_(kept[name])
            self.optimizer.load_state_dict(state["optimizer"])
            run = Run(state["step"], [tuple(one) for one in state["history"]], state["ends"], state["best"])
            self._require_whole(run)
            return run
        except OutputError:
            raise
        except Exception as error:
            raise OutputError(
                f"{self.path}: no journal of a learning, or a damaged one ({type(error).__name__}); name another file"
            ) from error

    def _require_whole(self, run: Run) -> None:
        """ValueError if the file cannot be the state of this run."""
        numbers = [x for one in run.history for x in one[2:]] + list(run.ends)
        shapes = [{name: leaf.shape for name, leaf in one.items()} for one in self.leaves]
        best_shapes = [{name: leaf.shape for name, leaf in one.items()} for one in run.best]
        finite = all(bool(leaf.isfinite().all()) for one in run.best for leaf in one.values())
        whole = type(run.step) is int and 0 <= run.step == run.history[-1][0]
        if not (whole and all(map(math.isfinite, numbers)) and best_shapes == shapes and finite):
            raise ValueError("it is not the state of such a run")

    def save(self, run: Run) -> None:
        """Replace the file by the state of the run, in one step."""
        if self.path is None:
            return
        state = {
            "about": self.about,
            "step": run.step,
            "history": run.history,
            "ends": run.ends,
            "best": run.best,
            "leaves": [{name: leaf.detach() for name, leaf in one.items()} for one in self.leaves],
            "optimizer": self.optimizer.state_dict(),
        }
        beside = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, beside)
            beside.replace(self.path)
        except (OSError, RuntimeError) as error:  # RuntimeError: what torch makes of a full disk
            with suppress(OSError):
                beside.unlink()
            raise OutputError(f"{self.path}: the journal cannot be written there ({error})") from error

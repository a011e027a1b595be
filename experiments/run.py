"""The papers' tables and figures: python experiments/run.py [STUDY …] [--config small|long|paper|FILE]

Makes the rows that are not there yet, each as a line of experiments/data/CONFIG/STUDY.json, so that a stopped run is
gone on with; models that it needs are trained first, and kept. `--write` writes docs/results.md, or what else the
config fills, from the rows. Configs: `small` fits on two cores, `long` is what docs/connect.md and docs/fusion.md show,
`paper` is the papers' own scale (models of the hub, a GPU), untested here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from config import Config
from study import DATA, STUDIES, Part, Store, Study, study_named

from symfuse.errors import OptionError, SymfuseError


def selected(config: Config, names: Iterable[str]) -> list[Study]:
    """Those that are asked for, by default all of the config. Raises OptionError if it has none, or an unknown one."""
    if strange := [name for name in config.studies if name not in STUDIES]:
        raise OptionError(f"{config.path}: studies: {strange[0]!r} is none; there are {', '.join(STUDIES)}")
    if absent := [name for name in names if name not in config.studies]:
        raise OptionError(f"{config.path} has no study {absent[0]!r}; it has {', '.join(config.studies) or 'none'}")
    return [study_named(name, config) for name in names or STUDIES if name in config.studies]


def run(studies: list[Study], folder: Path, jobs: int, command: str) -> int:
    """Train what is needed, then make the rows of studies of one config that are not there yet; how many pieces failed.

    Raises SymfuseError if the device or the folder cannot be used, or a process was killed."""
    config, failed = studies[0].config, 0
    config.require_device()
    for one in studies:
        Store.of(one, folder).require_writable()
    left = {one: parts for one in studies if (parts := Store.of(one, folder).unfinished())}
    needed = dict.fromkeys(model for one in left for model in one.models())
    for tuned in (False, True):  # what is fine-tuned may start from a family
        models = [(name, seed) for name, seed in needed if (name in config.tuned) is tuned]
        failed += _all(jobs, {f"{name} {seed}": (_prepare, config.path, name, seed) for name, seed in models})
    work = {
        f"{one.name} {' '.join(map(str, part))}": (_make, config.path, one.name, part, folder, command)
        for one, parts in left.items()
        for part in parts
    }
    return failed + _all(jobs, work)


def _all(jobs: int, work: dict[str, tuple[Any, ...]]) -> int:
    """Call each in one of as many processes; what fails is said, and the others go on."""
    context, reported = multiprocessing.get_context("spawn"), []
    with ProcessPoolExecutor(max(1, min(jobs, len(work))), mp_context=context, initializer=_alone) as pool:
        waiting: dict[Future[Any], str] = {pool.submit(*what): name for name, what in work.items()}
        try:
            for future in as_completed(waiting):
                if error := future.exception():
                    text = _described(error)
                    print(
                        f"FAILED {waiting[future]}: {'as before' if text in reported else text}",
                        file=sys.stderr,
                        flush=True,
                    )
                    reported.append(text)
        except BaseException:  # Ctrl-C too: what was not begun is not begun
            pool.shutdown(cancel_futures=True)
            raise
    return len(reported)


def _described(error: BaseException) -> str:
    """What went wrong: of what symfuse foresees its message, else where. Raises OptionError if a process died."""
    if isinstance(error, BrokenProcessPool):
        raise OptionError(
            "a process was killed (out of memory?); use fewer --jobs: the same command goes on"
        ) from error
    if isinstance(error, SymfuseError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).strip()


def _alone() -> None:
    """One thread a process: those of BLAS libraries would fight. Of `transformers` only errors."""
    from transformers.utils import logging

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one that goes on would take the next piece
    threading.Thread(target=_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _with_parent() -> None:
    """No process outlives the one that started it, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(config: Path, name: str, seed: Any) -> None:
    Config.read(str(config)).prepare(name, seed)


def _make(config: Path, name: str, part: Part, folder: Path, command: str) -> None:
    Store.of(study_named(name, Config.read(str(config))), folder).run(part, command)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--config", default="small", help="a name in experiments/configs, or a file (default: small)")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count(), help="processes (default: as many as cores)")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help="of the rows (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only say what there is to do, and what is done")
    parser.add_argument("--write", action="store_true", help="only write the documents from the rows")
    options = parser.parse_args()
    if strange := [name for name in options.studies if name not in STUDIES]:
        parser.error(f"no study is called {strange[0]!r}; there are {', '.join(STUDIES)}")
    try:
        config = Config.read(options.config)
        studies = selected(config, options.studies)
        if options.list:
            for one in studies:
                parts, store = len(list(one.parts())), Store.of(one, options.data)
                done = f"{parts - len(store.unfinished())} of {parts} parts, {len(store.rows())} rows"
                print(f"{one.name} ({one.title}): {done}")
        elif options.write:
            import results

            results.write(config, studies, options.data)
        else:
            start = time.perf_counter()
            failed = run(studies, options.data, options.jobs, f"python {shlex.join(sys.argv)}")
            spent = (time.perf_counter() - start) / 60
            print(f"{spent:.1f} minutes, {failed} failed; rows are in {options.data / config.name}", flush=True)
            sys.exit(bool(failed))
    except SymfuseError as error:
        parser.exit(1, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the same command goes on\n")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text}")
    return int(text)


if __name__ == "__main__":
    main()

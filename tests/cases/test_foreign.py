"""Ties, prefixes and tensors that not all models have: inputs that broke other tools. Named after the cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import symfuse
from contract.tiny import GPT2, MODELS
from contract.tiny import of as declared_of
from merged import merge_models
from model.test_undeclared import LLAMA, changed, of, tiny, unknown
from model.test_undeclared import llama as declared_llama
from recipes.llama import UNKNOWN
from symfuse.errors import IncompatibleError, SpecError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model, require_same_shape
from symfuse.modules import live
from symfuse.recipes import parse_recipe
from symfuse.recipes.stage import open_models, prepare
from symfuse.rewriting import Harmonised, Reconcile, harmonise, zero_biases
from symfuse.verification import verify

Make = Callable[..., Checkpoint]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(params=[declared_llama, unknown], ids=["declared", "unknown"])
def llama(request: pytest.FixtureRequest) -> Make:
    make: Make = request.param
    return make


def models(out: Harmonised) -> list[Model]:
    """As a merge takes them. A declaration knows its own prefixes, aliases and buffers, which stay in the files."""
    opened = [of(c) for c in out.checkpoints]
    require_same_shape(opened)
    names = [m.spec.tensors.keys() - m.spec.tied.keys() if m.declared else set(m.checkpoint) for m in opened]
    assert all(found == names[0] for found in names)
    return opened


def logits(checkpoint: Checkpoint, folder: Path) -> Tensor:
    """What the saved model computes, loaded with no tensor missing or left over."""
    cls = getattr(transformers, checkpoint.config["architectures"][0])
    module, loading = cls.from_pretrained(checkpoint.save(folder), output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.arange(12)[None] + 3
    decoder = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    with torch.no_grad():
        return module.eval()(ids, **decoder).logits


def mean(checkpoints: list[Checkpoint], base: int = 0) -> Checkpoint:
    return merge_models([of(c) for c in checkpoints], base=base)


def refused(message: str, *checkpoints: Checkpoint, **options: Any) -> None:
    """In both orders, and whichever is the base."""
    for order in (checkpoints, checkpoints[::-1]):
        for base in (0, 1):
            with pytest.raises(IncompatibleError, match=message):
                harmonise(order, base=base, options=Reconcile(**options))


# -- ties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 1])
def test_c01_one_tied_and_one_untied(llama: Make, base: int, tmp_path: Path) -> None:
    a, b = llama(tie_word_embeddings=True), llama(1)
    assert HEAD not in a
    out = harmonise([a, b], base=base)
    models(out)
    one, other = out.checkpoints
    assert torch.equal(one[HEAD], a[EMBED])
    assert torch.equal(one.part(HEAD, 5, 77), a[EMBED].flatten()[5:77])
    assert torch.equal(one.read(HEAD), a[EMBED])
    assert [c.config["tie_word_embeddings"] for c in out.checkpoints] == [False, False]
    assert other is b or all(torch.equal(other[n], b[n]) for n in b)
    assert any("tie of lm_head.weight to model.embed_tokens.weight is broken, because model1" in n for n in out.notes)
    torch.testing.assert_close(logits(one, tmp_path / "untied"), logits(a, tmp_path / "tied"))
    merged = mean(out.checkpoints, base)
    torch.testing.assert_close(merged[HEAD], (a[EMBED] + b[HEAD]) / 2)
    torch.testing.assert_close(merged[EMBED], (a[EMBED] + b[EMBED]) / 2)
    assert merged.config["tie_word_embeddings"] is False
    assert logits(merged, tmp_path / "merged").isfinite().all()


def test_c01_a_stored_head_that_is_the_embedding(llama: Make) -> None:
    a = llama(tie_word_embeddings=True)
    stored = changed(a, {HEAD: a[EMBED].clone()})
    out = harmonise([stored, llama(1)])
    assert torch.equal(models(out)[0].read(HEAD), a[EMBED])
    with pytest.raises(SpecError, match=r"model0: lm_head\.weight is model\.embed_tokens\.weight by config"):
        harmonise([changed(a, {HEAD: a[EMBED] + 1}), llama(1)])


def test_c01_known_families_untie_too() -> None:
    a = MODELS["gpt2-lm"](0)
    b = declared_of("GPT2LMHeadModel", "GPT2Config", GPT2, tie_word_embeddings=False)(1)
    assert "lm_head.weight" in b
    assert "lm_head.weight" not in a
    out = harmonise([a, b])
    assert verify(a, out.checkpoints[0]).worst < 1e-13
    require_same_shape([Model.of(c) for c in out.checkpoints])
    bert = MODELS["bert-mlm"](0)
    out = harmonise([MODELS["bert-mlm-untied"](1), bert])
    assert verify(bert, out.checkpoints[1]).worst < 1e-13
    require_same_shape([Model.of(c) for c in out.checkpoints])


@pytest.mark.parametrize("stored", [False, True])
def test_c02_tied_models_get_no_head(llama: Make, stored: bool) -> None:
    a, b = (llama(seed, tie_word_embeddings=True) for seed in (0, 1))
    b = changed(b, {HEAD: b[EMBED].clone()}) if stored else b
    for base in (0, 1):
        out = harmonise([a, b], base=base)
        models(out)
        merged = mean(out.checkpoints, base)
        assert set(merged) == set(a)
        assert merged.config["tie_word_embeddings"] is True


def test_c04_a_head_that_is_not_stored(llama: Make) -> None:
    assert HEAD not in of(llama(tie_word_embeddings=True)).spec.tensors
    with pytest.raises(SpecError, match=r"model0: lm_head\.weight is missing, .*unties it from the embedding"):
        of(changed(llama(), {HEAD: None}))
    with pytest.raises(SpecError, match=r"lm_head\.weight is missing, .*does not tie it to the embedding"):
        of(changed(llama(), {HEAD: None}, tie_word_embeddings=None))
    gemma = changed(tiny("GemmaForCausalLM", LLAMA), tie_word_embeddings=None)
    assert HEAD not in of(gemma).spec.tensors


T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
SHARED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5(seed: int, names: tuple[str, ...] = (), **config: Any) -> Checkpoint:
    plain = tiny("T5ForConditionalGeneration", T5, seed)
    assert not {*SHARED, HEAD} & plain.keys()
    return changed(plain, {name: plain["shared.weight"].clone() for name in names}, **config)


def test_c09_one_matrix_under_several_names() -> None:
    a, b = t5(0), t5(1, (*SHARED, HEAD))
    for base in (0, 1):
        out = harmonise([a, b], base=base)
        models(out)
        merged = mean(out.checkpoints, base)
        assert set(merged) == set(a)
        torch.testing.assert_close(merged["shared.weight"], (a["shared.weight"] + b["shared.weight"]) / 2)
    for name in (*SHARED, HEAD):
        wrong = changed(b, {name: b["shared.weight"] + 1})
        with pytest.raises(SpecError, match=rf"model1: {name} is shared\.weight by config\.json .* or its family"):
            harmonise([a, wrong])


def test_c09_only_an_alias_is_stored() -> None:
    b = t5(1, (SHARED[0],))
    only = changed(b, {"shared.weight": None})
    model = of(only)
    assert model.spec.tensors.keys() == of(t5(0)).spec.tensors.keys()
    assert model.spec.file_name("shared.weight") == SHARED[0]


def test_c09_a_head_of_its_own_beside_a_tied_one(tmp_path: Path) -> None:
    """The decoder of a tied T5 is scaled before the head: the head that it gets is scaled instead."""
    b, c = t5(1, (*SHARED, HEAD)), t5(2, tie_word_embeddings=False, scale_decoder_outputs=None)
    c = changed(c, {HEAD: torch.randn(64, 32)})
    out = harmonise([b, c])
    models(out)
    torch.testing.assert_close(out.checkpoints[0][HEAD], b["shared.weight"] * 32**-0.5)
    torch.testing.assert_close(out.checkpoints[0].part(HEAD, 3, 9), (b["shared.weight"] * 32**-0.5).flatten()[3:9])
    torch.testing.assert_close(logits(out.checkpoints[0], tmp_path / "own"), logits(t5(1), tmp_path / "tied"))


def test_c09_how_new_versions_write_an_unscaled_t5(tmp_path: Path) -> None:
    """`transformers` 5 says of every T5 that it is tied, and of those that were not that outputs are not scaled."""
    unscaled = t5(0, scale_decoder_outputs=False)
    assert HEAD not in of(unscaled).spec.tensors
    with pytest.raises(IncompatibleError, match="scale_decoder_outputs: False and True"):
        models(harmonise([unscaled, t5(1)]))
    own = changed(unscaled, {HEAD: torch.randn(64, 32)})
    assert HEAD in of(own).spec.tensors
    assert HEAD not in of(own).spec.tied
    untied = harmonise([unscaled, own]).checkpoints[0]
    assert torch.equal(untied[HEAD], unscaled["shared.weight"])
    torch.testing.assert_close(logits(untied, tmp_path / "own"), logits(unscaled, tmp_path / "tied"))


# -- names and buffers -----------------------------------------------------------------------------


def test_c11_rotary_frequencies(llama: Make) -> None:
    plain = llama()
    frequencies = 10_000.0 ** -(torch.arange(4) / 4)
    buffers: dict[str, Tensor | None] = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies.clone() for i in range(2)
    }
    old = changed(plain, buffers)
    model = of(old)
    assert model.spec.buffers == buffers.keys()
    assert model.spec.tensors.keys() == of(plain).spec.tensors.keys()
    assert len(model.notes) == (0 if model.declared else 1)
    assert set(mean(harmonise([old, llama(1)]).checkpoints)) == set(plain)
    halved = changed(plain, dict.fromkeys(buffers, frequencies / 2))
    words = "inv_freq differs from the frequencies of rope_theta 10000 in config.json"
    assert words in of(halved).notes[-1]
    recipe = parse_recipe({"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]})
    known = open_models(recipe, {"a": llama(1), "b": halved})
    assert [words in note.text for note in prepare(recipe, known).notes].count(True) == 1


@pytest.mark.parametrize("prefixed", [0, 1])
@pytest.mark.parametrize("model_type", [None, UNKNOWN])
@pytest.mark.parametrize(("class_name", "prefix"), [("LlamaModel", "model."), ("GPTNeoXModel", "gpt_neox.")])
def test_c15_the_prefix_of_a_base_model(class_name: str, prefix: str, model_type: str | None, prefixed: int) -> None:
    sizes = {
        k: v for k, v in LLAMA.items() if class_name == "LlamaModel" or k not in ("head_dim", "num_key_value_heads")
    }
    both = [tiny(class_name, sizes, seed) for seed in (0, 1)]
    both = [changed(c, model_type=model_type or c.config["model_type"]) for c in both]
    plain = list(both)
    both[prefixed] = changed(
        plain[prefixed], dict.fromkeys(plain[prefixed]) | {prefix + n: plain[prefixed][n] for n in plain[prefixed]}
    )
    for base in (0, 1):
        out = harmonise(both, base=base)
        models(out)
        merged = mean(out.checkpoints, base)
        assert set(merged) == set(both[base])
        for name in plain[0]:
            own = prefix + name if base == prefixed else name
            torch.testing.assert_close(merged[own], (plain[0][name] + plain[1][name]) / 2)
        assert len(out.notes) == 1


def test_c15_other_families_are_refused() -> None:
    refused("one is a (bert|roberta), the other a (bert|roberta)", MODELS["bert"](0), MODELS["roberta-mlm"](0))
    with pytest.raises(IncompatibleError, match=r"of text and images, a merge aligns the language model alone"):
        symfuse.match(MODELS["llama-lm"](0), MODELS["llava-lm"](0))


def wrapped(text: Checkpoint, layout: str) -> Checkpoint:
    """A text model inside a model of two modalities, as old or new releases lay it out."""
    names = {
        n: f"language_model.{n}" if layout == "old" else n.replace("model.", "model.language_model.") for n in text
    }
    tower = {"old": "vision_tower.x.weight", "new": "model.vision_tower.x.weight"}[layout]
    config = {
        "model_type": "llava_onevision", "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "text_config": dict(text.config),
        "tie_word_embeddings": False,
    }  # fmt: skip
    return open_checkpoint({**{names[n]: text[n] for n in text}, tower: torch.ones(3, 5)}, config=config, name=layout)


@pytest.mark.parametrize("layout", ["old", "new"])
def test_c17_a_text_model_and_one_of_two_modalities(llama: Make, layout: str) -> None:
    text, inside = llama(), llama(1)
    both = wrapped(inside, layout)
    name = {"old": "language_model.model.norm.weight", "new": "model.language_model.norm.weight"}[layout]

    out = harmonise([both, text])
    wide, moved = models(out)
    assert out.inside is not None
    assert {out.inside.names[n] for n in wide.checkpoint} | set(out.kept) == set(both)
    (kept,) = out.kept.values()
    assert kept[0] is both or torch.equal(kept[0][kept[1]], torch.ones(3, 5))
    assert out.inside.names["model.norm.weight"] == name
    assert torch.equal(wide.checkpoint["model.norm.weight"], both[name])
    assert torch.equal(moved.checkpoint["model.norm.weight"], text["model.norm.weight"])
    assert wide.spec.axes == of(text).spec.axes
    merged = {**wide.checkpoint.config, "vocab_size": 99, "tie_word_embeddings": True}
    config = out.inside.config(merged)
    assert config["text_config"] == {**both.config["text_config"], "vocab_size": 99, "tie_word_embeddings": True}
    assert config["tie_word_embeddings"] is True
    assert {**config, "text_config": 0, "tie_word_embeddings": 0} == {
        **both.config, "text_config": 0, "tie_word_embeddings": 0,
    }  # fmt: skip

    out = harmonise([text, both])
    models(out)
    assert torch.equal(out.checkpoints[1]["model.norm.weight"], inside["model.norm.weight"])
    assert set(out.checkpoints[1]) == set(text)
    assert not out.kept
    assert any("1 tensors of other modalities are left out" in note for note in out.notes)


def test_c17_two_layouts_of_one_family(llama: Make) -> None:
    old, new = wrapped(llama(), "old"), wrapped(llama(1), "new")
    for order in ([old, new], [new, old]):
        out = harmonise(order)
        models(out)
        assert set(out.checkpoints[1]) == set(order[0])


def test_c17_configs_inside_are_compared(llama: Make) -> None:
    out = harmonise([wrapped(llama(), "old"), llama(1, rms_norm_eps=1e-2)])
    with pytest.raises(IncompatibleError, match="differs in rms_norm_eps"):
        models(out)


def test_c17_not_one_name_agrees() -> None:
    text = unknown(1)
    strange = open_checkpoint({f"x{i}": tensor for i, tensor in enumerate(text.values())}, config=text.config)
    refused("not one tensor has the same name, under any known prefix", unknown(), strange)
    with pytest.raises(SpecError, match=r"(?s)not those of llama\n  missing: .*not declared: x0, x1"):
        of(strange.replace(config=declared_llama().config))


def test_c18_old_names_of_norms_only() -> None:
    config = {"model_type": "own", "num_hidden_layers": 1}
    new = {"layer.0.LayerNorm.weight": torch.ones(3), "layer.0.LayerNorm.bias": torch.zeros(3),
           "layer.0.ls1.gamma": torch.ones(3)}  # fmt: skip
    old = {"layer.0.LayerNorm.gamma": torch.ones(3), "layer.0.LayerNorm.beta": torch.zeros(3),
           "layer.0.ls1.gamma": torch.ones(3)}  # fmt: skip
    both = [open_checkpoint(t, config=config, name=n) for t, n in ((new, "new"), (old, "old"))]
    assert list(harmonise(both).checkpoints[1]) == list(new)
    assert list(harmonise(both, base=1).checkpoints[0]) == list(old)


# -- what only some have ---------------------------------------------------------------------------


def test_c14_counters_and_running_statistics() -> None:
    def stem(counter: int, average: float) -> Checkpoint:
        module = nn.Sequential(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5))
        module[1].running_mean.fill_(average)
        module[1].num_batches_tracked.fill_(counter)
        return open_checkpoint(module.state_dict(), config={"model_type": "own"}, name=f"n{counter}")

    out = harmonise([stem(3, 1.0), stem(8, 5.0)])
    for checkpoint, average in zip(out.checkpoints, (1.0, 5.0), strict=True):
        counter = checkpoint["1.num_batches_tracked"]
        assert (counter.shape, counter.dtype, int(counter)) == ((), torch.int64, 8)
        assert torch.equal(checkpoint["1.running_mean"], torch.full((5,), average))
    assert "1 counters (num_batches_tracked) are the largest of all" in out.notes[0]
    merged = mean(out.checkpoints)
    assert torch.equal(merged["1.num_batches_tracked"], torch.tensor(8))
    assert torch.equal(merged["1.running_mean"], torch.full((5,), 3.0))


def test_c20_biases_of_one_model_only(llama: Make, tmp_path: Path) -> None:
    a, b = llama(attention_bias=True), llama(1)
    refused(r"model0 has 8 biases that model1 has not: .*--missing-bias zero", a, b)
    for base in (0, 1):
        out = harmonise([a, b], base=base, options=Reconcile(missing_bias="zero"))
        models(out)
        zero = out.checkpoints[1]["model.layers.0.self_attn.k_proj.bias"]
        assert torch.equal(zero, torch.zeros(16))
        assert torch.equal(out.checkpoints[1].part("model.layers.0.self_attn.k_proj.bias", 2, 7), torch.zeros(5))
        assert out.checkpoints[base].config["attention_bias"] is True
    torch.testing.assert_close(logits(out.checkpoints[1], tmp_path / "zero"), logits(b, tmp_path / "none"))
    name = "model.layers.1.self_attn.o_proj.bias"
    torch.testing.assert_close(mean(out.checkpoints)[name], a[name] / 2)


def test_c20_biases_of_a_model_with_another_prefix(tmp_path: Path) -> None:
    """A declaration knows a bias by its canonical name; one that it asks for, and is missing, is never zero."""
    options = Reconcile(missing_bias="zero")
    a = changed(tiny("LlamaModel", LLAMA | {"attention_bias": True}), architectures=["LlamaForCausalLM"])
    a = changed(a, {HEAD: torch.zeros(64, 32)})
    out = harmonise([a, declared_llama(1)], options=options)
    models(out)
    assert torch.equal(out.checkpoints[1]["model.layers.0.self_attn.k_proj.bias"], torch.zeros(16))
    name = "model.layers.0.self_attn.k_proj.bias"
    both = [declared_llama(seed, attention_bias=True) for seed in (0, 1)]
    with pytest.raises(SpecError, match=rf"missing: {name}"):
        models(harmonise([both[0], changed(both[1], {name: None})], options=options))


def test_c20_zero_biases_have_the_dtype_of_their_weights(llama: Make) -> None:
    half = llama(1).to(torch.bfloat16)
    infos = {
        "model.layers.0.self_attn.q_proj.bias": llama(attention_bias=True).info("model.layers.0.self_attn.q_proj.bias")
    }
    out = zero_biases(half, infos, {})
    assert out.info("model.layers.0.self_attn.q_proj.bias").dtype == torch.bfloat16


STRAY = {"model_ema.decay": torch.tensor([0.5]), "ema.model.norm.weight": torch.full((32,), 7.0)}


def test_c22_foreign_tensors_are_listed_in_both_orders() -> None:
    stray, clean = changed(unknown(), dict(STRAY)), unknown(1)
    refused(
        r"tensors that not all models have \(model0: ema\.model\.norm\.weight, model_ema\.decay\)\. Say what becomes",
        stray, clean,
    )  # fmt: skip
    both = [changed(declared_llama(), dict(STRAY)), declared_llama(1)]
    for order in (both, both[::-1]):
        with pytest.raises(
            SpecError, match=r"not declared: model_ema\.decay, ema\.model\.norm\.weight(.|\n)*--foreign drop"
        ):
            models(harmonise(order))


@pytest.mark.parametrize("stray_first", [True, False])
@pytest.mark.parametrize("base", [0, 1])
def test_c22_dropped_or_kept_by_option(llama: Make, stray_first: bool, base: int) -> None:
    both = [changed(llama(), dict(STRAY)), llama(1)]
    both = both if stray_first else both[::-1]
    out = harmonise(both, base=base, options=Reconcile(foreign="drop"))
    assert all(set(m.checkpoint) == set(llama()) for m in models(out))
    assert not out.kept
    assert "are dropped (model0: ema.model.norm.weight, model_ema.decay)" in out.notes[0]
    out = harmonise(both, base=base, options=Reconcile(foreign="keep"))
    models(out)
    assert out.kept.keys() == STRAY.keys()
    assert all(torch.equal(c[name], STRAY[key]) for key, (c, name) in out.kept.items())


def test_c22_known_families() -> None:
    a = MODELS["gpt2-lm"](0)
    both = [changed(a, {"model_ema.decay": torch.tensor([0.5])}), MODELS["gpt2-lm"](1)]
    with pytest.raises(SpecError, match=r"not declared: model_ema\.decay"):
        models(harmonise(both))
    for options in (Reconcile(foreign="drop"), Reconcile(foreign="keep")):
        out = harmonise(both, options=options)
        require_same_shape([Model.of(c) for c in out.checkpoints])
        assert set(out.checkpoints[0]) == set(a)
        assert list(out.kept) == (["model_ema.decay"] if options.foreign == "keep" else [])


@pytest.mark.parametrize("family", ["unknown", "bert"])
def test_c19_a_part_of_one_model_only(family: str) -> None:
    """An encoder beside one with a head: refused, unless it is said what becomes of the rest."""
    if family == "unknown":
        both = [changed(tiny("LlamaModel", LLAMA), model_type=UNKNOWN), unknown(1)]
        refused(r"tensors that not all models have \(model1: lm_head\.weight\)", *both)
        part = "lm_head.weight"
    else:
        both = [MODELS["bert"](0), MODELS["bert-mlm"](0)]
        with pytest.raises(IncompatibleError, match=r"in one model only: pooler\.dense"):
            models(harmonise(both))
        part = "pooler.dense.weight"
    out = harmonise(both, options=Reconcile(foreign="keep"))
    assert part in out.kept
    assert out.config == {}
    if family == "unknown":
        kept = harmonise(both, base=1, options=Reconcile(foreign="keep"))
        assert kept.config == {"architectures": ["LlamaForCausalLM"]}
        assert "architectures" not in kept.checkpoints[1].config
    require_same_shape([of(c) for c in out.checkpoints])
    out = harmonise(both, options=Reconcile(foreign="drop"))
    assert not any(part in c for c in out.checkpoints)
    require_same_shape([of(c) for c in out.checkpoints])


def test_depths_that_differ_are_no_foreign_tensors(llama: Make) -> None:
    out = harmonise([llama(), llama(1, num_hidden_layers=3)])
    assert require_same_shape([of(c) for c in out.checkpoints], layers=False) == ()
    deep = unknown(1, num_hidden_layers=3)
    refused(r"\(model0: ema\.model", changed(unknown(), dict(STRAY)), deep)


@pytest.mark.parametrize("shape", [(0,), (1,)])
def test_c24_placeholders_of_partitioned_saves(llama: Make, shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    words = rf"model0: {name} in model0 has shape \({shape[0]},\), expected \(48, 32\)\. It looks like .*partitioned"
    with pytest.raises(SpecError, match=words):
        of(changed(llama(), {name: torch.zeros(shape)}))
    everything = {n: torch.zeros(shape) for n in llama()}
    with pytest.raises(SpecError, match="partitioned save"):
        of(changed(llama(), everything))
    bert = MODELS["bert"](0)
    with pytest.raises(SpecError, match="partitioned save"):
        of(changed(bert, {"encoder.layer.0.attention.self.query.weight": torch.zeros(shape)}))
    assert live(bert, torch.float32) is not None

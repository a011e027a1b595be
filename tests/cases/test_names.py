"""Names, shapes and configs as files have them: inputs that broke other tools. Named after the cases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from contract.tiny import DEBERTA, ELECTRA, TEXT, VISION, case, encoder, hf
from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures import resolve
from symfuse.errors import (
    IncompatibleError,
    LayoutError,
    SpecError,
    SymfuseError,
    UnknownArchitectureError,
)
from symfuse.groups import PositiveMonomial, Scaling
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.model import Model, require_same_shape
from symfuse.verification import verify

EXACT = 1e-13


def bert(class_name: str = "BertModel", seed: int = 0, **options: object) -> Checkpoint:
    return hf(class_name, transformers.BertConfig(**(TEXT | options)), seed)


def stored(checkpoint: Checkpoint, tensors: dict[str, Tensor], **config: object) -> Checkpoint:
    """A checkpoint with other tensors and config fields, without the memory of what it was."""
    return open_checkpoint(tensors, config={**checkpoint.config, **config}, name="stored")


def assert_same_function(before: Checkpoint, after: Checkpoint, alignment: Alignment | None = None) -> None:
    assert verify(before, after, alignment).worst < EXACT


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_c12_c13_position_ids_are_dropped(prefix: str, tmp_path: Path) -> None:
    plain = bert("BertForMaskedLM" if prefix else "BertModel")
    ids = torch.arange(TEXT["max_position_embeddings"])[None]
    types = torch.zeros_like(ids)
    buffers = {f"{prefix}embeddings.position_ids": ids, f"{prefix}embeddings.token_type_ids": types}
    model = Model.of(stored(plain, {**plain, **buffers}))
    assert model.spec.buffers == buffers.keys()
    assert not buffers.keys() & {model.spec.file_name(name) for name in model.spec.tensors}
    require_same_shape([model, Model.of(plain)])

    g = random_alignment(model.spec, 1)
    g(model.checkpoint).save(tmp_path / "out")
    out = open_checkpoint(tmp_path / "out")
    assert set(out) == set(plain)
    assert_same_function(plain, out, g)


def test_c11_gpt2_causal_masks_are_dropped() -> None:
    """Old files of GPT-2 store the causal mask of each layer, as bytes, and a constant."""
    plain = case("gpt2-lm").checkpoint
    masks: dict[str, Tensor] = {}
    for layer in range(2):
        masks[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 37, 37).tril().to(torch.uint8)
        masks[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    model = Model.of(stored(plain, {**plain, **masks}))
    assert model.spec.buffers == masks.keys()
    assert model.spec.tensors.keys() == case("gpt2-lm").spec.tensors.keys()
    assert set(random_alignment(model.spec, 1)(model.checkpoint)) == set(plain)


def test_c15_the_prefix_of_the_base_model_is_no_difference() -> None:
    plain = bert()
    prefixed = stored(plain, {f"bert.{name}": tensor for name, tensor in plain.items()})
    a, b = Model.of(plain), Model.of(prefixed)
    assert a.spec.tensors == b.spec.tensors
    assert b.spec.file_name("embeddings.LayerNorm.weight") == "bert.embeddings.LayerNorm.weight"
    require_same_shape([a, b])
    g = random_alignment(a.spec, 1)
    for name in a.spec.tensors:
        moved = Alignment(b.spec, g.elements, g.shifts)(prefixed)[b.spec.file_name(name)]
        torch.testing.assert_close(moved, g(plain)[name], rtol=0, atol=EXACT)


def test_c15_another_familys_prefix_is_refused() -> None:
    plain = bert()
    names = {f"roberta.{name}": tensor for name, tensor in plain.items()}
    with pytest.raises(SpecError, match=r"not declared: roberta\.embeddings"):
        Model.of(stored(plain, names))
    roberta = Model.of(stored(plain, names, model_type="roberta"))
    with pytest.raises(IncompatibleError, match="one is a bert, the other a roberta"):
        require_same_shape([Model.of(plain), roberta])


def test_c18_old_names_of_norms_are_read_and_kept() -> None:
    plain = bert("BertForMaskedLM")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in plain.items()
    }
    modern, legacy = Model.of(plain), Model.of(stored(plain, old))
    assert legacy.spec.tensors == modern.spec.tensors
    assert legacy.spec.file_name("embeddings.LayerNorm.weight") == "bert.embeddings.LayerNorm.gamma"
    require_same_shape([modern, legacy])
    g = random_alignment(legacy.spec, 1)
    moved = g(legacy.checkpoint)
    assert set(moved) == set(old)
    assert_same_function(plain, moved, g)


@pytest.mark.parametrize("label", ["vit", "bert"])
def test_c18_scales_of_layers_are_not_taken_for_norms(label: str) -> None:
    """`ls1.gamma` is a parameter of its own, that neither of these has: refused under its own name."""
    plain = case(label).checkpoint
    name = "encoder.layer.0.ls1.gamma"
    with pytest.raises(SpecError, match=r"not declared: encoder\.layer\.0\.ls1\.gamma"):
        Model.of(stored(plain, {**plain, name: torch.ones(20)}))


def test_c25_gpt2_stores_its_projections_transposed() -> None:
    this = case("gpt2-lm")
    assert str(this.spec.tensors["h.0.attn.c_attn.weight"].layout) == "residual* (h qk + h qk* + h v)"
    for axis in ("ffn", "h", "v"):
        g = random_alignment(this.spec, 3, {axis})
        assert this.error(g(this.checkpoint), g) < EXACT


def test_c31_deberta_of_the_first_version_is_not_the_second() -> None:
    config = transformers.DebertaConfig(**(TEXT | {"type_vocab_size": 0, "relative_attention": True}))
    first = hf("DebertaModel", config)
    assert "encoder.layer.0.attention.self.in_proj.weight" in first
    assert Model.of(first).spec.family == "deberta"
    with pytest.raises(SpecError, match=r"(?s)missing: .*query_proj.*not declared: .*in_proj"):
        Model.of(stored(first, dict(first), model_type="deberta-v2"))


def test_c39_positions_have_projections_of_their_own_or_not() -> None:
    shared, own = case("deberta"), case("deberta-token")
    layer = "encoder.layer.0.attention.self."
    assert layer + "pos_key_proj.weight" not in shared.spec.tensors
    assert str(own.spec.tensors[layer + "pos_key_proj.weight"].layout) == "(h qk*) residual*"
    for this in (shared, own):
        for axis in ("residual", "h", "qk"):
            g = random_alignment(this.spec, 4, {axis})
            moved = g(this.checkpoint)
            assert this.error(moved, g) < EXACT
            if axis == "residual":  # the relative table lives in it: forgetting it shows
                table = this.spec.file_name("encoder.rel_embeddings.weight")
                kept = moved.replace(tensors={**moved, table: this.checkpoint[table]})
                assert this.error(kept, g) > 1e-2


def test_c39_shared_and_own_projections_are_told_apart() -> None:
    own = case("deberta-token").checkpoint
    with pytest.raises(SpecError, match=r"not declared: .*pos_key_proj"):
        Model.of(stored(own, dict(own), share_att_key=True))
    shared = hf("DebertaV2Model", transformers.DebertaV2Config(**DEBERTA))
    with pytest.raises(SpecError, match=r"missing: .*pos_key_proj"):
        Model.of(stored(shared, dict(shared), share_att_key=False))


def test_c42_all_four_projections_follow_the_heads() -> None:
    spec = case("bert").spec
    touched = spec.movable[spec.instance("h", {"l": 0})]
    attention = {name for name in spec.tensors if name.startswith("encoder.layer.0.attention")}
    assert set(touched) == {n for n in attention if "LayerNorm" not in n and not n.endswith("output.dense.bias")}


def test_c45_the_activation_decides_the_group_of_neurons() -> None:
    relu, gelu = (Model.of(encoder(hidden_act=act)) for act in ("relu", "gelu"))
    assert isinstance(relu.spec.axes["ffn"].group, PositiveMonomial)
    scaled = Scaling().random(29, (), torch.Generator().manual_seed(0))
    assert relu.spec.axes["ffn"].group.contains(scaled, 1e-9)
    assert gelu.spec.axes["ffn"].group is not None
    assert not gelu.spec.axes["ffn"].group.contains(scaled, 1e-9)
    with pytest.raises(IncompatibleError, match="hidden_act: 'relu' and 'gelu'"):
        require_same_shape([relu, gelu])


def test_c56_another_number_of_positions_is_refused() -> None:
    """Neither resized nor guessed: 16 pixels are 5 positions at patches of 8, 24 pixels are 10."""
    small, large = (
        hf("ViTModel", transformers.ViTConfig(**(VISION | {"image_size": size, "patch_size": 8}))) for size in (16, 24)
    )
    models = [Model.of(small), Model.of(large)]
    assert [model.spec.sizes["positions"] for model in models] == [5, 10]
    with pytest.raises(IncompatibleError, match="numbers of positions differ: 5 and 10"):
        require_same_shape(models)
    with pytest.raises(LayoutError, match=r"(?s)position_embeddings.*5, but 10"):
        Model.of(stored(large, dict(large), image_size=16))


def test_c56_a_register_token_is_not_taken_for_a_patch() -> None:
    vit = case("vit").checkpoint
    registers = {"embeddings.register_tokens": torch.randn(1, 4, 20)}
    with pytest.raises(SpecError, match=r"not declared: embeddings\.register_tokens"):
        Model.of(stored(vit, {**vit, **registers}))


def test_c56_a_vit_and_a_deit_are_told_apart() -> None:
    deit = case("deit").checkpoint
    with pytest.raises(SpecError, match=r"not declared: embeddings\.distillation_token"):
        Model.of(stored(deit, dict(deit), model_type="vit"))


def test_c65_layers_of_different_widths_are_refused_by_name() -> None:
    plain = bert()
    layer = "encoder.layer.1."
    narrow = dict(plain)
    for name, dim in (
        ("intermediate.dense.weight", 0),
        ("intermediate.dense.bias", 0),
        ("output.dense.weight", 1),
    ):
        narrow[layer + name] = plain[layer + name].narrow(dim, 0, 23).contiguous()
    with pytest.raises(LayoutError, match=r"(?s)encoder\.layer\.1\.intermediate\.dense\.weight.*29, but 23"):
        Model.of(stored(plain, narrow))


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_config_without_a_field_that_is_needed_names_it(field: str) -> None:
    plain = bert()
    config = {key: value for key, value in plain.config.items() if key != field}
    with pytest.raises(SpecError, match=f"config.json: field '{field}', which a bert needs, is missing"):
        resolve(config, plain)


@pytest.mark.parametrize(
    ("class_name", "other"),
    [
        ("BertForSequenceClassification", "BertForTokenClassification"),
        ("RobertaForTokenClassification", "RobertaForMultipleChoice"),
        ("DistilBertForSequenceClassification", "DistilBertForTokenClassification"),
    ],
)
def test_heads_that_share_a_name_are_told_apart_by_the_class(class_name: str, other: str) -> None:
    label = {"Bert": "bert-sequence", "Robe": "roberta-token", "Dist": "distilbert-sequence"}[class_name[:4]]
    checkpoint = case(label).checkpoint
    assert checkpoint.config["architectures"] == [class_name]
    mine, theirs = (resolve({**checkpoint.config, "architectures": [name]}, checkpoint) for name in (class_name, other))
    assert mine.tensors["classifier.weight"] != theirs.tensors["classifier.weight"]
    for unnamed in (None, [], ["SomethingOfMyOwn"]):
        with pytest.raises(SpecError, match=r"classifier\.\w+ may belong to .*set it to the class of this model"):
            resolve({**checkpoint.config, "architectures": unnamed}, checkpoint)


def test_a_head_beside_that_of_the_class_is_declared_too() -> None:
    """bert-base-uncased names BertForMaskedLM, and holds the head of next sentences and the pooler too."""
    both = case("bert-pretraining").checkpoint
    spec = resolve({**both.config, "architectures": ["BertForMaskedLM"]}, both)
    assert spec.tensors == case("bert-pretraining").spec.tensors
    assert {"cls.seq_relationship.weight", "cls.predictions.transform.dense.weight"} <= spec.heads


def test_a_head_that_the_class_needs_must_be_there() -> None:
    """Else loading would fill it with random numbers."""
    plain = bert()
    tensors = {f"bert.{name}": tensor for name, tensor in plain.items()}
    with pytest.raises(SpecError, match=r"missing: classifier\.weight, classifier\.bias"):
        Model.of(stored(plain, tensors, architectures=["BertForSequenceClassification"]))


def test_a_stored_alias_moves_with_what_it_equals() -> None:
    """Old files hold the tied decoder beside the embedding."""
    plain = bert("BertForMaskedLM")
    copies = {
        "cls.predictions.decoder.weight": plain["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": plain["cls.predictions.bias"].clone(),
    }
    model = Model.of(stored(plain, {**plain, **copies}))
    assert model.spec.tied == {
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    moved = random_alignment(model.spec, 1)(model.checkpoint)
    embedding = moved["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(moved["cls.predictions.decoder.weight"], embedding)
    assert not torch.equal(embedding, plain["bert.embeddings.word_embeddings.weight"])


def test_untied_decoders_have_a_space_and_a_bias_of_their_own() -> None:
    untied = case("bert-mlm-untied")
    assert untied.spec.tied == {}
    assert str(untied.spec.tensors["cls.predictions.decoder.weight"].layout) == "vocab lm*"


def test_files_of_deberta_v3_hold_a_discriminator_and_unread_positions() -> None:
    v3 = case("deberta").checkpoint
    tensors = {f"deberta.{name}": tensor for name, tensor in v3.items()}
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.randn(37, 20)
    for head in ("lm_predictions.lm_head", "mask_predictions"):
        tensors |= {f"{head}.dense.weight": torch.randn(20, 20), f"{head}.dense.bias": torch.randn(20)}
        tensors |= {f"{head}.LayerNorm.weight": torch.randn(20), f"{head}.LayerNorm.bias": torch.randn(20)}
    tensors |= {"lm_predictions.lm_head.bias": torch.randn(61)}
    tensors |= {"mask_predictions.classifier.weight": torch.randn(1, 20)}
    tensors |= {"mask_predictions.classifier.bias": torch.randn(1)}
    config = {key: value for key, value in v3.config.items() if key != "architectures"}
    spec = Model.of(open_checkpoint(tensors, config=config | {"pos_att_type": "c2p|p2c"}, name="v3")).spec
    assert spec.heads == {name for name in tensors if not name.startswith("deberta.")}


def test_an_electra_of_one_width_has_no_projection() -> None:
    config = transformers.ElectraConfig(**(ELECTRA | {"embedding_size": 20}))
    spec = Model.of(hf("ElectraModel", config)).spec
    assert "embeddings_project.weight" not in spec.tensors
    assert str(spec.tensors["embeddings.word_embeddings.weight"].layout) == "vocab residual"


def test_a_folder_with_another_models_config_is_refused(tmp_path: Path) -> None:
    bert().save(tmp_path / "a")
    bert(num_hidden_layers=3).save(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "config.json", tmp_path / "a" / "config.json")
    with pytest.raises(SpecError, match=r"missing: encoder\.layer\.2\."):
        Model.of(open_checkpoint(tmp_path / "a"))


def test_errors_are_one_kind() -> None:
    for error in (SpecError, LayoutError, UnknownArchitectureError, IncompatibleError):
        assert issubclass(error, SymfuseError)
    with pytest.raises(UnknownArchitectureError, match=r"one without model_type; .* \(docs/families\.md\)\. Set"):
        resolve({}, [])

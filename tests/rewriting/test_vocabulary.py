"""Vocabularies that differ: tokens, rows, their sources, tokenizer files; and mergekit's result as a reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from torch.testing import assert_close

from symfuse.errors import CheckpointError, IncompatibleError, OptionError
from symfuse.io import Checkpoint
from symfuse.io import open as open_checkpoint
from symfuse.rewriting import vocabulary
from symfuse.rewriting.vocabulary import TokenSource

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMMON = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(50))]


def rows_of(checkpoint: Checkpoint) -> Mapping[str, int]:
    return {name: 0 for name in (EMBED, HEAD) if name in checkpoint}


def tokenizer(pieces: Sequence[str], added: Sequence[str | AddedToken] = ()) -> transformers.PreTrainedTokenizerFast:
    library = Library(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens(list(added))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def model(folder: Path, size: int, pieces: Sequence[str], added: Sequence[Any] = (), **options: Any) -> Checkpoint:
    """A tiny random Llama and its tokenizer, saved and opened."""
    torch.manual_seed(sum(map(ord, folder.name)))
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(pieces, added).save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.fixture
def pair(tmp_path: Path) -> list[Checkpoint]:
    """a lacks d0 and d1 of b, b lacks c0 of a; the ids of the common ones are reversed in b."""
    special, common = COMMON[:3], COMMON[3:]
    return [
        model(tmp_path / "a", 54, [*special, *common, "c0"]),
        model(tmp_path / "b", 56, [*special, "d0", *reversed(common)], [AddedToken("d1", lstrip=True, special=True)]),
    ]


def ids(checkpoint: Checkpoint) -> dict[str, int]:
    return dict(transformers.AutoTokenizer.from_pretrained(checkpoint.folder).get_vocab())


def saved(checkpoint: Checkpoint, folder: Path, files: Mapping[str, bytes]) -> dict[str, int]:
    """What transformers finds in the output; its embedding has as many rows as the config says."""
    checkpoint.save(folder, extra=files)
    with_model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert with_model.get_input_embeddings().weight.shape[0] == checkpoint.config["vocab_size"]
    return dict(transformers.AutoTokenizer.from_pretrained(folder).get_vocab())


def test_union_keeps_the_base_and_appends(pair: list[Checkpoint], tmp_path: Path) -> None:
    a, b = pair
    out = vocabulary.build(pair, "union", base=0)
    assert out.size == 56
    assert {token: row for token, row in out.tokens.items() if row < 54} == ids(a)
    assert out.tokens["d0"], out.tokens["d1"] == (54, 55)
    new = vocabulary.rewrite(pair, out, rows_of)
    theirs = ids(b)
    for name in (EMBED, HEAD):
        for token, row in out.tokens.items():
            in_a = a[name][ids(a)[token]] if token in ids(a) else b[name][theirs[token]]
            in_b = b[name][theirs[token]] if token in theirs else a[name][ids(a)[token]]
            assert torch.equal(new[0][name][row], in_a)
            assert torch.equal(new[1][name][row], in_b)
    assert (new[0].config["vocab_size"], new[1].config["vocab_size"]) == (56, 56)
    assert torch.equal(new[1]["model.norm.weight"], b["model.norm.weight"])
    assert saved(new[1], tmp_path / "out", out.files) == out.tokens
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.added_tokens_decoder[55].lstrip
    assert loaded.added_tokens_decoder[55].special
    assert not loaded.added_tokens_decoder[54].special
    assert out.report.shared == 53
    assert out.report.added == 2
    assert out.report.filled == {"a": {"from b": 2}, "b": {"from a": 1}}
    assert any("2 from b" in line for line in out.report.lines())


def test_base_and_model_give_their_own_tokenizer(pair: list[Checkpoint], tmp_path: Path) -> None:
    for source, model_ in (("base", pair[0]), (1, pair[1]), (pair[1], pair[1])):
        out = vocabulary.build(pair, source, base=0)
        assert out.tokens == ids(model_)
        assert out.size == model_.config["vocab_size"]
        assert out.files["tokenizer.json"] == (model_.folder / "tokenizer.json").read_bytes()
    assert saved(vocabulary.rewrite(pair, out, rows_of)[0], tmp_path / "out", out.files) == ids(pair[1])


def test_a_model_whose_rows_stay_is_not_rewritten(pair: list[Checkpoint]) -> None:
    out = vocabulary.build(pair, "base", base=0)
    same, other = vocabulary.rewrite(pair, out, rows_of)
    assert same.where(EMBED) == "model.safetensors"
    assert other.where(EMBED) == "b"


def test_special_ids_come_with_the_tokenizer(tmp_path: Path) -> None:
    a = model(tmp_path / "a", 53, COMMON)
    b = model(tmp_path / "b", 53, ["</s>", *(t for t in COMMON if t != "</s>")])
    b = b.replace(config={**b.config, "eos_token_id": 0, "bos_token_id": 2})
    out = vocabulary.build([a, b], 1, base=0)
    assert [m.config["eos_token_id"] for m in vocabulary.rewrite([a, b], out, rows_of)] == [0, 0]
    out = vocabulary.build([a, b], "union", base=0)
    assert [m.config["eos_token_id"] for m in vocabulary.rewrite([a, b], out, rows_of)] == [2, 2]


def test_gaps_are_filled_by_the_base_or_by_the_mean(tmp_path: Path) -> None:
    """A token in two models of three: the base's row if it has it, else the mean; and without a base, the mean."""
    names = {"a": [*COMMON, "ab"], "b": [*COMMON, "ab", "bc"], "c": [*COMMON, "bc"]}
    three = [model(tmp_path / name, len(pieces), pieces) for name, pieces in names.items()]
    a, b, c = three
    out = vocabulary.build(three, "union", base=0)
    ab, bc = out.tokens["ab"], out.tokens["bc"]
    new = vocabulary.rewrite(three, out, rows_of)
    assert torch.equal(new[2][EMBED][ab], a[EMBED][53])
    assert_close(new[0][EMBED][bc], (b[EMBED][54] + c[EMBED][53]) / 2)
    assert out.report.filled["a"] == {"the mean of the models that have it": 1}
    out = vocabulary.build(three, "union", base=None)
    assert_close(vocabulary.rewrite(three, out, rows_of)[2][EMBED][ab], (a[EMBED][53] + b[EMBED][53]) / 2)


def test_rows_of_single_tokens(pair: list[Checkpoint], tmp_path: Path) -> None:
    a, b = pair
    sources = {
        "t1": TokenSource("model", "b"),  # without force: a's own row stays in a
        "t2": TokenSource("model", "b", force=True),
        "c0": TokenSource("zero"),
        "d0": TokenSource("model_token", "a", token="t9"),
        "t3": TokenSource("zero", force=True),
        "new": TokenSource("model_token", str(b.folder), token_id=7),
        "bare": TokenSource("usual"),
    }
    out = vocabulary.build(pair, "base", base=0, tokens=sources)
    assert out.tokens == {**ids(a), "d0": 54, "new": 55, "bare": 56}
    assert out.report.nowhere == ("bare",)
    in_a, in_b = (m[EMBED] for m in vocabulary.rewrite(pair, out, rows_of))
    assert saved(vocabulary.rewrite(pair, out, rows_of)[0], tmp_path / "out", out.files) == out.tokens
    row, theirs = out.tokens, ids(b)
    assert torch.equal(in_a[row["t1"]], a[EMBED][row["t1"]])
    assert torch.equal(in_b[row["t1"]], b[EMBED][theirs["t1"]])
    assert torch.equal(in_a[row["t2"]], b[EMBED][theirs["t2"]])
    assert torch.equal(in_b[row["t2"]], b[EMBED][theirs["t2"]])
    assert torch.equal(in_a[row["c0"]], a[EMBED][row["c0"]])
    assert not in_b[row["c0"]].any()
    assert torch.equal(in_a[row["d0"]], a[EMBED][row["t9"]])
    assert torch.equal(in_b[row["d0"]], b[EMBED][theirs["d0"]])
    assert not in_a[row["t3"]].any()
    assert not in_b[row["t3"]].any()
    assert torch.equal(in_a[row["new"]], b[EMBED][7])
    assert torch.equal(in_b[row["new"]], b[EMBED][7])
    assert not in_a[row["bare"]].any()


def test_padding_is_the_mean_row(pair: list[Checkpoint], tmp_path: Path) -> None:
    out = vocabulary.build(pair, "union", base=0, pad_to_multiple_of=16)
    assert out.size == 64
    for new in vocabulary.rewrite(pair, out, rows_of):
        for name in (EMBED, HEAD):
            assert new.info(name).shape == (64, 32)
            assert_close(new[name][56:], new[name][:56].mean(0).expand(8, -1))
    assert saved(new, tmp_path / "out", out.files) == out.tokens
    assert vocabulary.build(pair, "base", base=0, pad_to_multiple_of=16).size == 64
    assert vocabulary.build(pair, "base", base=0, pad_to_multiple_of=27).size == 54


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_and_blocks_are_the_tensor(pair: list[Checkpoint], dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr("symfuse.rewriting.vocabulary.rows.BLOCK", 32 * 5)
    pair = [checkpoint.to(dtype) for checkpoint in pair]
    out = vocabulary.build(pair, "union", base=0, pad_to_multiple_of=16)
    tensors = vocabulary.rewrite(pair, out, rows_of)[0]
    for name in (EMBED, "model.norm.weight"):
        whole, wide = tensors[name], tensors.read(name)
        assert (whole.dtype, wide.dtype) == (dtype, torch.float32)
        assert torch.equal(wide.to(dtype), whole)
        assert torch.equal(torch.cat(list(tensors.blocks(name))), wide)
        for start, stop in ((0, whole.numel()), (17, 17), (3, 31), (whole.numel() - 20, whole.numel())):
            assert torch.equal(tensors.part(name, start, stop).float(), wide.flatten()[start:stop])
    assert len(list(tensors.blocks(EMBED))) == 13


def test_another_dimension_and_vectors(pair: list[Checkpoint]) -> None:
    """A transposed head and a bias are rewritten along their own dimension."""
    changed = []
    for checkpoint in pair:
        tensors = {name: checkpoint[name] for name in checkpoint} | {"lm_head.bias": checkpoint[EMBED][:, 3].clone()}
        changed.append(checkpoint.replace(tensors=tensors | {HEAD: tensors[HEAD].T.contiguous()}, infos=None))
        changed[-1]._infos = None
    out = vocabulary.build(changed, "union", base=0)
    dims = {EMBED: 0, HEAD: 1, "lm_head.bias": 0}
    for new, plain in zip(
        vocabulary.rewrite(changed, out, lambda _: dims), vocabulary.rewrite(pair, out, rows_of), strict=True
    ):
        assert torch.equal(new[HEAD], plain[HEAD].T)
        assert torch.equal(new["lm_head.bias"], plain[EMBED][:, 3])


def test_names_that_differ_by_a_prefix_are_one_tensor(pair: list[Checkpoint]) -> None:
    a, b = pair
    short = {name.removeprefix("model."): b[name] for name in b}
    b = Checkpoint(short, b.config, name="b", folder=b.folder)
    out = vocabulary.build([a, b], "union", base=0)
    dims = {"a": {EMBED: 0, HEAD: 0}, "b": {"embed_tokens.weight": 0, HEAD: 0}}
    new = vocabulary.rewrite([a, b], out, lambda checkpoint: dims[checkpoint.name])
    assert torch.equal(new[0][EMBED][54:], pair[1][EMBED][[3, 54]])
    dims["b"] = {HEAD: 0}
    with pytest.raises(IncompatibleError, match=r"embed_tokens.weight needs rows of b.*untie"):
        vocabulary.rewrite([a, b], out, lambda checkpoint: dims[checkpoint.name])


def test_comparison_names_what_differs(pair: list[Checkpoint]) -> None:
    (difference,) = vocabulary.compare(pair)
    assert difference
    assert difference.only_model == ("c0",)
    assert difference.only_other == ("d0", "d1")
    assert (difference.same, len(difference.renumbered)) == (4, 49)
    assert ("t0", 3, 53) in difference.renumbered
    assert "49 with another: 't0' (3 and 53)" in str(difference)
    assert "2 only in b: 'd0', 'd1'" in str(difference)
    (difference,) = vocabulary.compare([pair[0], pair[0]])
    assert not difference


@pytest.mark.parametrize("source", ["union", "base", "model"])
@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.filterwarnings("ignore")  # mergekit's own
def test_mergekit_agrees_row_by_row(tmp_path: Path, source: str, with_base: bool) -> None:
    """Three models that lack different tokens, single sources, padding. Ids of new tokens differ (mergekit's order is
    that of a hash table), and so do rows that are no token's, which mergekit cuts off."""
    pytest.importorskip("mergekit", reason="mergekit, which this compares with, is missing")
    from mergekit.common import ModelPath, ModelReference
    from mergekit.tokenizer.build import build_tokenizer
    from mergekit.tokenizer.config import TokenEmbeddingConfig, TokenizerConfig
    from mergekit.tokenizer.embed import PermutedVocabulary

    names = {"a": [*COMMON, "ab"], "b": [*COMMON, "ab", "bc", "b0"], "c": [*COMMON[:3], "bc", *reversed(COMMON[3:])]}
    three = [model(tmp_path / name, len(pieces), pieces) for name, pieces in names.items()]
    refs = [ModelReference(model=ModelPath(path=str(checkpoint.folder))) for checkpoint in three]
    theirs = TokenizerConfig(
        tokens={
            "ab": TokenEmbeddingConfig(source=refs[1]),
            "t1": TokenEmbeddingConfig(source={"kind": "zero"}, force=True),
            "new": TokenEmbeddingConfig(source={"kind": "model_token", "model": refs[2], "token": "t7"}),
        }
    ).tokens
    ours = {
        "ab": TokenSource("model", "b"),
        "t1": TokenSource("zero", force=True),
        "new": TokenSource("model_token", "c", token="t7"),
    }
    if source == "base":  # mergekit fails with a KeyError if this adds a token to the base's tokenizer
        del theirs["new"], ours["new"]
    base = refs[0] if with_base else None
    info = build_tokenizer(base, refs, refs[2] if source == "model" else source, False, list(theirs))
    task = PermutedVocabulary.model_construct(tokens=theirs, pad_to_multiple_of=16, base_model=base, vocabulary_axis=0)
    expected = task.execute(info, {ref: checkpoint[EMBED] for ref, checkpoint in zip(refs, three, strict=True)})
    out = vocabulary.build(
        three, 2 if source == "model" else source, base=0 if with_base else None, tokens=ours, pad_to_multiple_of=16
    )
    mergekits = info.tokenizer.get_vocab()
    assert out.tokens.keys() == mergekits.keys()
    order = [mergekits[token] for token in out.tokens]
    for ref, new in zip(refs, vocabulary.rewrite(three, out, rows_of), strict=True):
        assert new.info(EMBED).shape == expected[ref].shape
        assert_close(new[EMBED][: len(order)], expected[ref][order])
        assert_close(new[EMBED][len(order) :], expected[ref][len(order) :])


VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b"]


def bert(folder: Path, extra: Sequence[str] = ()) -> Checkpoint:
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in (*VOCAB, *extra)), "utf-8")
    config = {"model_type": "bert", "vocab_size": len(VOCAB) + len(extra)}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {EMBED: torch.randn(config["vocab_size"], 3)}
    return Checkpoint(tensors, config, name=folder.name, folder=folder)


def test_wordpiece_from_vocab_txt(tmp_path: Path) -> None:
    pair = [bert(tmp_path / "a", ["old"]), bert(tmp_path / "b", ["new", "old"])]
    for checkpoint in pair:
        assert vocabulary.read_tokenizer(checkpoint).tokens == ids(checkpoint)
    out = vocabulary.build(pair, "union", base=0)
    merged = tmp_path / "out"
    pair[0].save(merged, extra=out.files)
    assert dict(transformers.AutoTokenizer.from_pretrained(merged).get_vocab()) == out.tokens
    assert out.tokens["new"] == 8


def test_bpe_from_vocab_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 4}))
    checkpoint = Checkpoint({}, {"vocab_size": 4}, name="gpt2", folder=tmp_path)
    assert vocabulary.read_tokenizer(checkpoint).tokens == ids(checkpoint)


def test_unigram_and_tokens_of_other_files(tmp_path: Path) -> None:
    """Special tokens that only tokenizer_config.json or special_tokens_map.json names are added, as transformers does;
    ids that tokenizer.json declares otherwise are those that the library gives."""
    library = Library(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0, byte_fallback=False))
    data = json.loads(library.to_str())
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    data["added_tokens"] = [{"id": 30, "content": "x", **entry}, {"id": 1, "content": "a", **entry}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "<mask>", **entry}}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"z": 4, "y": 3}))
    checkpoint = Checkpoint({}, {"vocab_size": 9}, name="unigram", folder=tmp_path)
    assert vocabulary.read_tokenizer(checkpoint).tokens == ids(checkpoint)


def test_errors_of_tokenizers(pair: list[Checkpoint], tmp_path: Path) -> None:
    a, b = pair
    folder = b.folder
    assert folder is not None
    bare = Checkpoint({}, {"vocab_size": 3}, name="bare")
    with pytest.raises(CheckpointError, match="bare has no tokenizer files"):
        vocabulary.build([a, bare], "union", base=0)
    with pytest.raises(CheckpointError, match="config of b has no vocab_size"):
        vocabulary.build([a, b.replace(config={})], "union", base=0)
    wrong = [a, b.replace(config={"vocab_size": 60})]
    with pytest.raises(CheckpointError, match=r"b: config.json says vocab_size 60, and no tensor has as many rows"):
        vocabulary.build(wrong, "union", base=0)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer files of b cannot be read"):
        vocabulary.build(pair, "union", base=0)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"b has a tokenizer without tokenizer.json.*Convert it"):
        vocabulary.build(pair, "union", base=0)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON: Expecting property name"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON: maximum recursion"),
        ("tokenizer.json", '{"model": {"vocab": {"\\ud800": 0}}}', "tokenizer.json is not JSON: .*surrogates"),
    ],
)
def test_damaged_files_are_named_or_carried(
    pair: list[Checkpoint], tmp_path: Path, file: str, text: str, words: str
) -> None:
    (tmp_path / "a" / file).write_text(text)
    for work in (
        lambda: vocabulary.build(pair, "union", base=0),
        lambda: vocabulary.shared_rows([pair[0], pair[0]]),
        lambda: vocabulary.compare(pair),
    ):
        with pytest.raises(CheckpointError, match=f"tokenizer files of a cannot be read .*{words}"):
            work()
    pair[0].save(tmp_path / "out")  # what need not be read is not
    assert (tmp_path / "out" / file).read_text() == text
    if file == "tokenizer_config.json":
        with pytest.raises(CheckpointError, match=f"{words}.*, in a; it may hold the chat template"):
            vocabulary.chat_template("auto", pair)
        with pytest.raises(CheckpointError, match=words):
            vocabulary.with_chat_template({file: text.encode()}, "chatml")


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    a = model(tmp_path / "a", 54, [*COMMON, "\U0001f999"])
    path = tmp_path / "a" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8"))))
    assert "\\ud83e\\udd99" in path.read_text()
    assert vocabulary.read_tokenizer(a).tokens["\U0001f999"] == 53


def test_a_damaged_file_that_names_code_is_carried(tmp_path: Path) -> None:
    a = model(tmp_path / "a", 53, COMMON)
    for text in ('{"auto_map": 1, "x": "\\ud800"}', '{"auto_map"' + ":[" * 100_000):
        (tmp_path / "a" / "tokenizer_config.json").write_text(text)
        assert a.companions()["tokenizer_config.json"] == text.encode()


def test_a_list_of_chat_templates_with_other_entries(tmp_path: Path) -> None:
    a = model(tmp_path / "a", 53, COMMON)
    entries = [1, {"name": ["default"]}, {"template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    assert vocabulary.chat_template("auto", [a]) == "{{ 2 }}"


def test_a_tokenizer_with_holes_takes_no_tokens(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a", 60, COMMON), model(tmp_path / "b", 55, [*COMMON, "new", "more"])
    path = tmp_path / "a" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["t49"] = 54
    path.write_text(json.dumps(data))
    with pytest.raises(IncompatibleError, match="tokenizer of a has unused ids below its largest, and id 54"):
        vocabulary.build([a, b], "union", base=0)
    assert vocabulary.build([a, b], "base", base=0).size == 60


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TokenSource("model", "B"), r"'B' is not one of the models a, b"),
        (TokenSource("model", "b"), "tokenizer of 'b' has no token 'c0'"),
        (TokenSource("model_token", "b", token="nope"), "tokenizer of 'b' has no token 'nope'"),
        (TokenSource("model_token", "b", token_id=56), "token_id is 56, but 'b' has 56 rows"),
        (TokenSource("model_token", "b"), "give the token or the token_id"),
        (TokenSource("model_token", "b", token="t1", token_id=3), "give the token or the token_id"),
        (TokenSource("usual", force=True), "but none is given"),
    ],
)
def test_errors_of_token_sources(pair: list[Checkpoint], source: TokenSource, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        vocabulary.build(pair, "union", base=0, tokens={"c0": source})


def test_errors_of_options(pair: list[Checkpoint]) -> None:
    with pytest.raises(OptionError, match="pad_to_multiple_of is 0"):
        vocabulary.build(pair, "union", base=0, pad_to_multiple_of=0)
    narrow = {EMBED: torch.zeros(56, 7), HEAD: torch.zeros(56, 7)}
    thin = Checkpoint(narrow, pair[1].config, name="b", folder=pair[1].folder)
    out = vocabulary.build([pair[0], thin], "union", base=0)
    with pytest.raises(IncompatibleError, match=r"b has rows of shape \[7\], a of \[32\]"):
        vocabulary.rewrite([pair[0], thin], out, rows_of)


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]
PROMPTS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s> [INST] Be brief.\n\nHello [/INST] Yes?</s> [INST] Bye [/INST]",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|]Hello\n[|assistant|]Yes?[|endofturn|]\n[|user|]Bye\n"
    "[|assistant|]",
    "alpaca": "Be brief.\n\n### Instruction:\nHello\n\n### Response:\nYes?\n\n### Instruction:\nBye\n\n### Response:\n",
}


@pytest.mark.parametrize("name", vocabulary.TEMPLATES)
def test_built_in_chat_templates(pair: list[Checkpoint], name: str, tmp_path: Path) -> None:
    out = vocabulary.build(pair, "base", base=0)
    pair[0].save(tmp_path / "out", extra=vocabulary.with_chat_template(out.files, name))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == PROMPTS[name]


def test_chat_template_of_most_models_or_given(tmp_path: Path) -> None:
    three = [model(tmp_path / name, 53, COMMON) for name in "abc"]
    assert vocabulary.chat_template("auto", three) is None
    assert vocabulary.with_chat_template({"x": b"y"}, "auto", three) == {"x": b"y"}
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ 1 }}")
    for name in "bc":
        path = tmp_path / name / "tokenizer_config.json"
        templates = [{"name": "default", "template": "{{ 2 }}\n"}]
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    files = vocabulary.with_chat_template({"tokenizer_config.json": b"{}"}, "auto", three)
    assert files["chat_template.jinja"] == b"{{ 2 }}"
    assert json.loads(files["tokenizer_config.json"]) == {"chat_template": "{{ 2 }}"}
    assert vocabulary.chat_template("{% for m in messages %}{% endfor %}") == "{% for m in messages %}{% endfor %}"
    with pytest.raises(OptionError, match=r"'chatmI' is neither auto.*did you mean 'chatml'"):
        vocabulary.chat_template("chatmI")

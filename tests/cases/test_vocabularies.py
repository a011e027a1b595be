"""Merges of vocabularies: inputs that broke other tools, and the right behaviour. Named after the cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.testing import assert_close

from allocations import counted
from rewriting.test_vocabulary import COMMON, EMBED, HEAD, ids, model, rows_of, saved
from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint
from symfuse.io import open as symfuse_open
from symfuse.rewriting import vocabulary
from symfuse.rewriting.vocabulary import rows

SIXTY_FOUR = [*COMMON, *(f"u{i}" for i in range(11))]


def mean(pair: list[Checkpoint]) -> Checkpoint:
    """The plain average of two models of equal shapes."""
    a, b = pair
    return a.replace(tensors={name: (a[name] + b[name]) / 2 for name in a})


def test_c05_sizes_that_differ_are_refused_with_the_ways_out(tmp_path: Path) -> None:
    pair = [model(tmp_path / "a", 64, SIXTY_FOUR), model(tmp_path / "b", 66, SIXTY_FOUR, ["x", "y"])]
    with pytest.raises(IncompatibleError, match=r"64 and 66 rows \(a has 64, b has 66\).*union.*shared-rows"):
        vocabulary.require_one_size(pair)
    vocabulary.require_one_size([pair[0], pair[0]])


@pytest.mark.parametrize("tied", [False, True])
def test_c05_shared_rows_are_merged_and_the_others_copied(tmp_path: Path, tied: bool) -> None:
    a = model(tmp_path / "a", 64, SIXTY_FOUR, tie_word_embeddings=tied)
    b = model(tmp_path / "b", 66, SIXTY_FOUR, ["x", "y"], tie_word_embeddings=tied)
    out = vocabulary.shared_rows([a, b])
    merged = mean(vocabulary.rewrite([a, b], out, rows_of))
    for name in (EMBED,) if tied else (EMBED, HEAD):
        assert torch.equal(merged[name][:64], (a[name] + b[name][:64]) / 2)
        assert torch.equal(merged[name][64:], b[name][64:])
    assert merged.config["vocab_size"] == 66
    assert saved(merged, tmp_path / "out", out.files) == ids(b)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_c07_the_number_of_rows_stays(tmp_path: Path) -> None:
    pieces = SIXTY_FOUR[:57]
    moved = [*pieces[:3], *reversed(pieces[3:])]
    a, b = model(tmp_path / "a", 64, pieces), model(tmp_path / "b", 64, moved)
    out = vocabulary.build([a, b], "base", base=0)
    assert out.size == 64
    merged = mean(vocabulary.rewrite([a, b], out, rows_of))
    assert_close(merged[EMBED][57:], (a[EMBED][57:] + b[EMBED][57:]) / 2)
    assert_close(merged[EMBED][3:57], (a[EMBED][3:57] + b[EMBED][3:57].flip(0)) / 2)
    assert merged.info(HEAD).shape == (64, 32)


def test_c07_padding_of_different_length(tmp_path: Path) -> None:
    """A row that is padding in the base only, or a token elsewhere, is the base's."""
    a, b = model(tmp_path / "a", 64, COMMON), model(tmp_path / "b", 57, [*COMMON, "x", "y"])
    out = vocabulary.build([a, b], "base", base=0)
    in_a, in_b = vocabulary.rewrite([a, b], out, rows_of)
    assert torch.equal(in_a[EMBED], a[EMBED])
    assert torch.equal(in_b[EMBED][:53], b[EMBED][:53])
    assert torch.equal(in_b[EMBED][53:55], a[EMBED][53:55])  # x and y in b, which the output has not
    assert torch.equal(in_b[EMBED][55:57], b[EMBED][55:57])
    assert torch.equal(in_b[EMBED][57:], a[EMBED][57:])


def test_c07_a_tokenizer_longer_than_the_embedding_is_refused(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a", 64, SIXTY_FOUR), model(tmp_path / "b", 64, SIXTY_FOUR, ["x", "y"])
    message = r"tokenizer of b has 66 tokens with ids up to 65, but its embedding has 64 rows.*'x' \(64\), 'y' \(65\)"
    for pair, base in (([a, b], 0), ([b, a], 0), ([b, a], 1)):
        with pytest.raises(CheckpointError, match=message):
            vocabulary.build(pair, "base", base=base)


def test_c07_shared_rows_need_a_row_for_each_token_of_the_tokenizer_that_is_taken(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a", 64, SIXTY_FOUR), model(tmp_path / "b", 65, SIXTY_FOUR, ["x", "y"])
    with pytest.raises(CheckpointError, match=r"tokenizer of b has 66 tokens .* 65 rows .* no row for 'y' \(65\)"):
        vocabulary.shared_rows([a, b])
    c = model(tmp_path / "c", 63, SIXTY_FOUR)
    assert vocabulary.shared_rows([a, c]).size == 64  # whose files are not taken may have what it likes


def test_c08_a_token_that_nobody_has_is_zero_and_reported(tmp_path: Path) -> None:
    """The tokens of a third model, of which neither has the last."""
    letters = [chr(ord("a") + i) for i in range(26)]
    special = ["<unk>", "<s>", "</s>"]
    a = model(tmp_path / "a", 28, [*special, *letters[:25]])
    b = model(tmp_path / "b", 28, [*special, *letters[1:], "a"][:28])
    c = model(tmp_path / "c", 30, [*special, *letters, "<pad>"])
    out = vocabulary.build([a, b], c, base=0)
    assert out.report.nowhere == ("<pad>",)
    assert any("<pad>" in line and "zeros" in line for line in out.report.lines())
    for new in vocabulary.rewrite([a, b], out, rows_of):
        assert all(new[name].isfinite().all() for name in new)
        assert not new[EMBED][29].any()
        assert new[EMBED][:29].any(1).all()


def rotated(folder: Path, size: int) -> list[Checkpoint]:
    """Two models of so many tokens, which the second has rotated by one."""
    tokens = [f"token{i}" for i in range(size)]
    config = transformers.LlamaConfig(vocab_size=size, hidden_size=64, num_hidden_layers=1).to_dict()
    for name, pieces in (("a", tokens), ("b", [tokens[-1], *tokens[:-1]])):
        Checkpoint({EMBED: torch.randn(size, 64)}, config, name="made").save(folder / name)
        data = {"model": {"type": "WordLevel", "vocab": {piece: i for i, piece in enumerate(pieces)}}}
        (folder / name / "tokenizer.json").write_text(json.dumps(data))
    return [symfuse_open(folder / name) for name in "ab"]


def test_c10_memory_stays_below_three_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the tokenizers is part of it. As of 200,000 tokens, with blocks that are as much smaller."""
    monkeypatch.setattr(rows, "BLOCK", rows.BLOCK // 10)
    a, b = rotated(tmp_path, 20_000)
    with counted() as memory:
        out = vocabulary.build([a, b], "base", base=0)
        tensor = vocabulary.rewrite([a, b], out, rows_of)[1][EMBED]
    assert torch.equal(tensor, b[EMBED].roll(-1, 0))
    assert memory.peak < 2.5 * tensor.nbytes
    with counted() as memory:  # where it would not: all rows are picked at once, in a wider dtype
        assert b[EMBED][out.rows[1]].double().float().equal(tensor)
    assert memory.peak > 3 * tensor.nbytes

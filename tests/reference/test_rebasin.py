"""Git Re-Basin of the peers: exact moves, planted permutations, and symfuse's own search on the same problem."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import symfuse

sys.path.append(str(Path(__file__).parent))
import rebasin
import spaces
from peer_cases import HEADS, KINDS, batch, logits, random_permutations, tiny

OTHERS = [
    ("bert", "BertForSequenceClassification", {}),
    ("bert", "BertForTokenClassification", {}),
    ("bert", "BertForPreTraining", {}),
    ("bert", "BertForQuestionAnswering", {"num_labels": 2}),
    ("bert", "BertForMaskedLM", {"tie_word_embeddings": False}),
    ("gpt2", "GPT2LMHeadModel", {"tie_word_embeddings": False}),
    ("gpt2", "GPT2ForSequenceClassification", {"pad_token_id": 0}),
    ("gpt2", "GPT2ForTokenClassification", {}),
]


@pytest.mark.parametrize(
    ("kind", "name", "more"), [*((kind, name, {}) for kind, name in KINDS.items()), *OTHERS], ids=str
)
def test_permuted_models_compute_the_same(kind: str, name: str, more: dict[str, int]) -> None:
    module = tiny(kind, 0, name, **more)
    state = module.state_dict()
    permutations = random_permutations(state, kind)
    moved = rebasin.permute(state, kind, permutations)
    assert spaces.distance(moved, state, kind) > 10
    inputs = batch(kind)

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            found = module(**inputs)
        return [t for key, t in found.items() if key.endswith("logits")]

    before = outputs()
    module.load_state_dict(moved)
    assert len(before) == 1 + (name in ("BertForPreTraining", "BertForQuestionAnswering"))
    assert_close(outputs(), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_each_dimension_of_the_table_is_needed(kind: str) -> None:
    """A permutation that leaves one place out changes the outputs."""
    module = tiny(kind, 0)
    state = module.state_dict()
    before = logits(module, state, kind)
    permutations, where = random_permutations(state, kind), rebasin.by_space(state, kind)
    of_first_layer = [name for name in where if name == "residual" or name.startswith("0.")]
    checked = 0
    for space in of_first_layer:
        for left_out in where[space]:
            if left_out.word == "k" and left_out.name.endswith("bias"):
                continue  # softmax ignores it
            rest = [place for place in where[space] if place != left_out]
            moved = spaces.moved(state, rest, permutations[space])
            after = logits(module, spaces.retied(moved, spaces.tied(state, kind)), kind)
            assert float((after - before).abs().max()) > 1e-6, left_out
            checked += 1
    assert checked > 30


@pytest.mark.parametrize("kind", KINDS)
def test_file_names_are_known_too(kind: str, tmp_path: Path) -> None:
    module = tiny(kind, 0)
    module.save_pretrained(tmp_path)
    saved = dict(symfuse.open(tmp_path))
    permutations = random_permutations(module.state_dict(), kind)
    moved = rebasin.permute(saved, kind, permutations)
    assert moved.keys() == saved.keys()
    expected = rebasin.permute(module.state_dict(), kind, permutations)
    by_name = {spaces.canonical(name, kind): tensor for name, tensor in expected.items()}
    for name, tensor in moved.items():
        assert torch.equal(tensor, by_name[spaces.canonical(name, kind)])
    with pytest.raises(KeyError):
        spaces.places({**saved, "encoder.layer.0.more.weight": torch.zeros(1)}, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_matching_finds_a_planted_permutation(kind: str) -> None:
    anchor = tiny(kind, 0).state_dict()
    source = rebasin.permute(anchor, kind, random_permutations(anchor, kind))
    noise = torch.Generator().manual_seed(5)
    source = {n: t + 0.02 * torch.randn(t.shape, generator=noise, dtype=t.dtype) for n, t in source.items()}
    source = spaces.retied(source, spaces.tied(anchor, kind))
    moved = rebasin.weight_matching(source, anchor, kind, HEADS)
    count = sum(t.numel() for n, t in anchor.items() if n not in spaces.tied(anchor, kind))
    assert spaces.distance(moved, anchor, kind) < 1.2 * 0.02**2 * count
    kept = rebasin.weight_matching(source, anchor, kind, HEADS, residual=False, attention=False)
    assert all(torch.equal(kept[n], source[n]) for n in kept if "attn" in n or "attention" in n or "embed" in n)


@pytest.mark.parametrize("kind", KINDS)
def test_the_objective_never_rises(kind: str) -> None:
    source, anchor = (tiny(kind, seed).state_dict() for seed in (1, 2))
    steps = list(rebasin.descend(source, anchor, kind, HEADS, True, True, True, seed=0, sweeps=20))
    distances = [spaces.distance(state, anchor, kind) for state in (source, *steps)]
    assert len(distances) > 5
    assert all(after < before for before, after in itertools.pairwise(distances))


@pytest.mark.parametrize("kind", KINDS)
def test_one_sweep_does_it_without_the_residual(kind: str) -> None:
    source, anchor = (tiny(kind, seed).state_dict() for seed in (1, 2))
    found = [
        rebasin.weight_matching(source, anchor, kind, HEADS, residual=False, seed=seed, sweeps=sweeps)
        for seed, sweeps in ((0, 1), (3, 20))
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in source)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_symfuse_reaches_the_same(kind: str, residual: bool) -> None:
    """Without the residual stream the problem has one solution; with it, what symfuse finds, from several starts, the
    peer cannot make better."""
    source, anchor = (symfuse.open(tiny(kind, seed)) for seed in (1, 2))
    axes = ("qk", "v", "h", "ffn", *(("residual",) if residual else ()))
    groups = dict.fromkeys({"qk", "v", "residual"} & {*axes}, "permutation")
    found = symfuse.match(source, anchor, axes=axes, groups=groups, biases=False, scaling=False)
    ours = spaces.distance(dict(found(source)), dict(anchor), kind)
    theirs = rebasin.weight_matching(dict(source), dict(anchor), kind, HEADS, residual=residual)
    reached = spaces.distance(theirs, dict(anchor), kind)
    if not residual:
        assert_close(ours, reached, rtol=1e-10, atol=0)
        return
    assert ours <= reached
    steps = rebasin.descend(dict(found(source)), dict(anchor), kind, HEADS, True, True, True, seed=0, sweeps=20)
    assert not list(steps)


@pytest.mark.parametrize("residual", ["first", "last", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_matching_finds_a_planted_permutation(kind: str, residual: str) -> None:
    anchor = tiny(kind, 0)
    source = tiny(kind, 1)
    planted = random_permutations(anchor.state_dict(), kind)
    source.load_state_dict(rebasin.permute(anchor.state_dict(), kind, planted))
    batches = [batch(kind, seed) for seed in range(4)]
    moved = rebasin.activation_matching(source, anchor, batches, kind, HEADS, residual=residual)
    assert spaces.distance(moved, anchor.state_dict(), kind) == 0
    kept = rebasin.activation_permutations(source, anchor, batches, kind, HEADS, attention=False)
    assert set(kept) == {"0.ffn", "1.ffn"}


def test_residual_correlations_are_those_of_torch() -> None:
    """Over unpadded positions of all batches, at each point of the stream that is asked for."""
    source, anchor = (tiny("bert", seed) for seed in (0, 1))
    batches = [batch("bert", seed) for seed in range(2)]
    streams: list[list[torch.Tensor]] = []  # by module: batches' unpadded positions together, by point
    for module in (anchor, source):
        with torch.no_grad():
            heard = [module.bert(**inputs, output_hidden_states=True).hidden_states for inputs in batches]
        masks = [inputs["attention_mask"].bool() for inputs in batches]
        streams.append(
            [torch.cat([t[m] for t, m in zip(point, masks, strict=True)]) for point in zip(*heard, strict=True)]
        )
    scores = [torch.corrcoef(torch.cat(pair, 1).T)[:20, 20:] for pair in zip(*streams, strict=True)]
    assert len(scores) == 3
    sums = rebasin.Correlation()
    for rows in (slice(0, 50), slice(50, None)):
        sums.add(streams[0][1][rows], streams[1][1][rows])
    assert_close(sums.value(), scores[1], rtol=1e-9, atol=1e-9)
    for residual, score in (("first", scores[0]), ("last", scores[2]), ("all", sum(scores))):
        found = rebasin.activation_permutations(source, anchor, batches, "bert", HEADS, residual=residual)
        assert torch.equal(found["residual"], rebasin.assign(score)[0])


def test_heads_are_assigned_by_the_spaces_that_decide() -> None:
    blocks = torch.eye(2, dtype=torch.float64).repeat_interleave(2, 0).repeat_interleave(2, 1)  # heads as they are
    swapped = 2 * blocks.flip(0)
    scores = {"0.qk": swapped, "0.v": blocks}
    for decide, order in ((None, [1, 0]), (["0.v"], [0, 1]), (["0.qk"], [1, 0])):
        found = rebasin.best_heads(scores, 2, decide)
        assert [index // 2 for index in found["0.qk"][::2].tolist()] == order
        assert [index // 2 for index in found["0.v"][::2].tolist()] == order

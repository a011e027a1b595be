"""Recorded activations of two models: where, of which positions, and which numbers, against sums over all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import symfuse.stats.taps
from contract.tiny import MODELS, case, real
from symfuse.errors import OptionError
from symfuse.groups import GROUPS, Conformal, Group, Invertible, Permutation, PositiveMonomial
from symfuse.matching.activations import match_activations
from symfuse.model import Model
from symfuse.spec import Instance, Spec
from symfuse.stats.activations import Covariances, moments_of, record
from symfuse.stats.taps import Tap, taps

Batch = Mapping[str, Tensor]

SELF, MLP = "encoder.layer.{}.attention.self", "encoder.layer.{}.intermediate.dense.in residual*"
VIT = "encoder.layer.{}.attention.attention"
FUSED = "layers.{}.self_attn.out (h qk + h qk* + h v)"


def both(*templates: str) -> list[str]:
    return [template.format(layer) for template in templates for layer in (0, 1)]


# label → axis instance → where it is to be recorded, with the layout there. In each list the order of the declaration.
PLACES: dict[str, dict[str, list[str]]] = {
    "bert-sequence": {
        "residual": [*both(f"{SELF}.query.in residual*", MLP), "pooler.dense.in residual*"],
        "qk[0]": ["encoder.layer.0.attention.self.query.out (h qk)", "encoder.layer.0.attention.self.key.out (h qk*)"],
        "v[1]": ["encoder.layer.1.attention.output.dense.in (h v*)"],
        "h[1]": ["encoder.layer.1.attention.output.dense.in (h v*)"],
        "ffn[1]": ["encoder.layer.1.output.dense.in ffn*"],
        "pool": ["classifier.in pool*"],
    },
    "bert": {"pool": ["pooler.dense.out pool"]},  # nothing reads it
    "bert-mlm": {
        "residual": [*both(f"{SELF}.query.in residual*", MLP), "cls.predictions.transform.dense.in residual*"],
    },
    "electra": {
        "embedding": ["embeddings_project.in embedding*"],
        "residual": both(f"{SELF}.query.in residual*", MLP),
    },
    "distilbert-sequence": {"pre": ["classifier.in pre*"], "ffn[0]": ["transformer.layer.0.ffn.lin2.in ffn*"]},
    "deberta-mlm": {"residual": [
        *both("encoder.layer.{}.attention.self.query_proj.in residual*", MLP),
        "encoder.conv.conv.in residual*", "cls.predictions.transform.dense.in residual*",
    ]},
    "gpt2-lm": {
        "residual": both("h.{}.attn.c_attn.in residual*", "h.{}.mlp.c_fc.in residual*"),
        "qk[1]": ["h.1.attn.c_attn.out (h qk + h qk* + h v)"],
        "v[1]": ["h.1.attn.c_proj.in (h v*)"],
        "h[1]": ["h.1.attn.c_proj.in (h v*)"],
        "ffn[0]": ["h.0.mlp.c_proj.in ffn*"],
    },
    "gpt2-lm-untied": {"residual": [
        *both("h.{}.attn.c_attn.in residual*", "h.{}.mlp.c_fc.in residual*"), "lm_head.in residual*"
    ]},
    # Whose modules have other names in memory than their weights have on disk.
    "vit": {
        "residual": [*both(f"{VIT}.query.in residual*", MLP), "pooler.dense.in residual*"],
        "qk[0]": [f"{VIT}.query.out (h qk)".format(0), f"{VIT}.key.out (h qk*)".format(0)],
        "v[0]": ["encoder.layer.0.attention.output.dense.in (h v*)"],
        "ffn[1]": ["encoder.layer.1.output.dense.in ffn*"],
        "pool": ["pooler.dense.out pool"],
    },
    "deit-teacher": {"residual": [
        *both(f"{VIT}.query.in residual*", MLP), "cls_classifier.in residual*", "distillation_classifier.in residual*",
    ]},
    # torch's attention calls its output projection as a function, so that its input has no tap.
    "torch-relu-post": {
        "residual": both("layers.{}.self_attn.in residual*", "layers.{}.linear1.in residual*"),
        "h[0]": [FUSED.format(0)], "qk[0]": [FUSED.format(0)], "v[1]": [FUSED.format(1)],
        "ffn[1]": ["layers.1.linear2.in ffn*"],
    },
}  # fmt: skip


@cache
def pair(label: str) -> tuple[Spec, nn.Module, nn.Module]:
    """The declaration, and two independent models: the anchor and the source."""
    return case(label).spec, real(case(label).checkpoint), real(MODELS[label](seed=5))


def tokens(rows: int, length: int, seed: int, padded: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 61, (rows, length), generator=rng)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -padded:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@cache
def batches(label: str) -> tuple[dict[str, Tensor], ...]:
    """Three of different lengths, two of them with padding, where the model has any."""
    if "input_ids" in case(label).inputs:
        return tokens(4, 9, 1, padded=3), tokens(2, 5, 2), tokens(3, 11, 3, padded=1)
    ((name, like),) = case(label).inputs.items()
    rng = torch.Generator().manual_seed(1)
    draw = (torch.randn(n, *like.shape[1:], generator=rng, dtype=like.dtype) for n in (3, 2))
    return tuple({name: t} for t in draw)


def tap(label: str, instance: str, at: int = 0) -> Tap:
    spec, module, _ = pair(label)
    where = Instance.parse(instance)
    return taps(spec, module, [where])[where][at]


def direct(
    label: str, chosen: Callable[[nn.Module, Batch], Tensor], given: Iterable[Batch] | None = None
) -> tuple[Tensor, Tensor]:
    """All rows of the anchor and of the source, in one matrix each: by what `chosen` says of one batch."""
    _, *modules = pair(label)
    with torch.inference_mode():
        rows = [
            torch.cat([chosen(m, b).reshape(-1, chosen(m, b).shape[-1]) for b in given or batches(label)])
            for m in modules
        ]
    return rows[0], rows[1]


def covariances(x: Tensor, y: Tensor) -> Covariances:
    x, y = (t - t.mean(0) for t in (x, y))
    return Covariances(*(a.T @ b / len(x) for a, b in ((x, y), (x, x), (y, y))))


def assert_recorded(found: Covariances, x: Tensor, y: Tensor) -> None:
    wanted = covariances(x, y)
    for name in ("xy", "xx", "yy"):
        one, other = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(one, other if one.ndim == 2 else other.diagonal(), rtol=1e-10, atol=1e-12)


def unmasked(t: Tensor, batch: Batch) -> Tensor:
    return t[batch["attention_mask"].bool()]


def hidden(layer: int) -> Callable[[nn.Module, Batch], Tensor]:
    """The stream before that layer, at the positions that are no padding."""
    return lambda module, batch: unmasked(module(**batch, output_hidden_states=True).hidden_states[layer], batch)


# Where to listen.


@pytest.mark.parametrize(
    ("label", "instance"), [(label, name) for label, found in PLACES.items() for name in found], ids=str
)
def test_places(label: str, instance: str) -> None:
    spec, module, _ = pair(label)
    where = Instance.parse(instance)
    found = [f"{p} {p.layout}" for p in taps(spec, module, [where])[where]]
    assert found == PLACES[label][instance]


@pytest.mark.parametrize(
    "label", ["bert-sequence", "gpt2-lm", "vit", "deit-teacher", "deberta-mlm", "torch-relu-post", "sceptr"]
)
def test_every_axis_is_recorded_somewhere(label: str) -> None:
    spec, module = case(label).spec, real(case(label).checkpoint)
    found = taps(spec, module, spec.movable)
    assert found.keys() == spec.movable.keys()
    assert all(found.values())


def test_modules_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, module, _ = pair("bert-mlm")
    looked: list[nn.Module] = []
    original = symfuse.stats.taps.names_in_memory
    monkeypatch.setattr(symfuse.stats.taps, "names_in_memory", lambda m: looked.append(m) or original(m))
    assert len(taps(spec, module, spec.movable)) > 8
    assert looked == [module]


# Recorded activations, against hidden states that the models hand out, or that follow from them in one step.


@pytest.mark.parametrize(("label", "at"), [("bert-mlm", 0), ("bert-mlm", 1), ("deberta-mlm", 0), ("deberta-mlm", 1)])
def test_the_stream(label: str, at: int) -> None:
    """DeBERTa's projections are called a second time, with the positions, which are no part of the stream."""
    where = tap(label, "residual", at)
    spec, *modules = pair(label)
    found = record(spec, *modules, batches(label), [where], gram=[where])
    assert_recorded(found[where], *direct(label, hidden(at)))


def test_only_diagonals_are_kept_where_grams_are_not_asked_for() -> None:
    where = [tap("bert-mlm", "residual", at) for at in (0, 1)]
    spec, *modules = pair("bert-mlm")
    found = record(spec, *modules, batches("bert-mlm"), where, gram=where[1:])
    assert [found[one].xx.ndim for one in where] == [1, 2]
    for at, one in enumerate(where):
        assert_recorded(found[one], *direct("bert-mlm", hidden(at)))


def test_behind_a_norm() -> None:
    """What GPT-2's attention reads is the stream after its norm."""
    where = tap("gpt2-lm", "residual", 1)
    spec, *modules = pair("gpt2-lm")

    def normed(module: Any, batch: Batch) -> Tensor:
        return cast(Tensor, module.transformer.h[1].ln_1(hidden(1)(module, batch)))

    assert_recorded(record(spec, *modules, batches("gpt2-lm"), [where])[where], *direct("gpt2-lm", normed))


def test_queries_and_keys() -> None:
    spec, *modules = pair("bert-mlm")
    query, key = (tap("bert-mlm", "qk[1]", at) for at in (0, 1))
    found = record(spec, *modules, batches("bert-mlm"), [query, key], gram=[query, key])
    for where, name in ((query, "query"), (key, "key")):

        def projected(module: Any, batch: Batch, name: str = name) -> Tensor:
            attention = getattr(module.bert.encoder.layer[1].attention, "self")  # noqa: B009
            return cast(Tensor, getattr(attention, name)(hidden(1)(module, batch)))

        assert_recorded(found[where], *direct("bert-mlm", projected))


def test_torch_attention_is_recorded_at_its_input_projection() -> None:
    spec, *modules = pair("torch-relu-post")
    where = tap("torch-relu-post", "qk[0]")

    def projected(module: Any, batch: Batch) -> Tensor:
        attention = module.layers[0].self_attn
        return batch["src"] @ attention.in_proj_weight.T + attention.in_proj_bias

    found = record(spec, *modules, batches("torch-relu-post"), [where], gram=[where])
    assert_recorded(found[where], *direct("torch-relu-post", projected))


def test_neurons() -> None:
    spec, *modules = pair("bert-mlm")
    where = tap("bert-mlm", "ffn[1]")

    def neurons(module: Any, batch: Batch) -> Tensor:
        layer = module.bert.encoder.layer[1]
        seen: list[Tensor] = []
        handle = layer.intermediate.register_forward_hook(lambda *args: seen.append(args[-1]))
        module(**batch)
        handle.remove()
        return unmasked(seen[0], batch)

    assert_recorded(record(spec, *modules, batches("bert-mlm"), [where])[where], *direct("bert-mlm", neurons))


def pooled(module: Any, batch: Batch) -> Tensor:
    """Before the tanh."""
    last = module.bert if hasattr(module, "bert") else module
    return cast(Tensor, last.pooler.dense(last(**batch).last_hidden_state[:, 0]))


@pytest.mark.parametrize("length", [9, 20])
def test_what_is_pooled_has_no_padding(length: int) -> None:
    """Even where there are as many positions as units, so that the mask has the shape of what is pooled."""
    spec, *modules = pair("bert")
    where = tap("bert", "pool")
    given = [tokens(4, length, 1, padded=3), tokens(3, length, 2)]
    assert_recorded(record(spec, *modules, given, [where])[where], *direct("bert", pooled, given))


def test_listening_leaves_modules_as_they_are() -> None:
    spec, *modules = pair("torch-relu-post")
    before = torch.backends.mha.get_fastpath_enabled()
    wanted = list({p for found in taps(spec, modules[0], spec.movable).values() for p in found})
    with pytest.raises(TypeError):
        record(spec, *modules, [{"src": torch.zeros(1, 2, 20).double()}, {}], wanted)
    assert not any(m._forward_hooks for module in modules for m in module.modules())
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert all(p.requires_grad for module in modules for p in module.parameters())


# Which positions count.


@pytest.mark.parametrize("label", ["bert-sequence", "gpt2-lm", "deberta-mlm", "bert-choice"])
def test_padding_has_no_influence(label: str) -> None:
    spec, *modules = pair(label)
    instances = [i for i in spec.movable if i != Instance("pool")]
    wanted = list(dict.fromkeys(p for found in taps(spec, modules[0], instances).values() for p in found))
    batch = dict(tokens(4, 9, 1, padded=4))
    other = batch | {"input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
    if label == "bert-choice":  # [batch, choices, length]
        batch, other = ({name: t[None] for name, t in given.items()} for given in (batch, other))
    one, two = (record(spec, *modules, [given], wanted) for given in (batch, other))
    for p in wanted:
        torch.testing.assert_close(one[p].xy, two[p].xy, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one[p].yy, two[p].yy, rtol=1e-10, atol=1e-12)
    # It would have one, if it were counted.
    ones = {name: torch.ones_like(t) if name == "attention_mask" else t for name, t in batch.items()}
    assert (record(spec, *modules, [ones], wanted)[wanted[0]].xy - one[wanted[0]].xy).abs().max() > 1e-3


def test_batches_add_up_whatever_their_sizes() -> None:
    """One batch with padding, or each text by itself without."""
    spec, *modules = pair("bert-mlm")
    where = tap("bert-mlm", "residual", 1)
    batch = tokens(4, 9, 1, padded=4)
    rows = [{n: t[k : k + 1, : int(batch["attention_mask"][k].sum())] for n, t in batch.items()} for k in range(4)]
    one, other = (record(spec, *modules, given, [where])[where] for given in ([batch], rows))
    torch.testing.assert_close(one.xy, other.xy, rtol=1e-10, atol=1e-12)


def test_without_a_mask_all_positions_count() -> None:
    spec, *modules = pair("bert-mlm")
    where = tap("bert-mlm", "residual", 1)
    batch = tokens(4, 9, 1)
    one, other = (record(spec, *modules, [b], [where])[where] for b in (batch, {"input_ids": batch["input_ids"]}))
    torch.testing.assert_close(one.xy, other.xy)


def test_keep_chooses_positions() -> None:
    spec, *modules = pair("bert-mlm")
    where = tap("bert-mlm", "residual", 1)

    def keep(batch: Batch) -> Tensor:
        return batch["attention_mask"].bool() & (batch["input_ids"] % 3 != 0)

    def kept(module: Any, batch: Batch) -> Tensor:
        return cast(Tensor, module(**batch, output_hidden_states=True).hidden_states[1][keep(batch)])

    found = record(spec, *modules, batches("bert-mlm"), [where], keep=keep, gram=[where])
    assert_recorded(found[where], *direct("bert-mlm", kept))


def test_labels_and_other_fields_are_not_handed_to_the_models() -> None:
    spec, *modules = pair("bert-mlm")
    where = tap("bert-mlm", "residual")
    batch = tokens(2, 5, 1)
    with_labels = batch | {"labels": torch.full_like(batch["input_ids"], -100), "length": torch.tensor([5, 5])}
    one, other = (record(spec, *modules, [b], [where])[where] for b in (batch, with_labels))
    assert torch.equal(one.xy, other.xy)


def padded_encoder() -> tuple[list[nn.Module], Batch, Tensor]:
    """Two torch encoders, what they read, and which positions of it count."""
    rng = torch.Generator().manual_seed(7)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    mask[3, 1:] = False
    return [*pair("torch-relu-post")[1:]], {"src": torch.randn(4, 6, 20, generator=rng).double()}, mask


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("attention_mask", lambda mask: mask.long()),
        ("src_key_padding_mask", lambda mask: ~mask),
        ("src_key_padding_mask", lambda mask: torch.where(mask, 0.0, -torch.inf).double()),
    ],
    ids=["as transformers has it", "as torch has it", "added to scores"],
)
def test_padding_of_a_torch_encoder(name: str, said: Callable[[Tensor], Tensor]) -> None:
    """The modules see the mask, and what is padded does not count: as if each text stood by itself."""
    modules, batch, mask = padded_encoder()
    spec = pair("torch-relu-post")[0]
    wanted = [tap("torch-relu-post", *at) for at in (("residual", 0), ("residual", 2), ("qk[0]",), ("ffn[1]",))]
    found = record(spec, *modules, [{**batch, name: said(mask)}], wanted)
    alone = [{"src": batch["src"][k : k + 1, : int(mask[k].sum())]} for k in range(4)]
    wanted_values = record(spec, *modules, alone, wanted)
    for where in wanted:
        for value in ("xy", "xx", "yy"):
            torch.testing.assert_close(
                getattr(found[where], value), getattr(wanted_values[where], value), rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("mask", ["attention_mask", "src_key_padding_mask"])
@pytest.mark.parametrize(("of_module", "given"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_inputs_of_another_dtype(of_module: torch.dtype, given: torch.dtype, mask: str) -> None:
    """A mask that is added to scores is cast as what is read is."""
    modules, batch, counts = padded_encoder()
    modules = [copy.deepcopy(module).to(of_module) for module in modules]
    said = torch.where(counts, 0.0, -torch.inf) if mask == "src_key_padding_mask" else counts.float()
    where = tap("torch-relu-post", "ffn[1]")
    wanted, found = (
        record(case("torch-relu-post").spec, *modules, [{"src": batch["src"].to(dtype), mask: said.to(dtype)}], [where])
        for dtype in (of_module, given)
    )
    torch.testing.assert_close(found[where].xy, wanted[where].xy, rtol=1e-4, atol=1e-5)


# Modules that are not called.


class PastHooks(nn.Linear):
    """Called as its `.forward` is."""

    __call__ = nn.Linear.forward


class FirstOnly(nn.Linear):
    """Covariances the first time only."""

    calls = 0

    def __call__(self, given: Tensor) -> Tensor:
        self.calls += 1
        return cast(Tensor, super().__call__(given) if self.calls == 1 else self.forward(given))


def quiet(kind: type[nn.Linear], name: str) -> tuple[Spec, nn.Module, nn.Module]:
    """Two torch encoders, in the second of which a linear map is of that kind."""
    spec, anchor, source = pair("torch-relu-post")
    source = copy.deepcopy(source)
    source.get_submodule(name).__class__ = kind
    return spec, anchor, source


def test_a_place_that_is_not_called_is_left_out_if_the_axis_is_recorded_elsewhere() -> None:
    spec, anchor, source = quiet(PastHooks, "layers.1.linear1")
    given = batches("torch-relu-post")
    where = taps(spec, anchor, [Instance("residual")])[Instance("residual")]
    recorded = record(spec, anchor, source, given, where)
    assert [str(p) for p in where if p not in recorded] == ["layers.1.linear1.in"]
    groups: dict[Instance, Group] = {Instance("residual"): Permutation()}
    assert match_activations(spec, anchor, source, given, list(groups), groups) == {}  # all read the same stream


def test_an_axis_that_is_recorded_nowhere_is_named() -> None:
    spec, anchor, source = quiet(PastHooks, "layers.1.linear2")
    groups: dict[Instance, Group] = {Instance("ffn", (k,)): Permutation() for k in (0, 1)}
    with pytest.raises(
        OptionError, match=r"no activations of ffn\[1\] at layers\.1\.linear2\.in: .*leave that axis out"
    ):
        match_activations(spec, anchor, source, batches("torch-relu-post"), list(groups), groups)


def test_a_module_that_is_called_in_some_batches_only() -> None:
    spec, anchor, source = quiet(FirstOnly, "layers.1.linear2")
    where = tap("torch-relu-post", "ffn[1]")
    with pytest.raises(OptionError, match=r"layers\.1\.linear2\.in runs in 1 of 2 batches"):
        record(spec, anchor, source, batches("torch-relu-post"), [where])


# Moments.


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_units_with_means_far_above_their_deviations_lose_no_digits(offset: float) -> None:
    """In float32 squares of 1e4 leave no digits to a variance of 1. The first batch has no position that counts."""
    spec, *modules = pair("torch-relu-post")
    modules = [copy.deepcopy(module).float() for module in modules]
    rng = torch.Generator().manual_seed(2)
    given = [{"src": torch.randn(8, 25, 20, generator=rng) + offset} for _ in range(4)]
    where = tap("torch-relu-post", "residual")

    def keep(batch: Batch) -> Tensor:
        return torch.full((8, 25), batch is not given[0])

    recorded = record(spec, *modules, given, [where], keep=keep, gram=[where])
    rows = torch.cat([batch["src"].reshape(-1, 20) for batch in given[1:]]).double()
    wanted = torch.cov(rows.T, correction=0)
    for name in ("xy", "xx", "yy"):
        torch.testing.assert_close(getattr(recorded[where], name), wanted, rtol=1e-5, atol=1e-5)
    moments = moments_of(spec, Instance("residual"), recorded, Permutation())["primal"]
    torch.testing.assert_close(moments.xy, torch.corrcoef(rows.T), rtol=1e-5, atol=1e-5)


def recorded_at(label: str, instance: str) -> tuple[Spec, Instance, dict[Tap, Covariances]]:
    spec, *modules = pair(label)
    one = Instance.parse(instance)
    found = taps(spec, modules[0], [one])[one]
    return spec, one, record(spec, *modules, batches(label), found, gram=found)


def test_pearson_is_the_correlation_coefficient() -> None:
    spec, instance, recorded = recorded_at("bert-mlm", "residual")
    first = next(iter(recorded))
    moments = moments_of(spec, instance, {first: recorded[first]}, Permutation(), "pearson")
    x, y = direct("bert-mlm", hidden(0))
    wanted = torch.corrcoef(torch.cat([x, y], 1).T)[:20, 20:]
    assert moments.keys() == {"primal"}
    torch.testing.assert_close(moments["primal"].xy, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moments["primal"].xx, torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(moments["primal"].yy, torch.ones(20, dtype=torch.float64))


def test_covariance() -> None:
    spec, instance, recorded = recorded_at("bert-mlm", "residual")
    first = next(iter(recorded))
    moments = moments_of(spec, instance, {first: recorded[first]}, Permutation(), "covariance")
    x, y = direct("bert-mlm", hidden(0))
    wanted = torch.cov(torch.cat([x, y], 1).T, correction=0)
    torch.testing.assert_close(moments["primal"].xy, wanted[:20, 20:], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moments["primal"].xx, wanted.diagonal()[:20], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moments["primal"].yy, wanted.diagonal()[20:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["pearson", "covariance"])
def test_places_add(kind: Any) -> None:
    spec, instance, recorded = recorded_at("gpt2-lm", "residual")
    each = [moments_of(spec, instance, {p: h}, Permutation(), kind)["primal"] for p, h in recorded.items()]
    together = moments_of(spec, instance, recorded, Permutation(), kind)["primal"]
    torch.testing.assert_close(together.xy, torch.stack([m.xy for m in each]).sum(0))
    torch.testing.assert_close(together.yy, torch.stack([m.yy for m in each]).sum(0))


def test_a_unit_that_never_changes_is_like_no_other() -> None:
    spec, instance = case("bert").spec, Instance("ffn", (0,))
    where = tap("bert", "ffn[0]")
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, 29, generator=rng, dtype=torch.float64) for _ in range(2))
    x[:, 3] = 2.0
    found = covariances(x, y)
    moments = moments_of(
        spec, instance, {where: Covariances(found.xy, found.xx.diagonal(), found.yy.diagonal())}, Permutation()
    )
    assert moments["primal"].xy.isfinite().all()
    assert torch.equal(moments["primal"].xy[3], torch.zeros(29, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["pearson", "covariance"])
@pytest.mark.parametrize("group", [Conformal(), Invertible()], ids=lambda g: g.name)
def test_of_units_that_are_mixed_always_covariances(kind: Any, group: Group) -> None:
    """Queries are primal and keys dual; heads are apart."""
    spec, instance, recorded = recorded_at("bert-mlm", "qk[0]")
    moments = moments_of(spec, instance, recorded, group, kind)
    assert list(moments) == ["primal", "dual"]
    for where, part in zip(recorded, ("primal", "dual"), strict=True):
        found = moments[part]
        for head in range(4):
            own = slice(5 * head, 5 * head + 5)
            torch.testing.assert_close(found.xy[head], recorded[where].xy[own, own])
            xx = recorded[where].xx[own, own]
            torch.testing.assert_close(found.xx[head], xx if group.gram else xx.diagonal())


def test_what_reads_values_hears_them_as_they_are() -> None:
    """The output projection has v*, but its input transforms as the values do."""
    spec, instance, recorded = recorded_at("bert-mlm", "v[0]")
    assert moments_of(spec, instance, recorded, Conformal()).keys() == {"primal"}


def test_heads_that_are_permuted_whole() -> None:
    """The units of a head are summed over."""
    spec, instance, recorded = recorded_at("bert-mlm", "h[0]")
    moments = moments_of(spec, instance, recorded, Permutation(), "covariance")["primal"]
    (found,) = recorded.values()
    wanted = torch.stack([
        torch.stack([torch.trace(found.xy[5 * i : 5 * i + 5, 5 * j : 5 * j + 5]) for j in range(4)]) for i in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(moments.xy, wanted)


@pytest.mark.parametrize("label", ["bert-mlm", "gpt2-lm", "torch-relu-post"])
def test_all_pairs_of_heads(label: str) -> None:
    spec, instance, recorded = recorded_at(label, "qk[0]")
    pairs = moments_of(spec, instance, recorded, Permutation(), "covariance", pairs="h")["primal"]
    assert pairs.xy.shape == (4, 4, 5, 5)
    offsets = (0, 20) if len(recorded) == 1 else (0,)  # queries and keys in one output, or in two
    for i in range(4):
        for j in range(4):
            wanted = sum(
                h.xy[o + 5 * i : o + 5 * i + 5, o + 5 * j : o + 5 * j + 5] for h in recorded.values() for o in offsets
            )
            torch.testing.assert_close(pairs.xy[i, j], wanted)


@pytest.mark.parametrize("group", [PositiveMonomial(), Conformal(), Invertible()], ids=lambda g: g.name)
@pytest.mark.parametrize("kind", ["pearson", "covariance"])
def test_pairs_are_each_as_if_the_heads_had_that_order(kind: str, group: Group) -> None:
    """Of each pair all moments, by part; those of heads at the same tap are the moments of the axis."""
    spec, instance, recorded = recorded_at("bert-mlm", "qk[0]")
    pairs, own = (moments_of(spec, instance, recorded, group, kind, pairs=pairs) for pairs in ("h", None))
    assert list(pairs) == list(own) == ["primal", "dual"]
    for part, each in pairs.items():
        for i in range(4):
            torch.testing.assert_close(each.xy[i, i], own[part].xy[i])
            for j in range(4):
                torch.testing.assert_close(each.xx[i, j], own[part].xx[i])
                torch.testing.assert_close(each.yy[i, j], own[part].yy[j])


# What is refused.


def test_no_batches() -> None:
    spec, *modules = pair("bert-mlm")
    with pytest.raises(OptionError, match="no batches"):
        record(spec, *modules, [], [tap("bert-mlm", "residual")])
    groups = dict.fromkeys([Instance("residual")], GROUPS["permutation"])
    with pytest.raises(OptionError, match="no batches"):
        match_activations(spec, *modules, iter(()), list(groups), groups)


def test_a_kind_that_there_is_not() -> None:
    spec, instance, recorded = recorded_at("bert-mlm", "residual")
    wrong: Any = "spearman"
    with pytest.raises(OptionError, match="'spearman'; expected pearson or covariance"):
        moments_of(spec, instance, recorded, Permutation(), wrong)


@pytest.mark.parametrize("axes", ["h qk v", "ffn"])
def test_options_are_looked_at_before_the_models_run(axes: str) -> None:
    spec, *modules = pair("bert-mlm")
    groups = {i: g for i in spec.movable if i.axis in axes.split() and (g := spec.axes[i.axis].group) is not None}

    def never() -> Iterable[Batch]:
        raise AssertionError("a batch was asked for")
        yield {}

    wrong: Any = "spearman"
    with pytest.raises(OptionError, match="'spearman'"):
        match_activations(spec, *modules, never(), list(groups), groups, kind=wrong)
    with pytest.raises(OptionError, match="'middle'; expected first, last, all"):
        match_activations(spec, *modules, never(), list(groups), groups, residual="middle")


def test_models_are_those_of_the_declaration() -> None:
    assert Model.of(case("bert-mlm").checkpoint).spec == pair("bert-mlm")[0]

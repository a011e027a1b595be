"""Convolutional networks and perceptrons: known without a config, moved, merged, their statistics taken anew; and maps
that look like their symmetries and are not."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symfuse
from contract.test_must_fail import BROKEN, acting, applied, changed, rewritten
from contract.tiny import EXACT, case, moving, randomise
from symfuse.alignment import Alignment, random_alignment
from symfuse.architectures import ARCHITECTURES, Config
from symfuse.errors import LayoutError, OptionError, SpecError
from symfuse.groups import Group, Invertible, Permutation, PositiveMonomial, Scaling, Signed, SignedMonomial
from symfuse.io.live import module_config
from symfuse.model import Model
from symfuse.verification import compare, run


@pytest.mark.parametrize(
    ("label", "axis", "group"),
    [
        ("resnet-published", "stage1_residual", Signed()),  # ReLU
        ("resnet-published", "stage2_second_inner", Signed()),
        ("resnet-published-basic", "stage1_inner", Signed()),
        ("resnet-classification", "stage1_residual", Scaling()),  # GELU, behind which there are ReLUs in a block
        ("perceptron", "map0_ffn", Signed()),  # ReLU
        ("perceptron", "map2_ffn", Scaling()),  # tanh behind a norm
        ("perceptron", "map4_ffn", Signed()),  # GELU
        ("convolutions", "map0_stem", Signed()),
        ("convolutions", "map1_stem", Scaling()),  # tanh
    ],
)
def test_larger_groups_break(label: str, axis: str, group: Group) -> None:
    this = case(label)
    assert this.error(applied(this, acting(this.spec, axis, group))) > BROKEN
    g = moving(this.spec, 3, {axis})
    assert this.error(g(this.checkpoint), g) < EXACT


def test_a_channel_is_not_rescaled_before_its_batch_norm() -> None:
    """The variance has an ε beside it: by the square of the scale it is not what it was."""
    this = case("resnet-published")
    norm, conv = "layer1.0.bn1.", "layer1.0.conv1.weight"
    mean, variance = this.checkpoint[norm + "running_mean"], this.checkpoint[norm + "running_var"]
    scaled = {conv: 2 * this.checkpoint[conv], norm + "running_mean": 2 * mean}
    assert changed(this, scaled | {norm + "running_var": 4 * variance}) > 1e-7
    assert changed(this, scaled | {norm + "running_var": 4 * (variance + 1e-5) - 1e-5}) < EXACT  # which is no scale


def test_statistics_move_with_their_channels() -> None:
    this = case("resnet-published")
    g = moving(this.spec, 3, {"stage1_residual"})
    for end in ("running_mean", "running_var"):
        kept = rewritten(this.spec, {f"layer1.0.bn3.{end}": "28"})
        assert this.error(applied(this, Alignment(kept, g.elements))) > BROKEN
    assert torch.equal(g(this.checkpoint)["bn1.num_batches_tracked"], this.checkpoint["bn1.num_batches_tracked"])


def test_the_channels_of_one_group_do_not_go_to_another() -> None:
    this = case("resnet-published-groups")
    sizes = this.spec.sizes
    assert (sizes["stage1_group"], sizes["stage1_inner"]) == (3, 5)
    order = torch.arange(15).roll(1)  # of all channels between the first two convolutions
    at = "layer1.0."
    names = [f"{at}conv1.weight", *(f"{at}bn1.{end}" for end in ("weight", "bias", "running_mean", "running_var"))]
    # Of a convolution without groups its inputs would follow; here each group has inputs of its own.
    assert changed(this, {name: this.checkpoint[name][order] for name in names}) > BROKEN


def group_between(*layers: nn.Module) -> Group | None:
    """What may act on the ten units of a map before these layers."""
    spec = symfuse.declare(nn.Sequential(nn.Conv2d(3, 10, 3), *layers, nn.Conv2d(10, 5, 1)))
    return spec.axes["map0_stem"].group


def test_the_largest_group_that_all_layers_between_two_maps_commute_with() -> None:
    bare = nn.BatchNorm2d(10, affine=False)
    assert group_between() == Invertible()
    assert group_between(nn.AvgPool2d(2), nn.Dropout()) == Invertible()
    assert group_between(nn.MaxPool2d(2)) == PositiveMonomial()
    assert group_between(nn.ReLU(), nn.MaxPool2d(2)) == PositiveMonomial()
    assert group_between(nn.Tanh(), nn.AvgPool2d(2)) == Signed()
    assert group_between(nn.Tanh(), nn.MaxPool2d(2)) == Permutation()
    assert group_between(nn.Tanh(), nn.ReLU()) == Permutation()
    assert group_between(nn.BatchNorm2d(10)) == SignedMonomial()
    assert group_between(nn.ReLU(), nn.BatchNorm2d(10)) == SignedMonomial()
    assert group_between(nn.BatchNorm2d(10), nn.Tanh()) == Signed()
    assert group_between(bare, nn.ReLU()) == Permutation()


def test_flipping_what_is_pooled_by_its_largest_breaks() -> None:
    def error(pool: nn.Module) -> float:
        net = randomise(nn.Sequential(nn.Conv2d(3, 11, 3), nn.Tanh(), pool, nn.Flatten(), nn.Linear(99, 5)), 0)
        model, inputs = Model.of(symfuse.open(net)), {"input": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
        moved = acting(model.spec, "map0_stem", Signed()).on(model)
        return max(compare(run(net, inputs), run(symfuse.to_module(moved, torch.float64), inputs)).values())

    assert error(nn.AvgPool2d(2)) < EXACT
    assert error(nn.MaxPool2d(2)) > BROKEN


class Vgg(nn.Module):
    """By torchvision's names, with few channels."""

    def __init__(self, *, norms: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for read, out, pooled in ((3, 5, True), (5, 7, False), (7, 11, True)):
            norm = [nn.BatchNorm2d(out)] if norms else []
            layers += [nn.Conv2d(read, out, 3, padding=1), *norm, nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(2, 2)] if pooled else []
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(11 * 49, 13), nn.ReLU(True), nn.Dropout(), nn.Linear(13, 17), nn.ReLU(True), nn.Dropout(),
            nn.Linear(17, 6),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return out


class Basic(nn.Module):
    def __init__(self, read: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(read, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.downsample: Any = None
        if stride != 1 or read != out:
            self.downsample = nn.Sequential(nn.Conv2d(read, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        out: Tensor = (y + (x if self.downsample is None else self.downsample(x))).relu()
        return out


class ResNet(nn.Module):
    """By torchvision's names, with two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 10, 7, 2, 3, bias=False), nn.BatchNorm2d(10)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Basic(10, 10, 1), Basic(10, 10, 1))
        self.layer2 = nn.Sequential(Basic(10, 14, 2), Basic(14, 14, 1), Basic(14, 14, 1))
        self.fc = nn.Linear(14, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.maxpool(self.bn1(self.conv1(x)).relu())))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


KINDS = {"resnet": ResNet, "vgg": lambda: Vgg(norms=False), "vgg_bn": lambda: Vgg(norms=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_networks_of_torchvisions_names_are_known_as_files_and_live(kind: str, tmp_path: Path) -> None:
    net: Any = randomise(KINDS[kind](), 0)
    torch.save(net.state_dict(), tmp_path / "net.pth")
    opened = symfuse.open(tmp_path / "net.pth")
    family = "torchvision_resnet" if kind == "resnet" else "torch_sequential"
    assert [note for note in opened.notes if family in note]
    live = symfuse.open(net)
    assert opened.config["model_type"] == live.config["model_type"] == family
    assert symfuse.declare(opened).to_json() == symfuse.declare(net).to_json()

    images = torch.randn(2, 3, 40, 56, dtype=torch.float64)
    built = symfuse.to_module(opened, torch.float64)
    assert torch.equal(built(images), net(images))
    assert built.state_dict().keys() == net.state_dict().keys()

    g = random_alignment(symfuse.declare(net), 1, largest=True)
    proof = symfuse.prove(net, g)
    assert 0 < proof.exact.worst < EXACT
    net.load_state_dict(dict(g(opened)))
    assert (net(images) - built(images)).abs().max() < 1e-12 * built(images).abs().max()

    spec, rng = symfuse.declare(opened), torch.Generator().manual_seed(2)
    order = {i: Permutation().random(spec.sizes[i.axis], (), rng) for i in sorted(spec.movable)}
    reordered = Alignment(spec, order)(opened)
    found = symfuse.match(reordered, opened, axes="all", scaling=False)
    torch.testing.assert_close(dict(found(reordered)), dict(opened), rtol=0, atol=0)

    symfuse.merge([opened, live]).save(tmp_path / "merged")
    assert "library_name" not in (tmp_path / "merged" / "README.md").read_text()  # no class of transformers has it
    assert symfuse.declare(tmp_path / "merged").to_json() == symfuse.declare(net).to_json()


def test_a_live_network_with_other_strides_is_not_taken_for_torchvisions() -> None:
    net = ResNet()
    assert module_config(net) is not None
    net.layer2[0].conv1.stride = net.layer2[0].downsample[0].stride = (1, 1)
    assert module_config(net) is None
    with pytest.raises(OptionError, match="has no config of its own"):
        symfuse.declare(net)


@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_under_torchvisions_names_are_of_no_known_network(kind: str) -> None:
    tensors = KINDS[kind]().state_dict()
    first = next(iter(tensors))
    for name in (first, "fc.weight" if kind == "resnet" else "classifier.0.weight"):
        for shape in ((3,), (0, 3, 3, 3), (4, 4, 4, 4, 4), (5, 2), (0, 0)):
            with pytest.raises(OptionError, match="state dictionary has no config of its own"):
                symfuse.open(tensors | {name: torch.zeros(shape)})


def test_chains_that_are_not_known() -> None:
    def declared(*layers: nn.Module) -> None:
        symfuse.declare(nn.Sequential(*layers))

    with pytest.raises(OptionError, match="Sequential has no config of its own"):
        declared(nn.Linear(3, 4), nn.PReLU())
    for layer in (nn.MaxPool1d(2), nn.AvgPool1d(2)):
        with pytest.raises(SpecError, match=rf"layer '1': a {type(layer).__name__} behind vectors is not declared"):
            declared(nn.Linear(3, 8), layer, nn.Linear(4, 5))
    with pytest.raises(SpecError, match="layer '1': a Linear behind images is not declared"):
        declared(nn.Conv2d(3, 8, 3), nn.Linear(8, 5))  # of the last pixels
    with pytest.raises(SpecError, match="layer '1': a LayerNorm behind images"):
        declared(nn.Conv2d(3, 8, 3), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, 5))
    with pytest.raises(SpecError, match="layer '2' is a convolution in groups"):
        declared(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    with pytest.raises(SpecError, match="layer '2' reads 9 units, and '0' writes 8"):
        declared(nn.Linear(3, 8), nn.ReLU(), nn.Linear(9, 5))
    with pytest.raises(SpecError, match="none of the 1 layers is a map"):
        declared(nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([{"name": "0", "type": "Module"}], "layers has .* expected a name and a type of Linear, "),
        ([{"name": "0", "type": "Linear", "in_features": 3}], "layer '0' is no Linear"),
        ([{"name": "0", "type": "Linear", "in_features": 3, "out_features": "x"}], "layer '0' is no Linear"),
        ([{"name": "", "type": "ReLU"}], "layer '' is no ReLU"),
        (["ReLU"], "layers has 'ReLU'"),
    ],
)
def test_configs_of_chains_that_are_none(layers: list[Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ARCHITECTURES["torch_sequential"].declare(Config({"layers": layers}, "torch_sequential"))


def test_sizes_of_resnets_that_are_none() -> None:
    this = case("resnet-published").checkpoint
    for wrong in ({"depths": [2]}, {"layer_type": "other"}, {"hidden_sizes": [28, 0]}):
        with pytest.raises(SpecError, match="expected"):
            symfuse.declare(this.replace(config={**this.config, **wrong}))
    with pytest.raises((SpecError, LayoutError)):
        symfuse.declare(this.replace(config={**this.config, "hidden_sizes": [28, 40]}))


def normed(seed: int) -> nn.Sequential:
    """Two maps with a norm between, whose statistics are those of inputs about 3."""
    torch.manual_seed(seed)
    net = nn.Sequential(OrderedDict(map=nn.Linear(5, 7), norm=nn.BatchNorm1d(7), act=nn.ReLU(), out=nn.Linear(7, 3)))
    for _ in range(40):
        net(3 + torch.randn(64, 5))
    return net.eval()


def test_statistics_are_taken_anew_after_a_merge(tmp_path: Path) -> None:
    a, b, x = normed(0), normed(1), 3 + torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
    merged = symfuse.merge([a, b])
    batches = [{"input": part, "labels": torch.zeros(32).long()} for part in x.split(32)]  # labels are not used
    new = symfuse.renew_statistics(merged, batches)
    inside = symfuse.to_module(merged).map(x).reshape(3, 32, 7)  # type: ignore[operator]
    torch.testing.assert_close(new["norm.running_mean"], inside.mean((0, 1)).detach())
    torch.testing.assert_close(new["norm.running_var"], inside.var(1).mean(0).detach())
    assert new["norm.num_batches_tracked"] == 3
    names = [name for name in merged if not torch.equal(merged[name], new[name])]
    assert names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert new["norm.running_mean"].dtype == merged["norm.running_mean"].dtype

    new.save(tmp_path / "new")
    card = (tmp_path / "new" / "README.md").read_text("utf-8")
    assert "Statistics of batch normalisation: taken anew from 3 batches of memory, which is inexact." in card
    merged.save(tmp_path / "merged")
    assert "inexact" not in (tmp_path / "merged" / "README.md").read_text("utf-8")
    with pytest.raises(OptionError, match="there are no batches"):
        symfuse.renew_statistics(merged, [])
    with pytest.raises(OptionError, match="renew: Sequential does not take these batches"):
        symfuse.renew_statistics(merged, [{"pixels": x}])
    with pytest.raises(OptionError, match="has no batch normalisation with running statistics"):
        symfuse.renew_statistics(nn.Sequential(nn.Linear(5, 2)), batches)


def test_a_task_is_evaluated_and_renews_as_batches_do() -> None:
    a, b, x = normed(0), normed(1), 3 + torch.randn(64, 5)
    task = symfuse.task("image-classification", [{"input": x, "labels": torch.arange(64) % 3}], a)
    assert symfuse.evaluate(a, task).count == 64
    by_task, by_batches = (symfuse.renew_statistics(b, data) for data in (task, [{"input": x}]))
    torch.testing.assert_close(dict(by_task), dict(by_batches), rtol=0, atol=0)
    curves = [symfuse.barrier(a, b, task, points=3, refine=0, renew=renew) for renew in (task, [{"input": x}], None)]
    assert curves[0].curves["none"].points == curves[1].curves["none"].points != curves[2].curves["none"].points


@pytest.mark.parametrize("label", ["resnet-published-basic", "convolutions", "perceptron"])
def test_channels_are_recovered_from_activations(label: str) -> None:
    """A reordered copy has the same activations in another order: each pixel of an image is a position."""
    this, rng = case(label), torch.Generator().manual_seed(2)
    batches = [{"input": 2 * torch.randn(64, *this.inputs["input"].shape[1:], generator=rng, dtype=torch.float64)}]
    model = symfuse.renew_statistics(this.checkpoint, batches)  # so that no unit is zero for all inputs
    order = {i: Permutation().random(this.spec.sizes[i.axis], (), rng) for i in sorted(this.spec.movable)}
    copy = Alignment(this.spec, order)(model)
    permutations = {i.axis: "permutation" for i in order}
    found = symfuse.match(copy, model, axes="all", data=batches, groups=permutations)
    torch.testing.assert_close(dict(found(copy)), dict(model), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["perceptron", "normed", "convolutions"])
def test_barriers_of_networks_that_learned_digits(kind: str) -> None:
    """Git Re-Basin's and REPAIR's own finding, in small: aligned the barrier is lower, and with statistics taken anew
    lower still."""
    data = pytest.importorskip(
        "sklearn.datasets", reason="scikit-learn is not installed; it comes with the extra `experiments`"
    ).load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    images = images.reshape(-1, 1, 8, 8) if kind == "convolutions" else images

    def trained(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        net = DIGITS[kind]()
        descent = torch.optim.AdamW(net.parameters(), lr=2e-3)
        for _ in range(6):
            for rows in torch.randperm(1200).split(50):
                descent.zero_grad()
                nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
                descent.step()
        return net.eval()

    a, b = trained(1), trained(2)
    task = symfuse.task("image-classification", [{"input": images[1200:], "labels": labels[1200:]}], a)
    assert min(symfuse.evaluate(net, task).metrics["accuracy"] for net in (a, b)) > 0.9
    g = symfuse.match(a, b, axes="all")
    assert symfuse.prove(a, g).exact.worst < EXACT
    renew = [{"input": images[:1200]}]
    plain, renewed = (symfuse.barrier(a, b, task, {"aligned": g}, points=5, refine=0, renew=r) for r in (None, renew))
    before, after = (plain.curves[name].barrier for name in ("none", "aligned"))
    assert after < before * (0.9 if kind == "convolutions" else 0.5)
    if kind != "perceptron":
        assert renewed.curves["aligned"].barrier < 0.75 * after
        merged = symfuse.merge([g(symfuse.open(a)), b])
        scores = [symfuse.evaluate(one, task) for one in (merged, symfuse.renew_statistics(merged, renew))]
        assert scores[1].loss < scores[0].loss


DIGITS = {
    "perceptron": lambda: nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    ),
    "normed": lambda: nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 10),
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 10),
    ),
}  # fmt: skip

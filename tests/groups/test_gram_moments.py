"""Moments from weights are Gram matrices where the group asks for them, and norms of rows elsewhere."""

from __future__ import annotations

from dataclasses import replace

import torch

from symfuse.groups import Conformal, Invertible, Moments
from symfuse.spec import Axis, Instance, Spec, expand
from symfuse.stats import weight_moments

AXES = {"l": Axis(2), "h": Axis(3), "in": Axis(7), "v": Axis(4, Conformal(), per=("l", "h"))}
LAYOUTS = {"{l}.v.weight": "(h v) in", "{l}.v.bias": "(h v)", "{l}.o.weight": "in (h v*)"}
SPEC = Spec("made-up", AXES, expand(LAYOUTS, AXES))


def test_moments_are_what_the_group_asks_for() -> None:
    rng = torch.Generator().manual_seed(0)
    anchor, source = (
        {name: torch.randn(d.layout.shape(SPEC.sizes), generator=rng) for name, d in SPEC.tensors.items()}
        for _ in range(2)
    )

    def columns(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        primal = torch.cat((w["1.v.weight"], w["1.v.bias"][:, None]), 1).reshape(3, 4, 8)
        return {"primal": primal.double(), "dual": w["1.o.weight"].double().T.reshape(3, 4, 7)}

    x, y = columns(anchor), columns(source)
    instance = Instance("v", (1,))
    for group in (Conformal(), Invertible()):
        spec = replace(SPEC, axes=AXES | {"v": replace(AXES["v"], group=group)})
        m = weight_moments(spec, instance, anchor.__getitem__, source.__getitem__, group)
        assert m.keys() == {"primal", "dual"}
        for part, found in m.items():
            full = Moments(x[part] @ y[part].mT, x[part] @ x[part].mT, y[part] @ y[part].mT)
            expected = full if group.gram else Moments(full.xy, full.x_norms, full.y_norms)
            assert found.full == group.gram
            torch.testing.assert_close(found.xy, expected.xy)
            torch.testing.assert_close(found.xx, expected.xx)
            torch.testing.assert_close(found.yy, expected.yy)
            torch.testing.assert_close(found.size, full.size)

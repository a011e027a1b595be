"""How each axis is widened, by its declaration: the default of each kind, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from symfuse.architectures import lookup
from symfuse.errors import IncompatibleError
from symfuse.groups import Centred, Invertible, Orthogonal, SignedMonomial
from symfuse.spec import Atom, Instance, Spec, Variance, anatomy
from symfuse.widths.maps import Duplication, Isometry, Widening, centred_basis, keeping_mean
from symfuse.widths.shape import Shape, parts_with

HEADS = {"h", "kv", "q"}
INSIDE = {"qk", "c", "p", "v"}
SCANS = {"ssm_m", "ssm_h", "states", "rank"}  # of state spaces
SCORED = {"qk", "c", "p"}  # whose products are the scores

Maps = Mapping[Instance, Widening]


def widenings(shape: Shape, small: Spec, large: Spec) -> dict[Instance, Widening]:
    """The default map of every axis instance that is larger in `large` than in `small`, both of that shape.

    IncompatibleError, with the reason, where there is none.
    """
    pair = shape.model.name
    out: dict[Instance, Widening] = {}
    for instance in small.movable:
        axis = instance.axis
        n, m = small.axes[axis].size, large.axes[axis].size
        scale = score_scale(shape, small, large, axis) if anatomy(axis) in SCORED else 1.0
        if m < n:
            raise IncompatibleError(
                f"{pair}: axis {axis!r} has {n} units, and would have {m}: narrower while others are wider, or as they "
                "were; what `expand` makes is nowhere narrower, what `compress` makes nowhere wider"
            )
        if n != m and anatomy(axis) == "residual" and _part_of(shape, axis)[0].startswith(("gemma3n", "gemma4")):
            raise IncompatibleError(
                f"{pair}: axis {axis!r} has {n} units, and would have {m}; the router and the embeddings of layers are "
                "scaled by the root of that size, which so stays as it is"
            )
        if n != m or scale != 1.0:
            out[instance] = _widening(small, axis, n, m, scale, pair)
    return out


def _widening(spec: Spec, axis: str, n: int, m: int, scale: float, pair: str) -> Widening:
    group, word = spec.axes[axis].group, anatomy(axis)
    if n == m:
        return Isometry.padding(n, m, scale)
    if isinstance(group, Invertible) or (isinstance(group, Orthogonal) and word == "projection"):
        return Isometry.padding(n, m, scale)
    if (axis in SCANS or "ssm_h" in spec.axes[axis].per) and not isinstance(group, SignedMonomial):
        raise IncompatibleError(
            f"{pair}: axis {axis!r} has {n} units, and would have {m}; what a state space scans stays as it is"
        )
    if word in INSIDE:
        raise IncompatibleError(
            f"{pair}: heads of {n} units inside (axis {axis!r}) would have {m}; a norm, a clip or a turn acts on these "
            "units, so that they cannot be padded with zeros"
        )
    if isinstance(group, Centred | Orthogonal) and m % n:
        matrix = keeping_mean(centred_basis(m)[:, : n - 1]) if isinstance(group, Centred) else None
        return Isometry.stream(Isometry.padding(n, m).matrix if matrix is None else matrix)
    if m % n and (why := normed(spec, axis)):
        raise IncompatibleError(f"{pair}: axis {axis!r} has {n} units, and would have {m}, no multiple of them. {why}")
    return Duplication.even(n, m)


def normed(spec: Spec, axis: str) -> str:
    """Why all units of an axis must have equally many copies, if they must."""
    plain = [name for name, part in parts_with(spec, axis) if Atom(axis, Variance.PLAIN) in part]
    gains = [name for name in plain if len(spec.tensors[name].layout.shape(spec.sizes)) == 1]
    if gains and gains == plain:  # no weight of a gate
        way = (
            "; in the frame in which the stream may be rotated it can have any larger size: expand "
            "`canonical(model, rotatable(model.spec))`, or let `match_widths` choose"
            if any(gain in spec.reads for gain in gains)
            else ""
        )
        return f"A norm ({gains[0]}) takes the mean over them, which stays if each has equally many copies{way}"
    if anatomy(axis) in HEADS:
        known = {*HEADS, "f"}
        parts = parts_with(spec, axis)
        norms = [name for name, part in parts if all(a.name.isdigit() or anatomy(a.name) in known for a in part)]
        if norms:
            return f"A norm ({norms[0]}) takes the mean over all heads, which stays if each has equally many copies"
    return ""


def is_read(part: tuple[Atom, ...], at: int) -> bool:
    """Whether a part of a tensor reads the axis of its atom: by the dual, or, for heads, where their values are
    read."""
    atom = part[at]
    if anatomy(atom.name) in HEADS:
        return any(anatomy(a.name) == "v" and a.variance is Variance.DUAL for a in part)
    return atom.variance is Variance.DUAL


def score_scale(shape: Shape, small: Spec, large: Spec, axis: str) -> float:
    """The factor of queries that keeps scores: the root of the ratio of head sizes, where the model divides scores by
    the root of the head size."""
    family, config = _part_of(shape, axis)
    if (
        family in ("t5", "mt5", "umt5", "gpt_neo")  # do not scale
        or family.startswith(("gemma", "granite", "vaultgemma"))  # by a number of the config
        or (family == "gpt2" and config.get("scale_attn_weights") is False)
        or (family == "mpt" and (config.get("attn_config") or {}).get("softmax_scale") is not None)
    ):
        return 1.0
    ratio = _head(large, axis) / _head(small, axis)
    if ratio != 1.0 and family == "falcon" and config.get("alibi"):
        raise IncompatibleError(
            f"{shape.model.name}: Falcon divides the slopes of ALiBi by the root of the size of a head too, which so "
            "stays as it is"
        )
    return math.sqrt(ratio)


def _part_of(shape: Shape, axis: str) -> tuple[str, Mapping[str, Any]]:
    """The family and the config of the part of the model that the axis is in."""
    parts, prefix = lookup(shape.config, shape.model.name).parts, axis.removesuffix(anatomy(axis))
    if not parts:
        return shape.spec.family, shape.config
    key = next(key for key in parts if key.startswith(prefix))  # the text, without a prefix, is the first
    config = shape.config.get(key) or {}
    return str(config.get("model_type", parts[key])), config


def _head(spec: Spec, axis: str) -> int:
    """The number of units of a query inside of the head that the axis is in."""
    sizes, word = spec.sizes, anatomy(axis)
    if word == "qk":
        return sizes[axis]
    c, p, f = (axis.removesuffix(word) + name for name in "cpf")
    turned = sizes.get(c, 0) * sizes.get(f, 0)
    if any({c, p} <= {a.name for a in d.layout.atoms} for d in spec.tensors.values()):
        return turned + sizes[p]
    return turned if word == "c" else sizes[p]


def factors(shape: Shape) -> dict[str, float]:
    """Factors of some tensors, by canonical name, of what the model multiplies by a number that follows from the size
    of its stream: embeddings, by its root; heads of words, by its inverse (MiniCPM3); latents, by its root (LongCat).
    And of the norm before a head that is always the embedding (DeBERTa v3), which cannot be untied and would otherwise
    read all d' / d copies of each unit."""
    ours, theirs, (family, config) = shape.model.spec, shape.spec, _part_of(shape, "residual")
    ratio = ours.sizes["residual"] / theirs.sizes["residual"] if "residual" in ours.sizes else 1.0
    out: dict[str, float] = {}
    for name, declared in ours.tensors.items():
        words = [str(atom) for atom in declared.layout.atoms]
        old, new = (declared.layout.shape(spec.sizes) for spec in (ours, theirs))
        if family == "longcat_flash" and words[-1] in ("q_latent*", "kv_latent*"):
            out[name] = math.sqrt(ratio)
        elif old == new:
            continue
        elif words[0] in ("vocab", "decoder_vocab") and name not in ours.heads:
            if family.startswith(("gemma", "vaultgemma")) or config.get("scale_embedding") or config.get("mup_enabled"):
                out[name] = math.sqrt(old[1] / theirs.tensors[name].layout.shape(theirs.sizes)[1])
        elif name in ours.heads and words[0] == "vocab" and family == "minicpm3":
            out[name] = 1 / ratio
        elif name in ours.heads and words == ["|residual|"] and _reads_embedding(ours):
            out |= dict.fromkeys((name, name.removesuffix("weight") + "bias"), old[0] / new[0])
    return out


def _reads_embedding(spec: Spec) -> bool:
    """Whether the head has a bias for each token, and neither weights of its own nor tied ones."""
    of_words = [d.layout.names for n, d in spec.tensors.items() if n in spec.heads and "vocab" in d.layout.names]
    return bool(of_words) and all(names == ("vocab",) for names in of_words)

"""GPT-J: rotary planes of neighbours, (2i, 2i + 1), in a part of each head; one norm for both blocks. CodeGen, with
queries, values and keys fused in four blocks of heads."""

from __future__ import annotations

from dataclasses import replace

from symfuse.architectures.base import Config, Family, Head, architecture
from symfuse.architectures.blocks import HEADS, OUTPUTS, READERS, block_axes, feed_forward, linear, norm, turned
from symfuse.errors import SpecError
from symfuse.groups import Permutation
from symfuse.spec import Axis

LAYER = "h.{l}."
ATTENTION = LAYER + "attn."
UP, DOWN = LAYER + "mlp.fc_in", LAYER + "mlp.fc_out"


BLOCKS = 4
IN_BLOCKS = "heads are stored in four blocks, each with its queries, values and keys: reordered in them, and as blocks"


@architecture("gptj", tied=False)
def gptj(c: Config) -> Family:
    return _family(c)


@architecture("codegen", tied=False)
def codegen(c: Config) -> Family:
    if c.n_head % BLOCKS:
        raise SpecError(f"config.json: the number of heads, {c.n_head}, is no multiple of {BLOCKS}, as in CodeGen")
    family = _family(c)
    projections = [ATTENTION + f"{one}_proj.weight" for one in "qvk"]
    inner = [family.tensors[name].split(" residual*")[0].removeprefix("(h ").removesuffix(")") for name in projections]
    fused = f"(m (h {' + h '.join(inner)})) residual*"
    tensors = {name: layout for name, layout in family.tensors.items() if name not in projections}
    tensors |= {ATTENTION + "qkv_proj.weight": fused, ATTENTION + "out_proj.weight": "residual (m h v*)"}
    axes = {
        "m": Axis(BLOCKS, Permutation(), ("l",), IN_BLOCKS),
        "h": Axis(c.n_head // BLOCKS, Permutation(), ("l", "m"), IN_BLOCKS),
    }
    inside = {
        name: replace(family.axes[name], per=("l", "m", *family.axes[name].per[1:]))
        for name in ("c", "p", "v")
        if name in family.axes
    }
    reads = {**family.reads, LAYER + "ln_1.weight": (ATTENTION + "qkv_proj.weight", UP + ".weight")}
    heads = {"causal LM": family.heads["causal LM"]}
    return replace(family, axes={**family.axes, **axes, **inside}, tensors=tensors, reads=reads, heads=heads)


def _family(c: Config) -> Family:
    ffn, act = c.get("n_inner", 4 * c.n_embd), c.get("activation_function", "gelu_new")
    axes = turned(block_axes(c.n_layer, c.n_embd, c.n_head, ffn, act), c.size("rotary_dim", 64))
    axes |= {"vocab": Axis(c.vocab_size), "labels": Axis(c.labels)}
    query, key = ("(h (f c + p))", "(h (f c* + p*))") if "p" in axes else ("(h f c)", "(h f c*)")
    language = linear("lm_head", "vocab")
    return Family(
        axes=axes,
        prefix="transformer.",
        tensors={
            "wte.weight": "vocab residual",
            **norm(LAYER + "ln_1"),
            **linear(ATTENTION + "q_proj", query, bias=False),
            **linear(ATTENTION + "k_proj", key, bias=False),
            **linear(ATTENTION + "v_proj", "(h v)", bias=False),
            **linear(ATTENTION + "out_proj", "residual", "(h v*)", bias=False),
            **feed_forward(UP, DOWN),
            **norm("ln_f"),
        },
        heads={name: HEADS[name] for name in ("sequence", "question")}
        | {"causal LM": Head(("ForCausalLM",), language)},
        tied={"lm_head.weight": "wte.weight"} if c.tied else {},
        buffers=("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask", "*embed_positions"),
        outputs=OUTPUTS,
        reads={
            LAYER + "ln_1.weight": (*(f"{ATTENTION}{name}_proj.weight" for name in "qkv"), UP + ".weight"),
            "ln_f.weight": READERS,
        },
    )

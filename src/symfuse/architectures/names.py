"""What tensors are called in most families, whether symfuse declares them or not: by these names it treats checkpoints
without a declaration, and what a declaration does not say. All other names are in the families' own files."""

from __future__ import annotations

import re

# The token embedding, and the output head.
EMBEDDING = re.compile(
    r"((.*\.)?(embed_tokens|wte|word_embeddings?|shared|tok_embeddings|tokens_embed|embed_in)|"
    r"(backbone|rwkv|transformer)\.embeddings)\.weight"
)
HEAD = re.compile(
    r"(.*\.)?(lm_head|embed_out|cls\.predictions|vocab_projector)(\.decoder)?\.(weight|bias)|"
    r"(model\.)?(output|proj_out|head|pred_layer\.proj)\.weight"
)
# The name of the head that a class looks for where the file has none; and of the families that call it otherwise.
HEAD_OF, OWN_HEADS = "lm_head.weight", {"gpt_neox": "embed_out.weight"}
# The head's tensors, of which an adapter may be where the base has none.
HEADS = re.compile(r"(.*\.)?(lm_head|decoder|embed_out)\.(weight|bias)")
# Of the tensors in no layer those before the first one.
BEFORE_LAYERS = re.compile(r"embed|wte|wpe|word_embeddings|shared")
# By the last part of a module's name: tables of vectors, which are looked up and not multiplied with.
LOOKED_UP = re.compile(
    r"(.*\.)?(wte|wpe|shared|relative_attention_bias|embeddings?|embed_(in|tokens|positions)\w*|\w+_embeddings?)"
)
# The relative bias of T5.
TABLE = re.compile(r".*\.(global_)?relative_attention_bias\.weight")
# Layers of transformers that store [in, out], by the families that use them.
CONV1D = re.compile(r"(.*\.)?(c_attn|c_proj|c_fc|q_attn)")
CONV1D_FAMILIES = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt", "clvp", "clvp_decoder")
# Old endings of names, and today's.
LEGACY = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

# The embeddings that encoder and decoder share in some families, under the name before the first of these.
SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
SHARING = {
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "plbart", "mvp", "led", "pegasus", "m2m_100",
    "blenderbot", "blenderbot-small", "bigbird_pegasus", "nllb-moe", "pop2piano",
}  # fmt: skip

# Families whose head is the embedding where config.json does not say (transformers 5.24, its config classes).
TIED_BY_DEFAULT = SHARING | {
    "bert", "bert-generation", "big_bird", "biogpt", "bloom", "camembert", "cohere", "cohere2", "cohere2_moe", "ctrl",
    "data2vec-text", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba", "gemma", "gemma2",
    "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt2", "gpt-sw3", "gpt_bigcode",
    "gpt_neo", "gpt_neox_japanese", "jetmoe", "lfm2", "lfm2_moe", "mamba", "marian", "megatron-bert", "minicpm3",
    "modernbert-decoder", "mpt", "openai-gpt", "opt", "pegasus_x", "prophetnet", "recurrent_gemma", "roberta",
    "roformer", "smollm3", "starcoder2", "t5gemma", "trocr", "vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta",
    "xlnet", "xmod", "zamba", "zamba2", "albert", "convbert", "deberta", "deberta-v2", "distilbert", "esm", "flaubert",
    "fnet", "funnel", "ibert", "layoutlm", "longformer", "luke", "mobilebert", "modernbert", "mpnet", "mra",
    "nomic_bert", "nystromformer", "roberta-prelayernorm", "squeezebert", "visual_bert", "xlm-roberta-xl", "yoso",
}  # fmt: skip

"""Language models, of Hugging Face's transformers and of PEFT, with random weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Cases, from_hub

VOCABULARY, WIDTH, LAYERS, HEADS = 1000, 128, 4, 4
BATCH, LENGTH = 16, 128
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    **SPECIAL,
}
ENCODER = {**DECODER, "intermediate_size": 4 * WIDTH}
del ENCODER["use_cache"]


def tokens(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    """Random words, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, length))


def _hf() -> Any:
    import transformers

    return transformers


def decoder(name: str, *, length: int = LENGTH, **more: Any) -> Case:
    """A causal language model by its family's name."""
    hf = _hf()
    config = getattr(hf, f"{name}Config")(**{**DECODER, **more})
    kind = getattr(hf, f"{name}ForCausalLM", None) or getattr(hf, f"{name}LMHeadModel")
    words = tokens(length)
    return from_hub(kind(config), input_ids=words, labels=words)


def gated(name: str, **more: Any) -> Case:
    """A decoder with a gated MLP and fewer heads for keys and values."""
    sizes = {"intermediate_size": 3 * WIDTH, "num_key_value_heads": HEADS // 2}
    return decoder(name, **{**sizes, **more})


def encoder(name: str, task: str = "MaskedLM", *, autocast: bool = False, **more: Any) -> Case:
    """An encoder that fills in words, or that sorts texts; its batch is padded."""
    hf = _hf()
    config = getattr(hf, f"{name}Config")(**{**ENCODER, **more})
    words, mask = tokens(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[::2, LENGTH // 2 :] = 0
    labels = words if task == "MaskedLM" else torch.randint(0, 2, (BATCH,))
    model = getattr(hf, f"{name}For{task}")(config)
    return from_hub(model, autocast=autocast, input_ids=words, attention_mask=mask, labels=labels)


def gpt2() -> Case:
    """GPT-2: dropout everywhere, tied weights."""
    return decoder("GPT2")


def opt() -> Case:
    """OPT: ReLU, learnt positions, layerdrop."""
    return decoder("OPT", ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH)


def gpt_neox() -> Case:
    """GPT-NeoX: attention and MLP beside each other."""
    return decoder("GPTNeoX", intermediate_size=4 * WIDTH)


def bloom() -> Case:
    """BLOOM: ALiBi."""
    return decoder("Bloom", n_layer=LAYERS, n_head=HEADS)


def llama() -> Case:
    """Llama."""
    return gated("Llama")


def mistral() -> Case:
    """Mistral: a sliding window."""
    return gated("Mistral", sliding_window=LENGTH // 4)


def qwen3() -> Case:
    """Qwen3: queries and keys are normalised."""
    return gated("Qwen3", head_dim=WIDTH // HEADS)


def gemma2() -> Case:
    """Gemma 2: capped logits, hand-written attention."""
    return gated("Gemma2", head_dim=WIDTH // HEADS, attn_implementation="eager")


def phi3() -> Case:
    """Phi-3: fused projections."""
    return gated("Phi3")


def mixtral() -> Case:
    """Mixtral: two of four experts a token."""
    return gated("Mixtral", num_local_experts=4, output_router_logits=True)


def qwen3_moe() -> Case:
    """Qwen3-MoE: two of eight small experts a token."""
    sizes = {"moe_intermediate_size": WIDTH, "num_experts": 8, "num_experts_per_tok": 2}
    return gated("Qwen3Moe", head_dim=WIDTH // HEADS, **sizes)


def mamba() -> Case:
    """Mamba: a scan written in plain torch, which Dynamo unrolls: texts are short."""
    return decoder("Mamba", length=24, num_hidden_layers=2, state_size=8, use_mambapy=False)


def mamba2() -> Case:
    """Mamba-2: a scan in chunks."""
    return decoder(
        "Mamba2", num_hidden_layers=2, state_size=16, num_heads=8, head_dim=32, chunk_size=32
    )


def lora() -> Case:
    """LoRA on Llama: few weights are trained."""
    peft = importlib.import_module("peft")
    case = llama()
    settings = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear")
    model: Any = peft.get_peft_model(case.models[0], settings)
    words = case.held[0]
    return from_hub(model, input_ids=words, labels=words)


def bert() -> Case:
    """BERT."""
    return encoder("Bert")


def bert_autocast() -> Case:
    """BERT under autocast to bfloat16."""
    return encoder("Bert", autocast=True)


def modernbert() -> Case:
    """ModernBERT: local and global attention."""
    return encoder("ModernBert", local_attention=LENGTH // 4)


def albert() -> Case:
    """ALBERT: one layer's weights are used by all layers."""
    return encoder("Albert", embedding_size=WIDTH // 2)


def electra() -> Case:
    """ELECTRA sorts texts."""
    return encoder("Electra", "SequenceClassification", embedding_size=WIDTH // 2)


def distilbert() -> Case:
    """DistilBERT sorts texts."""
    sizes: dict[str, Any] = {
        "dim": WIDTH,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "hidden_dim": 4 * WIDTH,
    }
    return encoder("DistilBert", "SequenceClassification", **sizes)


def deberta() -> Case:
    """DeBERTa-v2: attention by relative positions, written by hand."""
    relative: dict[str, Any] = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 32,
    }
    return encoder("DebertaV2", "SequenceClassification", **relative)


def encoder_decoder(name: str, **sizes: Any) -> Case:
    """A model from texts to texts."""
    hf = _hf()
    config = getattr(hf, f"{name}Config")(
        vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0, **SPECIAL, **sizes
    )
    kind = getattr(hf, f"{name}ForConditionalGeneration", None) or hf.MarianMTModel
    return from_hub(kind(config), input_ids=tokens(), labels=tokens(LENGTH // 2))


def t5() -> Case:
    """T5 with gated GELU."""
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 3 * WIDTH, "num_layers": 3}
    return encoder_decoder("T5", num_heads=HEADS, feed_forward_proj="gated-gelu", **sizes)


def _bart_sizes() -> dict[str, int]:
    return {
        "d_model": WIDTH,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 4 * WIDTH,
        "decoder_ffn_dim": 4 * WIDTH,
        "max_position_embeddings": LENGTH,
    }


def bart() -> Case:
    """BART."""
    return encoder_decoder("Bart", forced_eos_token_id=2, **_bart_sizes())


def marian() -> Case:
    """Marian translates."""
    return encoder_decoder("Marian", forced_eos_token_id=2, **_bart_sizes())


TEXTS: Cases = {
    one.__name__: one
    for one in (
        gpt2, opt, gpt_neox, bloom, llama, mistral, qwen3, gemma2, phi3, mixtral, qwen3_moe,
        mamba, mamba2, lora, bert, bert_autocast, modernbert, albert, electra, distilbert, deberta,
        t5, bart, marian,
    )
}  # fmt: skip

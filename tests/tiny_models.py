"""Checkpoints of a few kilobytes at random weights, saved as `save_pretrained` does, and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 100
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
DECODER = {**SMALL, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "num_key_value_heads": 2}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **SPECIAL,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 40, "decoder_start_token_id": 3,
    "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip
VISION = {**SMALL, "image_size": 32, "patch_size": 8}
TEXT_TOWER = {**SMALL, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "projection_dim": 16}
WAV2VEC = {
    **SMALL, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def build(name: str) -> Any:
    """Return the model called `name`, at random weights that are the same each time."""
    torch.manual_seed(7)
    model, config = {
        "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**T5)),
        "t5-base": (hf.T5Model, hf.T5Config(**T5)),
        "mt5": (hf.MT5ForConditionalGeneration, hf.MT5Config(**T5)),
        "pegasus": (hf.PegasusForConditionalGeneration, hf.PegasusConfig(**BART, max_position_embeddings=64)),
        "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**BART, max_position_embeddings=64)),
        "gpt2": (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
            ),
        ),
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER)),
        "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**DECODER, head_dim=8)),
        "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**DECODER, num_local_experts=4)),
        "mamba": (
            hf.MambaForCausalLM,
            hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, **SPECIAL),
        ),
        "bert": (hf.BertForMaskedLM, hf.BertConfig(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=64)),
        "bert-base": (hf.BertModel, hf.BertConfig(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=64)),
        "roberta": (hf.RobertaModel, hf.RobertaConfig(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=34)),
        "vit": (hf.ViTForImageClassification, hf.ViTConfig(**VISION)),
        "clip": (hf.CLIPModel, hf.CLIPConfig(text_config=TEXT_TOWER, vision_config=VISION, projection_dim=16)),
        "whisper": (hf.WhisperForConditionalGeneration, hf.WhisperConfig(**WHISPER)),
        "wav2vec2": (hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config(**WAV2VEC)),
        "ast": (hf.ASTForAudioClassification, hf.ASTConfig(**SMALL, max_length=64, num_mel_bins=32)),
    }[name]
    return model(config)


def save(name: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """Save the model called `name`, and the tokenizer if asked for, in `folder`/`name`; return that folder."""
    path = folder / name
    build(name).save_pretrained(path)
    if tokenizer:
        build_tokenizer().save_pretrained(path)
    return path


def build_tokenizer(size: int = VOCABULARY, *, padding: bool = True) -> Any:
    """Return a tokenizer of whole words with `size` tokens: w3, w4, ... and three special ones."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, size)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>"} | ({"pad_token": "<pad>"} if padding else {})
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special)

"""Write a tiny random model with a byte-level tokenizer, for a server to serve.

python ci/sglang_cpu/tiny_model.py FOLDER --family llama --seed 1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, get_args

import torch

Family = Literal["qwen3", "llama"]
PAD, BOS, EOS = 256, 257, 258
VOCAB = 512  # the bytes, the three above, and ids that stand for nothing


def tiny_model(family: Family, seed: int) -> Any:
    """A float32 causal language model of transformers: 2 layers, width 64, weights wide enough to tell tokens apart."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**shape)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    return model.to(torch.float32).eval().requires_grad_(False)


def byte_tokenizer() -> Any:
    """Token ids 0 to 255 are the bytes in the order of the byte-level alphabet, then <pad>, <bos>, <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def write_tiny_model(folder: str | Path, family: Family = "qwen3", seed: int = 0) -> Any:
    """Write model and tokenizer into `folder`; returns the model."""
    model = tiny_model(family, seed)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=get_args(Family), default="qwen3")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_tiny_model(options.folder, options.family, options.seed)

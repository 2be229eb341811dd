"""A tiny Qwen2, its tokenizer, prompts and NeMo-RL's YAML: `python inputs.py FOLDER NEMO_RL`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make(folder: Path, nemo_rl: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Most words are an answer, 0, 1 or 2: NeMo-RL's own verifier, which reads the last, finds a third of them right.
    answers = [f"Answer{' ' * spaces}:{value}\n" for spaces in range(9) for value in range(3)]
    words = ["0", "1", "2", *answers, "<pad>", "<eos>"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "hf")
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=31,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "hf")
    lines = [json.dumps({"input": " ".join(f"{n:04b}"), "output": str(n % 3)}) for n in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "prompt.txt").write_text("{}")
    settings = {
        "defaults": str(nemo_rl / "examples/configs/grpo_math_1B.yaml"),
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2, "val_period": 0},
        "checkpointing": {"enabled": False},
        "policy": {
            "model_name": str(folder / "hf"),
            "train_global_batch_size": 8,
            "train_micro_batch_size": 2,
            "max_total_sequence_length": 32,
            "precision": "float32",
            "sequence_packing": {"enabled": False},
            "optimizer": {"kwargs": {"lr": 3e-3, "weight_decay": 0.0}},
            "generation": {"max_new_tokens": 10},
        },
        "data": {
            "num_workers": 0,
            "train": {
                "dataset_name": "ResponseDataset",
                "data_path": str(folder / "prompts.jsonl"),
                "split_validation_size": 0,
            },
            "default": {"prompt_file": str(folder / "prompt.txt")},
        },
        "env": {"math": {"num_workers": 1, "math_verify_impl": "dapo_math_verify"}},
        "logger": {"tensorboard_enabled": True, "monitor_gpus": False},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))

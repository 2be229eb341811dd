"""Write a tiny model with its tokenizer, and prompts: `python make_inputs.py FOLDER`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "ci" / "sglang_cpu"))

from tiny_model import byte_tokenizer, tiny_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"  # verl asks a Qwen for it


def write_inputs(folder: Path) -> None:
    """The model in FOLDER/model, 32 prompts in FOLDER/prompts.parquet."""
    from datasets import Dataset

    tiny_model("qwen3", seed=1).save_pretrained(folder / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"write letters {chr(97 + i % 26)}{i}:"}],
            "data_source": "letters",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(32)
    ]
    Dataset.from_list(rows).to_parquet(str(folder / "prompts.parquet"))


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))

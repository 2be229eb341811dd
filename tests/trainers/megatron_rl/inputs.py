"""The tokenizer and the environment file that the runs need: `python inputs.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path


def make(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # <pad> is not the first: Megatron-LM RL takes pad id 0 for none
    words = [*map(str, range(10)), *(chr(ord("a") + i) for i in range(20)), "<pad>", "<eos>"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "env.yaml").write_text("- agent_type: TinyAgent\n  agent_args: {}\n  weight: 1.0\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))

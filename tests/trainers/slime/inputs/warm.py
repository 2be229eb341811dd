"""warm.py FOLDER, in slime's environment: warm/, a checkpoint that half knows to reverse six digits, and its prompts.

Supervised steps on make.py's model, with its tokenizer, few enough that reinforcement has something left to learn.
"""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import json
import pathlib
import random
import sys

import torch
from make import qwen3, tokenizer

STEPS, BATCH, RATE = 60, 64, 3e-3
PROMPTS = 4096


def main(out):
    torch.set_num_threads(1)
    coder, model, rng = tokenizer(), qwen3(), random.Random(0)
    with torch.no_grad():
        model.lm_head.weight.div_(10)  # which make.py multiplies

    def digits():
        return "".join(rng.choices("0123456789", k=6))

    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        rows = [
            [*coder.encode(f"{drawn}={drawn[::-1]}"), coder.eos_token_id] for drawn in (digits() for _ in range(BATCH))
        ]
        ids = torch.tensor(rows)
        logits = model(ids).logits[:, 6:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 7:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(out / "warm")
    coder.save_pretrained(out / "warm")
    drawn = [digits() for _ in range(PROMPTS)]
    lines = [json.dumps({"text": f"{one}=", "label": one[::-1]}) for one in drawn]
    (out / "warm/prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

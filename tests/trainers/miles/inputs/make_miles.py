"""make_miles.py FOLDER, in miles's environment: slime's tiny Qwen3, prompts, and rollout dumps in miles's form.

Of the dumps `invalid` has a log-prob that is NaN, `missing` has none.

miles's converter stores weights in bfloat16, so they are rounded to it first: all forms of the checkpoint then agree.
"""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import math
import pathlib
import random
import sys
from argparse import Namespace

from make import DUMPS, PROMPTS, prompts, qwen3, samples, tokenizer
from miles.ray.rollout.debug_data import save_debug_rollout_data
from miles.utils.types import Sample


def main(out):
    args = Namespace(save_debug_rollout_data=str(out / "dump/{rollout_id}.pt"), save_debug_trajectory_data=None)
    coder, model, rng = tokenizer(), qwen3().bfloat16().float(), random.Random(0)
    model.save_pretrained(out / "hf")
    coder.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    coder.save_pretrained(out / "hf")
    drawn = prompts(out, rng)
    for rollout in range(DUMPS):
        data = samples(Sample, coder, model, rng, drawn[rollout * PROMPTS : (rollout + 1) * PROMPTS])
        save_debug_rollout_data(args, data, rollout, evaluation=False)
    for fault, values in {"invalid": lambda old: [math.nan, *old[1:]], "missing": lambda old: None}.items():
        faulty = Namespace(**{**vars(args), "save_debug_rollout_data": str(out / fault / "{rollout_id}.pt")})
        for sample in data if fault == "missing" else data[5:6]:
            sample.rollout_log_probs = values(sample.rollout_log_probs)
        save_debug_rollout_data(faulty, data, 0, evaluation=False)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))

"""make.py FOLDER, in slime's environment: a tiny Qwen3 checkpoint with tokenizer, prompts, and rollout dumps; warm/, a
checkpoint that half knows to reverse six digits, and its prompts.

The dumps are written by slime's own `save_debug_rollout_data`. Their rollout log-probs are the checkpoint's own with
normal noise, which is the mismatch.
"""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false

import json
import pathlib
import random
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DUMPS, PROMPTS, SAMPLES, NOISE = 4, 4, 4, 0.3
STEPS, BATCH, RATE = 60, 64, 3e-3  # supervised, few enough that reinforcement has something left to learn
WARM_PROMPTS = 4096


def tokenizer():
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *symbols])}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<eos>")


def qwen3():
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=512, rms_norm_eps=1e-6, tie_word_embeddings=False,
        max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # an untrained head gives nearly uniform probabilities
    return model


@torch.no_grad()
def response(model, prompt, length):
    tokens = list(prompt)
    for _ in range(length):
        p = model(torch.tensor([tokens])).logits[0, -1].softmax(-1)
        tokens.append(int(torch.multinomial(p, 1)))
    log_probs = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    log_probs = log_probs.gather(-1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
    return tokens, (log_probs + NOISE * torch.randn(length)).clamp(max=-1e-4)


def prompts(out, rng):
    """Prompts of six digits, also as the file that a trainer reads."""
    drawn = ["".join(rng.choice("0123456789") for _ in range(6)) + "=" for _ in range(64)]
    lines = [json.dumps({"text": prompt, "label": prompt[-2::-1]}) for prompt in drawn]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return drawn


def samples(Sample, coder, model, rng, asked):
    """A rollout's samples, of the host's class."""
    data = []
    for group, prompt in enumerate(asked):
        ids = coder.encode(prompt)
        for _ in range(SAMPLES):
            length = rng.randint(4, 24)
            tokens, log_probs = response(model, ids, length)
            reward = sum(t % 2 for t in tokens[len(ids) :]) / length
            data.append(
                Sample(
                    group_index=group, index=len(data), prompt=prompt, tokens=tokens, label="", reward=reward,
                    response=coder.decode(tokens[len(ids) :]), response_length=length, loss_mask=[1] * length,
                    rollout_log_probs=log_probs.tolist(), status=Sample.Status.COMPLETED,
                )
            )  # fmt: skip
    return data


def main(out):
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    for name in ("dump", "masked"):
        (out / name).mkdir(parents=True, exist_ok=True)
    coder, model, rng = tokenizer(), qwen3(), random.Random(0)
    model.save_pretrained(out / "hf")
    coder.save_pretrained(out / "hf")
    drawn = prompts(out, rng)
    for rollout in range(DUMPS):
        data = samples(Sample, coder, model, rng, drawn[rollout * PROMPTS : (rollout + 1) * PROMPTS])
        save_debug_rollout_data(str(out / "dump/{rollout_id}.pt"), data, rollout_id=rollout, evaluation=False)
        for sample in data[::3]:  # as a tool's answer in the middle
            third = sample.response_length // 3
            sample.loss_mask[third : 2 * third] = [0] * third
        save_debug_rollout_data(str(out / "masked/{rollout_id}.pt"), data, rollout_id=rollout, evaluation=False)


def warm(out):
    torch.set_num_threads(1)
    coder, model, rng = tokenizer(), qwen3(), random.Random(0)
    with torch.no_grad():
        model.lm_head.weight.div_(10)  # which qwen3() multiplies

    def digits(count):
        return ["".join(rng.choices("0123456789", k=6)) for _ in range(count)]

    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        rows = [[*coder.encode(f"{drawn}={drawn[::-1]}"), coder.eos_token_id] for drawn in digits(BATCH)]
        ids = torch.tensor(rows)
        logits = model(ids).logits[:, 6:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 7:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    coder.save_pretrained(out)
    lines = [json.dumps({"text": f"{one}=", "label": one[::-1]}) for one in digits(WARM_PROMPTS)]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
    warm(pathlib.Path(sys.argv[1], "warm"))

"""A small language model that behaves like a large one: trained on short sums told as stories, in a minute.

Most of its tokens are nearly certain and some are forks (median log-prob about -0.6, the rarest below -12); what comes
next depends on the question, most at the beginning of the answer. The tokenizer is a real BPE: text has one usual
form as ids, and samples often are another one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

NAMES = [
    "Mia",
    "Tom",
    "Ana",
    "Leo",
    "Zoe",
    "Max",
    "Eva",
    "Sam",
    "Ida",
    "Ben",
    "Nora",
    "Paul",
    "Rosa",
    "Emil",
    "Kim",
    "Olga",
]
THINGS = [
    "marbles",
    "apples",
    "books",
    "stamps",
    "coins",
    "shells",
    "pencils",
    "tickets",
    "cards",
    "stones",
    "lemons",
    "keys",
]
COLOURS = ["red", "blue", "green", "old", "new", "small", "large"]
PLACES = ["in the garden", "at the market", "on the train", "behind the house", "at school", "near the river"]
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<bos>", "<eos>", "<pad>"]
VOCAB, CONTEXT = 512, 160
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def question_and_answer(draw: random.Random) -> tuple[str, str]:
    """One story: what is asked, and how it is answered."""
    one, other = draw.sample(NAMES, 2)
    thing, colour, place = draw.choice(THINGS), draw.choice(COLOURS), draw.choice(PLACES)
    more, start = draw.randrange(2, 40), draw.randrange(40, 90)
    gains = draw.random() < 0.5
    verb = draw.choice(["gets", "finds", "buys"] if gains else ["loses", "sells", "gives away"])
    total = start + more if gains else start - more
    sign, back = ("+", "-") if gains else ("-", "+")
    begins = draw.choice(
        [f"{one} has {start} {colour} {thing} {place}.", f"{place.capitalize()}, {one} has {start} {colour} {thing}."]
    )
    asks = draw.choice([f"How many {thing} does {one} have now?", f"How many are left for {one}?", "How many is that?"])
    question = f"{begins} Then {one} {verb} {more} of them and {other} watches. {asks}"
    steps = [
        draw.choice([f"{one} starts with {start} {colour} {thing}.", f"First, {one} has {start} {thing} {place}."]),
        draw.choice(
            [f"Then {one} {verb} {more}, so {start} {sign} {more} = {total}.", f"{start} {sign} {more} = {total}."]
        ),
        draw.choice([f"To check: {total} {back} {more} = {start}.", f"{other} counts {total} {thing}, too.", ""]),
        draw.choice(
            [f"Now {one} has {total} {thing}.", f"The answer is {total}.", f"So {one} has {total} {thing} now."]
        ),
    ]
    if draw.random() < 0.6:
        last, colour = draw.choice(NAMES), draw.choice(COLOURS)
        steps += [
            draw.choice(
                [f"{last} says that {total} {thing} are many.", f"{last} likes the {colour} {thing} of {one}."]
            ),
            draw.choice([f"{other} and {last} have none.", f"{other} wants {draw.randrange(2, 40)} {thing}, too.", ""]),
            draw.choice(["That is all.", f"They meet {draw.choice(PLACES)}.", f"Later {last} goes home with {other}."]),
        ]
    return question, " ".join(filter(None, steps))


def prompt_text(question: str) -> str:
    """The template of the rollouts."""
    return f"Question: {question}\nAnswer:"


def other_prompt_text(question: str) -> str:
    """Another one, which the model knows less well."""
    return f"User: {question}\nAssistant:"


def texts(count: int, seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(count):
        question, answer = question_and_answer(draw)
        template = other_prompt_text if draw.random() < 0.1 else prompt_text
        yield f"{template(question)} {answer}"


def make_tokenizer() -> Any:
    """Of `tokenizers`: BPE on bytes, without merges across digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(4000, 0), trainer)
    return tokenizer


def split_token(tokenizer: Any, token: int) -> list[int]:
    """Two ids that together are the same text; empty where there are none."""
    text = tokenizer.id_to_token(token)
    for cut in range(1, len(text)):
        two = [tokenizer.token_to_id(part) for part in (text[:cut], text[cut:])]
        if token > PAD and None not in two:
            return two
    return []


def stream(tokenizer: Any, count: int, seed: int) -> torch.Tensor:
    """All texts one after the other, each between <bos> and <eos>."""
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(list(texts(count, seed))):
        ids += [BOS, *encoded.ids, EOS]
    return torch.tensor(ids)


def train(
    model: Any, data: torch.Tensor, steps: int, *, lr: float, rows: int = 32, warm_up: int = 20, seed: int = 0
) -> float:
    """Adam on random pieces of the stream, with a warm-up and linear decay; returns the mean loss of the last tenth."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warm_up, 1.05 - step / steps)
        starts = torch.randint(len(data) - CONTEXT - 1, (rows,), generator=generator)
        piece = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        logits = model(input_ids=piece[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def make_model(tokenizer: Any, steps: int = 150) -> Any:
    """LlamaForCausalLM in float32, the same for the same versions of torch and tokenizers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG)).float()
    loss = train(model, stream(tokenizer, 6000, 1), steps, lr=4e-3)
    print(f"loss {loss:.3f}")
    return model

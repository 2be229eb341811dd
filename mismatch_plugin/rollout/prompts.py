"""Token ids on their way to a server: what is none is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence


def check_ids(prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError naming prompt and position for what is not a non-empty list of token ids."""
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, (str, int)) or len(prompt) == 0:
            raise ValueError(f"prompt {number} is {prompt!r}: give a list of at least one token id.")
        for position, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"prompt {number}, position {position}: {token!r} is not a token id.")


def check_vocabulary(prompts: Sequence[Sequence[int]], size: int) -> None:
    """Raises ValueError naming prompt, position and id where an id is not below `size`: it would end the server."""
    for number, prompt in enumerate(prompts):
        if max(prompt) >= size:
            position = next(at for at, token in enumerate(prompt) if token >= size)
            raise ValueError(
                f"prompt {number}, position {position}: id {prompt[position]} is outside the model's vocabulary of "
                f"{size} ids and would bring the server down. Check that tokenizer and model belong together, or, if "
                f"{size} is wrong, give the right vocab_size to SGLangClient."
            )

"""The reward of the tiny task: the share of answer characters that are digits."""
# pyright: basic, reportMissingParameterType=false, reportMissingImports=false


async def reward(args, sample, **kwargs):
    text = sample.response or ""
    return sum(c.isdigit() for c in text) / max(1, len(text))


async def reversed_digits(args, sample, **kwargs):
    """Share of right places of the answer, its end token included; running on costs as much as stopping."""
    ended = ["<eos>"] if sample.status == sample.Status.COMPLETED else []
    answer, right = [*sample.response.removesuffix("<eos>"), *ended], [*sample.label, "<eos>"]
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(answer), len(right))

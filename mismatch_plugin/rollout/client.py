"""An asynchronous client of one SGLang server that loses, doubles and reorders nothing.

async with SGLangClient("http://127.0.0.1:30000") as client:
    records = await client.generate(prompts, SamplingParameters(max_new_tokens=256), samples_per_prompt=8)
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import httpx

from mismatch_plugin.config import InvalidPolicy
from mismatch_plugin.rollout.control import PauseMode, ServerControl
from mismatch_plugin.rollout.outcomes import (
    Failure,
    GenerateError,
    Outcome,
    Progress,
    RequestError,
    WeightUpdateError,
)
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.replies import ReplyError, parse_generate, parse_prompt_log_probs
from mismatch_plugin.rollout.sampling import SamplingParameters
from mismatch_plugin.rollout.server_info import ServerInfo
from mismatch_plugin.rollout.transport import Retries, Transport

__all__ = [
    "Failure",
    "GenerateError",
    "Outcome",
    "PauseMode",
    "Progress",
    "RequestError",
    "Retries",
    "SGLangClient",
    "ServerInfo",
    "WeightUpdateError",
]

T = TypeVar("T")


class SGLangClient(ServerControl):
    """Talks to the server at `url` and to nothing else. Use as an async context manager.

    Args:
        url: http(s)://host:port. No redirect is followed and no proxy read from the environment.
        concurrency: requests under way at once, over all calls of this client.
        timeout: seconds for one attempt at one request, from sending to the last byte of the answer.
        verify_updates_every: verify the first weight update and every n-th by the server's checksums; 0: none.
        retries: attempts and waits after connection errors, timeouts, cut-off JSON and status 5xx; never after 4xx. A
            number means so many attempts more than the first.
        connect_timeout: seconds to reach the server.
        rollout_log_prob_policy: with `error` a log-prob that is none fails its sample; otherwise it stays
            in the record, for `to_packed` and the correction to handle.
        headers: sent with every request, such as {"Authorization": "Bearer …"}.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        verify_updates_every: int = 1,
        retries: Retries | int = 4,
        connect_timeout: float = 10.0,
        rollout_log_prob_policy: InvalidPolicy = "error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency} must be at least 1.")
        if not timeout > 0 or not connect_timeout > 0:
            raise ValueError(f"timeout={timeout} and connect_timeout={connect_timeout} must be positive seconds.")
        if rollout_log_prob_policy not in (policies := get_args(InvalidPolicy)):
            raise ValueError(
                f"rollout_log_prob_policy={rollout_log_prob_policy!r} is unknown: choose one of {', '.join(policies)}."
            )
        transport = Transport(
            url,
            lanes=concurrency,
            timeout=timeout,
            connect_timeout=connect_timeout,
            headers=dict(headers or {}),
        )
        attempts = Retries(attempts=1 + retries) if isinstance(retries, int) else retries
        super().__init__(transport, attempts, verify_updates_every)
        self.url, self.concurrency, self.policy = transport.url, concurrency, rollout_log_prob_policy

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests under way are aborted by the server."""
        await self._transport.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParameters | None = None,
        *,
        samples_per_prompt: int = 1,
        return_sampling_mask: bool = False,
        prompt_log_probs: bool = False,
        top_log_probs: int = 0,
        progress: Callable[[Progress], None] | None = None,
        deadline: float | None = None,
    ) -> list[RolloutRecord]:
        """`samples_per_prompt` responses to each prompt, prompt by prompt; sample i answers prompt i // samples.

        Args:
            prompts: token ids; text would leave the tokenizer in doubt.
            sampling: sent in full. With a seed, sample i gets seed + i.
            return_sampling_mask: also the kept ids and the log-probs renormalised over them; needs a finite top_k.
            prompt_log_probs: also those of the prompt, at temperature 1.
            top_log_probs: how many of the most likely tokens to return at each position.
            progress: called after each request.
            deadline: seconds for the whole call; what is not done by then fails with kind `deadline`.

        Raises:
            GenerateError: if a sample failed for good, after all others were done; it holds what came and what failed.
            ValueError: for prompts that are no token ids, before anything is sent.
        """
        outcomes = await self.generate_outcomes(
            prompts,
            sampling,
            samples_per_prompt=samples_per_prompt,
            return_sampling_mask=return_sampling_mask,
            prompt_log_probs=prompt_log_probs,
            top_log_probs=top_log_probs,
            progress=progress,
            deadline=deadline,
        )
        return _values(outcomes)

    async def generate_outcomes(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParameters | None = None,
        *,
        samples_per_prompt: int = 1,
        return_sampling_mask: bool = False,
        prompt_log_probs: bool = False,
        top_log_probs: int = 0,
        progress: Callable[[Progress], None] | None = None,
        deadline: float | None = None,
    ) -> list[Outcome[RolloutRecord]]:
        """As `generate`, but failures are returned beside what did come, and nothing is raised for them."""
        sampling = sampling or SamplingParameters()
        _check_prompts(prompts)
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={samples_per_prompt} must be at least 1.")
        if return_sampling_mask and sampling.top_k == -1:
            raise ValueError(
                "return_sampling_mask needs a finite top_k: SGLang returns the kept ids of a bounded set only. Set "
                "top_k to the most ids that top_p is expected to keep, at most the server's sampling_mask_max_tokens."
            )
        batch = uuid.uuid4().hex[:12]

        async def sample(index: int, lane: httpx.AsyncClient, until: float | None) -> tuple[RolloutRecord, int]:
            prompt = list(prompts[index // samples_per_prompt])
            own = sampling if sampling.seed is None else sampling.model_copy(update={"seed": sampling.seed + index})
            body: dict[str, Any] = {
                "input_ids": prompt,
                "sampling_params": own.to_sglang(),
                "return_logprob": True,
            }
            if return_sampling_mask:
                body["return_sampling_mask"] = True
            if prompt_log_probs:
                body["logprob_start_len"] = 0
            if top_log_probs:
                body["top_logprobs_num"] = top_log_probs
            name = f"{batch}-{index}"
            answer = await self._transport.call(
                "POST", "/generate", body, request_id=name, lane=lane, retries=self._retries, deadline=until
            )
            try:
                (record,) = parse_generate(
                    answer.json, [prompt], own, samples=[index], require_kept_ids=return_sampling_mask
                )
                _check(record, f"{name}-{answer.attempts}", prompt_log_probs, top_log_probs > 0, index)
            except ReplyError as error:
                raise RequestError("reply", f"{error.message} ({error.kind})", answer.attempts) from None
            except _MALFORMED as error:
                raise RequestError("reply", f"a reply of another form ({error!r})", answer.attempts) from None
            faults = record.faults(index) if self.policy == "error" else []
            if faults:
                more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
                raise RequestError("log_probs", f"{faults[0]}{more}", answer.attempts)
            return record, answer.attempts

        return await self._run(len(prompts) * samples_per_prompt, sample, progress, deadline)

    async def rescore(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        progress: Callable[[Progress], None] | None = None,
        deadline: float | None = None,
    ) -> list[list[float | None]]:
        """The server's log-prob of each token of each sequence, by prefill, at temperature 1 and without filters.

        The first of a sequence is None. Raises GenerateError as `generate` does.
        """
        _check_prompts(sequences)

        async def score(index: int, lane: httpx.AsyncClient, until: float | None) -> tuple[list[float | None], int]:
            sequence = list(sequences[index])
            body = {
                "input_ids": sequence,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = await self._transport.call(
                "POST", "/generate", body, lane=lane, retries=self._retries, deadline=until
            )
            try:
                return parse_prompt_log_probs(answer.json, sequence, index), answer.attempts
            except ReplyError as error:
                raise RequestError("reply", f"{error.message} ({error.kind})", answer.attempts) from None
            except _MALFORMED as error:
                raise RequestError("reply", f"a reply of another form ({error!r})", answer.attempts) from None

        return _values(await self._run(len(sequences), score, progress, deadline))

    async def _run(
        self,
        total: int,
        job: Callable[[int, httpx.AsyncClient, float | None], Awaitable[tuple[T, int]]],
        progress: Callable[[Progress], None] | None,
        deadline: float | None,
    ) -> list[Outcome[T]]:
        """`job` for each of `total` indices, by as many workers as there are slots: no task a request."""
        until = None if deadline is None else time.monotonic() + deadline
        waiting = iter(range(total))
        outcomes: dict[int, Outcome[T]] = {}
        failed = retries = 0

        async def work() -> None:
            nonlocal failed, retries
            for index in waiting:
                async with self._transport.lane() as lane:
                    try:
                        value, attempts = await job(index, lane, until)
                        outcomes[index] = Outcome(index, value, None, attempts)
                    except RequestError as error:
                        failed += 1
                        outcomes[index] = Outcome(index, None, error.failure(index), error.attempts)
                retries += max(0, outcomes[index].attempts - 1)
                if progress is not None:
                    progress(Progress(len(outcomes), failed, total, retries))

        workers = [asyncio.create_task(work()) for _ in range(min(self.concurrency, total))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [outcomes[index] for index in range(total)]


_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)
"""What a field of a type that SGLang never sends raises while it is read: that sample's failure, not the batch's."""


def _check(record: RolloutRecord, request_id: str, prompt_log_probs: bool, top_log_probs: bool, index: int) -> None:
    if record.request_id is not None and record.request_id != request_id:
        raise ReplyError(index, "form", f"request {request_id} was answered as {record.request_id}")
    longest, came = record.sampling.max_new_tokens, len(record.response_ids)
    if longest is not None and came > longest:
        raise ReplyError(index, "length", f"{came} tokens came, at most {longest} were asked for")
    if prompt_log_probs and record.prompt_log_probs is None:
        raise ReplyError(index, "log_probs_lost", "the prompt's log-probs were asked for and did not come")
    if top_log_probs and came and not (record.top_log_probs and all(record.top_log_probs)):
        raise ReplyError(index, "log_probs_lost", "top_log_probs were asked for and did not come for every token")


def _values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    values = [outcome.value for outcome in outcomes if outcome.value is not None]
    if len(values) != len(outcomes):
        raise GenerateError(outcomes)
    return values


def _check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, (str, int)) or len(prompt) == 0:
            raise ValueError(f"prompt {number} is {prompt!r}: give a list of at least one token id.")
        for position, token in enumerate(prompt):
            if not isinstance(token, int) or token < 0:
                raise ValueError(f"prompt {number}, position {position}: {token!r} is no token id.")

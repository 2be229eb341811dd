"""An asynchronous client of one SGLang server that loses, doubles and reorders nothing.

async with SGLangClient("http://127.0.0.1:30000") as client:
    records = await client.generate(prompts, SamplingParameters(max_new_tokens=256), samples_per_prompt=8)
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from mismatch_plugin.config.settings import InvalidPolicy
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.sglang.control import PauseMode, ServerControl, ServerInfo
from mismatch_plugin.sglang.fingerprints import WeightUpdateError
from mismatch_plugin.sglang.http import MAX_REPLY_BYTES, Answer, FailureKind, RequestError, Retries, Server
from mismatch_plugin.sglang.replies import ReplyError, parse_generate, parse_prompt_log_probs

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


@dataclass(frozen=True)
class Failure:
    """Why there is no record of a sample. attempts: how often it was sent; status: of the last answer, if any."""

    sample: int
    kind: FailureKind
    message: str
    attempts: int
    status: int | None = None

    def __str__(self) -> str:
        return f"sample {self.sample}: {self.message} (kind {self.kind}, attempts {self.attempts})"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A sample's value or its failure; exactly one of the two is None."""

    sample: int
    value: T | None
    failure: Failure | None
    attempts: int


@dataclass(frozen=True)
class Progress:
    """How far a batch is: `done` of `total` (failed ones included), and attempts beyond the first so far."""

    done: int
    failed: int
    total: int
    retries: int


class GenerateError(RuntimeError):
    """Some samples of a batch failed. `failures` says which and why, `outcomes` also holds what did come."""

    def __init__(self, outcomes: Sequence[Outcome[Any]]) -> None:
        self.outcomes = list(outcomes)
        self.failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        shown = "; ".join(str(failure) for failure in self.failures[:3])
        more = f"; and {len(self.failures) - 3} more" if len(self.failures) > 3 else ""
        super().__init__(f"{len(self.failures)} of {len(self.outcomes)} requests failed: {shown}{more}")


class SGLangClient(ServerControl):
    """Talks to the server at `url` and to nothing else. Use as an async context manager.

    Args:
        url: http(s)://host:port. No redirect is followed and no proxy read from the environment. `user:password@` is
            sent as basic authorisation and shown nowhere: `self.url`, records, messages and logs are without it.
        concurrency: requests under way at once, over all calls of this client.
        timeout: seconds for one attempt at one request, from sending to the last byte of the answer.
        verify_updates: compare the weights that an update sent with those that serve then, where the server has our
            plugin; one pass over what is sent.
        retries: attempts and waits after connection errors, timeouts, cut-off JSON and status 5xx; never after 4xx. A
            number means so many attempts more than the first.
        connect_timeout: seconds to reach the server.
        rollout_log_prob_policy: with `error` an invalid log-prob fails its sample; otherwise it stays in the record,
            for `to_packed` and the correction to handle.
        headers: sent with every request, such as {"Authorization": "Bearer …"}. No message shows their values.
        max_reply_bytes: a larger reply fails its sample. Default: 256 MiB.
        vocab_size: rows of the model's embedding. Token ids from there on are refused before anything is sent: such an
            id brings a server down. None: what the server tells of itself, if anything; else ids are sent unchecked.

    Raises:
        ValueError: for an address, headers or numbers that mean nothing; no message holds credentials.
    Warns:
        MismatchWarning: once, with the first request, for each setting of the server that is known to widen the
            mismatch (`ServerInfo.risks`).
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        verify_updates: bool = True,
        retries: Retries | int = 4,
        connect_timeout: float = 10.0,
        rollout_log_prob_policy: InvalidPolicy = "error",
        headers: Mapping[str, str] | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        vocab_size: int | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency} must be at least 1.")
        if not timeout > 0 or not connect_timeout > 0:
            raise ValueError(f"timeout={timeout} and connect_timeout={connect_timeout} must be positive seconds.")
        if rollout_log_prob_policy not in (policies := get_args(InvalidPolicy)):
            raise ValueError(
                f"rollout_log_prob_policy={rollout_log_prob_policy!r} is unknown: choose one of {', '.join(policies)}."
            )
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} must be at least 1: it counts the model's token ids.")
        server = Server(
            url,
            concurrency=concurrency,
            timeout=timeout,
            connect_timeout=connect_timeout,
            headers=headers,
            max_reply_bytes=max_reply_bytes,
        )
        attempts = Retries(attempts=1 + retries) if isinstance(retries, int) else retries
        super().__init__(server, attempts, verify_updates)
        self.url, self.concurrency, self.policy = server.url, concurrency, rollout_log_prob_policy
        self._vocab_size, self._asked = vocab_size, False

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests under way fail, and the server aborts them."""
        await self._server.close()

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
            return_sampling_mask: also the kept ids and the log-probs renormalised over them. Which settings that needs
                the server decides: 0.5.23 wants a finite top_k, of at most its sampling_mask_max_tokens.
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
        """As `generate`, but nothing is raised: failures, of closing the client too, are next to what did come."""
        sampling = sampling or SamplingParameters()
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={samples_per_prompt} must be at least 1.")
        until = None if deadline is None else time.monotonic() + deadline
        await self._check_prompts(prompts, until)
        batch = uuid.uuid4().hex[:12]
        asked: dict[str, Any] = {"return_logprob": True}
        if return_sampling_mask:
            asked["return_sampling_mask"] = True
        if prompt_log_probs:
            asked["logprob_start_len"] = 0
        if top_log_probs:
            asked["top_logprobs_num"] = top_log_probs

        async def sample(index: int) -> tuple[RolloutRecord, int]:
            prompt = list(prompts[index // samples_per_prompt])
            own = sampling if sampling.seed is None else sampling.model_copy(update={"seed": sampling.seed + index})
            name = f"{batch}-{index}"

            def read(answer: Answer) -> RolloutRecord:
                (record,) = parse_generate(
                    answer.json, [prompt], own, samples=[index], require_kept_ids=return_sampling_mask
                )
                _check(record, f"{name}-{answer.attempts}", prompt_log_probs, top_log_probs > 0, index)
                if self.policy == "error" and (first := record.faults(index, limit=1)):
                    more = f"; and {count - 1} more" if (count := record.count_faults()) > 1 else ""
                    raise RequestError("log_probs", f"{first[0]}{more}", answer.attempts)
                return record.model_copy(update={"server": self.url})

            body = {"input_ids": prompt, "sampling_params": own.to_sglang(), **asked}
            return await self._ask(body, read, until, name)

        return await self._run(len(prompts) * samples_per_prompt, sample, progress, until)

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
        until = None if deadline is None else time.monotonic() + deadline
        await self._check_prompts(sequences, until)
        sampling = {"temperature": 1.0, "max_new_tokens": 0}

        async def score(index: int) -> tuple[list[float | None], int]:
            sequence = list(sequences[index])

            def read(answer: Answer) -> list[float | None]:
                return parse_prompt_log_probs(answer.json, sequence, index, vocab_size=self._vocabulary)

            body = {"input_ids": sequence, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            return await self._ask(body, read, until)

        return _values(await self._run(len(sequences), score, progress, until))

    @property
    def _vocabulary(self) -> int | None:
        return self._vocab_size or (self._info.vocab_size if self._info is not None else None)

    async def _check_prompts(self, prompts: Sequence[Sequence[int]], until: float | None) -> None:
        """Risks and vocabulary of the server are asked once; one that does not tell is taken as it is."""
        _check_ids(prompts)
        if len(prompts) == 0:
            return
        if not self._asked:
            wait = min(self._server.connect_timeout, self._server.timeout)
            try:
                await self._ask_server(retries=Retries(attempts=1), timeout=wait, deadline=until)
                self._asked = True
            except RequestError as error:
                self._asked = error.kind not in ("connection", "deadline", "closed")  # then it is asked again
            except _MALFORMED:
                self._asked = True
        if self._vocabulary is not None:
            _check_vocabulary(prompts, self._vocabulary)

    async def _ask(
        self, body: dict[str, Any], read: Callable[[Answer], T], until: float | None, name: str | None = None
    ) -> tuple[T, int]:
        """What `read` finds in the answer to a `/generate`, and after how many attempts it came."""
        answer = await self._server.call(
            "POST", "/generate", body, request_id=name, retries=self._retries, deadline=until
        )
        try:
            return read(answer), answer.attempts
        except _MALFORMED as error:
            told = isinstance(error, ReplyError)
            message = f"{error.message} ({error.kind})" if told else f"a reply of another form ({error!r})"
            raise RequestError("reply", self._server.redacted(message), answer.attempts) from None

    async def _run(
        self,
        total: int,
        job: Callable[[int], Awaitable[tuple[T, int]]],
        progress: Callable[[Progress], None] | None,
        until: float | None,
    ) -> list[Outcome[T]]:
        """`job` for each of `total` indices, by as many workers as may be under way: no task a request."""
        waiting = iter(range(total))
        outcomes: dict[int, Outcome[T]] = {}
        failed = retries = 0

        async def work() -> None:
            nonlocal failed, retries
            for index in waiting:
                try:
                    async with self._server.slot(until):
                        value, attempts = await job(index)
                    outcomes[index] = Outcome(index, value, None, attempts)
                except RequestError as error:
                    failed += 1
                    outcomes[index] = Outcome(
                        index,
                        None,
                        Failure(index, error.kind, error.message, error.attempts, error.status),
                        error.attempts,
                    )
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


def _check_ids(prompts: Sequence[Sequence[int]]) -> None:
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, (str, int)) or len(prompt) == 0:
            raise ValueError(f"prompt {number} is {prompt!r}: give a list of at least one token id.")
        for position, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"prompt {number}, position {position}: {token!r} is not a token id.")


def _check_vocabulary(prompts: Sequence[Sequence[int]], size: int) -> None:
    for number, prompt in enumerate(prompts):
        if max(prompt) >= size:
            position = next(at for at, token in enumerate(prompt) if token >= size)
            raise ValueError(
                f"prompt {number}, position {position}: id {prompt[position]} is outside the model's vocabulary of "
                f"{size} ids and would bring the server down. Check that tokenizer and model belong together, or, if "
                f"{size} is wrong, give the right vocab_size to SGLangClient."
            )


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

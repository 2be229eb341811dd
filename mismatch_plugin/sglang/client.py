"""An asynchronous client of one SGLang server that loses, doubles and reorders nothing.

async with SGLangClient("http://127.0.0.1:30000") as client:
    samples = await client.generate(prompts, SamplingParameters(max_new_tokens=256), samples_per_prompt=8)
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from mismatch_plugin.data.arrays import Floats, Ids
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.sglang.control import PauseMode, ServerControl, ServerInfo
from mismatch_plugin.sglang.fingerprints import WeightUpdateError
from mismatch_plugin.sglang.http import RequestError, Server
from mismatch_plugin.sglang.replies import ReplyError, parse_generate, parse_prompt_log_probs

__all__ = ["GenerateError", "PauseMode", "RequestError", "SGLangClient", "ServerInfo", "WeightUpdateError"]

T = TypeVar("T")
TokenIds = Sequence[int] | Ids
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)
"""What a field of a type that SGLang never sends raises while it is read: that sample's failure, not the batch's."""


class GenerateError(RuntimeError):
    """Some samples of a batch failed. came: what did come, in order, None where it failed. failures: by place why."""

    def __init__(self, came: Sequence[Any], failures: Mapping[int, RequestError]) -> None:
        self.came, self.failures = list(came), dict(sorted(failures.items()))
        said = [f"sample {at}: {e.message} (kind {e.kind}, attempts {e.attempts})" for at, e in self.failures.items()]
        more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
        super().__init__(f"{len(said)} of {len(self.came)} requests failed: {'; '.join(said[:3])}{more}")


class SGLangClient(ServerControl):
    """Talks to the server at `url` and to nothing else. Use as an async context manager.

    Args:
        url: http(s)://host:port. No redirect is followed and no proxy read from the environment.
        concurrency: samples under way at once, over all calls of this client.
        timeout: seconds for one attempt at one request, from sending to the last byte of the answer.
        verify_updates: compare the weights that an update sent with those that serve then, where the server has our
            plugin; one pass over what is sent. A later sample fails (kind `weights`) where the server started again
            or somebody else updated it since this client did; without the plugin only the version shows it.
        retries: how often a request is sent again after connection errors, timeouts and status 5xx; never after 4xx.
            A server that breaks off gets 1 + retries requests. What changes a server is sent once.
        headers: sent with every request, such as {"Authorization": "Bearer …"}.
        vocab_size: rows of the model's embedding. Token ids from there on are refused before anything is sent: such an
            id brings a server down. None: what the server tells of itself, if anything; else ids are sent unchecked.

    Raises:
        ValueError: for an address or numbers that mean nothing; no message holds credentials.
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
        retries: int = 4,
        headers: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds.")
        super().__init__(Server(url, timeout=timeout, headers=headers), retries, verify_updates)
        self.url, self.concurrency = self._server.url, concurrency
        self._vocab_size, self._asked = vocab_size, False
        self._slots = asyncio.Semaphore(concurrency)
        """Of samples. What controls the server needs none: a pause must not wait for what it is to pause."""

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests under way fail, and the server aborts them."""
        await self._server.close()

    async def generate(
        self,
        prompts: Sequence[TokenIds],
        sampling: SamplingParameters | None = None,
        *,
        samples_per_prompt: int = 1,
        return_sampling_mask: bool = False,
    ) -> list[Sample]:
        """`samples_per_prompt` responses to each prompt, prompt by prompt; sample i answers prompt i // samples.

        Values of log-probs (null, NaN, a floor) are judged by `pack`, under the policy of the settings.

        Args:
            prompts: token ids; text would leave the tokenizer in doubt.
            sampling: sent in full. With a seed, sample i gets seed + i.
            return_sampling_mask: also the kept ids and the log-probs renormalised over them. Which settings that needs
                the server decides: 0.5.23 wants a finite top_k, of at most its sampling_mask_max_tokens.

        Raises:
            GenerateError: if a sample failed for good, after all others were done; it holds what came and what failed.
            ValueError: for prompts that are no token ids, before anything is sent.
        """
        sampling = sampling or SamplingParameters()
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={samples_per_prompt} must be at least 1.")
        asked = {"return_logprob": True}
        if return_sampling_mask:
            asked["return_sampling_mask"] = True
        batch = uuid.uuid4().hex[:12]

        async def one(index: int, prompt: list[int]) -> Sample:
            own = sampling if sampling.seed is None else sampling.model_copy(update={"seed": sampling.seed + index})
            body = {"input_ids": prompt, "sampling_params": own.to_sglang(), **asked}
            name = f"{batch}-{index}"
            serving = self._serving
            answer = await self._server.call("POST", "/generate", body, request_id=name, attempts=self._attempts)
            with self._reading(answer.attempts):
                sample = parse_generate(answer.json, prompt, own, require_kept_ids=return_sampling_mask)
                if sample.request_id not in (None, f"{name}-{answer.attempts}"):
                    raise ReplyError("form", f"request {name}-{answer.attempts} was answered as {sample.request_id}")
                if (most := own.max_new_tokens) is not None and len(sample) > most:
                    raise ReplyError("length", f"{len(sample)} tokens came, at most {most} were asked for")
            # An update of this client's in between may have brought the last tokens, or not.
            if serving is not None and serving is self._serving and (problem := serving.problem(sample)):
                raise RequestError("weights", problem, answer.attempts)
            return sample.with_fields(sample_id=str(index), server=self.url)

        return await self._run(prompts, samples_per_prompt, one)

    async def rescore(self, sequences: Sequence[TokenIds]) -> list[Floats]:
        """The server's log-prob of each token of each sequence, by prefill, at temperature 1 and without filters.

        [n] float64 each; the first of a sequence is `arrays.NULL`. Raises GenerateError as `generate` does.
        """
        asked = {"return_logprob": True, "logprob_start_len": 0}
        sampling = {"temperature": 1.0, "max_new_tokens": 0}

        async def one(index: int, sequence: list[int]) -> Floats:
            body = {"input_ids": sequence, "sampling_params": sampling, **asked}
            answer = await self._server.call("POST", "/generate", body, attempts=self._attempts)
            with self._reading(answer.attempts):
                return parse_prompt_log_probs(answer.json, sequence, vocab_size=self._vocabulary)

        return await self._run(sequences, 1, one)

    @contextmanager
    def _reading(self, attempts: int) -> Iterator[None]:
        """A reply that cannot be read fails its sample."""
        try:
            yield
        except _MALFORMED as error:
            told = isinstance(error, ReplyError)
            message = f"{error.message} ({error.kind})" if told else f"a reply of another form ({error!r})"
            raise RequestError("reply", message, attempts) from None

    @property
    def _vocabulary(self) -> int | None:
        return self._vocab_size or (self.info.vocab_size if self.info is not None else None)

    async def _run(
        self, prompts: Sequence[TokenIds], each: int, one: Callable[[int, list[int]], Awaitable[T]]
    ) -> list[T]:
        """`one` for `each` samples of each prompt, by as many workers as may be under way: no task a sample.

        The server is asked once for its risks and vocabulary; one that does not tell is taken as it is.
        """
        ids, total = _token_ids(prompts), len(prompts) * each
        if total and not self._asked:
            try:
                await self.server_info(attempts=1, timeout=min(self._server.connect_timeout, self._server.timeout))
                self._asked = True
            except RequestError as error:
                self._asked = error.kind not in ("connection", "closed")  # then it is asked again
            except _MALFORMED:
                self._asked = True
        if self._vocabulary is not None:
            _token_ids(ids, self._vocabulary)
        waiting = iter(range(total))
        came: list[T | None] = [None] * total
        failures: dict[int, RequestError] = {}

        async def place(index: int) -> None:
            try:
                async with self._slots:
                    came[index] = await one(index, ids[index // each])
            except RequestError as error:
                # A copy: tracebacks hold requests and replies.
                failures[index] = RequestError(error.kind, error.message, error.attempts, error.status)

        async def work() -> None:
            for index in waiting:
                await place(index)

        workers = [asyncio.create_task(work()) for _ in range(min(self.concurrency, total))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if failures:
            raise GenerateError(came, failures)
        return [value for value in came if value is not None]


def _token_ids(prompts: Sequence[TokenIds], size: int | None = None) -> list[list[int]]:
    """Checked. size: of the vocabulary, if known."""
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, (str, int)) or len(prompt) == 0:
            raise ValueError(f"prompt {number} is {prompt!r}: give a list of at least one token id.")
        for position, token in enumerate(prompt):
            if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or token < 0:
                raise ValueError(f"prompt {number}, position {position}: {token!r} is not a token id.")
            if size is not None and token >= size:
                raise ValueError(
                    f"prompt {number}, position {position}: id {token} is outside the model's vocabulary of {size} ids "
                    f"and would bring the server down. Check that tokenizer and model belong together, or, if {size} "
                    f"is wrong, give the right vocab_size to SGLangClient."
                )
        found.append([int(token) for token in prompt])
    return found

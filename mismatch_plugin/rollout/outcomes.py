"""What became of each request of a batch, and the errors that tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

FailureKind = Literal[
    "connection",  # refused, reset, or closed in the middle
    "timeout",  # no whole answer within the time of one attempt
    "deadline",  # the time of the whole batch was over
    "closed",  # the client was closed before an answer came
    "server_error",  # status 5xx
    "refused",  # status 4xx: asking again would not help
    "content",  # a 2xx or 3xx that is no JSON reply
    "reply",  # JSON that does not fit the request: log-probs lost, length changed, …
    "log_probs",  # an invalid log-prob, under the policy `error`
]


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


class RequestError(RuntimeError):
    """One request that failed for good."""

    def __init__(self, kind: FailureKind, message: str, attempts: int = 0, status: int | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message, self.attempts, self.status = message, attempts, status

    def failure(self, sample: int) -> Failure:
        """The same as the failure of a sample."""
        return Failure(sample, self.kind, self.message, self.attempts, self.status)


class GenerateError(RuntimeError):
    """Some samples of a batch failed. `failures` says which and why, `outcomes` also holds what did come."""

    def __init__(self, outcomes: Sequence[Outcome[Any]]) -> None:
        self.outcomes = list(outcomes)
        self.failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        shown = "; ".join(str(failure) for failure in self.failures[:3])
        more = f"; and {len(self.failures) - 3} more" if len(self.failures) > 3 else ""
        super().__init__(f"{len(self.failures)} of {len(self.outcomes)} requests failed: {shown}{more}")


class WeightUpdateError(RuntimeError):
    """The server did not take the weights, or not all of them: what it samples from now is not to be trusted."""

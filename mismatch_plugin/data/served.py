"""What a server with our SGLang plugin tells of a response: which weights made it, and what its log-probs are of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mismatch_plugin.files import encodable

META_KEY = "mismatch_plugin"
"""Where it is: in a reply's `meta_info`, in `internal_states` of /server_info, in the hosts' `Sample.metadata`."""

Text = Annotated[str, AfterValidator(encodable)]


def last_told(told: Any) -> Any:
    """The object of a reply's `meta_info`, which SGLang puts into a list, perhaps behind nulls. None: none."""
    if isinstance(told, list) and all(item is None for item in told[:-1]):
        return told[-1] if told else None
    return told


class Told(BaseModel):
    """Fields that a newer plugin adds are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ServedWeights(Told):
    """Response tokens [start, end) were sampled from the weights with this fingerprint."""

    fingerprint: Text | None
    """16 hex digits, equal for equal weights however they are sharded (`fingerprints.py`). None: sampled while an
    update was half done, or the fingerprint could not be taken."""
    since: Text | None = None
    """The weight version under which the server first sampled from them: another one than the tokens' own says that
    the label moved and the weights did not."""
    start: int = Field(ge=0, lt=2**31)
    end: int = Field(ge=0, lt=2**31)


class ServedKV(Told):
    """Tokens whose keys and values were computed with other weights than those that made the response's last token."""

    fingerprint: Text | None
    """None: of an update that was half done."""
    tokens: int = Field(ge=1, lt=2**31)
    cached: int = Field(default=0, ge=0, lt=2**31)
    """Of these, those that came from the cache when the weights had changed already. The others are the request's own,
    from before an update in place."""


class LastUpdate(Told):
    """The server's last weight update. Counts are of whole tensors, over all ranks."""

    number: int = Field(ge=1)
    """How many updates there were since the model was loaded, this one included. Sessions of which nothing was sampled
    in between, and of which only one moved the version, are one."""
    changed: int = Field(ge=0)
    """On one rank at least."""
    tensors: int = Field(ge=0)
    changed_matrices: int = Field(ge=0)
    matrices: int = Field(ge=0)
    """Of the tensors, those with two dimensions or more: a step of RL moves them all, while a norm in bfloat16 often
    stays the same bit for bit. Where a rank kept all it has, none of these changed."""
    unchanged: tuple[Text, ...] = ()
    """The first few matrices that it left as they were."""
    changed_elements: float | None = Field(default=None, ge=0, le=1)
    """Share, by values, of some hundred elements of each matrix of each rank (of a pipeline, of its first stage)."""


_WIDE_CACHES = (None, "auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "half")
"""SGLang's names, as arguments and as dtypes, of KV caches that are not quantised."""


def below_16_bits(quantization: str | None, kv_cache_dtype: str | None) -> bool:
    """Whether a server quantises its weights or its KV cache."""
    return bool(quantization) or kv_cache_dtype not in _WIDE_CACHES


class Served(Told):
    """The object under `META_KEY` of one reply."""

    server: Text
    """host:port and the id of the server's process, or MISMATCH_SERVER_ID of its environment."""
    started: float | None = None
    """When its process was, in Unix time: another one says that the server was started again."""
    dp_rank: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_size: int = 1
    kv_heads_repeated: bool = False
    """Tensor parallelism has more ranks than the model has key and value heads: a trainer's fingerprint is another."""
    sglang: Text
    dtype: Text
    """Of weights and activations."""
    head_dtype: Text
    """Of the matrix product that makes the logits; their softmax is float32."""
    kv_cache_dtype: Text | None = None
    quantization: Text | None = None
    speculative: Text | None = None
    deterministic: bool = False
    on_policy_target: Text | None = None
    temperature: float | None = None
    """That the returned log-probs were really divided by; None: 1 in batches that were all greedy, the one asked for
    in others (top_k 1)."""
    log_probs_of: Literal["raw", "tempered"] = "tempered"
    """raw: of the logits as they are (SGLANG_RETURN_ORIGINAL_LOGPROB)."""
    filters: list[Text] = Field(default_factory=list)
    """Filters that were on; the returned log-probs do not show them."""
    shifts: list[Text] = Field(default_factory=list)
    """What else moved the logits: penalties, biases, grammars, logit processors."""
    weights: list[ServedWeights] = Field(default_factory=list)
    """In order, without overlap, over the whole response."""
    kv: list[ServedKV] | None = None
    """Of prompt and response; [] where all are of the weights of now. None: not known (a host cache, speculative
    decoding, or prefill and decoding on separate servers)."""
    update: LastUpdate | None = None
    """None: none since the model was loaded, or what it changed is not known."""

    @model_validator(mode="before")
    @classmethod
    def _of_reply(cls, told: Any) -> Any:
        return last_told(told)

    @property
    def identity(self) -> tuple[str, float | None, int | None]:
        """The process that sampled it, among all that ever ran."""
        return self.server, self.started, self.dp_rank

    @property
    def worker(self) -> tuple[str, int | None]:
        """Who sampled it, among all servers and data-parallel workers."""
        return self.server, self.dp_rank

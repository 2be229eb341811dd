"""An SGLang server as the lab's rollout engine: it samples over HTTP, and each rollout batch gets the newest weights.

    with SGLangEngine("http://127.0.0.1:30000", eos=12, vocab=14, dtype="bfloat16") as engine:
        engine.load_weights(policy.export(), version=0)
        records = engine.generate(prompts, samples_per_prompt=8, max_new_tokens=7, seed=0)

The server has to serve a model of the lab's shape: `python -m mismatch_plugin.lab.sglang_engine FOLDER` writes one.
Importing this imports neither megatron-core nor transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from mismatch_plugin.lab.engines import RolloutDtype
from mismatch_plugin.lab.settings import LabSettings
from mismatch_plugin.lab.tasks import TASKS, get_task
from mismatch_plugin.rollout.records import RolloutRecord
from mismatch_plugin.rollout.sampling import SamplingParameters
from mismatch_plugin.rollout.verification import ExpectChanged
from mismatch_plugin.sglang.client import SGLangClient

SERVER_ARGUMENTS = ("--skip-tokenizer-init",)
"""What the server of the lab's model is started with beyond the rest: the lab has token ids and no tokenizer."""
_TIMEOUT_S = 120.0
_LONG_NAME = {"half": "float16", "float": "float32"}
T = TypeVar("T")


class SGLangEngine:
    """Samples on the server at `url`; a context manager, since it holds connections and an event loop.

    Sampling follows the seed only where the server does: on CPU SGLang ignores it, so that runs differ from each other.

    Args:
        url: of the server. Nobody else may update its weights meanwhile.
        eos: the id that ends a response.
        vocab: size of the vocabulary; under top-p it is asked for as top_k, without which SGLang keeps no kept ids.
        dtype: that the server must have been started with. None: any.

    Raises:
        ValueError: the server has another dtype.
        RequestError: it does not answer.
    """

    def __init__(self, url: str, *, eos: int, vocab: int, dtype: RolloutDtype | None = None) -> None:
        self.eos, self.vocab, self.version = eos, vocab, -1
        # Versions of this run are told from those of another one that updates the same server.
        self._run_name = uuid.uuid4().hex[:8]
        self._loop = asyncio.new_event_loop()
        self._client = SGLangClient(url, timeout=_TIMEOUT_S, vocab_size=vocab)
        try:
            told = self._wait(self._client.server_info()).dtype or "auto"
            self.dtype = _LONG_NAME.get(told, told)
            if dtype is not None and self.dtype not in (dtype, "auto"):
                raise ValueError(
                    f"the server at {self._client.url} computes in {self.dtype}, and rollout_dtype is {dtype}: start "
                    f"it with --dtype {dtype}, or choose its own."
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SGLangEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            self._loop.close()

    def load_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """Send all weights in one request, as the server's next version. Raises WeightUpdateError."""
        # The server may have a run's first weights already, from a run before it.
        expected: ExpectChanged = "any" if self.version < 0 else "all"
        update = self._client.update_weights_from_tensors(state_dict, self._named(version), expect_changed=expected)
        self._wait(update)
        self.version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples_per_prompt: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int,
    ) -> list[RolloutRecord]:
        """As `RolloutEngine.generate`. Raises GenerateError; RuntimeError if others than this run's weights sampled."""
        filtered = top_p < 1.0
        sampling = SamplingParameters(
            temperature=temperature,
            top_p=top_p,
            top_k=self.vocab if filtered else -1,
            max_new_tokens=max_new_tokens,
            stop_token_ids=(self.eos,),
            seed=seed,
        )
        records = self._wait(
            self._client.generate(
                prompts, sampling, samples_per_prompt=samples_per_prompt, return_sampling_mask=filtered
            )
        )
        for index, record in enumerate(records):
            if foreign := set(record.version_of_token) - {self._named(self.version)}:
                raise RuntimeError(
                    f"response {index} was sampled from weights {', '.join(map(str, foreign))}, not "
                    f"{self._named(self.version)}: the server is in use elsewhere too; give each run its own."
                )
        return records

    def _named(self, version: int) -> str:
        return f"{self._run_name}-{version}"

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def write_checkpoint(folder: str | Path, settings: LabSettings, *, context: int | None = None) -> None:
    """A checkpoint of the lab's model under `settings`, for a server to start with. Its weights are random.

    context: tokens of prompt and response that the server allows; the model itself does not care for positions.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from mismatch_plugin.lab.export import llama_config
    from mismatch_plugin.lab.policy import model_settings

    task = get_task(settings.task)
    config = llama_config(model_settings(settings), eos=task.eos, pad=task.pad)
    config["max_position_embeddings"] = context or config["max_position_embeddings"]
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    logging.disable_progress_bar()
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m mismatch_plugin.lab.sglang_engine",
        description=f"Write the lab's model for a server, to be started with {' '.join(SERVER_ARGUMENTS)}.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=TASKS, default="reverse", help="(default: %(default)s)")
    options = parser.parse_args()
    write_checkpoint(options.folder, LabSettings.model_validate({"task": options.task}))

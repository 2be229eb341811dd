"""After each of the host's weight updates: is what was sent what the servers hold now (`verify_weights`)?

The host's updater converts its parameters and sends them in buckets. Each bucket is digested as it leaves; when the
update is over, rank 0 asks every server with our SGLang plugin what it holds, and all ranks learn the answer. Once no
server has the plugin, nothing is digested any more.
"""

from __future__ import annotations

import json
import logging
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from urllib.request import ProxyHandler, build_opener

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_plugin.config.settings import VerifyWeights
from mismatch_plugin.core.metrics.registry import PREFIX
from mismatch_plugin.hooks.base import wrap_once
from mismatch_plugin.sglang.delivered import of_sums, sampled, sums
from mismatch_plugin.sglang.fingerprints import STAGES_S, SentWeights, WeightUpdateError, settled, states_of

logger = logging.getLogger("mismatch_plugin")

SENDERS = {
    "slime": {
        "UpdateWeightFromDistributed": "_update_bucket_weights_from_distributed",
        "UpdateWeightFromTensor": "_send_hf_params",
    },
    "miles": {
        "UpdateWeightFromDistributed": "_update_weight_implementation",
        "UpdateWeightP2P": "_update_weight_implementation",
        "UpdateWeightFromTensor": "_send_base_params",
    },
}
"""The host's updaters → the method that sends one bucket, [(name, tensor)], its first argument. Others write files."""
_TRAIN_DUMPS = {"slime": "slime.observability.train_data_utils", "miles": "miles.utils.train_dump_utils"}
_SAMPLED = 256
"""Elements of each tensor that are compared."""
_TIMEOUT = 60.0
_NO_GROUP = 2**31
_TURN_OFF = "--mismatch-verify-weights warn goes on after such an update, off makes no comparison."


@dataclass
class Verdict:
    """Of one update, the same on every rank. faults: which servers hold other weights than were sent. fingerprint: of
    what all hold, where that is what was sent. reason: why some or all were not compared. final: nor will be."""

    faults: list[str] = field(default_factory=list)
    fingerprint: str | None = None
    reason: str = ""
    final: bool = False


class WeightUpdates:
    """The updates of one training process. host: its name. metrics: where the steps' metrics get the share of the
    change that an update delivers. fingerprint: verified after the last update, until the weights have trained on; None
    where it was not. version: what the servers call them."""

    def __init__(self, host: str, metrics: dict[str, float]) -> None:
        self.host, self.metrics = host, metrics
        self.fingerprint: str | None = None
        self.version: str | None = None
        self._before: list[Tensor] = []  # some elements of the masters, as they were after the last update
        self._mode: VerifyWeights = "off"
        self._sent: SentWeights | str | None = None  # of the update under way, or why they could not be digested
        self._said: set[str] = set()

    def watch(self, args: Namespace, mode: VerifyWeights) -> None:
        """Let the host's updaters verify each of their updates. Idempotent."""
        self._mode = mode
        if mode == "off":
            return
        actor = import_module(f"{self.host}.backends.megatron_utils.actor")
        found = {kind: method for name, method in SENDERS[self.host].items() if (kind := getattr(actor, name, None))}
        transport = getattr(args, "update_weight_transport", None), getattr(args, "update_weight_transfer_mode", None)
        delta = "disk-delta" in transport or getattr(args, "update_weight_mode", None) == "delta"
        quantization = getattr(args, "sglang_quantization", None)
        known = found and all(map(hasattr, found, found.values()))
        reasons = {
            f"this {self.host} sends them otherwise than the tested one.": not known,
            "they go through files.": delta or "disk" in transport,
            f"the servers quantise what they load (--sglang-quantization {quantization}).": quantization is not None,
            "adapters are sent, not the weights that they are added to.": getattr(args, "lora_rank", 0),
        }
        if reason := next((reason for reason, there in reasons.items() if there), ""):
            self._mode = "off"
            if getattr(args, "rank", 0) == 0:
                logger.info("weight updates are not verified: %s", reason)
            return
        for kind, method in found.items():
            wrap_once(kind, "update_weights", self._verifying)
            wrap_once(kind, method, self._digesting)
        wrap_once(_TRAIN_DUMPS[self.host], "save_debug_train_data", self._signing)

    def _digesting(self, own: Any, updater: Any, named_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._sent, SentWeights):
            # A generator is read once, here; lists are cleared by the host, and go on as they are.
            if not isinstance(named_tensors, Sequence):
                named_tensors = [*named_tensors]
            try:
                self._sent.add(named_tensors)
            except Exception as error:  # a comparison must not stop what it compares
                self._sent = f"{type(error).__name__}: {error}"
        return own(updater, named_tensors, *args, **kwargs)

    def _verifying(self, own: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Collectives: one SUM of five numbers, and those of `_sends` and `_verdict` where updates are compared. Raises
        WeightUpdateError, on all ranks, where a server holds other weights than were sent."""
        self.fingerprint = None
        group = import_module(f"{self.host}.utils.distributed_utils").get_gloo_group()
        change = self._change(updater).cpu()
        dist.all_reduce(change, group=group)
        if (delivered := of_sums(change)) is not None:
            self.metrics.update({f"{PREFIX}weight_update_{name}": value for name, value in delivered._asdict().items()})
        if self._mode == "off":
            return own(updater, *args, **kwargs)
        # Ranks that send the same as others need not digest it, too; theirs is never asked for.
        self._sent = SentWeights() if _sends(updater, group) else None
        try:
            result = own(updater, *args, **kwargs)
        finally:
            sent, self._sent = self._sent, None
        verdict, first = _verdict(updater, sent, group), dist.get_rank() == 0
        self.fingerprint, self.version = verdict.fingerprint, str(getattr(updater, "weight_version", "")) or None
        if verdict.reason and first and verdict.reason not in self._said:
            self._said.add(verdict.reason)
            what = "weight updates are not" if verdict.final else "not all of the weight update was"
            logger.log(logging.INFO if verdict.final else logging.WARNING, "%s verified: %s", what, verdict.reason)
        if verdict.final:
            self._mode = "off"
        if verdict.faults:
            message = f"after the weight update {' '.join(verdict.faults)} {_TURN_OFF}"
            if self._mode == "error":
                raise WeightUpdateError(message)
            if first:
                logger.warning("%s", message)
        return result

    def _change(self, updater: Any) -> Tensor:
        """[5] `sums` of this rank's matrices since the last update: of some elements of megatron's float32 masters
        (`main_param`), sharded or not. Zeros where there is nothing to compare. No host sync."""
        # What is offloaded may not be read: its memory is given back while the servers take the weights.
        offloaded = getattr(getattr(updater, "args", None), "offload_train", False)
        chunks = () if offloaded else getattr(updater, "model", ())
        matrices = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.dim() > 1]
        pairs = [(matrix.dtype, getattr(matrix, "main_param", None)) for matrix in matrices]
        found = [(kind, main) for kind, main in pairs if main is not None and main.dtype == torch.float32 != kind]
        before, self._before = self._before, [sampled(master, _SAMPLED).clone() for _, master in found]
        total = torch.zeros(5, dtype=torch.float64)
        for (dtype, master), old, new in zip(found, before, self._before, strict=False):
            if len(new):
                total = total.to(new.device) + sums(old, new, dtype, master.numel() / len(new))
        return total

    def _signing(self, own: Any, args: Any, *, rollout_data: dict[str, Any], **rest: Any) -> Any:
        """The host's dump of what it trained on, each sample with the fingerprint of the weights it had then."""
        if self.fingerprint is not None:
            told = {"weight_fingerprint": self.fingerprint, "trainer_weight_version": self.version}
            count = len(rollout_data["response_lengths"])
            rollout_data = {**rollout_data, **{name: [value] * count for name, value in told.items() if value}}
        self.fingerprint = None  # trained on since
        return own(args, rollout_data=rollout_data, **rest)


def _sends(updater: Any, group: Any) -> bool:
    """Whether this rank's tensors are among those to compare. Collectives: one MIN where servers are colocated.

    Over a process group each pipeline stage's source sends its own, and other ranks nothing. To colocated servers every
    rank sends, those of one server together the whole model: the first server's ranks stand for all.
    """
    if not hasattr(updater, "_ipc_gather_src"):
        return True
    source = _NO_GROUP if updater._ipc_gather_src is None else updater._ipc_gather_src
    first = torch.tensor(source)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    if int(first) == _NO_GROUP:
        return getattr(updater, "_is_distributed_src_rank", False)
    return source == int(first)


def _verdict(updater: Any, sent: SentWeights | str | None, group: Any) -> Verdict:
    """Rank 0's verdict, on every rank. Collectives: one gather and one broadcast of objects."""
    first = dist.get_rank() == 0
    parts: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(sent, parts, dst=0, group=group)
    verdict: list[Verdict] = [Verdict()]
    if parts is not None:
        try:
            verdict = [_compared(updater, parts)]
        except Exception as error:  # whatever it is: the other ranks wait
            verdict = [Verdict(reason=f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(verdict, src=0, group=group)
    return verdict[0]


def _compared(updater: Any, parts: Sequence[SentWeights | str | None]) -> Verdict:
    sent = SentWeights()
    for part in parts:
        if isinstance(part, str):
            return Verdict(reason=part)
        sent.update(part or {})
    if (quantization := getattr(updater, "quantization_config", None)) is not None:
        method = quantization.get("quant_method", quantization)
        return Verdict(reason=f"the checkpoint is quantised ({method}), and servers repack such weights.", final=True)
    if not sent:
        return Verdict(reason="no tensor was seen on its way.", final=True)
    replies: list[list[Mapping[str, Any]]] = []
    engines = [*updater.rollout_engines]
    if getattr(updater, "use_distribute", False):
        engines += updater.distributed_rollout_engines
    for _ in range(STAGES_S):
        replies = [states_of(reply) for reply in _ask(engines)]
        if settled(info for reply in replies for info in reply):
            break
        time.sleep(1.0)
    told, silent = [info for reply in replies for info in reply], sum(not reply for reply in replies)
    missing = "tell nothing of their weights: is mismatch_plugin installed there, with SGLang 0.5.21 or newer?"
    reason = f"{silent} of {len(replies)} servers {missing}"
    if not told:
        return Verdict(reason=reason, final=True)
    found = [(info.get("server"), sent.compare(info)) for info in told]
    faults = [f"{server}: {problem}" for server, comparison in found for problem in comparison.problems]
    notes = [f"{server}: {note}" for server, comparison in found for note in comparison.notes]
    fingerprints = {info.get("fingerprint") for info in told}
    agreed = len(fingerprints) == 1 and all(comparison.complete for _, comparison in found)
    return Verdict(faults, fingerprints.pop() if agreed else None, " ".join(notes + [reason] * bool(silent)))


def _ask(engines: Sequence[Any]) -> list[Any]:
    """/server_info of each engine: miles's actors hand it out, slime's tell their address."""
    ray = import_module("ray")
    if all(hasattr(engine, "get_server_info") for engine in engines):
        return ray.get([engine.get_server_info.remote() for engine in engines])
    urls = ray.get([engine.get_url.remote() for engine in engines])
    opener = build_opener(ProxyHandler({}))  # servers of this cluster: no proxy
    found = []
    for url in filter(None, urls):
        with opener.open(f"{url}/server_info", timeout=_TIMEOUT) as reply:
            found.append(json.load(reply))
    return found

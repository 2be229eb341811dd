"""What `hooks/megatron_core/test_adapter.py` runs on every rank: one parallel layout, many configurations of the hook.

Importing this module imports no megatron-core; running `run_layout` does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.data.sample import Sample
from mismatch_plugin.data.versions import version_of_tokens
from mismatch_plugin.hooks.megatron_core.batch import MegatronBatch, make_batch

VOCAB = 61
TRAINER_VERSION = 5
VERSIONS = {str(number): number for number in range(10)}


@dataclass(frozen=True)
class Run:
    """One configuration of the hook in a layout; `microbatches` of each data-parallel rank."""

    config: dict[str, Any]
    microbatches: int = 1
    form: Any = "thd"
    samples: tuple[Sample, ...] = ()
    """Instead of the layout's."""
    start: bool = True
    temperature: float = 1.0
    forward_only: bool = False
    policy_loss: bool = True
    """False: what megatron's own losses (MoE, MTP) give without any other."""


@dataclass(frozen=True)
class Layout:
    """A parallel layout and what runs in it, on one model."""

    name: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    runs: tuple[Run, ...] = ()

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        return self.name


@dataclass
class Outcome:
    """metrics and losses on the last pipeline stage (else empty); gradients on rank 0 only."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    reports: list[dict[str, float]]
    error: str = ""


def model_settings(layout: Layout) -> Any:
    from tests import megatron_cpu as megatron

    defaults = {"vocab": VOCAB, "hidden": 32, "ffn": 48, "dtype": "float64", "norm_jitter": 0.1, "init_std": 0.15}
    return megatron.ModelSettings(**{**defaults, **layout.settings})


def micro_batches(
    layout: Layout, run: Run, groups: Any, settings: Any, dp_rank: int, dp_size: int
) -> list[MegatronBatch]:
    """This rank's micro-batches: every sample goes to one data-parallel rank, in an order that all layouts share."""
    mine = (run.samples or layout.samples)[dp_rank::dp_size]
    share = max(1, -(-len(mine) // run.microbatches))
    parts = [mine[i : i + share] for i in range(0, len(mine), share)]
    align = layout.tp if settings.sequence_parallel else 1
    return [
        make_batch(
            part,
            groups,
            layout=settings.cp_layout if layout.cp > 1 else "none",
            form=run.form,
            align=align,
            padding_id=VOCAB - 1,
            dtype=getattr(torch, settings.dtype),
            trainer_version=TRAINER_VERSION,
        )
        for part in parts
    ]


def run_layout(layout: Layout) -> list[Outcome]:
    """Every configuration on the same initial weights: loss, gradients and metrics of one step."""
    from megatron.core import parallel_state

    from mismatch_plugin.hooks.megatron_core import MegatronLoss
    from mismatch_plugin.parallel.groups import ParallelGroups
    from tests import megatron_cpu as megatron

    settings = model_settings(layout)
    megatron.initialize_parallel(layout.tp, layout.pp, layout.cp, settings.virtual_stages)
    model = megatron.build_model(settings)
    groups = ParallelGroups.from_megatron()
    finalize = model[0].config.finalize_model_grads_func
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    outcomes = []
    for run in layout.runs:
        model[0].config.finalize_model_grads_func = finalize
        config = mp.MismatchConfig.model_validate(copy.deepcopy(run.config), context={"by_hand": set()})
        try:
            batches = micro_batches(layout, run, groups, settings, dp_rank, dp_size)
            data: Any = [iter(batches) for _ in model] if len(model) > 1 else iter(batches)
            if not run.policy_loss:
                megatron.run_step(model, megatrons_losses, data, len(batches))
                outcomes.append(Outcome({}, megatron.gather_gradients(model), []))
                continue
            hook = MegatronLoss(config, model[0].config, groups, vocab_size=VOCAB, temperature=run.temperature)
            if run.start:
                hook.start(batches)
            stored = megatron.run_step(model, hook.forward_step, data, len(batches), forward_only=run.forward_only)
            metrics = hook.metrics()
        except (ValueError, mp.GateError) as error:
            outcomes.append(Outcome({}, {}, [], f"{type(error).__name__}: {error}"))
            continue
        gradients = megatron.gather_gradients(model)
        first = torch.distributed.get_rank() == 0
        reports = [{name: float(value) for name, value in report.items()} for report in stored]
        outcomes.append(Outcome(metrics, gradients if first else {}, reports))
    return outcomes


def megatrons_losses(data: Any, model: Any) -> tuple[Tensor, Any]:
    """A forward step as megatron's pretraining has it, with a main loss of 0: MTP over the trained tokens, else MoE.

    The integer counts what megatron expects: the tokens MTP is averaged over, or those that the router was fed.
    """
    from megatron.core import parallel_state

    batch = next(data)
    config = model.module.config
    if config.mtp_num_layers is None:
        output = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
        tp = config.tensor_model_parallel_size
        first = parallel_state.get_context_parallel_rank() == 0
        count = batch.tokens.numel() // tp if first else 0
    else:
        labels, mask = torch.zeros_like(batch.tokens).flatten(), torch.zeros(batch.tokens.numel())
        labels[batch.rows] = batch.targets
        mask[batch.rows] = batch.packed.loss_mask.float()
        count = int(mask.sum())
        labels, mask = labels.view_as(batch.tokens), mask.view_as(batch.tokens)
        inputs = {"labels": labels, "loss_mask": mask, "packed_seq_params": batch.padded_seq_params}
        output = model(batch.tokens, batch.position_ids, None, **inputs)

    def loss_func(output: Tensor) -> tuple[Any, ...]:
        loss = 0.0 * output.sum()
        return (loss, torch.tensor(count, dtype=torch.int), {}) if config.calculate_per_token_loss else (loss, {})

    return output, loss_func


def plain_log_probs(gpt: Any, sample: Sample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log π, entropy) of every response token by `log_softmax` over the real vocabulary or the kept ids, with
    gradient."""
    ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()])
    logits = gpt(ids[None], torch.arange(len(ids))[None], None)
    start = len(sample.prompt_ids)
    rows = logits[0, start - 1 : len(ids) - 1, :VOCAB] / temperature
    dropped = torch.zeros_like(rows, dtype=torch.bool)
    for row, kept in zip(dropped, sample.kept_ids or (), strict=False):
        row[[i for i in range(VOCAB) if kept and i not in kept]] = True
    rows = rows.masked_fill(dropped, -1e9).log_softmax(-1)
    return rows.gather(1, ids[start:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def initial_log_probs(layout: Layout) -> list[Tensor]:
    """log π of every response token under the initial weights, in one process."""
    from tests import megatron_cpu as megatron

    megatron.initialize_parallel()
    gpt = megatron.build_model(model_settings(layout))[0]
    with torch.no_grad():
        return [plain_log_probs(gpt, sample)[0].clone() for sample in layout.samples]


def run_plainly(layout: Layout) -> list[Outcome]:
    """The reference: sample by sample through the model, one `policy_loss` on the whole batch, autograd. No hook."""
    from tests import megatron_cpu as megatron

    megatron.initialize_parallel()
    chunk = megatron.build_model(model_settings(layout))[0]
    outcomes = []
    for run in layout.runs:
        samples = run.samples or layout.samples
        config = mp.MismatchConfig.model_validate(copy.deepcopy(run.config), context={"by_hand": set()})
        chunk.zero_grad_buffer()
        pairs = [plain_log_probs(chunk, sample, run.temperature) for sample in samples]
        keep_entropy = config.terms.entropy_coef or config.metrics == "full"

        def column(name: str, samples: Any = samples) -> Any:
            return [torch.as_tensor(getattr(s, name), dtype=torch.float64) for s in samples]

        packed = mp.PackedSequences.from_lists(
            rollout_log_probs=column("rollout_log_probs"),
            loss_masks=[s.loss_mask for s in samples],
            advantages=column("advantages"),
            old_log_probs=column("train_log_probs") if len(samples[0].train_log_probs) else None,
            ref_log_probs=column("ref_log_probs"),
            weight_versions=[torch.from_numpy(version_of_tokens(s.weight_versions, VERSIONS, len(s))) for s in samples],
            trainer_version=TRAINER_VERSION,
            entropy=[entropy for _, entropy in pairs] if keep_entropy else None,
        )
        result = mp.policy_loss(torch.cat([log_probs for log_probs, _ in pairs]), packed, config)
        result.loss.backward()
        outcomes.append(Outcome(result.statistics.metrics(), megatron.gather_gradients([chunk]), []))
    return outcomes

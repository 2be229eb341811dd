"""The correction stage under torch.compile: one graph for all sizes, no graph break, the eager numbers, few kernels."""

from __future__ import annotations

import copy
import functools
import math
import shutil
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import mismatch_plugin as mp
from mismatch_plugin.core.compiled import CompiledPolicyLoss, compile_correct, compile_policy_loss
from mismatch_plugin.parallel.context import shard
from mismatch_plugin.parallel.groups import ParallelGroups
from tests.distributed.launch import launch
from tests.ragged import equal

SEQUENCE = {
    "use_tis": True,
    "tis": {"level": "sequence"},
    "rs": {"criteria": ["sequence_mean:ratio:0.99:1.01"], "veto_threshold": 1e-4},
}
TOKEN = {
    "use_tis": True,
    "tis": {"level": "token", "mode": "mask", "batch_normalize": True},
    "rs": {"criteria": ["token:k3:0.5", "sequence_max:k2:0.5", "sequence_mean:k3:0.1"]},
    "metrics": "full",
    "aggregation": "seq-mean-token-mean",
    "terms": {"entropy_coef": 0.01, "kl_coef": 0.1},
}
BYPASS = {
    "use_rollout_log_probs": True,
    "ppo": {"dual_clip": 3.0},
    "rs": {"criteria": ["token:binary_kl:0.5"]},
    "rollout_log_prob_policy": "drop-sequence",
}
REINFORCE = {**SEQUENCE, "use_rollout_log_probs": True, "aggregation": "seq-mean-token-sum", "length_norm": 7.0}
SIZES = ((5, 30), (17, 9), (1, 40), (64, 25), (1, 1), (2, 1), (0, 0), (3, 200))
"""(sequences, longest): among them one sequence, one token, and nothing at all."""

pytestmark = pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def batch(sequences: int, longest: int, seed: int = 0) -> mp.PackedSequences:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(min(1, longest), longest + 1, (sequences,), generator=generator).tolist()
    tokens = sum(lengths)
    rollout = -3 * torch.rand(tokens, generator=generator) - 0.01
    train = rollout + 0.1 * torch.randn(tokens, generator=generator)
    if tokens > 100:
        rollout[7] = math.nan
    return mp.PackedSequences(
        loss_mask=torch.rand(tokens, generator=generator) < 0.8,
        lengths=tuple(lengths),
        rollout_log_probs=rollout,
        old_log_probs=train,
        ref_log_probs=train - 0.05 * torch.rand(tokens, generator=generator),
        advantages=torch.randn(tokens, generator=generator),
        entropy=torch.rand(tokens, generator=generator),
        weight_versions=torch.randint(0, 3, (tokens,), generator=generator),
    )


def current(packed: mp.PackedSequences) -> Tensor:
    assert packed.old_log_probs is not None
    return (packed.old_log_probs + 0.05 * torch.sin(torch.arange(len(packed.loss_mask)))).requires_grad_()


def compare(result: mp.PolicyLoss, expected: mp.PolicyLoss) -> None:
    """Everything a caller can see, but for rounding."""
    mine, theirs = result.correction, expected.correction
    equal([mine.keep, mine.kept_N, mine.tokens_N], [theirs.keep, theirs.kept_N, theirs.tokens_N])
    equal([mine.weights, result.loss_sum, *result.terms.values()],
          [theirs.weights, expected.loss_sum, *expected.terms.values()], 1e-5)  # fmt: skip
    equal([result.denominator, result.terms_denominator], [expected.denominator, expected.terms_denominator])
    assert list(result.terms) == list(expected.terms)
    for a, b in ((result.statistics, expected.statistics), (mine.statistics, theirs.statistics)):
        assert (a.sum_names, a.maximum_names) == (b.sum_names, b.maximum_names)
        equal([a.sums, a.maxima], [b.sums, b.maxima], 1e-5)
    for name in ("mask", "padding", "train", "rollout", "log_ratio", "code"):
        a, b = getattr(mine.tokens, name), getattr(theirs.tokens, name)
        assert a is b is None or torch.equal(a, b)


def counting(backend: Any = "aot_eager") -> Any:
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


@pytest.mark.parametrize("fields", [SEQUENCE, TOKEN, BYPASS, REINFORCE])
def test_one_graph_for_all_sizes_gives_the_eager_numbers(fields: dict[str, Any]) -> None:
    config = mp.MismatchConfig(**{"rollout_log_prob_policy": "neutral", **fields})
    counter = counting()
    compiled = compile_policy_loss(config, backend=counter)
    for seed, (sequences, longest) in enumerate(SIZES):
        packed = batch(sequences, longest, seed)
        first, second = current(packed), current(packed)
        result, expected = compiled(first, packed), mp.policy_loss(second, packed, config)
        compare(result, expected)
        gradients = [torch.autograd.grad(r.loss, x)[0] for r, x in ((result, first), (expected, second))]
        equal(gradients[:1], gradients[1:], 1e-6)
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_correct_compiles_to_one_graph() -> None:
    config = mp.MismatchConfig(**SEQUENCE, rollout_log_prob_policy="drop-token")
    counter = counting()
    compiled = compile_correct(config, backend=counter)
    for seed, (sequences, longest) in enumerate(SIZES):
        packed = batch(sequences, longest, seed)
        result, expected = compiled(packed), mp.correct(packed, config)
        equal([result.weights, result.statistics.sums], [expected.weights, expected.statistics.sums], 1e-5)
        equal([result.keep, result.kept_N], [expected.keep, expected.kept_N])
    assert counter.frame_count == 1


def test_the_counter_sees_recompilations() -> None:
    """The gate itself must be able to fail: with fixed sizes every size is a graph."""
    config, counter = mp.MismatchConfig(metrics="off"), counting()
    compiled = compile_policy_loss(config, backend=counter, dynamic=False)
    for sequences in (3, 4):
        packed = batch(sequences, 9, sequences)
        compiled(current(packed), packed)
    assert counter.frame_count == 2


def test_many_configurations_do_not_exhaust_the_compiler() -> None:
    packed = batch(4, 9)
    with torch._dynamo.config.patch(recompile_limit=2):
        for epsilon in (0.1, 0.2, 0.3, 0.4):
            config = mp.MismatchConfig(metrics="off", ppo=mp.PPOClip(eps_clip_low=epsilon))
            compare(compile_policy_loss(config, backend="eager")(current(packed), packed),
                    mp.policy_loss(current(packed), packed, config))  # fmt: skip


def test_dtypes_and_gradients_are_graphs_of_their_own() -> None:
    """Else torch would refuse the next one after so many, as its recompilations."""
    config, packed, counter = mp.MismatchConfig(metrics="off"), batch(4, 9), counting("eager")
    compiled = compile_policy_loss(config, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                first, second = (current(packed).detach().to(dtype).requires_grad_() for _ in range(2))
                compare(compiled(first, packed), mp.policy_loss(second, packed, config))
            with torch.no_grad():
                leaf = current(packed)
                equal([compiled(leaf, packed).loss_sum], [mp.policy_loss(leaf, packed, config).loss_sum], 1e-6)
    assert counter.frame_count == 4


@pytest.mark.parametrize("scope", ["step", "micro_batch"])
def test_a_factor_of_the_step(scope: str) -> None:
    fields = {"use_tis": True, "tis": {"batch_normalize": True, "batch_normalize_scope": scope}}
    config = mp.MismatchConfig(**fields)
    packed, counter = batch(4, 20), counting("eager")
    compiled = compile_policy_loss(config, backend=counter)
    for factor in (torch.tensor(0.9, dtype=torch.float64), 1.1):
        compare(
            compiled(current(packed), packed, factor), mp.policy_loss(current(packed), packed, config, None, factor)
        )
    compare(compiled(current(packed), packed), mp.policy_loss(current(packed), packed, config))
    assert counter.frame_count == 2  # with and without a factor; another number is no other graph


def test_errors_are_those_of_the_eager_loss() -> None:
    compiled = compile_policy_loss(mp.MismatchConfig(terms=mp.Terms(entropy_coef=0.1)), backend="eager")
    packed = batch(3, 20)
    with pytest.raises(ValueError, match="advantages is missing"):
        compiled(current(packed), packed.replace(advantages=None))
    with pytest.raises(ValueError, match="entropy is missing"):
        compiled(current(packed), packed.replace(entropy=None))
    with pytest.raises(ValueError, match="log_probs has shape"):
        compiled(current(packed)[1:], packed)
    compiled = compile_policy_loss(mp.MismatchConfig(), backend="eager")
    bad = mp.PackedSequences.from_lists(loss_masks=[[1]], rollout_log_probs=[[1.0]], advantages=[1.0])
    with pytest.raises(mp.InvalidLogProbError, match="is above 0"):
        compiled(torch.zeros(1), bad)


def test_an_invalid_log_prob_is_named_by_the_metrics() -> None:
    packed = batch(30, 40)
    assert packed.rollout_log_probs is not None and packed.rollout_log_probs[7].isnan()
    mask = packed.loss_mask.clone()
    mask[7] = True
    packed = packed.replace(loss_mask=mask)
    result = compile_policy_loss(mp.MismatchConfig(), backend="eager")(current(packed), packed)
    place = f"sequence {packed.sequence_index[7]}, position {packed.response_positions[7]}"
    with pytest.raises(mp.InvalidLogProbError, match=f"{place} is missing or NaN"):
        result.statistics.metrics()


def _on_two_ranks(fields: dict[str, Any]) -> int:
    config, groups = mp.MismatchConfig(**fields), ParallelGroups(cp=torch.distributed.group.WORLD)
    counter = counting()
    compiled = compile_policy_loss(config, groups, backend=counter)
    for seed, (sequences, longest) in enumerate(((5, 30), (9, 12), (1, 3), (2, 1))):
        packed = shard(batch(sequences, longest, seed), "zigzag", 2, groups.cp_rank)
        compare(compiled(current(packed), packed), mp.policy_loss(current(packed), packed, config, groups))
    return counter.frame_count


def test_context_parallel_collectives_are_in_the_graph() -> None:
    fields = {**SEQUENCE, "rs": {"criteria": ["sequence_max:k2:0.5"]}, "rollout_log_prob_policy": "neutral"}
    assert launch(_on_two_ranks, [fields], world_size=2, timeout=240) == [[1, 1]]


def test_a_recorded_step_replays_on_other_data() -> None:
    """What a CUDA graph asks for: for one pair of sizes the same kernels, and no value of the data fixed in them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    config = mp.MismatchConfig(**SEQUENCE)
    first, second = batch(6, 30, 1), batch(6, 30, 1)
    names = ("loss_mask", "rollout_log_probs", "old_log_probs", "advantages")

    def step(*tensors: Tensor) -> list[Tensor]:
        packed = first.replace(**dict(zip(names, tensors, strict=True)))
        result = mp.policy_loss(tensors[2].detach(), packed, config)
        return [result.loss_sum, result.correction.weights, result.correction.keep, result.statistics.sums]

    def tensors(packed: mp.PackedSequences) -> list[Tensor]:
        return [getattr(packed, name) for name in names]

    first.prepared()
    recorded = make_fx(step)(*tensors(first))
    second = second.replace(
        loss_mask=~second.loss_mask, **{name: getattr(second, name).flip(0) for name in names if name != "loss_mask"}
    )
    equal(recorded(*tensors(second)), step(*tensors(second)), 1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_inside_a_cuda_graph() -> None:
    config = mp.MismatchConfig(**SEQUENCE)
    packed, other = (batch(6, 30, 1).to("cuda").prepared() for _ in range(2))
    mp.correct(packed, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mp.correct(packed, config)
    assert packed.rollout_log_probs is not None and other.rollout_log_probs is not None
    packed.rollout_log_probs.copy_(other.rollout_log_probs.flip(0))
    graph.replay()
    expected = mp.correct(packed, config)
    equal([result.weights, result.statistics.sums], [expected.weights, expected.statistics.sums], 1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ with g++ on CPU")
def test_inductor_on_cpu() -> None:
    config = mp.MismatchConfig(**SEQUENCE, rollout_log_prob_policy="neutral")
    counter = counting("inductor")
    compiled = compile_policy_loss(config, backend=counter)
    for seed, (sequences, longest) in enumerate(((5, 30), (64, 400), (1, 1))):
        packed = batch(sequences, longest, seed)
        result, expected = compiled(current(packed), packed), mp.policy_loss(current(packed), packed, config)
        compare(result, expected)
    assert counter.frame_count == 1


def test_fused_kernels() -> None:
    """At most 20 for the loss and its backward pass, as inductor plans them for Triton on a GPU of 132 processors.

    The plan is made here; nothing of it is run, and nothing is said of its speed. What runs is the graph it is made of.
    """
    pytest.importorskip("triton", reason="inductor writes Triton kernels only where triton can be imported")
    plan = FusionPlan()
    packed = batch(512, 400)
    loss = compile_policy_loss(mp.MismatchConfig(**SEQUENCE), backend=plan.backend)
    _check_plan(plan, loss, packed)
    assert 10 <= plan.kernels <= 20  # none at all would mean that they are called otherwise


def _check_plan(plan: FusionPlan, loss: CompiledPolicyLoss, packed: mp.PackedSequences) -> None:
    log_probs = current(packed)
    loss(log_probs, packed).loss_sum.backward()
    assert log_probs.grad is not None and len(plan.sources) == 2  # forward and backward


class FusionPlan:
    """A backend that lets inductor write the Triton code of every graph, counts its launches, and runs the graph."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        from torch._inductor.compile_fx import compile_fx

        self.backend = functools.partial(compile_fx, inner_compile=self.plan)

    @property
    def kernels(self) -> int:
        """Launches of Triton kernels and of kernels that inductor does not write itself."""
        bodies = [source.split("def call(")[-1] for source in self.sources]
        return sum(body.count(".run(") + body.count("= torch.ops.") + body.count("extern_kernels.") for body in bodies)

    def plan(self, graph: Any, inputs: Any, **options: Any) -> Any:
        import triton
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering
        from torch._inductor.runtime.hints import DeviceProperties
        from triton.backends.compiler import GPUTarget

        plain, write = copy.deepcopy(graph), GraphLowering.codegen
        device = DeviceProperties(
            type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
        )  # fmt: skip
        driver = mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32))

        def codegen(lowering: Any) -> Any:
            result = write(lowering)
            self.sources.append(result[0].value)
            return result

        with (
            mock.patch.object(triton.runtime.driver, "_active", driver),
            mock.patch.object(DeviceProperties, "create", staticmethod(lambda _: device)),
            mock.patch.object(AsyncCompile, "triton", return_value=None),
            mock.patch.object(GraphLowering, "codegen", codegen),
            config.patch(cpu_backend="triton", fx_graph_cache=False),
        ):
            compile_fx_inner(graph, inputs, **options)
        return make_boxed_func(plain.forward)

"""Weight updates that did not arrive: what the server's checksums tell, by the rule in `rollout/verification.py`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_plugin.rollout.checksums import Sent
from mismatch_plugin.rollout.client import SGLangClient, WeightUpdateError
from mismatch_plugin.rollout.transport import Retries
from mismatch_plugin.rollout.verification import UpdateVerifier, fault
from tests.fixtures.faulty_server import FaultyServer, Reply, call
from tests.fixtures.weights_server import WeightsServer, checkpoint, fused

BASE, NEW, NEWER = checkpoint(0), checkpoint(1), checkpoint(2)
COUNT = 3 * (4 + 1) + 3  # a layer: qkv, o, gate_up, down and a norm; embedding, last norm, head


def update(served: WeightsServer, *states: Mapping[str, Tensor], every: int = 1, **options: Any) -> list[str]:
    """Send one state after another, as versions 1, 2, …, with one client; returns the paths that were asked for."""

    async def run(client: SGLangClient) -> None:
        for version, state in enumerate(states, start=1):
            await client.update_weights_from_tensors(state, version, **options)

    with FaultyServer(served) as server:
        call(server, run, verify_updates_every=every)
        return server.paths()


def layer(state: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if f"layers.{number}." in name}


def nudged(state: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """Every entry moved as an optimizer moves it: by the same small amount up or down."""
    draw = torch.Generator().manual_seed(9)
    return {name: t + by * (2 * torch.randint(0, 2, t.shape, generator=draw) - 1) for name, t in state.items()}


def test_a_whole_update_passes_and_its_cost_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mismatch_plugin"):
        paths = update(WeightsServer(BASE), NEW)
    order = [path for path in paths if not path.endswith("_info")]
    update_paths = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    assert order == ["/weights_checker", *update_paths, "/weights_checker"]
    (line,) = caplog.messages
    # The four norms are ones before and after.
    assert line.startswith(f"version 1 verified on the server: {COUNT - 4} of {COUNT} tensors changed; ")
    assert line.endswith(" s")


def test_names_that_the_server_does_not_have_are_an_error() -> None:
    wrong = {name.replace("model.", "decoder.").replace("lm_", "x."): tensor for name, tensor in NEW.items()}
    says = (
        rf"version 1, but no tensor changed \({COUNT} compared\). {len(NEW)} of {len(NEW)} names that were sent belong "
        r"to no tensor of the server and were skipped: decoder.embed_tokens.weight, .* and \d+ more; "
        r"it has model.embed_tokens.weight, "
    )
    with pytest.raises(WeightUpdateError, match=says):
        update(WeightsServer(BASE), wrong)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_names_of_a_trainers_wrapper_are_refused_before_they_are_sent(prefix: str) -> None:
    wrong = {prefix + name: tensor for name, tensor in NEW.items()}
    served = WeightsServer(BASE)
    with pytest.raises(WeightUpdateError, match=f"no weights were sent: all {len(NEW)} names begin with '{prefix}', "):
        update(served, wrong)
    assert served.version == "default"
    with pytest.raises(WeightUpdateError, match="but no tensor changed"):
        update(served, wrong, expect_changed="some")


def test_one_layer_alone_is_an_error_that_names_the_others() -> None:
    says = (
        rf"10 of {COUNT} tensors should have changed and did not: model.embed_tokens.weight, "
        r"model.layers.1.self_attn.qkv_proj.weight, .* and 6 more. 4 changed: model.layers.0.self_attn.qkv_proj.weight"
    )
    with pytest.raises(WeightUpdateError, match=says):
        update(WeightsServer(BASE), layer(NEW, 0))


def test_one_layer_alone_is_an_error_after_whole_updates_too() -> None:
    with pytest.raises(WeightUpdateError, match="update to version 3, but 10 of"):
        update(WeightsServer(BASE), NEW, NEWER, layer(BASE, 1))


def test_a_loader_that_drops_a_tensor_is_noticed_even_for_a_vector() -> None:
    served = WeightsServer(BASE)
    served.skip = lambda name: served.version == "1" and name == "model.norm.weight"
    moved = {name: tensor + 1 for name, tensor in NEW.items()}
    with pytest.raises(WeightUpdateError, match=r"1 of 18 tensors should .* not: model.norm.weight. 17 changed"):
        update(served, NEW, moved)


def test_a_part_of_a_fused_tensor_is_expected_to_change_it() -> None:
    moved = NEW | {"model.layers.1.self_attn.k_proj.weight": torch.zeros(4, 4)}
    update(WeightsServer(BASE), NEW, moved)
    served = WeightsServer(BASE)
    served.skip = lambda name: served.version == "1" and "k_proj" in name
    with pytest.raises(WeightUpdateError, match=r"version 2, but no tensor changed .* The names fit"):
        update(served, NEW, moved)


def test_the_same_weights_again_from_a_client_that_knows_nothing_are_an_error_unless_meant() -> None:
    with pytest.raises(WeightUpdateError, match=r"had these values already.*expect_changed='any'"):
        update(WeightsServer(NEW), NEW)
    paths = update(WeightsServer(NEW), NEW, expect_changed="any")
    assert "/weights_checker" not in paths


def test_the_same_weights_again_from_the_same_client_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    # A step in which everything was rejected moves nothing: that is no reason to stop the training.
    with caplog.at_level(logging.WARNING, "mismatch_plugin"):
        update(WeightsServer(BASE), NEW, NEW)
    (line,) = caplog.messages
    assert line.startswith("version 2 has the same weights as the update before it")


def test_a_first_update_that_bfloat16_rounds_away_in_the_norms_passes() -> None:
    # 1 ± 1e-6 is 1 in bfloat16, and so are most entries of a matrix; the small ones are not.
    small = {name: tensor * 1e-5 if tensor.dim() > 1 else tensor for name, tensor in BASE.items()}
    update(WeightsServer(small, dtype="bfloat16"), nudged(small, 1e-6))


def test_a_matrix_of_which_bfloat16_rounds_every_entry_away_passes_once_its_values_are_known() -> None:
    large = {name: torch.where(tensor < 0, -1.0, 1.0) for name, tensor in NEW.items()}
    step = nudged(large, 1e-6)
    step["lm_head.weight"] = -step["lm_head.weight"]
    served = WeightsServer(BASE, dtype="bfloat16")
    update(served, large, step)
    with pytest.raises(WeightUpdateError, match=f"13 of {COUNT} tensors should have changed"):
        update(served, nudged(large, 1e-6) | {"lm_head.weight": large["lm_head.weight"] * 2})  # a client that knows not


def test_a_partial_update_that_is_meant_passes() -> None:
    update(WeightsServer(BASE), layer(NEW, 0), expect_changed="some")
    update(WeightsServer(BASE), layer(NEW, 0), expect_changed=["model.layers.0.*"])
    update(WeightsServer(BASE), layer(NEW, 0), expect_changed={"model.layers.0.self_attn.q_proj.weight"})
    with pytest.raises(WeightUpdateError, match="no tensor changed"):
        update(WeightsServer(BASE), {"adapter": torch.ones(2)}, expect_changed="some")


def test_tensors_named_that_did_not_change_are_an_error() -> None:
    with pytest.raises(WeightUpdateError, match=r"4 of 10 tensors should have changed and did not: model.layers.1"):
        update(WeightsServer(BASE), layer(NEW, 0), expect_changed=["model.layers.0.*", "model.layers.1.*"])
    with pytest.raises(WeightUpdateError, match=r"no tensor changed of those named \(5 compared\)"):
        update(WeightsServer(BASE), layer(NEW, 0), expect_changed=["model.layers.1.*"])


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        ("model.norm.weight", "expect_changed='model.norm.weight' is unknown: choose one of all, some, any"),
        ([], "holds no names"),
        (["model.layers.7.*"], r"'model.layers.7.\*' is no tensor of the server, which has model.embed_tokens.weight"),
    ],
)
def test_expectations_that_mean_nothing_are_refused_before_anything_is_sent(expect: Any, says: str) -> None:
    served = WeightsServer(BASE)
    with pytest.raises(ValueError, match=says):
        update(served, NEW, expect_changed=expect)
    assert served.version == "default"


def test_updates_from_disk_are_verified() -> None:
    async def run(client: SGLangClient) -> None:
        await client.update_weights_from_disk("whole", 1)
        with pytest.raises(WeightUpdateError, match=r"version 2, but no tensor changed .* The checkpoint holds"):
            await client.update_weights_from_disk("whole", 2)
        await client.update_weights_from_disk("whole", 3, expect_changed="any")
        with pytest.raises(WeightUpdateError, match="version 4, but 10 of"):
            await client.update_weights_from_disk("part", 4)

    served = WeightsServer(BASE)
    served.disk = {"whole": NEW, "part": layer(NEWER, 2)}
    call(served, run)


def test_after_an_update_from_disk_nothing_is_known_of_what_was_sent_before() -> None:
    async def run(client: SGLangClient) -> None:
        await client.update_weights_from_tensors(NEW, 1)
        await client.update_weights_from_disk("newer", 2)
        await client.update_weights_from_tensors(NEW, 3)  # as in version 1, and yet a change

    served = WeightsServer(BASE)
    served.disk = {"newer": NEWER}
    call(served, run)
    assert torch.equal(served.weights["lm_head.weight"], NEW["lm_head.weight"])


@pytest.mark.parametrize(
    "answer",
    [
        Reply({"detail": "Not Found"}, status=404),
        Reply({"success": False, "message": "Unsupported action='checksum'"}, status=400),
        Reply({"success": True, "message": "Success."}),
        Reply({"success": True, "ranks": [{"checksums": {}}]}),
        Reply({"success": True, "ranks": 5}),
        Reply({"success": True, "ranks": [{"checksums": 5}]}),
        Reply({"success": False, "ranks": [{"checksums": fused(BASE)}]}),
        Reply([1]),
    ],
)
def test_a_server_without_checksums_is_updated_and_the_log_says_once_that_nobody_looked(
    answer: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    served = WeightsServer(BASE)
    served.answers["/weights_checker"] = answer
    with caplog.at_level(logging.WARNING, "mismatch_plugin"):
        paths = update(served, NEW, NEWER)
    assert paths.count("/weights_checker") == 1 and served.version == "2"
    (line,) = caplog.messages
    assert line.startswith("weight updates are not verified: the server has no checksums of its weights")


def test_checksums_that_came_before_and_not_after_are_an_error() -> None:
    served = WeightsServer(BASE)
    answers = [Reply({"ranks": [{"checksums": {"a": "0"}}]}), Reply({"success": False, "message": "lost"}, status=400)]
    served.answers["/weights_checker"] = lambda: answers.pop(0)
    with pytest.raises(WeightUpdateError, match=r"whether the weights arrived cannot be told: .*lost"):
        update(served, NEW)


@pytest.mark.parametrize(
    ("every", "verified", "asked"),
    [(0, [], 0), (1, [1, 2, 3, 4], 8), (2, [1, 3], 4), (3, [1, 4], 5), (9, [1], 2)],  # 5: once before version 3
)
def test_only_every_nth_update_is_verified(
    every: int, verified: list[int], asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mismatch_plugin"):
        paths = update(WeightsServer(BASE), NEW, BASE, NEWER, nudged(NEWER, 1e-3), every=every)
    assert paths.count("/weights_checker") == asked
    lines = caplog.messages
    assert [line.split(" verified")[0] for line in lines] == [f"version {number}" for number in verified]


def test_a_server_that_is_gone_is_an_error_and_no_reason_to_update_unseen() -> None:
    served = WeightsServer(BASE)
    served.answers["/weights_checker"] = Reply(cut=3)
    with pytest.raises(WeightUpdateError, match="no weights were sent: "):
        update(served, NEW)
    assert served.version == "default"


@pytest.mark.parametrize("every", [2, 3])
def test_tensors_are_compared_with_the_last_update_whether_it_was_verified_or_not(every: int) -> None:
    # The last is compared with the one before it, which the checksums show to have arrived: only the norm moved since.
    states = [NEW, nudged(NEW, 0.5), NEWER][-every:]
    update(WeightsServer(BASE), *states, NEWER | {"model.norm.weight": torch.zeros(4)}, every=every)


@pytest.mark.parametrize("every", [2, 3])
def test_a_step_that_moves_nothing_after_an_unverified_update_is_a_warning(
    every: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mismatch_plugin"):
        update(WeightsServer(BASE), *[NEW, nudged(NEW, 0.5), NEWER][-every:], NEWER, every=every)
    (line,) = caplog.messages
    assert line.startswith(f"version {every + 1} has the same weights as the update before it")


Step = tuple[Mapping[str, Tensor], str, str | None]
NO = "but no tensor changed"
STORIES: dict[str, tuple[Callable[[str, str], bool], list[Step]]] = {
    "an update that nobody looked at excuses no later one": (
        lambda name, version: True,
        [(NEW, "any", None), (NEW, "all", f"version 2, {NO} .* or takes none"), (NEW, "all", f"version 3, {NO}")],
    ),
    "only what changed counts as arrived where some was enough": (
        lambda name, version: name != "lm_head.weight",
        [(NEW, "some", None), (NEW, "all", f"version 2, {NO}")],
    ),
    "the first update of a run may change nothing, and the next ones are verified": (
        lambda name, version: name == "model.norm.weight" and version == "2",
        [
            (BASE, "any", None),
            (NEW, "all", None),
            ({name: t + 1 for name, t in NEW.items()}, "all", f"1 of {COUNT} tensors should .* not: model.norm.weight"),
        ],
    ),
    "a failed update, or one that nobody looked at, takes no turn": (
        lambda name, version: False,
        [(BASE, "any", None), (layer(NEW, 0), "all", "10 of"), (NEW, "some", None)],
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_is_known_of_the_updates_before(name: str) -> None:
    skip, steps = STORIES[name]
    served = WeightsServer(BASE)
    served.skip = lambda tensor: skip(tensor, served.version)

    async def run(client: SGLangClient) -> None:
        for version, (state, expect, says) in enumerate(steps, start=1):
            with nullcontext() if says is None else pytest.raises(WeightUpdateError, match=says):
                await client.update_weights_from_tensors(state, version, expect_changed=expect)

    with FaultyServer(served) as server:
        call(server, run, verify_updates_every=9 if name.endswith("takes no turn") else 1)
        assert server.paths().count("/weights_checker") == 2 * sum(expect != "any" for _, expect, _ in steps)


def test_a_re_sync_forgets_what_had_arrived() -> None:
    # The server was started anew between version 1 and 2, and takes nothing since.
    async def run(client: SGLangClient) -> None:
        await client.update_weights_from_tensors(NEW, 1)
        served.weights, served.skip = dict(BASE), lambda name: True
        await client.update_weights_from_tensors(NEW, 2, expect_changed="any")
        with pytest.raises(WeightUpdateError, match="version 3, but no tensor changed"):
            await client.update_weights_from_tensors(NEW, 3)

    served = WeightsServer(BASE)
    call(served, run)


@pytest.mark.parametrize("every", [2, 3])
def test_an_update_that_was_lost_unverified_is_found_when_it_is_sent_again(every: int) -> None:
    served = WeightsServer(BASE)
    served.skip = lambda name: served.version in (str(every - 1), str(every))  # the last two are lost
    states = [nudged(BASE, 1.0), nudged(NEW, 0.5), NEW][-every:]
    with pytest.raises(WeightUpdateError, match=f"version {every + 1}, but no tensor changed"):
        update(served, *states, NEW, every=every)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ([{"a": "2", "b": "2"}], "from 2 ranks before it and from 1 after it"),
        ([{"a": "2", "b": "2"}, {"a": "2"}], r"1 tensors have no checksum any more: b \(rank 1\)"),
        ([{"a": "2", "b": "2"}, {"a": "2", "b": "2"}], None),
    ],
)
def test_ranks_and_tensors_that_vanish_are_an_error(after: list[dict[str, str]], says: str | None) -> None:
    before = [{"a": "1", "b": "1"}, {"a": "1", "b": "1"}]
    found = fault(before, after, {}, "all")
    assert found is None if says is None else re.search(says, found or ""), found
    assert (fault(before, after, {"a": Sent(True, False)}, "all") is None) == (says is None)


def test_a_number_of_updates_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="verify_updates_every=-1 must be at least 0"):
        UpdateVerifier(None, Retries(1), -1)  # pyright: ignore[reportArgumentType]


def _ranks(*changed: set[str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    names = ["model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.qkv_proj.bias", "model.norm.weight"]
    return [dict.fromkeys(names, "old") for _ in changed], [
        {name: "new" if name.split(".")[-2] + name.split(".")[-1] in these else "old" for name in names}
        for these in changed
    ]


def _sent(**changed: bool | None) -> dict[str, Sent]:
    found = {f"model.layers.0.self_attn.{part}_proj.weight": Sent(True, changed["weight"]) for part in "qkv"}
    found |= {f"model.layers.0.self_attn.{part}_proj.bias": Sent(False, changed["bias"]) for part in "qkv"}
    return found | {"model.norm.weight": Sent(False, changed["norm"])}


ALL = {"qkv_projweight", "qkv_projbias", "normweight"}


@pytest.mark.parametrize(
    ("changed", "sent", "says"),
    [
        ((ALL, ALL), {}, None),
        ((ALL, set[str]()), {}, r"1 of 3 .* not: model.layers.0.self_attn.qkv_proj.weight \(rank 1\)"),
        ((ALL, {"qkv_projweight"}), {}, None),  # vectors, of which nothing is known
        (({"qkv_projweight"},) * 2, _sent(weight=True, bias=None, norm=None), None),
        (({"qkv_projweight"},) * 2, _sent(weight=True, bias=False, norm=False), None),
        (
            ({"qkv_projweight"},) * 2,
            _sent(weight=True, bias=True, norm=False),
            r"1 of 3 .* not: model.layers.0.self_attn.qkv_proj.bias",
        ),
        # The shard of a bias on one rank may stay where that on the other moved; that of a matrix may not.
        ((ALL, ALL - {"qkv_projbias"}), _sent(weight=True, bias=True, norm=True), None),
        ((ALL, ALL - {"qkv_projweight"}), _sent(weight=True, bias=True, norm=True), r"1 of 3 .*weight \(rank 1\)"),
        (({"normweight"},) * 2, _sent(weight=False, bias=False, norm=True), None),
        ((ALL - {"normweight"},) * 2, _sent(weight=True, bias=True, norm=True), "1 of 3 .* not: model.norm.weight. 2"),
        ((set[str](), set[str]()), _sent(weight=False, bias=False, norm=False), None),
    ],
)
def test_the_rule_by_rank_and_by_what_was_sent(
    changed: tuple[set[str], ...], sent: dict[str, Sent], says: str | None
) -> None:
    before, after = _ranks(*changed)
    found = fault(before, after, sent, "all")
    assert found is None if says is None else re.search(says, found or ""), found


def test_constants_that_the_server_keeps_beside_its_weights_may_stay() -> None:
    before = [{"visual.embeddings.position_ids": "a", "visual.patch.weight": "b"}]
    after = [{**before[0], "visual.patch.weight": "c"}]
    assert fault(before, after, {}, "all") is None
    assert fault(before, after, {"visual.patch.weight": Sent(True, True)}, "all") is None


def test_experts_that_the_server_fuses_are_known_by_their_module() -> None:
    before = [{"l.0.experts.w13_weight": "a", "l.0.experts.w2_weight": "b", "l.0.gate.weight": "c"}]
    after = [{**before[0], "l.0.gate.weight": "d"}]
    names = [f"l.0.experts.{number}.{part}_proj.weight" for number in range(2) for part in ("up", "down")]
    sent = {name: Sent(True, False) for name in names} | {"l.0.gate.weight": Sent(True, True)}
    assert fault(before, after, sent, "all") is None
    sent["l.0.experts.1.up_proj.weight"] = Sent(True, True)
    found = fault(before, after, sent, "all")
    assert found is not None and "l.0.experts.w13_weight" in found and "belong to no tensor" not in found

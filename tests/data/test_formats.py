"""Each format by files made by hand: the same two samples, what is special in it, and what makes a file of it none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.arrays import is_null
from mismatch_plugin.data.columns import NAMES
from mismatch_plugin.data.formats import FORMATS
from mismatch_plugin.data.read import InputError, read
from mismatch_plugin.data.served import META_KEY
from mismatch_plugin.data.versions import version_number
from tests.data import dumps
from tests.data.dumps import ADVANTAGES, EACH, MASKS, PROMPTS, RESPONSES, ROLLOUT, TRAIN, WHOLE, padded, same, save

SHIFTED = padded([[9.0] * (len(p) - 1) + row for p, row in zip(PROMPTS, ROLLOUT, strict=True)], 4)
"""As logits[:-1] give them: of the next token."""
ROWS = [
    {"input_ids": WHOLE[at], "response_length": len(RESPONSES[at]), "loss_mask": MASKS[at]}
    | {"rollout_logprobs": ROLLOUT[at], "old_logprobs": TRAIN[at], "temperature": 0.7, "values": [0.0]}
    for at in range(2)
]
OWN = {name: [row[name] for row in ROWS] for name in ROWS[0]}
TRL_ROWS = {
    "prompt_ids": PROMPTS,
    "completion_ids": RESPONSES,
    "completion_mask": MASKS,
    "advantages": ADVANTAGES,
    "sampling_per_token_logps": ROLLOUT,
    "old_per_token_logps": TRAIN,
}
MILES = dumps.rank(cp_rank=0, cp_size=1, qkv_format="thd")
VERL_NO_LENGTHS = {name: value for name, value in dumps.verl().items() if name != "attention_mask"}
NEMO_LENGTHS = {**dumps.nemo(), "input_lengths": torch.tensor([5, 3])}


OF_NEXT = {"input_ids": padded(WHOLE, 5), "rollout_log_probs": SHIFTED} | {
    "loss_mask": padded([[0] * len(p) + row for p, row in zip(PROMPTS, MASKS, strict=True)], 5)
}
NO_TRAIN, UNTOLD = {"train": False}, "no sampling temperature"


@pytest.mark.parametrize(
    ("name", "content", "format", "unknown", "note"),
    [
        ("a.pt", dumps.slime(), "slime", NO_TRAIN, UNTOLD),
        ("a.pt", dumps.slime_train(), "slime", {}, UNTOLD),
        ("a.pt", dumps.rank(), "slime_train", {}, ""),
        ("a.pt", MILES, "miles_train", {}, ""),
        ("a.pt", dumps.verl(), "verl", {}, ""),
        ("a.npz", dumps.verl(), "verl", {}, ""),
        ("a.pt", VERL_NO_LENGTHS, "verl", {"prompts": False}, "prompt ids are left out"),
        ("a.jsonl", dumps.nemo_log(), "nemo_rl", {}, ""),
        ("a.pt", dumps.nemo(), "nemo_rl", {}, ""),  # lengths from the mask
        ("a.pt", NEMO_LENGTHS, "nemo_rl", {}, ""),
        ("a.pt", dumps.trl(), "trl", {}, ""),
        ("a.npz", dumps.trl(), "trl", {}, ""),
        ("a.parquet", TRL_ROWS, "trl", {}, ""),
        ("a.pt", dumps.skyrl(), "skyrl", {}, ""),
        ("a.jsonl", dumps.prime_rl(), "prime_rl", {}, "not read: rank"),
        *((name, OWN, "generic", {}, "not read: values") for name in ("a.pt", "a.jsonl", "a.parquet")),
        *((name, ROWS, "generic", {}, "not read: values") for name in ("a.json", "a.pt")),
        ("a.pt", OF_NEXT, "generic", NO_TRAIN, ""),
    ],
)  # fmt: skip
def test_the_two_samples_are_read_from_every_format(
    tmp_path: Path, name: str, content: Any, format: str, unknown: dict[str, bool], note: str
) -> None:
    path = save(tmp_path / name, content)
    dump = same(read(path), **unknown)
    assert dump.format == format and any(note in told for told in dump.notes) == bool(note or dump.notes)
    told = [None if sample.advantages is None else sample.advantages.tolist() for sample in dump.samples]
    assert told in (EACH, [None, None]) and (told == EACH) == ("advantages" in str(content))
    assert {sample.log_probs_of for sample in dump.samples} == {
        {"trl": "filtered", "skyrl": "raw"}.get(format, "tempered")
    }
    set_by_hand = read(path, log_probs_of="raw", temperature=0.9)
    assert {(one.log_probs_of, one.temperature) for one in set_by_hand.samples} == {("raw", 0.9)}
    assert not any("temperature" in note for note in set_by_hand.notes)
    assert read(path, format=format).format == format


def test_what_slime_tells_next_to_its_tokens(tmp_path: Path) -> None:
    dump = read(save(tmp_path / "3.pt", dumps.slime()))
    told = [(one.sample_id, one.step, one.group, one.reward, one.finish_reason) for one in dump.samples]
    assert told == [("7", 3, 4, 0.0, "stop"), ("8", 3, 4, 1.0, "length")]
    assert [(span.version, span.start, span.end) for span in dump.samples[1].weight_versions] == [("5", 0, 2)]
    changed = dumps.slime(
        weight_versions=[["5", "6"]] * 2, remove_sample=[True, False], rollout_log_probs=[[-1.0], None]
    )
    changed["samples"][0]["remove_sample"] = False
    dump = read(save(tmp_path / "3.pt", changed))
    turns = [(span.version, span.start, span.end) for span in dump.samples[0].weight_versions]
    assert turns == [("5", 0, 1), ("6", 2, 3)] and not dump.samples[1].weight_versions
    assert version_number(turns[1][0]) == 6
    assert len(dump.samples[0].rollout_log_probs) == 1 and is_null(dump.samples[1].rollout_log_probs).all()
    assert {"1 samples have no rollout_log_probs"} < {*dump.notes}
    assert any(note.startswith("1 samples have several weight versions") for note in dump.notes)
    dump = read(save(tmp_path / "3.pt", dumps.slime(remove_sample=[True, False])))
    assert [bool(sample.loss_mask.any()) for sample in dump.samples] == [False, True]
    assert "1 samples are taken out by the trainer: no token of them trains" in dump.notes


def test_a_training_side_of_its_own_is_matched(tmp_path: Path) -> None:
    """By sample_id, else by place, else by line; and what has no partner, or two, is an error."""
    rollout, turned = save(tmp_path / "r.pt", dumps.slime()), save(tmp_path / "t.pt", dumps.slime_train((1, 0)))
    dump = same(read(rollout, turned))
    assert dump.samples[0].trained_ids is not None and dump.samples[0].trained_ids.tolist() == RESPONSES[0]
    assert dump.samples[0].reward == 0.0 and read(turned).samples[0].reward is None  # a trainer normalises rewards
    train = dumps.slime_train((1, 0))
    for sample in train["samples"]:
        sample["sample_index"] = 7
    same(read(save(tmp_path / "one.pt", dumps.slime(index=[7, 7])), save(tmp_path / "t.pt", train)))
    lines: list[dict[str, Any]] = [{"train_log_probs": row} for row in TRAIN]
    side = tmp_path / "t.jsonl"
    for name in NAMES["log_probs"]:
        same(read(rollout, save(side, [{name: row} for row in TRAIN])))
    same(read(rollout, save(side, [{**lines[at], "index": at} for at in (1, 0)])))
    more = {"token_ids": RESPONSES[0], "weight_version": 4, "temperature": 0.5, "advantages": 2.0}
    more["loss_mask"] = [1, 1, 0]
    told = same(read(rollout, save(side, [{**lines[0], **more}, lines[1]]))).samples[0]
    assert (told.trainer_version, told.trainer_temperature) == ("4", 0.5)
    assert told.advantages is not None and told.advantages.tolist() == [2.0] * 3 and told.mask.tolist() == [1, 0, 0]
    named = [{**line, "sample_id": f"{7 + at}"} for at, line in enumerate(lines)]
    notes = read(rollout, save(side, [*named, {**lines[0], "sample_id": "9"}])).notes
    assert any("1 of its samples belong to no record" in note for note in notes)
    for wrong, says in (
        (lines[:1], "2 records and 1 lines"),
        (named[:1] + lines[1:], "give all or none"),
        (named[1:], "no sample_id '7' .1 records have no partner"),
        ([named[0], {**named[1], "sample_id": "7"}], "has sample_id '7' twice"),
        ([{**lines[0], "index": 5}, {**lines[1], "index": 0}], "no index 1"),
    ):
        with pytest.raises(InputError, match=says):
            read(rollout, save(side, wrong))
    for wrong, says in (
        ([{**lines[0], "more": 1}], "line 1 has more: a line has train_log_probs and"),
        ([{**lines[0], "advantges": 1}], r"line 1 has advantges: did you mean advantages\?$"),
        ([{"trian_log_probs": TRAIN[0], "index": 0}], r"line 1 has trian_log_probs: did you mean train_log_probs\?$"),
        ([{"sample_id": "7"}], r"t\.jsonl"),
        ([{**lines[0], "loss_mask": [1]}, lines[1]], "loss_mask has 1 entries for 3 log-probs"),
        ([{"train_log_probs": ["x"]}], "line 1: train_log_probs: position 0 is 'x', not a number"),
    ):
        with pytest.raises(ValueError, match=says):
            read(rollout, save(side, wrong))
    with pytest.raises(ValueError, match="holds no log-probs of the training side"):
        read(rollout, rollout)
    with pytest.raises(ValueError, match="give the rollout records first and it as TRAINING"):
        read(save(side, lines))


def test_what_trainers_skip_and_copy_is_said(tmp_path: Path) -> None:
    copied = {**dumps.verl(), "old_log_probs": dumps.verl()["rollout_log_probs"]}
    assert any("bypass_mode" in note for note in read(save(tmp_path / "a.pt", copied)).notes)
    assert not any("bypass_mode" in note for note in read(save(tmp_path / "a.pt", dumps.verl())).notes)
    skipped = dumps.nemo_log(prev_logprobs=[[0.0] * 6] * 2, sample_loss_mask=[1.0, 0.0])
    dump = read(save(tmp_path / "a.jsonl", skipped))
    assert not dump.has_training and any("prev_logprobs is 0 everywhere" in note for note in dump.notes)
    assert [(sample.reward, bool(sample.loss_mask.any())) for sample in dump.samples] == [(1.0, True), (0.0, False)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("1.jsonl", [{"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1}], "no token ids and no"),
        ("a.pt", {**dumps.verl(), "rollout_log_probs": None}, "calculate_log_probs=True"),
        ("a.pt", dumps.slime(rollout_log_probs=[None, None]), "no sample has rollout_log_probs"),
        ("a.pt", dumps.rank(cp_size=10**12), "rank 0 of 1000000000000 has 3 entries, not the 0 that 5 tokens"),
        ("a.pt", dumps.rank(sample_indices=[0, 0]), "holds another sample 0 of rollout 0"),
        ("a.jsonl", [{name: [row, row] for name, row in row.items()} for row in dumps.nemo_log()[:1]], "lists of one"),
        ("a.jsonl", [{"response_ids": [1], "rollout_logprobs": [-1.0]}, {"response_ids": [1], "old_logprobs": [-1]}],
         "line 2 has old_logprobs, which the first sample lacks"),
        ("a.jsonl", [{"response_ids": [[1]], "rollout_logprobs": [[-1.0]]}] * 2, "its lines hold lists of lists"),
        ("a.pt", dumps.loop(response_ids=None), 'lacks token ids of the responses. .*Add the line "response_ids"'),
        ("a.pt", dumps.loop(rollout_log_probs=None, train_logprobs=None), "lacks log-probs"),
        ("a.pt", dumps.loop(rollout_log_probs=None, train_logprobs=None, old_logprobs=TRAIN, logprobs=ROLLOUT),
         "none of the rollout"),
        ("a.pt", {"input_ids": WHOLE, "rollout_log_probs": ROLLOUT, "mask": WHOLE},
         r'what tells a response from its prompt.*Add "response_length", "prompt_length" or "loss_mask"'),
        ("a.pt", dumps.loop(response_ids=[[1.5, 2, 3], [3, 4]]), "response_ids, position 0 is 1.5, not an integer"),
        ("a.pt", dumps.loop(rollout_log_probs=[["-1", -1.0, -1.0], [-1.0, -1.0]]), "position 0 is '-1', not a number"),
        ("a.pt", dumps.loop(loss_mask=[[1, 1, 1], [1]]), "sample 1: loss_mask has 1 entries, the response 2 tokens"),
        ("a.pt", dumps.loop(rollout_log_probs=[[-1.0] * 3]), "rollout_log_probs has 1 rows, response_ids 2"),
        ("a.pt", dumps.loop(response_length=[4, 2]), "has 3 tokens, its response_length is 4"),
        ("a.pt", dumps.loop(response_length=[2.7, 2]), "response_length is 2.7: a length is a whole number from 0"),
        ("a.pt", {"input_ids": WHOLE, "response_length": [9, 2], "rollout_log_probs": ROLLOUT},
         "a response from -4 to 5 does not fit a sequence of tokens 0 to 5"),
        ("a.pt", {"response_ids": torch.ones(2, 3, dtype=torch.long), "rollout_log_probs": torch.ones(2, 5)},
         "cannot be matched"),
        ("a.pt", {"response_ids": RESPONSES, "rollout_logps": ROLLOUT, "old_log_probs": TRAIN},
         r"none of the rollout: rollout_logps: did you mean rollout_logprobs\?$"),
        ("a.pt", dumps.loop(respons_ids=RESPONSES, response_ids=None, **{f"c{at}": 1 for at in range(40)}),
         r"and 31 more\. respons_ids: did you mean response_ids\? docs/inspect\.md#what-is-read"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_named(tmp_path: Path, name: str, content: Any, says: str) -> None:
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
    path = save(tmp_path / name, content)
    with pytest.raises(ValueError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said", "is_said"),
    [
        ({"mask": MASKS, "rollout_log_probs": None, "logprobs": ROLLOUT},
         "logprobs are taken as the sampler's, train_logprobs as the trainer's", True),
        ({"mask": MASKS, "logprobs": TRAIN}, "taken as the sampler's", False),
        ({"response_mask": MASKS, "response_masks": MASKS}, "response_masks: did you mean", False),
        ({"mask": MASKS, "response_masks": MASKS}, "response_masks: did you mean response_mask?", False),
        ({"loss_mask": MASKS, "trainer_versoin": [3, 3]}, "trainer_versoin: did you mean trainer_w", True),
    ],
)  # fmt: skip
def test_names_of_own_loops_are_understood_where_they_are_clear(
    changed: dict[str, Any], said: str, is_said: bool, tmp_path: Path
) -> None:
    notes = same(read(save(tmp_path / "a.pt", dumps.loop(**changed))), prompts=False).notes
    assert (said in "; ".join(notes)) == is_said, notes


def test_folders_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    def of(step: int, **changed: Any) -> dict[str, Any]:
        index, shifted = [2 * step, 2 * step + 1], [[value - step for value in row] for row in ROLLOUT]
        return {**dumps.slime(index=index, rollout_log_probs=shifted, **changed), "rollout_id": step}

    for name, step in (("10.pt", 10), ("9.pt", 9), ("eval_9.pt", 9)):
        save(tmp_path / name, of(step))
    dump = read(tmp_path)
    assert [sample.step for sample in dump.samples] == [9, 9, 10, 10]
    assert "1 files of evaluation were left out" in dump.notes
    save(tmp_path / "copy.pt", of(9))
    with pytest.raises(ValueError, match=r"copy\.pt and .*9\.pt both hold sample 18: give each sample once"):
        read(tmp_path)
    save(tmp_path / "copy.pt", dumps.verl())
    with pytest.raises(ValueError, match=r"copy\.pt is of the format verl, .*give files of one format.*ROLLOUTS"):
        read(tmp_path)
    save(tmp_path / "both" / "rollout_3.pt", dumps.slime())
    save(tmp_path / "both" / "train_3.pt", dumps.slime_train())
    with pytest.raises(ValueError, match=r"rollout_3.pt lacks a side.*a folder of its own.*inspect ROLLOUTS TRAINING"):
        read(tmp_path / "both")
    save(tmp_path / "rollout_data" / "3.pt", dumps.slime())  # as --dump-details writes them
    same(read(tmp_path), train=False)
    save(tmp_path / "train_data" / "3.pt", dumps.slime_train())
    same(read(tmp_path))


def test_the_format_can_be_forced(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", dumps.verl())
    assert read(path, format="generic").format == "generic"
    for wrong in ("slime", "miles_train", "training", "records"):
        with pytest.raises(ValueError, match=r"a\.pt"):
            read(path, format=wrong)
    with pytest.raises(ValueError, match=f"--format nope is unknown: choose from {', '.join(FORMATS)}"):
        read(path, format="nope")


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_slices_of_context_parallel_ranks_are_put_together(tmp_path: Path, layout: str) -> None:
    """Token for token, from the description of the two chunks; tensor parallel ranks repeat them."""
    lengths, size, longest = [(3, 5), (1, 8), (6, 2), (2, 13)], 2, 24
    values = {
        name: [-shift - np.arange(n) for _, n in lengths]
        for name, shift in (("rollout_log_probs", 1), ("log_probs", 2))
    }
    for cp in range(size):
        columns: dict[str, Any] = {name: [] for name in values}
        for name, rows in values.items():
            for (prompt, n), row in zip(lengths, rows, strict=True):
                total = prompt + n
                chunk = -(-(longest if layout == "bshd" else total) // (2 * size))
                own = [at for at in range(n) if (prompt + at - 1) // chunk in (cp, 2 * size - 1 - cp)]
                columns[name].append(torch.tensor(row[own]))
        columns |= {"tokens": [torch.arange(p + n) for p, n in lengths], "response_lengths": [n for _, n in lengths]}
        columns |= {"loss_masks": [torch.ones(n) for _, n in lengths], "sample_indices": [*range(4)]}
        columns["max_seq_lens"] = [longest] * 4
        for tp in range(2):
            save(tmp_path / f"3_{cp}{tp}.pt", dumps.rank(**columns, cp_rank=cp, cp_size=size, qkv_format=layout))
    dump = read(tmp_path)
    for at, ((prompt, n), sample) in enumerate(zip(lengths, dump.samples, strict=True)):
        assert len(sample.prompt_ids) == prompt and len(sample) == n
        assert sample.rollout_log_probs.tolist() == values["rollout_log_probs"][at].tolist()
        assert sample.train_log_probs.tolist() == values["log_probs"][at].tolist()
    with pytest.raises(ValueError, match="the slice of context parallel rank 1 of 2 is not there"):
        read(tmp_path / "3_00.pt")


def _batch(lengths: tuple[int, ...] = (6, 4, 3)) -> dict[str, Any]:
    count = len(lengths) * 6
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    log_probs = -(1 + torch.arange(count).reshape(-1, 6) / 8)
    return {
        "response_ids": torch.where(mask, 10 + torch.arange(count).reshape(-1, 6), 0),
        "rollout_log_probs": log_probs * mask,
        "train_log_probs": log_probs - 3.0,  # a trainer may score padding
    }


def test_padding_without_a_mask_is_refused_and_never_guessed(tmp_path: Path) -> None:
    def lengths(content: Any, name: str = "a.pt") -> list[int]:
        return [len(sample) for sample in read(save(tmp_path / name, content)).samples]

    batch = _batch()
    for content, name in ((batch, "a.pt"), (batch, "a.jsonl"), (_batch((3,)), "a.pt")):
        with pytest.raises(ValueError, match=r'ends in 3 tokens with log-prob 0.0.*"response_mask".*"response_length"'):
            lengths(content, name)
    for told in ({"response_mask": batch["response_ids"] != 0}, {"response_length": [6, 4, 3]}):
        assert lengths({**batch, **told}) == [6, 4, 3]
    assert lengths({**batch, "response_mask": torch.ones(3, 6)}) == [6, 6, 6]  # believed
    last = read(save(tmp_path / "a.pt", _batch((6, 5, 6))))
    assert "the last token of 1 rows has log-prob 0.0 and is kept: add response_mask if it pads" in last.notes
    ragged = {"response_ids": [[1, 2, 0, 0], [3, 4]], "rollout_log_probs": [[-1.0, -1.0, 0.0, 0.0], [-1.0, -2.0]]}
    assert lengths(ragged, "r.pt") == [4, 2]


def test_what_the_servers_told_goes_with_the_dump(tmp_path: Path) -> None:
    """Their temperature where the dump tells none; spans that end with the response."""
    weights = [{"fingerprint": "aa", "start": 0, "end": 2}, {"fingerprint": "bb", "start": 2, "end": 5}]
    served = {"server": "a:1/7", "sglang": "0.5.23", "dtype": "bfloat16", "head_dtype": "float32", "temperature": 0.7}
    told = {META_KEY: {**served, "weights": weights}}
    dump = read(save(tmp_path / "a.pt", dumps.slime(metadata=[told, told])))
    assert [(sample.temperature, sample.asked) for sample in dump.samples] == [(0.7, False)] * 2 and not dump.notes[1:]
    assert dump.samples[0].served is not None and dump.samples[0].served.server == "a:1/7"
    assert [(span.fingerprint, span.end) for span in dump.samples[0].served.weights] == [("aa", 2), ("bb", 3)]
    half = read(save(tmp_path / "a.pt", dumps.slime(metadata=[told, {META_KEY: {}}])))
    assert [sample.temperature for sample in half.samples] == [0.7, 1.0] and half.samples[1].served is None
    assert "1 samples have metadata mismatch_plugin that cannot be read" in half.notes
    assert any("temperature 1 without filters is assumed" in note for note in half.notes)

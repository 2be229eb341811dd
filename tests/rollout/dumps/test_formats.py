"""Each format by files made by hand, and what makes a file of it none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_plugin.data.sampling import SamplingParameters
from mismatch_plugin.rollout.dumps.registry import FORMATS, read_dump
from mismatch_plugin.rollout.files import write_records
from mismatch_plugin.rollout.records import RolloutRecord, WeightSpan
from mismatch_plugin.rollout.responses import Dump

PROMPTS = [[1, 2], [3]]
RESPONSES = [[10, 11, 12], [20, 21]]
ROLLOUT = [[-0.5, -1.25, -2.0], [-0.25, -4.0]]
TRAIN = [[-0.75, -1.0, -2.5], [-0.5, -3.0]]
MASKS = [[1, 0, 1], [1, 1]]
ADVANTAGES = [1.5, -0.5]


def _arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """For numpy.savez, whose keywords may be anything but are typed as one flag."""
    return arrays


def _padded(rows: list[Any], width: int, value: float = 0, left: bool = False) -> torch.Tensor:
    pad = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([fill + row if left else row + fill for row, fill in zip(rows, pad, strict=True)])


def _same(dump: Dump, *, prompts: bool = True, masks: bool = True, train: bool = True) -> None:
    """The two samples above."""
    assert [response.response_ids.tolist() for response in dump.responses] == RESPONSES
    assert [response.rollout_log_probs.tolist() for response in dump.responses] == ROLLOUT
    assert [response.prompt_ids.tolist() for response in dump.responses] == (PROMPTS if prompts else [[], []])
    wanted = MASKS if masks else [[1, 1, 1], [1, 1]]
    assert [response.loss_mask.astype(int).tolist() for response in dump.responses] == wanted
    assert (dump.scored is not None) == train
    if dump.scored is not None:
        assert [scored.log_probs.tolist() for scored in dump.scored] == TRAIN


def _verl() -> dict[str, torch.Tensor]:
    lengths = [len(row) for row in RESPONSES]
    return {
        "prompts": _padded(PROMPTS, 3, left=True),
        "responses": _padded(RESPONSES, 4),
        "attention_mask": torch.cat(
            [
                _padded([[1] * len(row) for row in PROMPTS], 3, left=True),
                _padded([[1] * length for length in lengths], 4),
            ],
            dim=1,
        ),
        "response_mask": _padded(MASKS, 4),
        "rollout_log_probs": _padded(ROLLOUT, 4),
        "old_log_probs": _padded(TRAIN, 4),
        "advantages": _padded([[a] * n for a, n in zip(ADVANTAGES, lengths, strict=True)], 4),
    }


def _samples() -> list[dict[str, Any]]:
    """slime's and miles' Sample.to_dict()."""
    return [
        {
            "group_index": 4,
            "index": 7 + at,
            "prompt": "text",
            "tokens": PROMPTS[at] + RESPONSES[at],
            "response": "text",
            "response_length": len(RESPONSES[at]),
            "reward": float(at),
            "loss_mask": MASKS[at],
            "weight_versions": ["5"],
            "rollout_log_probs": ROLLOUT[at],
            "status": ["completed", "truncated"][at],
            "remove_sample": False,
            "metadata": {"experts": np.arange(3, dtype=np.int32), "score": np.float32(1.5)},
        }
        for at in range(2)
    ]


def _slime_train(order: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    samples = [
        {
            "data_parallel_rank": 0,
            "sample_index": 7 + at,
            "rollout_position": at,
            "tokens": torch.tensor(PROMPTS[at] + RESPONSES[at]),
            "response_lengths": len(RESPONSES[at]),
            "total_lengths": len(PROMPTS[at] + RESPONSES[at]),
            "loss_masks": torch.tensor(MASKS[at], dtype=torch.int),
            "rollout_log_probs": torch.tensor(ROLLOUT[at]),
            "log_probs": torch.tensor(TRAIN[at]),
            "advantages": torch.full((len(RESPONSES[at]),), ADVANTAGES[at]),
            "rewards": 0.7,
        }
        for at in order
    ]
    return {"format_version": 2, "rollout_id": 3, "rank": 0, "samples": samples, "dp_shards": []}


def test_records_are_the_same_after_reading(tmp_path: Path):
    records = [
        RolloutRecord(
            prompt_ids=prompt,
            response_ids=response,
            rollout_log_probs=[None, float("nan"), *values[2:]],
            loss_mask=mask,
            sampling=SamplingParameters(temperature=0.7),
            weight_versions=[WeightSpan(version="9", start=0, end=1)],
            sample_id=f"s{response[0]}",
            reward=1.0,
        )
        for prompt, response, values, mask in zip(PROMPTS, RESPONSES, ROLLOUT, MASKS, strict=True)
    ]
    for name in ("a.jsonl", "a.parquet"):
        write_records(tmp_path / name, records)
        dump = read_dump(tmp_path / name)
        assert dump.format == "records" and dump.scored is None and dump.notes == ()
        first = dump.responses[0]
        assert first.prompt_ids.tolist() == [1, 2] and first.response_ids.tolist() == [10, 11, 12]
        assert np.isnan(first.rollout_log_probs).tolist() == [True, True, False]
        assert first.nulls is not None and first.nulls.tolist() == [True, False, False]
        assert first.sampling.temperature == 0.7 and first.version_of_token == ["9", None, None]
        assert read_dump(tmp_path / name, temperature=0.5).responses[0].sampling.temperature == 0.5
        assert read_dump(tmp_path / name, log_probs_of="raw").responses[0].log_probs_of == "raw"


def test_slime_rollout_dump(tmp_path: Path):
    torch.save({"rollout_id": 3, "samples": _samples()}, tmp_path / "3.pt")
    dump = read_dump(tmp_path / "3.pt")
    _same(dump, train=False)
    assert dump.format == "slime" and any("no sampling temperature" in note for note in dump.notes)
    assert [response.sample_id for response in dump.responses] == ["7", "8"]
    assert [response.step for response in dump.responses] == [3, 3]
    assert [response.group for response in dump.responses] == [4, 4]
    assert [response.reward for response in dump.responses] == [0.0, 1.0]
    assert [response.finish_reason for response in dump.responses] == ["stop", "length"]
    assert dump.responses[1].version_of_token == ["5", "5"]
    assert not any("temperature" in note for note in read_dump(tmp_path / "3.pt", temperature=0.9).notes)


def test_several_weight_versions_belong_to_turns_or_to_nobody(tmp_path: Path):
    samples = _samples()
    samples[0]["weight_versions"], samples[1]["weight_versions"] = ["5", "6"], ["5", "6"]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    dump = read_dump(tmp_path / "3.pt")
    assert dump.responses[0].version_of_token == ["5", None, "6"]
    assert dump.responses[1].version_of_token == [None, None]
    assert any(note.startswith("1 samples have several weight versions") for note in dump.notes)


def test_a_sample_that_slime_removed_does_not_train_and_one_without_log_probs_is_null(tmp_path: Path):
    samples = _samples()
    samples[0]["remove_sample"], samples[1]["rollout_log_probs"] = True, None
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    dump = read_dump(tmp_path / "3.pt")
    assert not dump.responses[0].loss_mask.any()
    nulls = dump.responses[1].nulls
    assert nulls is not None and nulls.all()
    assert any("1 samples have no rollout_log_probs" in note for note in dump.notes)


def test_a_list_of_log_probs_of_another_length_is_passed_on(tmp_path: Path):
    samples = _samples()
    samples[0]["rollout_log_probs"] = ROLLOUT[0][:-1]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    assert len(read_dump(tmp_path / "3.pt").responses[0].rollout_log_probs) == 2


def test_slime_train_dump_holds_both_sides_or_is_one_of_them(tmp_path: Path):
    torch.save({"rollout_id": 3, "samples": _samples()}, tmp_path / "rollout.pt")
    torch.save(_slime_train(), tmp_path / "train.pt")
    dump = read_dump(tmp_path / "train.pt")
    _same(dump)
    assert dump.responses[0].advantages is not None and dump.responses[0].advantages.tolist() == [1.5] * 3
    assert dump.responses[0].reward is None  # what the trainer normalised is no reward
    torch.save(_slime_train((1, 0)), tmp_path / "turned.pt")
    dump = read_dump(tmp_path / "rollout.pt", training=tmp_path / "turned.pt")
    _same(dump)
    assert dump.scored is not None and dump.scored[0].token_ids is not None
    assert dump.scored[0].token_ids.tolist() == RESPONSES[0]
    torch.save(_slime_train((1,)), tmp_path / "half.pt")
    with pytest.raises(ValueError, match="no sample_id '7'"):
        read_dump(tmp_path / "rollout.pt", training=tmp_path / "half.pt")
    with pytest.raises(ValueError, match="holds no log-probs of the training side"):
        read_dump(tmp_path / "rollout.pt", training=tmp_path / "rollout.pt")


def test_samples_with_one_index_are_matched_by_their_place(tmp_path: Path):
    samples, train = _samples(), _slime_train((1, 0))
    for sample in samples:
        sample["index"] = 7
    for sample in train["samples"]:
        sample["sample_index"] = 7
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "rollout.pt")
    torch.save(train, tmp_path / "train.pt")
    _same(read_dump(tmp_path / "rollout.pt", training=tmp_path / "train.pt"))


def test_verl_tensors(tmp_path: Path):
    torch.save(_verl(), tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", **_arrays({name: value.numpy() for name, value in _verl().items()}))
    for name in ("a.pt", "a.npz"):
        dump = read_dump(tmp_path / name)
        _same(dump)
        assert dump.format == "verl" and dump.responses[1].advantages is not None
        assert dump.responses[1].advantages.tolist() == [-0.5, -0.5]
    copied = {**_verl(), "old_log_probs": _verl()["rollout_log_probs"]}
    torch.save(copied, tmp_path / "b.pt")
    assert any("bypass_mode" in note for note in read_dump(tmp_path / "b.pt").notes)
    assert not any("bypass_mode" in note for note in read_dump(tmp_path / "a.pt").notes)


def test_verl_text_and_pickles_say_what_to_save(tmp_path: Path):
    line = {"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="no token ids and no log-probs"):
        read_dump(tmp_path / "1.jsonl")
    torch.save({name: value for name, value in _verl().items() if name != "rollout_log_probs"}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="calculate_log_probs=True"):
        read_dump(tmp_path / "a.pt")


def test_verl_mask_alone_tells_lengths_but_not_prompts(tmp_path: Path):
    tensors = {name: value for name, value in _verl().items() if name != "attention_mask"}
    torch.save(tensors, tmp_path / "a.pt")
    dump = read_dump(tmp_path / "a.pt")
    _same(dump, prompts=False)
    assert any("prompt ids are left out" in note for note in dump.notes)


def _nemo() -> dict[str, list[Any]]:
    def whole(rows: list[list[float]]) -> list[list[float]]:
        return [[0.0] * len(prompt) + row for prompt, row in zip(PROMPTS, rows, strict=True)]

    return {
        "token_ids": [prompt + row for prompt, row in zip(PROMPTS, RESPONSES, strict=True)],
        "token_loss_mask": whole([[float(bit) for bit in row] for row in MASKS]),
        "generation_logprobs": whole(ROLLOUT),
        "prev_logprobs": whole(TRAIN),
        "advantages": whole([[a] * len(row) for a, row in zip(ADVANTAGES, RESPONSES, strict=True)]),
    }


def _nemo_log(path: Path, **changed: Any) -> Path:
    columns = {name: _padded(rows, 6).tolist() for name, rows in _nemo().items()}
    columns |= {"input_lengths": [5, 3], "sample_loss_mask": [1.0, 1.0], "rewards": [1.0, 0.0], **changed}
    lines = [{name: value[at : at + 1] for name, value in columns.items()} | {"idx": at} for at in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_nemo_rl_log_and_tensors(tmp_path: Path):
    dump = read_dump(_nemo_log(tmp_path / "train_data_step1.jsonl"))
    _same(dump)
    assert dump.format == "nemo_rl" and [response.reward for response in dump.responses] == [1.0, 0.0]
    names = {"token_ids": "input_ids", "token_loss_mask": "token_mask"}
    tensors = {names.get(name, name): _padded(rows, 6) for name, rows in _nemo().items()}
    torch.save({**tensors, "input_lengths": torch.tensor([5, 3])}, tmp_path / "a.pt")
    _same(read_dump(tmp_path / "a.pt"))
    torch.save(tensors, tmp_path / "b.pt")  # lengths from the mask
    _same(read_dump(tmp_path / "b.pt"))


def test_nemo_rl_skips_prev_logprobs_and_samples(tmp_path: Path):
    path = _nemo_log(tmp_path / "a.jsonl", prev_logprobs=[[0.0] * 6] * 2, sample_loss_mask=[1.0, 0.0])
    dump = read_dump(path)
    assert dump.scored is None and any("prev_logprobs is 0 everywhere" in note for note in dump.notes)
    assert [bool(response.loss_mask.any()) for response in dump.responses] == [True, False]
    assert any("1 samples are taken out" in note for note in dump.notes)


def test_trl_batch(tmp_path: Path):
    batch = {
        "prompt_ids": _padded(PROMPTS, 3, left=True),
        "prompt_mask": _padded([[1] * len(row) for row in PROMPTS], 3, left=True),
        "completion_ids": _padded(RESPONSES, 4),
        "completion_mask": _padded([[1] * len(row) for row in RESPONSES], 4),
        "tool_mask": _padded(MASKS, 4),
        "sampling_per_token_logps": _padded(ROLLOUT, 4),
        "old_per_token_logps": _padded(TRAIN, 4),
        "advantages": torch.tensor(ADVANTAGES),
    }
    torch.save(batch, tmp_path / "a.pt")
    np.savez_compressed(tmp_path / "a.npz", **_arrays({name: value.numpy() for name, value in batch.items()}))
    for name in ("a.pt", "a.npz"):
        dump = read_dump(tmp_path / name)
        _same(dump)
        assert dump.format == "trl" and {response.log_probs_of for response in dump.responses} == {"filtered"}
        assert dump.responses[0].advantages is not None and dump.responses[0].advantages.tolist() == [1.5] * 3
    pytest.importorskip("pyarrow", reason="pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = {
        "prompt_ids": PROMPTS,
        "completion_ids": RESPONSES,
        "completion_mask": MASKS,
        "sampling_per_token_logps": ROLLOUT,
        "old_per_token_logps": TRAIN,
        "advantages": ADVANTAGES,
    }
    parquet.write_table(pa.table(rows), tmp_path / "a.parquet")
    _same(read_dump(tmp_path / "a.parquet"))


def test_vllm_replies(tmp_path: Path):
    def completion(at: int) -> dict[str, Any]:
        logprobs = {"tokens": [f"token_id:{token}" for token in RESPONSES[at]], "token_logprobs": ROLLOUT[at]}
        choice = {"index": 0, "text": "t", "logprobs": logprobs, "finish_reason": "stop"}
        return {"id": f"cmpl-{at}", "choices": [{**choice, "prompt_token_ids": PROMPTS[at]}]}

    def chat(at: int) -> dict[str, Any]:
        content = [{"token": "t", "logprob": value, "top_logprobs": []} for value in ROLLOUT[at]]
        choice = {"index": 0, "token_ids": RESPONSES[at], "logprobs": {"content": content}, "finish_reason": "length"}
        return {"id": f"chat-{at}", "prompt_token_ids": PROMPTS[at], "choices": [choice]}

    def output(at: int) -> dict[str, Any]:
        logprobs = [
            {str(token): {"logprob": value, "rank": 1}, "99": {"logprob": -0.1, "rank": 2}}
            for token, value in zip(RESPONSES[at], ROLLOUT[at], strict=True)
        ]
        outputs = [{"token_ids": RESPONSES[at], "logprobs": logprobs, "finish_reason": "stop"}]
        return {"request_id": str(at), "prompt_token_ids": PROMPTS[at], "outputs": outputs}

    def batch(at: int) -> dict[str, Any]:
        return {"custom_id": f"c{at}", "response": {"status_code": 200, "body": chat(at)}, "error": None}

    for kind in (completion, chat, output, batch):
        path = tmp_path / f"{kind.__name__}.jsonl"
        path.write_text("".join(json.dumps(kind(at)) + "\n" for at in range(2)))
        dump = read_dump(path)
        _same(dump, masks=False, train=False)
        assert dump.format == "vllm" and {response.log_probs_of for response in dump.responses} == {"raw"}
        assert any("taken as raw" in note for note in dump.notes)
    told = read_dump(tmp_path / "chat.jsonl", log_probs_of="filtered")
    assert told.responses[0].log_probs_of == "filtered" and not any("taken as raw" in note for note in told.notes)
    (tmp_path / "one.json").write_text(json.dumps(completion(0), indent=2))
    assert read_dump(tmp_path / "one.json").responses[0].sample_id == "cmpl-0"
    text = completion(0)
    text["choices"][0]["logprobs"]["tokens"] = ["The", " cat", "."]
    (tmp_path / "text.jsonl").write_text(json.dumps(text) + "\n")
    with pytest.raises(ValueError, match="no token ids: ask for return_token_ids"):
        read_dump(tmp_path / "text.jsonl")


def test_own_loops(tmp_path: Path):
    ragged = {
        "input_ids": [torch.tensor(prompt + row) for prompt, row in zip(PROMPTS, RESPONSES, strict=True)],
        "response_length": [3, 2],
        "loss_mask": MASKS,
        "rollout_logprobs": ROLLOUT,
        "old_logprobs": TRAIN,
        "temperature": 0.7,
        "values": [[0.0]] * 2,
    }
    torch.save(ragged, tmp_path / "a.pt")
    dump = read_dump(tmp_path / "a.pt")
    _same(dump)
    assert dump.format == "generic" and "not read: values" in dump.notes
    assert dump.responses[0].sampling.temperature == 0.7
    rows = [{name: value[at] if isinstance(value, list) else value for name, value in ragged.items()} for at in (0, 1)]
    for row in rows:
        row["input_ids"] = row["input_ids"].tolist()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _same(read_dump(tmp_path / "a.jsonl"))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    _same(read_dump(tmp_path / "a.json"))
    torch.save(rows, tmp_path / "rows.pt")
    _same(read_dump(tmp_path / "rows.pt"))


def test_log_probs_of_logits_without_the_last_belong_to_the_next_token(tmp_path: Path):
    ids = _padded([prompt + row for prompt, row in zip(PROMPTS, RESPONSES, strict=True)], 5)
    shifted = _padded([[9.0] * (len(p) - 1) + row for p, row in zip(PROMPTS, ROLLOUT, strict=True)], 4)
    mask = _padded([[0] * len(p) + row for p, row in zip(PROMPTS, MASKS, strict=True)], 5)
    torch.save({"input_ids": ids, "rollout_log_probs": shifted, "loss_mask": mask}, tmp_path / "a.pt")
    _same(read_dump(tmp_path / "a.pt"), train=False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"response_ids": None},
            'lacks token ids of the responses. It has .*Add the line "response_ids": response_ids',
        ),
        ({"rollout_log_probs": None, "old_log_probs": None}, "lacks log-probs"),
        ({"rollout_log_probs": None}, "none of the rollout"),
        ({"response_ids": [[1, -7, 2], [3, 4]]}, "sample 0: response_ids, position 1 is -7, no token id"),
        ({"response_ids": [[1.5, 2, 3], [3, 4]]}, "sample 0: response_ids, position 0 is 1.5, not an integer"),
        ({"response_ids": [[[1], 2, 3], [3, 4]]}, "position 0 is a list, not an integer"),
        ({"response_ids": [[1, 2, 2**70], [3, 4]]}, "position 2 is"),
        ({"rollout_log_probs": [["-1", -1.0, -1.0], [-1.0, -1.0]]}, "position 0 is '-1', not a number"),
        ({"loss_mask": [[1, 2, 1], [1, 1]]}, "sample 0: loss_mask, position 1 is 2"),
        ({"loss_mask": [[1, 1, 1], [1]]}, "sample 1: loss_mask has 1 entries, the response 2 tokens"),
        ({"advantages": [[1.0], [1.0, 1.0]]}, "sample 0: advantages has"),
        ({"rollout_log_probs": [[-1.0] * 3]}, "rollout_log_probs has 1 rows, response_ids 2"),
        ({"response_length": [4, 2]}, "has 3 tokens, its response_length is 4"),
        ({"response_length": [-1, 2]}, "is -1: a length is a whole number"),
        (
            {"response_ids": torch.ones(2, 3, dtype=torch.long), "rollout_log_probs": torch.ones(2, 5)},
            "cannot be matched",
        ),
        ({"temperature": -1.0}, "temperature -1"),
    ],
)
def test_what_contradicts_itself_is_named(tmp_path: Path, changed: dict[str, Any], said: str):
    columns = {"response_ids": RESPONSES, "rollout_log_probs": ROLLOUT, "old_log_probs": TRAIN, **changed}
    torch.save({name: value for name, value in columns.items() if value is not None}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=said):
        read_dump(tmp_path / "a.pt")


def test_folders_are_joined_in_order_of_their_numbers(tmp_path: Path):
    for step in (10, 9):
        samples = _samples()
        for sample in samples:
            sample["index"] += 2 * step
            sample["rollout_log_probs"] = [value - step for value in sample["rollout_log_probs"]]
        torch.save({"rollout_id": step, "samples": samples}, tmp_path / f"{step}.pt")
    torch.save({"rollout_id": 9, "samples": _samples()}, tmp_path / "eval_9.pt")
    dump = read_dump(tmp_path)
    assert [response.step for response in dump.responses] == [9, 9, 10, 10]
    assert "1 files of evaluation were left out" in dump.notes
    torch.save(_verl(), tmp_path / "12.pt")
    with pytest.raises(ValueError, match="give files of one format"):
        read_dump(tmp_path)


def test_samples_that_two_files_hold_are_refused(tmp_path: Path):
    torch.save({"rollout_id": 9, "samples": _samples()}, tmp_path / "9.pt")
    torch.save({"rollout_id": 9, "samples": _samples()}, tmp_path / "copy.pt")
    with pytest.raises(ValueError, match=r"copy\.pt and .*9\.pt both hold sample 7"):
        read_dump(tmp_path)
    (tmp_path / "copy.pt").unlink()
    long = {"response_ids": [[*range(10)]], "rollout_log_probs": [[-1.5] * 10]}
    for name in ("9.pt", "10.pt"):
        torch.save(long, tmp_path / name)
    with pytest.raises(ValueError, match="the same response with the same log-probs"):
        read_dump(tmp_path)


def test_rows_with_other_names_than_the_first_are_refused(tmp_path: Path):
    row = {"response_ids": [1], "rollout_logprobs": [-1.0]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "old_logprobs": [-1.0]}) + "\n")
    with pytest.raises(ValueError, match="line 2 has old_logprobs, which the first sample lacks"):
        read_dump(path)
    path.write_text((json.dumps({name: [value] for name, value in row.items()}) + "\n") * 2)
    with pytest.raises(ValueError, match="its lines hold lists of lists"):
        read_dump(path)


def test_the_format_can_be_forced(tmp_path: Path):
    torch.save(_verl(), tmp_path / "a.pt")
    assert read_dump(tmp_path / "a.pt", "generic").format == "generic"
    for wrong in ("slime", "miles_train", "vllm", "training", "records"):
        with pytest.raises(ValueError, match=r"a\.pt"):
            read_dump(tmp_path / "a.pt", wrong)
    with pytest.raises(ValueError, match=f"--format nope is unknown: choose from {', '.join(FORMATS)}"):
        read_dump(tmp_path / "a.pt", "nope")


def test_older_slime_is_called_slime(tmp_path: Path):
    columns = {
        "tokens": [torch.tensor(prompt + row) for prompt, row in zip(PROMPTS, RESPONSES, strict=True)],
        "response_lengths": [3, 2],
        "loss_masks": [torch.tensor(row) for row in MASKS],
        "rollout_log_probs": [torch.tensor(row) for row in ROLLOUT],
        "log_probs": [torch.tensor(row) for row in TRAIN],
        "sample_indices": [0, 1],
    }
    pack = {"rollout_id": 0, "rank": 0, "rollout_data": columns}
    for more, name in (({}, "slime_train"), ({"cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}, "miles_train")):
        torch.save({**pack, **more}, tmp_path / "0_0.pt")
        dump = read_dump(tmp_path / "0_0.pt")
        _same(dump)
        assert dump.format == name


def test_both_sides_of_a_slime_run_are_told_apart(tmp_path: Path):
    def save(name: str, **more: Any):
        sample = {"tokens": [1, 2, 3, 4], "response_length": 3, "rollout_log_probs": [-1.0, -2.0, -3.0]}
        shards = {"dp_shards": []} if more else {}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"rollout_id": 0, "samples": [sample | more], **shards}, tmp_path / name)

    trained = {"log_probs": [-1.1, -2.0, -3.0], "rollout_position": 0, "total_lengths": 4}
    save("one/rollout_0.pt")
    save("one/train_0.pt", **trained)
    with pytest.raises(ValueError, match=r"rollout_0.pt lacks a side.*a folder of its own.*inspect ROLLOUTS TRAINING"):
        read_dump(tmp_path / "one")
    save("rollout_data/0.pt")  # as --dump-details writes them
    save("train_data/0.pt", **trained)
    scored = read_dump(tmp_path).scored
    assert scored is not None and [side.log_probs.tolist() for side in scored] == [[-1.1, -2.0, -3.0]]

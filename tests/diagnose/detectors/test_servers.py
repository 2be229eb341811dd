"""Servers that rescore: the checkpoint's weights or others, in their precision, one of several, behind a router."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from mismatch_plugin.data.read import InputError
from mismatch_plugin.diagnose.detectors.servers import compare_servers, workers_of
from mismatch_plugin.diagnose.diagnosis import diagnose_files
from mismatch_plugin.diagnose.findings import Finding
from tests.fixtures.sglang_check.policies import FOLDER, checkpoint, policy, recorded
from tests.fixtures.sglang_check.serving import serving

RECORDS = recorded("float32_temperature_1.0")
FEW = RECORDS[:16]


def _compare(*servers: tuple[str, str], model: str = "float32", start: str = "") -> tuple[list[int], list[Finding]]:
    """servers: (form, dtype that it tells). Which of them were named, and the findings."""
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(form, {"dtype": dtype})) for form, dtype in servers]
        held = checkpoint(model) if model else None
        notes, findings = compare_servers(urls, FEW, held, checkpoint(start) if start else None)
    assert len(notes) >= len(servers) - (not model and len(servers) < 3)
    assert {item.fault for item in findings} <= {"server_differs"}
    return [
        at for at, url in enumerate(urls) if any(f"server at {url} " in item.evidence for item in findings)
    ], findings


@pytest.mark.parametrize(
    ("form", "dtype", "named"),
    [
        ("float32", "float32", False),
        ("bfloat16", "bfloat16", False),  # precision explains it
        ("bfloat16", "float32", True),  # and does not where the server says float32
        ("drift-0.0005-7", "float32", True),
        ("drift-0.003-7", "bfloat16", False),  # as far off as bf16: one server alone cannot tell
        ("drift-0.02-7", "bfloat16", True),
    ],
)
def test_one_server_against_the_checkpoint(form: str, dtype: str, named: bool):
    assert _compare((form, dtype))[0] == ([0] if named else [])


def test_quantised_servers_have_a_wider_bar():
    with serving("int8", {"dtype": "bfloat16", "quantization": "w8a8_int8"}) as url:
        assert compare_servers([url], FEW, checkpoint("float32"))[1] == []
    with serving("drift-0.05-7", {"dtype": "bfloat16", "quantization": "w8a8_int8"}) as url:
        assert len(compare_servers([url], FEW, checkpoint("float32"))[1]) == 1


def test_the_odd_one_of_several_is_named_below_the_bar():
    half = ("bfloat16", "bfloat16")
    named, findings = _compare(half, ("drift-0.005-7", "bfloat16"), half)
    assert named == [1]
    assert findings[0].statistics["gap"] < findings[0].statistics["bar"] and findings[0].confidence == "possible"
    assert _compare(half, half, half)[0] == []


def test_without_a_checkpoint_servers_are_compared_with_one_another():
    plain, other = ("float32", "float32"), ("drift-0.01-7", "float32")
    assert _compare(plain, plain, other, model="")[0] == [2]
    assert _compare(plain, plain, plain, model="")[0] == []
    assert _compare(plain, other, model="")[0] == [1]
    assert _compare(plain, plain, model="")[0] == []


def test_a_server_that_kept_the_first_weights_is_known_by_them():
    small = ("float32", "bfloat16")
    assert _compare(small, model="drift-0.003-7")[0] == []
    named, (finding,) = _compare(small, model="drift-0.003-7", start="float32")
    assert named == [0] and "fit the weights that the run began with better" in finding.evidence


def test_a_router_stands_for_its_workers():
    listed = {"urls": ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]}
    with serving(routes={"/list_workers": listed}) as url:
        assert workers_of(url) == listed["urls"]
    ranks = {"workers": [{"url": "http://10.0.0.1:30000@0"}, {"url": "http://10.0.0.1:30000@1"}, {"id": 3}], "total": 3}
    with serving(routes={"/workers": ranks}) as url:
        assert workers_of(url) == ["http://10.0.0.1:30000"]
    for strange in ([], {"workers": None}, {"urls": [3, "file:///etc"]}):
        with serving(routes={"/workers": strange}) as url:
            assert workers_of(url) == [url]


def test_from_router_to_finding(tmp_path: Path):
    policy("float32").save_pretrained(tmp_path)
    records = FOLDER / "float32_temperature_1.0.jsonl"
    with (
        serving("float32") as good,
        serving("drift-0.02-7") as bad,
        serving(routes={"/workers": {"urls": [good, bad]}}) as url,
    ):
        result = diagnose_files(records, checkpoint=tmp_path, urls=[url], brief=True)
        assert [item.fault for item in result.findings] == ["server_differs"] and bad in result.findings[0].evidence
        assert result.verdict == "fault" and result.findings[0].first is not None
        assert diagnose_files(records, checkpoint=tmp_path, urls=[good, good], brief=True).findings == ()
    with (
        serving("float32") as good,
        pytest.raises(InputError, match=r"server at http://127\.0\.0\.1:9 does not rescore"),
    ):
        diagnose_files(records, checkpoint=tmp_path, urls=[good, "http://127.0.0.1:9"], brief=True)

"""Tables hold what the code holds, and say it in both renderings."""

from __future__ import annotations

import argparse
import io

import pytest
from rich.console import Console

from ci.tables import algorithms_table, config_table, health_table, metrics_table
from mismatch_plugin import MismatchConfig, add_arguments
from mismatch_plugin.config import ALGORITHM_NAMES
from mismatch_plugin.config.fields import leaf_fields
from mismatch_plugin.config.presets import PRESETS
from mismatch_plugin.core.health import ALL_RULES
from mismatch_plugin.core.metrics.registry import METRICS
from mismatch_plugin.report.presets import PRESET_NAMES, preset_table, presets_table
from mismatch_plugin.report.table import Table


def _rich(table: Table, width: int = 400) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table.to_rich())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_in_markdown_and_rich_and_what_is_none():
    table = Table("t", ("name", "text"), (("a, b", "|x| [y]"), ("–", "")), code=frozenset({"name"}), notes=("n",))
    assert table.to_markdown() == "| name | text |\n| --- | --- |\n| `a`, `b` | \\|x\\| [y] |\n| – |  |\n\n- n\n"
    assert "|x| [bold]" in _rich(Table("t", ("text",), (("|x| [bold]",),))), "brackets are no markup"
    table = Table("t", ("a", "b", "c"), (("1", "2", "3"),), code=frozenset({"a"}))
    assert table.only("c", "a") == Table("t", ("c", "a"), (("3", "1"),), code=frozenset({"a"}))
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table("t", ("a",), (("1", "2"),))


def test_tables_hold_every_field_flag_metric_preset_and_rule_of_health():
    table = config_table()
    assert [name for name in table.column("field") if name != "–"] == [f.path for f in leaf_fields(MismatchConfig)]
    assert all(table.column("meaning"))
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags = {flag for cell in table.column("flag") for flag in cell.split(", ")} - {"–"}
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert flags == {flag for action in shown for flag in action.option_strings}
    assert metrics_table().column("metric") == [metric.name for metric in METRICS]
    names = [name for cell in presets_table().column(PRESET_NAMES) for name in cell.split(", ")]
    assert names == [name for entry in PRESETS for name in entry.names.split()]
    rules = [*zip(*map(health_table().column, ("metric", "warns", "judged for")), strict=True)]
    assert len(rules) == len(set(rules)) == len(ALL_RULES)


@pytest.mark.filterwarnings("ignore::mismatch_plugin.MismatchWarning")
def test_a_preset_s_own_values_and_the_rows_of_algorithms():
    table = preset_table("decoupled_seq_is")
    values = dict(zip(table.column("field"), table.column("value"), strict=True))
    assert set(values) == {field.path for field in leaf_fields(MismatchConfig)}
    assert values["tis.level"] == "sequence *" and values["denominator"] == "auto"
    with pytest.raises(ValueError, match="no_such_preset"):
        preset_table("no_such_preset")
    flags = {"use_rollout_log_probs": "--use-rollout-log-probs", "use_tis": "--use-tis"}
    for number, cells in enumerate(algorithms_table().rows):
        row = dict(zip(algorithms_table().headers, cells, strict=True))
        config = MismatchConfig.model_validate({field: row[flag] == "yes" for field, flag in flags.items()})
        assert config.algorithm == number == int(row["#"]) and row["algorithm"] == ALGORITHM_NAMES[number]

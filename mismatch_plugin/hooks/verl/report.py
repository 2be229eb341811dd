"""The report folder of a verl run: a line for each step that verl logs, written by the process that logs it.

In decoupled mode with the rollout batch's own statistics; in bypass mode they are verl's mean over micro-batches.
Next to ours each line has the other numbers that verl logs (reward, response length, gradient norm …).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mismatch_plugin.config import MismatchConfig
from mismatch_plugin.core.metrics.state import Statistics
from mismatch_plugin.hooks.base import wrap_once
from mismatch_plugin.hooks.verl.config import check_tree
from mismatch_plugin.report.log import report_logged


class StepReport:
    """What this process has seen of the step in progress."""

    def __init__(self) -> None:
        self._statistics: Statistics | None = None

    def keep(self, statistics: Statistics) -> None:
        """The statistics of a rollout batch, until its step is logged."""
        mine = replace(statistics, locators=())  # they hold the batch
        self._statistics = mine if self._statistics is None else self._statistics.merge(mine)

    def write(self, config: MismatchConfig, metrics: Mapping[str, Any], step: int) -> None:
        """A line, where the metrics are those of a training step (verl logs its validation, too)."""
        if report_logged(config, step, metrics, self._statistics):
            self._statistics = None


STEP = StepReport()


def wrap_tracking(tracking: Any) -> None:
    """Make verl's `Tracking` write what it logs where its configuration sets our `report_dir`. Idempotent."""
    wrap_once(tracking, "__init__", _begin)
    wrap_once(tracking, "log", _log)


def _begin(own: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    self.mismatch_settings = _settings(kwargs["config"] if "config" in kwargs else args[3] if len(args) > 3 else None)


def _log(own: Callable[..., None], self: Any, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
    own(self, data, step, *args, **kwargs)
    if (config := self.mismatch_settings) is not None:
        STEP.write(config, data, int(step))


def _settings(tree: Any) -> MismatchConfig | None:
    """The settings of a run that writes; verl's other trainers (SFT) have another tree."""
    if not isinstance(tree, Mapping) or not {"algorithm", "actor_rollout_ref"} <= {*tree}:
        return None
    config = check_tree(tree)
    return config if config is not None and config.report_dir is not None else None

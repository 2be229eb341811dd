"""A W&B workspace with what to watch (pip install wandb-workspaces).

    python examples/wandb_workspace.py ENTITY PROJECT [PREFIX]

PREFIX: what your trainer writes before `rollout_corr/`, for example `train/`.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys

PANELS = {
    "distance of the engines, nats per token": ("kl", "k3_kl"),
    "effective sample size of the ratios": ("rollout_is_ratio_eff_sample_size",),
    "mean weight": ("rollout_is_weight_after_mean",),
    "rejected tokens": ("rollout_is_masked_fraction",),
    "tokens where the clip is active": ("pg_clipfrac",),
}


def main(entity: str, project: str, prefix: str = "") -> None:
    """Save it and print its address."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import LinePlot

    panels = [LinePlot(title=title, y=[f"{prefix}rollout_corr/{name}" for name in y]) for title, y in PANELS.items()]
    section = workspaces.Section(name="training-inference mismatch", panels=panels, is_open=True)
    print(workspaces.Workspace(entity=entity, project=project, name="mismatch", sections=[section]).save().url)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: python {sys.argv[0]} ENTITY PROJECT [PREFIX]")
    main(*sys.argv[1:])

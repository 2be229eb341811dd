"""SkyRL's entry script with a correction of the mismatch; our flags stand among SkyRL's overrides.

    python examples/skyrl/main_mismatch.py trainer.algorithm.policy_loss_type=mismatch \
        --use-tis trainer.policy.model.path=Qwen/Qwen3-4B …

What is ours: the parser, and `register`.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedFunctionDecorator=false
import sys
from argparse import ArgumentParser

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.utils import initialize_ray

import mismatch_plugin as mp
from mismatch_plugin.hooks.skyrl import register


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: SkyRLTrainConfig) -> None:
    """SkyRL's experiment, in a process of its own."""
    BasePPOExp(cfg).run()


def main(arguments: list[str]) -> None:
    """SkyRL's overrides and our flags, in any order."""
    parser = ArgumentParser(allow_abbrev=False)
    mp.add_arguments(parser)
    args, overrides = parser.parse_known_args(arguments)
    cfg = SkyRLTrainConfig.from_cli_overrides(overrides)
    register(cfg, mp.MismatchConfig.from_args(args))  # before validate_cfg, which knows the losses that are registered
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main(sys.argv[1:])

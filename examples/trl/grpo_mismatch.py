"""TRL's GRPO with vLLM and a correction of the mismatch; our flags are on the command line.

    accelerate launch examples/trl/grpo_mismatch.py --model Qwen/Qwen2.5-0.5B-Instruct --use-tis

What is ours: the class, `add_arguments`, `from_args`, and `mismatch=`.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedFunctionDecorator=false
from argparse import ArgumentParser

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

import mismatch_plugin as mp
from mismatch_plugin.hooks.trl import CorrectionMixin


class CorrectedGRPOTrainer(CorrectionMixin, GRPOTrainer):
    """TRL's trainer with our weights and rejection."""


def main() -> None:
    """The whole script."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--output-dir", default="grpo-mismatch")
    mp.add_arguments(parser)
    args = parser.parse_args()
    trainer = CorrectedGRPOTrainer(
        mismatch=mp.MismatchConfig.from_args(args),
        model=args.model,
        reward_funcs=accuracy_reward,
        args=GRPOConfig(output_dir=args.output_dir, use_vllm=True, vllm_mode="colocate", loss_type="dapo"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# NeMo-RL's GRPO with Megatron and the correction. Its workers have environments of their own: install the package in them,
# too (`uv pip install`, or the image).
set -euo pipefail
: "${NEMO_RL:?folder of the NeMo-RL checkout}"

FLAGS=(
    --use-tis # algorithm 2: NeMo-RL's PPO, each token weighted by π_old/π_rollout
    --tis-upper-bound 2.0
)
cd "$NEMO_RL"
uv run python -m mismatch_plugin.launch examples/run_grpo.py \
    --config examples/configs/grpo_math_1B_megatron.yaml \
    "${FLAGS[@]}" "$@"

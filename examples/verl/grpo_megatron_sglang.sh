#!/usr/bin/env bash
# verl's GRPO on Qwen3-8B with Megatron and SGLang, and the correction. run_qwen3_8b_megatron.diff puts the launcher before
# main_ppo in verl's script; it hands on what it is given. The package must be installed on every node (verl finds it by its
# entry point).
set -euo pipefail
: "${VERL:?folder of the verl checkout}"
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

git -C "$VERL" apply --check --reverse "$HERE/run_qwen3_8b_megatron.diff" 2> /dev/null ||
    git -C "$VERL" apply "$HERE/run_qwen3_8b_megatron.diff"

FLAGS=(
    --use-tis # algorithm 2: verl's PPO, each token weighted by π_old/π_rollout, at most 2
)
cd "$VERL"
INFER_BACKEND=sglang VERL_USE_UV=0 bash examples/grpo_trainer/run_qwen3_8b_megatron.sh "${FLAGS[@]}" "$@"

#!/usr/bin/env bash
# Megatron-LM's train_rl.py on Qwen3-4B with the correction. What is new against a line without it: the first two blocks,
# and `-m mismatch_plugin.launch`.
set -euo pipefail
: "${MEGATRON:?folder of the Megatron-LM checkout}" "${CHECKPOINT:?folder of the pretrained checkpoint}"
export CHECKPOINT ENV_CONFIG=${ENV_CONFIG:-examples/rl/environment_configs/dapo.yaml}

# The launcher makes the patch of train_rl.py in memory. The optional one is for precision: log-probs in float32 under --bf16.
mismatch-plugin patch apply --host megatron-lm --root "$MEGATRON" --file megatron/rl/rl_utils.py

FLAGS=(
    --use-tis # algorithm 2: PPO against Megatron's own log-probs, weighted for the engine's
)

cd "$MEGATRON"
source examples/rl/model_configs/qwen3_4b.sh
# shellcheck disable=SC2086 # Megatron's options are strings of words
torchrun --nproc-per-node "${GPUS:-8}" --nnodes "${NODES:-1}" \
    -m mismatch_plugin.launch train_rl.py \
    --mock-data \
    --perform-rl-step \
    --calculate-per-token-loss \
    --use-distributed-optimizer \
    --train-samples 48828125 \
    $MODEL_OPTIONS $COMMON_OPTIONS $ENV_DEPENDENT \
    "${FLAGS[@]}" "$@"

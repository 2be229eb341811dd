#!/usr/bin/env bash
# miles's Qwen3-4B script with the correction. The script starts train.py itself, so its parser is patched once, and then
# takes our flags as it takes its own.
set -euo pipefail
: "${MILES:?folder of the miles checkout}"

mismatch-plugin patch apply --host miles --root "$MILES"

FLAGS=(
    --use-tis # algorithm 2: PPO against Megatron's own log-probs, each token weighted for the engine's
)
cd "$MILES"
python3 scripts/run_qwen3_4b.py --extra-args "${FLAGS[*]}" "$@"

#!/usr/bin/env bash
# Train under each of the four algorithms, one after the other, as jobs of a Ray cluster (slime or miles), and write one
# report of all of them.
#
#   OUTPUT=/shared/compare examples/compare_four_on_a_cluster.sh train.py ARGS…
#
# ARGS: your launch line without the plugin's flags. OUTPUT: a folder that the training nodes can write.
# Optional: RAY_JOBS (address), RUNTIME_ENV_JSON, TIS (flags of the weights), MORE (flags of every run), SEED (number of
# the runs' folder; the seed itself is yours to set in ARGS). A run that has finished is not run again.
# With --mismatch-explain-only among ARGS, TIS or MORE each job prints what would run, and nothing is written.
set -euo pipefail
: "${OUTPUT:?folder for the runs, writable on every node}"
[ $# -gt 0 ] || { echo "usage: OUTPUT=DIR $0 TRAIN_SCRIPT ARGS…" >&2; exit 2; }
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
RAY_JOBS=${RAY_JOBS:-http://127.0.0.1:8265}
RUNTIME_ENV_JSON=${RUNTIME_ENV_JSON:-"{}"}
SEED=${SEED:-0}
read -ra TIS <<< "${TIS:---tis-level token --tis-upper-bound 2.0}"
read -ra MORE <<< "${MORE:---mismatch-metrics full}"
EXPLAIN=
[[ " $* ${TIS[*]} ${MORE[*]} " != *" --mismatch-explain-only "* ]] || EXPLAIN=yes

run() { # run LABEL FLAGS…
    local folder=$OUTPUT/cluster/$1/seed$SEED
    [ -n "$EXPLAIN" ] || [ ! -f "$folder/done.json" ] || { echo "algorithm $1 has run: $folder"; return; }
    ray job submit --address "$RAY_JOBS" --runtime-env-json "$RUNTIME_ENV_JSON" -- \
        python3 -m mismatch_plugin.launch "${COMMAND[@]}" "${@:2}" "${MORE[@]}" --mismatch-report-dir "$folder"
    [ -z "$EXPLAIN" ] || return 0
    mkdir -p "$folder"
    echo '{"status": "finished"}' > "$folder/done.json"
}

COMMAND=("$@")
run 0
run 1 --use-rollout-log-probs
run 2 --use-tis "${TIS[@]}"
run 3 --use-rollout-log-probs --use-tis "${TIS[@]}"
[ -n "$EXPLAIN" ] || python3 "$HERE/collect_report.py" "$OUTPUT"

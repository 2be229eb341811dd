#!/usr/bin/env bash
# Make an environment in which NeMo-RL's own examples/run_grpo.py runs whole on CPU, for tests/trainers/nemo_rl.
#
#   ci/nemo_rl_cpu.sh [DIRECTORY]      (default: $NEMO_RL_VENV, else .venv-nemo-rl)
#
# One that is whole and made from this same file is left as it is. PYTHON chooses the interpreter (3.11 or later), PIP_ARGS
# goes to pip. About 2 GB and two to five minutes.
set -euo pipefail
directory=$(realpath --canonicalize-missing "${1:-${NEMO_RL_VENV:-.venv-nemo-rl}}")
cd "$(dirname "$0")/.."

stamp="$directory/made-from"
made_from() { cat ci/nemo_rl_cpu.sh ci/constraints-cpu.txt | sha256sum; }
read -r -a pip_args <<< "${PIP_ARGS:-}"
install() {
    "$directory/bin/python" -m pip --quiet --quiet --disable-pip-version-check install "${pip_args[@]}" \
        --constraint ci/constraints-cpu.txt "$@"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(made_from)" ] && 
    (cd / && "$directory/bin/python" -c 'import mismatch_plugin, ray, transformers' 2> /dev/null); then
    echo "$directory is whole"
    exit 0
fi
if [ -e "$directory" ] && [ ! -f "$stamp" ] && [ ! -f "$directory/half-made" ] && [ -n "$(ls -A "$directory")" ]; then
    echo "$directory holds something that was not made by this: name another directory" >&2
    exit 2
fi
rm -rf "$directory"
mkdir -p "$directory"
touch "$directory/half-made"
"${PYTHON:-python3}" -m venv "$directory"
echo "installing what NeMo-RL's GRPO imports, and this package"
install torch transformers==5.10.4 "ray[default]==2.60.0" accelerate==1.15.0 datasets==5.2.0 hydra-core==1.3.8 \
    omegaconf==2.3.1 numpy==2.4.6 pillow==13.0.0 torchdata==0.11.0 tensordict==0.10.0 tensorboard==2.21.0 wandb==0.31.0 \
    matplotlib==3.11.2 rich==15.0.0 nvidia-ml-py==13.615.71 pyzmq==27.3.0 zstandard==0.25.0 \
    "math-verify[antlr4-9-3]==0.9.0" psutil==7.2.2 fastapi==0.165.0 uvicorn==0.54.0 scipy==1.17.1
install --editable .
rm "$directory/half-made"
made_from > "$stamp"
echo "$directory is whole: $(du -sh "$directory" | cut -f 1)"

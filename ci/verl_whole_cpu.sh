#!/usr/bin/env bash
# Make an environment in which verl's own verl.trainer.main_ppo runs whole on CPU: Ray, FSDP, TransferQueue, SGLang's server.
#
#   ci/verl_whole_cpu.sh [DIRECTORY]      (default: $VERL_WHOLE_VENV, else .venv-verl-whole)
#
# It is ci/sglang_cpu.sh's environment with verl from PyPI and what its trainer imports. One that is whole and made from
# these same files is left as it is. PYTHON chooses the interpreter (3.11 or later), PIP_ARGS goes to pip. About 3.5 GB.
set -euo pipefail
directory=$(realpath --canonicalize-missing "${1:-${VERL_WHOLE_VENV:-.venv-verl-whole}}")
cd "$(dirname "$0")/.."
source ci/on_sglang.sh

begin verl
echo "installing verl, what its trainer imports, and this package"
install --constraint ci/constraints-cpu.txt torch transformers==5.19.0 numpy==2.4.6 "ray[default]==2.60.0" \
    accelerate==1.15.0 cachetools==6.2.1 codetiming==1.4.0 datasets==5.2.0 hydra-core==1.3.8 omegaconf==2.3.1 peft==0.19.1 \
    pylatexenc==2.11 tensorboard==2.21.0 tensordict==0.10.0 torchdata==0.11.0 pytest==9.2.0 hypothesis==6.170.15
# without what they declare: verl asks for wandb and an older transformers, TransferQueue for nothing that is not here
install --no-deps verl==0.9.1 TransferQueue==0.1.11
rm -r "$directory"/lib/python3*/site-packages/tests  # theirs, which would hide ours
install --editable .
whole

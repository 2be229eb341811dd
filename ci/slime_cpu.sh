#!/usr/bin/env bash
# Make an environment in which slime's own train.py runs whole on CPU: Ray, Megatron-LM's imports, SGLang's server and
# router. miles's does as well (polars is for its dashboard).
#
#   ci/slime_cpu.sh [DIRECTORY]      (default: $SLIME_VENV, else .venv-slime)
#
# It is ci/sglang_cpu.sh's environment with slime's other requirements. One that is whole and made from these same files is
# left as it is. PYTHON chooses the interpreter (3.11 or later), PIP_ARGS goes to pip. About 3.5 GB and two to five minutes.
set -euo pipefail
directory=$(realpath --canonicalize-missing "${1:-${SLIME_VENV:-.venv-slime}}")
cd "$(dirname "$0")/.."
source ci/on_sglang.sh

begin slime
echo "installing what slime's trainer imports, and this package"
# slime refuses numpy 2 (slime/backends/megatron_utils/initialize.py): the newest that goes with 1.26 for each.
install --constraint ci/constraints-cpu.txt torch transformers==5.19.0 "ray[default]==2.60.0" accelerate==1.15.0 \
    tensorboard==2.21.0 wandb==0.31.0 datasets==5.2.0 pylatexenc==2.11 omegaconf==2.4.0 xxhash==4.1.0 zstandard==0.25.0 \
    blobfile==3.3.0 einops==0.8.2 "httpx[http2]==0.28.1" sglang-router==0.3.2 psutil==7.2.2 pytest==9.2.0 polars==1.42.1
install numpy==1.26.4 pandas==2.2.3 scipy==1.15.3 pyarrow==20.0.0
install --no-deps torch_memory_saver==0.0.10 numba==0.65.1 mbridge==0.15.1
install --editable .
whole

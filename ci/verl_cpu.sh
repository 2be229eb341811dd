#!/usr/bin/env bash
# Make an environment with verl from PyPI and this package in it, on CPU, for tests/hooks/verl_live.
#
#   ci/verl_cpu.sh [DIRECTORY]      (default: $VERL_VENV, else .venv-verl)
#
# An environment that is whole and made from this same file is left as it is; any other is made again.
# PYTHON chooses the interpreter, PIP_ARGS goes to pip. About 1.8 GB and two to five minutes.
set -euo pipefail
directory=$(realpath --canonicalize-missing "${1:-${VERL_VENV:-.venv-verl}}")
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp="$directory/made-from"
pins="$directory/requirements.txt"
read -r -a pip_args <<< "${PIP_ARGS:-}"

# verl without what it declares (vLLM's and wandb's company); below it what its loss, driver, configuration and
# these tests import.
requirements() {
    cat << 'END'
verl==0.9.1
codetiming==1.4.0
datasets==5.2.0
hydra-core==1.3.8
hypothesis==6.170.15
numpy==2.4.6
omegaconf==2.3.1
packaging==25.0
pillow==13.0.0
pytest==9.2.0
ray==2.60.0
tensordict==0.10.0
torchdata==0.11.0
transformers==5.10.4
END
}

made_from() {  # changes with everything that an environment is made from
    cat ci/verl_cpu.sh ci/constraints-cpu.txt | sha256sum
}

missing() {  # one sentence for the first thing that is not there as it was installed
    local repository=$PWD
    (cd / && "$directory/bin/python" - "$pins" "$repository") << 'END'
import re, sys
from importlib import metadata
from pathlib import Path

pins = re.findall(r"^([\w.-]+)==(\S+)", Path(sys.argv[1]).read_text(), re.MULTILINE)
for name, version in [*pins, ("torch", None), ("mismatch-plugin", None)]:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed")
    if version not in (None, distribution.version):
        sys.exit(f"{name} is {distribution.version}, not {version}")
    lost = [f for f in distribution.files or () if f.suffix != ".pyc" and not Path(str(f.locate())).exists()]
    if lost:
        sys.exit(f"{name} has lost {len(lost)} files, {lost[0]} among them")
import mismatch_plugin
if Path(mismatch_plugin.__file__).parents[1] != Path(sys.argv[2]):
    sys.exit(f"mismatch_plugin is that of {mismatch_plugin.__file__}")
if not metadata.entry_points(group="verl.plugins"):
    sys.exit("mismatch_plugin has no entry point for verl")
END
}

why_not_whole() {  # nothing if the environment is whole
    local reason
    if [ ! -e "$directory" ]; then
        echo "there is none yet"
    elif [ ! -f "$stamp" ]; then
        echo "it is half made"
    elif [ "$(cat "$stamp")" != "$(made_from)" ]; then
        echo "it was made from other files"
    elif ! reason=$(missing 2>&1); then
        printf '%s\n' "$reason" | tail -n 1
    fi
}

if [ -e "$directory" ] && [ ! -f "$directory/pyvenv.cfg" ] && [ -n "$(ls -A "$directory")" ]; then
    echo "$directory holds something else than a virtual environment: name another directory" >&2
    exit 2
fi
reason=$(why_not_whole)
if [ -z "$reason" ]; then
    echo "$directory is whole"
    exit 0
fi

echo "making $directory for verl on CPU ($reason)"
rm -rf "$directory"
"$python" -m venv "$directory"
requirements > "$pins"
pip=("$directory/bin/python" -m pip --quiet --quiet --disable-pip-version-check install "${pip_args[@]}")

echo "installing torch of ci/constraints-cpu.txt, verl, what it imports here, and this package"
"${pip[@]}" --constraint ci/constraints-cpu.txt torch
"${pip[@]}" --no-deps "$(grep '^verl==' "$pins")"
grep -v '^verl==' "$pins" > "$pins.others"
"${pip[@]}" --constraint ci/constraints-cpu.txt --requirement "$pins.others"
rm "$pins.others"
"${pip[@]}" --constraint ci/constraints-cpu.txt --editable .

echo "importing verl's loss and its configuration there"
VERL_USE_EXTERNAL_PLUGINS=none "$directory/bin/python" -W ignore -c \
    'import hydra, verl.trainer.ppo.rollout_corr_helper, verl.workers.utils.losses' 2> /dev/null
made_from > "$stamp"
echo "$directory is whole: $(du -sh "$directory" | cut -f 1)"

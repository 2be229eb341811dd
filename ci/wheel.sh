#!/usr/bin/env bash
# Build the wheel, install it into an empty environment without any extra, and see that it works there.
# PYTHON chooses the interpreter, PIP_ARGS goes to pip.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin="$work/venv/bin"
read -r -a pip_args <<< "${PIP_ARGS:-}"
constraints=()
if ! command -v nvidia-smi > /dev/null; then
    constraints=(--constraint ci/constraints-cpu.txt)
fi

echo "building the wheel"
"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$bin/python" -m pip --quiet --quiet --disable-pip-version-check)
"${pip[@]}" wheel "${pip_args[@]}" --no-deps --wheel-dir "$work/dist" .
ls "$work/dist"

echo "installing it into an empty environment"
"${pip[@]}" install "${pip_args[@]}" "${constraints[@]}" "$work"/dist/*.whl

echo "importing it there"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$work"  # away from the checkout, so that only the installed package can be found
"$bin/python" - << 'PYTHON'
import importlib.metadata
import importlib.resources
import sys

import mismatch_plugin

optional = ("megatron", "sglang", "transformers", "transformer_engine", "matplotlib")
imported = [name for name in optional if name in sys.modules]
assert not imported, f"import mismatch_plugin imported {imported}"
assert "site-packages" in mismatch_plugin.__file__, f"imported from {mismatch_plugin.__file__}"
assert importlib.metadata.version("mismatch-plugin") == mismatch_plugin.__version__
assert importlib.resources.files("mismatch_plugin").joinpath("py.typed").is_file(), "py.typed is not in the wheel"
installed = importlib.metadata.files("mismatch-plugin") or []
assert any(file.name == "LICENSE" for file in installed), "LICENSE is not in the wheel"
patches = importlib.resources.files("mismatch_plugin").joinpath("patches", "manifest.json")
assert patches.is_file(), "the patches are not in the wheel"
assert not any(file.parts[0] in ("tests", "ci") for file in installed), "tests are in the wheel"
PYTHON
"$bin/mismatch-plugin" --version
"$bin/mismatch-plugin" presets > presets.txt
"$bin/mismatch-plugin" explain > explain.txt
"$bin/mismatch-plugin" demo > demo.txt
test -s mismatch-demo/rollouts_inspect/report.html
echo "demo says: $(head -1 demo.txt)"
echo "the console script lists $(wc -l < presets.txt) lines of presets and explains in $(wc -l < explain.txt)"

#!/usr/bin/env bash
# Make an environment in which an unmodified sglang serves on CPU, without any CUDA package.
#
#   ci/sglang_cpu.sh [DIRECTORY]      (default: $SGLANG_VENV, else .venv-sglang)
#
# An environment that is whole and made from these same files is left as it is; any other is made again.
# PYTHON chooses the interpreter (3.11 or later), PIP_ARGS goes to pip. About 2.6 GB and one to three minutes.
set -euo pipefail
directory=$(realpath --canonicalize-missing "${1:-${SGLANG_VENV:-.venv-sglang}}")
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
parts=ci/sglang_cpu
stamp="$directory/made-from"
begun="$directory/half-made"
read -r -a pip_args <<< "${PIP_ARGS:-}"

made_from() {  # changes with everything that an environment is made from
    cat ci/sglang_cpu.sh "$parts"/{requirements.txt,torchvision_operators.py} "$parts"/sgl_kernel/*.py \
        ci/constraints-cpu.txt pyproject.toml | sha256sum
}

why_not_whole() {  # nothing if the environment is whole
    if [ ! -e "$directory" ]; then
        echo "there is none yet"
    elif [ ! -f "$stamp" ]; then
        echo "it is half made"
    elif [ "$(cat "$stamp")" != "$(made_from)" ]; then
        echo "it was made from other files"
    elif ! missing=$("$directory/bin/python" "$parts/check.py" "$parts/requirements.txt" 2>&1); then
        printf '%s\n' "$missing" | tail -n 1
    fi
}

if [ -e "$directory" ] && [ ! -f "$stamp" ] && [ ! -f "$begun" ] && [ -n "$(ls -A "$directory")" ]; then
    echo "$directory holds something that was not made by this: name another directory" >&2
    exit 2
fi
reason=$(why_not_whole)
if [ -z "$reason" ]; then
    echo "$directory is whole"
    exit 0
fi

echo "making $directory for sglang on CPU ($reason)"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$("$python" --version) is too old for sglang: set PYTHON to 3.11 or later" >&2
    exit 2
fi
rm -rf "$directory"
mkdir -p "$directory"
touch "$begun"
"$python" -m venv "$directory"
bin="$directory/bin"
pip=("$bin/python" -m pip --quiet --quiet --disable-pip-version-check install "${pip_args[@]}")

echo "installing torch of ci/constraints-cpu.txt, sglang and what it imports on CPU"
"${pip[@]}" --constraint ci/constraints-cpu.txt torch
"${pip[@]}" --no-deps --requirement "$parts/requirements.txt"

echo "installing this package, for its SGLang plugin"
"${pip[@]}" --no-deps --editable .

site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -R "$parts/sgl_kernel" "$site/"
operators="$site/torchvision/_meta_registrations.py"
cat "$parts/torchvision_operators.py" "$operators" > "$operators.new"
mv "$operators.new" "$operators"

echo "importing the server there"
SGLANG_USE_CPU_ENGINE=1 "$bin/python" -W ignore -c 'import sglang.srt.entrypoints.http_server'
made_from > "$stamp"
rm "$begun"
echo "$directory is whole: $(du -sh "$directory" | cut -f 1), $("$bin/python" -m pip freeze | grep -c .) distributions"

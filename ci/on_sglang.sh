# Sourced by scripts that put a trainer next to the SGLang of ci/sglang_cpu.sh; $directory is where. `begin` and `whole`
# go around the installation.

made_from() {
    cat "ci/$(basename "$0")" ci/on_sglang.sh ci/sglang_cpu.sh ci/sglang_cpu/{requirements.txt,torchvision_operators.py} \
        ci/sglang_cpu/sgl_kernel/*.py ci/constraints-cpu.txt | sha256sum
}

# pip names packages of which these are other versions on purpose: it is heard only where it fails.
install() {
    "$directory/bin/python" -m pip --quiet --quiet --disable-pip-version-check install "${pip_args[@]}" "$@" \
        > "$directory/pip.log" 2>&1 || { cat "$directory/pip.log" >&2; exit 1; }
}

begin() {  # begin NAME: ends here where the environment is whole, else makes it anew up to SGLang
    stamp="$directory/$1-made-from"
    read -r -a pip_args <<< "${PIP_ARGS:-}"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(made_from)" ] &&
        (cd / && "$directory/bin/python" -c 'import mismatch_plugin, ray, transformers, sglang' 2> /dev/null); then
        echo "$directory is whole"
        exit 0
    fi
    if [ -f "$directory/made-from" ]; then  # half made, as it lacks the rest: made again
        rm -f "$stamp"
        mv "$directory/made-from" "$directory/half-made"
    fi
    ci/sglang_cpu.sh "$directory"
}

whole() {
    made_from > "$stamp"
    echo "$directory is whole: $(du -sh "$directory" | cut -f 1)"
}

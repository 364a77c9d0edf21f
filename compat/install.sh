#!/usr/bin/env bash
# Fills the virtual environment $1 with this project: install.sh VENV [EXTRA...]
# Finds out by itself whether CUDA is there, prints what it chose, and installs everything in one call: of uv, which is
# taken from the index if it is missing, with pip's settings; else of pip.
set -euo pipefail
venv=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=$venv/bin/python

if [[ -n "${LMM_R1_BACKEND:-}" ]]; then
    backend=$LMM_R1_BACKEND reason="LMM_R1_BACKEND is set"
elif nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
    backend=gpu reason="nvidia-smi lists $(nvidia-smi --list-gpus | wc -l) GPU(s)"
else
    backend=cpu reason="nvidia-smi lists no GPU"
fi
if [[ $backend == cpu ]]; then size="5 GB"; else size="12 GB"; fi
extras=$(IFS=,; echo "$backend${*:+,$*}")
echo "install: backend $backend ($reason), extras [$extras], $("$python" --version), into $venv"
echo "install: about $size on disk; two to ten minutes, by the network"

# The real flash-attn stays where it is; otherwise the stand-in satisfies OpenRLHF's requirement.
requirements=(--editable "${root}[$extras]")
"$python" -c "import flash_attn_2_cuda" 2>/dev/null || requirements+=("$root/compat/flash-attn")

# PyPI builds these for CUDA: on a CPU build of torch their import fails, also for libraries that only probe them.
unusable=()
if [[ $backend == cpu ]]; then unusable=(torchaudio torchcodec); fi

# uv takes a third of pip's time: it downloads in parallel and links files instead of copying them.
uv=$(command -v uv || true)
if [[ -z $uv ]] && "$python" -m pip install --quiet uv; then uv=$venv/bin/uv; fi
if [[ -n $uv ]] && settings=$("$python" -m pip config list | "$python" "$root/compat/uv_settings.py"); then
    mapfile -t variables <<<"$settings"
    # A marker that is never true leaves a requirement of others out. Of uv's lines, those of 250 packages are left out.
    printf '%s; python_version < "3"\n' "${unusable[@]}" >"$venv/overrides.txt"
    env "${variables[@]}" "$uv" pip install --python "$python" --overrides "$venv/overrides.txt" "${requirements[@]}" \
        2> >(grep --line-buffered -v '^ [+~-] ' >&2) && exit
    echo "install: uv failed"
fi

echo "install: with pip; it prints nothing for several minutes while it copies files"
"$python" -m pip install --progress-bar off --prefer-binary "${requirements[@]}" |
    grep --line-buffered -E "^(Installing|Successfully)" | cut -c1-100
for package in "${unusable[@]}"; do
    if ! "$python" -c "import $package" 2>/dev/null; then
        "$python" -m pip uninstall --yes --quiet "$package"
        echo "install: $package removed (built for CUDA, cannot be imported here)"
    fi
done

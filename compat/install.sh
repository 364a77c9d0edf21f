#!/usr/bin/env bash
# Fills the virtual environment $1 with this project: install.sh VENV [EXTRA...]
# Finds out by itself whether CUDA is there, prints what it chose, and installs everything in one pip call.
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
extras=$(IFS=,; echo "$backend${*:+,$*}")
echo "install: backend $backend ($reason), extras [$extras], $("$python" --version), into $venv"

# The real flash-attn stays where it is; otherwise the stand-in satisfies OpenRLHF's requirement.
requirements=(--editable "${root}[$extras]")
"$python" -c "import flash_attn_2_cuda" 2>/dev/null || requirements+=("$root/compat/flash-attn")
"$python" -m pip install --progress-bar off --prefer-binary "${requirements[@]}" |
    grep --line-buffered -E "^(Collecting|Installing|Successfully)" | cut -c1-100

if [[ $backend == cpu ]]; then
    # PyPI builds these for CUDA: on a CPU build of torch their import fails, also for libraries that only probe them.
    for package in torchaudio torchcodec; do
        if ! "$python" -c "import $package" 2>/dev/null; then
            "$python" -m pip uninstall --yes --quiet "$package"
            echo "install: $package removed (built for CUDA, cannot be imported here)"
        fi
    done
fi

#!/bin/sh
# Installs tilekernels from this folder, without a network: ./install.sh [--label cu130.sm90a] [--python PYTHON] [-- PIP OPTIONS]
#
# Checks the checksums first. Without --label the GPU decides (nvidia-smi); torch >= 2.10 has to be there already.
# Needs a shell, sha256sum, Python with pip, and a folder for temporary files (TMPDIR). No compiler, no HOME.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
label=
python=python3
while [ $# -gt 0 ]; do
    case $1 in
        --label) label=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --) shift; break ;;
        *) sed -n 's/^# //p' "$0" | head -n 1; exit 2 ;;
    esac
done

labels() { for folder in "$here"/index/*/; do basename "$folder"; done; }

# The architecture of a compute capability, as `tilekernels doctor` names it.
architecture() {
    case $1 in
        8.9) echo sm89 ;; 8.*) echo sm80 ;; 9.0) echo sm90a ;; 10.0) echo sm100a ;; 10.3) echo sm103a ;; 12.*) echo sm120a ;;
    esac
}

(cd "$here" && sha256sum --check --quiet SHA256SUMS) || {
    echo "error: a file of this bundle is damaged: copy the bundle again" >&2
    exit 1
}

if [ -z "$label" ] && command -v nvidia-smi > /dev/null; then
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | head -n 1)
    wanted=$(architecture "$capability")
    for each in $(labels); do
        case .$each. in *.$wanted.*) label=$each ;; esac
    done
    [ -n "$label" ] || echo "no wheel here serves compute capability $capability" >&2
elif [ -z "$label" ] && [ "$(labels | wc -l)" -eq 1 ]; then
    label=$(labels)
fi
if [ ! -d "$here/index/$label/tilekernels" ] || [ -z "$label" ]; then
    echo "error: say which wheel by --label: $(labels | tr '\n' ' ')" >&2
    exit 1
fi

"$python" -c 'import importlib.metadata as m; m.version("torch")' 2> /dev/null || {
    echo "error: $python has no torch: install the cluster's own torch >= 2.10 first" >&2
    exit 1
}

"$python" -m pip --disable-pip-version-check --isolated install --no-index --no-cache-dir --only-binary :all: \
    --find-links "$here/index/$label/tilekernels" --find-links "$here/dependencies" "$@" tilekernels
echo "installed $label; now run: tilekernels verify && tilekernels doctor"

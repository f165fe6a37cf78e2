#!/usr/bin/env bash
# Builds the examples against an installed package and runs them on the GPU; with compute-sanitizer where it is found.
#
#   examples/cpp/run_on_gpu.sh [FOLDER]        needs g++, python with the package, and an NVIDIA GPU
set -euo pipefail
sources="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:-$(mktemp -d)}"
python="${PYTHON:-python3}"
cd "$folder"

include="$("$python" -m tilekernels --include-dir)"
lib="$("$python" -m tilekernels --lib-dir)"
for example in quantize moe_layer two_contexts; do
    g++ -std=c++17 -O2 "-I$include" "$sources/$example.cpp" "$lib/libtilekernels.so.0" "-Wl,-rpath,$lib" -ldl -pthread \
        -o "$example"
done
"$python" "$sources/make_batch.py" batch.tensors expected.tensors

./quantize
./moe_layer batch.tensors expected.tensors
./two_contexts

sanitizer="$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" command -v compute-sanitizer || true)"
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer: not found (PATH, CUDA_HOME/bin), left out"
    exit
fi
check() {
    echo "compute-sanitizer --tool $*"
    "$sanitizer" --error-exitcode 1 --tool "$@"
}
check memcheck ./quantize
check memcheck ./moe_layer batch.tensors expected.tensors
check memcheck ./two_contexts
check racecheck ./quantize
check racecheck ./two_contexts
# Not moe_layer: racecheck takes minutes for the products' shared memory

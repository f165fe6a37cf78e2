#!/bin/sh
# Packs the wheels of one Python again, in another folder, on another file system, with another umask, number of jobs, locale
# and time zone, and compares them with those of `make wheels`:
#
#   benchmarks/reproduce.sh dist build/store/default /usr/bin/python3.11 /dev/shm/elsewhere
#
# The kernel store is copied; that kernels come out the same is tests/build_tools/test_build_cli.py and benchmarks/spread.py.
set -eu
dist=$(realpath "$1") store=$(realpath "$2") python=$3 elsewhere=$4
root=$(cd "$(dirname "$0")/.." && pwd)

mkdir -p "$elsewhere"
(cd "$root" && git ls-files -z | tar cf - --null --files-from=-) | tar xf - -C "$elsewhere" --touch --no-same-permissions
cp -r "$store" "$elsewhere/store"
mkdir "$elsewhere/build"
ln -s "$root/build/zig" "$elsewhere/build/zig"    # zig's own library, minutes of work that differs by target alone
cd "$elsewhere"
umask 077
export CMAKE_BUILD_PARALLEL_LEVEL=1 LC_ALL=C TZ=Asia/Tokyo TMPDIR="$elsewhere/build"
"${RUN:-python3}" -m build_tools.wheels --store store --dist out --pythons "$python"
status=0
for wheel in out/*.whl; do
    if cmp "$wheel" "$dist/${wheel##*/}"; then
        echo "the same bytes: $(sha256sum "$wheel" | cut -c 1-64) ${wheel##*/}"
    else
        status=1
    fi
done
exit $status

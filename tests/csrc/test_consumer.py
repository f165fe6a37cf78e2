"""A program outside of the tree: found by CMake or pkg-config, built by g++, against a library of g++ and one of zig,
installed and in a wheel.

PATH holds a C++ compiler and CMake alone: no python, no nvcc.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.conftest import BUILD, ROOT, locked, run, write_store

TOOLS = ("g++", "gcc", "c++", "cc", "as", "ld", "ar", "ranlib", "make", "cmake", "pkg-config", "sh", "uname", "unzip")
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")

PROJECT = """\
cmake_minimum_required(VERSION 3.24)
project(engine LANGUAGES CXX)
find_package(tilekernels 0.1 CONFIG REQUIRED COMPONENTS @components@ OPTIONAL_COMPONENTS sm_100a demo.topk)
foreach(name IN ITEMS ARCHS KERNELS FULL_VERSION PROFILE CUDA_VERSION sm_100a_FOUND demo.topk_FOUND)
  message(STATUS "${name} = ${tilekernels_${name}}")
endforeach()
add_executable(engine engine.cpp)
target_compile_features(engine PRIVATE cxx_std_17)
target_link_libraries(engine PRIVATE tilekernels::tilekernels)
"""

ENGINE = """\
#include <cstdio>
#include "tilekernels/ops.h"
#include "tilekernels/quant.hpp"

int main() {
  using namespace tilekernels;
  const Tensor scores = Tensor::dense(nullptr, kBfloat16, {6, 64}, {TK_CPU, 0});
  Tensor out = Tensor::dense(nullptr, kInt64, {6, 4}, {TK_CPU, 0});
  out = Tensor(out);
  tk_demo_topk_args args = {};
  try {
    check(tk_demo_topk(&args, nullptr));
  } catch (const Error& error) {
    std::printf("%s: %s\\n", tk_status_name(error.status()), error.what());
  }
  args = make_args<tk_demo_topk_args>();
  args.scores = scores;
  args.out = out;
  if (Status status = tk_demo_topk(&args, nullptr); !status) {
    std::printf("%s: %s\\n", status.name(), status.message().c_str());
  }
  std::printf("covers %d %d %d\\n", covers("demo.sync"), covers("demo.sync", "sm_80"), covers("demo.nothing"));
  for (const tk_variant_info& variant : variants("demo.cast")) std::printf("%s for %s\\n", variant.id, variant.arch);
}
"""

PRINTED = [
    "TK_INVALID_ARGUMENT: demo.topk: the arguments must be a struct whose size field is sizeof that struct, 48 here, "
    "got 0",
    "TK_INVALID_TYPE: demo.topk: scores must be float32, got bfloat16",
    "covers 1 0 0",
    "bf16_e4m3 for sm_80",
    "bf16_e5m2 for sm_80",
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose PATH has what a C++ project needs, and nothing else."""
    folder = tmp_path_factory.mktemp("bin")
    for name in TOOLS:
        found = shutil.which(name, path=os.pathsep.join([*FOLDERS, *packaged_cmake()]))
        if found:
            (folder / name).symlink_to(found)
    for name in ("python", "python3", "nvcc"):
        assert shutil.which(name, path=str(folder)) is None
    return {"PATH": str(folder), "HOME": str(folder), "LANG": "C.UTF-8"}


def packaged_cmake() -> list[str]:
    """The folder of CMake's program where it comes from its Python package, whose script on PATH needs Python."""
    spec = importlib.util.find_spec("cmake")
    return [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent / "data" / "bin")]


def write_project(folder: Path, components: str = "sm_90a") -> None:
    (folder / "CMakeLists.txt").write_text(PROJECT.replace("@components@", components))
    (folder / "engine.cpp").write_text(ENGINE)


def build_project(folder: Path, prefix: Path, environment: dict[str, str]) -> str:
    """Build and run the project; what CMake said."""
    write_project(folder)
    said = run(["cmake", "-S", folder, "-B", folder / "tree", f"-DCMAKE_PREFIX_PATH={prefix}"], environment)
    run(["cmake", "--build", folder / "tree"], environment)
    assert run([folder / "tree" / "engine"], environment).splitlines() == PRINTED
    return said


def test_cmake_project(installed: Path, bare: dict[str, str], tmp_path: Path) -> None:
    said = build_project(tmp_path, installed, bare)
    assert re.findall(r"^-- (\S+) = (.*)$", said, re.MULTILINE) == [
        ("ARCHS", "sm_80;sm_90a"),
        ("KERNELS", "demo.cast;demo.sync;demo.topk;demo.transpose"),
        ("FULL_VERSION", "0.1.0"),
        ("PROFILE", "hand"),
        ("CUDA_VERSION", "13.0.88"),
        ("sm_100a_FOUND", "FALSE"),
        ("demo.topk_FOUND", "TRUE"),
    ]


@pytest.mark.parametrize("component", ["sm_120a", "moe.topk_gate"])
def test_cmake_tells_of_a_missing_component(
    installed: Path, bare: dict[str, str], tmp_path: Path, component: str
) -> None:
    write_project(tmp_path, component)
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "tree", f"-DCMAKE_PREFIX_PATH={installed}"]
    result = subprocess.run(list(map(str, command)), env=bare, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"the library has no {component}: it was built for" in " ".join(result.stderr.split())


def test_pkg_config(installed: Path, bare: dict[str, str], tmp_path: Path) -> None:
    """Also after the folder has moved: the file names nothing but its own place."""
    if shutil.which("pkg-config", path=bare["PATH"]) is None:
        pytest.skip("this machine has no pkg-config")
    prefix = tmp_path / "moved"
    shutil.copytree(installed, prefix)
    write_project(tmp_path)
    found = bare | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    assert run(["pkg-config", "--modversion", "tilekernels"], found) == "0.1.0\n"
    assert run(["pkg-config", "--variable=archs", "tilekernels"], found) == "sm_80 sm_90a\n"
    flags = run(["pkg-config", "--cflags", "--libs", "tilekernels"], found).split()
    program = tmp_path / "engine"
    run(["g++", "-std=c++17", tmp_path / "engine.cpp", *flags, "-o", program], bare)
    assert run([program], bare | {"LD_LIBRARY_PATH": str(prefix / "lib")}).splitlines() == PRINTED


def test_static_c_runtime(installed: Path, bare: dict[str, str], tmp_path: Path) -> None:
    """A program may carry its C++ runtime in itself: the library wants none."""
    write_project(tmp_path)
    library = installed / "lib" / "libtilekernels.so.0"
    program = tmp_path / "engine"
    flags = ["-std=c++17", f"-I{installed}/include", "-static-libstdc++", "-static-libgcc"]
    run(["g++", *flags, tmp_path / "engine.cpp", library, f"-Wl,-rpath,{library.parent}", "-o", program], bare)
    assert "libstdc++" not in run(["readelf", "--dynamic", program])
    assert run([program], bare).splitlines() == PRINTED


def test_static_library(bare: dict[str, str], tools: dict[str, str], tmp_path: Path) -> None:
    store, prefix = tmp_path / "store", tmp_path / "prefix"
    write_store(store)
    options = [f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF", "-DTILEKERNELS_STATIC=ON"]
    run(["cmake", "-S", ROOT, "-B", tmp_path / "library", *options], tools)
    run(["cmake", "--build", tmp_path / "library", "--parallel", "2"], tools)
    run(["cmake", "--install", tmp_path / "library", "--prefix", prefix], tools)
    write_project(tmp_path)
    project = (tmp_path / "CMakeLists.txt").read_text().replace("tilekernels::tilekernels", "tilekernels::static")
    (tmp_path / "CMakeLists.txt").write_text(project.replace("LANGUAGES CXX", "LANGUAGES C CXX"))
    run(["cmake", "-S", tmp_path, "-B", tmp_path / "tree", f"-DCMAKE_PREFIX_PATH={prefix}"], bare)
    run(["cmake", "--build", tmp_path / "tree"], bare)
    assert "libtilekernels" not in run(["readelf", "--dynamic", tmp_path / "tree" / "engine"])
    assert run([tmp_path / "tree" / "engine"], bare).splitlines() == PRINTED


# ---- a library that another compiler made ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_by_zig(tools: dict[str, str]) -> Path:
    """The installed library of the hand-written tables, built by zig for an old glibc as released wheels are."""
    zig = find_zig()
    folder = BUILD.with_name("csrc-zig")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        toolchain = folder / "zig.cmake"
        target = "-target x86_64-linux-gnu.2.28"
        words = ";".join(zig)
        toolchain.write_text(
            f'set(CMAKE_C_COMPILER "{words};cc;{target.replace(" ", ";")}")\n'
            f'set(CMAKE_CXX_COMPILER "{words};c++;{target.replace(" ", ";")}")\n'
            f'set(CMAKE_ASM_COMPILER "{words};cc;{target.replace(" ", ";")}")\n'
        )
        write_store(folder / "store")
        options = [f"-DTILEKERNELS_STORE={folder / 'store'}", "-DTILEKERNELS_PYTHON=OFF"]
        cache = tools | {"ZIG_GLOBAL_CACHE_DIR": str(folder / "cache"), "ZIG_LOCAL_CACHE_DIR": str(folder / "cache")}
        run(["cmake", "-S", ROOT, "-B", folder / "cmake", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", *options], cache)
        run(["cmake", "--build", folder / "cmake", "--parallel", "2"], cache)
        run(["cmake", "--install", folder / "cmake", "--prefix", folder / "prefix"], cache)
    return folder / "prefix"


def find_zig() -> list[str]:
    """zig's command: the Python package `ziglang` of this environment, of $TILEKERNELS_ZIG, or skip."""
    python = os.environ.get("TILEKERNELS_ZIG", sys.executable)
    if subprocess.run([python, "-c", "import ziglang"], capture_output=True, check=False).returncode:
        pytest.skip("ziglang is not installed; name a Python that has it in TILEKERNELS_ZIG")
    return [python, "-m", "ziglang"]


def test_project_of_gcc_with_a_library_of_zig(made_by_zig: Path, bare: dict[str, str], tmp_path: Path) -> None:
    build_project(tmp_path, made_by_zig, bare)


def test_library_of_zig_exports_and_needs_no_more(made_by_zig: Path) -> None:
    check_what_it_exports_and_needs(made_by_zig / "lib" / "libtilekernels.so.0")


def check_what_it_exports_and_needs(library: Path) -> None:
    symbols = [line.split()[-1] for line in run(["nm", "-D", "--defined-only", library]).splitlines()]
    assert [symbol for symbol in symbols if not symbol.startswith("tk_")] == []
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "--dynamic", "--wide", library])))
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "ld-linux-x86-64.so.2"}
    versions = re.findall(r"GLIBC_2\.(\d+)", run(["readelf", "--version-info", "--wide", library]))
    assert max(map(int, versions)) <= 28


# ---- a wheel that another compiler made: no installer, no Python -----------------------------------------------------

WHEEL_PROJECT = """\
cmake_minimum_required(VERSION 3.24)
project(engine LANGUAGES CXX)
find_package(tilekernels 0.1 CONFIG REQUIRED COMPONENTS sm_90a transpose.transpose)
add_executable(engine engine.cpp)
target_compile_features(engine PRIVATE cxx_std_17)
target_link_libraries(engine PRIVATE tilekernels::tilekernels ${CMAKE_DL_LIBS})
"""

WHEEL_ENGINE = """\
#include <cstdio>
#include "cuda_driver.h"
#include "tilekernels/ops.h"
#include "tilekernels/tilekernels.hpp"

int main() try {
  using namespace tilekernels;
  const DeviceScope device(0);
  const cuda::Stream stream;
  const cuda::Buffer memory(2 * 6 * 4 * 2);
  const Tensor x = Tensor::dense(memory.get(), kBfloat16, {6, 4});
  const Tensor out = Tensor::dense(static_cast<char*>(memory.get()) + 48, kBfloat16, {4, 6});
  auto args = make_args<tk_transpose_transpose_args>();
  args.x = x;
  args.out = out;
  check(tk_transpose_transpose(&args, stream.get()));
  std::puts("launched");
  args.out = x;
  check(tk_transpose_transpose(&args, stream.get()));
} catch (const tilekernels::Error& error) {
  std::printf("%s: %s\\n", tk_status_name(error.status()), error.what());
}
"""


@pytest.fixture(scope="module")
def unpacked(zig_wheel: Path, bare: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of a wheel as released, out of its archive."""
    folder = tmp_path_factory.mktemp("wheel")
    run(["unzip", "-q", zig_wheel, "-d", folder], bare)
    return folder / "tilekernels"


def test_project_with_a_wheel(unpacked: Path, bare: dict[str, str], driver_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(WHEEL_PROJECT)
    (tmp_path / "engine.cpp").write_text(WHEEL_ENGINE)
    shutil.copy(ROOT / "examples" / "cpp" / "cuda_driver.h", tmp_path)
    run(["cmake", "-S", tmp_path, "-B", tmp_path / "tree", f"-DCMAKE_PREFIX_PATH={unpacked}"], bare)
    run(["cmake", "--build", tmp_path / "tree"], bare)
    said = run([tmp_path / "tree" / "engine"], bare | {"LD_LIBRARY_PATH": str(driver_folder)})
    assert said.splitlines() == [
        "launched",
        "TK_INVALID_ARGUMENT: transpose.transpose: out must have shape (num_cols, num_rows) = (4, 6), got (6, 4)",
    ]


def test_library_of_a_wheel_exports_and_needs_no_more(unpacked: Path) -> None:
    check_what_it_exports_and_needs(unpacked / "lib" / "libtilekernels.so.0")


def test_the_guide_from_a_wheel_to_a_running_program(
    zig_wheel: Path, bare: dict[str, str], driver_folder: Path, tmp_path: Path
) -> None:
    """The commands of docs/cpp.md as they stand there, but for the name of the wheel."""
    commands = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "cpp.md").read_text(), re.DOTALL)[0]
    commands, renamed = re.subn(r"tilekernels-\S+\.whl", str(zig_wheel), commands)
    assert renamed == 1
    shutil.copytree(ROOT / "examples" / "cpp", tmp_path / "examples" / "cpp")
    script = f"cd '{tmp_path}' && set -e\n{commands}"
    said = run(["sh", "-c", script], bare | {"LD_LIBRARY_PATH": str(driver_folder)})
    assert said.splitlines()[-1] == "1.0 is 0x00 times 0"  # kernels of the fake driver compute nothing

"""An overlay pack: a shared object with variants that an installed library was built without (`make pack`).

    python -m build_tools.overlay --profile recorded.toml --output dist/tilekernels_pack_recorded.so
    TILEKERNELS_PACK_PATH=dist/tilekernels_pack_recorded.so python serve.py

TILEKERNELS_RECORD=recorded.toml writes such a profile while a program runs. The pack comes from the same sources as the
library, which looks at every parameter and axis before it takes one (csrc/src/pack.cpp).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import BuildError
from .packing import MACHINES, Target, backend_environment, run_tool, zig_environment
from .store import default_store_folder
from .wheel import ensure_nvcc
from .wheel_label import ROOT, label_of_store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, help="profiles/<name>.toml, or a path: what the pack holds")
    parser.add_argument("--archs", default="", help="GPUs instead of the profile's")
    parser.add_argument("--store", type=Path, help="a finished kernel store instead: no kernel is built")
    parser.add_argument("--output", type=Path, help="the file.  [default: dist/tilekernels_pack_<profile>.so]")
    parser.add_argument("--machine", choices=MACHINES, help="for old systems and this processor, by zig")
    arguments = parser.parse_args()
    name = Path(arguments.profile).stem
    output = (arguments.output or Path("dist") / f"tilekernels_pack_{name}.so").resolve()
    profile = arguments.profile if not arguments.profile.endswith(".toml") else str(Path(arguments.profile).resolve())
    os.chdir(ROOT)
    try:
        store = arguments.store.resolve() if arguments.store else build_store(profile, arguments.archs)
        print(f"pack: {make_pack(store, output, Target(arguments.machine))} ({output.stat().st_size / 1e6:.1f} MB)")
    except (BuildError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: ended with {error.returncode}: {' '.join(map(str, error.cmd))}")


def build_store(profile: str, archs: str) -> Path:
    ensure_nvcc()
    store = default_store_folder(f"pack-{Path(profile).stem}")
    chosen = ["--archs", archs] if archs else []
    command = [sys.executable, "-m", "build_tools", "build", "--profile", profile, "--store", str(store), *chosen]
    subprocess.run(command, check=True)
    return store


def make_pack(store: Path, output: Path, target: Target) -> Path:
    """Compile the library of a store as a pack."""
    label_of_store(store)  # refuses a store of other sources
    environment = backend_environment(Path(sys.prefix) / "bin")
    environment.pop("TILEKERNELS_STORE", None)
    if target.machine is not None:
        environment |= zig_environment(target)
    tree = ROOT / "build" / "cmake" / f"pack-{store.name}-{target.name}"
    options = [f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PACK=ON", "-DTILEKERNELS_PYTHON=OFF"]
    configure = ["cmake", "-S", str(ROOT), "-B", str(tree), "-G", "Ninja", *options]
    run_tool("configuring the pack", configure, environment)
    run_tool("compiling the pack", ["cmake", "--build", str(tree), "--target", "tilekernels"], environment)
    output.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tree / "csrc" / "libtilekernels.so.0", output)
    output.chmod(0o755)
    return output


if __name__ == "__main__":
    main()

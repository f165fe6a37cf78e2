"""What importing costs and loads, and what a broken install says about itself. Each import is a new process."""

import importlib.resources
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tilekernels
from tilekernels import _native

FAMILIES = ("moe", "quant", "transpose")


def run_python(code: str, path: Path | None = None) -> str:
    """Output of `code` in a new interpreter that finds the package where this one does, or in folder `path`."""
    package_folder = path or Path(str(importlib.resources.files("tilekernels"))).parent
    environment = {**os.environ, "PYTHONPATH": str(package_folder)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def loaded_modules(code: str) -> set[str]:
    """Top-level modules, and those of this package, that are loaded after `code`."""
    listing = run_python(f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))")
    return {name for name in json.loads(listing.splitlines()[-1]) if "." not in name or name.startswith("tilekernels.")}


def test_import_loads_neither_torch_nor_extension_nor_command() -> None:
    loaded = loaded_modules("import tilekernels")
    assert "tilekernels" in loaded
    assert not loaded & {"torch", "numpy", "click", "rich", "tilekernels._C", "tilekernels._dispatch"}


def test_layout_and_config_load_no_torch() -> None:
    assert "torch" not in loaded_modules("import tilekernels.layout, tilekernels.config")


def test_families_load_no_compiler_and_no_command() -> None:
    loaded = loaded_modules("".join(f"import tilekernels.{family}\n" for family in FAMILIES))
    assert "torch" in loaded
    assert not loaded & {"tilelang", "tvm", "tvm_ffi", "kernels_src", "build_tools", "click", "rich"}


def test_loading_a_family_touches_no_gpu_and_no_setting_of_the_driver() -> None:
    code = (
        "import os; before = dict(os.environ)\nimport torch, tilekernels\ntilekernels.quant, tilekernels.moe\n"
        "print(torch.cuda.is_initialized(), dict(os.environ) == before)"
    )
    assert run_python(code).split() == ["False", "True"]


def test_families_load_no_package_beyond_torch() -> None:
    """What keeps the import short; how long it takes is measured by benchmarks/host_overhead.py."""
    touched = "; ".join(f"tilekernels.{family}" for family in FAMILIES)
    code = (
        "import json, sys, torch\nbefore = set(sys.modules)\n"
        f"import tilekernels; {touched}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = json.loads(run_python(code))
    ours = [name for name in new if name.split(".")[0] == "tilekernels"]
    assert len(ours) > 10
    others = {name.split(".")[0] for name in new} - {"tilekernels"} - sys.stdlib_module_names
    assert others <= {"torch"}
    assert not {name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))}


def test_families_are_attributes() -> None:
    assert tilekernels.moe.topk_gate.__name__ == "topk_gate"
    assert set(FAMILIES) <= set(dir(tilekernels))
    assert set(tilekernels.__all__) <= set(dir(tilekernels))
    assert [name for name in tilekernels.__all__ if not hasattr(tilekernels, name)] == []


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'tilekernels' has no attribute 'nonsense'"):
        _ = tilekernels.nonsense


def test_typing_information_is_shipped() -> None:
    assert (importlib.resources.files("tilekernels") / "py.typed").is_file()


# ---- broken installs -------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package's Python files, without its compiled ones."""
    source = Path(str(importlib.resources.files("tilekernels")))
    shutil.copytree(source, tmp_path / "tilekernels", ignore=shutil.ignore_patterns("_C*", "lib", "__pycache__"))
    return tmp_path


def error_of_loading(folder: Path) -> str:
    code = "from tilekernels._native import load_native\ntry: print(load_native())\nexcept ImportError as e: print(e)"
    return run_python(code, folder)


def extension_file(folder: Path) -> Path:
    return folder / "tilekernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def test_no_extension_is_not_an_error(copy: Path) -> None:
    assert error_of_loading(copy) == "None\n"


def test_damaged_extension_is_diagnosed(copy: Path) -> None:
    extension_file(copy).write_text("not a library")
    text = error_of_loading(copy)
    assert "tilekernels._C does not load: the file is damaged or made for another kind of machine" in text


def test_extension_for_another_python_is_named(copy: Path) -> None:
    (copy / "tilekernels" / "_C.cpython-37m-x86_64-linux-gnu.so").touch()
    assert "tilekernels._C was built for another Python (_C.cpython-37m-x86_64-linux-gnu.so found)" in error_of_loading(
        copy
    )


def test_library_of_another_version_is_named(copy: Path) -> None:
    (copy / "tilekernels" / "_C.py").write_text("def version(): return '0.0.1+cu130.sm90a'")
    text = error_of_loading(copy)
    assert f"the Python files are {tilekernels.__version__}, the library is 0.0.1+cu130.sm90a" in text


def test_label_of_the_library_does_not_matter(copy: Path) -> None:
    version = f"{tilekernels.__version__}+cu130.sm90a"
    (copy / "tilekernels" / "_C.py").write_text(f"def version(): return {version!r}")
    assert error_of_loading(copy).startswith("<module 'tilekernels._C'")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to make a broken library")
def test_undefined_symbol_is_not_taken_for_a_missing_gpu(copy: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.c"
    source.write_text("void tk_of_another_build(void); void* PyInit__C(void) { tk_of_another_build(); return 0; }")
    command = ["g++", "-x", "c", "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o", str(extension_file(copy))]
    subprocess.run(command, check=True)
    text = error_of_loading(copy)
    assert "two builds are mixed" in text
    assert "not about the GPU architecture" in text
    assert "undefined symbol: tk_of_another_build" in text


@pytest.mark.parametrize(
    ("linker_text", "meaning"),
    [
        ("libtilekernels.so.0: cannot open shared object file: No such file or directory", "install is incomplete"),
        ("/lib/libc.so.6: version `GLIBC_2.38' not found (required by _C.so)", "use the manylinux wheel"),
        ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found", "use the manylinux wheel"),
        ("undefined symbol: _ZN3c105ErrorC2E", "two builds are mixed"),
        ("libfoo.so.1: cannot open shared object file", "a system library that the extension needs is missing"),
        ("something new", "the dynamic linker refused it"),
    ],
)
def test_diagnoses(linker_text: str, meaning: str) -> None:
    assert meaning in _native.diagnose(linker_text)

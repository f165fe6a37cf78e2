"""plan: the matrix of a profile, its order, its refusals, and that the trace key sees every change that matters."""

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from build_tools.errors import PlanError
from build_tools.kernel_files import REPOSITORY
from build_tools.plan import Profile, Variant, load_kernels, load_profile, plan, trace_key

KERNELS = Path(__file__).parent / "fixtures" / "kernels"


def profile_of(tmp_path: Path, text: str) -> Profile:
    file = tmp_path / "own.toml"
    file.write_text(textwrap.dedent(text))
    return load_profile(file)


def variant(kernel: str, arch: str = "sm_90a", root: Path = KERNELS, variant_id: str | None = None) -> Variant:
    """The first variant of a fixture kernel, or the one with this id."""
    variants = plan(Profile("test", (arch,), include=(kernel,)), root=root)
    return next(found for found in variants if variant_id in (None, found.id))


# ---- the matrix ------------------------------------------------------------------------------------------------------


def test_variants_of_a_kernel(tmp_path: Path) -> None:
    profile = profile_of(
        tmp_path,
        """
        archs = ["sm_90a", "sm_80"]
        [operators]
        include = ["tiny.strided_copy"]
        ["tiny.strided_copy"]
        num_columns = [128]
        fmt = ["bf16"]
        """,
    )
    variants = plan(profile, root=KERNELS)
    assert [(found.arch, found.id, found.position) for found in variants] == [
        (arch, f"bf16_nc128_{doubled}_{form}", position)
        for arch in ("sm_80", "sm_90a")
        for doubled, form, position in [
            ("no_doubled", "aligned", 2),
            ("no_doubled", "general", 3),
            ("doubled", "aligned", 4),
            ("doubled", "general", 5),
        ]
    ]
    first = variants[0]
    assert first.kernel == "tiny.strided_copy"
    assert (first.family, first.name) == ("tiny", "strided_copy")
    assert first.symbol == "tk_tiny_strided_copy__bf16_nc128_no_doubled_aligned"
    assert first.config == (("fmt", "bf16"), ("num_columns", 128), ("doubled", False), ("form", "aligned"))
    assert first.file == KERNELS / "tiny" / "copy.py"
    assert first.describe() == ("tiny.strided_copy {fmt: bf16, num_columns: 128, doubled: False, form: aligned} sm_80")


def test_a_kernel_is_built_for_its_own_archs_only() -> None:
    variants = plan(Profile("test", ("sm_80", "sm_90a", "sm_100a")), root=KERNELS)
    archs = {
        name: {found.arch for found in variants if found.kernel == f"tiny.{name}"}
        for name in ("gemm", "cluster", "scalars")
    }
    assert archs == {
        "gemm": {"sm_90a"},
        "cluster": {"sm_90a", "sm_100a"},
        "scalars": {"sm_80", "sm_90a", "sm_100a"},
    }


def test_archs_argument_replaces_the_profiles() -> None:
    assert {found.arch for found in plan(Profile("test", ("sm_90a",)), archs=["sm_80"], root=KERNELS)} == {"sm_80"}
    with pytest.raises(PlanError, match="unknown arch 'sm_75'; allowed: sm_80, sm_89, sm_90a"):
        plan(Profile("test", ("sm_90a",)), archs=["sm_75"], root=KERNELS)


def test_exclude() -> None:
    profile = Profile("test", ("sm_90a",), include=("tiny.*",), exclude=("tiny.*copy", "tiny.s*"))
    kernels = {found.kernel for found in plan(profile, root=KERNELS)}
    assert "tiny.gemm" in kernels
    assert kernels.isdisjoint({"tiny.vector_copy", "tiny.strided_copy", "tiny.scalars", "tiny.store", "tiny.shared"})


def test_variants_travel_to_workers() -> None:
    variants = plan(Profile("test", ("sm_90a",)), root=KERNELS)
    assert pickle.loads(pickle.dumps(variants)) == variants


@pytest.mark.parametrize("name", ["smoke", "default"])
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert profile.archs == ("sm_90a",)
    expected = {name for name, kernel in load_kernels().items() if "sm_90a" in kernel.archs}
    variants = plan(profile)
    assert {found.kernel for found in variants} == expected
    assert len({found.symbol for found in variants}) == len(variants)


def test_general_forms_alone_hold_every_combination() -> None:
    every, general = (plan(Profile("test", ("sm_90a",), forms=forms), root=KERNELS) for forms in ("all", "general"))

    def key(found: Variant) -> tuple[object, ...]:
        return found.kernel, *(pair for pair in found.config if pair[0] != "form")

    assert [key(found) for found in general] == list(dict.fromkeys(map(key, every)))
    assert {dict(found.config).get("form", "general") for found in general} == {"general"}
    assert general == [found for found in every if found in general]  # the same variants, in the same order


def test_a_table_that_names_forms_keeps_them() -> None:
    narrowed = {"tiny.vector_copy": {"form": ("aligned", "general")}}
    planned = plan(Profile("test", ("sm_90a",), forms="general", narrowed=narrowed), root=KERNELS)
    copies = [found for found in planned if found.kernel == "tiny.vector_copy"]
    assert {dict(found.config)["form"] for found in copies} == {"aligned", "general"}


def test_smoke_holds_every_combination_of_the_default_profile_in_less_than_half_the_variants() -> None:
    forms = {
        name: {axis.name for axis in kernel.axes if axis.kind == "forms"} for name, kernel in load_kernels().items()
    }

    def keys(name: str) -> set[object]:
        return {
            (found.kernel, *(pair for pair in found.config if pair[0] not in forms[found.kernel]))
            for found in plan(load_profile(name))
        }

    assert keys("smoke") == keys("default")
    # groups of channels and whole rows are of one kernel: its last form does not take every call
    casts = {dict(found.config)["form"] for found in plan(load_profile("smoke")) if found.kernel.endswith("token_cast")}
    assert {"general", "rows_general"} <= casts
    assert 2 * len(plan(load_profile("smoke"))) < len(plan(load_profile("default")))


def test_the_worked_example_is_a_part_of_the_default_profile() -> None:
    example, default = plan(load_profile("deepseek_v3")), plan(load_profile("default"))
    assert set(example) < set(default)
    casts = [dict(found.config) for found in example if found.kernel == "quant.per_token_cast"]
    assert {(config["fmt"], config["stochastic"]) for config in casts} == {("e4m3", False)}
    assert "moe.aux_fi" not in {found.kernel for found in example}


# ---- what a profile may say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("archs = [", "own.toml:1: not valid TOML, near archs: Invalid value"),
        ("archs = ['sm_80']\n[operators\ninclude = []", "own.toml:2: not valid TOML, near [operators: Expected ']'"),
        ("archs = ['sm_80']\narchs = ['sm_90a']", "own.toml:2: not valid TOML, near archs: Cannot overwrite a value"),
        ("[operators]\ninclude = ['tiny.*']", "own.toml: archs: must be a list of strings such as"),
        ("archs = []", "own.toml:1: archs: must name at least one GPU"),
        ("archs = ['sm_75']", "own.toml:1: archs: unknown arch 'sm_75'; allowed: sm_80"),
        ("archs = ['sm_80']\nfast = true", "own.toml:2: fast: unknown key; allowed: archs, forms, [operators] and"),
        ("archs = ['sm_80']\nforms = 'aligned'", "own.toml:2: forms: must be one of 'all', 'general', got 'aligned'"),
        ("archs = ['sm_80']\n[operators]\nonly = ['a']", "own.toml:3: [operators] only: unknown key; allowed: include"),
        ("archs = ['sm_80']\n[operators]\ninclude = 'a'", "own.toml:3: [operators] include: must be a list of strings"),
        ("archs = ['sm_80']\n[operators]\ninclude = ['moe.*']", "'moe.*' matches no kernel; kernels: tiny.bulk, "),
        (
            "archs = ['sm_80']\n\n['tiny.none']\nform = ['a']",
            "own.toml:3: tiny.none: no such kernel; kernels: tiny.bulk",
        ),
        (
            "archs = ['sm_80']\n['tiny.vector_copy']\nform = ['general']\nsize = [2]",
            "own.toml:4: [tiny.vector_copy] size: tiny.vector_copy has no such axis; axes: itemsize, form",
        ),
        (
            "archs = ['sm_80']\n['tiny.vector_copy']\nitemsize = [1, 8]",
            "own.toml:3: [tiny.vector_copy] itemsize: 8 is not built for tiny.vector_copy; allowed: 1, 2, 4",
        ),
        (
            "archs = ['sm_80']\n['tiny.vector_copy']\nform = ['aligned']",
            "own.toml:3: [tiny.vector_copy] form: must keep 'general', which fits every call",
        ),
        ("archs = ['sm_80']\n['tiny.vector_copy']\nitemsize = []", "itemsize: must keep at least one value"),
        ("archs = ['sm_80']\n['tiny.vector_copy']\nitemsize = 2", "must be a list of ints, strings or bools, got 2"),
        (
            "archs = ['sm_80']\n['tiny.strided_copy']\ndoubled = [1]",
            "own.toml:3: [tiny.strided_copy] doubled: 1 is not built for tiny.strided_copy; allowed: False, True",
        ),
        (
            "archs = ['sm_80']\n['tiny.strided_copy']\ndoubled = [true]\nnum_columns = [64]",
            "own.toml:2: tiny.strided_copy: leaves no config",
        ),
        (
            "archs = ['sm_80']\n['tiny.strided_copy']\ndoubled = [true]\nnum_columns = [64, 128]",
            "own.toml:4: [tiny.strided_copy] num_columns: 64 is in no combination that the conditions of",
        ),
        (
            "archs = ['sm_80']\n'tiny.vector_copy' = {itemsize = [8]}",
            "own.toml:2: [tiny.vector_copy] itemsize: 8 is not built",
        ),
    ],
)
def test_refused_profiles(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(profile_of(tmp_path, text), root=KERNELS)
    assert problem in str(error.value)


def test_a_profile_that_is_not_utf8_is_refused_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_bytes('# größer\narchs = ["sm_80"]  # für alle\n'.encode("latin-1"))
    with pytest.raises(PlanError, match=r"own\.toml:1: not UTF-8, as TOML must be \(byte 0xf6\)"):
        load_profile(file)


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "own.toml").mkdir()
    with pytest.raises(PlanError, match="no profile"):
        load_profile(tmp_path / "own.toml")


def test_a_profile_in_one_line_of_a_kernel(tmp_path: Path) -> None:
    """As errors and records name it."""
    profile = profile_of(tmp_path, "archs = ['sm_80']\n'tiny.vector_copy' = {itemsize = [2]}")
    planned = [found for found in plan(profile, root=KERNELS) if found.kernel == "tiny.vector_copy"]
    assert {dict(found.config)["itemsize"] for found in planned} == {2}


def test_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"no profile nightly: give a path to a .toml file or one of deep.*, default, "):
        load_profile("nightly")


# ---- importing kernel files ------------------------------------------------------------------------------------------


def test_listing_needs_no_tilelang_and_leaves_nothing_behind() -> None:
    script = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # importing it would fail
from build_tools.plan import load_kernels
finders = list(sys.meta_path)
assert list(load_kernels(Path(sys.argv[1])))[:2] == ["tiny.bulk", "tiny.carrier"]
assert sys.meta_path == finders
print(sorted(name for name in sys.modules if name.split(".")[0] in ("tilelang", "tvm", "tilekernels", "kernels_src")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, KERNELS], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "['kernels_src', 'kernels_src.declare']"


def test_a_loaded_tilelang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Language:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    loaded = {"tilelang": Language(), "tilelang.language": Language()}
    for name, module in loaded.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert "tiny.gemm" in load_kernels(KERNELS)
    assert {name: sys.modules[name] for name in loaded} == loaded


def test_all_broken_kernel_files_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "one.py").write_text("import tilelang.language as T\n\nraise ValueError('no')\n")
    (tmp_path / "moe" / "two.py").write_text("def broken(:\n")
    (tmp_path / "moe" / "three.py").write_text("from ..declare import grid\n\n\ngrid(size=())\n")
    with pytest.raises(PlanError) as error:
        load_kernels(tmp_path)
    assert f"{tmp_path}/moe/one.py:3: ValueError: no" in str(error.value)
    assert f"{tmp_path}/moe/two.py:1: SyntaxError" in str(error.value)
    assert f"{tmp_path}/moe/three.py:4: DeclarationError: axis size has no values" in str(error.value)


def test_an_edited_kernel_file_is_read_again(tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    shutil.copytree(KERNELS, root)
    assert "tiny.renamed" not in load_kernels(root)
    file = root / "tiny" / "launches.py"
    file.write_text(file.read_text().replace("def cooperative(", "def renamed("))
    assert "tiny.renamed" in load_kernels(root)
    assert "tiny.cooperative" not in load_kernels(root)


# ---- the trace key ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    root = tmp_path / "kernels"
    shutil.copytree(KERNELS, root)
    return root


def append(file: Path, text: str) -> None:
    """Change a file for sure: its time moves even where the clock has not."""
    file.write_text(file.read_text() + text)
    later = file.stat().st_mtime_ns + 10_000_000
    os.utime(file, ns=(later, later))


def test_key_is_that_of_the_content_not_of_the_place(copied: Path) -> None:
    assert trace_key(variant("tiny.vector_copy")) == trace_key(variant("tiny.vector_copy", root=copied))


def test_key_differs_between_variants() -> None:
    variants = plan(Profile("test", ("sm_80", "sm_90a")), root=KERNELS)
    assert len({trace_key(found) for found in variants}) == len(variants) > 40


@pytest.mark.parametrize("changed", ["tiny/copy.py", "common/sizes.py", "common/__init__.py"])
def test_key_follows_imports(copied: Path, changed: str) -> None:
    copy, gemm = variant("tiny.vector_copy", root=copied), variant("tiny.gemm", root=copied)
    before = trace_key(copy), trace_key(gemm)
    append(copied / changed, "# changed\n")
    assert trace_key(copy) != before[0]
    assert trace_key(gemm) == before[1]  # in another file, which imports none of these


def test_key_follows_device_headers(copied: Path) -> None:
    append(copied / "tiny" / "tensor_maps.py", 'HEADER = "outer.cuh"\n')
    (copied / "common" / "outer.cuh").write_text('#include "inner.cuh"\n')
    (copied / "common" / "inner.cuh").write_text("// one\n")
    gemm = variant("tiny.gemm", root=copied)
    before = trace_key(gemm)
    append(copied / "common" / "inner.cuh", "// two\n")
    assert trace_key(gemm) != before


def test_key_follows_tilelang_and_needs_it_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from build_tools import trace_key as module

    before = trace_key(variant("tiny.gemm"))
    monkeypatch.setattr(module, "tilelang_version", lambda: "99.0")
    assert trace_key(variant("tiny.gemm")) != before

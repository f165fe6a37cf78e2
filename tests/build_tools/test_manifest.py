"""manifest.json: sorted, the same bytes for the same input, one order of parameters for all variants of a kernel."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from build_tools.compile import Compiled, UnitResult
from build_tools.errors import BuildError
from build_tools.kernel_files import load_kernels
from build_tools.manifest import RUNS, find_not_run, is_dirty, make_manifest, read_version, union_of_params
from build_tools.plan import Variant
from build_tools.store import to_json
from build_tools.toolchain import Toolchain
from build_tools.units import TracedVariant, make_units
from build_tools.wheel_label import hash_sources
from kernels_src.declare import Kernel, dtype_of, forms, grid
from tests.build_tools.fake_trace import traced

TOOLCHAIN = Toolchain(Path("/x/nvcc"), "13.0.88", "cuda_13.0", "PATH", "0.1.15", (Path("/x/include"),))
KERNEL = Kernel(
    family="demo",
    name="demo.scale",
    axes=grid(fmt=dtype_of("out", e4m3="float8_e4m3fn", none=None), factor=(2, 10), form=forms("fast", "general")),
    where=None,
    archs=("sm_80", "sm_90a"),
    raw=("x",),
    accepts={"out": ("float32", "int32")},
    derived={"packed": "is_dtype(out, int32)"},
    pass_configs={},
    flags=(),
    function=lambda: None,
    file=Path("/src/demo/scale.py"),
    doc="Scale x.",
)


def planned(variant: TracedVariant, position: int) -> Variant:
    return Variant(
        kernel=variant.kernel,
        config=(),
        arch=variant.arch,
        id=variant.id,
        symbol=f"tk_demo_scale__{variant.id}",
        family="demo",
        file=KERNEL.file,
        root=Path("/src"),
        position=position,
        pass_configs=(),
        flags=(),
    )


def manifest_of(variants: list[TracedVariant]) -> dict[str, Any]:
    """Positions are those in the list; ptxas says of each symbol that it uses 40 registers."""
    results = []
    for unit in make_units(variants, Path("/nowhere")):
        lines = []
        for variant in unit.variants:
            lines.append(f"Compiling entry function '{variant.symbols[0]}' for '{unit.arch}'")
            lines.append("0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads")
            lines.append("Used 40 registers, used 1 barriers, 16 bytes smem")
        results.append(UnitResult(unit, Compiled(unit.id.encode(), "\n".join(lines)), (), 1.5, cached=False))
    return make_manifest(
        profile="test",
        kernels={"demo.scale": KERNEL},
        variants=[(planned(variant, position), variant) for position, variant in enumerate(variants)],
        results=list(reversed(results)),
        toolchain=TOOLCHAIN,
        source_hash="5" * 64,
    )


def test_dirty_means_kernel_sources_that_were_not_committed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("a")
    assert not is_dirty(tmp_path / "kernels")  # no git
    git("init")
    assert is_dirty(tmp_path / "kernels")
    git("add", ".")
    git("commit", "-m", "a")
    (tmp_path / "other").write_text("not below it")
    assert not is_dirty(tmp_path / "kernels")
    (tmp_path / "kernels" / "a.py").write_text("b")
    assert is_dirty(tmp_path / "kernels")


def test_the_whole_of_a_small_manifest() -> None:
    manifest = manifest_of([traced("f2"), traced("f10", flags=["-DX"]), traced("f2", arch="sm_80")])
    assert {name: manifest[name] for name in ("schema", "version", "profile", "archs", "build", "validated_on")} == {
        "schema": 1,
        "version": read_version(),
        "profile": "test",
        "archs": ["sm_80", "sm_90a"],
        "build": {
            "tilelang": "0.1.15",
            "nvcc": "13.0.88",
            "nvcc_source": "PATH",
            "nvcc_flags": ["--cubin", "-O3", "-std=c++20", "-w", "-Xptxas", "-v"],
            "source_hash": "5" * 64,
            "dirty": False,
        },
        "validated_on": {"sm_90a": "H200"},
    }
    common = {"kind": "tensor", "dtypes": ["float32"], "nullable": False, "optional": False}
    assert manifest["kernels"] == [
        {
            "name": "demo.scale",
            "doc": "Scale x.",
            "axes": [
                {
                    "name": "fmt",
                    "kind": "dtype_of",
                    "of": "out",
                    "values": ["e4m3", "none"],
                    "dtypes": ["float8_e4m3fn", None],
                },
                {"name": "factor", "kind": "value", "values": [2, 10]},
                {"name": "form", "kind": "forms", "values": ["fast", "general"]},
            ],
            "raw": ["x"],
            "accepts": {"out": ["float32", "int32"]},
            "derived": {"packed": "is_dtype(out, int32)"},
            "params": [{"name": "x", "written": False, **common}, {"name": "out", "written": True, **common}],
        }
    ]
    assert manifest["units"] == [
        {
            "id": unit_id,
            "file": f"units/demo/scale/{arch}/{number}/unit.cubin",
            "sha256": hashlib.sha256(unit_id.encode()).hexdigest(),
            "bytes": len(unit_id),
            "arch": arch,
            "flags": flags,
        }
        for unit_id, arch, number, flags in (
            ("demo.scale-sm_80-0", "sm_80", 0, []),
            ("demo.scale-sm_90a-0", "sm_90a", 0, []),
            ("demo.scale-sm_90a-1", "sm_90a", 1, ["-DX"]),
        )
    ]
    assert [(entry["arch"], entry["variant"], entry["unit"]) for entry in manifest["variants"]] == [
        ("sm_80", "f2", "demo.scale-sm_80-0"),
        ("sm_90a", "f2", "demo.scale-sm_90a-0"),
        ("sm_90a", "f10", "demo.scale-sm_90a-1"),
    ]
    launch = manifest["variants"][0]["launches"][0]
    assert (launch["registers"], launch["spill_bytes"], launch["smem_static"]) == (40, 12, 16)
    assert launch["symbol"] == "tk_demo_scale__f2"


def test_variants_stand_in_grid_order_and_the_input_order_does_not_matter() -> None:
    variants = [traced("f2"), traced("f10"), traced("f1")]
    manifest = manifest_of(variants)
    assert [entry["variant"] for entry in manifest["variants"]] == ["f2", "f10", "f1"]
    assert to_json(manifest) == to_json(manifest_of(variants))


def test_an_arch_that_never_ran_is_not_called_validated() -> None:
    assert manifest_of([traced(arch="sm_80")])["validated_on"] == {}


def test_a_kernel_without_a_recorded_run_is_not_called_run(tmp_path: Path) -> None:
    assert manifest_of([traced()])["not_run"] == {"sm_90a": ["demo.scale"]}
    record = tmp_path / "tests.jsonl"
    line = {"file": f"tests/{KERNEL.family}/test_{KERNEL.file.stem}.py", "passed": 3, "failed": 0, "error": 0}
    for change, expected in (({}, []), ({"failed": 1}, ["demo.scale"]), ({"passed": 0}, ["demo.scale"])):
        record.write_text(json.dumps(line | change) + "\n")
        assert find_not_run([KERNEL], record) == expected


def test_the_record_in_the_tree_knows_the_first_kernels() -> None:
    not_run = find_not_run(load_kernels().values(), RUNS["sm_90a"])
    assert not {"transpose.transpose", "moe.topk_gate", "quant.per_token_cast"} & set(not_run)


# ---- the union of parameters ----------------------------------------------------------------------------------------


def with_params(variant_id: str, *names: str, **changes: Any) -> TracedVariant:
    params = [
        {"name": name, "kind": "tensor", "dtype": "float32", "nullable": False, "written": False} for name in names
    ]
    for param in params:
        param.update(changes.get(str(param["name"]), {}))
    return traced(variant_id, params=params)


def test_a_parameter_of_some_variants_is_optional_and_keeps_its_place() -> None:
    union = union_of_params(
        "demo.scale", [with_params("a", "x", "out"), with_params("b", "x", "x_sf", "out", "out_sf")]
    )
    assert [(param["name"], param["optional"]) for param in union] == [
        ("x", False),
        ("x_sf", True),
        ("out", False),
        ("out_sf", True),
    ]


def test_dtypes_are_collected_and_marks_hold_if_any_variant_has_them() -> None:
    union = union_of_params(
        "demo.scale",
        [
            with_params("a", "x"),
            with_params("b", "x", x={"dtype": "int8", "nullable": True}),
            with_params("c", "x", x={"written": True}),
        ],
    )
    assert union == [
        {
            "name": "x",
            "kind": "tensor",
            "dtypes": ["float32", "int8"],
            "written": True,
            "nullable": True,
            "optional": False,
        }
    ]


def test_orders_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BuildError) as caught:
        union_of_params("demo.scale", [with_params("a", "x", "y", "out"), with_params("b", "y", "x", "out")])
    assert str(caught.value) == (
        "demo.scale: its variants take their parameters in different orders; give them one order\n"
        "  a: x, y, out\n"
        "  b: y, x, out"
    )


def test_a_name_that_is_a_tensor_here_and_a_scalar_there_is_refused() -> None:
    with pytest.raises(BuildError, match="parameter x is a scalar in b and a tensor elsewhere"):
        union_of_params("demo.scale", [with_params("a", "x"), with_params("b", "x", x={"kind": "scalar"})])


# ---- version and sources --------------------------------------------------------------------------------------------


def test_the_version_has_one_place(tmp_path: Path) -> None:
    file = tmp_path / "_version.py"
    file.write_text('"""Why."""\n\n__version__ = "4.5.6rc1"\n')
    assert read_version(file) == "4.5.6rc1"
    file.write_text("version = 3\n")
    with pytest.raises(BuildError, match="must hold a line __version__"):
        read_version(file)


def test_the_source_hash_follows_names_and_content(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    file = tmp_path / "demo" / "scale.py"
    file.write_text("a = 1\n")
    first = hash_sources(tmp_path)
    (tmp_path / "notes.txt").write_text("not a source")
    assert hash_sources(tmp_path) == first
    file.write_text("a = 2\n")
    second = hash_sources(tmp_path)
    file.rename(file.with_name("other.py"))
    assert len({first, second, hash_sources(tmp_path)}) == 3


def test_a_unit_that_failed_cannot_enter_a_manifest() -> None:
    variant = traced()
    (unit,) = make_units([variant], Path("/nowhere"))
    with pytest.raises(BuildError, match=r"demo\.scale-sm_90a-0 did not compile"):
        make_manifest(
            profile="test",
            kernels={"demo.scale": KERNEL},
            variants=[(dataclasses.replace(planned(variant, 0)), variant)],
            results=[UnitResult(unit, None, (), 1.0, cached=False)],
            toolchain=TOOLCHAIN,
            source_hash="",
        )

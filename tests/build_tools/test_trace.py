"""trace: what launch.json says of tiny kernels that are launched in every way, and the text of every refusal."""

import hashlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from build_tools import expr
from build_tools.errors import TraceError
from build_tools.kernel_files import REPOSITORY
from build_tools.plan import Profile, plan
from build_tools.trace import Traced, trace

FIXTURES = Path(__file__).parent / "fixtures"

# Third-party warnings while TileLang is imported are not ours to fix
pytestmark = pytest.mark.filterwarnings("default")


@cache
def traced(kernel: str, variant_id: str = "only", arch: str = "sm_90a") -> Traced:
    variants = plan(Profile("test", (arch,), include=(f"tiny.{kernel}",)), root=FIXTURES / "kernels")
    return trace(next(variant for variant in variants if variant.id == variant_id))


def param(traced: Traced, name: str) -> dict[str, object]:
    return next(param for param in traced.launch["params"] if param["name"] == name)


# ---- parameters and symbols ------------------------------------------------------------------------------------------


def test_launch_of_a_strided_copy() -> None:
    assert traced("strided_copy", "fp32_nc128_doubled_aligned").launch == {
        "schema": 1,
        "kernel": "tiny.strided_copy",
        "variant": "fp32_nc128_doubled_aligned",
        "arch": "sm_90a",
        "config": {"fmt": "fp32", "num_columns": 128, "doubled": True, "form": "aligned"},
        "params": [
            {
                "name": "x",
                "kind": "tensor",
                "dtype": "bfloat16",
                "shape": ["num_rows", "128"],
                "strides": ["x_stride", "1"],
                "nullable": False,
                "written": False,
            },
            {
                "name": "out",
                "kind": "tensor",
                "dtype": "float32",
                "shape": ["num_rows", "128"],
                "strides": ["128", "1"],
                "nullable": False,
                "written": True,
            },
        ],
        "symbols": [
            {"name": "num_rows", "dtype": "int32", "from": ["x", "shape", 0]},
            {"name": "x_stride", "dtype": "int32", "from": ["x", "strides", 0]},
        ],
        # 128 columns over 32 threads: 4 elements each, 8 bytes read and 16 written at once
        "guards": ["floormod(x_stride, 8) == 0", "aligned(x, 8)", "aligned(out, 16)"],
        "launches": [
            {
                "symbol": "tk_tiny_strided_copy__fp32_nc128_doubled_aligned",
                "source_symbol": "main_kernel",
                "grid": ["num_rows", "1", "1"],
                "block": ["32", "1", "1"],
                "cluster": [1, 1, 1],
                "smem": "0",
                "cooperative": False,
                "pdl": True,
                "args": [
                    {"tensor": "out"},
                    {"tensor": "x"},
                    {"value": "num_rows", "dtype": "int32"},
                    {"value": "x_stride", "dtype": "int32"},
                ],
            }
        ],
        "tma": [],
        "pass_configs": {},
        "flags": [],
    }


def test_scalars_of_every_kind() -> None:
    launch = traced("scalars").launch
    scalars = {p["name"]: p["dtype"] for p in launch["params"] if p["kind"] == "scalar"}
    assert scalars == {
        "f32": "float32",
        "f64": "float64",
        "i32": "int32",
        "i64": "int64",
        "flag": "bool",
        "unused": "int32",
    }
    values = {arg["value"]: arg["dtype"] for arg in launch["launches"][0]["args"] if "value" in arg}
    assert values == {"f32": "float32", "f64": "float64", "flag": "bool", "i32": "int32", "i64": "int64", "n": "int32"}


def test_tensor_that_may_be_null_binds_no_symbol_if_another_can() -> None:
    optional = traced("optional")
    assert {p["name"]: p["nullable"] for p in optional.launch["params"]} == {"weight": True, "x": False, "out": False}
    assert optional.launch["symbols"] == [{"name": "n", "dtype": "int64", "from": ["x", "shape", 0]}]


def test_a_carrier_may_be_of_another_size_if_only_its_address_is_taken() -> None:
    carrier = traced("carrier")
    scale = param(carrier, "scale")
    assert (scale["dtype"], scale["written"]) == ("uint8", False)
    assert carrier.launch["guards"] == []
    assert {"value": "is_float", "dtype": "bool"} in carrier.launch["launches"][0]["args"]


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_guards_follow_from_vector_width(itemsize: int, arch: str) -> None:
    aligned = traced("vector_copy", f"b{itemsize}_aligned", arch)
    assert aligned.launch["guards"] == ["floormod(n, 16) == 0", "aligned(x, 16)", "aligned(out, 16)"]
    assert "*(uint4*)" in aligned.source or "*(int4*)" in aligned.source
    general = traced("vector_copy", f"b{itemsize}_general", arch)
    assert general.launch["guards"] == []


# ---- launches --------------------------------------------------------------------------------------------------------


def test_several_kernels_in_one_function() -> None:
    two = traced("two_kernels")
    first, second = two.launch["launches"]
    assert (first["symbol"], second["symbol"]) == ("tk_tiny_two_kernels__only_0", "tk_tiny_two_kernels__only_1")
    assert first["grid"] == ["floordiv(num_rows + 63, 64)", "1", "1"]
    assert second["grid"] == ["num_sms", "1", "1"]
    assert first["args"][:2] == [{"tensor": "workspace"}, {"tensor": "x"}]
    assert second["args"][:2] == [{"tensor": "out"}, {"tensor": "workspace"}]
    assert param(two, "workspace")["shape"] == ["floordiv(num_rows + 63, 64) * 2", "num_columns"]
    assert [p["name"] for p in two.launch["params"] if p.get("written")] == ["workspace", "out"]
    assert re.findall(r"__global__ void __launch_bounds__\(128, 1\) (\w+)\(", two.source) == [
        "tk_tiny_two_kernels__only_0",
        "tk_tiny_two_kernels__only_1",
    ]
    assert "main_kernel" not in two.source


def test_cluster() -> None:
    (launch,) = traced("cluster").launch["launches"]
    assert launch["cluster"] == [2, 1, 1]
    assert launch["grid"] == ["floordiv(n + 63, 64) * 2", "1", "1"]


@pytest.mark.parametrize("kernel", ["two_kernels", "dependent"])
def test_kernels_wait_for_their_predecessor_where_the_gpu_can(kernel: str) -> None:
    """Once in each launch: those of `dependent` stand in its own source, by TileLang's words for them."""
    launches = traced(kernel).launch["launches"]
    source = traced(kernel).source
    assert [launch["pdl"] for launch in launches] == [True] * len(launches)
    own = kernel == "dependent"
    assert source.count("griddepcontrol.wait") == (0 if own else len(launches))
    assert source.count("cudaGridDependencySynchronize") == (1 if own else 0)
    before = traced(kernel, arch="sm_80")
    assert not any(launch["pdl"] for launch in before.launch["launches"])
    assert "griddepcontrol" not in before.source


def test_waiting_is_the_first_thing_that_a_kernel_does() -> None:
    """No access of global memory stands before it."""
    source = traced("two_kernels").source
    heads = re.findall(r"__launch_bounds__\(128, 1\) \w+\([^;]*?\) \{\s*//[^\n]*\n\s*(\S+)", source)
    assert heads == ["asm", "asm"]


def test_a_cooperative_launch_is_never_dependent() -> None:
    assert traced("cooperative").launch["launches"][0]["pdl"] is False
    assert "griddepcontrol" not in traced("cooperative").source


def test_cooperative_launch_with_the_grid_of_a_scalar() -> None:
    (launch,) = traced("cooperative").launch["launches"]
    assert launch["cooperative"] is True
    assert launch["grid"] == ["num_sms", "1", "1"]


def test_shared_memory_of_a_size_known_at_launch() -> None:
    (launch,) = traced("shared").launch["launches"]
    assert expr.evaluate(launch["smem"], {"num_columns": 1000}) == 4000


def test_more_shared_memory_than_a_block_gets_unasked() -> None:
    large = traced("large_shared").launch
    assert large["launches"][0]["smem"] == "160000"
    assert large["pass_configs"] == {"tl.disable_tma_lower": True}
    assert large["flags"] == ["--maxrregcount=64"]


# ---- tensor maps and bulk copies -------------------------------------------------------------------------------------


def test_gemm_through_tensor_maps() -> None:
    gemm = traced("gemm").launch
    tile = {
        "dtype": "bfloat16",
        "rank": 2,
        "box_dim": [64, 64],
        "element_stride": [1, 1],
        "interleave": 0,
        "swizzle": 3,
        "l2_promotion": 2,
        "oob_fill": 0,
    }
    assert gemm["tma"] == [
        {"tensor": "a", "global_dim": ["k", "m"], "global_stride": ["a_stride * 2"], **tile},
        {"tensor": "b", "global_dim": ["k", "n"], "global_stride": ["k * 2"], **tile},
    ]
    assert gemm["launches"][0]["args"][:3] == [{"tma": 0}, {"tma": 1}, {"tensor": "out"}]
    assert gemm["guards"] == [
        "aligned(a, 16)",
        "floormod(a_stride * 2, 16) == 0",
        "aligned(b, 16)",
        "floormod(k * 2, 16) == 0",
    ]
    assert [p["written"] for p in gemm["params"]] == [False, False, True]


def test_a_tensor_stored_through_a_map_is_written() -> None:
    store = traced("store").launch
    assert [(p["name"], p["written"]) for p in store["params"]] == [("x", False), ("out", True)]
    assert store["guards"] == ["aligned(out, 16)", "floormod(n * 4, 16) == 0"]


def test_bulk_copies_ask_for_whole_16_bytes() -> None:
    bulk = traced("bulk")
    assert "tma_store" in bulk.source
    assert bulk.launch["guards"] == ["aligned(out, 16)", "floormod(num_columns * 4, 16) == 0"]
    assert bulk.launch["tma"] == []


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_all_texts_are_in_the_expression_language() -> None:
    for kernel in ("two_kernels", "gemm", "shared", "bulk", "cluster"):
        launch = traced(kernel).launch
        known = {symbol["name"] for symbol in launch["symbols"]} | {p["name"] for p in launch["params"]}
        texts = [text for p in launch["params"] if p["kind"] == "tensor" for text in (*p["shape"], *p["strides"])]
        texts += [text for item in launch["launches"] for text in (*item["grid"], *item["block"], item["smem"])]
        texts += [text for item in launch["tma"] for text in (*item["global_dim"], *item["global_stride"])]
        assert {name for text in texts + launch["guards"] for name in expr.names(text)} <= known


def test_same_bytes_in_another_process_and_folder(tmp_path: Path) -> None:
    script = """
import hashlib, shutil, sys
from pathlib import Path
from build_tools.plan import Profile, plan
from build_tools.trace import trace
shutil.copytree(sys.argv[1], sys.argv[2])
for variant in plan(Profile("test", ("sm_90a",), include=("tiny.gemm", "tiny.scalars")), root=Path(sys.argv[2])):
    traced = trace(variant)
    print(hashlib.sha256((traced.source + traced.launch_json()).encode()).hexdigest())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, FIXTURES / "kernels", tmp_path / "elsewhere"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONHASHSEED": "7"},
    )
    here = [
        hashlib.sha256((found.source + found.launch_json()).encode()).hexdigest()
        for found in (traced("gemm"), traced("scalars"))
    ]
    assert done.stdout.split() == here


def test_launch_json_is_readable() -> None:
    text = traced("gemm").launch_json()
    assert json.loads(text) == traced("gemm").launch
    assert text.endswith("}\n")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("conditional_launch", "T.Kernel stands inside a IfThenElse (3 < count): a launch must not depend on run-time"),
        ("repeated_launch", "T.Kernel stands inside a For: a launch must not depend on run-time values"),
        ("unbound_symbol", "no size or stride is n alone, so a call cannot tell its value (used in x)"),
        ("same_name", "two symbols or parameters are named n (one in y): rename one, or use the same T.dynamic"),
        ("reserved_name", "a size or stride of x is named 'max', which means something else in launch expressions"),
        ("cluster_on_sm_80", "cluster_dims=[2, 1, 1] needs sm_90, sm_80 has no clusters: ask declare.arch()"),
        ("dependent_on_sm_80", "T.pdl_sync and T.pdl_trigger need sm_90, sm_80 has neither: ask declare.arch()"),
        ("too_much_shared", "a block takes 160000 bytes of shared memory, sm_89 has 101376"),
        ("null_test_inside", "weight may be null, and main_kernel touches it outside of the test: weight["),
        ("odd_scalar", "parameter seed has dtype uint8; allowed: float32, float64, int32, int64, bool"),
        ("wrong_itemsize", "itemsize is read from the element size of x, which must be 2 bytes here, got float32"),
        ("wrong_dtype", "fmt=half is read from x being float16, but it is declared float32"),
        (
            "indexed_carrier",
            "accepts: scale is declared uint8 and taken as float32, int8, of other sizes: it must not be",
        ),
        ("derived_of_nothing", "derived: flag = is_null(weight) asks about weight, which is no parameter"),
        ("no_prim_func", "the kernel function must return a T.prim_func, got int"),
        (
            "refused_by_tilelang",
            "TileLang cannot lower it (line {line}):\n  AssertionError: T.gemm K shape check failed",
        ),
    ],
)
def test_refused(kernel: str, problem: str) -> None:
    file = FIXTURES / "refused" / "wrong" / "refused.py"
    profile = Profile("test", ("sm_80", "sm_89", "sm_90a"), include=(f"wrong.{kernel}",))
    (variant,) = plan(profile, root=FIXTURES / "refused")
    with pytest.raises(TraceError) as error:
        trace(variant)
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if "T.gemm(" in text)
    assert str(error.value).startswith(f"{file}: {variant.describe()}: {problem.format(line=line)}")

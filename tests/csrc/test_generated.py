"""What codegen writes, compiled and called: the golden store behind the real runtime and the fake driver.

test_codegen.py holds the text; here the text has to bind, refuse, choose forms, fill arguments and launch.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from tests.csrc.sanitizers import compile_flags, environment
from tests.csrc.steps import CPU, Result, Runtime, Step, call, check, enter, tensor
from tests.golden_store import install_golden

X, BIAS, ROW_MAP, OUT, OUT_SF = 0x10000, 0x20000, 0x30000, 0x40000, 0x50000
STREAM = 0x77


@pytest.fixture
def golden(driver_folder: Path, tmp_path: Path) -> Runtime:
    return Runtime(install_golden() / "lib" / "libtilekernels.so.0", driver_folder, tmp_path)


def cast(
    tokens: int = 3,
    hidden: int = 64,
    *,
    x: Step | None = None,
    bias: Step | None = None,
    row_map: Step | None = None,
    out: Step | None = None,
    out_sf: Step | None = None,
    axes: tuple[int, int, int] = (32, 0, 0),
) -> Step:
    """A valid call of demo.cast unless an argument is replaced."""
    tensors = [
        x or tensor("bfloat16", tokens, hidden, data=X),
        bias,
        row_map,
        out or tensor("float8_e4m3fn", tokens, hidden, data=OUT),
        out_sf or tensor("float32", tokens, -(-hidden // axes[0]), data=OUT_SF),
    ]
    return call("demo.cast", *tensors, scalars=[0.5], axes=axes, stream=STREAM)


def transpose(x: Step, out: Step | None) -> Step:
    return call("demo.transpose", x, out)


def rank(tokens: int, experts: int, num_sms: int = 8) -> Step:
    return call(
        "demo.rank",
        tensor("float32", tokens, experts),
        tensor("int32", num_sms, experts, data=0x20000),
        tensor("int64", tokens, data=0x30000),
        scalars=[num_sms],
    )


def without_gpu(step: Step) -> Step:
    """The same arguments as a check."""
    return {key: value for key, value in step.items() if key != "stream"} | {"do": "check"}


def launched(result: Result) -> list[str]:
    assert set(result.statuses) == {"TK_OK"}, result.answers
    return [launch["name"] for launch in result.launches]


# ---- arguments and geometry ------------------------------------------------------------------------------------------


def test_arguments_reach_the_kernel_in_its_order(golden: Runtime) -> None:
    x = tensor("bfloat16", 3, 64, strides=(128, 1), data=X)
    sf = tensor("float32", 3, 2, strides=(8, 1), data=OUT_SF)
    result = golden.run(enter(), cast(x=x, bias=tensor("float32", 64, data=BIAS), out_sf=sf))
    (launch,) = result.launches
    expected = [
        struct.pack("<Q", X), struct.pack("<Q", BIAS), struct.pack("<Q", OUT), struct.pack("<Q", OUT_SF),
        struct.pack("<f", 0.5), struct.pack("<i", 64), struct.pack("<i", 3), struct.pack("<i", 8),
        struct.pack("<?", False), struct.pack("<q", 128),
    ]  # fmt: skip
    assert launch["name"] == "tk_demo_cast__e4m3_npc32_nearest_no_transposed"
    assert launch["arguments"] == [value.hex() for value in expected]
    assert (launch["grid"], launch["block"], launch["smem"]) == ([3, 2, 1], [128, 1, 1], 0)
    assert launch["attributes"] == {}
    assert launch["stream"] == STREAM


def test_byte_offset_is_part_of_the_address(golden: Runtime) -> None:
    result = golden.run(enter(), cast(x=tensor("bfloat16", 3, 64, data=X, byte_offset=32)))
    assert result.launches[0]["arguments"][0] == struct.pack("<Q", X + 32).hex()


def test_absent_tensor_is_a_null_argument(golden: Runtime) -> None:
    assert golden.run(enter(), cast()).launches[0]["arguments"][1] == struct.pack("<Q", 0).hex()


@pytest.mark.parametrize(("dtype", "packed"), [("float32", "00"), ("int32", "01")])
def test_derived_scalar_is_computed(golden: Runtime, dtype: str, packed: str) -> None:
    result = golden.run(enter(), cast(out_sf=tensor(dtype, 3, 2, data=OUT_SF)))
    assert result.launches[0]["arguments"][8] == packed


@pytest.mark.parametrize(("hidden", "smem"), [(128, 1024), (512, 2048)])
def test_shared_memory_may_depend_on_the_shape(golden: Runtime, hidden: int, smem: int) -> None:
    row_map, sf = tensor("int32", 3, data=ROW_MAP), tensor("float32", hidden // 128, 3, data=OUT_SF)
    result = golden.run(enter(), cast(hidden=hidden, row_map=row_map, out_sf=sf, axes=(128, 1, 1)))
    assert launched(result) == ["tk_demo_cast__e4m3_npc128_up_transposed"]
    assert result.launches[0]["smem"] == smem


def test_variant_follows_the_dtype_of_an_output(golden: Runtime) -> None:
    result = golden.run(enter(), cast(out=tensor("int8", 3, 32, data=OUT)))
    assert launched(result) == ["tk_demo_cast__e2m1_npc32_nearest_no_transposed"]


def test_several_launches_of_one_variant(golden: Runtime) -> None:
    result = golden.run(enter(), rank(tokens=10, experts=64))
    assert launched(result) == ["tk_demo_rank__only_0", "tk_demo_rank__only_1"]
    first, second = result.launches
    assert (first["grid"], first["attributes"]) == ([8, 1, 1], {"cooperative": 1})
    assert (second["grid"], second["attributes"]) == ([2, 1, 1], {"cluster": [2, 1, 1]})


def test_launch_of_another_arch_has_its_own_attributes(golden: Runtime) -> None:
    result = golden.run(enter(), rank(tokens=10, experts=64), devices="8.0")
    assert [launch["attributes"] for launch in result.launches] == [{"cooperative": 1}, {}]


def test_empty_grid_is_skipped_and_the_others_run(golden: Runtime) -> None:
    assert launched(golden.run(enter(), rank(tokens=0, experts=64))) == ["tk_demo_rank__only_0"]


def test_division_by_a_scalar_of_zero_is_no_crash(golden: Runtime) -> None:
    assert launched(golden.run(enter(), rank(tokens=10, experts=64, num_sms=0))) == []


# ---- forms and tensor maps -------------------------------------------------------------------------------------------


def test_aligned_form_takes_a_tensor_map(golden: Runtime) -> None:
    x = tensor("bfloat16", 64, 128, strides=(256, 1), data=X)
    result = golden.run(enter(), transpose(x, tensor("bfloat16", 128, 64, data=OUT)))
    assert launched(result) == ["tk_demo_transpose__b2_aligned"]
    (encoded,) = result.calls("cuTensorMapEncodeTiled")
    assert (encoded["address"], encoded["global_dim"], encoded["global_stride"]) == (X, [128, 64], [512])
    assert (encoded["box_dim"], encoded["element_stride"]) == ([64, 64], [1, 1])
    assert [encoded[name] for name in ("interleave", "swizzle", "l2_promotion", "oob_fill")] == [0, 3, 2, 0]
    assert result.launches[0]["arguments"][1] == "ab" * 128


@pytest.mark.parametrize(
    ("x", "out"),
    [
        pytest.param(tensor("bfloat16", 64, 127), tensor("bfloat16", 127, 64), id="columns"),
        pytest.param(tensor("bfloat16", 63, 128), tensor("bfloat16", 128, 63), id="rows"),
        pytest.param(tensor("bfloat16", 64, 128, strides=(129, 1)), tensor("bfloat16", 128, 64), id="stride"),
        pytest.param(tensor("bfloat16", 64, 128, data=X + 2), tensor("bfloat16", 128, 64), id="x"),
        pytest.param(tensor("bfloat16", 64, 128), tensor("bfloat16", 128, 64, data=OUT + 8), id="out"),
    ],
)
def test_general_form_takes_what_the_aligned_one_does_not(golden: Runtime, x: Step, out: Step) -> None:
    result = golden.run(enter(), transpose(x, out))
    assert launched(result) == ["tk_demo_transpose__b2_general"]
    assert result.calls("cuTensorMapEncodeTiled") == []


def test_form_of_another_arch_has_its_own_code(golden: Runtime) -> None:
    result = golden.run(enter(), transpose(tensor("bfloat16", 64, 128), tensor("bfloat16", 128, 64)), devices="8.0")
    assert launched(result) == ["tk_demo_transpose__b2_aligned"]
    assert result.calls("cuTensorMapEncodeTiled") == []


def test_empty_tensor_needs_no_tensor_map(golden: Runtime) -> None:
    result = golden.run(enter(), transpose(tensor("bfloat16", 0, 128, data=0), tensor("bfloat16", 128, 0, data=0)))
    assert launched(result) == []
    assert result.calls("cuTensorMapEncodeTiled") == []


def test_strides_that_no_element_uses_are_not_looked_at(golden: Runtime) -> None:
    one_row = tensor("bfloat16", 1, 128, strides=(3, 1))
    result = golden.run(enter(), transpose(one_row, tensor("bfloat16", 128, 1, strides=(1, 77))))
    assert launched(result) == ["tk_demo_transpose__b2_general"]
    # the third value is the stride: the dense one, so that guards on it hold
    assert result.launches[0]["arguments"][4] == struct.pack("<i", 128).hex()


def test_missing_strides_are_dense(golden: Runtime) -> None:
    result = golden.run(enter(), transpose(tensor("uint8", 3, 5), tensor("uint8", 5, 3)))
    assert launched(result) == ["tk_demo_transpose__b1_general"]
    assert result.launches[0]["arguments"][4] == struct.pack("<i", 5).hex()


# ---- refusals --------------------------------------------------------------------------------------------------------

SIXTY_FOUR_BY_2G = tensor("uint8", 64, 2**31)
REFUSALS = [
    ("shape", cast(out=tensor("float8_e4m3fn", 3, 63)), "TK_INVALID_ARGUMENT",
     "demo.cast: out must have shape (num_tokens, hidden) = (3, 64), got (3, 63)"),
    ("computed shape", cast(out_sf=tensor("float32", 3, 3)), "TK_INVALID_ARGUMENT",
     "demo.cast: out_sf must have shape (num_tokens, (hidden + 31) // 32) = (3, 2), got (3, 3)"),
    ("vector", cast(bias=tensor("float32", 63)), "TK_INVALID_ARGUMENT",
     "demo.cast: bias must have shape (hidden,) = (64,), got (63,)"),
    ("strides", cast(out=tensor("float8_e4m3fn", 3, 64, strides=(65, 1))), "TK_INVALID_ARGUMENT",
     "demo.cast: out must have strides (hidden, 1) = (64, 1), got (65, 1) for shape (3, 64)"),
    ("inner stride", cast(x=tensor("bfloat16", 3, 64, strides=(128, 2))), "TK_INVALID_ARGUMENT",
     "demo.cast: x must have strides (x_stride, 1) = (128, 1), got (128, 2) for shape (3, 64)"),
    ("rank", cast(x=tensor("bfloat16", 64)), "TK_INVALID_ARGUMENT",
     "demo.cast: x must have 2 dimensions, got 1 of shape (64,)"),
    ("dtype", cast(x=tensor("float16", 3, 64)), "TK_INVALID_TYPE", "demo.cast: x must be bfloat16, got float16"),
    ("accepted dtypes", cast(out_sf=tensor("int64", 3, 2)), "TK_INVALID_TYPE",
     "demo.cast: out_sf must be float32 or int32, got int64"),
    ("missing", call("demo.cast", None, None, None, None, None, scalars=[0.5], axes=(32, 0, 0)), "TK_INVALID_TYPE",
     "demo.cast: x must be a tensor, got None"),
    ("must be absent", cast(row_map=tensor("int32", 3)), "TK_INVALID_ARGUMENT",
     "demo.cast: row_map must be None in this configuration, got a tensor"),
    ("must be there", cast(hidden=128, axes=(128, 1, 1)), "TK_INVALID_TYPE",
     "demo.cast: row_map must be a tensor, got None"),
    ("guard", cast(hidden=48), "TK_INVALID_ARGUMENT", "demo.cast: hidden % 32 == 0 is required, got hidden = 48"),
    ("alignment", cast(x=tensor("bfloat16", 3, 64, data=X + 8)), "TK_INVALID_ARGUMENT",
     "demo.cast: alignment of x to 16 bytes is required, got x of bfloat16 at address 0x10008"),
    ("limit", rank(tokens=4, experts=513), "TK_INVALID_ARGUMENT",
     "demo.rank: num_experts <= 512 is required, got num_experts = 513"),
    ("scalar in a shape", call("demo.rank", tensor("float32", 4, 8), tensor("int32", 3, 8), tensor("int64", 4),
                               scalars=[2]), "TK_INVALID_ARGUMENT",
     "demo.rank: workspace must have shape (num_sms, num_experts) = (2, 8), got (3, 8)"),
    ("32 bits", transpose(SIXTY_FOUR_BY_2G, tensor("uint8", 2**31, 64)), "TK_INVALID_ARGUMENT",
     "demo.transpose: x must have a size below 2147483648 in dimension 1, got 2147483648"),
    ("raw size", transpose(tensor("float32", 4, 4), tensor("float32", 4, 4)), "TK_INVALID_TYPE",
     "demo.transpose: x must have elements of 1 or 2 bytes, got float32 of 4"),
    ("raw dtypes differ", transpose(tensor("bfloat16", 4, 4), tensor("float16", 4, 4)), "TK_INVALID_TYPE",
     "demo.transpose: out must be bfloat16 like x, got float16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def refused(driver_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """By name of the case: what the call, and the check without a driver, answered; all in two processes."""
    runtime = Runtime(
        install_golden() / "lib" / "libtilekernels.so.0", driver_folder, tmp_path_factory.mktemp("refused")
    )
    called = runtime.run(enter(), *(step for _, step, _, _ in REFUSALS))
    checked = runtime.run(*(without_gpu(step) for _, step, _, _ in REFUSALS), driver=False)
    assert called.launches == []
    answers = zip(called.answers[1:], checked.answers, strict=True)
    return {
        name: [(answer["status"], answer["message"]) for answer in pair]
        for (name, *_), pair in zip(REFUSALS, answers, strict=True)
    }


@pytest.mark.parametrize(
    ("name", "status", "text"), [pytest.param(name, *rest, id=name) for name, _, *rest in REFUSALS]
)
def test_call_and_check_refuse(refused: dict[str, list[tuple[str, str]]], name: str, status: str, text: str) -> None:
    assert refused[name] == [(status, text)] * 2


def test_check_passes_over_outputs_that_are_not_there_yet(golden: Runtime) -> None:
    x = tensor("bfloat16", 3, 64, device=CPU)
    steps = [
        check("demo.cast", x, None, None, None, None, scalars=[0.5], axes=(32, 0, 0)),
        check("demo.transpose", x, None),
        check("demo.rank", tensor("float32", 4, 8, device=CPU), None, None, scalars=[2]),
    ]
    assert golden.run(*steps, driver=False).statuses == ["TK_OK"] * 3


def test_call_needs_its_outputs(golden: Runtime) -> None:
    result = golden.run(enter(), transpose(tensor("bfloat16", 3, 64), None))
    assert result.last == ("TK_INVALID_TYPE", "demo.transpose: out must be a tensor, got None")


# ---- typed entries ---------------------------------------------------------------------------------------------------


def test_typed_entries_from_plain_c(golden: Runtime, driver_folder: Path, tmp_path: Path) -> None:
    """ops.h is C; the entry fills tensors, scalars and axes from the fields of its struct."""
    prefix, program = install_golden(), tmp_path / "typed"
    source = Path(__file__).with_name("typed_entries.c")
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{prefix}/include"]
    link = [str(golden.library), f"-Wl,-rpath,{golden.library.parent}", *compile_flags()]
    subprocess.run(["gcc", *flags, str(source), *link, "-o", str(program)], check=True)
    variables = {"LD_LIBRARY_PATH": str(driver_folder)} | environment(is_instrumented=True)
    result = subprocess.run([program], env=variables, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "TK_OK\n"), result.stderr

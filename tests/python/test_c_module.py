"""The pybind11 module, built from the golden store: CPU tensors of torch, and tensors that pass for CUDA (fake driver).

Everything runs in processes of its own, one per kind of tensor: see c_module_runner.py and c_module_cuda_runner.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import struct
import subprocess
import sys
from typing import Any

import pytest

from tests.golden_store import ROOT, install_golden

CAST = "check_demo_cast(x, None, None, {clamp}, out, sf, {channels}, {rounding}, {transposed})"


def cast(clamp: str = "1.0", channels: str = "32", rounding: str = "'nearest'", transposed: str = "False") -> str:
    return CAST.format(clamp=clamp, channels=channels, rounding=rounding, transposed=transposed)


# Name of the case: expression, class of the exception, its text.
REFUSED: dict[str, tuple[str, str, str]] = {
    "too few": (
        "demo_transpose(x)", "ArgumentTypeError", "demo.transpose: takes 2 positional arguments (x, out), got 1"),
    "too many": (
        "check_demo_transpose(x, x, x)", "ArgumentTypeError",
        "demo.transpose: takes 2 positional arguments (x, out), got 3"),
    "no tensor": (
        "check_demo_transpose(3, None)", "ArgumentTypeError", "demo.transpose: x must be a tensor, got int"),
    "None": ("check_demo_transpose(None, None)", "ArgumentTypeError", "demo.transpose: x must be a tensor, got None"),
    "shape": (
        "check_demo_transpose(x, x)", "ArgumentError",
        "demo.transpose: out must have shape (num_cols, num_rows) = (64, 3), got (3, 64)"),
    "dtype": (
        "check_demo_transpose(x.float(), None)", "ArgumentTypeError",
        "demo.transpose: x must have elements of 1 or 2 bytes, got float32 of 4"),
    "raw dtypes differ": (
        "check_demo_transpose(x, x.t().contiguous().half())", "ArgumentTypeError",
        "demo.transpose: out must be bfloat16 like x, got float16"),
    "strides": (
        "check_demo_transpose(x.t(), None)", "ArgumentError",
        "demo.transpose: x must have strides (x_stride, 1) = (1, 1), got (1, 64) for shape (64, 3)"),
    "guard": (
        "check_demo_cast(x[:, :48], None, None, 1.0, None, None, 32, 'nearest', False)", "ArgumentError",
        "demo.cast: hidden % 32 == 0 is required, got hidden = 48"),
    "bool for a float": (cast(clamp="True"), "ArgumentTypeError", "demo.cast: clamp_min must be a float, got bool"),
    "string for a float": (cast(clamp="'1'"), "ArgumentTypeError", "demo.cast: clamp_min must be a float, got str"),
    "tensor for a float": (
        cast(clamp="sf[0, 0]"), "ArgumentTypeError", "demo.cast: clamp_min must be a float, got Tensor"),
    "huge int for a float": (
        cast(clamp="10 ** 400"), "ArgumentError", f"demo.cast: clamp_min must be a float, got {10**400}"),
    "bool for a number": (
        cast(channels="True"), "ArgumentTypeError", "demo.cast: num_per_channels must be an int, got bool"),
    "float for a number": (
        cast(channels="32.0"), "ArgumentTypeError", "demo.cast: num_per_channels must be an int, got float"),
    "number of no variant": (
        cast(channels="64"), "ArgumentError", "demo.cast: num_per_channels must be 32 or 128, got 64"),
    "number too large": (
        cast(channels="2 ** 32 + 32"), "ArgumentError",
        "demo.cast: num_per_channels must fit into 32 bits, got 4294967328"),
    "unknown choice": (
        cast(rounding="'down'"), "ArgumentError", "demo.cast: rounding must be 'nearest' or 'up', got 'down'"),
    "int for a choice": (cast(rounding="0"), "ArgumentTypeError", "demo.cast: rounding must be a string, got int"),
    "int for a flag": (cast(transposed="0"), "ArgumentTypeError", "demo.cast: transposed must be a bool, got int"),
    "int32 too large": (
        "check_demo_rank(sf, 2 ** 31, None, None)", "ArgumentError",
        "demo.rank: num_sms must fit into 32 bits, got 2147483648"),
    "not built": (
        cast(channels="128"), "NotBuiltError",
        "demo.cast: not built for fmt=e4m3, num_per_channels=128, rounding=nearest, transposed=True"),
    "covers, unknown axis": (
        "covers('demo.cast', {'group': 1})", "ArgumentError",
        "demo.cast: axes must be among (fmt, num_per_channels, rounding, transposed), got {'group': 1}"),
    "covers, unknown value": (
        "covers('demo.cast', {'fmt': 'e5m6'})", "ArgumentError", "demo.cast: fmt must be 'e4m3' or 'e2m1', got 'e5m6'"),
    "covers, bool for a number": (
        "covers('demo.transpose', {'itemsize': True})", "ArgumentError",
        "demo.transpose: itemsize must be 1 or 2, got True"),
    "set_torch": ("set_torch(str, str, 3)", "ValueError", "PyCapsule_GetPointer called with invalid PyCapsule object"),
    "set_fallback": ("set_fallback(3)", "TypeError", "set_fallback(): incompatible function arguments"),
    "preload": ("preload(None, 0)", "DeviceError", "the NVIDIA driver is not usable: libcuda.so.1"),
}  # fmt: skip
REFUSED["not built"] = (
    "check_demo_cast(x, None, None, 1.0, out, sf, 128, 'nearest', True)",
    *REFUSED["not built"][1:],
)

FALLBACK = "('fallback', 'demo.transpose', 2)"
ACCEPTED: dict[str, tuple[str, str]] = {
    "check": ("check_demo_transpose(x, torch.zeros(64, 3, dtype=torch.bfloat16))", "None"),
    "output left out": ("check_demo_transpose(x, None)", "None"),
    "parameter": ("check_demo_transpose(parameter, None)", "None"),
    "empty": ("check_demo_transpose(x[:0], None)", "None"),
    "one row, any stride": ("check_demo_transpose(x[:1].as_strided((1, 64), (5, 1)), None)", "None"),
    "int for a float": (cast(clamp="1"), "None"),
    "choice that is not interned": (cast(rounding="''.join(['near', 'est'])"), "None"),
    "dtype of an output": (
        "check_demo_cast(x, None, None, 1.0, torch.zeros(3, 32, dtype=torch.int8), sf, 32, 'nearest', False)", "None"),
    "carrier": ("check_demo_cast(x, None, None, 1.0, out, sf.int(), 32, 'nearest', False)", "None"),
    "CPU goes to the fallback": ("demo_transpose(x, x)", FALLBACK),
    "fake goes to the fallback": ("demo_transpose(fake, x)", FALLBACK),
    "meta goes to the fallback": ("demo_transpose(meta, x)", FALLBACK),
    "fake is not checked": ("check_demo_transpose(fake, x)", "None"),
    "meta is not checked": ("check_demo_transpose(meta, x)", "None"),
    "covers": ("covers('demo.cast', {'fmt': 'e4m3', 'rounding': 'up', 'transposed': True})", "True"),
    "covers not": ("covers('demo.cast', {'fmt': 'e2m1', 'rounding': 'up'})", "False"),
    "covers an arch": ("covers('demo.transpose', {'itemsize': 2}, 'sm_80')", "True"),
    "covers not an arch": ("covers('demo.cast', {}, arch='sm_80')", "False"),
    "covers no such kernel": ("covers('demo.none', {})", "False"),
    "driver": ("driver_version()", "None"),
    "required driver": ("required_driver_version()", "13000"),
    "devices": ("devices()", "[]"),
}  # fmt: skip


def run_module(name: str, expressions: dict[str, str], environment: dict[str, str]) -> Any:
    (module,) = install_golden().glob("_C.*.so")
    result = subprocess.run(
        [sys.executable, "-m", f"tests.python.{name}", str(module)],
        input=json.dumps(expressions),
        env={key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    """What CPU tensors get, by name of the case. An empty folder on the library path: no driver is found there."""
    expressions = {name: expression for name, (expression, *_) in (REFUSED | ACCEPTED).items()}
    extra = {"kernels": "kernels()", "functions": "[name for name in globals() if callable(globals()[name])]"}
    found: dict[str, list[str | None]] = run_module("c_module_runner", expressions | extra, {"LD_LIBRARY_PATH": ""})
    return found


@pytest.mark.parametrize(
    ("name", "kind", "text"), [pytest.param(name, *case[1:], id=name) for name, case in REFUSED.items()]
)
def test_refused(answers: dict[str, list[str | None]], name: str, kind: str, text: str) -> None:
    got_kind, got_text = answers[name]
    assert (got_kind, got_text and got_text[: len(text)]) == (kind, text)


@pytest.mark.parametrize(("name", "result"), [pytest.param(name, case[1], id=name) for name, case in ACCEPTED.items()])
def test_accepted(answers: dict[str, list[str | None]], name: str, result: str) -> None:
    assert answers[name] == [None, result]


def test_import_needs_no_torch(answers: dict[str, list[str | None]]) -> None:
    assert answers["archs"] == [None, "['sm_80', 'sm_90a']"]
    assert answers["torch"] == [None, "False"]


def test_call_before_torch_is_known_says_so(answers: dict[str, list[str | None]]) -> None:
    assert answers["unset"] == [
        "RuntimeError",
        "demo.transpose: set_torch, set_allocator and set_fallback must be called first; import tilekernels does",
    ]


def test_kernels_tells_what_a_call_takes(answers: dict[str, list[str | None]]) -> None:
    kernels = ast.literal_eval(str(answers["kernels"][1]))
    cast_kernel = kernels[0]
    assert [kernel["name"] for kernel in kernels] == ["demo.cast", "demo.rank", "demo.transpose"]
    assert [param["name"] for param in cast_kernel["params"]] == ["x", "bias", "row_map", "clamp_min", "out", "out_sf"]
    assert cast_kernel["params"][2] == {
        "name": "row_map", "kind": "tensor", "dtypes": ["int32"], "rank": 1,
        "raw": False, "written": False, "nullable": True, "optional": True,
    }  # fmt: skip
    assert cast_kernel["params"][3] == {"name": "clamp_min", "kind": "scalar", "dtype": "float32"}
    assert cast_kernel["params"][5]["dtypes"] == ["float32", "int32"]
    assert cast_kernel["axes"] == [
        {"name": "fmt", "kind": "dtype_of", "of": "out", "values": ["e4m3", "e2m1"]},
        {"name": "num_per_channels", "kind": "value", "values": [32, 128]},
        {"name": "rounding", "kind": "value", "values": ["nearest", "up"]},
        {"name": "transposed", "kind": "value", "values": [False, True]},
    ]


def test_stub_names_what_the_module_has(answers: dict[str, list[str | None]]) -> None:
    stub = ast.parse((install_golden() / "_C.pyi").read_text())
    in_stub = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    names = ast.literal_eval(str(answers["functions"][1]))
    assert in_stub == {name for name in names if not name.startswith("__")}


# ---- CUDA ------------------------------------------------------------------------------------------------------------

OUT = "Tensor('bfloat16', 128, 64, data=0x40000)"
ON_CUDA = {
    "launch": f"demo_transpose(Tensor('bfloat16', 64, 128), {OUT})",
    "parameter": f"demo_transpose(Parameter('bfloat16', 64, 128), {OUT})",
    "second device": "demo_transpose(Tensor('uint8', 3, 5, device=1), Tensor('uint8', 5, 3, device=1))",
    "scalars and axes": (
        "demo_cast(Tensor('bfloat16', 3, 64), None, None, 2, Tensor('float8_e4m3fn', 3, 64),"
        " Tensor('int32', 3, 2), 32, 'nearest', False)"
    ),
    "refused": f"demo_transpose(Tensor('bfloat16', 64, 127), {OUT})",
    "mixed": f"demo_transpose(Tensor('bfloat16', 64, 128, device_type=CPU), {OUT})",
    "subclass": f"demo_transpose(Subclass('bfloat16', 64, 128), {OUT})",
    "unreadable": f"demo_transpose(unreadable, {OUT})",
    "on the host": "demo_transpose(Tensor('uint8', 3, 5, device_type=CPU), Tensor('uint8', 5, 3, device_type=CPU))",
    "devices": "[(d['index'], d['capability'], d['arch'], d['wanted_arch']) for d in devices()]",
    "preload": "preload(['demo.rank'], 1)",
    "preload unknown": "preload(['demo.none'], 0)",
    "preload nothing": "preload([], 0)",
}
# Outputs that are asked for; on the second device, so that the launches above stay what they are.
ASKED = {
    "one": "describe(demo_transpose(Tensor('bfloat16', 64, 128, device=1), ('bfloat16', 0, 128, 64)))",
    "two": (
        "[describe(each) for each in demo_cast(Tensor('bfloat16', 3, 64), None, None, 2, ('float8_e4m3fn', 0, 3, 64),"
        " ('int32', 0, 3, 2), 32, 'nearest', False)]"
    ),
    "one of two": (
        "describe(demo_cast(Tensor('bfloat16', 3, 64), None, None, 2, Tensor('float8_e4m3fn', 3, 64),"
        " ('int32', 0, 3, 2), 32, 'nearest', False))"
    ),
    "columns": (
        "demo_cast(Tensor('bfloat16', 3, 64), None, None, 2, Tensor('float8_e4m3fn', 3, 64), ('int32', 4, 3, 2), 32,"
        " 'nearest', False)"
    ),
    "empty": "describe(demo_transpose(Tensor('bfloat16', 0, 128), ('bfloat16', 0, 128, 0)))",
    "wrong size": "demo_transpose(Tensor('bfloat16', 64, 128), ('bfloat16', 0, 127, 64))",
    "bad input": "demo_transpose(Tensor('float32', 64, 128), ('float32', 0, 128, 64))",
    "no size": "demo_transpose(Tensor('bfloat16', 64, 128), ('bfloat16', 0))",
    "a pair": "demo_transpose(Tensor('bfloat16', 64, 128), (Tensor('bfloat16', 128, 64), None, None))",
    "negative": "demo_transpose(Tensor('bfloat16', 64, 128), ('bfloat16', 0, -1, 64))",
    "no number": "demo_transpose(Tensor('bfloat16', 64, 128), ('bfloat16', 0, 'x', 64))",
    "an input": "demo_transpose(('bfloat16', 0, 64, 128), Tensor('bfloat16', 128, 64))",
    "out of memory": "demo_transpose(Tensor('bfloat16', 64, 128), ('no memory', 0, 128, 64))",
    "watched": "describe(demo_transpose(Tensor('bfloat16', 64, 128), ('watched', 0, 128, 64)))",
}


@pytest.fixture(scope="module")
def on_cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_cuda(tmp_path_factory, ON_CUDA)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_cuda(tmp_path_factory, ASKED)


def run_on_cuda(tmp_path_factory: pytest.TempPathFactory, cases: dict[str, str]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("driver")
    sources = sorted((ROOT / "tests" / "csrc").glob("fake_*.cpp"))
    library, log = folder / "libcuda.so.1", folder / "log"
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *sources, "-o", library], check=True
    )
    environment = {"LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_DEVICES": "9.0,8.0"}
    result: dict[str, Any] = run_module("c_module_cuda_runner", cases, environment)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return result | {"launches": [record for record in records if record["call"] == "cuLaunchKernelEx"]}


def test_launch_in_the_primary_context_on_the_current_stream(on_cuda: dict[str, Any]) -> None:
    assert [on_cuda["answers"][name] for name in ("launch", "parameter", "second device", "scalars and axes")] == [
        [None, "None"]
    ] * 4
    assert [
        (launch["name"], launch["device"], launch["primary"], launch["stream"]) for launch in on_cuda["launches"]
    ] == [
        ("tk_demo_transpose__b2_aligned", 0, True, 0x5000),
        ("tk_demo_transpose__b2_aligned", 0, True, 0x5000),
        ("tk_demo_transpose__b1_general", 1, True, 0x5001),
        ("tk_demo_cast__e4m3_npc32_nearest_no_transposed", 0, True, 0x5000),
    ]


def test_scalars_arrive_as_the_kernel_declares_them(on_cuda: dict[str, Any]) -> None:
    arguments = on_cuda["launches"][3]["arguments"]
    assert arguments[4] == struct.pack("<f", 2.0).hex()
    assert arguments[8] == "01"


def test_other_device_is_left_as_it_was_found(on_cuda: dict[str, Any]) -> None:
    """The second device becomes current for its own launch, and the first is current again afterwards."""
    assert on_cuda["context_left"]
    assert [launch["device"] for launch in on_cuda["launches"]] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        (
            "refused",
            "ArgumentError",
            r"demo.transpose: out must have shape \(num_cols, num_rows\) = \(127, 64\), got \(128, 64\)",
        ),
        ("mixed", "ArgumentError", r"demo.transpose: out must be on cpu like x, got cuda:0"),
        (
            "preload unknown",
            "NotBuiltError",
            r"demo.none: no such kernel in this library; it holds demo.cast, demo.rank and",
        ),
        (
            "too new",
            "ImportError",
            r"tilekernels needs a torch whose tensors are read by the DLPack exchange API of major",
        ),
    ],
)
def test_refused_on_cuda(on_cuda: dict[str, Any], name: str, kind: str, text: str) -> None:
    got_kind, got_text = on_cuda["answers"][name]
    assert got_kind == kind
    assert re.match(text, got_text), got_text


@pytest.mark.parametrize("name", ["subclass", "unreadable", "on the host"])
def test_what_the_fast_path_does_not_take_goes_to_the_fallback(on_cuda: dict[str, Any], name: str) -> None:
    assert on_cuda["answers"][name] == [None, FALLBACK]


def test_devices_with_what_serves_them(on_cuda: dict[str, Any]) -> None:
    assert on_cuda["answers"]["devices"] == [None, "[(0, (9, 0), 'sm_90a', 'sm_90a'), (1, (8, 0), 'sm_80', 'sm_80')]"]


@pytest.mark.parametrize("name", ["preload", "preload nothing"])
def test_preload(on_cuda: dict[str, Any], name: str) -> None:
    assert on_cuda["answers"][name] == [None, "None"]


# ---- outputs that are asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("one", "('FakeTensor', [128, 64])"),
        ("two", "[('FakeTensor', [3, 64]), ('FakeTensor', [3, 2])]"),
        ("one of two", "('FakeTensor', [3, 2])"),
        ("empty", "('FakeTensor', [128, 0])"),
        ("watched", "('Subclass', [128, 64])"),  # by the fallback, with the tensor that torch made
    ],
)
def test_asked_for_and_returned(asked: dict[str, Any], name: str, result: str) -> None:
    assert asked["answers"][name] == [None, result]


def test_what_is_asked_of_the_allocator(asked: dict[str, Any]) -> None:
    assert asked["made"][:6] == [
        [[128, 64], [64, 1], "bfloat16", "cuda", 1],
        [[3, 64], [64, 1], "float8_e4m3fn", "cuda", 0],
        [[3, 2], [2, 1], "int32", "cuda", 0],
        [[3, 2], [2, 1], "int32", "cuda", 0],
        [[4, 2], [1, 4], "int32", "cuda", 0],
        [[128, 0], [1, 1], "bfloat16", "cuda", 0],
    ]


def test_what_is_launched_with_them(asked: dict[str, Any]) -> None:
    assert [(launch["name"], launch["device"]) for launch in asked["launches"]] == [
        ("tk_demo_transpose__b2_aligned", 1),
        ("tk_demo_cast__e4m3_npc32_nearest_no_transposed", 0),
        ("tk_demo_cast__e4m3_npc32_nearest_no_transposed", 0),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("wrong size", "ArgumentError", r"demo.transpose: out must have shape .* = \(128, 64\), got \(127, 64\)"),
        ("bad input", "ArgumentTypeError", r"demo.transpose: x must have elements of 1 or 2 bytes, got float32 of 4"),
        (
            "no size",
            "ArgumentTypeError",
            r"demo.transpose: out must be a tensor, got tuple",
        ),
        ("a pair", "ArgumentTypeError", r"demo.transpose: out must be a tensor, got tuple"),
        (
            "negative",
            "ArgumentError",
            r"demo.transpose: out must be a tensor or \(dtype, alignment, \*sizes\), got \('bf",
        ),
        (
            "no number",
            "ArgumentError",
            r"demo.transpose: out must be a tensor or \(dtype, alignment, \*sizes\), got \('bf",
        ),
        (
            "columns",
            "ArgumentError",
            r"demo.cast: out_sf must have strides .*, got \(1, 4\)",
        ),  # the rows of the padded one
        ("an input", "ArgumentTypeError", r"demo.transpose: x must be a tensor, got tuple"),
        ("out of memory", "MemoryError", r"out of memory"),
        (
            "no allocator",
            "TypeError",
            r"demo.transpose: out must be a tensor, got tuple",
        ),  # nobody said what a dtype is
    ],
)
def test_asked_for_and_refused(asked: dict[str, Any], name: str, kind: str, text: str) -> None:
    got_kind, got_text = asked["answers"][name]
    assert got_kind == kind
    assert re.match(text, got_text), got_text


def test_nothing_is_made_for_a_bad_input(asked: dict[str, Any]) -> None:
    assert [size for size, *_ in asked["made"][6:]] == [[127, 64], [128, 64], [128, 64]]

"""Wrong arguments: each is refused with the same sentence by a launch on the GPU and by a check without one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.csrc.steps import CPU, CUDA, Runtime, call, cast, check, enter, sync, tensor, topk, transpose

BIG = 2**31

# (id, valid call with one thing changed, status, sentence)
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "dtype",
        topk(scores=tensor("bfloat16", 6, 64)),
        "TK_INVALID_TYPE",
        "demo.topk: scores must be float32, got bfloat16",
    ),
    (
        "dtypes",
        topk(out=tensor("float32", 6, 4)),
        "TK_INVALID_TYPE",
        "demo.topk: out must be int64 or int32, got float32",
    ),
    (
        "dtype of this configuration",
        topk(out=tensor("int32", 6, 4)),
        "TK_INVALID_TYPE",
        "demo.topk: out must be int64, got int32",
    ),
    (
        "unknown dtype",
        topk(scores=tensor("strange", 6, 64)),
        "TK_INVALID_TYPE",
        "demo.topk: scores must be float32, got a dtype of code 99, 16 bits, 1 lanes",
    ),
    (
        "element size",
        transpose(4, 8, dtype="float64"),
        "TK_INVALID_TYPE",
        "demo.transpose: x must have elements of 1, 2 or 4 bytes, got float64 of 8",
    ),
    (
        "raw dtypes differ",
        call("demo.transpose", tensor("float16", 4, 8), tensor("bfloat16", 8, 4)),
        "TK_INVALID_TYPE",
        "demo.transpose: out must be float16 like x, got bfloat16",
    ),
    (
        "absent",
        call("demo.transpose", None, tensor("float16", 8, 4)),
        "TK_INVALID_TYPE",
        "demo.transpose: x must be a tensor, got None",
    ),
    (
        "present",
        topk(bias=tensor("float32", 64)),
        "TK_INVALID_ARGUMENT",
        "demo.topk: bias must be None in this configuration, got a tensor",
    ),
    (
        "rank",
        topk(scores=tensor("float32", 64)),
        "TK_INVALID_ARGUMENT",
        "demo.topk: scores must have 2 dimensions, got 1 of shape (64,)",
    ),
    (
        "shape",
        topk(out=tensor("int64", 5, 4)),
        "TK_INVALID_ARGUMENT",
        "demo.topk: out must have shape (num_tokens, num_topk) = (6, 4), got (5, 4)",
    ),
    (
        "shape of one dimension",
        cast(6, 8, scale=tensor("float32", 5)),
        "TK_INVALID_ARGUMENT",
        "demo.cast: scale must have shape (rows,) = (6,), got (5,)",
    ),
    (
        "strides",
        topk(scores=tensor("float32", 6, 64, strides=(1, 6))),
        "TK_INVALID_ARGUMENT",
        "demo.topk: scores must have strides (num_experts, 1) = (64, 1), got (1, 6) for shape (6, 64)",
    ),
    (
        "guard on a symbol",
        topk(out=tensor("int64", 6, 40)),
        "TK_INVALID_ARGUMENT",
        "demo.topk: num_topk <= 32 is required, got num_topk = 40",
    ),
    (
        "guard on a scalar",
        sync(-1),
        "TK_INVALID_ARGUMENT",
        "demo.sync: num_sms > 0 is required, got num_sms = -1",
    ),
    (
        "size beyond int32",
        transpose(BIG, 8),
        "TK_INVALID_ARGUMENT",
        "demo.transpose: x must have a size below 2147483648 in dimension 0, got 2147483648",
    ),
    (
        "stride beyond int32",
        transpose(2, 8, stride=BIG),
        "TK_INVALID_ARGUMENT",
        "demo.transpose: x must have a stride below 2147483648 in dimension 0, got 2147483648",
    ),
    (
        "devices differ",
        call("demo.transpose", tensor("float16", 4, 8), tensor("float16", 8, 4, device=[2, 1])),
        "TK_INVALID_ARGUMENT",
        "demo.transpose: out must be on cuda:0 like x, got cuda:1",
    ),
    (
        "device and host",
        call("demo.transpose", tensor("float16", 4, 8), tensor("float16", 8, 4, device=CPU)),
        "TK_INVALID_ARGUMENT",
        "demo.transpose: out must be on cuda:0 like x, got cpu",
    ),
    (
        "choice",
        topk(axes=(2, 0)),
        "TK_INVALID_ARGUMENT",
        "demo.topk: scoring must be softmax or sigmoid, got number 2",
    ),
    ("number", sync(8, num_stages=17), "TK_INVALID_ARGUMENT", "demo.sync: num_stages must be 16 or 32, got 17"),
    (
        "not built",
        topk(axes=(1, 0)),
        "TK_NOT_BUILT",
        "demo.topk: not built for scoring=sigmoid, with_bias=no_bias; built: (scoring=softmax, with_bias=no_bias); "
        'a profile with the line `"demo.topk" = {scoring = ["sigmoid"], with_bias = [false]}` builds it: '
        "`make pack PROFILE=FILE.toml` beside this library, or extend the profile 'hand' and `make wheel`",
    ),
    (
        "element size not built",
        transpose(4, 8, dtype="uint8"),
        "TK_NOT_BUILT",
        "demo.transpose: not built for itemsize=1; built: (itemsize=2), (itemsize=4); a profile with the line "
        '`"demo.transpose" = {itemsize = [1]}` builds it: `make pack PROFILE=FILE.toml` beside this library, or extend '
        "the profile 'hand' and `make wheel`",
    ),
]
parametrize = pytest.mark.parametrize(
    ("step", "status", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


@parametrize
def test_launch_refuses(runtime: Runtime, step: dict[str, Any], status: str, message: str) -> None:
    result = runtime.run(enter(), step)
    assert result.last == (status, message)
    assert result.launches == []


@parametrize
def test_check_refuses_without_a_driver(runtime: Runtime, step: dict[str, Any], status: str, message: str) -> None:
    step = {key: value for key, value in step.items() if key != "stream"} | {"do": "check"}
    assert runtime.run(step, driver=False).last == (status, message)


# What only a launch can refuse.
LAUNCH_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "host tensors",
        cast(6, 8, device=CPU),
        "TK_INVALID_ARGUMENT",
        "demo.cast: tensors must be on a CUDA device, got cpu",
    ),
    (
        "pinned tensors",
        cast(6, 8, device=[3, 0]),
        "TK_INVALID_ARGUMENT",
        "demo.cast: tensors must be on a CUDA device, got pinned memory of the cpu",
    ),
    (
        "other device",
        cast(6, 8, device=[2, 1]),
        "TK_INVALID_ARGUMENT",
        "demo.cast: tensors must be on cuda:0, the device of the current context, got cuda:1",
    ),
    (
        "output absent",
        call("demo.topk", tensor("float32", 6, 64), None, None, scalars=[0.5], axes=[0, 0]),
        "TK_INVALID_TYPE",
        "demo.topk: out must be a tensor, got None",
    ),
    (
        "null data",
        topk(scores=tensor("float32", 6, 64, data=0)),
        "TK_INVALID_ARGUMENT",
        "demo.topk: scores must have data, got a null pointer",
    ),
    (
        "guard of the last form on an address",
        transpose(8, 8, dtype="float32", data=0x10004),
        "TK_INVALID_ARGUMENT",
        "demo.transpose: aligned(x, 16) is required, got x of float32 at address 0x10004",
    ),
    (
        "guard of the last form on two symbols",
        transpose(4000, 96, dtype="float32"),
        "TK_INVALID_ARGUMENT",
        "demo.transpose: num_rows + num_cols < 4096 is required, got num_rows = 4000, num_cols = 96",
    ),
]


@pytest.mark.parametrize(
    ("step", "status", "message"), [case[1:] for case in LAUNCH_CASES], ids=[case[0] for case in LAUNCH_CASES]
)
def test_only_launch_refuses(runtime: Runtime, step: dict[str, Any], status: str, message: str) -> None:
    result = runtime.run(enter(), step, devices="9.0,9.0")
    assert result.last == (status, message)
    assert result.launches == []


# ---- checks before outputs exist -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
def test_check_takes_absent_outputs_and_null_data(runtime: Runtime, device: list[int]) -> None:
    scores = tensor("float32", 6, 64, device=device, data=0)
    result = runtime.run(check("demo.topk", scores, None, None, scalars=[0.5], axes=[0, 0]), driver=False)
    assert result.last == ("TK_OK", "")


def test_check_evaluates_guards_whose_symbols_are_known(runtime: Runtime) -> None:
    scores = tensor("float32", 6, 4)
    result = runtime.run(check("demo.topk", scores, None, None, scalars=[0.5], axes=[0, 0]), driver=False)
    assert result.last == ("TK_INVALID_ARGUMENT", "demo.topk: num_experts >= 8 is required, got num_experts = 4")


def test_check_leaves_an_axis_open_that_an_absent_output_decides(runtime: Runtime) -> None:
    """5 columns do for e4m3, not for e5m2: as long as the output may be either, the call may become valid."""
    x = tensor("bfloat16", 6, 5, device=CPU)
    given = [tensor(dtype, 6, 5, device=CPU) for dtype in ("float8_e4m3fn", "float8_e5m2")]
    result = runtime.run(*(check("demo.cast", x, None, out) for out in (None, *given)), driver=False)
    assert result.statuses == ["TK_OK", "TK_OK", "TK_INVALID_ARGUMENT"]
    assert result.last[1] == "demo.cast: floormod(cols, 4) == 0 is required, got cols = 5"


def test_check_reports_what_no_output_can_mend(runtime: Runtime) -> None:
    x, scale = tensor("bfloat16", 6, 8, device=CPU), tensor("float32", 7, device=CPU)
    result = runtime.run(check("demo.cast", x, scale, None), driver=False)
    assert result.last == ("TK_INVALID_ARGUMENT", "demo.cast: scale must have shape (rows,) = (6,), got (7,)")


def test_check_names_the_open_axis_of_what_is_not_built(runtime: Runtime) -> None:
    result = runtime.run(check("demo.cast", tensor("float32", 6, 8), None, None), driver=False)
    assert result.last == (
        "TK_NOT_BUILT",
        "demo.cast: not built for input=fp32, fmt=any; built: (input=bf16, fmt=e4m3), (input=bf16, fmt=e5m2); "
        'a profile with the line `"demo.cast" = {input = ["fp32"]}` builds it: `make pack PROFILE=FILE.toml` beside '
        "this library, or extend the profile 'hand' and `make wheel`",
    )


def test_unknown_kernel(runtime: Runtime) -> None:
    result = runtime.run({"do": "find", "name": "demo.nothing"}, driver=False)
    assert result.last == (
        "TK_NOT_BUILT",
        "demo.nothing: no such kernel in this library; it holds demo.cast, demo.sync, demo.topk and demo.transpose",
    )


@pytest.mark.parametrize("function", ["tk_launch", "tk_check"])
def test_null_handle(runtime: Runtime, function: str) -> None:
    result = runtime.run({"do": "null_handle", "function": function}, driver=False)
    assert result.last == ("TK_INVALID_ARGUMENT", f"{function}: kernel must be a handle from tk_find, got null")

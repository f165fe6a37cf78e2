"""What a call does: which variant it takes and what the driver is asked to launch, argument by argument."""

from __future__ import annotations

import struct

import pytest

from tests.csrc.steps import CUDA, Runtime, call, cast, enter, set_pdl, set_thread_pdl, sync, tensor, topk, transpose

UINT16, SWIZZLE_128B, L2_128B = 1, 3, 2  # the driver's enums, as hand_tables.cpp asks for them


def pointer(address: int) -> str:
    return struct.pack("<Q", address).hex()


def int32(value: int) -> str:
    return struct.pack("<i", value).hex()


def test_aligned_form_comes_first(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200) | {"stream": 77})
    assert result.statuses == ["TK_OK", "TK_OK"]
    (launch,) = result.launches
    assert launch["name"] == "tk_demo_transpose__b2_aligned"
    assert (launch["grid"], launch["block"], launch["smem"]) == ([4, 2, 1], [256, 1, 1], 8320)
    assert (launch["stream"], launch["attributes"]) == (77, {})
    assert launch["arguments"] == [pointer(0x20000), pointer(0x10000), int32(100), int32(200), "ab" * 128]


def test_tensor_map_is_made_from_the_shape_and_stride_of_the_call(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200, stride=208))
    (encode,) = result.calls("cuTensorMapEncodeTiled")
    assert encode == {
        "call": "cuTensorMapEncodeTiled",
        "dtype": UINT16,
        "address": 0x10000,
        "global_dim": [200, 100],
        "global_stride": [416],
        "box_dim": [64, 64],
        "element_stride": [1, 1],
        "interleave": 0,
        "swizzle": SWIZZLE_128B,
        "l2_promotion": L2_128B,
        "oob_fill": 0,
    }


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(transpose(100, 200, stride=203), id="stride"),
        pytest.param(transpose(100, 200, data=0x10008), id="address"),
        pytest.param(transpose(100, 200, byte_offset=2), id="byte_offset"),
    ],
)
def test_general_form_takes_what_the_aligned_one_refuses(runtime: Runtime, step: dict) -> None:
    result = runtime.run(enter(), step)
    (launch,) = result.launches
    assert result.last == ("TK_OK", "")
    assert launch["name"] == "tk_demo_transpose__b2_general"
    assert result.calls("cuTensorMapEncodeTiled") == []


def test_byte_offset_is_added_to_the_address(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200, byte_offset=0x40))
    assert result.launches[0]["arguments"][1] == pointer(0x10040)


def test_stride_of_a_single_row_does_not_matter(runtime: Runtime) -> None:
    """torch leaves any number there; the dense stride stands for it, so that guards on the stride hold."""
    result = runtime.run(enter(), transpose(1, 200, stride=7))
    assert result.last == ("TK_OK", "")
    assert result.launches[0]["name"] == "tk_demo_transpose__b2_aligned"


def test_absent_strides_mean_dense(runtime: Runtime) -> None:
    dense = call("demo.transpose", tensor("float16", 100, 200), tensor("float16", 200, 100))
    result = runtime.run(enter(), dense)
    assert result.last == ("TK_OK", "")
    assert result.calls("cuTensorMapEncodeTiled")[0]["global_stride"] == [400]


@pytest.mark.parametrize(("rows", "cols"), [(0, 200), (100, 0), (0, 0)])
def test_empty_grid_is_skipped_before_tensor_maps(runtime: Runtime, rows: int, cols: int) -> None:
    x = tensor("bfloat16", rows, cols, data=0)
    result = runtime.run(enter(), call("demo.transpose", x, tensor("bfloat16", cols, rows, data=0)))
    assert result.last == ("TK_OK", "")
    assert result.calls("cuTensorMapEncodeTiled") + result.launches == []


def test_several_launches_with_cluster_and_programmatic_dependent_launch(runtime: Runtime) -> None:
    result = runtime.run(enter(), set_pdl(True), topk())
    first, second = result.launches
    assert result.last == ("TK_OK", "")
    assert (first["name"], first["grid"], first["block"]) == ("tk_demo_topk__softmax_0", [4, 1, 1], [32, 4, 1])
    assert (first["smem"], first["attributes"]) == (65536, {"cluster": [2, 1, 1]})
    assert (second["name"], second["grid"], second["attributes"]) == ("tk_demo_topk__softmax_1", [6, 4, 1], {"pdl": 1})
    assert first["arguments"][2:] == [int32(6), int32(4), struct.pack("<f", 0.5).hex()]
    assert second["arguments"][3] == struct.pack("<q", 64).hex()


def test_dependent_launches_are_asked_for(runtime: Runtime) -> None:
    """Off at first, then by the process, then by a thread, whose word is the last; other threads do not hear it."""
    steps = [
        topk(),
        set_pdl(True),
        topk(),
        set_thread_pdl("off"),
        topk(),
        {"do": "threads", "count": 1, "steps": [enter(), topk()]},
        set_pdl(False),
        set_thread_pdl("on"),
        topk(),
        set_thread_pdl("default"),
        topk(),
    ]
    result = runtime.run(enter(), *steps)
    assert [answer for answer in result.answers if isinstance(answer, int)] == [1, 0, 0, 1, 2]
    dependent = ["pdl" in launch["attributes"] for launch in result.launches if launch["name"].endswith("_1")]
    assert dependent == [False, True, False, True, True, False]


@pytest.mark.parametrize("scale", [None, tensor("float32", 5, data=0x5000)], ids=["absent", "given"])
def test_nullable_tensor(runtime: Runtime, scale: dict | None) -> None:
    result = runtime.run(enter(), cast(5, 8, scale=scale), devices="8.6")
    assert result.last == ("TK_OK", "")
    assert result.launches[0]["arguments"][2] == pointer(0x5000 if scale else 0)


@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2"])
def test_axis_is_read_from_the_dtype_of_a_tensor(runtime: Runtime, out: str) -> None:
    result = runtime.run(enter(), cast(5, 8, out=out), devices="8.0")
    assert result.launches[0]["name"] == f"tk_demo_cast__bf16_{out.removeprefix('float8_').removesuffix('fn')}"


@pytest.mark.parametrize("num_stages", [16, 32])
def test_number_axis_is_given_by_value(runtime: Runtime, num_stages: int) -> None:
    result = runtime.run(enter(), sync(8, num_stages=num_stages))
    assert result.launches[0]["name"] == f"tk_demo_sync__n{num_stages}"


def test_cooperative_launch_asks_for_residency_once_per_shape(runtime: Runtime) -> None:
    result = runtime.run(enter(), sync(8), sync(8), sync(264), sync(8, size=200), sync(8, size=200))
    assert result.statuses == ["TK_OK"] * 6
    assert [launch["attributes"] for launch in result.launches] == [{"cooperative": 1}] * 5
    asked = result.calls("cuOccupancyMaxActiveBlocksPerMultiprocessor")
    assert [(call["block_size"], call["smem"]) for call in asked] == [(256, 400), (256, 800)]


def test_cooperative_grid_that_cannot_be_resident_is_refused(runtime: Runtime) -> None:
    result = runtime.run(enter(), sync(265))  # 132 SMs with 2 blocks each
    assert result.launches == []
    assert result.last == (
        "TK_INVALID_ARGUMENT",
        "demo.sync: its 265 blocks must run at the same time, cuda:0 (Fake GPU 0) holds 264 of them; ask for fewer SMs",
    )


def test_shared_memory_beyond_the_device_is_refused(runtime: Runtime) -> None:
    result = runtime.run(enter(), sync(8, size=58113))
    assert result.last == (
        "TK_INVALID_ARGUMENT",
        "demo.sync: needs 232452 bytes of shared memory a block, cuda:0 (Fake GPU 0) has 232448",
    )


@pytest.mark.parametrize("rows", [65535 * 64, 65535 * 64 + 1])
def test_grid_beyond_the_limit_of_y_is_refused(runtime: Runtime, rows: int) -> None:
    result = runtime.run(enter(), transpose(rows, 8))
    if rows == 65535 * 64:
        assert result.launches[0]["grid"] == [1, 65535, 1]
    else:
        assert result.last == (
            "TK_INVALID_ARGUMENT",
            "demo.transpose: the tensors are too large for one launch: its grid would be (1, 65536, 1), the largest is "
            "(2147483647, 65535, 65535)",
        )


def test_managed_memory_counts_as_the_device(runtime: Runtime) -> None:
    managed = [13, 0]
    step = call("demo.transpose", tensor("float16", 8, 8, device=managed), tensor("float16", 8, 8, device=managed))
    assert runtime.run(enter(), step).last == ("TK_OK", "")


def test_failed_launch_names_kernel_symbol_and_device(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200), fail="cuLaunchKernelEx:700")
    assert result.last == (
        "TK_DRIVER_ERROR",
        "demo.transpose: launching tk_demo_transpose__b2_aligned on cuda:0: cuLaunchKernelEx failed with 700: "
        "CUDA_ERROR_ILLEGAL_ADDRESS (an error of the fake)",
    )


def test_failed_tensor_map_shows_what_it_was_made_of(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200, device=CUDA), fail="cuTensorMapEncodeTiled:1")
    assert result.launches == []
    assert result.last == (
        "TK_DRIVER_ERROR",
        "demo.transpose: the tensor map of x (address 0x10000, sizes 200 100, strides in bytes 400): "
        "cuTensorMapEncodeTiled failed with 1: CUDA_ERROR_OF_THE_FAKE (an error of the fake)",
    )

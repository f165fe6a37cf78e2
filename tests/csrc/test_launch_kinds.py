"""Every way of launching, from a kernel file to the driver's call: real kernels, traced and compiled, over the fake
driver. launch_kinds/run_on_gpu.py runs the same library on a GPU.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.csrc.launch_kinds.library import BUILD, build_library
from tests.csrc.steps import Runtime, Step, call, enter, set_pdl, tensor

SMEM_OF_BLOCK = 232448  # of the fake device, as of an H200
A, B, OUT, WORKSPACE = 0x10000, 0x20000, 0x30000, 0x40000


@pytest.fixture(scope="session")
def library() -> Path:
    pytest.importorskip("tilelang")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_library()


@pytest.fixture
def kinds(library: Path, driver_folder: Path, tmp_path: Path) -> Runtime:
    return Runtime(library, driver_folder, tmp_path)


def vectors(kernel: str, size: int, dtype: str = "int32") -> Step:
    return call(f"kinds.{kernel}", tensor(dtype, size, data=A), tensor(dtype, size, data=OUT))


def tensor_maps(batch: int = 3, m: int = 200, n: int = 132, k: int = 136) -> Step:
    a = tensor("bfloat16", batch, m, k, strides=((m + 3) * (k + 8), k + 8, 1), data=A)
    out = tensor("float32", batch, m, n, data=OUT)
    return call("kinds.tensor_maps", a, tensor("bfloat16", n, k, data=B), out)


def test_cooperative(kinds: Runtime) -> None:
    """As many blocks as the caller's workspace has rows; the driver is asked whether they fit, and they must."""

    def cooperative(num_blocks: int) -> Step:
        x, out = tensor("int32", 1000, data=A), tensor("int32", 1000, data=OUT)
        return call("kinds.cooperative", x, tensor("int32", num_blocks, data=WORKSPACE), out)

    result = kinds.run(enter(), set_pdl(True), cooperative(8), cooperative(264), cooperative(265), num_sms=132)
    assert result.statuses == ["TK_OK", "TK_OK", "TK_OK", "TK_INVALID_ARGUMENT"]
    assert "its 265 blocks must run at the same time" in result.last[1]
    assert [launch["grid"] for launch in result.launches] == [[8, 1, 1], [264, 1, 1]]
    assert [launch["attributes"] for launch in result.launches] == [{"cooperative": 1}] * 2
    (asked,) = result.calls("cuOccupancyMaxActiveBlocksPerMultiprocessor")
    assert (asked["block_size"], asked["smem"]) == (128, 0)


def test_cluster(kinds: Runtime) -> None:
    (launch,) = kinds.run(enter(), vectors("cluster", 1000, "float32")).launches
    assert (launch["grid"], launch["block"], launch["attributes"]) == ([8, 1, 1], [128, 1, 1], {"cluster": [2, 1, 1]})


def test_cluster_and_dependent_launch_together(kinds: Runtime) -> None:
    (launch,) = kinds.run(enter(), set_pdl(True), vectors("cluster", 1000, "float32")).launches
    assert launch["attributes"] == {"cluster": [2, 1, 1], "pdl": 1}


def test_tensor_maps_of_sizes_known_at_launch(kinds: Runtime) -> None:
    """Field by field, in the driver's numbers: element type, swizzle, promotion."""
    result = kinds.run(enter(), tensor_maps())
    fixed = {"call": "cuTensorMapEncodeTiled", "interleave": 0, "l2_promotion": 2, "oob_fill": 0}
    bfloat16, float32, swizzle_128_bytes = 9, 7, 3
    maps = {each["address"]: each for each in result.calls("cuTensorMapEncodeTiled")}
    assert maps[A] == fixed | {
        "dtype": bfloat16,
        "address": A,
        "global_dim": [136, 200, 3],
        "global_stride": [2 * 144, 2 * 144 * 203],
        "box_dim": [64, 64, 1],
        "element_stride": [1, 1, 1],
        "swizzle": swizzle_128_bytes,
    }
    assert maps[B] == fixed | {
        "dtype": bfloat16,
        "address": B,
        "global_dim": [136, 132],
        "global_stride": [2 * 136],
        "box_dim": [64, 64],
        "element_stride": [1, 1],
        "swizzle": swizzle_128_bytes,
    }
    assert maps[OUT] == fixed | {
        "dtype": float32,
        "address": OUT,
        "global_dim": [132, 200, 3],
        "global_stride": [4 * 132, 4 * 132 * 200],
        "box_dim": maps[OUT]["box_dim"],
        "element_stride": [1, 1, 1],
        "swizzle": maps[OUT]["swizzle"],
    }
    (launch,) = result.launches
    assert (launch["grid"], launch["attributes"]) == ([3, 4, 3], {})


def test_tensor_maps_follow_each_call(kinds: Runtime) -> None:
    result = kinds.run(enter(), tensor_maps(m=200), tensor_maps(m=77, k=520))
    dims = [each["global_dim"] for each in result.calls("cuTensorMapEncodeTiled") if each["address"] == A]
    assert dims == [[136, 200, 3], [520, 77, 3]]


def test_tensor_map_that_the_driver_would_refuse_is_refused_before(kinds: Runtime) -> None:
    result = kinds.run(enter(), tensor_maps(k=133))
    assert result.last[0] == "TK_INVALID_ARGUMENT"
    assert result.last[1] == "kinds.tensor_maps: (a_stride * 2) % 16 == 0 is required, got a_stride = 141"
    assert result.records[-1]["call"] != "cuTensorMapEncodeTiled"


@pytest.mark.parametrize("kernel", ["dependent", "own_wait"])
def test_dependent(kinds: Runtime, kernel: str) -> None:
    result = kinds.run(enter(), vectors(kernel, 300), set_pdl(True), vectors(kernel, 300))
    assert [launch["attributes"] for launch in result.launches] == [{}, {"pdl": 1}]
    assert len({launch["name"] for launch in result.launches}) == 1


def test_shared_memory_up_to_all_of_a_block(kinds: Runtime) -> None:
    def reverse(num_columns: int) -> Step:
        x = tensor("float32", 7, num_columns, data=A)
        return call("kinds.much_shared_memory", x, tensor("float32", 7, num_columns, data=OUT))

    static = 1024  # what the fake driver says of every kernel
    result = kinds.run(enter(), reverse(1000), reverse(SMEM_OF_BLOCK // 4), reverse(SMEM_OF_BLOCK // 4 + 1))
    assert [launch["smem"] for launch in result.launches] == [4000, SMEM_OF_BLOCK]
    assert result.statuses[-1] == "TK_INVALID_ARGUMENT"
    (attribute,) = result.calls("cuKernelSetAttribute")
    assert attribute["value"] == SMEM_OF_BLOCK - static


def test_several_kernels_over_workspaces(kinds: Runtime) -> None:
    x, out = tensor("int32", 1000, 333, data=A), tensor("int32", 333, data=OUT)
    workspaces = tensor("int32", 16, 333, data=WORKSPACE), tensor("int32", 333, data=B)
    result = kinds.run(enter(), set_pdl(True), call("kinds.three_kernels", x, *workspaces, out))
    assert [launch["name"] for launch in result.launches] == [f"tk_kinds_three_kernels__only_{i}" for i in range(3)]
    assert [launch["grid"] for launch in result.launches] == [[16, 3, 1], [3, 1, 1], [3, 1, 1]]
    assert [launch["attributes"] for launch in result.launches] == [{"pdl": 1}] * 3


def test_table_of_addresses_is_written_by_the_first_of_two_kernels(kinds: Runtime) -> None:
    table, out = tensor("int64", 4, data=WORKSPACE), tensor("float32", 300, data=OUT)
    result = kinds.run(enter(), call("kinds.pointer_table", table, out, scalars=[1, 2, 3, 4]))
    assert [launch["grid"] for launch in result.launches] == [[1, 1, 1], [3, 1, 1]]
    copies = [record["call"] for record in result.records if "Memcpy" in record["call"]]
    assert copies == []

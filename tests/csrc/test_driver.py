"""The driver and the machine: opened on first use, once, by any thread; every way in which it is missing says so."""

from __future__ import annotations

import pytest

from tests.csrc.steps import Runtime, Step, cast, check, enter, sync, tensor, topk, transpose

TRANSPOSE_SYMBOLS = ["tk_demo_transpose__b2_aligned", "tk_demo_transpose__b2_general", "tk_demo_transpose__b4_general"]


def preload(*names: str, device: int = 0) -> Step:
    return {"do": "preload", "names": list(names) or None, "device": device}


# ---- first use -----------------------------------------------------------------------------------------------------


def test_nothing_is_opened_for_a_check(runtime: Runtime) -> None:
    assert runtime.run(check("demo.transpose", tensor("float16", 4, 8), None)).records == []


def test_32_threads_load_once(runtime: Runtime) -> None:
    result = runtime.run({"do": "threads", "count": 32, "steps": [enter(), transpose(100, 200)]})
    assert [[answer["status"] for answer in answers] for answers in result.answers[0]] == [["TK_OK", "TK_OK"]] * 32
    assert len(result.launches) == 32
    assert len(result.calls("cuInit")) == len(result.calls("cuDevicePrimaryCtxRetain")) == 1
    for once in ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute"):
        assert len(result.calls(once)) == 1, once


def test_kernels_of_a_unit_share_its_library(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200), transpose(100, 200, stride=203), sync(8))
    assert len(result.calls("cuLibraryLoadData")) == 1
    found = [call["name"] for call in result.calls("cuLibraryGetKernel")]
    assert found == [*TRANSPOSE_SYMBOLS[:2], "tk_demo_sync__n16"]


def test_image_is_loaded_without_compiling_and_without_a_copy(runtime: Runtime) -> None:
    (load,) = runtime.run(enter(), sync(8)).calls("cuLibraryLoadData")
    assert (load["num_jit_options"], load["options"]) == (0, [1])  # CU_LIBRARY_BINARY_IS_PRESERVED


def test_kernels_may_use_all_shared_memory_of_the_device(runtime: Runtime) -> None:
    (attribute,) = runtime.run(enter(), sync(8)).calls("cuKernelSetAttribute")
    assert (attribute["attribute"], attribute["value"]) == (8, 232448 - 1024)  # the maximum without the static part


def test_failed_load_is_tried_again(runtime: Runtime) -> None:
    result = runtime.run(enter(), transpose(100, 200), transpose(100, 200), fail="cuLibraryLoadData:2:1")
    assert result.statuses == ["TK_OK", "TK_OUT_OF_MEMORY", "TK_OK"]
    before, _, after = result.answers[1]["message"].partition(" bytes) on cuda:0: ")
    assert before.startswith("demo.transpose: loading b2_aligned (demo-sm_90a-0, ")
    assert after == "cuLibraryLoadData failed with 2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"


# ---- devices and contexts ------------------------------------------------------------------------------------------


def test_two_devices_in_a_process(runtime: Runtime) -> None:
    steps = [enter(0), transpose(100, 200), enter(1), transpose(100, 200, device=[2, 1])]
    out = steps[3]["tensors"][1]
    out["device"] = [2, 1]
    result = runtime.run(*steps, enter(0), transpose(100, 200), devices="9.0,9.0")
    assert result.statuses == ["TK_OK"] * 6
    assert [launch["device"] for launch in result.launches] == [0, 1, 0]
    assert [call["device"] for call in result.calls("cuKernelSetAttribute")] == [0, 1]
    assert len(result.calls("cuLibraryLoadData")) == 1


def test_devices_of_different_archs_in_a_process(runtime: Runtime) -> None:
    other = transpose(100, 200, device=[2, 1])
    other["tensors"][1]["device"] = [2, 1]
    result = runtime.run(enter(0), transpose(100, 200), enter(1), other, devices="9.0,8.9")
    assert result.statuses == ["TK_OK"] * 4
    assert [launch["name"] for launch in result.launches] == TRANSPOSE_SYMBOLS[:2]
    assert len(result.calls("cuLibraryLoadData")) == 2


def test_two_contexts_of_a_device(runtime: Runtime) -> None:
    own = {"do": "create_context", "name": "own", "device": 0}
    result = runtime.run(enter(), transpose(100, 200), own, transpose(100, 200))
    assert [launch["primary"] for launch in result.launches] == [True, False]
    assert len(result.calls("cuLibraryLoadData")) == 1


def test_no_current_context(runtime: Runtime) -> None:
    assert runtime.run(transpose(100, 200)).last == (
        "TK_NO_CONTEXT",
        "no CUDA context is current in this thread; make one current (cuCtxSetCurrent, cudaSetDevice) or call "
        "tk_enter_device first",
    )


def test_device_that_is_not_there(runtime: Runtime) -> None:
    assert runtime.run(enter(2), devices="9.0,9.0").last == (
        "TK_NO_DEVICE",
        "there is no device cuda:2: the NVIDIA driver sees 2 of them",
    )


# ---- preload -------------------------------------------------------------------------------------------------------


def test_preload_leaves_nothing_to_load(runtime: Runtime) -> None:
    preloaded = runtime.run(preload()).records
    result = runtime.run(preload(), enter(), transpose(100, 200), topk(), sync(8))
    assert result.statuses == ["TK_OK"] * 5
    later = [record["call"] for record in result.records[len(preloaded) :]]
    # The function is asked for once a thread and kernel: it was loaded.
    assert set(later) == {
        "cuTensorMapEncodeTiled",
        "cuLaunchKernelEx",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        "cuKernelGetFunction",
    }


def test_preload_loads_into_the_context(runtime: Runtime) -> None:
    result = runtime.run(preload("demo.transpose"))
    assert [call["name"] for call in result.calls("cuKernelGetFunction")] == TRANSPOSE_SYMBOLS


def test_preload_into_the_current_context(runtime: Runtime) -> None:
    own = {"do": "create_context", "name": "own", "device": 1}
    result = runtime.run(own, preload("demo.sync", device=-1), devices="9.0,9.0")
    assert {call["device"] for call in result.calls("cuKernelGetFunction")} == {1}
    assert result.calls("cuDevicePrimaryCtxRetain") == []


def test_preload_of_all_passes_over_what_does_not_fit(runtime: Runtime) -> None:
    result = runtime.run(preload(), devices="8.0")
    assert result.last == ("TK_OK", "")
    assert len(result.calls("cuLibraryGetKernel")) == 3


def test_preload_of_a_kernel_that_does_not_fit(runtime: Runtime) -> None:
    result = runtime.run(preload("demo.sync"), devices="8.0")
    assert result.last[0] == "TK_NO_KERNEL_FOR_DEVICE"


def test_preload_of_an_unknown_kernel(runtime: Runtime) -> None:
    assert runtime.run(preload("demo.nothing")).last[0] == "TK_NOT_BUILT"


# ---- the wrong GPU -------------------------------------------------------------------------------------------------


def test_kernel_is_not_there_for_this_gpu(runtime: Runtime) -> None:
    assert runtime.run(enter(), sync(8), devices="8.9").last == (
        "TK_NO_KERNEL_FOR_DEVICE",
        "demo.sync: built for sm_90a, which does not run on cuda:0 (Fake GPU 0, compute capability 8.9); that GPU "
        "needs sm_89: install tilekernels==0.1.0+cu130.sm89 (NVIDIA driver >= 580) or build it by "
        "`make wheel ARCHS=sm_89`",
    )


def test_library_holds_nothing_for_this_gpu(runtime: Runtime) -> None:
    assert runtime.run(preload(), devices="10.0").last == (
        "TK_NO_KERNEL_FOR_DEVICE",
        "this library holds kernels for sm_80 and sm_90a, none of which runs on cuda:0 (Fake GPU 0, compute capability "
        "10.0); that GPU needs sm_100a: install tilekernels==0.1.0+cu130.sm100a (NVIDIA driver >= 580) or build it by "
        "`make wheel ARCHS=sm_100a`",
    )


def test_gpu_that_the_project_does_not_know(runtime: Runtime) -> None:
    message = runtime.run(enter(), cast(4, 8), devices="7.5").last[1]
    assert message.endswith("compute capability 7.5); tilekernels supports compute capabilities 8.0 to 12.1")


def test_describe_device(runtime: Runtime) -> None:
    steps = [{"do": "describe_device", "device": device} for device in range(3)]
    result = runtime.run(*steps, devices="9.0,8.6,10.3")
    assert [(answer["capability"], answer["arch"], answer["wanted_arch"]) for answer in result.answers] == [
        ([9, 0], "sm_90a", "sm_90a"),
        ([8, 6], "sm_80", "sm_80"),
        ([10, 3], "", "sm_103a"),
    ]
    assert result.answers[0]["name"] == "Fake GPU 0"


def test_caller_of_an_older_header_gets_the_fields_it_knows(runtime: Runtime) -> None:
    size_and_name = 8 + 128
    (answer,) = runtime.run({"do": "describe_device", "device": 0, "size": size_and_name}).answers
    assert (answer["name"], answer["capability"], answer["size"]) == ("Fake GPU 0", [0, 0], size_and_name)


# ---- no driver, old driver, no GPU ---------------------------------------------------------------------------------


def test_driver_is_missing(runtime: Runtime) -> None:
    status, message = runtime.run(enter(), driver=False).last
    assert status == "TK_NO_DRIVER"
    assert message.startswith("the NVIDIA driver is not usable: libcuda.so.1: ")
    assert message.endswith("; install a driver >= 580")


def test_driver_is_too_old(runtime: Runtime) -> None:
    result = runtime.run({"do": "driver_version"}, enter(), version=12080)
    assert result.answers[0]["version"] == 12080
    assert result.calls("cuInit") == []
    assert result.last == (
        "TK_DRIVER_TOO_OLD",
        "the NVIDIA driver is too old: kernels of this library need CUDA 13.0 (driver >= 580), the driver has "
        "CUDA 12.8",
    )


def test_newer_driver_is_fine(runtime: Runtime) -> None:
    assert runtime.run(enter(), sync(8), version=14020).last == ("TK_OK", "")


def test_no_gpu(runtime: Runtime) -> None:
    assert runtime.run(enter(), fail="cuInit:100").last == (
        "TK_NO_DEVICE",
        "the NVIDIA driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    )


def test_driver_that_fails_at_first_is_tried_again(runtime: Runtime) -> None:
    result = runtime.run(enter(), enter(), fail="cuInit:999:1")
    assert result.statuses == ["TK_DRIVER_ERROR", "TK_OK"]


# ---- fork ----------------------------------------------------------------------------------------------------------

FORKED = (
    "the CUDA driver cannot be used in a process forked after it was initialised; start worker processes with the "
    "'spawn' method"
)


def test_forked_child_gets_an_error_not_a_hang(runtime: Runtime) -> None:
    harmless = check("demo.transpose", tensor("float16", 4, 8), None)
    child = [transpose(100, 200), enter(), {"do": "num_devices"}, harmless]
    result = runtime.run(enter(), transpose(100, 200), {"do": "fork", "steps": child}, transpose(100, 200))
    answers = result.answers[2]
    assert [answer["status"] for answer in answers] == ["TK_FORKED"] * 3 + ["TK_OK"]
    assert answers[0]["message"] == FORKED
    assert result.answers[3]["status"] == "TK_OK"


def test_fork_before_first_use_is_fine(runtime: Runtime) -> None:
    result = runtime.run({"do": "fork", "steps": [enter(), transpose(100, 200)]}, enter(), transpose(100, 200))
    assert [answer["status"] for answer in result.answers[0]] == ["TK_OK", "TK_OK"]
    assert result.last == ("TK_OK", "")


def test_child_of_a_process_whose_driver_somebody_else_initialised(runtime: Runtime) -> None:
    assert runtime.run(enter(), fail="cuInit:3").last == ("TK_FORKED", FORKED)


# ---- what the library holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "labels", "arch", "expected"),
    [
        ("demo.cast", None, None, 1),
        ("demo.cast", [0, 1], "sm_80", 1),
        ("demo.cast", [-1, 1], None, 1),
        ("demo.cast", [1, -1], None, 0),
        ("demo.cast", None, "sm_90a", 0),
        ("demo.transpose", [2], "sm_90a", 1),
        ("demo.transpose", [2], "sm_80", 0),
    ],
)
def test_covers(runtime: Runtime, kernel: str, labels: list[int] | None, arch: str | None, expected: int) -> None:
    step = {"do": "covers", "kernel": kernel, "labels": labels, "arch": arch}
    assert runtime.run(step, driver=False).answers == [expected]

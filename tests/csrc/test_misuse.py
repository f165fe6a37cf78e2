"""What misuse.cpp hands over by mistake: each is answered by a status and a sentence, none crashes or is undefined."""

from __future__ import annotations

from pathlib import Path

from tests.csrc.test_robustness import compile_program, run_program

_STRUCT = "demo.topk: the arguments must be a struct whose size field is sizeof that struct, 48 here, got"

OK = ["enter", "valid", "args of 56", "args of a newer header", "valid"]
REFUSED = {
    "find, no name": "tk_find: name must be a text, got null",
    "find, no place": "tk_find: kernel must be where to put the handle, got null",
    "launch, no tensors": "tk_launch: tensors must be an array of pointers to tensors, got null",
    "launch, no scalars": "tk_launch: scalars must be an array of scalars, got null",
    "launch, no axes": "tk_launch: axes must be an array of axis values, got null",
    "launch, null tensors": "demo.topk: scores must be a tensor, got None",
    "check, no tensors": "tk_check: tensors must be an array of pointers to tensors, got null",
    "workspace, no kernel": "tk_workspace_size: kernel must be a handle from tk_find, got null",
    "workspace, no tensors": "tk_workspace_size: tensors must be an array of pointers to tensors, got null",
    "preload, null name": "tk_preload: each of names must be a text, got null",
    "preload, negative": "tk_preload: num_names must be at least 0, got -1",
    "load pack": "tk_load_pack: path must be a text, got null",
    "enter without a place": "tk_enter_device: previous must be where to put the context to restore, got null",
    "driver version": "tk_driver_version: version must be where to put the number, got null",
    "devices": "tk_num_devices: count must be where to put the number, got null",
    "describe device": "tk_describe_device: the info struct must have its size field set, got null or a size of 0",
    "describe kernel": "tk_describe_kernel: kernel must be a handle from tk_find, got null",
    "describe param": "tk_describe_param: kernel must be a handle from tk_find, got null",
    "describe axis": "tk_describe_axis: kernel must be a handle from tk_find, got null",
    "describe variant": "tk_describe_variant: kernel must be a handle from tk_find, got null",
    "info without a size": "tk_describe_kernel: the info struct must have its size field set, got null or a size of 0",
    "index": "tk_describe_param: index must be from 0 to 3 for demo.topk, got -1",
    "args, null": f"{_STRUCT} null",
    "args of 0": f"{_STRUCT} 0",
    "args of 4": f"{_STRUCT} 4",
    "args of 8": "demo.topk: scores must be a tensor, got None",
    "args of 44": f"{_STRUCT} 44",
    "args of 60": f"{_STRUCT} 60",
    "args of 18446744073709551615": f"{_STRUCT} 18446744073709551615",
    "args of a newer header, a new field set": (
        f"{_STRUCT} 80: a field is set that this library does not know, it is older than the header"
    ),
    "no shape": "demo.topk: scores must have a shape of 2 dimensions, got a null pointer",
    "no shape, launched": "demo.topk: scores must have a shape of 2 dimensions, got a null pointer",
    "dimensions -1": "demo.topk: scores must have 2 dimensions, got -1",
    "dimensions 9": "demo.topk: scores must have 2 dimensions, got 9",
    "dimensions 1000000": "demo.topk: scores must have 2 dimensions, got 1000000",
    **{
        f"{what} {value}": f"demo.transpose: x must have a {what} {limit} in dimension 0, got {value}"
        for value, limit in [
            (-1, "of at least 0"),
            (2**31, "below 2147483648"),
            (-(2**63), "of at least 0"),
        ]
        for what in ("size", "stride")
    },
    "all sizes huge": f"demo.transpose: x must have at most {2**48 - 1} elements, got shape ({2**63 - 1}, {2**63 - 1})",
    "each size possible, all of them not": (
        f"demo.transpose: x must have at most {2**48 - 1} elements, got shape ({2**31 - 1}, {2**31 - 1})"
    ),
    "enumerator": "demo.topk: scoring must be softmax or sigmoid, got number 77",
    "flag": "demo.topk: with_bias must be no_bias or with_bias, got 2",
    "dtype": "demo.topk: scores must be float32, got a dtype of code 255, 255 bits, 65535 lanes",
    "device type": "demo.topk: tensors must be on a CUDA device, got a device of type 99",
    "device number": "demo.topk: tensors must be on cuda:0, the device of the current context, got cuda:-5",
    "address between elements": (
        "demo.transpose: x must start at a multiple of 2 bytes, as bfloat16 does, got address 0x10001"
    ),
    "byte offset between elements": (
        "demo.transpose: x must start at a multiple of 2 bytes, as bfloat16 does, got address 0x10003"
    ),
}
TYPES = {"launch, null tensors", "args of 8", "dtype"}  # TK_INVALID_TYPE
ANSWERS = ["answers: 1 0 1 1", "pdl mode: 0", "status: TK_UNKNOWN_STATUS"]


def test_every_mistake_is_answered(installed: Path, driver_folder: Path, tmp_path: Path) -> None:
    library = installed / "lib" / "libtilekernels.so.0"
    program = compile_program("misuse.cpp", installed, tmp_path, library, f"-Wl,-rpath,{library.parent}")
    code, lines, _ = run_program([program], driver_folder, tmp_path / "log")
    assert code == 0
    answered = [line.split(": ", 2) for line in lines if line not in ANSWERS]
    assert [line for line in lines if line in ANSWERS] == ANSWERS
    assert [what for what, status, _ in answered if status == "TK_OK"] == OK
    refused = [(what, status, sentence) for what, status, sentence in answered if status != "TK_OK"]
    assert refused == [
        (what, "TK_INVALID_TYPE" if what in TYPES else "TK_INVALID_ARGUMENT", sentence)
        for what, sentence in REFUSED.items()
    ]

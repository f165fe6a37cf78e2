"""What a thread remembers of its calls: a repeated call launches the same, and nothing that differs is taken for it."""

from __future__ import annotations

import pytest

from tests.csrc.steps import Runtime, Step, cast, enter, set_pdl, set_thread_pdl, sync, tensor, topk, transpose

# Pairs of calls that differ in one thing alone, which decides what is launched or whether anything is.
CALLS = {
    "plain": transpose(100, 200),
    "rows": transpose(101, 200),
    "stride": transpose(100, 200, stride=203),
    "aligned stride": transpose(100, 200, stride=208),
    "address": transpose(100, 200, data=0x10008),
    "other aligned address": transpose(100, 200, data=0x30000),
    "byte offset": transpose(100, 200, byte_offset=2),
    "stream": transpose(100, 200) | {"stream": 77},
    "two launches": topk(),
    "cooperative": sync(8),
    "more blocks": sync(16),
    "more tokens": topk(tensor("float32", 7, 64), tensor("int64", 7, 4)),
}
# The same of a kernel for another GPU, whose launches are kept ready: addresses alone are filled in anew.
READY_CALLS = {
    "absent tensor": cast(5, 8),
    "given tensor": cast(5, 8, scale=tensor("float32", 5, data=0x5000)),
    "given elsewhere": cast(5, 8, scale=tensor("float32", 5, data=0x7000)),
    "other output": cast(5, 8, out="float8_e5m2"),
    "empty": cast(0, 8),
}
READY_ON = "8.0"


def launches(runtime: Runtime, *steps: Step, devices: str = "9.0") -> list[dict]:
    result = runtime.run(enter(), *steps, devices=devices)
    assert set(result.statuses) == {"TK_OK"}
    return result.launches


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_launches_the_same(runtime: Runtime, name: str) -> None:
    once = launches(runtime, CALLS[name])
    assert once
    assert launches(runtime, *[CALLS[name]] * 3) == once * 3


@pytest.mark.parametrize("name", READY_CALLS)
def test_a_ready_call_launches_the_same(runtime: Runtime, name: str) -> None:
    once = launches(runtime, READY_CALLS[name], devices=READY_ON)
    assert bool(once) == (name != "empty")
    assert launches(runtime, *[READY_CALLS[name]] * 3, devices=READY_ON) == once * 3


def test_ready_calls_that_take_turns_are_kept_apart(runtime: Runtime) -> None:
    steps = list(READY_CALLS.values())
    alone = [launch for step in steps for launch in launches(runtime, step, devices=READY_ON)]
    assert launches(runtime, *steps, *steps, devices=READY_ON) == alone * 2
    assert len({str(launch) for launch in alone}) == len(alone)


def test_calls_that_take_turns_are_kept_apart(runtime: Runtime) -> None:
    alone = [launch for step in CALLS.values() for launch in launches(runtime, step)]
    assert launches(runtime, *CALLS.values(), *CALLS.values()) == alone * 2
    # A stride that is as aligned shows in the tensor map alone.
    assert len({str(launch) for launch in alone}) == len(alone) - 1


def test_a_repeated_call_asks_for_dependent_launches_as_it_is_told_now(runtime: Runtime) -> None:
    call = cast(5, 8, out="float8_e5m2")
    steps = [call, set_pdl(True), call, set_thread_pdl("off"), call, set_thread_pdl("default"), call]
    dependent = [launch["attributes"] for launch in runtime.run(enter(), *steps, devices=READY_ON).launches]
    assert dependent == [{}, {"pdl": 1}, {}, {"pdl": 1}]


def test_a_repeated_call_tells_what_the_driver_refused(runtime: Runtime) -> None:
    call = cast(5, 8)
    fail = {"do": "fail", "call": "cuLaunchKernelEx", "code": 700}
    result = runtime.run(enter(), call, fail, call, devices=READY_ON)
    assert result.last[0] == "TK_DRIVER_ERROR"
    assert "demo.cast: launching tk_demo_cast__bf16_e4m3 on cuda:0: cuLaunchKernelEx failed with 700" in result.last[1]


def test_a_refused_call_is_refused_again(runtime: Runtime) -> None:
    bad = transpose(100, 200)
    bad["tensors"][1]["shape"] = [200, 101]
    result = runtime.run(enter(), transpose(100, 200), bad, bad, transpose(100, 200))
    assert result.statuses == ["TK_OK", "TK_OK", "TK_INVALID_ARGUMENT", "TK_INVALID_ARGUMENT", "TK_OK"]
    assert len(result.launches) == 2


def test_the_driver_is_asked_for_a_function_once(runtime: Runtime) -> None:
    result = runtime.run(enter(), *[transpose(100, 200)] * 5)
    assert len(result.calls("cuKernelGetFunction")) == 1


def test_each_context_has_functions_of_its_own(runtime: Runtime) -> None:
    own = {"do": "create_context", "name": "own", "device": 0}
    result = runtime.run(enter(), transpose(100, 200), transpose(100, 200), own, *[transpose(100, 200)] * 2)
    assert len(result.calls("cuKernelGetFunction")) == 2
    assert [launch["primary"] for launch in result.launches] == [True, True, False, False]


def test_a_destroyed_context_is_noticed(runtime: Runtime) -> None:
    own = {"do": "create_context", "name": "own", "device": 0}
    steps = [own, transpose(100, 200), {"do": "destroy_context", "name": "own"}, {"do": "set_context", "name": "own"}]
    result = runtime.run(*steps, transpose(100, 200))
    assert result.last[0] == "TK_CONTEXT_DESTROYED"

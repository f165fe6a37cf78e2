"""`tilekernels bench` without a GPU: what it chooses, how it counts, what it compares with, and what it says."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from tests import benchmarking
from tilekernels.bench import host, limits, measure, plot
from tilekernels.bench.baseline import Baseline, add_baseline, find_changes, is_slower, read_baseline
from tilekernels.bench.cases import Call, Choice, choose_calls, find_calls
from tilekernels.bench.jit_names import translate_benchmark, translate_call
from tilekernels.bench.limits import Curve, Limits
from tilekernels.bench.record import Record, newest_rows, read_lines, row_key
from tilekernels.cli import bench as command
from tilekernels.cli import main
from tilekernels.errors import ArgumentError
from tilekernels.testing import BenchCase
from tilekernels.testing import bench as timing
from tilekernels.testing.bench import Timing

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "h200" / "kernels.jsonl"

LIMITS = Limits(Curve([1000, 2000, 4000], [2.0, 3.0, 5.0]), Curve([1000, 2000, 4000], [1.0, 2.0, 4.0]))


def make_call(operator: str, num_bytes: int, **params: Any) -> Call:
    def make(device: Any) -> dict[str, Any]:
        return {"x": torch.zeros(num_bytes // 2, dtype=torch.uint8)}

    return Call(BenchCase(operator, params, make, num_bytes), torch.clone, torch.clone)


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, ["bench", *arguments])


# ---- choosing --------------------------------------------------------------------------------------------------------

CALLS = [
    make_call("quant.cast", 10, shape=[8, 64], dtype="float8_e4m3fn"),
    make_call("quant.cast", 30, shape=[16, 128], dtype="float32"),
    make_call("moe.gate", 20, num_tokens=8, hidden=64),
]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), [10, 30, 20]),
        (Choice(operators=("quant.*",)), [10, 30]),
        (Choice(operators=("moe.gate", "quant.cast")), [10, 30, 20]),
        (Choice(tokens=(8,)), [10, 20]),
        (Choice(hidden=(128,)), [30]),
        (Choice(dtypes=("e4m3",)), [10]),
        (Choice(dtypes=("fp32", "float8_e4m3fn")), [10, 30]),
        (Choice(largest_only=True), [30, 20]),
        (Choice(tokens=(8,), largest_only=True), [10, 20]),
    ],
    ids=["all", "pattern", "names", "tokens", "hidden", "dtype", "dtypes", "largest", "largest of some"],
)
def test_calls_are_chosen(choice: Choice, expected: list[int]) -> None:
    assert [call.case.bytes for call in choose_calls(CALLS, choice)] == expected


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (
            Choice(operators=("moe.nix",)),
            r"^bench: no operator is called 'moe\.nix'; there are moe\.gate, quant\.cast$",
        ),
        (Choice(hidden=(5,)), r"^bench: no call has hidden 5; there are 128, 64$"),
        (Choice(operators=("moe.*",), dtypes=("e4m3",)), r"^bench: no call has dtype float8_e4m3fn; there are none$"),
    ],
    ids=["operator", "hidden", "dtype"],
)
def test_what_nobody_has_is_refused_with_what_there_is(choice: Choice, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        choose_calls(CALLS, choice)


def test_every_operator_is_found_with_its_reference() -> None:
    calls = find_calls()
    assert {"quant", "moe", "mhc", "engram", "gemm"} <= {call.case.operator.partition(".")[0] for call in calls}
    assert [call.case.id for call in calls if not (callable(call.operator) and callable(call.reference))] == []


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "us"), [(1, 2.0), (1000, 2.0), (1500, 2.5), (3000, 4.0), (4000, 5.0), (8000, 10.0)]
)
def test_curve_is_linear_between_sizes_and_in_proportion_beyond(num_bytes: int, us: float) -> None:
    assert math.isclose(LIMITS.copy.at(num_bytes), us)


def test_copy_and_fill_has_one_launch() -> None:
    # A copy of 1000 bytes, then a fill of 2000 more, less the time that a fill of next to nothing takes
    assert math.isclose(LIMITS.copy_and_fill_us(1000, 3000), 3.0 + 2.0 - 1.0)


@pytest.mark.parametrize(
    ("operator", "num_bytes", "written", "kind"),
    [("moe.x", 100, 50, "copy"), ("moe.x", 100, 51, "plain kernel"), ("gemm.matmul", 100, 99, "torch.matmul")],
)
def test_kind_of_limit(operator: str, num_bytes: int, written: int, kind: str) -> None:
    assert measure.find_limit_kind(operator, num_bytes, written) == kind


def test_written_bytes_are_new_results_and_arguments_that_the_kernel_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {
        "params": [
            {"name": "x"},
            {"name": "o", "written": True},
            *({"name": f"r_{i}", "written": True} for i in (0, 1)),
        ]
    }
    monkeypatch.setattr(measure, "load_manifest", lambda: None)
    monkeypatch.setattr(measure, "find_kernel", lambda manifest, name: kernel)
    x, o = torch.zeros(100), torch.zeros(3)
    kwargs = {"x": x, "o": o, "r_list": [torch.zeros(5), torch.zeros(7)], "n": 4}
    assert measure.count_written("moe.x", kwargs, None) == 4 * (3 + 5 + 7)
    new = torch.zeros(10, dtype=torch.int8)
    assert measure.count_written("moe.x", kwargs, (x, o, new, new, None)) == 4 * (3 + 5 + 7) + 10


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take 4 us, or 8 where they are plain kernels; they run once on the CPU."""

    def time_kernels(fns: list[Any], total_us: float = 0, warmup_us: float = 0) -> list[Timing]:
        for fn in fns:
            fn()
        return [Timing(4.0 * (at + 1), 4.0, 0.01, 10, 1) for at in range(len(fns))]

    monkeypatch.setattr(measure, "time_kernels", time_kernels)
    monkeypatch.setattr(measure, "event_time_us", lambda fn: 5.0)
    monkeypatch.setattr(measure, "graph_time_us", lambda fn: 4.5)
    monkeypatch.setattr(measure, "make_plain_call", lambda num_read, num_written: lambda: None)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_row_says_how_far_a_call_is_from_a_copy() -> None:
    call = make_call("moe.clone", 2000, num_tokens=8)
    (row,) = measure.measure([dataclasses.replace(call, operator=lambda x: x.clone())], LIMITS, measure.Options())
    assert row["operator"] == "moe.clone"
    assert row["params"] == {"num_tokens": 8}
    assert (row["us"], row["bytes"], row["written"], row["gbs"]) == (4.0, 2000, 1000, 0.5)
    assert (row["limit"], row["limit_us"], row["of_limit"]) == ("copy", 3.0, 0.75)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_call_that_mostly_writes_is_measured_against_a_plain_kernel() -> None:
    call = dataclasses.replace(make_call("moe.repeat", 2000), operator=lambda x: x.repeat(2))
    (row,) = measure.measure([call], LIMITS, measure.Options())
    assert (row["limit"], row["limit_us"], row["of_limit"], row["of_copy"]) == ("plain kernel", 8.0, 2.0, 0.75)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_without_a_compiler_a_copy_and_a_fill_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "make_plain_call", lambda num_read, num_written: None)
    call = dataclasses.replace(make_call("moe.repeat", 4000), operator=lambda x: x.repeat(2)[: x.numel() * 3 // 2])
    (row,) = measure.measure([call], LIMITS, measure.Options())
    assert row["limit"] == "copy and fill"
    assert math.isclose(row["limit_us"], LIMITS.copy_and_fill_us(1000, 3000))


@pytest.mark.usefixtures("_no_gpu_needed")
def test_other_clocks_peers_and_second_timings_are_columns(tmp_path: Path) -> None:
    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    peers = "{'triton': kwargs['x'].clone, 'torch.nix': lambda: 1 / 0}"
    (tmp_path / "test_bench.py").write_text(f"def make_peers(operator, kwargs):\n    return {peers}\n")
    call = Call(make_call("moe.clone", 2000).case, clone, clone)
    options = measure.Options(("torch", "triton"), tmp_path, cross_check=True, twice=True)
    (row,) = measure.measure([call], LIMITS, options)
    assert (row["event_us"], row["graph_us"], row["again_us"]) == (5.0, 4.5, 4.0)
    assert row["peers"] == {"torch": 4.0, "triton": 4.0, "torch.nix": "ZeroDivisionError: division by zero"}


@pytest.mark.usefixtures("_no_gpu_needed")
def test_peers_that_cannot_be_made_leave_the_time(tmp_path: Path) -> None:
    (tmp_path / "functional.py").write_text(
        "def make_peers(operator, kwargs):\n    raise RuntimeError('no tile fits')\n"
    )
    call = Call(make_call("moe.relu", 2000).case, torch.nn.functional.relu, torch.relu)
    case = dataclasses.replace(call.case, make=lambda device: {"input": torch.zeros(1000, dtype=torch.uint8)})
    options = measure.Options(("triton",), tmp_path)
    (row,) = measure.measure([dataclasses.replace(call, case=case)], LIMITS, options)
    assert row["us"] == 4.0
    assert row["peers"] == {"triton": "RuntimeError: no tile fits"}


@pytest.mark.usefixtures("_no_gpu_needed")
def test_one_call_that_fails_leaves_the_others() -> None:
    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("no kernel here\nsecond line")

    calls = [dataclasses.replace(make_call("moe.a", 2000), operator=fail), make_call("moe.b", 2000)]
    calls[1] = dataclasses.replace(calls[1], operator=lambda x: x.clone())
    first, second = measure.measure(calls, LIMITS, measure.Options())
    assert first == {
        "stage": "kernels",
        "operator": "moe.a",
        "params": {},
        "failure": "RuntimeError: no kernel here",
    }
    assert second["us"] == 4.0


@pytest.mark.usefixtures("_no_gpu_needed")
def test_no_call_is_begun_after_the_time_limit() -> None:
    calls = [make_call("moe.a", 2000)] * 3
    assert list(measure.measure(calls, LIMITS, measure.Options(time_limit=-1.0))) == []


# ---- the timer's records ---------------------------------------------------------------------------------------------


def test_calls_are_told_apart_by_markers_and_flushes() -> None:
    names = ["x", "hypot", "flush", "a", "b", "flush", "a", "b", "hypot", "flush", "c"]
    events = [timing._Event(name, at, 100.0 if name == "flush" else at) for at, name in enumerate(names)]
    first, second = timing._split_at_markers(events)
    summary = timing._summarize(first, 2)
    assert (summary.us, summary.num_kernels, summary.repeats) == ((3 + 4 + 6 + 7) / 2, 2, 2)
    assert timing._summarize(second, 1).us == 10


def test_calls_of_different_lengths_are_refused() -> None:
    events = [timing._Event("k", at, 1.0) for at in range(5)]
    with pytest.raises(RuntimeError, match=r"5 device activities in 2 calls"):
        timing._summarize(events, 2)


@pytest.mark.parametrize(("us", "repeats"), [(0.0, 50), (10.0, 50), (100.0, 40), (1000.0, 10), (1e6, 10)])
def test_long_calls_are_repeated_less(us: float, repeats: int) -> None:
    assert timing._choose_repeats(us, timing._TOTAL_US) == repeats


# ---- records and baselines -------------------------------------------------------------------------------------------


def test_the_newest_row_of_a_call_counts_whatever_the_order_of_its_parameters(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    record = Record(file)
    record.write(stage="machine", gpu="X")
    record.write(stage="kernels", operator="a.b", params={"m": 1, "n": 2}, us=1.23456789)
    record.write(stage="kernels", operator="a.b", params={"n": 2, "m": 1}, us=2.0)
    lines = read_lines(file)
    assert lines[1]["us"] == 1.2346
    assert [row["us"] for row in newest_rows(lines)] == [2.0]
    assert read_baseline([file]).gpu == "X"


JIT_PARAMS = {"fmt": "e4m3", "hidden": 7168, "in_dtype": "bf16", "num_per_channels": 128, "num_tokens": 8001}
JIT_FLAGS = {"round_sf": True, "use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True, "x_block_size": None}
OUR_PARAMS = {"num_tokens": 8001, "hidden": 7168, "in": "bf16", "fmt": "e4m3", "num_per_channels": 128}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"sf": "col_packed"}, 45.0),
        ({"sf": "col_packed", "num_tokens": 16002 // 2 * 9 // 10}, 45.0 * 7200 / 8001),
        ({"sf": "col_packed", "num_tokens": 4000}, None),
        ({"sf": "row_fp32"}, None),
        ({"sf": "col_packed", "stochastic": True}, None),
        ({"sf": "col_packed", "in": "float32"}, None),
        ({"sf": "col_packed", "x_block_size": [32, 32]}, None),
    ],
    ids=["same", "scaled by tokens", "half the tokens", "other scales", "more work", "other dtype", "blocks"],
)
def test_rows_of_the_original_are_matched(tmp_path: Path, params: dict[str, Any], expected: float | None) -> None:
    file = tmp_path / "jit.jsonl"
    file.write_text(json.dumps({"kernel": "per_token_cast", "params": {**JIT_PARAMS, **JIT_FLAGS}, "time_us": 45.0}))
    row = {"operator": "quant.per_token_cast", "params": {**OUR_PARAMS, **params}, "us": 50.0}
    found = read_baseline([file]).find(row)
    assert found == expected if expected is None else math.isclose(found, expected)


@pytest.mark.parametrize(
    ("kernel", "params", "operator", "words"),
    [
        (
            "cast_back",
            {"fmt": "e4m3", "num_per_channels": 1, "num_per_tokens": 128, "out_dtype": "bf16", "round_sf": True},
            "quant.cast_back",
            {"in": "e4m3", "fmt": "bf16", "x_block_size": (128, 1), "sf": "row"},
        ),
        (
            "batched_transpose",
            {"dtype": "fp32", "num_experts": 8},
            "transpose.batched_transpose",
            {"dtype": "bf16", "num_batches": 8},
        ),
        ("mask_indices_by_tp", {"num_experts": 32, "num_ep_ranks": 8}, "moe.mask_indices_by_tp", {"num_experts": 256}),
    ],
    ids=["cast_back", "mislabelled", "ranks"],
)
def test_names_of_the_original_are_turned(
    kernel: str, params: dict[str, Any], operator: str, words: dict[str, Any]
) -> None:
    assert translate_benchmark(kernel, params) == (operator, words)


def test_what_has_no_counterpart_is_passed_over() -> None:
    assert translate_benchmark("nix", {}) is None
    assert translate_call("nix", 1, 2) is None


@pytest.mark.parametrize("text", ["", "{}", "nonsense"], ids=["empty", "no times", "no JSON"])
def test_a_file_without_times_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=r"^bench: .*rows\.jsonl (must hold rows|cannot be read)"):
        read_baseline([file])


def test_rows_behind_a_baseline_are_marked() -> None:
    row = {"operator": "a.b", "params": {}, "us": 50.0}
    add_baseline(row, Baseline({row_key(row): 45.0}))
    assert (row["baseline_us"], row["of_baseline"], row["behind"]) == (45.0, 0.9, True)


@pytest.mark.parametrize(
    ("us", "before", "slower"),
    [(120, 100, True), (114, 100, False), (2.3, 1.9, False), (2.5, 1.9, True), (90, 100, False)],
)
def test_what_counts_as_slower(us: float, before: float, slower: bool) -> None:
    """More than the threshold, and more than two timings of a call of two microseconds differ."""
    assert is_slower(us, before, 0.15) == slower


# ---- the regression check, on recorded data --------------------------------------------------------------------------


def recorded_rows() -> list[dict[str, Any]]:
    return [dict(row) for row in newest_rows(read_lines(RECORDED)) if "us" in row]


@pytest.mark.parametrize("number", range(0, 450, 50))
def test_a_kernel_slowed_by_a_fifth_is_caught_and_nothing_else(number: int) -> None:
    """Every other row 2 % off, as from one run to the next, in turn up and down."""
    rows = recorded_rows()
    for at, row in enumerate(rows):
        row["us"] *= 1.02 if at % 2 else 0.98
    slowed = [row for row in rows if row["us"] >= 5.0][number % 200]
    slowed["us"] *= 1.2 / 0.98
    worse, better = find_changes(rows, read_baseline([RECORDED]), benchmarking.THRESHOLD)
    assert [change.name.partition("[")[0] for change in worse] == [slowed["operator"]]
    assert math.isclose(worse[0].us, slowed["us"])
    assert better == []


def test_calls_that_the_baseline_lacks_are_reported() -> None:
    rows = [{"operator": "a.b", "params": {"n": 1}, "us": 5.0}, {"operator": "a.c", "params": {}, "failure": "x"}]
    worse, _ = find_changes(rows, Baseline({}), 0.15)
    assert [change.describe() for change in worse] == ["?? a.b[n=1]: 5.00 us, not in the baseline"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_what_it_would_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("--op", "moe.topk_gate", "--tokens", "8")
    assert result.exit_code == 1
    assert "no CUDA GPU here, so that nothing is measured (torch" in result.output
    assert "On a GPU these 1 calls would be timed" in result.output
    assert "moe.topk_gate num_tokens=8 num_experts=256 num_topk=8" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--op", "moe.nix"], "bench: no operator is called 'moe.nix'"),
        (["--compare", "torch,cudnn"], "must be some of torch,compile,triton, got 'cudnn'"),
        (["--time-limit", "soon"], "'soon' is not a valid float"),
    ],
    ids=["operator", "peer", "time limit"],
)
def test_wrong_options_are_refused(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert text in result.output
    assert "Traceback" not in result.output


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    result = run("--op", "moe.topk_gate", "--plot", "x.png")
    assert result.exit_code == 1
    assert "bench: --plot needs matplotlib, which is not installed: pip install matplotlib" in result.output


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_run_prints_a_table_and_appends_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = [
        dataclasses.replace(make_call("moe.clone", 2000, num_tokens=8), operator=lambda x: x.clone()),
        dataclasses.replace(make_call("moe.repeat", 3000, shape=[2, 3]), operator=lambda x: x.repeat(2)),
    ]
    machine = {"stage": "machine", "gpu": "Some GPU", "torch": "2", "tilekernels": "1", "copy_gbs": 1.0}
    monkeypatch.setattr("tilekernels.bench.cases.find_calls", lambda: calls)
    monkeypatch.setattr("tilekernels.bench.record.describe_machine", lambda: machine)
    monkeypatch.setattr(limits, "measure_limits", lambda: LIMITS)
    monkeypatch.setattr(command, "_why_no_gpu", lambda: "")
    baseline = tmp_path / "old.jsonl"
    Record(baseline).write(stage="kernels", operator="moe.clone", params={"num_tokens": 8}, us=3.0)
    output = tmp_path / "new.jsonl"
    result = run("--twice", "--cross-check", "--baseline", str(baseline), "--json", str(output))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [
        "moe.clone",
        "num_tokens=8",
        "4.00",
        "1.0%",
        "0",
        "75%",
        "4.00",
        "5.00",
        "4.50",
        "3.00",
        "(0.75x)",
        "behind",
    ] in lines
    assert ["moe.repeat", "shape=2x3", "4.00", "1.0%", "1", "200%", "p", "4.00", "5.00", "4.50", "-"] in lines
    assert "1 of 1 calls fall behind the baseline" in result.output
    assert [line["stage"] for line in read_lines(output)] == ["machine", "kernels", "kernels"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_of_the_recorded_run_is_drawn(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    rows = [{"limit": "copy", "of_limit": row["of_copy"], **row} for row in recorded_rows()]
    file = tmp_path / f"plot.{ending}"
    plot.draw_rows(rows, file)
    first = file.read_bytes()
    assert first.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


# ---- host times ------------------------------------------------------------------------------------------------------


def test_import_is_timed_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PROCESSES", 1)
    lazy_ms, ms = host.measure_import()
    assert 0 < lazy_ms <= ms


def test_first_calls_are_timed_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = iter(['{"a.b": 3.0}', 'noise\n{"a.b": 1.0}', '{"a.b": 2.0}'])
    monkeypatch.setattr(host, "run_python", lambda *arguments: next(outputs))
    assert host._measure_first_calls("cold", ["a.b"]) == {"a.b": 2.0}


def test_launches_are_recorded_with_the_outputs_that_they_made(needs_extension: None) -> None:
    from tilekernels import moe

    scores = torch.randn(8, 64)
    results = []
    ((entry, args),) = host.record_launches(lambda: results.append(moe.topk_gate(scores, 4)))
    assert entry.__name__ == "moe_topk_gate"
    assert args[0] is scores
    assert args[1] is results[0]
    args[1].zero_()
    entry(*args)
    assert torch.equal(args[1], moe.topk_gate(scores, 4))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_clocks_agree_on_a_gpu() -> None:
    x = torch.zeros(64 * 1024 * 1024, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    times = timing.time_kernels([lambda: y.copy_(x), lambda: (y.copy_(x), y.copy_(x))])
    assert [each.num_kernels for each in times] == [1, 2]
    events = timing.event_time_us(lambda: y.copy_(x))
    graph = timing.graph_time_us(lambda: y.copy_(x))
    assert math.isclose(graph, times[0].us, rel_tol=0.3)
    assert math.isclose(events, times[0].us, rel_tol=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_read", "num_written"), [(0, 1 << 24), (1 << 22, 1 << 24), (1 << 23, 5 << 21)])
def test_plain_kernel_writes_every_byte(num_read: int, num_written: int) -> None:
    call = limits.make_plain_call(num_read, num_written)
    if call is None:
        pytest.skip("this torch has no NVRTC")
    x, out = call.keywords["args"][:2]
    x.fill_(7)
    out.fill_(9)
    call()
    assert out.numel() == num_written
    assert not (out.view(torch.int64) == 0x0909090909090909).any()
    assert num_read == 0 or (out[: min(num_read, num_written)] == 7).all()

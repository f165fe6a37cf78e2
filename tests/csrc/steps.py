"""What the runtime's tests share: steps for runner.py, and what came of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.csrc.sanitizers import environment as sanitizer_environment
from tests.csrc.sanitizers import launcher

Step = dict[str, Any]

CPU, CUDA = [1, 0], [2, 0]
RUNNER = Path(__file__).with_name("runner.py")
SECONDS = 60  # a hang is a failure


def tensor(
    dtype: str,
    *shape: int,
    strides: Sequence[int] | None = None,
    device: Sequence[int] = CUDA,
    data: int = 0x10000,
    byte_offset: int = 0,
) -> Step:
    return {
        "dtype": dtype,
        "shape": list(shape),
        "strides": list(strides) if strides is not None else None,
        "device": list(device),
        "data": data,
        "byte_offset": byte_offset,
    }


def call(
    kernel: str, *tensors: Step | None, scalars: Sequence[float] = (), axes: Sequence[int] = (), stream: int = 0
) -> Step:
    return {
        "do": "call",
        "kernel": kernel,
        "tensors": list(tensors),
        "scalars": list(scalars),
        "axes": list(axes),
        "stream": stream,
    }


def check(kernel: str, *tensors: Step | None, scalars: Sequence[float] = (), axes: Sequence[int] = ()) -> Step:
    step = call(kernel, *tensors, scalars=scalars, axes=axes)
    del step["stream"]
    return step | {"do": "check"}


def workspace_size(
    kernel: str, param: int, *tensors: Step | None, scalars: Sequence[float] = (), num_sms: int = 0
) -> Step:
    step = check(kernel, *tensors, scalars=scalars)
    return step | {"do": "workspace_size", "param": param, "num_sms": num_sms}


def set_pdl(enabled: bool) -> Step:
    return {"do": "set_pdl", "enabled": enabled}


def set_thread_pdl(mode: str) -> Step:
    return {"do": "set_thread_pdl", "mode": mode}


def enter(device: int = 0) -> Step:
    return {"do": "enter", "device": device}


# Valid calls of the kernels in hand_tables.cpp; tests change one thing.
def transpose(rows: int, cols: int, stride: int | None = None, dtype: str = "bfloat16", **more: Any) -> Step:
    x = tensor(dtype, rows, cols, strides=(stride or cols, 1), **more)
    return call("demo.transpose", x, tensor(dtype, cols, rows, data=0x20000))


def topk(
    scores: Step | None = None, out: Step | None = None, bias: Step | None = None, axes: Sequence[int] = (0, 0)
) -> Step:
    scores, out = scores or tensor("float32", 6, 64), out or tensor("int64", 6, 4)
    return call("demo.topk", scores, bias, out, scalars=[0.5], axes=axes)


def sync(num_sms: int, size: int = 100, num_stages: int = 16, device: Sequence[int] = CUDA) -> Step:
    return call("demo.sync", tensor("float32", size, device=device), scalars=[num_sms], axes=[num_stages])


def cast(
    rows: int, cols: int, scale: Step | None = None, out: str = "float8_e4m3fn", device: Sequence[int] = CUDA
) -> Step:
    x = tensor("bfloat16", rows, cols, device=device)
    return call("demo.cast", x, scale, tensor(out, rows, cols, device=device, data=0x30000))


@dataclasses.dataclass(frozen=True)
class Result:
    """Answers of the steps, and what the fake driver was asked."""

    answers: list[Any]
    records: list[dict[str, Any]]

    def calls(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["call"] == name]

    @property
    def launches(self) -> list[dict[str, Any]]:
        return self.calls("cuLaunchKernelEx")

    @property
    def statuses(self) -> list[str]:
        return [answer["status"] for answer in self.answers if isinstance(answer, dict)]

    @property
    def last(self) -> tuple[str, str]:
        return self.answers[-1]["status"], self.answers[-1]["message"]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A built library and the fake driver beside it."""

    library: Path
    driver_folder: Path
    scratch: Path

    def run(self, *steps: Step, driver: bool = True, **settings: object) -> Result:
        """Carry out the steps in a new process; settings are those of fake_driver.cpp, in lower case."""
        log = self.scratch / "driver.jsonl"
        log.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")}
        environment |= {f"FAKE_CUDA_{key.upper()}": str(value) for key, value in settings.items()}
        environment |= {"FAKE_CUDA_LOG": str(log), "LD_LIBRARY_PATH": str(self.driver_folder) if driver else ""}
        environment |= sanitizer_environment(is_instrumented=False)
        result = subprocess.run(
            [*launcher(), sys.executable, "-I", str(RUNNER), str(self.library)],
            input=json.dumps(steps),
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        lines = log.read_text().splitlines() if log.exists() else []
        return Result(json.loads(result.stdout), [json.loads(line) for line in lines])

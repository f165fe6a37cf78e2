"""Times gemm.matmul beside torch.matmul on the calls of its bench_cases(), in turns; JSON lines.

    python3 benchmarks/gemm.py [--output benchmarks/results/h200/gemm.jsonl]

us, torch_us: median GPU times with a cold L2. of_torch: torch's over ours; above 1 is faster than torch. tflops: 2 M N
K over the time. Needs a GPU that nobody else uses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pack import kernel_times_us
from record import Record, describe_machine


def main() -> None:
    import torch

    from tilekernels.gemm import matmul
    from tilekernels.gemm.matmul import bench_cases

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    record = Record(parser.parse_args().output)
    record.write(**describe_machine())
    for case in bench_cases():
        kwargs = case.make("cuda")
        a, b = kwargs["a"], kwargs["b"]
        us, torch_us = kernel_times_us([lambda a=a, b=b: matmul(a, b), lambda a=a, b=b: torch.matmul(a, b.t())])
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[0]
        gbs = case.bytes / us / 1e3
        record.write(
            stage="gemm",
            **case.params,
            us=us,
            torch_us=torch_us,
            of_torch=torch_us / us,
            tflops=flops / us / 1e6,
            gbs=gbs,
        )


if __name__ == "__main__":
    main()

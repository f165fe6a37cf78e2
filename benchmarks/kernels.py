"""Times every call that the operators list in bench_cases(), beside a plain copy of as many bytes; JSON lines.

    python benchmarks/kernels.py [--only quant.] [--output benchmarks/results/kernels.jsonl]

us: GPU time with a cold L2. gbs: counted bytes over it. of_copy: the copy's time over the operator's; 1 is as fast as
copying. Needs a GPU that nobody else uses.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from record import Record, describe_machine, find_cases

from tilekernels.testing.bench import copy_time_us, kernel_time_us

# A size measured once serves every case of nearly that size; the copy's time is as good as linear between two sizes.
_copy_us = functools.cache(copy_time_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose id contains this text")
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    arguments = parser.parse_args()

    record = Record(arguments.output)
    record.write(**describe_machine())
    for operator, case in find_cases():
        if arguments.only not in case.id:
            continue
        kwargs = case.make("cuda")
        us, copy_us = kernel_time_us(functools.partial(operator, **kwargs)), _copy_us(case.bytes)
        record.write(
            stage="kernels",
            operator=case.operator,
            params=case.params,
            us=us,
            bytes=case.bytes,
            gbs=case.bytes / us / 1e3,
            copy_us=copy_us,
            of_copy=copy_us / us,
        )


if __name__ == "__main__":
    main()

"""Times every call that the operators list in bench_cases(), beside a plain copy of as many bytes; JSON lines.

    python benchmarks/kernels.py [--only quant.] [--output benchmarks/results/kernels.jsonl]

`tilekernels bench` without its table and with another choice: calls whose id contains a text. Needs a GPU that nobody
else uses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from record import Record, describe_machine

from tilekernels.bench.cases import find_calls
from tilekernels.bench.limits import measure_limits
from tilekernels.bench.measure import Options, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose id contains this text")
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    arguments = parser.parse_args()
    record = Record(arguments.output)
    record.write(**describe_machine())
    calls = [call for call in find_calls() if arguments.only in call.case.id]
    for row in measure(calls, measure_limits(), Options()):
        record.write(**row)


if __name__ == "__main__":
    main()

"""Times rand.randn_like beside torch.randn_like and a fill of as many bytes; JSON lines.

    python benchmarks/peers/randn.py [--output FILE]

us, peer_us, fill_us: GPU times with a cold L2. us has the draw of the kernel's state by torch's generator in it. Needs
a GPU that nobody else uses.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import Record, describe_machine

from tilekernels.rand import randn_like
from tilekernels.rand.randn_like import bench_cases
from tilekernels.testing.bench import kernel_time_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    record = Record(parser.parse_args().output)
    record.write(**describe_machine())
    for case in bench_cases():
        x = case.make("cuda")["input"]
        us = kernel_time_us(functools.partial(randn_like, x))
        peer_us = kernel_time_us(functools.partial(torch.randn_like, x))
        fill_us = kernel_time_us(functools.partial(x.fill_, 1.0))
        record.write(
            stage="peers", operator=case.operator, params=case.params, us=us, gbs=case.bytes / us / 1e3,
            peer="torch", peer_us=peer_us, of_peer=peer_us / us, fill_us=fill_us, of_fill=fill_us / us,
        )  # fmt: skip


if __name__ == "__main__":
    main()

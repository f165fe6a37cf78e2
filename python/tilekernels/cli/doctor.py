"""`tilekernels doctor`: does this install serve the GPUs of this machine, and if not, what to do.

Exit status 1 if the extension does not load or a GPU is present that this install cannot serve.
"""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

from .. import __version__
from .._manifest import Manifest, load_manifest
from .._native import find_damaged, load_native
from ..errors import NotBuiltError
from ._tables import make_console, make_table
from ._version import find_version

__all__ = ["Finding", "doctor_command", "examine_driver", "examine_gpu"]

# The first driver branch of each CUDA major version: what a person asks an administrator for.
_DRIVER_BRANCHES = {12: "525", 13: "580"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    good: bool
    verdict: str
    advice: str = ""


@click.command("doctor")
def doctor_command() -> None:
    """Say whether this install serves the GPUs of this machine, and what to do if it does not."""
    console = make_console()
    good = _report_install(console)
    damaged = find_damaged()
    if damaged:
        console.print(f"extension: damaged, install the wheel again: {', '.join(damaged)}")
        raise click.exceptions.Exit(1)
    try:
        extension = load_native()
    except ImportError as error:
        console.print(f"extension: does not load\n{error}")
        raise click.exceptions.Exit(1) from error
    if extension is None:
        console.print("extension: not built here; install a wheel, or build one with `make wheel`")
        raise click.exceptions.Exit(1)
    console.print("extension: loads")
    for path in extension.packs():
        console.print(f"pack: {path}")
    version = extension.driver_version()
    driver = examine_driver(version, extension.required_driver_version())
    _print_finding(console, "driver", driver)
    gpus = extension.devices()
    if gpus:
        good &= _report_gpus(console, gpus, driver)
    else:
        console.print("GPUs: none that can be used; CPU tensors run the references")
    # A driver that is there and too old hides the GPUs that it drives.
    good &= driver.good or version is None
    if not good:
        raise click.exceptions.Exit(1)


def examine_driver(version: int | None, required: int) -> Finding:
    """The driver's CUDA version against the one that the kernels need, both as 1000 * major + 10 * minor."""
    if version is None:
        return Finding(False, "none found (libcuda.so.1)", f"a GPU needs {_name_driver(required)}")
    text = f"CUDA {_show_cuda(version)}"
    if version < required:
        return Finding(False, f"{text}, too old", f"update it: these kernels need {_name_driver(required)}")
    return Finding(True, text)


def examine_gpu(gpu: Mapping[str, Any], cuda_label: str) -> Finding:
    """Whether the library holds kernels for a GPU as `_C.devices()` describes it. cuda_label: "cu130"."""
    if gpu["arch"]:
        return Finding(True, f"served by {gpu['arch']}")
    if gpu["wanted_arch"]:
        label = f"{cuda_label}.{gpu['wanted_arch'].replace('_', '')}"
        return Finding(False, "not served", f"install tilekernels=={__version__}+{label}")
    return Finding(False, "not served", "no wheel is made for this compute capability")


def _report_install(console: Console) -> bool:
    console.print(f"tilekernels {find_version()}, Python {platform.python_version()}, {_torch_version()}")
    try:
        manifest = load_manifest()
    except NotBuiltError as error:
        console.print(f"manifest: {error}")
        return False
    console.print(
        f"holds: {_describe_archs(manifest)}; {len(manifest['kernels'])} kernels, profile {manifest['profile']}"
    )
    return True


def _report_gpus(console: Console, gpus: Sequence[Mapping[str, Any]], driver: Finding) -> bool:
    table = make_table("GPU", "name", "capability", "verdict", "to do")
    cuda_label = _cuda_label()
    findings = [examine_gpu(gpu, cuda_label) for gpu in gpus]
    for gpu, finding in zip(gpus, findings, strict=True):
        shown = finding if driver.good or not finding.good else Finding(False, "not served", "update the driver")
        capability = ".".join(map(str, gpu["capability"]))
        table.add_row(str(gpu["index"]), gpu["name"], capability, shown.verdict, shown.advice)
    console.print(table)
    return all(finding.good for finding in findings)


def _print_finding(console: Console, what: str, finding: Finding) -> None:
    console.print(f"{what}: {finding.verdict}" + (f"; {finding.advice}" if finding.advice else ""))


def _describe_archs(manifest: Manifest) -> str:
    ran = manifest["validated_on"]
    return ", ".join(
        f"{arch} ({f'ran on {ran[arch]}' if arch in ran else 'compiled, not run'})" for arch in manifest["archs"]
    )


def _cuda_label() -> str:
    major, minor = load_manifest()["build"]["nvcc"].split(".")[:2]
    return f"cu{major}{minor}"


def _show_cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _name_driver(required: int) -> str:
    branch = _DRIVER_BRANCHES.get(required // 1000)
    return f"a driver for CUDA {_show_cuda(required)} or newer" + (f" (>= {branch})" if branch else "")


def _torch_version() -> str:
    try:
        return f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return "torch not installed: the operators need it, the C++ library does not"

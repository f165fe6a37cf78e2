"""sbom: what is compiled into a wheel, as a CycloneDX file.

It lies in gen/ of the store, so that every way of packing has it (`.dist-info/sboms/`). The same manifest gives the
same bytes: the serial number is made of the content, the time is SOURCE_DATE_EPOCH or left out.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion

from .archive import source_date
from .wheel_label import ROOT, make_label

SBOM_NAME = "tilekernels.cdx.json"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:tilekernels:sbom")


def make_sbom(manifest: Mapping[str, Any]) -> bytes:
    """The file for a manifest: the package, the projects whose code is in it, and every cubin with its hash."""
    build = manifest["build"]
    label = make_label(build["nvcc"], manifest["archs"])
    package = Component(
        name="tilekernels",
        version=f"{manifest['version']}+{label}",
        type=ComponentType.LIBRARY,
        bom_ref="tilekernels",
        description="TileLang kernels compiled ahead of time",
        licenses=[DisjunctiveLicense(id="MIT")],
        properties=[
            Property(name="tilekernels:profile", value=manifest["profile"]),
            Property(name="tilekernels:archs", value=" ".join(manifest["archs"])),
            Property(name="tilekernels:source_hash", value=str(build.get("source_hash"))),
        ],
    )
    parts = [
        _part("TileLang", build["tilelang"], "MIT", "generated CUDA source and device templates"),
        _part("CUTLASS", f"as in TileLang {build['tilelang']}", "BSD-3-Clause", "header templates in the cubins"),
        _part("pybind11", _pinned("pybind11"), "BSD-3-Clause", "headers in the extension module"),
        _part(
            "NVIDIA CUDA Toolkit", build["nvcc"], None, "compiler of the cubins; inline device functions of its headers"
        ),
    ]
    cubins = [_cubin(unit) for unit in manifest["units"]]
    bom = Bom(components=[*parts, *cubins])
    bom.metadata.component = package
    bom.register_dependency(package, [*parts, *cubins])
    return _finish(json.loads(make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()))


def add_zig_runtime(sbom: bytes, zig: str) -> bytes:
    """The same file for a wheel that zig compiled, whose C++ library is then part of the extension module."""
    content = json.loads(sbom)
    content["components"].append(
        {
            "bom-ref": "libc++",
            "name": "libc++, libc++abi and compiler-rt",
            "version": f"as in zig {zig}",
            "type": "library",
            "description": "C++ runtime linked into the extension module",
            "licenses": [{"expression": "Apache-2.0 WITH LLVM-exception"}],
        }
    )
    for dependency in content["dependencies"]:
        if dependency["ref"] == "tilekernels":
            dependency["dependsOn"] = sorted([*dependency["dependsOn"], "libc++"])
    return _finish(content)


def _part(name: str, version: str, license_id: str | None, description: str) -> Component:
    nvidia = DisjunctiveLicense(name="NVIDIA CUDA Toolkit End User License Agreement")
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=name.lower().replace(" ", "-"),
        description=description,
        licenses=[DisjunctiveLicense(id=license_id) if license_id else nvidia],
    )


def _cubin(unit: Mapping[str, Any]) -> Component:
    return Component(
        name=unit["id"],
        type=ComponentType.FILE,
        bom_ref=unit["id"],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=unit["sha256"])],
    )


def _pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)", (ROOT / "requirements-wheel.txt").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"requirements-wheel.txt must pin {package}")
    return found[1]


def _finish(content: dict[str, Any]) -> bytes:
    """Without what a clock or chance decided."""
    content.pop("serialNumber", None)
    content["metadata"].pop("timestamp", None)
    if os.environ.get("SOURCE_DATE_EPOCH"):
        date = datetime.datetime.fromtimestamp(source_date(), datetime.timezone.utc)
        content["metadata"]["timestamp"] = date.isoformat()
    text = json.dumps(content, sort_keys=True)
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(NAMESPACE, text)}"
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

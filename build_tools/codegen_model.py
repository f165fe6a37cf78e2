"""The manifest as codegen reads it: kernels with the union of their parameters, axes and symbols, and their variants.

Only names and shapes are worked out here, once; codegen_bind.py and codegen_launch.py turn them into C++ text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import CodegenError

# kMax... of csrc/src/registry.h
_LIMITS = {"symbols": 32, "tensors": 128, "axes": 16, "dimensions": 8, "archs": 32}


@dataclasses.dataclass(frozen=True)
class Param:
    """A public parameter of a kernel: what its variants have in common. `slot` counts tensors and scalars apart."""

    name: str
    is_tensor: bool
    slot: int
    dtypes: tuple[str, ...]
    rank: int  # -1: differs between variants
    written: bool
    nullable: bool
    optional: bool
    raw: bool


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis that is part of the key: every kind but forms."""

    name: str
    kind: str
    of: str | None
    values: tuple[int | str | bool, ...]
    dtypes: tuple[str | None, ...]

    @property
    def is_plain(self) -> bool:
        """Named by the caller; the others are read from a tensor."""
        return self.kind == "value"

    @property
    def labels(self) -> tuple[str, ...]:
        """The values as messages show them."""
        return tuple(str(value) for value in self.values)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel with its axes fixed, for one arch. `key` numbers the axis values, last axis fastest."""

    kernel: str
    id: str
    arch: str
    key: int
    form: int  # index of its machine form, 0 where the kernel has none
    unit: int
    tensors: Mapping[str, Mapping[str, Any]]
    symbols: Mapping[str, str]  # name: dtype
    guards: tuple[str, ...]
    launches: Sequence[Mapping[str, Any]]
    tma: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    doc: str
    params: tuple[Param, ...]
    axes: tuple[Axis, ...]
    forms: tuple[str, ...]
    derived: Mapping[str, str]
    accepts: Mapping[str, tuple[str, ...]]
    symbols: tuple[str, ...]
    variants: tuple[Variant, ...]

    @property
    def identifier(self) -> str:
        """`transpose_transpose`: the name in C, C++ and Python."""
        return self.name.replace(".", "_")

    @functools.cached_property
    def tensors(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.is_tensor)

    @functools.cached_property
    def scalars(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if not param.is_tensor)

    @functools.cached_property
    def plain_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.is_plain)

    def param(self, name: str) -> Param:
        for param in self.params:
            if param.name == name:
                return param
        raise CodegenError(
            f"{self.name}: {name} is no parameter; parameters: {', '.join(param.name for param in self.params)}"
        )

    def of_key(self, key: int) -> tuple[Variant, ...]:
        return tuple(variant for variant in self.variants if variant.key == key)

    @functools.cached_property
    def num_keys(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @functools.cached_property
    def archs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variant.arch for variant in self.variants))


def read_kernels(manifest: Mapping[str, Any]) -> tuple[Kernel, ...]:
    """The kernels of a manifest that have variants, in its order."""
    units = {unit["id"]: index for index, unit in enumerate(manifest["units"])}
    variants: dict[str, list[Mapping[str, Any]]] = {}
    for variant in manifest["variants"]:
        variants.setdefault(variant["kernel"], []).append(variant)
    return tuple(
        _read_kernel(kernel, variants[kernel["name"]], units)
        for kernel in manifest["kernels"]
        if kernel["name"] in variants
    )


def _read_kernel(entry: Mapping[str, Any], variants: Sequence[Mapping[str, Any]], units: Mapping[str, int]) -> Kernel:
    axes = tuple(_read_axis(axis) for axis in entry["axes"] if axis["kind"] != "forms")
    forms = next((axis for axis in entry["axes"] if axis["kind"] == "forms"), None)
    symbols = tuple(dict.fromkeys(symbol["name"] for variant in variants for symbol in variant["symbols"]))
    kernel = Kernel(
        name=entry["name"],
        doc=entry["doc"],
        params=tuple(_read_params(entry, variants)),
        axes=axes,
        forms=tuple(forms["values"]) if forms else (),
        derived=entry["derived"],
        accepts={name: tuple(dtypes) for name, dtypes in entry["accepts"].items()},
        symbols=symbols,
        variants=tuple(_read_variant(variant, axes, forms, units) for variant in variants),
    )
    _refuse_too_many(kernel)
    return kernel


def _refuse_too_many(kernel: Kernel) -> None:
    counts = {
        "symbols": len(kernel.symbols),
        "tensors": len(kernel.tensors),
        "axes": len(kernel.axes),
        "dimensions": max(
            (len(entry["shape"]) for variant in kernel.variants for entry in variant.tensors.values()), default=0
        ),
        "archs": len(kernel.archs),
    }
    for what, count in counts.items():
        if count > _LIMITS[what]:
            raise CodegenError(f"{kernel.name}: must have at most {_LIMITS[what]} {what}, got {count}")


def _read_axis(axis: Mapping[str, Any]) -> Axis:
    return Axis(axis["name"], axis["kind"], axis.get("of"), tuple(axis["values"]), tuple(axis.get("dtypes", ())))


def _read_params(entry: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> Iterator[Param]:
    slots = {"tensor": 0, "scalar": 0}
    for param in entry["params"]:
        if param["name"] in entry["derived"]:
            continue
        ranks = {
            len(found["shape"])
            for variant in variants
            for found in variant["params"]
            if found["name"] == param["name"] and "shape" in found
        }
        yield Param(
            name=param["name"],
            is_tensor=param["kind"] == "tensor",
            slot=slots[param["kind"]],
            dtypes=tuple(entry["accepts"].get(param["name"], param["dtypes"])),
            rank=ranks.pop() if len(ranks) == 1 else -1,
            written=param.get("written", False),
            nullable=param.get("nullable", False),
            optional=param.get("optional", False),
            raw=param["name"] in entry["raw"],
        )
        slots[param["kind"]] += 1


def _read_variant(
    entry: Mapping[str, Any], axes: Sequence[Axis], forms: Mapping[str, Any] | None, units: Mapping[str, int]
) -> Variant:
    key = 0
    for axis in axes:
        key = key * len(axis.values) + axis.values.index(entry["config"][axis.name])
    return Variant(
        kernel=entry["kernel"],
        id=entry["variant"],
        arch=entry["arch"],
        key=key,
        form=forms["values"].index(entry["config"][forms["name"]]) if forms else 0,
        unit=units[entry["unit"]],
        tensors={param["name"]: param for param in entry["params"] if param["kind"] == "tensor"},
        symbols={symbol["name"]: symbol["dtype"] for symbol in entry["symbols"]},
        guards=tuple(entry["guards"]),
        launches=entry["launches"],
        tma=entry["tma"],
    )

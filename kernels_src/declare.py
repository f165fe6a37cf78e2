"""How a kernel is declared: everything that a kernel author must know stands in this file.

A kernel is a function that takes the values of its axes and returns a `T.prim_func`; `@kernel` says over which values
and for which GPUs it is built. Parameter names of the prim_func are the public names; those that start with `workspace`
are scratch.

    @kernel(axes=grid(itemsize=itemsize_of("x", 1, 2, 4), form=forms("aligned", "general")), raw=("x", "out"))
    def transpose(itemsize, form):
        \"\"\"Write the transpose of x to out.\"\"\"
        ...
        return main

The file is imported without TileLang to list its kernels: keep TileLang calls inside functions, `@T.macro` apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

AxisValue = int | str | bool

# torch's names of the dtypes that a tensor of a kernel may have
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip


class DeclarationError(ValueError):
    """A declaration that cannot be built; the text names the kernel and what to change."""


# ---- GPUs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arch:
    """A GPU architecture to build for. `smem_per_block` is the most shared memory that a block may have, in bytes."""

    name: str
    major: int
    minor: int
    smem_per_block: int

    @property
    def capability(self) -> int:
        """The compute capability as one number: 90 for 9.0, 103 for 10.3."""
        return self.major * 10 + self.minor

    @property
    def has_tma(self) -> bool:
        return self.capability >= 90

    @property
    def has_cluster(self) -> bool:
        return self.capability >= 90

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.capability >= 90

    @property
    def has_wgmma(self) -> bool:
        return self.name == "sm_90a"

    @property
    def has_tcgen05(self) -> bool:
        return self.major == 10 and self.name[-1] in "af"

    @property
    def has_fp8(self) -> bool:
        """Conversions to and from e4m3 and e5m2 in hardware."""
        return self.capability >= 89

    @property
    def has_fp4(self) -> bool:
        """Conversions to and from e2m1 in hardware; emulated elsewhere."""
        return self.capability >= 100 and self.name[-1] in "af"


_KIB = 1024
ARCHS: Mapping[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", 8, 0, 163 * _KIB),
        Arch("sm_89", 8, 9, 99 * _KIB),
        Arch("sm_90a", 9, 0, 227 * _KIB),
        Arch("sm_100a", 10, 0, 227 * _KIB),
        Arch("sm_103a", 10, 3, 227 * _KIB),
        Arch("sm_120a", 12, 0, 99 * _KIB),
    )
}

_arch: Arch | None = None


def arch() -> Arch:
    """The GPU that the kernel is being traced for; read it inside the kernel function only."""
    if _arch is None:
        raise DeclarationError("arch() was called while no kernel is traced: call it inside the kernel function")
    return _arch


@contextlib.contextmanager
def tracing_for(name: str) -> Iterator[Arch]:
    """For the trace stage: `arch()` answers `name` inside this block."""
    global _arch
    previous, _arch = _arch, ARCHS[name]
    try:
        yield _arch
    finally:
        _arch = previous


# ---- axes ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the matrix. The kernel function gets one of `values`; for dtype_of, `dtypes` stands beside them."""

    name: str
    kind: Literal["value", "dtype_of", "itemsize_of", "forms"]
    values: tuple[AxisValue, ...]
    of: str | None = None
    dtypes: tuple[str | None, ...] = ()

    def label(self, value: AxisValue) -> str:
        """The part of a variant's id that says this value: `npc128`, `b2`, `round_sf`, `no_round_sf`, `e4m3`."""
        if self.kind == "itemsize_of":
            return f"b{value}"
        if isinstance(value, bool):
            return self.name if value else f"no_{self.name}"
        if isinstance(value, int):
            return "".join(word[0] for word in self.name.split("_") if word) + str(value)
        return value


def itemsize_of(tensor: str, *sizes: int) -> Axis:
    """An axis that the runtime reads from the element size of `tensor`, in bytes. The kernel function receives the int.

    For sizes 1, 2 and 4 declare the tensor uint8, uint16 and uint32, and name it in `raw`."""
    return Axis("", "itemsize_of", sizes, of=tensor)


def dtype_of(tensor: str, **labels: str | None) -> Axis:
    """An axis that the runtime reads from the dtype of `tensor`: `label="torch dtype name"`, or `label=None` for a
    tensor that is absent. The kernel function receives the label."""
    for label, dtype in labels.items():
        if dtype is not None and dtype not in DTYPES:
            raise DeclarationError(f"dtype_of({tensor!r}): {label}={dtype!r} is no dtype; known: {', '.join(DTYPES)}")
    return Axis("", "dtype_of", tuple(labels), of=tensor, dtypes=tuple(labels.values()))


def forms(*names: str) -> Axis:
    """An axis of machine forms, most specialised first. The runtime takes the first whose assumptions (`T.assume`,
    alignment of vector accesses) hold; the last one must fit every call. Callers never see it."""
    return Axis("", "forms", names)


def grid(**axes: Axis | tuple[AxisValue, ...] | list[AxisValue]) -> tuple[Axis, ...]:
    """The axes of a kernel in order. A tuple of ints, strings or bools is a plain axis, which the caller names."""
    return tuple(_named_axis(name, axis) for name, axis in axes.items())


def _named_axis(name: str, axis: Axis | tuple[AxisValue, ...] | list[AxisValue]) -> Axis:
    named = dataclasses.replace(axis, name=name) if isinstance(axis, Axis) else Axis(name, "value", tuple(axis))
    if not named.values:
        raise DeclarationError(f"axis {name} has no values")
    kinds = {type(value) for value in named.values}
    if len(kinds) != 1 or not kinds <= {int, str, bool}:
        raise DeclarationError(f"axis {name}: values must all be ints, all strings or all bools, got {named.values!r}")
    if len(set(named.values)) != len(named.values):
        raise DeclarationError(f"axis {name}: a value stands twice in {named.values!r}")
    for value in named.values:
        if not re.fullmatch(r"[A-Za-z0-9_]+", named.label(value)):
            raise DeclarationError(f"axis {name}: {value!r} cannot be part of a symbol; use letters, digits and _")
    return named


# ---- kernels -------------------------------------------------------------------------------------------------------

Config = Mapping[str, AxisValue]


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A declared kernel. `name` is `<family>.<function name>`."""

    family: str
    name: str
    axes: tuple[Axis, ...]
    where: Callable[..., bool] | None
    archs: tuple[str, ...]
    raw: tuple[str, ...]
    accepts: Mapping[str, tuple[str, ...]]
    derived: Mapping[str, str]
    pass_configs: Mapping[str, AxisValue]
    flags: tuple[str, ...]
    function: Callable[..., Any]
    file: Path
    doc: str

    def configs(self) -> Iterator[dict[str, AxisValue]]:
        """Every combination of axis values that exists, last axis fastest."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            config = {axis.name: value for axis, value in zip(self.axes, values, strict=True)}
            if self.where is None or self.where(
                **{name: config[name] for name in inspect.signature(self.where).parameters}
            ):
                yield config

    def variant_id(self, config: Config) -> str:
        """`b2_aligned`; `only` for a kernel without axes."""
        return "_".join(axis.label(config[axis.name]) for axis in self.axes) or "only"


KERNELS: dict[str, Kernel] = {}  # by name; filled by importing kernel files

_DEFAULT_ARCHS = tuple(ARCHS)


def kernel(
    *,
    axes: tuple[Axis, ...] = (),
    where: Callable[..., bool] | None = None,
    archs: tuple[str, ...] = _DEFAULT_ARCHS,
    raw: tuple[str, ...] = (),
    accepts: Mapping[str, tuple[str, ...]] | None = None,
    derived: Mapping[str, str] | None = None,
    pass_configs: Mapping[str, AxisValue] | None = None,
    flags: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function a kernel.

    axes          grid(...); the function takes exactly these names
    where         which combinations exist: a predicate over some or all axes
    archs         GPUs that it is built for
    raw           tensors taken by element size: any dtype of that size, all of them the same dtype
    accepts       {"out_sf": ("float32", "int32")}: dtypes that a caller may pass for a tensor declared as a carrier of
                  that size
    derived       {"sf_packed": "is_dtype(out_sf, int32)"}: scalar parameters that the runtime computes; callers never
                  see them
    pass_configs  TileLang pass options by their text: {"tl.enable_fast_math": True}
    flags         extra nvcc flags

    The first sentence of the docstring becomes the comment of the C entry.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        file = Path(function.__code__.co_filename)
        declared = Kernel(
            family=file.parent.name,
            name=f"{file.parent.name}.{function.__name__}",
            axes=axes,
            where=where,
            archs=archs,
            raw=raw,
            accepts=dict(accepts or {}),
            derived=dict(derived or {}),
            pass_configs=dict(pass_configs or {}),
            flags=flags,
            function=function,
            file=file,
            doc=_first_sentence(function),
        )
        _check(declared)
        KERNELS[declared.name] = declared
        return function

    return register


def _first_sentence(function: Callable[..., Any]) -> str:
    paragraph = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def _check(declared: Kernel) -> None:
    """Raise DeclarationError for what can be seen without tracing."""

    def fail(text: str) -> None:
        raise DeclarationError(f"{declared.name}: {text}")

    names = [axis.name for axis in declared.axes]
    parameters = list(inspect.signature(declared.function).parameters)
    if parameters != names:
        fail(
            f"the function takes ({', '.join(parameters)}), its axes are ({', '.join(names)}): "
            "make them the same, in one order"
        )
    if declared.where is not None:
        for unknown in set(inspect.signature(declared.where).parameters) - set(names):
            fail(f"where reads {unknown}, which is no axis; axes: {', '.join(names)}")
    if not declared.doc:
        fail("needs a docstring: its first sentence is the comment of the C entry")
    if sum(axis.kind == "forms" for axis in declared.axes) > 1:
        fail("has two forms(...) axes; one is allowed")
    for unknown in [name for name in declared.archs if name not in ARCHS]:
        fail(f"unknown arch {unknown}; known: {', '.join(ARCHS)}")
    for key, value in declared.pass_configs.items():
        if not isinstance(key, str) or not isinstance(value, int | str):
            fail(f'pass_configs takes texts such as {{"tl.enable_fast_math": True}}, got {{{key!r}: {value!r}}}')
    for tensor, dtypes in declared.accepts.items():
        for dtype in dtypes:
            if dtype not in DTYPES:
                fail(f"accepts: {dtype!r} of {tensor} is no dtype; known: {', '.join(DTYPES)}")
    previous = KERNELS.get(declared.name)
    if previous is not None and previous.file != declared.file:
        fail(f"declared in {previous.file} and in {declared.file}; kernel names of a family must differ")
    first_line = getattr(declared.function, "__code__").co_firstlineno  # noqa: B009 - a Callable has no __code__ for mypy
    if previous is not None and getattr(previous.function, "__code__").co_firstlineno != first_line:  # noqa: B009
        fail(f"declared twice in {declared.file}")

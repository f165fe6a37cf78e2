# The compiled module: made by build_tools/codegen.py, do not edit.
# Arguments are positional; what a kernel takes is described in include/tilekernels/ops.h. An output may be asked for by
# (dtype, alignment, *sizes): those that were are returned, one by itself, several as a tuple.
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

def set_torch(tensor_type: type, parameter_type: type, exchange_api: object) -> None: ...
def set_allocator(empty_strided: Callable[..., Tensor], device_type: type, dtype_type: type) -> None: ...
def set_errors(
    argument_error: type[Exception],
    argument_type_error: type[Exception],
    not_built_error: type[Exception],
    device_error: type[Exception],
) -> None: ...
def set_fallback(fallback: Callable[[str, tuple[Any, ...]], object]) -> None: ...
def set_check_fallback(fallback: Callable[[str, tuple[Any, ...]], object]) -> None: ...
def kernels() -> list[dict[str, Any]]: ...
def preload(names: Sequence[str] | None = None, device: int = -1) -> None: ...
def set_pdl(enabled: bool) -> None: ...
def get_pdl() -> bool: ...
def devices() -> list[dict[str, Any]]: ...
def driver_version() -> int | None: ...
def required_driver_version() -> int: ...
def covers(kernel: str, axes: Mapping[str, int | str | bool], arch: str | None = None) -> bool: ...
def archs() -> list[str]: ...
def packs() -> list[str]: ...
def load_pack(path: str) -> None: ...
def version() -> str: ...

# Cast x, plus bias where given, to a narrow format with one scale per group of channels.
def demo_cast(
    x: Tensor,
    bias: Tensor | None,
    row_map: Tensor | None,
    clamp_min: float,
    out: Tensor | tuple[Any, ...],
    out_sf: Tensor | tuple[Any, ...],
    num_per_channels: Literal[32, 128],
    rounding: Literal["nearest", "up"],
    transposed: bool,
    /,
) -> Any: ...
def check_demo_cast(
    x: Tensor,
    bias: Tensor | None,
    row_map: Tensor | None,
    clamp_min: float,
    out: Tensor | None,
    out_sf: Tensor | None,
    num_per_channels: Literal[32, 128],
    rounding: Literal["nearest", "up"],
    transposed: bool,
    /,
) -> None: ...

# Write the rank of each token by its largest score.
def demo_rank(
    scores: Tensor,
    num_sms: int,
    workspace: Tensor | tuple[Any, ...],
    out: Tensor | tuple[Any, ...],
    /,
) -> Any: ...
def check_demo_rank(
    scores: Tensor,
    num_sms: int,
    workspace: Tensor | None,
    out: Tensor | None,
    /,
) -> None: ...

# Write the transpose of x to out.
def demo_transpose(
    x: Tensor,
    out: Tensor | tuple[Any, ...],
    /,
) -> Any: ...
def check_demo_transpose(
    x: Tensor,
    out: Tensor | None,
    /,
) -> None: ...

"""The C++ of `VariantDesc::launch`: for each launch of a variant its geometry, tensor maps and argument array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .codegen_model import Kernel, Variant
from .codegen_text import SCALAR_FIELDS, cpp, cpp_dtype, scalar, tensor
from .errors import CodegenError

# what the device function declares for a value of each dtype
_VALUE_TYPES = {
    "float32": "float", "float64": "double", "bool": "bool",
    "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
}  # fmt: skip


def launch_body(kernel: Kernel, variant: Variant, map_names: Sequence[str]) -> str:
    """The statements of the launch function. `map_names` are the TensorMapDescs of the variant's tensor maps."""
    lines: list[str] = []
    for index, launch in enumerate(variant.launches):
        extents = [_extent(kernel, launch["grid"]), _extent(kernel, launch["block"]), cpp(kernel, launch["smem"])]
        table, given = _descs(launch)
        block = [
            f"const Geometry geometry{{{', '.join(extents)}}};",
            *_arguments(kernel, variant, launch, map_names),
            *table,
            f"TK_RETURN_IF_ERROR(launcher.launch(frame, {index}, geometry, arguments{given}));",
        ]
        if any("tma" in argument for argument in launch["args"]):
            block[1:] = ["if (!is_empty(geometry)) {", *(f"  {line}" for line in block[1:]), "}"]
        lines += ["  {", *(f"    {line}" for line in block), "  }"]
    return "\n".join([*lines, "  return TK_OK;"])


def tensor_map_desc(tma: Mapping[str, Any]) -> str:
    """The initialiser of a TensorMapDesc."""
    numbers = [tma["interleave"], tma["swizzle"], tma["l2_promotion"], tma["oob_fill"]]
    return (
        f"{{{tensor(tma['tensor'])}, DType::{cpp_dtype(tma['dtype'])}, {tma['rank']}, {_list(tma['box_dim'])}, "
        f"{_list(tma['element_stride'])}, {', '.join(map(str, numbers))}}}"
    )


def _extent(kernel: Kernel, texts: Sequence[str]) -> str:
    return _list(cpp(kernel, text) for text in texts)


def _list(items: Any) -> str:
    return f"{{{', '.join(str(item) for item in items)}}}"


def _arguments(kernel: Kernel, variant: Variant, launch: Mapping[str, Any], map_names: Sequence[str]) -> Iterator[str]:
    """A local per device argument, then the array of their addresses, as cuLaunchKernel takes it."""
    names: list[str] = []
    for index, argument in enumerate(launch["args"]):
        name = f"argument{index}"
        if "tensor" in argument:
            yield f"void* {name} = data_of(frame.tensors[{tensor(argument['tensor'])}]);"
        elif "tma" in argument:
            yield from _tensor_map(kernel, variant.tma[argument["tma"]], map_names[argument["tma"]], name)
        else:
            yield f"{_value_type(variant, argument)} {name} = {_value(kernel, argument)};"
        names.append(f"&{name}")
    # a kernel without arguments still needs an array in C++
    yield f"void* arguments[] = {_list(names or ['nullptr'])};"


def _descs(launch: Mapping[str, Any]) -> tuple[list[str], str]:
    """The table of what the arguments are, and how the launch is given it: nothing where one is a tensor map."""
    arguments = launch["args"]
    if not arguments or any("tma" in argument for argument in arguments):
        return [], ""
    descs = _list(_desc(argument) for argument in arguments)
    return [f"static constexpr ArgumentDesc descs[] = {descs};"], f", descs, {len(arguments)}"


def _desc(argument: Mapping[str, Any]) -> str:
    if "tensor" in argument:
        return f"{{{tensor(argument['tensor'])}, sizeof(void*)}}"
    return f"{{-1, sizeof({_VALUE_TYPES[argument['dtype']]})}}"


def _tensor_map(kernel: Kernel, tma: Mapping[str, Any], desc: str, name: str) -> Iterator[str]:
    strides = tma["global_stride"] or ["0"]  # rank 1 has none
    yield f"TensorMap {name};"
    yield f"const int64_t {name}_dim[] = {_extent(kernel, tma['global_dim'])};"
    yield f"const int64_t {name}_stride[] = {_extent(kernel, strides)};"
    yield f"TK_RETURN_IF_ERROR(launcher.make_map(frame, {desc}, {name}_dim, {name}_stride, &{name}));"


def _value_type(variant: Variant, argument: Mapping[str, Any]) -> str:
    dtype = argument["dtype"]
    if dtype not in _VALUE_TYPES:
        raise CodegenError(
            f"{variant.kernel} {variant.id}: argument {argument['value']} has dtype {dtype}, "
            f"a launch takes {', '.join(_VALUE_TYPES)}"
        )
    return _VALUE_TYPES[dtype]


def _value(kernel: Kernel, argument: Mapping[str, Any]) -> str:
    text, dtype = argument["value"], argument["dtype"]
    for param in kernel.scalars:
        if param.name == text:  # as it comes: an expression would take it through int64
            field = f"frame.scalars[{scalar(text)}].{SCALAR_FIELDS[param.dtypes[0]]}"
            return f"{field} != 0" if param.dtypes[0] == "bool" else _cast(field, dtype, param.dtypes[0])
    if text in kernel.derived:
        return _cast(cpp(kernel, kernel.derived[text]), dtype, "bool" if dtype == "bool" else "int64")
    return _cast(cpp(kernel, text), dtype, "int64")


def _cast(value: str, dtype: str, has: str) -> str:
    if dtype == has:
        return value
    return f"({value}) != 0" if dtype == "bool" else f"static_cast<{_VALUE_TYPES[dtype]}>({value})"

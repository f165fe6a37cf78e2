"""Second stage: variant -> CUDA source and launch facts. The only part that imports TileLang; needs no GPU.

TileLang lowers the kernel's PrimFunc to a device and a host module; what a launch needs is read from their IR, not from
the generated text. Same variant, same bytes, in any folder and process.
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import re
import textwrap
from typing import Any

from kernels_src.declare import ARCHS, KERNELS, tracing_for

from .errors import ExpressionError, TraceError
from .kernel_files import import_kernel_file, importing, line_in
from .plan import Variant
from .trace_arguments import (
    Launch,
    Parameters,
    attribute_of,
    check_before_lowering,
    describe_arguments,
    read_launches,
    read_parameters,
    settle_symbols,
)
from .trace_checks import check_carriers, check_declaration, check_null_tests, find_nullable
from .trace_guards import access_guards, assumed_guards, unique_guards
from .trace_print import Printer, Walk
from .trace_tensor_maps import read_tensor_maps, stored_maps, tensor_map_guards

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Traced:
    """kernel.cu and the content of launch.json."""

    source: str
    launch: dict[str, Any]

    def launch_json(self) -> str:
        """The text of launch.json."""
        return json.dumps(self.launch, indent=2) + "\n"


def trace(variant: Variant) -> Traced:
    """Lower one variant. TraceError names kernel file, config and arch, and what TileLang said."""
    try:
        return _trace(variant)
    except (TraceError, ExpressionError) as error:
        problem = str(error)
    except Exception as error:  # TileLang raises whatever its passes raise
        words = textwrap.indent(f"{type(error).__name__}: {error}".strip(), "  ")
        problem = f"TileLang cannot lower it{line_in(variant.file, error, ' (line {})')}:\n{words}"
    raise TraceError(f"{variant.file}: {variant.describe()}: {problem}")


def _trace(variant: Variant) -> Traced:
    import tilelang
    from tilelang import tvm

    def walk(tree: Any) -> list[Any]:
        nodes: list[Any] = []
        tvm.tirx.stmt_functor.post_order_visit(tree, nodes.append)
        return nodes

    simplify = tvm.arith.Analyzer().simplify
    arch = ARCHS[variant.arch]
    linecache.checkcache(str(variant.file))  # TileLang reads the kernel's source, which may have been edited
    target = tvm.target.Target({"kind": "cuda", "arch": arch.name})
    with importing(variant.root, stand_in=False), tracing_for(arch.name):
        import_kernel_file(variant.root, variant.file)
        kernel = KERNELS[variant.kernel]
        with target, tvm.transform.PassContext(opt_level=3, config=dict(variant.pass_configs)):
            prim_func = kernel.function(**dict(variant.config))
            if not isinstance(prim_func, tvm.tirx.PrimFunc):
                raise TraceError(f"the kernel function must return a T.prim_func, got {type(prim_func).__name__}")
            check_before_lowering(prim_func, walk, arch)
            parameters = read_parameters(prim_func, walk, simplify)
            lowered = tilelang.lower(prim_func, target=target, enable_host_codegen=False, enable_device_compile=False)

    printer = Printer(parameters.integers, simplify)
    device = {str(var.name_hint): function for var, function in lowered.device_mod.functions.items()}
    host = next(iter(lowered.host_mod.functions.values()))
    launches = read_launches(host, device, parameters, printer, walk, arch)
    maps, numbers = read_tensor_maps(host, launches, parameters, printer)
    for launch in launches:
        describe_arguments(launch, parameters, numbers, printer)
    _mark_parameters(prim_func, parameters, launches, maps, walk)
    check_declaration(kernel, dict(variant.config), parameters)
    check_carriers(kernel.accepts, prim_func, parameters, walk)
    guards = [
        *assumed_guards(prim_func, parameters, printer, walk),
        *access_guards(launches, parameters, printer, walk),
        *tensor_map_guards(maps),
    ]
    _name_symbols(variant, launches)
    source = _wait_for_predecessor(_rename(str(lowered.kernel_source), launches), launches)
    return Traced(source, _launch_content(variant, parameters, unique_guards(guards), launches, maps))


def _launch_content(
    variant: Variant, parameters: Parameters, guards: list[str], launches: list[Launch], maps: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kernel": variant.kernel,
        "variant": variant.id,
        "arch": variant.arch,
        "config": dict(variant.config),
        "params": parameters.described,
        "symbols": settle_symbols(parameters),
        "guards": guards,
        "launches": [launch.described for launch in launches],
        "tma": maps,
        "pass_configs": dict(variant.pass_configs),
        "flags": list(variant.flags),
    }


# ---- written and nullable tensors ------------------------------------------------------------------------------------


def _mark_parameters(
    prim_func: Any, parameters: Parameters, launches: list[Launch], maps: list[dict[str, Any]], walk: Walk
) -> None:
    nullable = find_nullable(prim_func, parameters.tensors, walk)
    check_null_tests(launches, parameters, nullable, walk)
    for described in maps:
        if described["tensor"] in nullable:
            raise TraceError(
                f"{described['tensor']} may be null and is read through a tensor map, which cannot be made of null"
            )
    written: set[str] = set()
    for launch in launches:
        read_only = {int(index) for index in attribute_of(launch.function, "tl.readonly_param_indices") or ()}
        stored = stored_maps(launch, walk)
        for index, described in enumerate(launch.described["args"]):
            if "tensor" in described and index not in read_only:
                written.add(described["tensor"])
            elif "tma" in described and index in stored:
                written.add(maps[described["tma"]]["tensor"])
    for param in parameters.described:
        if param["kind"] == "tensor":
            param["nullable"], param["written"] = param["name"] in nullable, param["name"] in written


# ---- symbols ---------------------------------------------------------------------------------------------------------


def _name_symbols(variant: Variant, launches: list[Launch]) -> None:
    for index, launch in enumerate(launches):
        launch.described["symbol"] = variant.symbol if len(launches) == 1 else f"{variant.symbol}_{index}"


def _definition(symbol: str) -> re.Pattern[str]:
    return re.compile(rf"__global__ void (?:__launch_bounds__\([^)]*\) )?{symbol}\([^;]*?\) \{{")


# At the head of a kernel, before any access of global memory. Nothing happens in a launch without the attribute.
_WAIT = """
  // Programmatic dependent launch: wait for the kernel before this one, then let the next one be set up.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");"""


def _wait_for_predecessor(source: str, launches: list[Launch]) -> str:
    """Make kernels fit for programmatic dependent launch, except those that say themselves where they wait."""
    for launch in launches:
        if launch.described["pdl"] and not attribute_of(launch.function, "has_cuda_pdl_sync"):
            source = _definition(launch.described["symbol"]).sub(lambda head: head[0] + _WAIT, source)
    return source


def _rename(source: str, launches: list[Launch]) -> str:
    """Give every kernel its final symbol, so that many variants can share a compile unit."""
    symbols = {launch.symbol: launch.described["symbol"] for launch in launches}
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(symbols, key=len, reverse=True))) + r")\b")
    renamed = pattern.sub(lambda match: symbols[match[1]], source)
    for symbol in symbols.values():
        if len(_definition(symbol).findall(renamed)) != 1:
            raise TraceError(
                f"the source does not define {symbol} once: give the prim_func a name that nothing else has"
            )
    return renamed

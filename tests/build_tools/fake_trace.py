"""Tracing without TileLang: a kernel source of few lines, shaped as TileLang does, for tests of the stages around it.

Runs in worker processes, which import it by name. The axis `mode` tells what happens: see `trace_files`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from build_tools.errors import TraceError
from build_tools.plan import Variant
from build_tools.store import to_json
from build_tools.units import TracedVariant

HEAD = "#include <cuda_fp16.h>\n#ifdef ENABLE_BF16\n#include <tl_templates/cuda/cuda_bf16_fallbacks.cuh>\n#endif\n\n"


def kernel_source(factor: int = 2, dtype: str = "float", name: str = "tk_demo_scale__f2") -> str:
    """A kernel with a single dynamic shared buffer, declared as TileLang declares it."""
    signature = f"{dtype}* __restrict__ out, const {dtype}* __restrict__ x, int n"
    return f"""{HEAD}extern "C" __global__ void {name}({signature});
extern "C" __global__ void __launch_bounds__(128, 1) {name}({signature}) {{
  extern __shared__ __align__(1024) {dtype} tile[];
  if (((int)threadIdx.x) < n) {{
    tile[((int)threadIdx.x)] = x[((int)threadIdx.x)];
  }}
  __syncthreads();
  if (((int)threadIdx.x) < n) {{
    out[((int)threadIdx.x)] = tile[(127 - ((int)threadIdx.x))] * ({dtype}){factor};
  }}
}}
"""


def launch(kernel: str = "demo.scale", variant: str = "f2", arch: str = "sm_90a", **changes: Any) -> dict[str, Any]:
    """launch.json of `kernel_source`."""
    content = {
        "schema": 1,
        "kernel": kernel,
        "variant": variant,
        "arch": arch,
        "config": {},
        "params": [
            {
                "name": name,
                "kind": "tensor",
                "dtype": "float32",
                "shape": ["n"],
                "strides": ["1"],
                "nullable": False,
                "written": name == "out",
            }
            for name in ("x", "out")
        ],
        "symbols": [{"name": "n", "dtype": "int32", "from": ["x", "shape", 0]}],
        "guards": [],
        "launches": [
            {
                "symbol": f"tk_{kernel.replace('.', '_')}__{variant}",
                "source_symbol": "main_kernel",
                "grid": ["1", "1", "1"],
                "block": ["128", "1", "1"],
                "cluster": [1, 1, 1],
                "smem": "512",
                "cooperative": False,
                "pdl": False,
                "args": [{"tensor": "out"}, {"tensor": "x"}, {"value": "n", "dtype": "int32"}],
            }
        ],
        "tma": [],
        "pass_configs": {},
        "flags": [],
    }
    return {**content, **changes}


def traced(variant: str = "f2", factor: int = 2, dtype: str = "float", **changes: Any) -> TracedVariant:
    """One traced variant, for tests that need no plan."""
    return TracedVariant(kernel_source(factor, dtype, f"tk_demo_scale__{variant}"), launch(variant=variant, **changes))


def trace_files(variant: Variant) -> dict[str, bytes]:
    """Stands in for build_tools.build.trace_files."""
    config = dict(variant.config)
    mode = config.get("mode", "fine")
    print(f"tracing {variant.id}", flush=True)
    if mode == "raises":
        raise ValueError("no layout fits this tile")
    if mode == "refuses":
        raise TraceError(
            f"{variant.file}: {variant.describe()}: TileLang cannot lower it (line 3):\n  TypeError: too few"
        )
    if mode == "edits":
        variant.file.write_text(variant.file.read_text() + "# edited\n")
    if mode == "slow":
        time.sleep(0.4)
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    source = kernel_source(int(config.get("factor", 2)), name=variant.symbol)
    if mode == "refused":
        source = source.replace("__syncthreads()", "no_such_function()")
    content = launch(variant.kernel, variant.id, variant.arch, config=config)
    return {"kernel.cu": source.encode(), "launch.json": to_json(content)}


def signature_files(variant: Variant) -> dict[str, bytes]:
    """Stands in for build_tools.build.signature_files."""
    params = launch(variant.kernel, variant.id, variant.arch)["params"]
    if dict(variant.config).get("mode") == "scaled":
        params = [params[0], {"name": "scale", "kind": "tensor", "dtype": "bfloat16"}, params[1]]
    return {"signature.json": to_json([{key: param[key] for key in ("name", "kind", "dtype")} for param in params])}

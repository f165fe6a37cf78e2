"""signatures: the parameters of the configs that a profile leaves out.

C structs and the calls of `_C` have a place for every parameter that a kernel declares, whatever is built of it, so
that a program runs with the library of any profile. The PrimFunc of such a config is made, not lowered: that takes
milliseconds once TileLang is imported, and the cache remembers it.
"""

from __future__ import annotations

from typing import Any

from kernels_src.declare import ARCHS, KERNELS, tracing_for

from .errors import TraceError
from .kernel_files import import_kernel_file, importing
from .plan import Variant
from .store import to_json

FILE = "signature.json"
VERSION = 1  # of the content, part of its key


def signature_files(variant: Variant) -> dict[str, bytes]:
    """Runs in a worker: name, kind and dtype of each parameter, in order."""
    from tilelang import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": ARCHS[variant.arch].name})
    with importing(variant.root, stand_in=False), tracing_for(variant.arch):
        import_kernel_file(variant.root, variant.file)
        kernel = KERNELS[variant.kernel]
        with target, tvm.transform.PassContext(opt_level=3, config=dict(variant.pass_configs)):
            prim_func: Any = kernel.function(**dict(variant.config))
    if not isinstance(prim_func, tvm.tirx.PrimFunc):
        raise TraceError(f"{variant.file}: {variant.describe()}: the kernel function must return a T.prim_func")
    params = []
    for param in prim_func.params:
        if param in prim_func.buffer_map:
            buffer = prim_func.buffer_map[param]
            params.append({"name": str(buffer.name), "kind": "tensor", "dtype": str(buffer.dtype)})
        else:
            params.append({"name": str(param.name), "kind": "scalar", "dtype": str(param.dtype)})
    return {FILE: to_json(params)}

"""Evaluates calls of a `_C` that is not the installed one, in a process of its own: it loads another libtilekernels.

    echo '{"name": "check_demo_transpose(x, None)"}' | python -m tests.python.c_module_runner _C.cpython-311.so

Prints the answer of each expression as JSON: [class of the exception or null, its text or repr of the result].
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

Answer = tuple[str | None, str]


class ArgumentError(ValueError):
    pass


class ArgumentTypeError(TypeError):
    pass


class NotBuiltError(RuntimeError):
    pass


class DeviceError(RuntimeError):
    pass


def load_module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden._C", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluate(expression: str, names: dict[str, Any]) -> Answer:
    try:
        return None, repr(eval(expression, dict(names)))
    except Exception as error:
        return type(error).__name__, str(error)


def names_for_tests(module: ModuleType) -> dict[str, Any]:
    """The functions of the module and a few CPU tensors that fit the golden kernels."""
    import torch
    from torch._subclasses import FakeTensorMode

    module.set_torch(torch.Tensor, torch.nn.Parameter, torch.Tensor.__dlpack_c_exchange_api__)
    module.set_errors(ArgumentError, ArgumentTypeError, NotBuiltError, DeviceError)
    module.set_fallback(lambda name, arguments: ("fallback", name, len(arguments)))
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = torch.zeros(3, 64, dtype=torch.bfloat16)
    return vars(module) | {
        "torch": torch,
        "x": x,
        "fake": fake,
        "meta": x.to("meta"),
        "parameter": torch.nn.Parameter(x),
        "out": torch.zeros(3, 64, dtype=torch.float8_e4m3fn),
        "sf": torch.zeros(3, 2),
    }


def main() -> None:
    module = load_module(sys.argv[1])
    # before torch is known, and to see that it is not needed
    answers = {"archs": evaluate("archs()", vars(module)), "unset": evaluate("demo_transpose(1, 2)", vars(module))}
    answers["torch"] = None, repr("torch" in sys.modules)
    names = names_for_tests(module)
    answers |= {name: evaluate(expression, names) for name, expression in json.load(sys.stdin).items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

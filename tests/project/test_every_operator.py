"""What holds for every operator, found by walking the package: documents, reference, CPU path, compilation, capture.

An operator's own tests say what it computes; this file asks what no operator may forget, on the calls that it lists
itself in `bench_cases()`. The small calls run here; the large ones go through fake tensors, and through a GPU.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import tilekernels
from tilekernels import _dispatch, _manifest
from tilekernels.testing import BenchCase, assert_equal, calc_diff

# torch's own: its compilers still import what torch.jit deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

# No operators in these, or not of the kind that launches one kernel.
NO_FAMILIES = ("bench", "cli", "testing", "modeling", "v1")

# Calls that move no more than this run on a CPU and under a compiler; each operator lists at least one.
SMALL_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Operator:
    """A public operator and the file it comes from."""

    name: str  # "moe.topk_gate"
    module: ModuleType

    @property
    def call(self) -> Callable[..., Any]:
        return getattr(self.module, self.name.partition(".")[2])

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(self.module, f"{self.name.partition('.')[2]}_ref")


@functools.cache
def find_modules() -> list[ModuleType]:
    """Every operator file: the public modules of the family packages."""
    families = [
        importlib.import_module(f"tilekernels.{found.name}")
        for found in pkgutil.iter_modules(tilekernels.__path__)
        if found.ispkg and found.name not in NO_FAMILIES
    ]
    return [
        importlib.import_module(f"{family.__name__}.{found.name}")
        for family in families
        for found in pkgutil.iter_modules(family.__path__)
        if not found.name.startswith("_")
    ]


@functools.cache
def find_operators() -> list[Operator]:
    """Every function of an operator file that its family exports."""
    operators = []
    for module in find_modules():
        family = importlib.import_module(module.__name__.rpartition(".")[0])
        for name, value in inspect.getmembers(family, inspect.isfunction):
            if value.__module__ == module.__name__:
                operators.append(Operator(f"{family.__name__.rpartition('.')[2]}.{name}", module))
    return operators


def find_cases(small: bool | None = None) -> list[BenchCase]:
    cases = [case for module in find_modules() for case in module.bench_cases()]
    return [case for case in cases if small is None or (case.bytes <= SMALL_BYTES) == small]


def operator_of(case: BenchCase) -> Operator:
    return next(operator for operator in find_operators() if operator.name == case.operator)


every_module = pytest.mark.parametrize("module", find_modules(), ids=lambda module: module.__name__)
every_operator = pytest.mark.parametrize("operator", find_operators(), ids=lambda operator: operator.name)
every_case = pytest.mark.parametrize("case", find_cases(), ids=lambda case: case.id)
small_case = pytest.mark.parametrize("case", find_cases(small=True), ids=lambda case: case.id)


def call_afresh(function: Callable[..., Any], case: BenchCase, device: str) -> tuple[Any, list[torch.Tensor]]:
    """What the call returns, and its inputs as it leaves them: written in place or not. The same inputs each time, and
    the same numbers for a call that draws some."""
    kwargs = make_inputs(case, device)
    return function(**kwargs), tensors_in(kwargs)


def make_inputs(case: BenchCase, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    kwargs = case.make(device)
    torch.manual_seed(1)
    return kwargs


def assert_same_results(actual: Any, expected: Any, max_diff: float = 0.0) -> None:
    """Bytes, shapes and strides of every tensor, in the same nesting; None and numbers by value. With a max_diff
    floating-point tensors may differ by that much."""
    actual_leaves, actual_spec = _pytree.tree_flatten(actual)
    expected_leaves, expected_spec = _pytree.tree_flatten(expected)
    assert actual_spec == expected_spec
    for x, y in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(x, torch.Tensor) and max_diff and x.is_floating_point():
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert calc_diff(x, y) <= max_diff
        elif isinstance(x, torch.Tensor):
            assert_equal(x, y)
        else:
            assert x == y


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def describe(result: Any) -> list[tuple[Any, ...]]:
    """dtype, shape, strides and device of every tensor that was returned."""
    return [(x.dtype, tuple(x.shape), x.stride(), x.device.type) for x in tensors_in(result)]


# ---- what a file has to hold -----------------------------------------------------------------------------------------


def test_operators_are_found() -> None:
    names = {operator.name for operator in find_operators()}
    assert {"moe.topk_gate", "quant.per_token_cast", "transpose.transpose"} <= names


@every_module
def test_file_says_what_it_is(module: ModuleType) -> None:
    assert module.__doc__


@every_operator
def test_operator_is_documented_and_annotated(operator: Operator) -> None:
    assert operator.call.__doc__
    signature = inspect.signature(operator.call)
    parameters = [*signature.parameters.values()]
    assert [each.name for each in parameters if each.annotation is inspect.Parameter.empty] == []
    assert signature.return_annotation is not inspect.Signature.empty


@every_operator
def test_reference_is_documented_and_takes_the_same_names(operator: Operator) -> None:
    assert operator.reference.__doc__
    own = inspect.signature(operator.call).parameters
    assert set(inspect.signature(operator.reference).parameters) <= set(own)


@every_operator
def test_operator_lists_a_small_and_a_large_call(operator: Operator) -> None:
    sizes = [case.bytes for case in operator.module.bench_cases() if case.operator == operator.name]
    assert min(sizes, default=None) is not None, "bench_cases() lists no call"
    assert min(sizes) <= SMALL_BYTES, f"bench_cases() needs a call of at most {SMALL_BYTES} bytes for these tests"
    assert max(sizes) > SMALL_BYTES, "bench_cases() needs a call that is large enough to be timed"


@every_module
def test_cases_have_names_of_their_own(module: ModuleType) -> None:
    ids = [case.id for case in module.bench_cases()]
    assert len(set(ids)) == len(ids)


def test_every_compiled_kernel_has_an_operator(needs_extension: None) -> None:
    find_modules()
    assert {kernel["name"] for kernel in _manifest.load_manifest()["kernels"]} <= set(_dispatch._OPERATORS)


# ---- on a CPU --------------------------------------------------------------------------------------------------------


@small_case
def test_cpu_result_is_the_reference(case: BenchCase) -> None:
    operator = operator_of(case)
    assert_same_results(call_afresh(operator.call, case, "cpu"), call_afresh(operator.reference, case, "cpu"))


@every_case
def test_fake_tensors_give_the_shapes_of_the_reference(case: BenchCase) -> None:
    operator = operator_of(case)
    with FakeTensorMode():
        kwargs = case.make("cpu")
        assert describe(operator.call(**kwargs)) == describe(operator.reference(**kwargs))


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", False), ("aot_eager", True)])
@small_case
def test_compiles_whole_on_cpu(case: BenchCase, backend: str, dynamic: bool) -> None:
    check_compiled(operator_of(case), case, "cpu", backend=backend, dynamic=dynamic)


@every_operator
def test_inductor_compiles_it_whole(operator: Operator) -> None:
    cases = [case for case in operator.module.bench_cases() if case.operator == operator.name]
    smallest = min(cases, key=lambda case: case.bytes)
    check_compiled(operator, smallest, "cpu", backend="inductor")


def check_compiled(operator: Operator, case: BenchCase, device: str, **options: Any) -> None:
    """The compiled call gives what the plain one gives, in one graph. Skipped where the kernel is not in the build:
    torch would then compile the reference, which is not what ships."""
    if operator.name not in _dispatch._OPERATORS:
        pytest.skip(f"{operator.name} is not built here")
    torch._dynamo.reset()
    compiled = torch.compile(operator.call, fullgraph=True, **options)
    assert_same_results(call_afresh(compiled, case, device), call_afresh(operator.call, case, device))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_case
def test_gpu_result_is_the_reference(case: BenchCase) -> None:
    operator = operator_of(case)
    expected = call_afresh(operator.reference, case, "cuda")
    assert_same_results(call_afresh(operator.call, case, "cuda"), expected, case.max_diff)


@pytest.mark.gpu
@small_case
def test_call_is_captured_in_a_graph_after_preload(case: BenchCase) -> None:
    operator = operator_of(case)
    expected = call_afresh(operator.reference, case, "cuda")
    kwargs = make_inputs(case, "cuda")
    tilekernels.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operator.call(**kwargs)
    given = {x.untyped_storage().data_ptr() for x in tensors_in(kwargs)}
    for x in tensors_in(result):
        if x.untyped_storage().data_ptr() not in given:  # RMSNorm's z without a residual is x itself
            x.untyped_storage().fill_(0xA5)  # what is compared afterwards was written by the replay
    torch.manual_seed(1)
    graph.replay()
    assert_same_results((result, tensors_in(kwargs)), expected, case.max_diff)


@pytest.mark.gpu
@small_case
def test_compiles_whole_on_gpu(case: BenchCase) -> None:
    check_compiled(operator_of(case), case, "cuda", backend="aot_eager")


@pytest.mark.gpu
def test_no_compiler_is_loaded(needs_extension: None) -> None:
    import sys

    find_operators()
    assert not {"tilelang", "tvm", "tvm_ffi"} & set(sys.modules)

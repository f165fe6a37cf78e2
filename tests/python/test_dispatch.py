"""Where a call goes: compiled function, reference on CPU, torch operator under compilation, or an error that helps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilekernels
from tilekernels import _dispatch, _library
from tilekernels.errors import ArgumentError, ArgumentTypeError, DeviceError, NotBuiltError


class NamedTensor(torch.Tensor):
    """A subclass with no behaviour of its own, as frameworks define to hang attributes on."""


@pytest.fixture(params=["made here", "asked for"])
def call(demo_scale: _dispatch.Launch, request: pytest.FixtureRequest) -> Any:
    """A public operator over demo.scale: check, allocate, launch; or all three by one call."""

    def scale(x: torch.Tensor, factor: float, mode: str = "once", bias: torch.Tensor | None = None) -> torch.Tensor:
        demo_scale.check(x, bias, None, factor, 1, mode, 1)
        out = torch.empty_like(x)
        demo_scale(x, bias, out, factor, 1, mode, 1)
        return out

    def scale_into_new(
        x: torch.Tensor, factor: float, mode: str = "once", bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = demo_scale(x, bias, (torch.float32, 0, *x.shape), factor, 1, mode, 1)
        return out

    return scale if request.param == "made here" else scale_into_new


# ---- eager -----------------------------------------------------------------------------------------------------------


def test_cpu_tensors_run_the_reference(call: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(call(x, 3.0), x * 3)
    assert torch.equal(call(x, 3.0, mode="twice", bias=x), x * 9 + x)


def test_check_runs_before_anything_is_allocated(call: Any, fake_extension: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^demo\.scale: x must have 2 dimensions, got 1$"):
        call(torch.ones(3), 2.0)


def test_launch_checks_as_well(demo_scale: _dispatch.Launch) -> None:
    with pytest.raises(ArgumentError, match="x must have 2 dimensions, got 1"):
        demo_scale(torch.ones(3), None, torch.empty(3), 1.0, 1, "once", 1)


def test_subclass_tensor_is_unwrapped(call: Any, fake_extension: Any) -> None:
    fake_extension.checked.clear()
    x = torch.ones(2, 2).as_subclass(NamedTensor)
    assert torch.equal(call(x, 5.0).as_subclass(torch.Tensor), torch.full((2, 2), 5.0))
    assert type(fake_extension.checked[-1][0]) is torch.Tensor  # or the extension would hand it back for ever


def test_parameter_is_taken_and_no_gradient_recorded(call: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    out = call(weight, 2.0)
    assert torch.equal(out, torch.full((2, 2), 2.0))
    assert not out.requires_grad


def test_extension_is_told_of_torch_and_errors(demo_scale: _dispatch.Launch, fake_extension: Any) -> None:
    tensor, parameter, exchange = fake_extension.set_calls["torch"]
    assert (tensor, parameter) == (torch.Tensor, torch.nn.Parameter)
    assert exchange is torch.Tensor.__dlpack_c_exchange_api__
    assert fake_extension.set_calls["errors"] == (ArgumentError, ArgumentTypeError, NotBuiltError, DeviceError)


class OnGpu:
    """Enough of a CUDA tensor for the dispatch, where there is no GPU."""

    device = torch.device("cuda", 0)
    is_cuda = True
    is_meta = True  # the stand-in's check then passes it by, as the extension does with what it cannot read
    dtype = torch.uint4
    layout = torch.strided


def test_tensors_that_cannot_be_read_do_not_go_in_circles(
    demo_scale: _dispatch.Launch, fake_extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatch, "load_extension", lambda: fake_extension)
    monkeypatch.setattr(_dispatch.torch, "Tensor", OnGpu)
    monkeypatch.setattr(_dispatch, "_EXACT_TYPES", (OnGpu,))
    text = r"^demo\.scale: tensors must be dense and of dtypes that DLPack knows, got uint4 \(torch\.strided\)$"
    with pytest.raises(ArgumentTypeError, match=text):
        fake_extension.fallback("demo.scale", (OnGpu(), None, None, 1.0, 1, "once", 1))


# ---- fake, meta and compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(call: Any, backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x, 3.0, mode="twice"), x * 9)


def test_compiled_graph_holds_the_operator(call: Any, demo_scale: _dispatch.Launch) -> None:
    targets = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(torch.ones(2, 2), 2.0)
    assert "tilekernels.demo_scale.default" in targets


def test_fake_tensors_give_shapes_without_running(call: Any) -> None:
    with FakeTensorMode():
        out = call(torch.empty(7, 3), 2.0)
    assert out.shape == (7, 3)
    assert out.stride() == (3, 1)


def test_meta_tensors_give_shapes(call: Any) -> None:
    assert call(torch.empty(7, 3, device="meta"), 2.0).is_meta


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.empty(3, device="meta"), ArgumentError, "demo.scale: x must have 2 dimensions, got 1"),
        (
            torch.empty(3, 3, device="meta", dtype=torch.bfloat16),
            ArgumentTypeError,
            "demo.scale: x must be float32, got bfloat16",
        ),
    ],
    ids=["rank", "dtype"],
)
def test_meta_tensors_are_checked_for_what_can_be_known(call: Any, x: torch.Tensor, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"^{text}$"):
        call(x, 2.0)


def test_missing_tensor_is_refused_under_fake_mode(demo_scale: _dispatch.Launch) -> None:
    params = [{"name": "x", "kind": "tensor", "nullable": False, "optional": False, "written": False}]
    with pytest.raises(ArgumentTypeError, match=r"^demo\.scale: x must be a tensor, got None$"):
        _library.check_metadata("demo.scale", params, [None])


@pytest.mark.parametrize(
    ("dtype", "raw", "text"),
    [
        (torch.int16, True, None),
        (torch.int16, False, "x must be uint8, uint16 or uint32, got int16"),
        (torch.int64, True, "x must have elements of 1, 2 or 4 bytes, got int64 of 8"),
    ],
    ids=["of that size", "exact", "of another size"],
)
def test_raw_tensors_are_taken_by_element_size(dtype: torch.dtype, raw: bool, text: str | None) -> None:
    param = {"name": "x", "kind": "tensor", "dtypes": ["uint8", "uint16", "uint32"], "raw": raw, "rank": -1}
    x = torch.empty(1, dtype=dtype, device="meta")
    if text is None:
        _library.check_metadata("demo.raw", [param], [x])
    else:
        with pytest.raises(ArgumentTypeError, match=f"^demo.raw: {text}$"):
            _library.check_metadata("demo.raw", [param], [x])


def test_schema_names_what_is_written_and_what_may_be_absent(demo_scale: _dispatch.Launch) -> None:
    assert str(torch.ops.tilekernels.demo_scale.default._schema) == (
        "tilekernels::demo_scale(Tensor x, Tensor? bias, Tensor(a2!) out, float factor, SymInt num_rounds, "
        "str mode_, int num_groups) -> ()"
    )


def test_operator_passes_torch_own_checks(demo_scale: _dispatch.Launch) -> None:
    args = (torch.ones(2, 3), None, torch.empty(2, 3), 2.0, 1, "once", 1)
    results = torch.library.opcheck(torch.ops.tilekernels.demo_scale.default, args)
    assert set(results.values()) == {"SUCCESS"}


# ---- preloading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(fake_extension: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(_dispatch, "load_extension", lambda: fake_extension)
    fake_extension.preloaded.clear()
    return fake_extension


@pytest.mark.parametrize(
    ("names", "device", "expected"),
    [
        ("demo.scale", 1, (["demo.scale"], 1)),
        (["demo.scale"], "cuda:2", (["demo.scale"], 2)),
        (None, torch.device("cuda", 3), (None, 3)),
    ],
    ids=["one name", "text device", "all"],
)
def test_preload_passes_names_and_device_index(loaded: Any, names: Any, device: Any, expected: Any) -> None:
    tilekernels.preload(names, device)
    assert loaded.preloaded == [expected]


def test_preload_refuses_a_device_that_is_no_gpu(loaded: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^tilekernels\.preload: device must be a CUDA device, got cpu$"):
        tilekernels.preload(device="cpu")


# ---- without the kernel ----------------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> _dispatch.Launch:
    monkeypatch.setattr(_dispatch, "load_extension", lambda: None)
    return _dispatch.kernel("demo.absent", cpu=lambda x, out: out.copy_(x + 1))


def test_unbuilt_tree_still_runs_cpu_tensors(unbuilt: _dispatch.Launch) -> None:
    out = torch.empty(3)
    unbuilt.check(torch.zeros(3), None)
    unbuilt(torch.zeros(3), out)
    assert out.tolist() == [1, 1, 1]


def test_unbuilt_tree_compiles_through_the_reference(unbuilt: _dispatch.Launch) -> None:
    def increment(x: torch.Tensor) -> torch.Tensor:
        unbuilt.check(x, None)
        out = torch.empty_like(x)
        unbuilt(x, out)
        return out

    torch._dynamo.reset()
    assert torch.compile(increment, fullgraph=True, backend="eager")(torch.zeros(2)).tolist() == [1, 1]


def test_unbuilt_tree_refuses_gpu_tensors(unbuilt: _dispatch.Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch.torch, "Tensor", OnGpu)
    with pytest.raises(NotBuiltError, match=r"^demo\.absent: tilekernels\._C was never built here"):
        unbuilt(OnGpu(), OnGpu())


def test_build_without_the_operator_says_how_to_build_it(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_table", lambda: {"demo.scale": {}})
    launch = _dispatch.kernel("demo.left_out", cpu=lambda x: None)
    monkeypatch.setattr(_dispatch.torch, "Tensor", OnGpu)
    words = r"^demo\.left_out: this build holds no such kernel, only demo\.scale; a profile with the line `operators\."
    with pytest.raises(NotBuiltError, match=words):
        launch(OnGpu())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_preload_without_a_gpu_leaves_the_words_to_the_extension(loaded: Any) -> None:
    tilekernels.preload("demo.scale")
    assert loaded.preloaded == [(["demo.scale"], 0)]


def test_preload_in_an_unbuilt_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "load_extension", lambda: None)
    with pytest.raises(NotBuiltError, match=r"^tilekernels\.preload: tilekernels\._C was never built here"):
        tilekernels.preload()


def test_old_torch_is_named(fake_extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "load_native", lambda: fake_extension)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with pytest.raises(ImportError, match=r"tilekernels needs torch >= 2\.10, got"):
        _dispatch.load_extension.__wrapped__()

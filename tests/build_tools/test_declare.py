"""declare.py: axes, labels, configs, and the text of every refusal."""

from collections.abc import Iterator

import pytest

from kernels_src import declare
from kernels_src.declare import Axis, DeclarationError, dtype_of, forms, grid, itemsize_of, kernel


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    """Kernels declared by a test are forgotten after it."""
    saved = dict(declare.KERNELS)
    yield
    declare.KERNELS.clear()
    declare.KERNELS.update(saved)


def declared(name: str) -> declare.Kernel:
    return declare.KERNELS[f"build_tools.{name}"]  # the family is the folder of the file


def test_grid_names_axes_in_order() -> None:
    axes = grid(
        itemsize=itemsize_of("x", 1, 2),
        fmt=dtype_of("out", e4m3="float8_e4m3fn", none=None),
        num_per_channels=(16, 128),
        form=forms("aligned", "general"),
    )
    assert axes == (
        Axis("itemsize", "itemsize_of", (1, 2), of="x"),
        Axis("fmt", "dtype_of", ("e4m3", "none"), of="out", dtypes=("float8_e4m3fn", None)),
        Axis("num_per_channels", "value", (16, 128)),
        Axis("form", "forms", ("aligned", "general")),
    )


def test_configs_and_ids() -> None:
    @kernel(
        axes=grid(
            size=itemsize_of("x", 1, 2),
            num_per_channels=(16, 32),
            round_sf=(False, True),
            form=forms("fast", "general"),
        ),
        where=lambda size, round_sf: size == 2 or not round_sf,
    )
    def cast(size, num_per_channels, round_sf, form):
        """Cast. And more."""

    found = declared("cast")
    assert found.name == "build_tools.cast"
    assert found.family == "build_tools"
    assert found.doc == "Cast."
    assert [found.variant_id(config) for config in found.configs()] == [
        "b1_npc16_no_round_sf_fast",
        "b1_npc16_no_round_sf_general",
        "b1_npc32_no_round_sf_fast",
        "b1_npc32_no_round_sf_general",
        "b2_npc16_no_round_sf_fast",
        "b2_npc16_no_round_sf_general",
        "b2_npc16_round_sf_fast",
        "b2_npc16_round_sf_general",
        "b2_npc32_no_round_sf_fast",
        "b2_npc32_no_round_sf_general",
        "b2_npc32_round_sf_fast",
        "b2_npc32_round_sf_general",
    ]


def test_kernel_without_axes_has_one_variant() -> None:
    @kernel()
    def plain():
        """Do."""

    assert [declared("plain").variant_id(config) for config in declared("plain").configs()] == ["only"]
    assert declared("plain").archs == ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


def test_the_decorated_function_stays_callable() -> None:
    @kernel(axes=grid(size=(1, 2)))
    def double(size):
        """Double."""
        return 2 * size

    assert double(size=4) == 8


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: grid(size=()), "axis size has no values"),
        (lambda: grid(size=(1, "a")), "axis size: values must all be ints, all strings or all bools, got (1, 'a')"),
        (lambda: grid(size=(1, True)), "axis size: values must all be ints"),
        (lambda: grid(size=(1.5,)), "axis size: values must all be ints"),
        (lambda: grid(size=(2, 2)), "axis size: a value stands twice in (2, 2)"),
        (lambda: grid(mode=("a-b",)), "axis mode: 'a-b' cannot be part of a symbol; use letters, digits and _"),
        (lambda: grid(size=(-1,)), "axis size: -1 cannot be part of a symbol"),
        (lambda: dtype_of("x", half="fp16"), "dtype_of('x'): half='fp16' is no dtype; known: bool, uint8"),
        (lambda: declare.arch(), "arch() was called while no kernel is traced"),
    ],
)
def test_refused_axes(make, problem: str) -> None:
    with pytest.raises(DeclarationError) as error:
        make()
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"axes": grid(other=(1,))}, "the function takes (size), its axes are (other)"),
        ({"where": lambda width: True}, "where reads width, which is no axis; axes: size"),
        ({"archs": ("sm_70",)}, "unknown arch sm_70; known: sm_80, sm_89"),
        ({"pass_configs": {"tl.x": 1.5}}, "pass_configs takes texts such as"),
        ({"pass_configs": {3: True}}, "pass_configs takes texts such as"),
        ({"accepts": {"x": ("half",)}}, "accepts: 'half' of x is no dtype"),
        ({"axes": grid(size=forms("a", "b"), more=forms("c"))}, "the function takes (size), its axes are (size, more)"),
    ],
)
def test_refused_kernels(options, problem: str) -> None:
    with pytest.raises(DeclarationError) as error:

        @kernel(**{"axes": grid(size=(1, 2)), **options})
        def wrong(size):
            """Do."""

    assert str(error.value).startswith("build_tools.wrong: ")
    assert problem in str(error.value)
    assert "build_tools.wrong" not in declare.KERNELS


def test_two_form_axes_are_refused() -> None:
    with pytest.raises(DeclarationError, match="has two forms"):

        @kernel(axes=grid(first=forms("a"), second=forms("b")))
        def wrong(first, second):
            """Do."""


def test_a_docstring_is_needed() -> None:
    with pytest.raises(DeclarationError, match="needs a docstring"):

        @kernel()
        def silent():
            pass


def test_a_name_is_declared_once() -> None:
    @kernel()
    def twice():
        """Do."""

    with pytest.raises(DeclarationError, match=r"build_tools\.twice: declared twice in .*test_declare\.py"):

        @kernel()
        def twice():
            """Do."""


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("sm_80", set()),
        ("sm_89", {"fp8"}),
        ("sm_90a", {"fp8", "tma", "cluster", "pdl", "wgmma"}),
        ("sm_100a", {"fp8", "fp4", "tma", "cluster", "pdl", "tcgen05"}),
        ("sm_103a", {"fp8", "fp4", "tma", "cluster", "pdl", "tcgen05"}),
        ("sm_120a", {"fp8", "fp4", "tma", "cluster", "pdl"}),
    ],
)
def test_arch_while_tracing(name: str, has: set[str]) -> None:
    with declare.tracing_for(name):
        arch = declare.arch()
    features = ("fp8", "fp4", "tma", "cluster", "pdl", "wgmma", "tcgen05")
    assert arch.name == name
    assert {feature for feature in features if getattr(arch, f"has_{feature}")} == has
    assert arch.smem_per_block == {"sm_80": 163, "sm_89": 99, "sm_120a": 99}.get(name, 227) * 1024
    with pytest.raises(DeclarationError):
        declare.arch()

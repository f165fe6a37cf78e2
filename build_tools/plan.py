"""First stage: profile -> the variants to build. Needs no TileLang.

A variant is a kernel with its axes fixed, for one GPU architecture. `trace_key` names what its trace depends on, so
that a build finds in a second that nothing changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels_src.declare import AxisValue, Kernel

from .errors import PlanError
from .kernel_files import KERNELS_ROOT, load_kernels
from .profile import Profile, check_archs, load_profile
from .trace_key import trace_key

__all__ = ["Kernel", "Profile", "Variant", "load_kernels", "load_profile", "plan", "plan_left_out", "trace_key"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """What one trace makes. Plain data that travels to worker processes; `position` is the config's in the grid."""

    kernel: str
    config: tuple[tuple[str, AxisValue], ...]
    arch: str
    id: str
    symbol: str
    family: str
    file: Path
    root: Path
    position: int
    pass_configs: tuple[tuple[str, AxisValue], ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """The kernel's name within its family."""
        return self.kernel.split(".")[1]

    def describe(self) -> str:
        """For messages: `quant.per_token_cast {fmt: e4m3, form: aligned} sm_90a`."""
        return f"{self.kernel} {{{', '.join(f'{axis}: {value}' for axis, value in self.config)}}} {self.arch}"


def plan(profile: Profile, archs: tuple[str, ...] | list[str] | None = None, root: Path | None = None) -> list[Variant]:
    """All variants of a profile, sorted by kernel, arch and position in the grid.

    archs   instead of the profile's
    root    the folder of families, kernels_src of this tree by default
    """
    root = (root or KERNELS_ROOT).resolve()
    chosen = tuple(archs) if archs else profile.archs
    check_archs(chosen)
    kernels = load_kernels(root)
    profile.check_against(kernels)
    variants = []
    for kernel in kernels.values():
        if profile.selects(kernel.name):
            variants += _variants(kernel, profile, sorted(set(chosen)), root)
    return variants


def plan_left_out(planned: Sequence[Variant], root: Path | None = None) -> list[Variant]:
    """One variant for each combination of axis values that a planned kernel declares and the plan does not have, of
    whatever form. They are not built; their parameters have places in calls all the same."""
    kernels = load_kernels((root or KERNELS_ROOT).resolve())
    by_kernel: dict[str, list[Variant]] = {}
    for variant in planned:
        by_kernel.setdefault(variant.kernel, []).append(variant)
    left_out = []
    for name, variants in sorted(by_kernel.items()):
        kernel = kernels[name]
        forms = {axis.name for axis in kernel.axes if axis.kind == "forms"}

        def key_of(config: Iterable[tuple[str, AxisValue]], forms: set[str] = forms) -> tuple[Any, ...]:
            return tuple(pair for pair in config if pair[0] not in forms)

        built = {key_of(variant.config) for variant in variants}
        missing = {
            key_of(config.items()): (position, config)
            for position, config in enumerate(kernel.configs())
            if key_of(config.items()) not in built
        }
        left_out += [
            dataclasses.replace(
                variants[0], config=tuple(config.items()), id=kernel.variant_id(config), position=position, symbol=""
            )
            for position, config in missing.values()
        ]
    return left_out


def _variants(kernel: Kernel, profile: Profile, archs: list[str], root: Path) -> list[Variant]:
    configs = profile.configs(kernel)
    if not configs:
        raise profile.error(kernel.name, "leaves no config; keep more values or exclude the kernel under [operators]")
    variants = []
    for arch in archs:
        by_id: dict[str, dict[str, AxisValue]] = {}
        for position, config in configs if arch in kernel.archs else []:
            variant_id = kernel.variant_id(config)
            if variant_id in by_id:
                raise PlanError(
                    f"{kernel.file}: {kernel.name}: {by_id[variant_id]} and {config} are both {variant_id!r}: "
                    "rename an axis"
                )
            by_id[variant_id] = config
            variants.append(
                Variant(
                    kernel=kernel.name,
                    config=tuple(config.items()),
                    arch=arch,
                    id=variant_id,
                    symbol=f"tk_{kernel.name.replace('.', '_')}__{variant_id}",
                    family=kernel.family,
                    file=kernel.file,
                    root=root,
                    position=position,
                    pass_configs=tuple(sorted(kernel.pass_configs.items())),
                    flags=kernel.flags,
                )
            )
    return variants

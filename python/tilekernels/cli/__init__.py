"""The command `tilekernels`: what this install holds, whether it fits the machine, where its C++ files lie.

Needs no GPU, compiler, network, writable folder or torch, `bench` apart. click and rich are imported here and nowhere
else.
"""

import importlib.resources

import click

from ..errors import ArgumentError, NotBuiltError
from ._version import find_version
from .bench import bench_command
from .covers import covers_command
from .diff import diff_command
from .doctor import doctor_command
from .list import list_command
from .verify import verify_command

__all__ = ["main"]

# Where a C++ build finds its files, relative to the package; the same paths are in CMakeLists.txt.
_FOLDERS = {"include-dir": "include", "lib-dir": "lib", "cmake-dir": "lib/cmake/tilekernels"}


class _Group(click.Group):
    """Shows the package's own errors as one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (ArgumentError, NotBuiltError) as error:
            raise click.ClickException(str(error)) from error


def _print_folder(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given:
        name = (option.name or "").replace("_", "-")
        click.echo(importlib.resources.files("tilekernels").joinpath(_FOLDERS[name]))
        ctx.exit()


def _folder_option(name: str, what: str) -> click.Option:
    return click.Option(
        [f"--{name}"], is_flag=True, is_eager=True, expose_value=False, callback=_print_folder, help=f"Print {what}."
    )


main = _Group(
    "tilekernels",
    help="Compiled GPU kernels: what this install holds and whether it fits this machine.",
    commands=[list_command, covers_command, doctor_command, verify_command, diff_command, bench_command],
    params=[
        _folder_option("include-dir", "the folder for a C++ compiler's -I"),
        _folder_option("lib-dir", "the folder of libtilekernels.so.0"),
        _folder_option("cmake-dir", "the folder for CMake's tilekernels_DIR"),
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
click.version_option(find_version(), prog_name="tilekernels")(main)

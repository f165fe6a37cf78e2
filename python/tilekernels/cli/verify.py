"""`tilekernels verify`: whether every file, and the machine code of every kernel, is what the build made."""

from pathlib import Path

import click

from ._package import LIBRARY, Package, find_blobs, find_damage, open_installed, open_wheel

__all__ = ["verify_command"]


@click.command("verify")
@click.argument("wheel", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def verify_command(wheel: Path | None) -> None:
    """Hash every file of this install, or of WHEEL, and the machine code of every kernel in its library.

    Compares with the RECORD of the wheel and with manifest.json. Finds a flipped bit, a truncated file, and a library
    that does not belong to its manifest. Loads nothing. Exit status 1 if something differs.
    """
    package = open_wheel(wheel) if wheel else open_installed()
    damage = find_damage(package) + _check_kernels(package)
    for sentence in damage:
        click.echo(sentence)
    if damage:
        click.echo(f"{package.name}: damaged ({len(damage)} findings): install the wheel again, from a fresh copy")
        raise click.exceptions.Exit(1)
    hashed = sum(digest is not None for digest in package.recorded.values())
    if not hashed:
        raise click.ClickException(f"{package.name}: its RECORD names no hashes, so that nothing can be compared")
    click.echo(f"{package.name}: good: {hashed} files, {len(package.manifest()['units'])} units of machine code")


def _check_kernels(package: Package) -> list[str]:
    library = package.read(LIBRARY)
    if library is None:
        return [f"{LIBRARY} is missing or cannot be read"]
    missing = find_blobs(library, package.manifest()["units"])
    return [f"{unit}: its machine code in {LIBRARY} is not what manifest.json says" for unit in missing]

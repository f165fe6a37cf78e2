"""`tilekernels covers`: whether this build holds a kernel for given axis values; exit status 1 if it does not."""

import click

from .._manifest import Manifest, caller_axes, find_kernel, find_variants, load_manifest

__all__ = ["covers_command"]


@click.command("covers")
@click.argument("kernel")
@click.argument("axes", nargs=-1, metavar="[AXIS=VALUE]...")
@click.option("--arch", help="Only this GPU architecture, such as sm_90a.")
def covers_command(kernel: str, axes: tuple[str, ...], arch: str | None) -> None:
    """Say whether KERNEL was compiled for these axis values (`tilekernels list` shows them).

    \b
    tilekernels covers quant.per_token_cast kind=bf16 fmt=e4m3 --arch sm_90a
    """
    wanted = dict(_split(text) for text in axes)
    manifest = load_manifest()
    variants = find_variants(manifest, kernel, wanted, arch)
    asked = " ".join([kernel, *axes, *([f"on {arch}"] if arch else [])])
    if not variants:
        click.echo(f"no: this build holds no {asked}; {_describe_built(manifest, kernel)}")
        raise click.exceptions.Exit(1)
    archs = sorted({variant["arch"] for variant in variants})
    click.echo(f"yes: {asked}: {len(variants)} variants on {', '.join(archs)}")


def _describe_built(manifest: Manifest, name: str) -> str:
    kernel = find_kernel(manifest, name)
    if kernel is None:
        return f"its kernels are {', '.join(entry['name'] for entry in manifest['kernels'])}"
    axes = [f"{axis['name']}={'|'.join(map(str, axis['values']))}" for axis in caller_axes(kernel)]
    archs = sorted({variant["arch"] for variant in manifest["variants"] if variant["kernel"] == name})
    return f"{name} was compiled for {' '.join([*axes, 'on', '|'.join(archs)])}"


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"axes are given as AXIS=VALUE, got {text!r}", param_hint="AXIS=VALUE")
    return name, value

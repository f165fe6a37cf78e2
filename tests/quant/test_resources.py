"""What the installed package says of the family's machine code: few variants, and no registers spilled to memory."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

MOST_VARIANTS = 300  # of one architecture, general forms left out


@pytest.fixture
def variants(needs_extension: None) -> list[dict[str, Any]]:
    manifest = json.loads(files("tilekernels").joinpath("manifest.json").read_text())
    found = [variant for variant in manifest["variants"] if variant["kernel"].startswith("quant.")]
    if not found:
        pytest.skip("this package has none of the family's kernels")
    return found


def test_there_are_few_variants(variants: list[dict[str, Any]]) -> None:
    for arch in {variant["arch"] for variant in variants}:
        fast = [
            variant["variant"]
            for variant in variants
            if variant["arch"] == arch and "general" not in variant["config"].get("form", "")
        ]
        assert len(fast) <= MOST_VARIANTS


def test_nothing_spills(variants: list[dict[str, Any]]) -> None:
    spilling = {
        f"{variant['kernel']}/{variant['variant']}": launch["spill_bytes"]
        for variant in variants
        if variant["arch"] == "sm_90a"
        for launch in variant["launches"]
        if launch["spill_bytes"]
    }
    assert not spilling

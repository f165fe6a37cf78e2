"""Overlay packs: variants that the library lacks come from another file, with the same checks; and what is recorded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from build_tools.profile import load_profile, tomllib
from tests.csrc.conftest import BUILD, HERE, ROOT, locked, run, write_store
from tests.csrc.steps import Runtime, Step, call, check, sync, tensor, topk, transpose

# The pack's tables are those of the library, but: of demo.transpose it has element size 1 alone, and demo.sync has
# another name there, so that it is a kernel that only the pack has.
CHANGES = (
    ("KeyDesc kKeys[] = {{0, 0, 0}, {0, 3, 0}, {3, 1, 0}};", "KeyDesc kKeys[] = {{3, 1, 0}, {}, {}};"),
    ('{"b4_general", kSm90a, 2,', '{"b1_general", kSm90a, 0,'),
    ('"demo.sync"', '"demo.zync"'),
    ("{&cast::kKernel, &sync::kKernel, &topk::kKernel, &transpose::kKernel}",
     "{&cast::kKernel, &topk::kKernel, &transpose::kKernel, &sync::kKernel}"),
)  # fmt: skip
BYTES = transpose(4, 8, dtype="uint8")  # not in the library


@pytest.fixture(scope="session")
def pack(tools: dict[str, str]) -> Path:
    """Built as `make pack` builds it."""
    return build_pack("csrc-pack", CHANGES, tools)


@pytest.fixture(scope="session")
def foreign_pack(tools: dict[str, str]) -> Path:
    """A parameter has another name, as after an edit of the kernel."""
    return build_pack("csrc-pack-foreign", (('{"scores", true', '{"logits", true'),), tools)


def build_pack(name: str, changes: tuple[tuple[str, str], ...], tools: dict[str, str]) -> Path:
    folder = BUILD.with_name(f"{BUILD.name}-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        store, tree = folder / "store", folder / "cmake"
        write_store(store)
        text = (HERE / "hand_tables.cpp").read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        tables = store / "gen" / "hand_tables.cpp"
        tables.write_text(text)
        options = [f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF", "-DTILEKERNELS_PACK=ON"]
        run(["cmake", "-S", ROOT, "-B", tree, *options], tools)
        run(["cmake", "--build", tree, "--parallel", "2", "--target", "tilekernels"], tools)
        shutil.copyfile(tree / "csrc" / "libtilekernels.so.0", folder / f"{name}.so")
    return folder / f"{name}.so"


def load(path: Path) -> Step:
    return {"do": "load_pack", "path": str(path)}


ENTER: Step = {"do": "enter", "device": 0}


# ---- packs -----------------------------------------------------------------------------------------------------------


def test_a_variant_that_the_library_lacks_comes_from_the_pack(runtime: Runtime, pack: Path) -> None:
    result = runtime.run(ENTER, BYTES, load(pack), BYTES, transpose(4, 8))
    assert result.statuses == ["TK_OK", "TK_NOT_BUILT", "TK_OK", "TK_OK", "TK_OK"]
    assert [launch["name"] for launch in result.launches] == [
        "tk_demo_transpose__b4_general",  # the pack's
        "tk_demo_transpose__b2_aligned",  # the library's own
    ]


def test_a_kernel_that_only_the_pack_has(runtime: Runtime, pack: Path) -> None:
    step = sync(8) | {"kernel": "demo.zync"}
    result = runtime.run(ENTER, {"do": "find", "name": "demo.zync"}, load(pack), step, {"do": "kernels"})
    assert result.statuses[:2] == ["TK_OK", "TK_NOT_BUILT"]
    assert result.answers[3]["status"] == "TK_OK"
    assert [launch["name"] for launch in result.launches] == ["tk_demo_sync__n16"]
    assert result.answers[4] == [
        "demo.cast", "demo.sync", "demo.topk", "demo.transpose", "demo.zync",
    ]  # fmt: skip


def test_the_pack_makes_the_same_checks(runtime: Runtime, pack: Path) -> None:
    wrong = call("demo.transpose", tensor("uint8", 4, 8), tensor("uint8", 4, 8, data=0x20000))
    result = runtime.run(ENTER, load(pack), wrong, check("demo.transpose", tensor("uint8", 4, 8), None))
    assert result.answers[2]["status"] == "TK_INVALID_ARGUMENT"
    assert result.answers[2]["message"].startswith("demo.transpose: out must have shape (num_cols, num_rows) = (8, 4)")
    assert result.answers[3]["status"] == "TK_OK"
    assert result.launches == []


def test_what_nobody_has_is_said(runtime: Runtime, pack: Path) -> None:
    result = runtime.run(ENTER, load(pack), topk(axes=(1, 0)))
    status, message = result.last
    assert status == "TK_NOT_BUILT"
    assert message.startswith("demo.topk: not built for scoring=sigmoid, with_bias=no_bias; built: ")
    assert message.endswith("; nor is it in the 1 packs that are loaded")


@pytest.mark.parametrize("place", ["file", "folder"])
def test_packs_of_the_environment(
    runtime: Runtime, pack: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(pack, tmp_path / "mine.so")
    (tmp_path / "notes.txt").write_text("no pack")
    monkeypatch.setenv("TILEKERNELS_PACK_PATH", str(tmp_path if place == "folder" else tmp_path / "mine.so"))
    result = runtime.run(
        ENTER, BYTES, {"do": "packs"}, {"do": "covers", "kernel": "demo.transpose", "labels": [0], "arch": None}
    )
    assert result.answers[1]["status"] == "TK_OK"
    assert result.answers[2] == [str(tmp_path / "mine.so")]
    assert result.answers[3] == 1


def test_preload_loads_packs_too(runtime: Runtime, pack: Path) -> None:
    result = runtime.run(load(pack), {"do": "preload", "names": None, "device": 0}, ENTER, BYTES)
    assert result.statuses == ["TK_OK"] * 4
    after = result.records[[record["call"] for record in result.records].index("cuLaunchKernelEx") :]
    assert [record["call"] for record in after if record["call"] == "cuLibraryLoadData"] == []


def test_a_pack_of_other_sources_is_refused(
    runtime: Runtime, foreign_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"pack {foreign_pack}: its parameters or axes are not those of this library; build both from one source: "
    words += "demo.topk"
    assert runtime.run(load(foreign_pack)).last == ("TK_INVALID_ARGUMENT", words)
    monkeypatch.setenv("TILEKERNELS_PACK_PATH", str(foreign_pack))
    assert runtime.run(ENTER, BYTES).last[1].endswith(f"; not loaded: {words}")


@pytest.mark.parametrize("kind", ["missing", "text", "library", "itself"])
def test_what_is_no_pack_is_refused(runtime: Runtime, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.so"
    if kind == "text":
        path.write_text("no library")
    if kind == "library":
        path = runtime.driver_folder / "libcuda.so.1"
    if kind == "itself":
        path = runtime.library
    status, message = runtime.run(load(path), driver=False).last
    assert status == "TK_INVALID_ARGUMENT"
    assert message.startswith(f"pack {path}: ")
    expected = {
        "missing": "No such file",
        "text": "",
        "library": "it has no tk_last_error",
        "itself": "it has no tk_is_pack",
    }
    assert expected[kind] in message


# ---- TILEKERNELS_RECORD ----------------------------------------------------------------------------------------------


def read_record(file: Path) -> dict[str, Any]:
    """The content, after the builder has taken it as a profile."""
    profile = load_profile(file)
    content: dict[str, Any] = tomllib.loads(file.read_text())
    assert profile.archs == tuple(content["archs"])
    assert {name: dict(axes) for name, axes in profile.narrowed.items()} == {
        name: {axis: tuple(values) for axis, values in axes.items()} for name, axes in content.items() if "." in name
    }
    return content


def test_misses_and_general_forms_are_recorded_as_a_profile(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recorded.toml"
    monkeypatch.setenv("TILEKERNELS_RECORD", str(file))
    general = transpose(4, 7, stride=7)
    runtime.run(ENTER, BYTES, general, transpose(4, 8), topk(axes=(1, 0)), topk(axes=(0, 1)), BYTES)
    assert read_record(file) == {
        "archs": ["sm_90a"],
        "operators": {"include": ["demo.transpose", "demo.topk"]},
        "demo.transpose": {"itemsize": [1, 2]},
        "demo.topk": {"scoring": ["sigmoid", "softmax"], "with_bias": [False, True]},
    }
    # another process adds to it
    runtime.run(ENTER, {"do": "find", "name": "demo.other"}, check("demo.cast", tensor("float32", 6, 8), None, None))
    recorded = read_record(file)
    assert recorded["operators"]["include"] == ["demo.transpose", "demo.topk", "demo.other", "demo.cast"]
    assert recorded["demo.cast"] == {"input": ["fp32"]}
    assert recorded["demo.transpose"] == {"itemsize": [1, 2]}


def test_another_gpu_is_recorded_by_its_arch(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recorded.toml"
    monkeypatch.setenv("TILEKERNELS_RECORD", str(file))
    runtime.run(ENTER, sync(8), devices="10.0")
    assert read_record(file)["archs"] == ["sm_100a"]


def test_nothing_is_recorded_where_all_is_well_or_nobody_asked(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEKERNELS_RECORD", str(tmp_path / "recorded.toml"))
    runtime.run(ENTER, transpose(4, 8))
    monkeypatch.delenv("TILEKERNELS_RECORD")
    runtime.run(ENTER, BYTES)
    assert not (tmp_path / "recorded.toml").exists()


def test_a_record_that_cannot_be_written_changes_no_call(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEKERNELS_RECORD", str(tmp_path / "no" / "folder" / "recorded.toml"))
    result = runtime.run(ENTER, BYTES, transpose(4, 7, stride=7))
    assert result.statuses == ["TK_OK", "TK_NOT_BUILT", "TK_OK"]

"""The cache of compiled CUDA kernels: where it is, who may write it, and that damaged files are compiled again."""

import ctypes
import os
import stat
import types
from pathlib import Path

import pytest

from egru.kernels.cuda import cache, driver

CODE = b"machine code" * 100


@pytest.fixture(autouse=True)
def private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Run in an empty folder, with a cache in another one."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EGRU_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace NVRTC. The list receives the sources that are compiled."""
    sources: list[str] = []

    def compile_source(nvrtc: ctypes.CDLL, source: str, options: tuple[str, ...]) -> bytes:
        sources.append(source)
        return CODE

    monkeypatch.setattr(driver, "_nvrtc", lambda: types.SimpleNamespace(nvrtcVersion=lambda *_: 0))
    monkeypatch.setattr(driver, "_compile", compile_source)
    return sources


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "xdg/egru/cuda"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/egru/cuda"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/egru/cuda"),
        ({"XDG_CACHE_HOME": None}, "home/.cache/egru/cuda"),
        ({"EGRU_CACHE_DIR": ""}, "xdg/egru/cuda"),
        ({"EGRU_CACHE_DIR": "~/kernels"}, "home/kernels/cuda"),
        ({"EGRU_CACHE_DIR": "kernels"}, "work/kernels/cuda"),
    ],
)
def test_cache_folder_follows_the_environment(
    variables: dict[str, str | None], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    assert cache.cache_folder() == tmp_path / folder


def test_empty_cache_home_leaves_the_working_directory_empty(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    driver.compile_source("a", ())
    assert list(Path().iterdir()) == []
    assert len(list((tmp_path / "home" / ".cache" / "egru" / "cuda").iterdir())) == 1


def test_kernels_are_compiled_once_per_source_and_options(compilations: list[str]) -> None:
    for _ in range(2):
        assert driver.compile_source("a", ()) == CODE
        assert driver.compile_source("b", ()) == CODE
        assert driver.compile_source("b", ("--option",)) == CODE
    assert compilations == ["a", "b", "b"]


def test_folder_is_private(compilations: list[str]) -> None:
    driver.compile_source("a", ())
    assert stat.S_IMODE(cache.cache_folder().stat().st_mode) == 0o700
    cache.cache_folder().chmod(0o777)
    driver.compile_source("a", ())
    assert stat.S_IMODE(cache.cache_folder().stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "another kernel's", "without checksum"])
def test_damaged_files_are_compiled_again(damage: str, compilations: list[str]) -> None:
    driver.compile_source("a", ())
    (path,) = cache.cache_folder().iterdir()
    content = path.read_bytes()
    if damage == "another kernel's":
        driver.compile_source("b", ())
        (other,) = set(cache.cache_folder().iterdir()) - {path}
        content = other.read_bytes()
    else:
        changed = {
            "truncated": content[:-7],
            "empty": b"",
            "changed": content[:-1] + b"!",
            "without checksum": CODE,
        }
        content = changed[damage]
    path.write_bytes(content)
    compilations.clear()
    assert driver.compile_source("a", ()) == CODE
    assert driver.compile_source("a", ()) == CODE
    assert compilations == ["a"]


def test_folder_of_another_user_is_not_used(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver.compile_source("a", ())
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    for _ in range(2):
        cache._warn.cache_clear()  # pyright: ignore[reportPrivateUsage]
        with pytest.warns(RuntimeWarning, match="not cached: .* belongs to another user; set EGRU_CACHE_DIR"):
            assert driver.compile_source("a", ()) == CODE
    assert compilations == ["a"] * 3


def test_interrupted_write_leaves_no_file(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    cache._warn.cache_clear()  # pyright: ignore[reportPrivateUsage]
    with pytest.warns(RuntimeWarning, match="not cached: .*No space left"):
        driver.compile_source("a", ())
    assert list(cache.cache_folder().iterdir()) == []

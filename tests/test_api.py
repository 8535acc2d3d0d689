"""Pin the public API: names, signatures, version, and what ``import egru`` loads.

``EGRU_WRITE_API=1 pytest tests/test_api.py`` rewrites the file. Note the change in CHANGELOG.md.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import egru

ROOT = Path(__file__).parent.parent
STORED = Path(__file__).with_name("api.txt")
MODULES = (
    "egru",
    "egru.activity",
    "egru.compress",
    "egru.continuous",
    "egru.data",
    "egru.energy",
    "egru.experiments",
    "egru.functional",
    "egru.kernels",
    "egru.layers",
    "egru.models",
    "egru.report",
    "egru.runs",
    "egru.runtime",
    "egru.sweep",
    "egru.training",
)


def describe(name: str, value: object) -> Iterator[str]:
    """Yield one line per public name: functions with their signatures, classes with their public methods."""
    if inspect.ismodule(value):
        yield f"module {name}"
    elif inspect.isclass(value):
        yield f"class {name}{_signature(value)}"
        for member, function in sorted(_members(value).items()):
            if not member.startswith("_") and (callable(function) or isinstance(function, classmethod | staticmethod)):
                yield f"    {name}.{member}{_signature(getattr(value, member))}"
    elif callable(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield f"value {name}"


def _members(value: type) -> dict[str, object]:
    """Return the attributes of a class, which may be divided: ``engine.py`` has bases in ``engine_state.py``."""
    bases = [base for base in value.__mro__[:0:-1] if base.__module__.startswith(f"{value.__module__}_")]
    return {name: member for base in (*bases, value) for name, member in vars(base).items()}


def _signature(value: object) -> str:
    """Return parameter names and defaults. Annotations are left out: their text depends on the Python version."""
    try:
        signature = inspect.signature(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return "(...)"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def public_api() -> str:
    lines: list[str] = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module_name
        ]
        for name in sorted(names):
            lines += describe(f"{module_name}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def test_public_api_is_as_stored() -> None:
    current = public_api()
    if os.environ.get("EGRU_WRITE_API"):
        STORED.write_text(current)
    assert current == STORED.read_text()


def test_every_public_name_has_a_docstring() -> None:
    undocumented = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if callable(value) and not inspect.getdoc(value):
                undocumented.append(f"{module_name}.{name}")
    assert not undocumented


def test_citation_names_the_current_version() -> None:
    assert f"version: {egru.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {egru.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_loads_only_layers_and_engine() -> None:
    code = "import sys, egru; print(*sorted(m for m in sys.modules if m.startswith('egru.')))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    packages = {name.split(".")[1] for name in output.split()}
    lazy = {
        "bench",
        "cli",
        "compress",
        "continuous",
        "data",
        "experiments",
        "models",
        "report",
        "runs",
        "sweep",
        "training",
    }
    assert not packages & lazy


def test_submodules_are_imported_on_first_use() -> None:
    code = "import egru; print(egru.training.__name__, egru.pretrained.__name__, egru.kernels.info.__name__)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["egru.training", "pretrained", "info"]


def test_import_registers_the_operator_that_exported_programs_use() -> None:
    code = "import egru, torch; print(torch.ops.egru.sequence)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "egru.sequence" in output


def test_every_public_name_can_be_imported_in_the_command() -> None:
    """The command imports the package without torch; its names are loaded at first use."""
    code = f"""if True:
        import sys
        sys.argv[0] = "/usr/bin/egru"
        import egru
        assert "torch" not in sys.modules
        assert set(dir(egru)) >= set(egru.__all__)
        assert [name for name in egru.__all__ if getattr(egru, name) is None] == []
        from egru import {", ".join(egru.__all__)}
    """
    subprocess.run([sys.executable, "-c", code], check=True)

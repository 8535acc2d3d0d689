"""Sources of the core that are compiled once per instruction set."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTAINERS = {"algorithm", "array", "deque", "functional", "map", "memory", "numeric", "set", "unordered_map", "vector"}


def level_files() -> set[Path]:
    """Return the level sources of CMakeLists.txt and the headers of the core that they include."""
    listed = re.search(r"set\(level_sources(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)
    assert listed is not None
    files, waiting = set[Path](), [ROOT / "csrc" / name for name in re.findall(r"\$\{csrc\}/(\S+\.cpp)", listed[1])]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.add(file)
            waiting += [ROOT / "csrc" / name for name in re.findall(r'#include "(.*?)"', file.read_text())]
    return files


def test_level_sources_do_not_use_templates_of_the_standard_library():
    # The linker keeps one copy of an instance for all levels, which may need instructions that a processor lacks.
    files = level_files()
    assert len(files) > 30
    used = {file.name: CONTAINERS.intersection(re.findall(r"#include <(.*?)>", file.read_text())) for file in files}
    assert {name: headers for name, headers in used.items() if headers} == {}

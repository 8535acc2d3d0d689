import os

from tests.continuous.figures import CHECKS, REACHED


def pytest_terminal_summary(terminalreporter):
    if os.environ.get("EGRU_FIGURES") and REACHED:
        terminalreporter.section("largest error of each check")
        engines = sorted({engine for _, engine in REACHED})
        terminalreporter.write_line(f"{'':55}" + "".join(f"{name:>12}" for name in engines))
        for check, text in CHECKS.items():
            values = [REACHED.get((check, name)) for name in engines]
            cells = "".join(f"{'' if value is None else format(value, '.1e'):>12}" for value in values)
            terminalreporter.write_line(f"{check:3} {text:51}{cells}")

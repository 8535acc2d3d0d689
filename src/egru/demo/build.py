"""Build the page from the pretrained network and the files of this folder.

    python -m egru.demo.build          # requires clang and lld

The network is exported as C with int8 weights, compiled to WebAssembly and embedded. The page contains a checksum of
everything that it was built from.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from egru.demo import PAGE
from egru.files import replace_file
from egru.report.html import colour_variables
from egru.runs.load import find_run, pretrained
from egru.runtime import export_c
from egru.training import Run

FOLDER = Path(__file__).parent
SCRIPTS = ("digit.js", "network.js", "examples.js", "page.js")
SOURCES = ("page.html", "page.css", "wasm.c", *SCRIPTS)
COMPILE = ("--target=wasm32", "-std=c99", "-O3", "-ffreestanding", "-fno-builtin", "-nostdlib")
LINK = ("-Wl,--no-entry,--strip-all", "-Wl,-z,stack-size=65536")


def compile_network(folder: Path) -> bytes:
    """Export the pretrained network to ``folder`` and return it as a WebAssembly module.

    Raises:
        FileNotFoundError: If clang or its linker for WebAssembly is not installed.
    """
    for program in ("clang", "wasm-ld"):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"{program} is not installed: the page is compiled with clang and lld")
    export_c(pretrained("smnist"), folder, weights="int8")
    source = shutil.copy(FOLDER / "wasm.c", folder)
    module = folder / "network.wasm"
    subprocess.run(["clang", *COMPILE, f"-I{folder}", *LINK, "-o", str(module), source], check=True)
    return module.read_bytes()


def describe_network() -> dict[str, Any]:
    """Return the facts about the network that the page shows.

    "order" lists the units that are active on the test images, the most active ones first. "dense" is the number of
    multiply-accumulates per pixel if nothing is skipped.
    """
    result = Run.open(find_run(Path("smnist"))[0]).result()
    assert result is not None
    (layer,), (readout,) = result.activity.layers, result.activity.linears
    active = layer.active
    units = sorted((unit for unit in range(len(active)) if active[unit]), key=lambda unit: -active[unit])
    H = layer.hidden_size
    dense = 3 * H * (layer.input_size + H + 1) + H * readout.out_features  # the scores are computed at every pixel
    return {"units": H, "dense": dense, "order": units}


def checksum() -> str:
    """Return the SHA-256 of everything that the page is built from, except the compiler and the exporter."""
    digest = hashlib.sha256()
    weights = sorted(find_run(Path("smnist"))[0].glob("weights-*.safetensors"))
    for path in (*(FOLDER / name for name in SOURCES), *weights):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    digest.update(json.dumps([describe_network(), colour_variables()]).encode())
    return digest.hexdigest()


def build(module: bytes) -> str:
    """Return the page with a WebAssembly module."""
    text = {name: (FOLDER / name).read_text(encoding="utf-8") for name in SOURCES}
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'wasm-unsafe-eval'"
    network = json.dumps(describe_network(), separators=(",", ":"))
    code = "\n".join(text[name] for name in SCRIPTS)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="egru-sources" content="{checksum()}">\n'
        "<title>Draw a digit · egru</title>\n"
        f"<style>\n{colour_variables()}{text['page.css']}</style>\n</head>\n<body>\n<main>\n{text['page.html']}</main>\n"
        f'<script>\n(() => {{\n"use strict";\nconst NETWORK = {network};\n'
        f'const WASM = "{base64.b64encode(module).decode()}";\n{code}}})();\n</script>\n</body>\n</html>\n'
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        page = build(compile_network(Path(folder)))
    replace_file(PAGE, page.encode())
    print(f"written: {PAGE}, {len(page):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

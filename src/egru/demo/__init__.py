"""A page that reads drawn digits in the browser: the pretrained sMNIST network, exported as C, in WebAssembly."""

from pathlib import Path

PAGE = Path(__file__).with_name("digits.html")
"""The page, as it ships with the package. It is self-contained; :mod:`egru.demo.build` writes it."""

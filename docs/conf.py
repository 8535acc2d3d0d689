"""Settings of the documentation site. ``make docs`` builds it; ``EXECUTE=off make docs`` skips the notebooks."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "src")]

import egru  # noqa: E402

project = "egru"
author = "egru contributors"
copyright = "egru contributors"
release = version = egru.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "reference",
]
exclude_patterns = ["_extensions"]
html_theme = "furo"
html_title = "egru"
html_static_path = ["_static"]
html_extra_path = ["../src/egru/demo/digits.html"]
html_css_files = ["style.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# Notebooks are text files with code cells. They are executed during the build and must not fail.
nb_execution_mode = os.environ.get("EXECUTE", "force")
nb_execution_timeout = 600  # seconds per cell, for busy machines: a tutorial takes less than two minutes on two cores
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_number_source_lines = False

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Inputs"]
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

"""Sphinx settings of the documentation: `make docs` builds docs/ to build/site, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

import fedpick

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "fedpick"
author = "The fedpick authors"
copyright = author
version = release = fedpick.__version__

extensions = ["myst_nb", "sphinx_copybutton", "repository_pages", "api_pages", "policy_parts", "sequence_diagrams"]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_title = f"fedpick {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
highlight_language = "none"  # a block says what it is
smartquotes = False  # X'X is a product
python_maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"

# Headings are link targets, as on GitHub; `mermaid` fences are drawn by sequence_diagrams.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_fence_as_directive = ["mermaid"]

# Tutorials run during the build; an exception in a cell is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # a busy machine compiles slowly
nb_execution_show_tb = True
nb_merge_streams = True

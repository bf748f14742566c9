"""How Sphinx builds the documentation: `make docs`. Needs no network, no MPI, no GPU and no optional library."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from sphinx.ext.autodoc.mock import mock

import mpistrat

with mock(["torch", "jax", "optax", "keras", "tensorflow"]):  # their reference is built without them
    import mpistrat.jax
    import mpistrat.keras
    import mpistrat.torch

    for name in mpistrat.torch.__all__:  # whose modules are imported when they are used
        getattr(mpistrat.torch, name)

project = "mpistrat"
author = copyright = "mpistrat developers"
version = release = mpistrat.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx_copybutton", "sphinx_design"]
extensions += [
    "api",
    "attributes",
    "collapsed",
    "collective",
    "empty_columns",
    "long_names",
    "public_names",
]  # docs/_ext
extensions += ["repository_links", "site_pages"]
exclude_patterns = ["_build"]

# The button copies the commands of a console without their prompts and without what they print.
copybutton_prompt_text = "$ "
copybutton_copy_empty_lines = False

# Markdown, and notebooks with their saved outputs, which a test compares
nb_execution_mode = "off"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# The docstrings: Google style, types from the annotations, `single backticks` become links where they name something.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", "(?s).*"),
    (r"py:\w+", r"(?!mpistrat).*"),
]  # other libraries: no network, no inventories
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}  # not the union that it stands for
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

# The pages
smartquotes_action = "q"  # quotation marks only: two dashes begin an option
html_theme = "furo"
html_title = f"mpistrat {version}"
html_static_path = ["_static"]
html_css_files = ["mpistrat.css"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(Path(__file__).parent / "_ext" / "search_order.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2a5d2a", "color-brand-content": "#1f6f43"},
    "dark_css_variables": {"color-brand-primary": "#7cc492", "color-brand-content": "#7cc492"},
}
pygments_style = "default"  # its comments and output have enough contrast
pygments_dark_style = "monokai"

"""How the documentation is built: `sphinx-build -W docs site`; every tutorial is executed."""

import importlib.metadata
import os
import tempfile
import zlib
from pathlib import Path

project, author, copyright = "proxvi", "The proxvi developers", "The proxvi developers"  # noqa: A001, Sphinx's name
release = version = importlib.metadata.version("proxvi")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # MathJax in the site itself: no other host is asked
    "sphinx_design",
]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 1200  # seconds a cell, which shares the machine with the tests
nb_execution_raise_on_error = True
nb_merge_streams = True
os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # progress bars are switched off in the tutorials
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
default_role = "code"  # in docstrings a name in backticks is code
html_theme = "furo"
html_title = f"proxvi {release}"

# Where other libraries document what our pages name. The lists are kept here, so that the build needs no network.
INVENTORIES = {
    "numpyro": "https://num.pyro.ai/en/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "jax": "https://docs.jax.dev/en/latest/",
    "python": "https://docs.python.org/3/",
}


def packed_inventory(name):
    """Pack a list of names as Sphinx reads it: four lines of a header, the rest compressed."""
    listed = Path(__file__).parent / "inventories" / f"{name}.txt"
    packed = Path(tempfile.mkdtemp()) / f"{name}.inv"
    header = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    header += "# The remainder of this file is compressed using zlib.\n"
    packed.write_bytes(header.encode() + zlib.compress(listed.read_bytes()))
    return str(packed)


intersphinx_mapping = {name: (url, packed_inventory(name)) for name, url in INVENTORIES.items()}


def equations_as_they_are(app, what, name, obj, options, lines):  # noqa: ARG001, Sphinx's arguments
    """An indented paragraph of a docstring's text is an equation: keep it as it is typed."""
    text, paragraph_before = [], ""
    for i, line in enumerate(lines):
        begins = line.startswith("    ") and i > 0 and not lines[i - 1]
        if begins and paragraph_before and not paragraph_before.startswith((" ", ".. ", ":")):
            text += ["::", ""]
        text.append(line)
        if line:
            paragraph_before = line
    lines[:] = text


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", equations_as_they_are, priority=400)  # before napoleon makes it a list

"""How the documentation is built: `sphinx-build -W docs site`; every tutorial is executed."""

import importlib.metadata
import os

project, author, copyright = "proxvi", "The proxvi developers", "The proxvi developers"  # noqa: A001, Sphinx's name
release = version = importlib.metadata.version("proxvi")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
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

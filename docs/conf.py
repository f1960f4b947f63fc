"""How Sphinx builds these pages: MyST Markdown, the furo theme.

    sphinx-build -W -b html docs docs/_build/html

`figures` runs the code of pages whose figures come out of it. Neither the build nor the pages need the network.
"""

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))  # where `figures` is

project = "hfppo"
release = installed_version("hfppo")
language = "en"
smartquotes = False  # critic='adapter' in a table is code

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "figures"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links may point at headings
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"  # by the browser itself: MathJax would come from a network

html_theme = "furo"
html_static_path = ["_static"]
html_extra_path = ["play.html"]
html_css_files = ["tables.css"]
html_title = f"hfppo {release}"
html_show_copyright = False
html_show_sphinx = False


def finish_page(app, page, template, context, doctree):
    """Name the language of Chinese pages, and let long names in code break after _, /, = and dots alone.

    The sidebar of a page lists the pages of its language.
    """
    chinese = page.startswith("zh/")
    if chinese:
        context["language"] = "zh-CN"
    if "furo_navigation_tree" in context:
        sections = re.split(r'(?=<p class="caption")', context["furo_navigation_tree"])
        listed = [section for section in sections if ("zh/" in section or 'href="#"' in section) == chinese]
        context["furo_navigation_tree"] = "".join(sections if not chinese else listed)
    if "body" in context:
        context["body"] = re.sub(
            r'(?<=<span class="pre">)[^<]{13,}',
            lambda name: re.sub(r"(?<=[\w}][_/.=])(?=[\w{])", "<wbr>", name[0]),
            context["body"],
        )


def show_math(translator, node):
    """Write a formula as MathML."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(show_math, None), block_renderers=(show_math, None))
    app.connect("html-page-context", finish_page, priority=900)  # after the theme

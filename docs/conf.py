"""How Sphinx builds these pages: MyST Markdown, the furo theme.

    sphinx-build -W -b html docs docs/_build/html

`figures` runs the code of pages whose figures come out of it. Neither the build nor the pages need the network.
"""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where `figures` is

project = "hfppo"
release = installed_version("hfppo")
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "figures"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links may point at headings

html_theme = "furo"
html_static_path = ["_static"]
html_extra_path = ["play.html"]
html_css_files = ["tables.css"]
html_title = f"hfppo {release}"
html_show_copyright = False
html_show_sphinx = False

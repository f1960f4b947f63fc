"""How Sphinx builds these pages: MyST Markdown, the furo theme.

sphinx-build -W -b html docs docs/_build/html
"""

from importlib.metadata import version as installed_version

project = "hfppo"
release = installed_version("hfppo")
language = "en"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links may point at headings

html_theme = "furo"
html_title = f"hfppo {release}"
html_show_copyright = False
html_show_sphinx = False

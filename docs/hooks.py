"""Hooks of MkDocs: files of the repository's root as pages of the site.

In the repository pages link to `../CONTRIBUTING.md`; here it lies beside them.
"""

import pathlib
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FETCHED = re.compile(r'<(?:script|link|img|iframe)[^>]*"(https?://[^"]*)"')


def on_files(files, config):
  """Adds the pages."""
  for source, page in PAGES.items():
    text = (ROOT / source).read_text().replace("](docs/", "](")
    for other, name in PAGES.items():
      text = text.replace(f"]({other}", f"]({name}")
    files.append(File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, page, config, files):
  """Points links at them."""
  up = "../" * page.file.src_uri.count("/")
  for source, name in PAGES.items():
    markdown = markdown.replace(f"](../{up}{source}", f"]({up}{name}")
  return markdown


def on_post_page(output, page, config):
  """Refuses what a reader would have to fetch from elsewhere."""
  found = FETCHED.findall(output)
  if found:
    raise PluginError(f"{page.file.src_uri} would fetch {found}")
  return output

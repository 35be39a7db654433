"""Hooks of MkDocs: files of the repository's root as pages of the site.

On other sites pages link to `../CONTRIBUTING.md`; here it lies beside them.
"""

import pathlib

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files, config):
  """Adds the pages."""
  for source, page in PAGES.items():
    text = (ROOT / source).read_text().replace("](docs/", "](")
    files.append(File.generated(config, page, content=text))
  return files


def on_page_markdown(markdown, page, config, files):
  """Points links at them."""
  up = "../" * page.file.src_uri.count("/")
  for source, name in PAGES.items():
    markdown = markdown.replace(f"](../{up}{source}", f"]({up}{name}")
  return markdown

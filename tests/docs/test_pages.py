"""Pages lead to each other, are on the site, and list what there is."""

import re

import pytest

import deltajax
from deltajax import routing
from deltajax.routing import VARIANTS
from tests.docs.pages import ON_THE_SITE, PAGES, ROOT, without_code

MKDOCS = (ROOT / "mkdocs.yml").read_text()


def headings(text):
  return re.findall(
    r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.S), re.M
  )


def anchors(text):
  """Of the headings of a page, where GitHub and the site agree on them."""
  on_github = [
    re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings(text)
  ]
  on_the_site = [
    re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", x).strip().lower())
    for x in headings(text)
  ]
  return set(on_github) & set(on_the_site)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
  path = PAGES[page]
  links = re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text()))
  for link in links:
    if link.startswith("https://"):
      continue
    target, _, anchor = link.partition("#")
    file = (path.parent / target).resolve() if target else path
    assert file.exists(), f"{page}: {link}"
    assert ROOT in file.parents, f"{page}: {link}"
    if anchor:
      assert anchor in anchors(file.read_text()), f"{page}: {link}"


@pytest.mark.parametrize("path", ON_THE_SITE, ids=lambda path: path.name)
def test_pages_of_the_site_link_to_pages_of_the_site(path):
  """The site has no other files of the repository."""
  also = {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}
  for link in re.findall(r"\]\(([^)#\s]+)", without_code(path.read_text())):
    if not link.startswith("https://"):
      file = (path.parent / link).resolve()
      assert ROOT / "docs" in file.parents or file in also, link


def test_every_page_is_in_the_navigation_once():
  named = re.findall(r"([\w/]+\.md)$", MKDOCS[MKDOCS.index("\nnav:") :], re.M)
  made = ["contributing.md", "changelog.md"]
  pages = [str(path.relative_to(ROOT / "docs")) for path in ON_THE_SITE]
  assert sorted(named) == sorted(pages + made)


def test_every_command_has_a_tutorial():
  modules = {
    path.stem
    for path in (ROOT / "train").glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text()
  }
  tutorials = {path.stem for path in (ROOT / "docs/tutorials").glob("*.md")}
  # train.compare alone starts it.
  assert tutorials - {"index"} == modules - {"compare_run"}
  table = PAGES["docs/tutorials/index.md"].read_text()
  for name in tutorials - {"index"}:
    assert f"[`train.{name}`]({name}.md)" in table


@pytest.mark.parametrize("page", ["README.md", "docs/concepts.md"])
def test_tables_list_every_variant_and_no_other(page):
  lines = PAGES[page].read_text().splitlines()
  start = next(i for i, x in enumerate(lines) if x.startswith("| `variant` |"))
  end = next(i for i, x in enumerate(lines[start:], start) if not x)
  named = [
    name
    for line in lines[start + 2 : end]
    for name in re.findall(r"`(\w+)`", line.split("|")[1])
  ]
  assert sorted(named) == sorted(VARIANTS)


def test_concepts_show_every_variant():
  shown = re.findall(
    r"\(schedules/(\w+)\.svg\)", PAGES["docs/concepts.md"].read_text()
  )
  assert sorted(shown) == sorted(VARIANTS)


def referenced(page):
  return re.findall(r"^::: ([\w.]+)$", PAGES[page].read_text(), re.M)


def test_the_reference_has_every_export():
  """Of `deltajax` and `deltajax.routing`, by their names."""
  exports = {
    name
    for module in (deltajax, routing)
    for name, value in vars(module).items()
    if not name.startswith("_") and not is_module(value)
  }
  names = [path.split(".")[-1] for path in referenced("docs/api.md")]
  assert sorted(names) == sorted(exports)


def is_module(value):
  return type(value) is type(re)

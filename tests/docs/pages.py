"""The pages: what people read in the repository, and on the site."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
ON_THE_SITE = sorted((ROOT / "docs").rglob("*.md"))
# Pages of the site too, by way of docs/hooks.py.
OF_THE_ROOT = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES = {
  str(path.relative_to(ROOT)): path
  for path in [ROOT / "README.md", *OF_THE_ROOT, *ON_THE_SITE]
}

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^\n((?: {4}.*\n+)+)", re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")


def without_code(text: str) -> str:
  """A page without its blocks of code, and without code in lines."""
  text = _INDENTED.sub("\n", _FENCE.sub("", text))
  return _INLINE.sub("", text)


def code(text: str) -> list[str]:
  """Blocks of code, and code in lines, with continued lines joined."""
  fenced = [block for _, _, block in _FENCE.findall(text)]
  rest = _FENCE.sub("", text)
  blocks = fenced + _INDENTED.findall(rest) + _INLINE.findall(rest)
  return [re.sub(r"\s*\\\n\s*", " ", block) for block in blocks]

"""The pages: what people read in the repository, and on the site."""

import importlib.util
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

# By its path: another package might be called `docs`.
_spec = importlib.util.spec_from_file_location(
  "make_schedules", ROOT / "docs/make_schedules.py"
)
make_schedules = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_schedules)
entry = make_schedules.entry

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

import numpy as np
import pytest

from deltajax.data.continuation import Continuation, continue_texts
from deltajax.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


def pieces(text, *, stop=(), most=1000):
  """What a continuation shows for each byte of a text."""
  row = Continuation(BYTES, stop, most)
  ids = [*BYTES.encode(text).tolist(), BYTES.eos_id, 65, 65]
  return [row.push(i) for i in ids], row.done


def test_a_text_is_shown_as_it_comes_and_ends_with_the_document():
  assert pieces("ab€c") == (["a", "b", "", "", "€", "c", "", "", ""], True)


@pytest.mark.parametrize(
  ("stop", "shown"),
  [
    (("\n\n",), "one\ntwo"),
    (("two", "one"), ""),
    (("x", "\nt"), "one"),
    (("never", "\n\n\n"), "one\ntwo\n\nthree"),
    (("three",), "one\ntwo\n\n"),
  ],
)
def test_stop_texts_are_not_shown(stop, shown):
  found, done = pieces("one\ntwo\n\nthree", stop=stop)
  assert "".join(found) == shown
  assert done


def test_the_beginning_of_a_stop_text_waits():
  found, _ = pieces("a\nb\n\n", stop=("\n\n",))
  assert found[:5] == ["a", "", "\nb", "", ""]


def test_a_text_ends_after_so_many_tokens():
  found, done = pieces("hello", most=3)
  assert "".join(found) == "hel"
  assert done
  # Half a character is shown for what it is, when nothing follows.
  assert "".join(pieces("a€", most=2)[0]) == "a\ufffd"


def test_rows_end_on_their_own():
  rows = [Continuation(BYTES, (), n) for n in (2, 4)]
  steps = (np.array([65, 66]) for _ in range(100))
  news = list(continue_texts(steps, rows))
  assert ["".join(x) for x in zip(*news, strict=True)] == ["AA", "BBBB"]
  assert len(news) == 4

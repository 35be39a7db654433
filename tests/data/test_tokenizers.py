"""A tokenizer loses nothing, and says which ids it cannot know."""

from hypothesis import given, strategies as st
import numpy as np
import pytest

from deltajax.data import tokenizers
from deltajax.routing.validation import ConfigError

TOKENIZER = tokenizers.get_tokenizer("bytes")


@given(st.text())
def test_round_trip(text):
  ids = TOKENIZER.encode(text)
  assert ids.dtype == np.int32
  assert TOKENIZER.decode(ids) == text
  # The denominator of bits per byte is the length of the text in UTF-8.
  assert TOKENIZER.bytes_per_token[ids].sum() == len(text.encode())


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_decode_takes_any_ids_and_skips_specials(ids):
  plain = bytes(i for i in ids if i < 256)
  assert TOKENIZER.decode(ids) == plain.decode("utf-8", errors="replace")


def test_special_ids_are_distinct_and_stand_for_no_bytes():
  specials = {TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id}
  assert specials == {256, 257, 258}
  assert TOKENIZER.bytes_per_token.shape == (TOKENIZER.vocab_size,)
  assert np.flatnonzero(TOKENIZER.bytes_per_token == 0).tolist() == [
    256,
    257,
    258,
  ]


def test_byte_tokenizer_satisfies_the_protocol():
  assert isinstance(TOKENIZER, tokenizers.Tokenizer)


def test_lone_surrogates_do_not_stop_a_run():
  assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize("bad", [-1, 259])
def test_ids_outside_the_vocabulary_raise(bad):
  with pytest.raises(ConfigError, match=f"token id {bad} .* 0 to 258"):
    TOKENIZER.decode([65, bad])


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=300))
def test_a_stream_of_any_ids_is_their_text(ids):
  streamed = tokenizers.TextStream(TOKENIZER)
  pieces = [streamed.push(i) for i in ids]
  assert "".join(pieces) + streamed.end() == TOKENIZER.decode(ids)


def test_a_stream_shows_characters_when_they_are_whole():
  streamed = tokenizers.TextStream(TOKENIZER)
  pieces = [streamed.push(int(i)) for i in TOKENIZER.encode("a€é" * 100)]
  assert pieces == ["a", "", "", "€", "", "é"] * 100
  assert streamed.end() == ""
  # What can never become a character is not held back for ever.
  pieces = [streamed.push(0x80) for _ in range(10)]
  assert "".join(pieces) == "\ufffd" * 7
  assert streamed.end() == "\ufffd" * 3


def test_unknown_tokenizer_names_the_nearest():
  with pytest.raises(ConfigError, match="'byte'; did you mean 'bytes'"):
    tokenizers.get_tokenizer("byte")

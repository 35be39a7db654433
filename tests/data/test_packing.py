"""Rows hold every token once, and know where documents begin."""

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.data.packing import PackedSequences, Packer, target_mask
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.routing.validation import ConfigError

TOKENIZER = ByteTokenizer()
BOS, EOS, PAD = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id


def make_documents(lengths, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, 256, n).astype(np.int32) for n in lengths]


def pack(documents, sequence_length):
  return PackedSequences.pack(
    documents, tokenizer=TOKENIZER, sequence_length=sequence_length
  )


def slow_rows(documents, sequence_length):
  """The definition, one token at a time."""
  width = sequence_length + 1
  tokens, owners = [], []
  for index, document in enumerate(documents):
    for token in [BOS, *document.tolist(), EOS]:
      tokens.append(token)
      owners.append(index)
  rows = []
  for begin in range(0, len(tokens), width):
    row = {"tokens": [], "segment_ids": [], "positions": []}
    segment, position, previous = 0, 0, None
    for j in range(begin, begin + width):
      if j >= len(tokens):
        token, segment, position = PAD, 0, 0
      elif owners[j] == previous:
        token, position = tokens[j], position + 1
      else:
        token, segment, position = tokens[j], segment + 1, 0
        previous = owners[j]
      row["tokens"].append(token)
      row["segment_ids"].append(segment)
      row["positions"].append(position)
    rows.append(row)
  return rows


@st.composite
def corpora(draw):
  """(T, document lengths): lengths around the row width, and any other."""
  t = draw(st.sampled_from([1, 2, 3, 7, 16]))
  edges = st.sampled_from([0, 1, t - 1, t, t + 1, 10 * t])
  lengths = draw(st.lists(edges | st.integers(0, 50), max_size=12))
  # One document that is long enough for one row, anywhere.
  lengths.insert(draw(st.integers(0, len(lengths))), t + 1)
  return t, lengths


@given(corpora(), st.integers(0, 9))
def test_no_token_is_lost_or_repeated(corpus, seed):
  t, lengths = corpus
  documents = make_documents(lengths, seed)
  packed = pack(documents, t)
  rows = list(packed)
  emitted = np.concatenate(
    [row["tokens"][row["segment_ids"] != 0] for row in rows]
  )
  wanted = np.concatenate([[BOS, *document, EOS] for document in documents])
  np.testing.assert_array_equal(emitted, wanted)
  assert packed.info.num_tokens == len(wanted)
  assert packed.info.num_documents == len(documents)
  assert len(rows) == len(packed) == -(-len(wanted) // (t + 1))
  # Only the last row is padded, and only at its end.
  for row in rows[:-1]:
    assert row["segment_ids"].all()
  padded = rows[-1]["segment_ids"] == 0
  assert (np.diff(padded.astype(int)) >= 0).all()
  assert (rows[-1]["tokens"][padded] == PAD).all()


@given(corpora())
def test_documents_come_back_from_rows(corpus):
  t, lengths = corpus
  documents = make_documents(lengths)
  found = list(pack(documents, t).documents())
  assert len(found) == len(documents)
  for tokens, document in zip(found, documents, strict=True):
    np.testing.assert_array_equal(tokens, [BOS, *document, EOS])


@given(corpora())
def test_rows_equal_the_slow_definition(corpus):
  t, lengths = corpus
  documents = make_documents(lengths)
  packed = pack(documents, t)
  wanted = slow_rows(documents, t)
  assert len(packed) == len(wanted)
  for k, row in enumerate(wanted):
    got = packed[k]
    assert set(got) == set(row)
    for name, values in row.items():
      assert got[name].dtype == np.int32
      np.testing.assert_array_equal(got[name], values, err_msg=name)


@given(corpora())
def test_target_mask_counts_each_token_with_a_predecessor_in_its_row(corpus):
  t, lengths = corpus
  packed = pack(make_documents(lengths), t)
  segment_ids = np.stack([row["segment_ids"] for row in packed])
  mask = target_mask(segment_ids)
  assert mask.shape == (len(packed), t)
  assert mask.dtype == bool
  for row, got in zip(segment_ids, mask, strict=True):
    for j in range(t):
      assert got[j] == (row[j] == row[j + 1] and row[j] != 0)
  # Every piece of a document loses one target: its first token.
  pieces = segment_ids.max(axis=1).sum()
  assert mask.sum() == packed.info.num_tokens - pieces


def test_target_mask_takes_jax_arrays():
  segment_ids = np.array([[1, 1, 2, 2, 3], [1, 1, 1, 0, 0]])
  mask = target_mask(jnp.asarray(segment_ids))
  assert isinstance(mask, jax.Array)
  np.testing.assert_array_equal(mask, target_mask(segment_ids))
  wanted = [[True, False, True, False], [True, True, False, False]]
  assert mask.tolist() == wanted


def test_a_document_that_spans_rows_restarts_at_position_0():
  packed = pack(make_documents([6]), 3)
  assert packed[1]["positions"].tolist() == [0, 1, 2, 3]
  assert packed[1]["segment_ids"].tolist() == [1, 1, 1, 1]


def test_fingerprint_covers_tokens_length_and_document_starts():
  documents = make_documents([5, 9])
  base = pack(documents, 4).info.fingerprint
  assert len(base) == 64
  assert pack(documents, 4).info.fingerprint == base
  assert pack(documents, 5).info.fingerprint != base
  assert pack(documents[::-1], 4).info.fingerprint != base
  changed = [documents[0], documents[1] ^ 1]
  assert pack(changed, 4).info.fingerprint != base
  # The same tokens, cut into other documents.
  joined = [np.concatenate([documents[0], [EOS, BOS], documents[1]])]
  assert pack(joined, 4).info.fingerprint != base


def test_storage_is_the_smallest_unsigned_type():
  (row,) = Packer(TOKENIZER, 4).add(make_documents([3])[0])
  assert row.tokens.dtype == np.uint16


@pytest.mark.parametrize("documents", [[], make_documents([0, 0])])
def test_empty_corpus_raises(documents):
  with pytest.raises(ConfigError, match=f"empty: {len(documents)} documents"):
    pack(documents, 1)


def test_corpus_smaller_than_a_row_names_both_numbers():
  with pytest.raises(ConfigError, match=r"has 9 tokens.* 1 = 10; .* most 8"):
    pack(make_documents([7]), 9)
  assert len(pack(make_documents([7]), 8)) == 1


@pytest.mark.parametrize("bad", [-1, 259])
def test_ids_outside_the_vocabulary_raise(bad):
  with pytest.raises(ConfigError, match=f"document 1 has token id {bad}"):
    pack([np.arange(9), np.array([3, bad])], 4)


def test_documents_must_be_integers():
  with pytest.raises(ConfigError, match="document 0 must be 1-D integers"):
    pack([np.ones(9)], 4)


def test_sequence_length_must_be_positive():
  with pytest.raises(ConfigError, match="at least 1, got 0"):
    pack(make_documents([9]), 0)


def test_rows_out_of_range_raise():
  packed = pack(make_documents([9]), 4)
  for k in (-1, len(packed)):
    with pytest.raises(IndexError, match=f"row {k} of {len(packed)}"):
      packed[k]

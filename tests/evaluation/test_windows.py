"""Every token is predicted once, with the context that it can have."""

from hypothesis import given, strategies as st
import numpy as np
import pytest

from deltajax.config import ConfigError
from deltajax.evaluation.windows import window_batches, windows


@st.composite
def cases(draw):
  context = draw(st.integers(1, 9))
  lengths = draw(st.lists(st.integers(0, 40), max_size=12))
  return (
    lengths,
    context,
    draw(st.integers(1, context)),
    draw(st.integers(1, 4)),
  )


@given(cases())
def test_every_token_once_from_enough_context(case):
  lengths, context, stride, _ = case
  for length in lengths:
    predicted = []
    for begin, first, end in windows(length, context, stride):
      assert 1 <= end - begin <= context
      assert begin < first <= end
      for target in range(first, end + 1):
        # All that there is, or what a stride leaves, the input itself counted.
        assert target - begin >= min(target, context - stride + 1)
        predicted.append(target)
    assert predicted == list(range(1, length))


def test_a_stride_of_the_context_makes_rolling_windows():
  # The example in lm-eval's documentation, with the prefix as token 0.
  assert list(windows(11, 4, 4)) == [(0, 1, 4), (4, 5, 8), (6, 9, 10)]


@given(cases())
def test_batches_hold_the_windows_of_all_documents(case):
  lengths, context, stride, batch_size = case
  rng = np.random.default_rng(len(lengths))
  documents = [rng.integers(1, 99, n, np.int32) for n in lengths]
  batches = list(
    window_batches(
      documents, context=context, stride=stride, batch_size=batch_size
    )
  )
  found = [[] for _ in documents]
  for batch in batches:
    for x in (*batch.inputs.values(), batch.targets_BxT, batch.counts_BxT):
      assert x.shape == (batch_size, context)
    assert batch.counts_BxT.any()
    ids = batch.inputs["segment_ids"]
    assert not batch.counts_BxT[ids == 0].any()
    for row in range(batch_size):
      for segment in range(1, ids[row].max() + 1):
        at = np.flatnonzero(ids[row] == segment)
        # One window, in one piece, whose targets are its inputs moved on.
        np.testing.assert_array_equal(np.diff(at), 1)
        positions = batch.inputs["positions"][row, at]
        np.testing.assert_array_equal(positions, np.arange(len(at)))
        (number,) = set(batch.documents_BxT[row, at])
        inputs = batch.inputs["tokens"][row, at]
        targets = batch.targets_BxT[row, at]
        np.testing.assert_array_equal(targets[:-1], inputs[1:])
        found[number] += targets[batch.counts_BxT[row, at]].tolist()
  assert found == [x[1:].tolist() for x in documents]
  order = [batch.documents_BxT[batch.counts_BxT] for batch in batches]
  if order:
    np.testing.assert_array_less(-1, np.diff(np.concatenate(order)))


def test_short_documents_share_rows():
  documents = [np.arange(5)] * 6
  (batch,) = window_batches(documents, context=16, stride=16, batch_size=2)
  assert batch.inputs["segment_ids"].max(1).tolist() == [4, 2]


@pytest.mark.parametrize(
  ("context", "stride", "message"),
  [
    (0, 1, "context is 0"),
    (8, 9, "stride is 9 and the context 8; a stride is from 1 to the context"),
    (8, 0, "stride is 0"),
  ],
)
def test_windows_that_cannot_be(context, stride, message):
  with pytest.raises(ConfigError, match=message):
    next(window_batches([], context=context, stride=stride, batch_size=1))

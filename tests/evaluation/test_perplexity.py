"""What is found is what the model says of each token, from its own window."""

import jax
import numpy as np
import pytest

import deltajax
from deltajax.config import ConfigError, DataConfig
from deltajax.data.packing import PackedSequences
from deltajax.data.pipeline import fixed_batches, Mixture
from deltajax.data.tokenizers import ByteTokenizer
from deltajax.evaluation.perplexity import limited, score_rows
from deltajax.evaluation.scoring import Scorer
from deltajax.evaluation.texts import PackedText, Rows
from deltajax.evaluation.windows import windows
from deltajax.training.loss import token_loss, token_scores
from tests.helpers import logits_of, precision, random_params, tiny_config

CONFIG = tiny_config(num_layers=2, num_blocks=2)
PARAMS = random_params(CONFIG)
RNG = np.random.default_rng(0)
DOCUMENTS = [
  RNG.integers(CONFIG.vocab_size, size=n, dtype=np.int32)
  for n in (3, 40, 1, 2, 17, 9, 25)
]
BYTES = RNG.integers(0, 4, CONFIG.vocab_size)


def nats_of(tokens, config=CONFIG, params=PARAMS):
  """Of each token but the first, by the model's own logits."""
  # One shape: what follows changes nothing.
  padded = np.pad(tokens, (0, 64 - len(tokens)))[None].astype(np.int32)
  logits = logits_of(config, params, padded)[0, : len(tokens) - 1]
  log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  return -np.take_along_axis(log_p, tokens[1:, None], -1)[:, 0]


def found(documents=DOCUMENTS, **options):
  options = {"bytes_per_token": BYTES, "batch_size": 2, **options}
  with precision("float64"):
    return deltajax.evaluate(
      deltajax.TransformerLM(CONFIG), PARAMS, documents, **options
    )


@pytest.mark.parametrize(("context", "stride"), [(12, None), (12, 5), (63, 63)])
def test_equals_the_model_window_by_window(context, stride):
  units = []
  for tokens in DOCUMENTS:
    nats = np.zeros(len(tokens))
    for begin, first, end in windows(len(tokens), context, stride or context):
      own = nats_of(tokens[begin : end + 1])
      nats[first : end + 1] = own[first - begin - 1 :]
    units.append((nats.sum(), len(tokens) - 1, BYTES[tokens[1:]].sum()))
  nats, tokens, num_bytes = np.array(units).T
  quality = found(context=context, stride=stride)
  assert quality.tokens == tokens.sum()
  assert quality.bytes == num_bytes.sum()
  assert quality.units == 6  # One has nothing to predict.
  loss = nats.sum() / tokens.sum()
  assert np.isclose(quality.loss.value, loss, rtol=1e-9)
  bits = nats.sum() / num_bytes.sum() / np.log(2)
  assert np.isclose(quality.bits_per_byte.value, bits, rtol=1e-9)
  residuals = (nats - loss * tokens)[tokens > 0]
  error = np.sqrt(6 / 5 * np.square(residuals).sum()) / tokens.sum()
  assert np.isclose(quality.loss.standard_error, error, rtol=1e-6)


def test_batches_do_not_matter():
  losses = [
    found(context=12, stride=3, batch_size=n).loss.value for n in (1, 3)
  ]
  np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


def test_documents_may_come_one_by_one_and_bytes_may_be_unknown():
  quality = found(iter(DOCUMENTS), context=12, bytes_per_token=None)
  assert quality.bits_per_byte is None
  assert quality.loss == found(context=12).loss


def test_scores_are_the_terms_of_the_loss():
  keys = jax.random.split(jax.random.key(0), 2)
  hidden = jax.random.normal(keys[0], (2, 11, 8))
  head = jax.random.normal(keys[1], (8, 37))
  targets = np.array(jax.numpy.argmax(hidden @ head, -1))
  targets[:, ::3] += 1
  targets %= 37
  expected = token_loss(hidden, head, targets, np.ones((2, 11), bool))
  for tile_length in (None, 4):
    scores = token_scores(hidden, head, targets, tile_length=tile_length)
    np.testing.assert_allclose(scores.nats_BxT.sum(), expected.loss, rtol=1e-5)
    greedy = np.tile(np.arange(11) % 3 != 0, (2, 1))
    np.testing.assert_array_equal(scores.greedy_BxT, greedy)


def test_packed_rows_cut_documents_where_a_row_is_full():
  config = tiny_config(num_layers=2, num_blocks=2, vocab_size=259)
  params = random_params(config)
  texts = [b"one", b"a longer text, of more than one row", b"", b"end"]
  rows = PackedSequences.pack(
    [np.frombuffer(text, np.uint8) for text in texts],
    tokenizer=ByteTokenizer(),
    sequence_length=12,
  )
  documents = [x.tolist() for x in rows.documents()]
  assert documents == [[256, *text, 257] for text in texts]
  flat = np.concatenate(documents)
  pieces = []
  for begin in range(0, len(flat), 13):
    row = flat[begin : begin + 13]
    pieces.append(np.split(row, np.flatnonzero(row == 256)))
  units = []
  for row in pieces:
    scored = [x for x in row if len(x) > 1]
    total = sum(nats_of(x, config, params).sum() for x in scored)
    units.append((total, sum(len(x) - 1 for x in scored)))
  nats, tokens = np.array(units).T
  with precision("float64"):
    quality = score_rows(
      Scorer(config),
      params,
      fixed_batches(Mixture.create([rows]), batch_size=4, num_rows=99),
      ByteTokenizer().bytes_per_token,
    )
  assert quality.tokens == tokens.sum()
  assert quality.units == len(rows) == 4
  assert np.isclose(quality.loss.value, nats.sum() / tokens.sum(), rtol=1e-9)
  # The ends of documents stand for no byte, and those that begin a row are
  # only inputs.
  ends = sum(len(x) > 1 and x[-1] == 257 for row in pieces for x in row)
  assert quality.bytes == quality.tokens - ends


@pytest.mark.parametrize(("count", "read"), [(None, 12), (6, 5), (99, 12)])
def test_a_mixture_says_how_many_of_its_rows_are_read(count, read):
  config = tiny_config(num_layers=2, num_blocks=2, vocab_size=259)
  sources = [
    PackedSequences.pack(
      [np.full(size, 97)], tokenizer=ByteTokenizer(), sequence_length=12
    )
    for size in (2 * 13 - 2, 10 * 13 - 2)
  ]
  data = DataConfig(
    dataset="a/2", mixture=("b/10",), weights=(0.5, 0.5), sequence_length=12
  )
  text = PackedText(
    *(data, "test", Rows(count), ByteTokenizer()),
    Mixture.create(sources, data.weights),
  )
  assert str(text).endswith(f"split test: {read} of 12 rows")
  with precision("float64"):
    quality = text.score(Scorer(config), random_params(config), batch_size=4)
  assert quality.units == read


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
    ({"batch_size": -1}, "batch_size is -1"),
    ({"context": 0}, "context is 0"),
    ({"stride": 0}, "stride is 0"),
  ],
)
def test_options_out_of_range(options, message):
  with pytest.raises(ConfigError, match=message):
    found(**{"context": 8, **options})


def test_whole_documents_up_to_a_number_of_tokens():
  sizes = [[len(x) for x in limited(DOCUMENTS, most)] for most in (None, 41)]
  assert sizes == [[len(x) for x in DOCUMENTS], [3, 40, 1]]
  with pytest.raises(ConfigError, match="first document has 2 tokens, more"):
    list(limited(DOCUMENTS, 1))


@pytest.mark.parametrize(
  ("documents", "message"),
  [
    ([], "no token to predict"),
    ([[1], [2]], "no token to predict"),
    ([[1, 2], [1, 41]], "document 1 has ids from 1 to 41; .* 0 to 40"),
    ([[[1, 2]]], r"document 0 has shape \(1, 2\)"),
    ([[0.5, 2]], "document 0 .* float64; give token ids"),
  ],
)
def test_documents_that_cannot_be(documents, message):
  with pytest.raises(ConfigError, match=message):
    found(documents, context=8)

"""What `deltajax.testing` gives works with the rest, and brings nothing."""

from hypothesis import given, settings, strategies as st
import jax
import numpy as np
import pytest

import deltajax
from deltajax import testing
from deltajax.data.pipeline import load_split
from deltajax.data.tokenizers import get_tokenizer, Tokenizer
from tests.helpers import logits_of
from tests.test_import import HEAVY, loaded_by


def test_it_imports_the_core_alone():
  assert not loaded_by("deltajax.testing") & set(HEAVY)


@pytest.mark.parametrize("variant", deltajax.VARIANTS)
def test_a_model_of_every_variant(variant):
  config = testing.tiny_config(variant, num_layers=2)
  params = testing.random_params(config)
  assert config.dtype == "float32"
  assert all(np.all(x) for x in jax.tree.leaves(params))
  model = deltajax.TransformerLM(config)
  tokens = testing.random_tokens(config)
  output = jax.eval_shape(model.apply, {"params": params}, tokens)
  assert output.logits_BxTxV.shape == (*tokens.shape, config.vocab_size)


def test_variants_share_what_they_have_in_common():
  plain, routed = (
    testing.random_params(testing.tiny_config(variant, num_layers=2))
    for variant in ("standard", "delta")
  )
  np.testing.assert_array_equal(plain["embedding"], routed["embedding"])
  other = testing.random_params(testing.tiny_config("standard"), seed=1)
  assert not np.array_equal(plain["embedding"], other["embedding"])


def test_unknown_options_are_named():
  with pytest.raises(deltajax.ConfigError, match="did you mean 'num_layers'"):
    testing.tiny_config(num_layer=2)
  with pytest.raises(deltajax.ConfigError, match="num_layers is 0"):
    testing.tiny_config(num_layers=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  pytest.importorskip("tokenizers")
  directory = testing.write_tokenizer(tmp_path_factory.mktemp("t") / "new")
  return get_tokenizer(str(directory))


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_the_tokenizer_gives_every_text_back(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())


def test_the_tokenizer_merges_and_fits_the_model(tokenizer):
  assert isinstance(tokenizer, Tokenizer)
  assert len(tokenizer.encode("the pen")) < len("the pen")
  assert tokenizer.vocab_size <= testing.tiny_config().vocab_size
  assert tokenizer.bos_id != tokenizer.eos_id
  assert tokenizer.bytes_per_token.max() == 2


def test_the_corpus_can_be_trained_on(tmp_path):
  directory = testing.write_corpus(tmp_path / "texts")
  rows = load_split(
    str(directory),
    "train",
    data_dir=tmp_path / "data",
    tokenizer="bytes",
    sequence_length=32,
  )
  assert rows.info.num_documents > 40
  texts = {path.read_text() for path in directory.iterdir()}
  assert len(texts) == 60


@pytest.mark.parametrize("variant", ["standard", "delta_block"])
def test_a_model_directory_is_read_as_it_was_written(variant, tmp_path):
  pytest.importorskip("safetensors")
  directory = testing.write_model(tmp_path / "model", variant, num_layers=2)
  config, params = deltajax.load_pretrained(directory)
  expected = testing.tiny_config(variant, num_layers=2, qk_norm=False)
  assert config.routing.variant == variant
  written = testing.random_params(expected)
  jax.tree.map(np.testing.assert_array_equal, params, written)
  assert np.isfinite(
    logits_of(config, params, testing.random_tokens(config))
  ).all()

"""Tokenizers of pretrained models, as small ones that are trained here."""

import json

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from deltajax.data import tokenizers
from deltajax.data.tokenizers import TextStream
from deltajax.routing.validation import ConfigError

TEXTS = ["hello world, hello you", "the capital is there", "naïve café €5 日本"]


def train(kind, specials=("<|start|>", "<|end|>", "<|pad|>")):
  """A tokenizer like GPT-2's (`bytes`) or Llama 2's (`pieces`)."""
  library = pytest.importorskip("tokenizers")
  from tokenizers import decoders, models, pre_tokenizers, trainers

  if kind == "bytes":
    found = library.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
  else:
    found = library.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    found.decoder = decoders.Sequence(
      [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    alphabet = list("abcdefghijklmnopqrstuvwxyz,")
    specials = ("<unk>", *(f"<0x{i:02X}>" for i in range(256)), *specials)
  texts = TEXTS if kind == "bytes" else TEXTS[:2]
  trainer = trainers.BpeTrainer(
    vocab_size=len(specials) + len(alphabet) + 60,
    special_tokens=list(specials),
    initial_alphabet=alphabet,
  )
  found.train_from_iterator(texts * 3, trainer)
  described = json.loads(found.to_str())
  if kind == "pieces":  # Bytes are ordinary, as in Llama's file.
    described["added_tokens"] = [
      token
      for token in described["added_tokens"]
      if not token["content"].startswith("<0x")
    ]
  return described


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def directory(request, tmp_path_factory):
  path = tmp_path_factory.mktemp(request.param)
  (path / "tokenizer.json").write_text(json.dumps(train(request.param)))
  named = {
    "bos_token": "<|start|>",
    "eos_token": {"content": "<|end|>", "lstrip": False},
    "pad_token": "<|pad|>",
  }
  (path / "tokenizer_config.json").write_text(json.dumps(named))
  return path


@pytest.fixture(scope="module")
def tokenizer(directory):
  return tokenizers.get_tokenizer(str(directory))


def test_it_satisfies_the_protocol(tokenizer):
  assert isinstance(tokenizer, tokenizers.Tokenizer)


@settings(max_examples=50)
@given(text=st.text())
def test_round_trip(tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.dtype == np.int32
  assert tokenizer.decode(ids) == text
  assert tokenizer.bytes_per_token[ids].sum() == len(text.encode())
  streamed = TextStream(tokenizer)
  pieces = [streamed.push(int(i)) for i in ids]
  assert "".join(pieces) + streamed.end() == text


@pytest.mark.parametrize("text", ["日本", "€a", "é ", "hello "])
def test_long_streams(tokenizer, text):
  streamed = TextStream(tokenizer)
  ids = tokenizer.encode(100 * text)
  shown = ""
  for i in ids:
    shown += streamed.push(int(i))
  assert shown == 100 * text


def test_special_ids(tokenizer):
  names = {
    name: tokenizer.encode_prompt(f"<|{name}|>").tolist()
    for name in ("start", "end", "pad")
  }
  assert names["start"] == [tokenizer.bos_id]
  assert names["end"] == [tokenizer.eos_id]
  assert names["pad"] == [tokenizer.pad_id]
  assert tokenizer.stop_ids == (tokenizer.eos_id,)
  specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
  assert tokenizer.bytes_per_token[specials].sum() == 0
  assert tokenizer.decode(specials) == ""
  assert tokenizer.bytes_per_token.shape == (tokenizer.vocab_size,)


def test_documents_do_not_spell_special_ids(tokenizer):
  text = "a<|end|>b"
  ids = tokenizer.encode(text)
  assert tokenizer.eos_id not in ids
  assert tokenizer.decode(ids) == text


def test_prompts_have_what_the_file_puts_in_front(directory, tmp_path):
  described = json.loads((directory / "tokenizer.json").read_text())
  start = next(
    token["id"]
    for token in described["added_tokens"]
    if token["content"] == "<|start|>"
  )
  described["post_processor"] = {
    "type": "TemplateProcessing",
    "single": [
      {"SpecialToken": {"id": "<|start|>", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {
      "<|start|>": {"id": "<|start|>", "ids": [start], "tokens": ["<|start|>"]}
    },
  }
  described["truncation"] = {
    **{"direction": "Right", "max_length": 3, "strategy": "LongestFirst"},
    "stride": 0,
  }
  (tmp_path / "tokenizer.json").write_text(json.dumps(described))
  found = tokenizers.get_tokenizer(str(tmp_path / "tokenizer.json"))
  text = "hello there, hello you"
  prompt = found.encode_prompt(text)
  assert prompt[0] == start
  np.testing.assert_array_equal(prompt[1:], found.encode(text))
  assert len(prompt) > 3  # Whatever the file says of truncation.


def test_ids_that_the_model_files_name(directory, tmp_path):
  text = (directory / "tokenizer.json").read_text()
  (tmp_path / "tokenizer.json").write_text(text)
  (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
  found = tokenizers.get_tokenizer(str(tmp_path))
  assert found.stop_ids == (2, 1)
  other = tokenizers.get_tokenizer(str(directory))
  assert found.fingerprint != other.fingerprint  # Documents end in other ids.
  assert (found.bos_id, found.eos_id, found.pad_id) == (2, 2, 2)


def test_lone_surrogates_do_not_stop_a_run(tokenizer):
  assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
  assert tokenizer.decode(tokenizer.encode_prompt("a\ud800b")) == "a?b"


def test_ids_outside_the_vocabulary_raise(tokenizer):
  for bad in (-1, tokenizer.vocab_size):
    with pytest.raises(ConfigError, match=f"token id {bad} is outside"):
      tokenizer.decode([1, bad])


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({}, "no tokenizer at .*tokenizer.json; name a tokenizer.json"),
    ({"tokenizer.json": "{}"}, "tokenizer.json is no tokenizer: "),
    ({"tokenizer.json": "not json"}, "tokenizer.json is no tokenizer: "),
    ({"tokenizer.json": None}, "nothing beside .* says which token ends"),
    (
      {"tokenizer.json": None, "tokenizer_config.json": "{"},
      "tokenizer_config.json is not JSON",
    ),
    (
      {"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "@@@"}'},
      "names '@@@' as eos_token, which .* does not have",
    ),
  ],
)
def test_bad_files_are_one_message(directory, tmp_path, files, message):
  good = (directory / "tokenizer.json").read_text()
  for name, text in files.items():
    (tmp_path / name).write_text(good if text is None else text)
  with pytest.raises(ConfigError, match=message):
    _ = tokenizers.get_tokenizer(str(tmp_path)).eos_id

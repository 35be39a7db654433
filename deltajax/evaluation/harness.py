"""Models of deltajax behind the interface of EleutherAI's lm-eval.

Needs lm-eval (extra `eval`), and no PyTorch.

Requests are sorted by length and run in batches whose shapes are rounded up, so
that few programs serve all: lengths to those of `bucket`, rows of the last
batch and tokens that are scored to powers of two. Requests that ask for other
last tokens of the same text share a row.

Shapes: B batch, T sequence, P tokens that are scored.
"""

from collections.abc import Sequence
import copy
import dataclasses
import itertools
import json
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
import numpy as np
from tqdm import tqdm

from deltajax.config import ConfigError, ModelConfig
from deltajax.data.continuation import Continuation, continue_texts
from deltajax.data.tokenizers import Tokenizer
from deltajax.evaluation.scoring import one_late, Scorer
from deltajax.evaluation.windows import windows
from deltajax.models.generation import bucket, Generator
from deltajax.models.sampling import Sampling
from deltajax.models.transformer import TransformerLM
from deltajax.routing.sharding import Sharding

# As lm-eval's own models have it, where a task says nothing.
MAX_NEW_TOKENS = 256
_MAX_NEW_NAMES = (
  *("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
)
_SAMPLING_NAMES = ("temperature", "top_k", "top_p")

# (what lm-eval calls it, ids of the context, ids of the continuation).
TokenRequest = tuple[Any, list[int], list[int]]


class HarnessLM(TemplateLM):
  """A model of deltajax for lm-eval.

  Texts are encoded as lm-eval's model of transformers does: contexts with the
  special tokens that the tokenizer puts in front, whole texts behind the token
  that starts documents.
  """

  def __init__(
    self,
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer,
    *,
    context: int,
    batch_size: int = 8,
    sharding: Sharding | None = None,
    seed: int = 0,
  ):
    """Takes a model.

    Args:
      config: of the model.
      params: its unboxed parameters.
      tokenizer: of the model.
      context: tokens that it sees at once; longer texts lose their beginning.
      batch_size: rows at once, a multiple of the shards of the batch.
      sharding: where parameters lie; None for one device.
      seed: of what is drawn, where a task samples.
    """
    super().__init__()
    self._scorer = Scorer(config, sharding)
    self._params = params
    self._encoder = tokenizer
    self._context = context
    self._batch_size = batch_size
    self._key = jax.random.key(seed)
    self._generator: Generator | None = None

  @property
  def eot_token_id(self) -> int:
    """The id that ends a document."""
    return self._encoder.eos_id

  @property
  def prefix_token_id(self) -> int:
    """The id that starts a document."""
    return self._encoder.bos_id

  @property
  def max_length(self) -> int:
    """Tokens that the model sees at once."""
    return self._context

  @property
  def tokenizer_name(self) -> str:
    """What tells tokenizers apart."""
    return self._encoder.fingerprint

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Ids of a text, with the special tokens of a prompt unless told not to."""
    del kwargs
    if add_special_tokens is False:
      return self._encoder.encode(string).tolist()
    ids = self._encoder.encode_prompt(string).tolist()
    # A text that spells what starts documents gets no second one.
    if ids[:2] == [self.prefix_token_id] * 2:
      return ids[1:]
    return ids

  def loglikelihood_rolling(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihoods of whole texts; see `windows`."""
    parts: list[TokenRequest] = []
    counts = []
    for request in requests:
      ids = [self.prefix_token_id, *self.tok_encode(request.args[0])]
      found = list(windows(len(ids), self._context, self._context))
      counts.append(len(found))
      parts += [
        (None, ids[x.begin : x.first], ids[x.first : x.end + 1]) for x in found
      ]
    scores = iter(self._loglikelihood_tokens(parts, disable_tqdm))
    return [
      sum(score for score, _ in itertools.islice(scores, count))
      for count in counts
    ]

  def _loglikelihood_tokens(
    self,
    requests: Sequence[TokenRequest],
    disable_tqdm: bool = False,
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    """Log-likelihood of each continuation, and whether greedy search finds it.

    Raises:
      ConfigError: for an empty continuation, or one longer than the context.
    """
    del kwargs
    rows: dict[tuple[int, ...], list[int]] = {}
    for i, (_, context, continuation) in enumerate(requests):
      if not 0 < len(continuation) <= self._context:
        raise ConfigError(
          f"a continuation has {len(continuation)} tokens; it must have from 1"
          f" to the {self._context} that the model sees."
        )
      whole = (context + continuation)[-self._context - 1 :]
      rows.setdefault(tuple(whole[:-1]), []).append(i)
    results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    by_length = sorted(rows, key=len, reverse=True)
    size = self._batch_size
    started = (
      self._started(by_length[begin : begin + size], rows, requests)
      for begin in range(0, len(by_length), size)
    )
    with tqdm(total=len(requests), disable=disable_tqdm) as progress:
      for scores, asked in one_late(started):
        self._finish(scores, asked, requests, results)
        progress.update(len(asked))
    return results

  def _started(self, inputs, rows, requests):
    """Starts a batch; returns its scores, and whose they are."""
    length = bucket(max(map(len, inputs)))
    tokens_BxT = np.zeros((self._rows_for(len(inputs)), length), np.int32)
    places, targets, asked = [], [], []
    for row, ids in enumerate(inputs):
      tokens_BxT[row, : len(ids)] = ids
      for i in rows[ids]:
        continuation = requests[i][2]
        first = len(ids) - len(continuation)
        places += [(row, first + k) for k in range(len(continuation))]
        targets += continuation
        asked.append(i)
    padding = _power_of_two(len(targets)) - len(targets)
    places_2xP = np.pad(np.array(places, np.int32).T, ((0, 0), (0, padding)))
    targets_P = np.pad(np.array(targets, np.int32), (0, padding))
    scores = self._scorer.some(self._params, tokens_BxT, places_2xP, targets_P)
    return scores, asked

  def _finish(self, scores, asked, requests, results) -> None:
    """Puts the scores of a batch where they belong."""
    nats_P = np.asarray(scores.nats_BxT, np.float64)
    greedy_P = np.asarray(scores.greedy_BxT)
    at = 0
    for i in asked:
      text, _, continuation = requests[i]
      own = slice(at, at + len(continuation))
      at = own.stop
      results[i] = (-float(nats_P[own].sum()), bool(greedy_P[own].all()))
      if text is not None:
        self.cache_hook.add_partial("loglikelihood", text, results[i])

  def generate_until(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Continues texts until one of `until`, the end of the text, or a number.

    Raises:
      ConfigError: for options that are not known, before anything is computed.
    """
    plans = [self._planned(*request.args) for request in requests]
    results = [""] * len(requests)

    def kind(i: int) -> Any:
      return plans[i].kind

    order = sorted(range(len(plans)), key=lambda i: -len(plans[i].prompt))
    batches = [
      alike[begin : begin + self._batch_size]
      for _, group in itertools.groupby(sorted(order, key=kind), key=kind)
      for alike in [list(group)]
      for begin in range(0, len(alike), self._batch_size)
    ]
    for some in tqdm(batches, disable=disable_tqdm):
      texts = self._generated([plans[i] for i in some])
      for i, text in zip(some, texts, strict=True):
        results[i] = text
        self.cache_hook.add_partial("generate_until", requests[i].args, text)
    return results

  def _generated(self, plans: Sequence["_Plan"]) -> list[str]:
    if self._generator is None:
      model = TransformerLM(self._scorer.config)
      self._generator = Generator(model, self._params)
    plan = plans[0]
    missing = self._rows_for(len(plans)) - len(plans)
    steps = self._generator.steps(
      [np.array(x.prompt) for x in [*plans, *[plan] * missing]],
      max_new_tokens=plan.max_new_tokens,
      sampling=plan.sampling,
      key=self._key,
      stop_tokens=self._encoder.stop_ids,
    )
    texts = [
      Continuation(self._encoder, plan.until, plan.max_new_tokens)
      for _ in plans
    ]
    own = (token_B[: len(plans)] for token_B in map(np.asarray, steps))
    news = list(continue_texts(own, texts))
    return ["".join(parts) for parts in zip(*news, strict=True)]

  def _planned(self, text: str, options: dict[str, Any]) -> "_Plan":
    """What one request asks for; raises ConfigError if it cannot be done."""
    given = copy.deepcopy(options)
    until = given.pop("until", None) or []
    new = generation_length(given)
    if new >= self._context:
      raise ConfigError(
        f"a task asks for {new} new tokens; the model sees {self._context}."
        " Give --max-new-tokens."
      )
    for name in _MAX_NEW_NAMES:
      given.pop(name, None)
    samples = given.pop("do_sample", None)
    chosen = {k: given.pop(k) for k in _SAMPLING_NAMES if k in given}
    if given:
      raise ConfigError(
        f"generation option {next(iter(given))!r} is not known; there are"
        f" until, do_sample, {', '.join(_SAMPLING_NAMES)} and max_gen_toks."
      )
    temperature = float(chosen.pop("temperature", 1.0 if samples else 0.0))
    if samples is False or not temperature:
      temperature, chosen = 0.0, {}
    prompt = self.tok_encode(text)[-(self._context - new) :]
    # There is nothing before the start of a document.
    return _Plan(
      prompt=prompt or [self.prefix_token_id],
      until=tuple([until] if isinstance(until, str) else until),
      max_new_tokens=new,
      sampling=Sampling(
        **chosen,
        temperature=temperature,
        vocab_size=self._encoder.vocab_size,
      ),
    )

  def _rows_for(self, count: int) -> int:
    """Rows of a batch that holds so many."""
    shards = self._scorer.num_shards
    return min(self._batch_size, shards * _power_of_two(-(-count // shards)))


@dataclasses.dataclass(frozen=True)
class _Plan:
  """A text to be continued.

  Attributes:
    prompt: its ids, as many as there is room for.
    until: texts at which to stop.
    max_new_tokens: after which to stop.
    sampling: how tokens are drawn.
  """

  prompt: list[int]
  until: tuple[str, ...]
  max_new_tokens: int
  sampling: Sampling

  @property
  def kind(self) -> str:
    """Equal for texts that can be continued together."""
    sampling = dataclasses.asdict(self.sampling)
    return json.dumps([self.until, self.max_new_tokens, sampling])


def generation_length(options: dict[str, Any]) -> int:
  """New tokens that the generation options of a task allow."""
  given = [options[name] for name in _MAX_NEW_NAMES if options.get(name)]
  return int(given[0]) if given else MAX_NEW_TOKENS


def _power_of_two(count: int) -> int:
  return 1 << (count - 1).bit_length()

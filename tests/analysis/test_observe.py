"""Analyses equal what NumPy makes of the oracle's weights and vectors."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest

from deltajax.analysis.analyze import conclude
from deltajax.analysis.observe import Observer
from deltajax.analysis.reads import model_reads
from deltajax.config import RoutingConfig
from deltajax.routing import build_schedule, VARIANTS
from tests.helpers import (
  precision,
  QUICK,
  random_params,
  random_tokens,
  tiny_config,
  zero_queries,
)
from tests.routing import oracle

LENGTH = 9
QUICK_JIT = functools.partial(jax.jit, compiler_options=QUICK)


def packed_batch(config, batch=2, seed=0):
  """Rows of T + 1 tokens: several documents, and padding in the last row."""
  tokens = random_tokens(config, batch, LENGTH + 1, seed)
  rng = np.random.default_rng(seed)
  starts = rng.random(tokens.shape) < 0.2
  starts[:, 0] = True
  offsets = np.arange(LENGTH + 1)
  begin = np.maximum.accumulate(np.where(starts, offsets, 0), axis=1)
  segments = np.cumsum(starts, axis=1)
  segments[-1, 6:] = 0
  return {
    "tokens": tokens,
    "segment_ids": segments.astype(np.int32),
    "positions": (offsets - begin).astype(np.int32),
  }


def run(config, params, *batches, gradients=False):
  """An analysis, compiled quickly."""
  with precision(config.dtype):
    with mock.patch.object(jax, "jit", QUICK_JIT):
      observer = Observer(config, LENGTH, gradients=gradients)
    return conclude(observer, observer.total(params, batches))


def run_oracle(config, params, batch, **options):
  inputs = {name: x[:, :-1] for name, x in batch.items()}
  weights, vectors = [], {}
  logits = oracle.model_logits(
    config, params, **inputs, weights=weights, vectors=vectors, **options
  )
  return logits, weights, vectors


def mean_and_std(x, mask):
  """Over heads and tokens, of x_HxBxT."""
  x = x[:, mask]
  return x.mean(), x.std()


CASES = {
  **{name: (name, {}) for name in VARIANTS},
  "everything": (
    "rd_delta_block",
    {"heads": 2, "key_dim": 6, "null_source": True, "gate": "scalar"},
  ),
  "null": ("delta", {"null_source": True}),
  "uneven": ("attnres_block", {"num_layers": 5}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
  variant, options = CASES[name]
  config = tiny_config(variant, **{"num_layers": 4, "num_blocks": 2, **options})
  params = random_params(config)
  batch = packed_batch(config)
  found = run(config, params, batch)
  _, weights, vectors = run_oracle(config, params, batch)
  mask = batch["segment_ids"][:, :-1] != 0
  assert found.tokens == mask.sum()
  check_reads(found, config, weights, batch)
  check_divergences(found, weights, mask)
  check_vectors(found, config, vectors, mask)


def check_reads(found, config, weights, batch):
  mask = batch["segment_ids"][:, :-1] != 0
  positions = batch["positions"][:, :-1]
  schedule = build_schedule(config.routing, config.num_layers)
  null = ["null"] if config.routing.null_source else []
  expected = []
  for s, of_sublayer in enumerate(weights):
    place = s if s < 2 * config.num_layers else None
    expected += [([*null, *schedule.sources(place)], a) for a in of_sublayer]
  # `embedding_skip` has its one source and no softmax in the oracle.
  if not VARIANTS[config.routing.variant].learned:
    assert all(read.weight == [1.0] for read in found.reads)
    return
  assert len(found.reads) == len(expected)
  for read, (sources, alpha_HxNxBxT) in zip(found.reads, expected, strict=True):
    assert read.sources == sources, read.name
    close = functools.partial(
      np.testing.assert_allclose, rtol=1e-9, atol=1e-9, err_msg=read.name
    )
    close(sum(read.weight), 1)
    pairs = [mean_and_std(x, mask) for x in alpha_HxNxBxT.swapaxes(0, 1)]
    close(read.weight, [mean for mean, _ in pairs])
    close(read.weight_std, [std for _, std in pairs], atol=1e-7)
    largest = alpha_HxNxBxT.max(1)
    close(read.max_weight, mean_and_std(largest, mask)[0])
    close(read.max_weight_std, mean_and_std(largest, mask)[1], atol=1e-7)
    entropy = -np.sum(alpha_HxNxBxT * np.log(alpha_HxNxBxT), axis=1)
    close(read.entropy, mean_and_std(entropy, mask)[0])
    close(read.entropy_std, mean_and_std(entropy, mask)[1], atol=1e-7)
    close(read.effective_sources, mean_and_std(np.exp(entropy), mask)[0])
    close(read.uniform_weight, 1 / len(sources))
    close(read.uniform_entropy, np.log(len(sources)))
    for b, (first, last) in enumerate(found.position_bins):
      here = mask & (first <= positions) & (positions <= last)
      assert found.tokens_by_position[b] == here.sum()
      if not here.any():
        assert read.weight_by_position[b] is None
        assert read.max_weight_by_position[b] is None
        continue
      close(
        read.weight_by_position[b],
        [mean_and_std(x, here)[0] for x in alpha_HxNxBxT.swapaxes(0, 1)],
      )
      close(read.max_weight_by_position[b], mean_and_std(largest, here)[0])


def check_divergences(found, weights, mask):
  pairs = {
    s // 2: of_sublayer
    for s, of_sublayer in enumerate(weights)
    if len(of_sublayer) == 2 and of_sublayer[0].shape[1] > 1
  }
  assert [x.layer for x in found.divergences] == list(pairs)
  for divergence in found.divergences:
    one, other = pairs[divergence.layer]
    middle = (one + other) / 2
    distance = sum(
      np.sum(x * np.log(x / middle), axis=1) / 2 for x in (one, other)
    )
    mean, std = mean_and_std(distance, mask)
    np.testing.assert_allclose(divergence.jensen_shannon, mean, atol=1e-9)
    np.testing.assert_allclose(divergence.jensen_shannon_std, std, atol=1e-7)


def check_vectors(found, config, vectors, mask):
  def rms(x):
    return np.sqrt((x**2).mean(-1))[mask].mean()

  v, p = vectors["v"], vectors["p"]
  norms = found.norms
  np.testing.assert_allclose(norms.stream_rms, [rms(x) for x in p])
  np.testing.assert_allclose(norms.output_rms, [rms(x) for x in v])
  assert norms.gradient_norm is None
  for s, (inputs, both) in enumerate(
    zip(norms.input_rms, vectors["inputs"], strict=True)
  ):
    expected = [rms(x) for x in both[: len(inputs)]]
    np.testing.assert_allclose(inputs, expected, err_msg=str(s))

  size = 2 * -(-config.num_layers // config.routing.num_blocks)
  starts = range(0, len(v), size)
  stacks = {
    "deltas": [p[0], *v],
    "cumulative": p,
    "block_deltas": [p[0], *(sum(v[i : i + size]) for i in starts)],
    "released": oracle._released(len(v) + 1, p[0], v, p, size)[: len(starts)],
  }
  for similarity in found.similarities:
    stack = np.stack(stacks[similarity.family])
    assert len(stack) == len(similarity.vectors)
    unit = stack / np.linalg.norm(stack, axis=-1, keepdims=True)
    expected = np.mean([u @ u.T for u in unit[:, mask].swapaxes(0, 1)], axis=0)
    np.testing.assert_allclose(
      similarity.cosine, expected, atol=1e-9, err_msg=similarity.family
    )
    apart = expected[~np.eye(len(stack), dtype=bool)]
    np.testing.assert_allclose(similarity.mean_cosine, apart.mean())
  families = {x.family for x in found.similarities}
  blocks = VARIANTS[config.routing.variant].block == "layers"
  assert ("block_deltas" in families) == blocks
  released = config.routing.variant == "delta_block_released"
  assert ("released" in families) == released


@pytest.mark.parametrize("variant", ["standard", "rd_attnres", "delta"])
def test_gradients_equal_finite_differences(variant):
  config = tiny_config(variant, num_layers=2, num_blocks=2, width=4, head_dim=4)
  params = random_params(config)
  batch = {name: x[1:] for name, x in packed_batch(config).items()}
  targets = batch["tokens"][:, 1:]
  segments = batch["segment_ids"]
  counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
  mask = segments[:, :-1] != 0

  def loss(probes):
    logits, _, _ = run_oracle(config, params, batch, probes=probes)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    highest = logits.max(-1)
    log_z = np.log(np.exp(logits - highest[..., None]).sum(-1)) + highest
    return ((log_z - chosen) * counts).sum()

  found = run(config, params, batch, gradients=True)
  assert counts.any()
  np.testing.assert_allclose(found.loss, loss({}) / counts.sum())
  step = 1e-5
  for s, norm in enumerate(found.norms.gradient_norm):
    gradient = np.zeros((*targets.shape, config.width))
    for at in np.ndindex(gradient.shape):
      if not mask[at[:2]]:
        continue
      probe = np.zeros_like(gradient)
      probe[at] = step
      gradient[at] = (loss({s: probe}) - loss({s: -probe})) / (2 * step)
    expected = np.linalg.norm(gradient, axis=-1)[mask].mean()
    np.testing.assert_allclose(norm, expected, rtol=1e-5, err_msg=str(s))


def test_one_batch_and_four_have_the_same_means():
  config = tiny_config("rd_delta_block", num_layers=2, num_blocks=2, width=8)
  params = random_params(config)
  batch = packed_batch(config, batch=4)
  four = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(4)]
  one, many = (
    run(config, params, *batches, gradients=True) for batches in ([batch], four)
  )
  assert one.tokens == many.tokens
  for x, y in zip(
    jax.tree.leaves(dataclasses.asdict(one)),
    jax.tree.leaves(dataclasses.asdict(many)),
    strict=True,
  ):
    if isinstance(x, float):
      np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-7)
    else:
      assert x == y


@pytest.mark.parametrize("variant", ["attnres_block", "rd_delta_block"])
def test_zero_queries_give_the_uniform_values(variant):
  config = tiny_config(variant, num_layers=4, num_blocks=2, null_source=True)
  params = zero_queries(random_params(config))
  found = run(config, params, packed_batch(config))
  for read in found.reads:
    np.testing.assert_allclose(read.weight, read.uniform_weight, rtol=1e-12)
    np.testing.assert_allclose(read.weight_std, 0, atol=1e-12)
    np.testing.assert_allclose(read.max_weight, read.uniform_weight, rtol=1e-12)
    np.testing.assert_allclose(read.entropy, read.uniform_entropy, atol=1e-12)
    np.testing.assert_allclose(read.effective_sources, len(read.sources))
  np.testing.assert_allclose(
    found.totals.max_weight, found.totals.uniform_weight
  )
  for divergence in found.divergences:
    assert divergence.jensen_shannon < 1e-12


def test_tied_roles_do_not_diverge_at_all():
  config = tiny_config("rd_tied", num_layers=4, num_blocks=2)
  found = run(config, random_params(config), packed_batch(config))
  assert len(found.divergences) == 3  # Layer 0 sees the embedding alone.
  for divergence in found.divergences:
    assert divergence.jensen_shannon == 0
  assert found.totals.jensen_shannon == 0


def test_roles_change_no_total():
  """Reads of one sublayer weigh what the one read of its parent does."""
  found = {}
  for variant in ("rd_tied", "attnres_block"):
    config = tiny_config(variant, num_layers=4, num_blocks=2)
    analysis = run(config, random_params(config), packed_batch(config))
    found[variant] = dataclasses.asdict(analysis.totals)
  tied, parent = found["rd_tied"], found["attnres_block"]
  # Layer 0 sees the embedding alone.
  assert tied.pop("reads") == parent.pop("reads") + 3
  assert (tied.pop("jensen_shannon"), parent.pop("jensen_shannon")) == (0, None)
  assert tied == pytest.approx(parent, rel=1e-9)


@pytest.mark.parametrize(
  ("variant", "note"),
  [
    ("standard", "no weights to analyse, only norms"),
    ("embedding_skip", "learns no read"),
    ("rd_average", "the mean of both reads"),
    ("attnres_full", "nothing reads it"),
  ],
)
def test_notes_say_what_a_variant_is(variant, note):
  config = tiny_config(variant, num_layers=2, num_blocks=2)
  found = run(config, random_params(config), packed_batch(config))
  assert any(note in line for line in found.notes)
  if variant in ("standard", "embedding_skip"):
    assert found.totals is None


def test_names_of_reads():
  config = tiny_config("rd_delta_block", num_blocks=3, null_source=True)
  reads = model_reads(config)
  assert [read.name for read in reads[:4]] == [
    "layer 0 attention Q/K",
    "layer 0 attention V",
    "layer 0 mlp",
    "layer 1 attention Q/K",
  ]
  assert reads[0].sources == ("null",)
  assert reads[2].sources == ("null", "e", "b1+")
  assert reads[2].open_source
  assert model_reads(tiny_config("attnres_full"))[-1].name == "final"
  assert not model_reads(tiny_config("standard"))
  assert RoutingConfig(variant="standard").row.roles.num_queries == 0

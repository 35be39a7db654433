"""A digest changes with what it is of, and with nothing else."""

import dataclasses

import numpy as np

from deltajax.evaluation.fingerprints import (
  code_fingerprint,
  config_digest,
  parameters_digest,
)
from tests.helpers import random_params, tiny_config

CONFIG = tiny_config(num_layers=2, num_blocks=2)


def tree(**changes):
  values = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(2, np.float32),
  }
  values |= changes
  return {"layers": {"a": values["a"]}, "b": values["b"]}


def test_every_name_shape_and_value_counts():
  plain = parameters_digest(tree())
  changed = tree()["layers"]["a"].copy()
  changed[1, 2] = np.nextafter(changed[1, 2], np.float32(9))
  others = [
    tree(a=changed),
    tree(a=tree()["layers"]["a"].reshape(3, 2)),
    tree(a=tree()["layers"]["a"].T.copy().reshape(2, 3)),
    {"layers": {"c": tree()["layers"]["a"]}, "b": tree()["b"]},
  ]
  digests = {plain, *map(parameters_digest, others)}
  assert len(digests) == 5
  # Not where arrays lie, how they are stored, or in which order.
  strided = np.arange(12, dtype=np.float64).reshape(2, 6)[:, ::2] / 2
  assert parameters_digest(tree(a=strided)) == plain
  assert parameters_digest(dict(reversed(tree().items()))) == plain


def test_of_a_config_only_what_the_model_is():
  plain = config_digest(CONFIG)
  computed = {"dtype": "bfloat16", "remat": "full", "attention": "xla"}
  assert config_digest(dataclasses.replace(CONFIG, **computed)) == plain
  assert config_digest(dataclasses.replace(CONFIG, norm_eps=1e-5)) != plain
  assert config_digest(tiny_config(num_layers=2, num_blocks=1)) != plain


def test_of_a_model():
  assert parameters_digest(random_params(CONFIG)) != parameters_digest(
    random_params(CONFIG, seed=1)
  )


def test_code():
  found = code_fingerprint()
  assert found["commit"] is None or len(found["commit"]) == 40
  # Nobody knows without a repository.
  assert (found["changed"] is None) == (found["commit"] is None)

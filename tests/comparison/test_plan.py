import dataclasses
import math
import pathlib
from types import SimpleNamespace

import pytest

from configs import small
from deltajax.comparison.plan import Comparison, override
from deltajax.comparison.study import Study, TuningResult
from deltajax.comparison.study_tables import tuning_text
from deltajax.config import ConfigError, differences, RoutingConfig

BASE = small.get_config()
ARMS = {
  "plain": {"model.routing.variant": "standard"},
  "block": {"model.routing.variant": "delta_block"},
  "drawn": {
    "model.routing.variant": "delta_block",
    "model.routing.query_init_std": 0.02,
  },
}


def make(**fields):
  return Comparison(
    **{"base": BASE, "arms": ARMS, "baseline": "plain", **fields}
  )


def test_runs_go_seed_by_seed():
  runs = make(seeds=(3, 5)).runs(pathlib.Path("out"))
  assert [(run.arm, run.seed) for run in runs] == [
    *(("plain", 3), ("block", 3), ("drawn", 3)),
    *(("plain", 5), ("block", 5), ("drawn", 5)),
  ]
  assert runs[4].directory == pathlib.Path("out/runs/block/seed-5")
  changed = differences(runs[0].config, runs[5].config)
  assert changed == {
    "model.routing.variant": ("standard", "delta_block"),
    "model.routing.query_init_std": (0.0, 0.02),
    "training.seed": (3, 5),
  }


def test_pairs():
  comparison = make(pairs={"drawn": ("block", "plain")})
  assert list(map(str, comparison.all_pairs())) == [
    "block - plain",
    "drawn - plain",
    "drawn - block",
  ]


def test_a_part():
  comparison = make(pairs={"drawn": ("block", "plain")})
  part = comparison.narrowed(["drawn", "block"], [4])
  assert (list(part.arms), part.seeds) == (["block", "drawn"], (4,))
  assert list(map(str, part.all_pairs())) == ["drawn - block"]
  assert comparison.narrowed((), ()) == comparison


def test_fields_are_replaced_all_at_once():
  drawn = RoutingConfig(variant="delta_block", query_init_std=0.02)
  base = dataclasses.replace(
    BASE, model=dataclasses.replace(BASE.model, routing=drawn)
  )
  # One after the other, a standard model would have initial queries.
  config = override(
    base,
    {"model.routing.variant": "standard", "model.routing.query_init_std": 0.0},
  )
  assert config.model.routing.variant == "standard"


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"baseline": "plian"}, "unknown baseline 'plian'; did you mean 'plain'"),
    ({"pairs": {"blok": ("plain",)}}, "did you mean 'block'"),
    ({"pairs": {"drawn": ("blok",)}}, "did you mean 'block'"),
    ({"arms": {"plain": {"modle.width": 3}}}, "arm 'plain': .*'model'"),
    (
      {"arms": {"plain": {"model.routing.variant": "delta_blok"}}},
      "arm 'plain': unknown variant 'delta_blok'; did you mean 'delta_block'",
    ),
    (
      {"arms": {"plain": {"model.routing.varaint": "delta"}}},
      "unknown RoutingConfig field 'varaint'; did you mean 'variant'",
    ),
    (
      {"arms": {"plain": {"model.width.x": 1}}},
      "ModelConfig.width is 64 and has no field 'x'",
    ),
    ({"arms": {"plain": {"model.width": "64"}}}, "it must be int"),
    ({"arms": {"a/b": {}}, "baseline": "a/b"}, "arm 'a/b' names a directory"),
    ({"arms": {"..": {}}, "baseline": ".."}, "names a directory"),
    *(
      (
        {"arms": {"plain": {field: value}}},
        f"sets {field}, but arms must not differ",
      )
      for field, value in {
        "data.sequence_length": 64,
        "training.seed": 4,
        "training.batch_size": 4,
        "training.steps": 40,
        "training.eval_sequences": 40,
        "training.accumulation": 2,
        "training.stop_after": 10,
        "init_from": "runs/other",
        "model.init_std": 0.01,
      }.items()
    ),
    ({"seeds": ()}, "without seeds"),
    ({"seeds": (1, 1)}, "repeats"),
    ({"seeds": (-1,)}, "seed -1 must be"),
    (
      {
        "base": dataclasses.replace(
          BASE, training=dataclasses.replace(BASE.training, stop_after=3)
        )
      },
      "training.stop_after is 3",
    ),
    (
      {
        "base": dataclasses.replace(
          BASE, training=dataclasses.replace(BASE.training, log_every=2000)
        )
      },
      "training.log_every is 2000, more than the 1000 updates",
    ),
  ],
)
def test_comparisons_that_cannot_be(fields, message):
  with pytest.raises(ConfigError, match=message):
    make(**fields)


def test_arms_that_are_not_there():
  with pytest.raises(ConfigError, match="unknown arm 'blok'; did you mean"):
    make().narrowed(["blok"], [])


def study(**fields):
  return Study(
    **{
      "comparison": make(),
      "candidates": {
        "low": {"optimizer.learning_rate": 1e-3},
        "high": {"optimizer.learning_rate": 1e-2},
      },
      "groups": {"plain": ("plain",), "block": ("block", "drawn")},
      "tuning_seed": 9,
      "analysed_seed": 1,
      **fields,
    }
  )


def test_study_tunes_one_arm_of_each_group():
  tuning = study().tuning()
  assert list(tuning.arms) == [
    *("plain+low", "plain+high", "block+low", "block+high")
  ]
  assert tuning.seeds == (9,)
  tuned = study().tuned({"plain": "low", "block": "high"})
  rates = {
    arm: tuned.config_of(arm, 0).optimizer.learning_rate for arm in tuned.arms
  }
  assert rates == {"plain": 1e-3, "block": 1e-2, "drawn": 1e-2}


def test_a_study_of_other_seeds_looks_into_one_of_them():
  assert study().narrowed(()) == study()
  assert study().narrowed((1, 2)).analysed_seed == 1
  other = study().narrowed((5, 2))
  assert (other.comparison.seeds, other.analysed_seed) == ((5, 2), 5)


def result_of_tuning(losses):
  return SimpleNamespace(
    arms=[SimpleNamespace(name=k, mean_loss=x) for k, x in losses.items()]
  )


def test_a_candidate_that_died_is_the_worst():
  losses = {"plain+low": 2.0, "block+low": 2.0, "block+high": 1.5}
  tuning = TuningResult.of(study(), result_of_tuning(losses))
  assert tuning.chosen == {"plain": "low", "block": "high"}
  assert tuning.losses["plain"] == {"low": 2.0, "high": math.inf}
  assert "| plain | **2.0000** | died |" in tuning_text(study(), tuning)
  del losses["plain+low"]
  with pytest.raises(ConfigError, match="all runs that tune 'plain' died"):
    TuningResult.of(study(), result_of_tuning(losses))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tuning_seed": 1}, "tuning_seed is 1, one of the seeds"),
    ({"analysed_seed": 7}, "analysed_seed is 7"),
    ({"candidates": {}}, "tunes nothing"),
    ({"groups": {"plian": ("plain",)}}, "did you mean 'plain'"),
    ({"groups": {"plain": ("blok",)}}, "did you mean 'block'"),
    ({"groups": {"plain": ("block",), "drawn": ("block",)}}, "in two groups"),
  ],
)
def test_studies_that_cannot_be(fields, message):
  with pytest.raises(ConfigError, match=message):
    study(**fields)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.config import ConfigError, HealthConfig
from deltajax.training.health import Health, judge, MEMORY, WARM_UP


def run(config, losses, norms=None):
  """Which of these updates are made, and what is known after them."""
  step = jax.jit(lambda *args: judge(config, *args))
  health, made = Health.new(), []
  for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
    good, health = step(health, jnp.float32(loss), jnp.float32(norm))
    made.append(bool(good))
  return made, health


def test_what_is_not_finite_is_skipped_and_counted():
  nan, inf = float("nan"), float("inf")
  made, health = run(
    HealthConfig(),
    [1.0, nan, inf, 2.0, 1.0, 3.0],
    [1.0, 1.0, 1.0, inf, nan, 1.0],
  )
  assert made == [True, False, False, False, False, True]
  assert (int(health.skipped), int(health.in_a_row)) == (4, 0)
  assert int(health.made) == 2
  # What was skipped is not remembered.
  assert float(health.mean) == 2.0
  assert float(health.square) == 1.0


def test_mean_and_variance_are_those_of_the_first_losses():
  losses = np.random.default_rng(0).normal(3.0, 0.5, int(MEMORY))
  _, health = run(HealthConfig(), losses)
  np.testing.assert_allclose(health.mean, losses.mean(), rtol=1e-5)
  np.testing.assert_allclose(health.square, losses.var(), rtol=1e-4)


def test_a_spike_is_skipped_once_losses_are_known():
  losses = [*np.random.default_rng(0).normal(3.0, 0.1, 2 * WARM_UP)]
  losses[WARM_UP // 2] = 9.0  # nobody knows yet
  losses += [3.0, 9.0, 9.0, 3.0]
  made, health = run(HealthConfig(spike=6.0), losses)
  assert made == [True] * (len(losses) - 3) + [False, False, True]
  assert int(health.in_a_row) == 0
  made, _ = run(HealthConfig(), losses)
  assert all(made)


def test_a_loss_that_falls_is_no_spike():
  losses = list(np.exp(-np.arange(300) / 60) * 5 + 2)
  made, _ = run(HealthConfig(spike=3.0), losses)
  assert all(made)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"skip_limit": -1}, "health.skip_limit is -1"),
    ({"spike": 0.0}, "health.spike is 0.0"),
    ({"hang_seconds": -5.0}, "health.hang_seconds is -5.0"),
  ],
)
def test_bad_options(options, message):
  with pytest.raises(ConfigError, match=message):
    HealthConfig(**options)

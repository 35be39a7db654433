"""What of a routing variant matters: one field at a time.

    python -m train.compare configs/compare_ablations.py \\
        --out runs/compare_ablations

Additive or replacement, deltas or cumulative states, the embedding alone, sizes
of blocks, initial queries, gates, heads, sizes of keys. All are compared with
the standard model, and those that change Delta Block with Delta Block, too. 72
runs of about three minutes each on two idle CPU cores, less than four hours;
`--arms` and `--seeds` name a part.
"""

from typing import Any

from configs import small
from deltajax.comparison.plan import Arm, Comparison

NUM_BLOCKS = (1, 2, 3, 6, 12)  # of 12 layers; delta_block has 4


def _routing(variant: str, **fields: Any) -> Arm:
  return {
    f"model.routing.{name}": value
    for name, value in {"variant": variant, **fields}.items()
  }


KINDS = {
  "standard": _routing("standard"),
  # Of deltas: added to the stream, or in its place.
  "delta": _routing("delta"),
  "attnres_full": _routing("attnres_full"),
  "delta_replace": _routing("delta_replace"),
  # Of cumulative states, in the same two ways.
  "full_additive": _routing("full_additive"),
  "full_replace": _routing("full_replace"),
  "embedding_skip": _routing("embedding_skip"),
  "embedding_skip_scaled": _routing("embedding_skip_scaled"),
  "delta_block": _routing("delta_block"),
  "attnres_block": _routing("attnres_block"),
  "attnres_block_drawn": _routing("attnres_block", query_init_std=0.02),
}
DELTA_BLOCK = {
  **{
    f"delta_block_{n}_blocks": _routing("delta_block", num_blocks=n)
    for n in NUM_BLOCKS
  },
  "delta_block_drawn": _routing("delta_block", query_init_std=0.02),
  "delta_block_scalar_gate": _routing("delta_block", gate="scalar"),
  "delta_block_sigmoid_gate": _routing("delta_block", gate="sigmoid"),
  "delta_block_null_source": _routing("delta_block", null_source=True),
  "delta_block_2_heads": _routing("delta_block", heads=2),
  "delta_block_4_heads": _routing("delta_block", heads=4),
  "delta_block_keys_of_32": _routing("delta_block", key_dim=32),
  "delta_block_keys_of_16": _routing("delta_block", key_dim=16),
}


def get_config() -> Comparison:
  """The comparison."""
  return Comparison(
    base=small.get_config(),
    arms=KINDS | DELTA_BLOCK,
    baseline="standard",
    pairs={
      **dict.fromkeys(DELTA_BLOCK, ("delta_block",)),
      "delta": ("attnres_full", "full_additive", "delta_replace"),
      "full_replace": ("full_additive", "delta_replace", "attnres_full"),
      "delta_block": ("attnres_block", "embedding_skip"),
      "attnres_block_drawn": ("attnres_block",),
      "embedding_skip_scaled": ("embedding_skip",),
    },
    seeds=(0, 1, 2),
  )

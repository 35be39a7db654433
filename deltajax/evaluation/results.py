"""What an evaluation found, written and printed as docs/evaluation.md says."""

import dataclasses
import math
from typing import Any

from deltajax.checkpoints.names import count_parameters
from deltajax.config import to_dict
from deltajax.evaluation.estimates import Estimate, Quality
from deltajax.evaluation.fingerprints import (
  code_fingerprint,
  config_digest,
  parameters_digest,
)
from deltajax.evaluation.texts import Text
from deltajax.training.subjects import Subject

SCHEMA = "deltajax.evaluation"
VERSION = 1


def describe(
  subject: Subject, params: Any, dtype: str, **found: Any
) -> dict[str, Any]:
  """The file of results.

  Args:
    subject: the model.
    params: its parameters.
    dtype: that it was computed in.
    **found: `texts`, `tasks`, `groups` and `notes`, those that there are.
  """
  return {
    "schema": SCHEMA,
    "version": VERSION,
    "model": {
      "source": str(subject.stored),
      "config": to_dict(subject.config),
      "config_digest": config_digest(subject.config),
      "parameters": dataclasses.asdict(count_parameters(params)),
      "parameters_digest": parameters_digest(params),
      "dtype": dtype,
    },
    "code": code_fingerprint(),
    **{name: found.get(name, []) for name in ("texts", "tasks", "groups")},
    "notes": found.get("notes", []),
  }


def text_values(text: Text, quality: Quality, seconds: float) -> dict[str, Any]:
  """What was found on one text."""
  values = {
    field.name: getattr(quality, field.name)
    for field in dataclasses.fields(quality)
  }
  return (
    text.described()
    | {
      name: _numbers(x) if isinstance(x, Estimate) else x
      for name, x in values.items()
    }
    | {"seconds": seconds}
  )


def _numbers(estimate: Estimate) -> dict[str, float | None]:
  """JSON has no number for what is not finite."""
  return {
    name: x if x is not None and math.isfinite(x) else None
    for name, x in dataclasses.asdict(estimate).items()
  }


def quality_lines(text: Text, quality: Quality) -> list[str]:
  """What was found on one text, to be read."""
  bits = quality.bits_per_byte
  return [
    f"loss      {quality.loss} nats per token",
    f"          perplexity {quality.perplexity},"
    f" bits per byte {'unknown' if bits is None else bits}",
    f"          over {quality.tokens:,} tokens, {quality.bytes:,} bytes;"
    f" standard errors over {quality.units:,} {text.unit}s",
  ]


def task_lines(found: dict[str, Any]) -> list[str]:
  """A table of tasks and groups."""
  rows = [("task", "metric", "filter", "value", "+-", "shots", "documents")]
  for task in [*found["tasks"], *found["groups"]]:
    for metric in task["metrics"]:
      numbers = [
        "-" if x is None else f"{x:.4f}"
        for x in (metric["value"], metric["standard_error"])
      ]
      rows.append(
        (
          *(task["name"], metric["name"], metric["filter"], *numbers),
          *(str(task.get(name, "")) for name in ("shots", "samples")),
        )
      )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  ]

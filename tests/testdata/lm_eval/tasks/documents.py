"""What the YAML files beside it read."""

import json
import pathlib

import datasets


def load(file, **unused):
  del unused
  lines = pathlib.Path(__file__).with_name(file).read_text().splitlines()
  return {"test": datasets.Dataset.from_list(list(map(json.loads, lines)))}

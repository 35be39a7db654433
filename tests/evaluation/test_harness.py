"""lm-eval finds the same with our model as with its own of transformers."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest

from deltajax.checkpoints.huggingface import load_pretrained
from deltajax.config import ConfigError
from deltajax.data.tokenizers import get_tokenizer
from deltajax.evaluation.harness import HarnessLM
from deltajax.evaluation.tasks import GROUPS, load_tasks, run_tasks

DATA = pathlib.Path(__file__).parents[1] / "testdata" / "lm_eval"
TASKS = ("local_choice", "local_last_word", "local_rolling", "local_generate")
CONTEXT = 48


@pytest.fixture(scope="module")
def model():
  config, params = load_pretrained(DATA / "model")
  return dataclasses.replace(config, dtype="float32"), params


def make_lm(model, **options):
  tokenizer = get_tokenizer(f"{DATA}/model")
  return HarnessLM(
    *model, tokenizer, **{"context": CONTEXT, "batch_size": 4, **options}
  )


@pytest.fixture(scope="module")
def lm(model):
  return make_lm(model)


@pytest.fixture(scope="module")
def local_tasks():
  return load_tasks(TASKS, [DATA / "tasks"])


def requests(name):
  """The requests of a task, with what lm-eval's own model answers."""
  tasks = load_tasks([name], [DATA / "tasks"]).loaded["tasks"]
  tasks[name].build_all_requests(limit=None, rank=0, world_size=1)
  stored = json.loads((DATA / "references.json").read_text())
  answers = [x for found in stored["responses"][name] for x in found]
  return tasks[name].instances, answers


def check_results(found, expected):
  """Figures of tasks within float32, and all of them."""
  assert [task["name"] for task in found["tasks"]] == list(TASKS)
  for task in found["tasks"]:
    metrics = {f"{x['name']},{x['filter']}": x for x in task["metrics"]}
    assert metrics.keys() == expected[task["name"]].keys()
    for name, value in expected[task["name"]].items():
      np.testing.assert_allclose(metrics[name]["value"], value, rtol=1e-4)


def test_figures_of_tasks(lm, local_tasks):
  found = run_tasks(lm, local_tasks)
  stored = json.loads((DATA / "references.json").read_text())
  check_results(found, stored["results"])
  assert "torch" not in sys.modules
  assert found["groups"] == []
  choice = found["tasks"][0]
  assert (choice["samples"], choice["shots"], choice["version"]) == (12, 0, 1.0)
  (accuracy, _) = choice["metrics"]
  assert accuracy["higher_is_better"]
  assert 0 < accuracy["standard_error"] < 0.5
  assert len({task["fingerprint"] for task in found["tasks"]}) == len(TASKS)
  json.dumps(found, allow_nan=False)
  # Of fewer documents.
  one = load_tasks(["local_choice"], [DATA / "tasks"])
  fewer = run_tasks(lm, one, limit=2)
  assert fewer["tasks"][0]["samples"] == 2
  assert fewer["tasks"][0]["fingerprint"] != choice["fingerprint"]


@pytest.mark.parametrize("name", TASKS[:2])
@pytest.mark.parametrize("batch_size", [4, 64])
def test_each_likelihood(name, batch_size, model):
  instances, expected = requests(name)
  found = make_lm(model, batch_size=batch_size).loglikelihood(instances)
  for (x, x_greedy), (y, y_greedy) in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert x_greedy == y_greedy


def test_likelihoods_of_whole_texts(lm):
  instances, expected = requests("local_rolling")
  found = lm.loglikelihood_rolling(instances)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_texts_that_are_continued(lm, model):
  instances, expected = requests("local_generate")
  assert lm.generate_until(instances) == expected
  assert any(len(x) < 5 for x in expected)  # One meets what it stops at.
  alone = make_lm(model, batch_size=1)
  assert alone.generate_until(instances[:2]) == expected[:2]


class Request:
  def __init__(self, *args):
    self.args = args


def test_requests_that_share_a_row_are_computed_once(model):
  lm = make_lm(model)
  shapes = []
  score = lm._scorer.some

  def some(params, tokens, places, targets):
    shapes.append((tokens.shape, len(targets)))
    return score(params, tokens, places, targets)

  lm._scorer.some = some

  tokenizer = get_tokenizer(f"{DATA}/model")
  endings = [
    text
    for text in (tokenizer.decode([i]) for i in range(2, 300))
    if text[0] == " " and len(text) > 1 and len(tokenizer.encode(text)) == 1
  ][:5]
  choices = [Request("then", x) for x in endings]
  found = lm.loglikelihood(choices)
  assert len({score for score, _ in found}) == 5
  assert shapes == [((1, 16), 8)]
  # One less, of a longer text: nothing new is compiled.
  lm.loglikelihood([Request("then again, then", x) for x in endings[1:]] * 2)
  assert shapes[1] == shapes[0]


def test_options_of_generation(lm):
  start = "then softmax routes"
  greedy = lm.generate_until([Request(start, {"max_gen_toks": 9})] * 2)
  assert greedy[0] == greedy[1]
  options = {"do_sample": True, "temperature": 0.5, "top_k": 20}
  drawn = lm.generate_until(
    [Request(start, {**options, "max_new_tokens": 20})] * 3
  )
  assert len(set(drawn)) == 3
  with pytest.raises(ConfigError, match="'num_beams' is not known; there are"):
    lm.generate_until([Request(start, {"num_beams": 2, "max_tokens": 9})])
  with pytest.raises(ConfigError, match="48 new tokens; the model sees 48"):
    lm.generate_until([Request(start, {"max_gen_toks": 48})])


def test_a_continuation_that_the_model_cannot_see(lm):
  with pytest.raises(
    ConfigError, match=r"continuation has .* tokens; .* the 48"
  ):
    lm.loglikelihood([Request("a", " softmax" * 60)])


def test_cached_answers_are_offered(lm):
  found = {}
  lm.cache_hook.dbdict = found
  try:
    lm.loglikelihood([Request("then", " a")])
    lm.generate_until([Request("then", {"max_gen_toks": 4})])
  finally:
    lm.cache_hook.dbdict = None
  assert len(found) == 2


def test_a_task_that_asks_for_more_than_the_model_sees():
  tasks = load_tasks(["local_generate"], [DATA / "tasks"])
  with pytest.raises(ConfigError, match=r"local_generate lets .* 10 tokens"):
    tasks.bound_generation(None, context=10)
  tasks.bound_generation(3, context=10)
  options = tasks.loaded["tasks"]["local_generate"].config.generation_kwargs
  assert options["max_gen_toks"] == 3


def test_unknown_tasks_are_told_the_nearest():
  # Reads all that lm-eval has, which has the tasks of the papers.
  with pytest.raises(ConfigError, match=r"unknown task 'helaswag'.* hellaswag"):
    load_tasks(["delta_paper", "helaswag"])
  with pytest.raises(ConfigError, match="named twice"):
    load_tasks(["piqa", "piqa"])
  with pytest.raises(ConfigError, match="there is no such directory"):
    load_tasks(["piqa"], [pathlib.Path("no/such")])


def test_a_missing_lm_eval_is_one_message(monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(ConfigError, match=r"pip install '.\[eval\]'"):
    load_tasks(["piqa"])


def test_the_mean_of_a_group_counts_each_of_its_tasks_once(
  lm, local_tasks, monkeypatch
):
  both = ("local_choice", "local_last_word")
  monkeypatch.setitem(GROUPS, "both", both)
  found = run_tasks(lm, load_tasks(["both"], [DATA / "tasks"]))
  (group,) = found["groups"]
  assert (group["name"], group["tasks"]) == ("both", list(both))
  values = [
    next(x for x in task["metrics"] if x["name"] == "acc")
    for task in found["tasks"]
  ]
  (mean,) = group["metrics"]
  assert mean["value"] == sum(x["value"] for x in values) / 2
  error = np.hypot(*(x["standard_error"] for x in values)) / 2
  np.testing.assert_allclose(mean["standard_error"], error)


@pytest.mark.reference
def test_beside_the_model_of_transformers(model, local_tasks):
  """Live, and on requests of other lengths than the committed ones."""
  from tests.testdata.lm_eval import make_references

  theirs = make_references.reference_model()
  found = make_references.run(theirs)
  stored = json.loads((DATA / "references.json").read_text())
  for task, values in stored["results"].items():
    for name, value in values.items():
      np.testing.assert_allclose(found["results"][task][name], value, rtol=1e-4)
  check_results(run_tasks(make_lm(model), local_tasks), found["results"])
  rng = np.random.default_rng(0)
  words = ["then", "é", "the depth", " ", "\n", "softmax;", "<|start|>", "17"]
  pairs = [
    Request(
      "".join(rng.choice(words, rng.integers(0, 30))),
      " " + " ".join(rng.choice(words[:3], rng.integers(1, 9))),
    )
    for _ in range(40)
  ]
  lm = make_lm(model)
  for x, y in zip(
    lm.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
  ):
    np.testing.assert_allclose(x[0], y[0], rtol=1e-5, atol=1e-4)
    assert x[1] == y[1]
  texts = [Request(pair.args[0] + pair.args[1]) for pair in pairs]
  np.testing.assert_allclose(
    lm.loglikelihood_rolling(texts),
    theirs.loglikelihood_rolling(texts),
    rtol=1e-5,
  )

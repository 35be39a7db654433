"""deltajax: transformers whose residual connections route over depth.

  import deltajax

  config = deltajax.presets["delta_block-220m"]
  model = deltajax.TransformerLM(config)
  variables = model.init(key, tokens_BxT)
  logits_BxTxV = model.apply(variables, tokens_BxT).logits_BxTxV

`deltajax.routing` is a library of its own for other people's models.
"""

from deltajax.checkpoints.huggingface import (
  load_pretrained as load_pretrained,
  save_pretrained as save_pretrained,
)
from deltajax.config import (
  ModelConfig as ModelConfig,
  RopeScaling as RopeScaling,
)
from deltajax.evaluation.perplexity import evaluate as evaluate
from deltajax.models.generation import (
  generate as generate,
  Generator as Generator,
)
from deltajax.models.presets import presets as presets
from deltajax.models.sampling import Sampling as Sampling
from deltajax.models.transformer import (
  ModelOutput as ModelOutput,
  TransformerLM as TransformerLM,
)
from deltajax.routing import (
  build_schedule as build_schedule,
  ConfigError as ConfigError,
  depth_attention as depth_attention,
  DepthRouter as DepthRouter,
  DepthState as DepthState,
  RoutingConfig as RoutingConfig,
  VARIANTS as VARIANTS,
)

__version__ = "0.1.0"

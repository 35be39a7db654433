"""Depth routing: a library of its own, free of the models around it."""

from deltajax.routing.depth_attention import (
  depth_attention as depth_attention,
  depth_attention_weights as depth_attention_weights,
)
from deltajax.routing.memory import (
  DepthMemory as DepthMemory,
  DepthState as DepthState,
  Sources as Sources,
)
from deltajax.routing.router import (
  DepthRouter as DepthRouter,
  read_together as read_together,
)
from deltajax.routing.schedule import (
  build_schedule as build_schedule,
  Schedule as Schedule,
  Step as Step,
)
from deltajax.routing.validation import ConfigError as ConfigError
from deltajax.routing.variants import (
  Roles as Roles,
  RoutingConfig as RoutingConfig,
  Variant as Variant,
  VARIANTS as VARIANTS,
)

"""Depth routing: a library of its own, free of the models around it."""

from deltajax.routing.depth_attention import (
  depth_attention as depth_attention,
)
from deltajax.routing.depth_attention import (
  depth_attention_weights as depth_attention_weights,
)
from deltajax.routing.memory import (
  DepthMemory as DepthMemory,
)
from deltajax.routing.memory import (
  DepthState as DepthState,
)
from deltajax.routing.memory import (
  Sources as Sources,
)
from deltajax.routing.router import DepthRouter as DepthRouter
from deltajax.routing.schedule import (
  build_schedule as build_schedule,
)
from deltajax.routing.schedule import (
  Schedule as Schedule,
)
from deltajax.routing.schedule import (
  Step as Step,
)
from deltajax.routing.validation import ConfigError as ConfigError
from deltajax.routing.variants import (
  Roles as Roles,
)
from deltajax.routing.variants import (
  RoutingConfig as RoutingConfig,
)
from deltajax.routing.variants import (
  Variant as Variant,
)
from deltajax.routing.variants import (
  VARIANTS as VARIANTS,
)

"""An extension of Griffe: configs have the signature of their dataclass.

`@typed_config` makes a keyword-only dataclass, which reading the source alone
does not tell.
"""

import griffe


class TypedConfigs(griffe.Extension):
  """Gives classes that are decorated with `@typed_config` an `__init__`."""

  def on_class(self, *, cls, loader, **kwargs):
    """Adds it, from the annotated attributes."""
    del loader, kwargs
    if all(str(x.value) != "typed_config" for x in cls.decorators):
      return
    fields = [
      griffe.Parameter(
        field.name,
        annotation=field.annotation,
        kind=griffe.ParameterKind.keyword_only,
        default=field.value,
      )
      for field in cls.members.values()
      if field.is_attribute
      and field.annotation is not None
      and "property" not in field.labels
    ]
    own = griffe.Parameter(
      "self", kind=griffe.ParameterKind.positional_or_keyword
    )
    init = griffe.Function(
      "__init__", parameters=griffe.Parameters(own, *fields), parent=cls
    )
    cls.set_member("__init__", init)

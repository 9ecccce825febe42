"""The decoding options as fields of a framework's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, Field, create_model

from adafuse_llm.config import AdaFuseConfig, DecodeOptions

if TYPE_CHECKING:  # type checkers cannot read fields that are derived

    class OptionFields(BaseModel):
        """A mixin with one field for each option of `AdaFuseConfig`; None: the engine's value."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _TYPES = {**get_type_hints(DecodeOptions), "json_schema": dict[str, Any]}
    OptionFields = create_model(
        "OptionFields",
        __doc__="A mixin with one field for each option of `AdaFuseConfig`.",
        __module__=__name__,
        **{
            name: (_TYPES[name] | None, Field(default=None, description=field.description))
            for name, field in AdaFuseConfig.model_fields.items()
        },
    )

"""GLM-5-Next: its sparse attention refuses packed sequences, since it would mix them."""

from __future__ import annotations

from flacompose.integrations.modeling.forward import unpacked_forward

FORWARDS = {"Glm5NextTextAttention": unpacked_forward}

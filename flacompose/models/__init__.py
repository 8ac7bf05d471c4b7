"""Language models of flacompose's layers."""

from typing import TYPE_CHECKING

from flacompose._peer import absent_from
from flacompose.models.config import RecurrentConfig
from flacompose.models.decoder import Decoder
from flacompose.models.recurrent_lm import RecurrentLM

__all__ = ["Decoder", "RecurrentConfig", "RecurrentLM"]

if not TYPE_CHECKING:  # a type checker would accept every name through it
    __getattr__ = absent_from(__name__)

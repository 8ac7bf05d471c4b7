"""Whole models of flacompose's layers."""

from flacompose.models.config import RecurrentConfig
from flacompose.models.decoder import Decoder
from flacompose.models.recurrent_lm import RecurrentLM

__all__ = ["Decoder", "RecurrentConfig", "RecurrentLM"]

"""Checks and preparations of the arguments of public functions."""

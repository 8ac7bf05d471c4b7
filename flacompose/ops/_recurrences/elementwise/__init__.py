"""Recurrences in which every number of the state goes its own way."""

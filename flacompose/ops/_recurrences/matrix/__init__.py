"""Recurrences whose state is a matrix, by its decay and by whether tokens erase from it."""

"""Tokens that several ranks share: what a span of tokens does to a state, and how ranks exchange it."""

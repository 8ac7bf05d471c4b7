"""Tokens that several ranks share: the transition of a state over a span of tokens, and its exchange between ranks."""

"""The layers, against a token-by-token statement of each in float64 (`truth`)."""

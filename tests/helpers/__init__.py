"""What several tests need, and the programs that are no part of ``make test``."""

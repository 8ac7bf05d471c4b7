"""One token of mLSTM."""

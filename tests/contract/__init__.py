"""The contract every op keeps, as one suite: an op enters it by its line in `cases.CASES`."""

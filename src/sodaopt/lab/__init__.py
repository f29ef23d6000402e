"""The lab: train, compare and sweep small GPTs, and look at the results (extra: `lab`)."""

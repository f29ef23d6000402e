"""The lab: train, compare and sweep small GPTs, and report the results (extra: `lab`)."""

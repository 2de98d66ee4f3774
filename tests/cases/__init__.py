"""The case harness: faults of neighbouring systems, as files, run against the real proxy process."""

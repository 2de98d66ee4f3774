"""Health: probe schedule, verdicts by runs of equal results, and the loop that joins them."""

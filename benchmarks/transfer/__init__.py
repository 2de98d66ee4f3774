"""What the producer's end moves, beside Mooncake alone."""

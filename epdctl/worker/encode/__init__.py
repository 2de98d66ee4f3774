"""The vision engine process: scheduler, cache, tower."""

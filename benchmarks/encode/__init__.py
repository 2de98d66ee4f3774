"""The encode worker beside the bare tower: images a second, cache hits, start-up, memory, scheduling."""

"""Bundled workers: vision engine, reference language engine, and both ends of EC transfer."""

"""Embedding-cache control messages and client: the only part that proxy and worker share."""

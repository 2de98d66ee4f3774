"""Repairs for vLLM's CPU wheel; see the README beside this package's folder."""

"""Proxies compared on the same mock upstreams, in one run."""

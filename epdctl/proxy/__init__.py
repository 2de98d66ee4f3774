"""The data plane: content, plan, encode fan-out, rewriting, hand-off and relay of one request."""

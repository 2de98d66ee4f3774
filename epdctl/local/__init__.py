"""A local deployment of any XeYpd or XeYpZd shape: what to start, in which order, and taking it down."""

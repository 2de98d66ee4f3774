"""Build of the object graph of `epdctl serve`."""

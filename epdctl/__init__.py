"""Control plane and workers for encode-prefill-decode (EPD) disaggregated multimodal serving."""

__version__ = "0.1.0"

"""How the checkpoints under `models/tiny-vlm/` are made, from the pictures to the weights.

`scripts/make-tiny-model` is the way in. Nothing is downloaded, and no clock, host name or hash seed enters
the weights: everything follows from one integer.

Rules of this package: `pictures` and `questions` import neither torch nor transformers, so that tests and
examples can draw what the models were trained on; no module reads the environment.
"""

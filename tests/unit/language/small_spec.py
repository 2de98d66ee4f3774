"""The facts of a small language model that takes pictures and videos."""

from __future__ import annotations

from epdctl.worker.language.spec import ModelSpec

PAD, VIDEO_PAD = 7, 8
SPEC = ModelSpec(
    family="qwen2_5_vl",
    hidden_size=12,
    layers=2,
    kv_heads=3,
    head_dim=4,
    vocab_size=10,
    max_positions=100,
    dtype="float32",
    levels=0,
    merge=2,
    image_token_id=PAD,
    eos_token_ids=(1,),
    video_token_id=VIDEO_PAD,
)

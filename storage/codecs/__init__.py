"""Codecs: rows in fewer bytes, one file a precision."""

from __future__ import annotations

from storage.codecs._codec import Codec, Draws
from storage.codecs.bf16 import Bf16
from storage.codecs.fp16 import Fp16
from storage.codecs.fp32 import Fp32
from storage.codecs.int8 import Int8

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Bf16(), Fp16(), Int8())}
"""Every codec by the name of its precision."""

__all__ = ["CODECS", "Codec", "Draws"]

"""The two released weight formats, FP8 blocks and MXFP4: encode and decode, nothing else. Knows no model."""

from automimo.quantization.fp8 import check_scales, decode_fp8, encode_fp8, has_nan
from automimo.quantization.mxfp4 import GROUP, decode_mxfp4, encode_mxfp4
from automimo.quantization.strips import BLOCK, Strip, block_strips, scale_shape

__all__ = [
    "BLOCK",
    "GROUP",
    "Strip",
    "block_strips",
    "check_scales",
    "decode_fp8",
    "decode_mxfp4",
    "encode_fp8",
    "encode_mxfp4",
    "has_nan",
    "scale_shape",
]

"""From one checkpoint folder to another: layout, quantisation and dtypes change, values do not. No model is built."""

from automimo.convert.plan import Conversion, ConvertOptions, plan_conversion
from automimo.convert.run import convert_checkpoint, run_convert
from automimo.convert.verify import Verification, verify_conversion

__all__ = [
    "Conversion",
    "ConvertOptions",
    "Verification",
    "convert_checkpoint",
    "plan_conversion",
    "run_convert",
    "verify_conversion",
]

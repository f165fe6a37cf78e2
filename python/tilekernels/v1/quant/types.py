"""The alias of quantised pairs (data, sf)."""

from ...quant import QuantTensor as QuantTensor

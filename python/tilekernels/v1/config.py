"""The settings of generation 1: those of the main package, so that either generation sees what the other set."""

from .. import config as _config
from ..errors import DeviceError
from ._asserting import asserting

__all__ = ["get_device_num_sms", "get_max_smem_per_sm", "get_num_sms", "set_num_sms"]

get_device_num_sms = asserting(_config.get_device_num_sms)
get_num_sms = asserting(_config.get_num_sms)
set_num_sms = asserting(_config.set_num_sms)


def get_max_smem_per_sm() -> int:
    """Bytes of shared memory of an SM of the current GPU; raises DeviceError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("config.get_max_smem_per_sm: torch finds no CUDA GPU; `tilekernels doctor` says why")
    size: int = torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor
    return size

"""Sizes and random inputs."""

from ...testing.generator import _is_full_test
from ...testing.generator import generate_e5m6_inputs as generate_e5m6_inputs
from ...testing.generator import generate_hidden_sizes as generate_hidden_sizes
from ...testing.generator import generate_moe_params as generate_moe_params
from ...testing.generator import generate_num_tokens as generate_num_tokens
from ...testing.generator import generate_rand_float as generate_rand_float
from ...testing.generator import generate_topk_idx as generate_topk_idx
from ..config import get_device_num_sms

_RESERVED_SMS = 20  # as a communication kernel beside the operators would take


def generate_num_sms() -> list[int]:
    """Limits for `set_num_sms`: all but 20 SMs of the current GPU, then all, so that a test ends at all.

    A full test run starts with one.
    """
    num_sms = get_device_num_sms()
    sizes = [max(num_sms - _RESERVED_SMS, 1), num_sms]
    return [1, *sizes] if _is_full_test() else sizes

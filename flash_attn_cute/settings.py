"""Every environment variable the package reads, in one place.

FLASH_ATTN_CUTE_CHECK=1  Read cu_seqlens and seqused on every call, whatever the backend, and raise
                         ValueError where they contradict the tensors. Debugging only: on a GPU it
                         waits for the device.
"""

import os


def check_data() -> bool:
    """Whether every call verifies the values of its offsets (``FLASH_ATTN_CUTE_CHECK``).

    Raises:
        ValueError: the variable holds anything but ``0`` or ``1``.
    """
    value = os.environ.get("FLASH_ATTN_CUTE_CHECK", "0")
    if value not in ("0", "1"):
        raise ValueError(f"FLASH_ATTN_CUTE_CHECK: expected 0 or 1, got {value!r}")
    return value == "1"

"""Processes that want one kernel, of which the folder and the bundle of compiled kernels are tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig, forward_config

CONFIG = forward_config("bfloat16", 64, 64, Features())

PROCESS = """
import json, time
import cutlass.cute.runtime, tvm_ffi  # their imports are not our time
from flash_attn_cute.jit import cache
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm90.forward_config import forward_config
start = time.process_time()  # which other processes take nothing of
kernel = cache.kernel(forward_config("bfloat16", 64, 64, Features()))
seconds = time.process_time() - start
try:
    kernel(0)
except TypeError as error:
    print(json.dumps([cache.compile_count(), seconds, str(error)]))
"""


class Outcome(NamedTuple):
    """Work of a process to get the kernel of ``CONFIG``."""

    compiles: int
    seconds: float
    signature: str  # what the kernel says to wrong arguments


def start(code: str, folder: Path, **variables: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"FLASH_ATTN_CUTE_CACHE_DIR": str(folder)} | variables
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def outcome(process: "subprocess.Popen[str]") -> Outcome:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return Outcome(*json.loads(output))


class Compiler:
    """Stands in for the compiler: hands out code that was compiled before, and counts."""

    def __init__(self, code: bytes) -> None:
        self.code = code
        self.calls = 0

    def __call__(self, config: ForwardConfig) -> bytes:
        self.calls += 1
        return self.code

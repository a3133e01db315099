"""Memory linear in the sequence: forward and backward in a process of their own, resident memory watched."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from flash_attn_cute import flash_attn_varlen_func

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

def step(total, queries=None, nheads=1, **options):
    queries = queries or total
    q = torch.randn(queries, nheads, 64, requires_grad=True)
    k, v = (torch.randn(total, 1, 64, requires_grad=True) for _ in range(2))
    cu_q, cu_k = (torch.tensor([0, rows], dtype=torch.int32) for rows in (queries, total))
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, queries, total, **options).sum().backward()
    return q.grad

total, options = int(sys.argv[1]), eval(sys.argv[2])
step(256, **options)  # what the libraries take once
before = peak()
assert step(total, **options).isfinite().all()
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("total", "options", "limit"),
    [
        (65_536, {"causal": True}, 1e9),
        (65_536, {"causal": True, "window_size": (4096, 0)}, 1e9),
        (8_192, {"softcap": 20.0}, 0.13e9),  # every key for every query; the scores alone would be 0.27e9
        (32_768, {"softcap": 20.0, "queries": 64, "nheads": 32}, 0.2e9),  # the scores alone would be 0.27e9
    ],
    ids=["fused", "window", "softcap", "multi-query"],
)
def test_linear_memory(total: int, options: dict[str, object], limit: float, tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(total), repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    print(f"{grown / 1e6:.0f} MB")
    assert 0 < grown < limit

"""A process that answers as a worker of the self-check does, and goes wrong as its steps' names say; without torch.

    python tests/lib/selfcheck_worker.py REQUEST DESCRIPTOR

With ``start`` among the request's steps it goes wrong in that way ahead of all steps, such as "start: hang".
"""

import json
import os
import subprocess
import sys
import time

request, descriptor = json.loads(sys.argv[1]), int(sys.argv[2])


def say(**answer: object) -> None:
    """Writes an answer to the descriptor."""
    os.write(descriptor, json.dumps(answer).encode() + b"\n")


def act(what: str) -> None:
    """Does what a step's name says."""
    if what == "hang":
        time.sleep(1000)
    elif what == "abort":
        os.abort()
    elif what == "exit":
        os._exit(3)
    elif what == "raise":
        say(broken="ValueError: no")
        sys.exit(1)
    elif what == "wrong":
        say(wrong="out: 3 of 4 elements are wrong")
    elif what == "unable":
        say(unable="the GPU's memory is full")
        sys.exit(1)
    elif what == "megabytes":
        for _ in range(10):
            print("x" * 2**20)
            print("y" * 2**20, file=sys.stderr)
        say(done=None)
    elif what == "no JSON":
        os.write(descriptor, b"Segmentation fault\n")
    elif what == "leaves another":  # which holds the descriptor, so that the parent sees no end
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], pass_fds=[descriptor])
        os._exit(0)
    elif what == "left out":
        say(done="no memory")
    else:
        say(done=None)


for name in request["steps"]:
    if name.startswith("start: "):
        act(name.removeprefix("start: "))
say(ready=None)
for line in sys.stdin:
    asked = json.loads(line)
    print(f"pid {os.getpid()}: {asked}", flush=True)
    act(asked["step"].partition(": ")[2])

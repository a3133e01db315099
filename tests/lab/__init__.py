"""The instruments of ``lab``: each finds what it is for, and refuses what it does not know."""

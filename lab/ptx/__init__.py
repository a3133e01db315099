"""Reads PTX.

``tree`` makes functions of a text, their instructions with operands, and the flow of control between them.
``threads`` follows each thread of a kernel, with the numbers and addresses in its registers.
"""

"""Reads PTX.

    tree     functions of a text, their instructions with operands, and the flow of control between them
    threads  each thread of a kernel: where it goes, and the numbers and addresses in its registers

What an instruction means is for others to know: the lint, the interpreter and the emulator.
"""

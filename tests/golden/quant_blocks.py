#!/usr/bin/env python3
"""Prints what common/base/quant_blocks_test.cc holds of each GGUF block format: numbers that gguf-py (pip install gguf) makes of a block's bytes.

The bytes are those of MakeBlock in that test: a linear congruential sequence that begins with the block's length, F16 scales put in. Written with gguf 0.19.
"""
import re

import gguf
import numpy as np

# type, bytes, F16 scales by place, elements that are shown
BLOCKS = [
    ("Q8_0", 34, {0: 0x2C01}, [0, 1, 15, 16, 31]),
    ("Q6_K", 210, {208: 0x1403}, [0, 16, 31, 32, 63, 64, 100, 127, 128, 160, 200, 255]),
    ("Q4_K", 144, {0: 0x2007, 2: 0x2805}, [0, 31, 32, 63, 64, 100, 128, 160, 200, 255]),
    ("Q5_K", 176, {0: 0x1C0B, 2: 0x2803}, [0, 31, 32, 63, 64, 100, 128, 160, 200, 255]),
    ("Q3_K", 110, {108: 0x2405}, [0, 16, 31, 32, 63, 64, 100, 127, 128, 160, 200, 255]),
]


def short(value):
    return re.sub(r"\.?0*p", "p", float(value).hex())


def block_of(size, halves):
    state, block = size, bytearray()
    for _ in range(size):
        state = (state * 1664525 + 1013904223) % 2**32
        block.append(state >> 24)
    for at, bits in halves.items():
        block[at:at + 2] = bits.to_bytes(2, "little")
    return np.frombuffer(bytes(block), dtype=np.uint8)


for name, size, halves, shown in BLOCKS:
    values = gguf.quants.dequantize(block_of(size, halves), gguf.GGMLQuantizationType[name]).astype(np.float64)
    places = ", ".join(f"{{{at}, {bits:#06x}}}" for at, bits in halves.items())
    print(f"      {{DType::k{name},\n       {{{places}}},\n       {{" + ", ".join(f"{{{i}, {short(values[i])}}}" for i in shown) + "},")
    print(f"       {short(sum(values.tolist()))},\n       {short(sum(v * (i + 1) for i, v in enumerate(values.tolist())))}}},")

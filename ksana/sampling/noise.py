"""Randomness without state: noise is a function of (seed, choice index, output position, token id).

Defined here once, bit by bit, with integers of 32 bits and float32 operations that IEEE 754 rounds exactly
(+, -, *, /, never fused, no library function). Three things compute it and must agree in every bit: the
integers of this module (`row_key`, `token_hash`), the torch code of `noise_torch`, and `kernels/native`.

    key     = two 32-bit words, one per row, from seed, choice and position       (row_key)
    hash    = 32 bits per token id, a bijection of the id for a given key         (token_hash)
    uniform = (hash + 0.5) / 2^32, rounded to float32, at most 1 - 2^-24          in (0, 1)
    exponential = -log(1 - uniform), gumbel = -log(exponential)                   (noise_torch)

The mixing steps are the finalizers of MurmurHash3 (fmix32, A. Appleby, public domain) and of C. Wellons'
hash prospector (triple32, public domain), both measured for avalanche by their authors.
"""

from __future__ import annotations

MASK = 0xFFFFFFFF


def fmix32(x: int) -> int:
    """MurmurHash3's 32-bit finalizer: a bijection with good avalanche."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK
    return x ^ x >> 16


def row_key(seed: int, choice_index: int, output_position: int) -> tuple[int, int]:
    """Two words for all tokens of one draw. 0 <= seed < 2^64, the others 0 <= n < 2^32; else ValueError."""
    if not 0 <= seed < 1 << 64 or not 0 <= choice_index <= MASK or not 0 <= output_position <= MASK:
        raise ValueError(
            f"noise of seed {seed}, choice {choice_index}, position {output_position}: out of range"
        )
    a, b = 0x9E3779B9, 0x7F4A7C15
    for word in (seed & MASK, seed >> 32, choice_index, output_position):
        a = fmix32((a ^ word) + 0x9E3779B9 & MASK)
        b = fmix32((b + word & MASK) ^ a)
    return a, b


def token_hash(key: tuple[int, int], token_id: int) -> int:
    """32 bits for one token id, 0 <= id < 2^32."""
    x = (token_id ^ key[0]) & MASK
    x ^= x >> 17
    x = x * 0xED5AD4BB & MASK
    x ^= x >> 11
    x = x + key[1] & MASK
    x = x * 0xAC4C1B51 & MASK
    x ^= x >> 15
    x = x * 0x31848BAB & MASK
    return x ^ x >> 14

// The block formats: some columns of a row as small integers beside what scales them, all in one run of bytes.
// Room: common/base. Threads: any; pure functions.
//
// Q8_0, Q6_K, Q5_K, Q4_K and Q3_K are GGUF's (ggml's block_q8_0, block_q6_K and so on); F16 numbers and integers are little-endian.
//   Q8_0    32 columns, 34 bytes:  F16 d | int8 q[32].                               w = d q
//   Q4_K   256 columns, 144 bytes: F16 d | F16 dmin | 12 bytes: 8 scales and 8 minima of 6 bits | 128 bytes: q of 4 bits.
//          Byte 32 i + k of q holds columns 64 i + k (low nibble) and 64 i + 32 + k (high). w = (d scale[c / 32]) q - (dmin min[c / 32])
//   Q5_K   256 columns, 176 bytes: F16 d, F16 dmin and 12 bytes of scales and minima as in Q4_K | 32 bytes: the fifth bits of q, bit j of byte k that of
//          column 32 j + k | 128 bytes: q's lower four as in Q4_K. w as in Q4_K
//   Q3_K   256 columns, 110 bytes: 32 bytes: the third bits of q, placed as the fifth ones of Q5_K | 64 bytes: its lower two, those of column 128 h + 32 j + k in bits
//          2 j and 2 j + 1 of byte 32 h + k | 12 bytes: 16 scales of 6 bits, the lower four of scale p and p + 8 in byte p, the upper two of scales
//          4 j + i in bits 2 j and 2 j + 1 of byte 8 + i | F16 d. w = (d (scale[c / 16] - 32)) (q - 4)
//   Q6_K   256 columns, 210 bytes: 128 bytes: q's lower 4 bits | 64 bytes: its upper 2 | int8 scale[16] | F16 d. w = (d scale[c / 16]) (q - 32)
// I4_G32 is what Hearth makes of compressed-tensors' "pack-quantized" INT4 with groups of 32: the group's scale in front of its nibbles.
//   I4_G32  32 columns, 18 bytes:  BF16 scale | 16 bytes: column 2 k in the low nibble of byte k, 2 k + 1 in the high. w = scale (q - 8)
//
// d times a scale is exact in F32 (11 + 8 bits at most), so is that times q but for Q6_K's longest (25 bits).
#pragma once

#include <cstdint>

#include "common/base/dtype.h"

namespace hearth {

inline constexpr int kBlockColumnsMax = 256;
inline constexpr int kBlockPartsMax = 16;
inline constexpr int64_t kRowColumnsMax = 65536;  // columns of a row: kernels keep a row of activations on their stack

// A block's numbers: element i is scale[i / part_columns] * q[i] - min[i / part_columns].
struct DecodedBlock {
  int columns = 0;
  int part_columns = 0;
  int8_t q[kBlockColumnsMax];
  float scale[kBlockPartsMax];
  float min[kBlockPartsMax];  // 0 but for Q4_K and Q5_K
};
// `dtype`: a block format; `block`: BlockOf(dtype).bytes, at any address.
void DecodeBlock(DType dtype, const uint8_t* block, DecodedBlock& out);

// A row of `columns` (whole blocks) as floats: scale * q - min in F32, rounded once where it has to be.
void DequantizeRow(DType dtype, const void* row, int64_t columns, float* out);

}  // namespace hearth

#include "common/base/quant_blocks.h"

#include <cstring>

#include "common/base/check.h"

namespace hearth {
namespace {

uint16_t Load16(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}

void DecodeQ8_0(const uint8_t* block, DecodedBlock& out) {
  out.part_columns = 32;
  out.scale[0] = F16ToFloat(Load16(block));
  out.min[0] = 0.0f;
  std::memcpy(out.q, block + 2, 32);
}

void DecodeQ6_K(const uint8_t* block, DecodedBlock& out) {
  out.part_columns = 16;
  const uint8_t* low = block;
  const uint8_t* high = block + 128;
  const float d = F16ToFloat(Load16(block + 208));
  for (int part = 0; part < 16; ++part) {
    out.scale[part] = d * static_cast<float>(static_cast<int8_t>(block[192 + part]));
    out.min[part] = 0.0f;
  }
  // Halves of 128 columns; a half's 64 bytes of low nibbles serve columns 0-63 and, shifted, 64-127; its 32 bytes of upper bits each run of 32.
  for (int c = 0; c < 256; ++c) {
    const int half = c / 128, in_half = c % 128;
    const int nibble = (low[64 * half + in_half % 64] >> (in_half / 64 * 4)) & 15;
    const int upper = (high[32 * half + in_half % 32] >> (in_half / 32 * 2)) & 3;
    out.q[c] = static_cast<int8_t>((nibble | upper << 4) - 32);
  }
}

// The sixteen bytes that Q4_K and Q5_K begin with.
void DecodeScalesAndMinima(const uint8_t* block, DecodedBlock& out) {
  out.part_columns = 32;
  const float d = F16ToFloat(Load16(block));
  const float dmin = F16ToFloat(Load16(block + 2));
  const uint8_t* packed = block + 4;
  for (int part = 0; part < 8; ++part) {
    // The first four have six bits in one byte; the others four bits in the third group and two above the first and second.
    const int scale = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    const int min = part < 4 ? packed[part + 4] & 63 : (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
    out.scale[part] = d * static_cast<float>(scale);
    out.min[part] = dmin * static_cast<float>(min);
  }
}

void DecodeQ4_K(const uint8_t* block, DecodedBlock& out) {
  DecodeScalesAndMinima(block, out);
  for (int c = 0; c < 256; ++c) {
    out.q[c] = static_cast<int8_t>((block[16 + c / 64 * 32 + c % 32] >> (c / 32 % 2 * 4)) & 15);
  }
}

void DecodeQ5_K(const uint8_t* block, DecodedBlock& out) {
  DecodeScalesAndMinima(block, out);
  for (int c = 0; c < 256; ++c) {
    const int nibble = (block[48 + c / 64 * 32 + c % 32] >> (c / 32 % 2 * 4)) & 15;
    const int fifth = (block[16 + c % 32] >> (c / 32)) & 1;
    out.q[c] = static_cast<int8_t>(nibble | fifth << 4);
  }
}

void DecodeQ3_K(const uint8_t* block, DecodedBlock& out) {
  out.part_columns = 16;
  const uint8_t* packed = block + 96;
  const float d = F16ToFloat(Load16(block + 108));
  for (int part = 0; part < 16; ++part) {
    const int lower = (packed[part % 8] >> (part / 8 * 4)) & 15;
    const int upper = (packed[8 + part % 4] >> (part / 4 * 2)) & 3;
    out.scale[part] = d * static_cast<float>((lower | upper << 4) - 32);
    out.min[part] = 0.0f;
  }
  for (int c = 0; c < 256; ++c) {
    const int lower = (block[32 + c / 128 * 32 + c % 32] >> (c / 32 % 4 * 2)) & 3;
    const int third = (block[c % 32] >> (c / 32)) & 1;
    out.q[c] = static_cast<int8_t>((lower | third << 2) - 4);
  }
}

void DecodeI4G32(const uint8_t* block, DecodedBlock& out) {
  out.part_columns = 32;
  out.scale[0] = ToFloat(bf16{Load16(block)});
  out.min[0] = 0.0f;
  for (int c = 0; c < 32; ++c) out.q[c] = static_cast<int8_t>(((block[2 + c / 2] >> (c % 2 * 4)) & 15) - 8);
}

}  // namespace

void DecodeBlock(DType dtype, const uint8_t* block, DecodedBlock& out) {
  out.columns = static_cast<int>(BlockOf(dtype).elements);
  switch (dtype) {
    case DType::kQ8_0: return DecodeQ8_0(block, out);
    case DType::kQ6_K: return DecodeQ6_K(block, out);
    case DType::kQ4_K: return DecodeQ4_K(block, out);
    case DType::kQ5_K: return DecodeQ5_K(block, out);
    case DType::kQ3_K: return DecodeQ3_K(block, out);
    case DType::kI4G32: return DecodeI4G32(block, out);
    default: break;
  }
  HEARTH_CHECK(false && "not a block format");
}

void DequantizeRow(DType dtype, const void* row, int64_t columns, float* out) {
  const DTypeBlock block = BlockOf(dtype);
  DecodedBlock numbers;
  for (int64_t c = 0; c < columns; c += block.elements) {
    DecodeBlock(dtype, static_cast<const uint8_t*>(row) + c / block.elements * block.bytes, numbers);
    for (int i = 0; i < numbers.columns; ++i) {
      const int part = i / numbers.part_columns;
      out[c + i] = numbers.scale[part] * static_cast<float>(numbers.q[i]) - numbers.min[part];
    }
  }
}

}  // namespace hearth

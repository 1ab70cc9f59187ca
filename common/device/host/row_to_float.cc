#include "common/device/host/row_to_float.h"

#include <cstring>

#include "common/base/check.h"

namespace hearth {

void RowToFloat(const WeightView& table, int64_t row, float* out) {
  const int64_t n = table.cols;
  switch (table.dtype) {
    case DType::kBF16: {
      const bf16* p = static_cast<const bf16*>(table.data) + row * table.row_stride;
      for (int64_t i = 0; i < n; ++i) out[i] = ToFloat(p[i]);
      return;
    }
    case DType::kF32:
      std::memcpy(out, static_cast<const float*>(table.data) + row * table.row_stride, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kF16: {
      const uint16_t* p = static_cast<const uint16_t*>(table.data) + row * table.row_stride;
      for (int64_t i = 0; i < n; ++i) out[i] = F16ToFloat(p[i]);
      return;
    }
    case DType::kF8E4M3: {
      const uint8_t* p = static_cast<const uint8_t*>(table.data) + row * table.row_stride;
      const float* scales = table.scales + (table.scale_row0 + row) / kScaleBlock * table.scale_stride;
      for (int64_t i = 0; i < n; ++i) out[i] = F8E4M3ToFloat(p[i]) * scales[i / kScaleBlock];
      return;
    }
    case DType::kQ8_0:
    case DType::kQ6_K:
    case DType::kQ5_K:
    case DType::kQ4_K:
    case DType::kQ3_K:
    case DType::kI4G32: {
      const uint64_t row_bytes = DTypeBytes(table.dtype, static_cast<uint64_t>(table.row_stride));
      return DequantizeRow(table.dtype, static_cast<const uint8_t*>(table.data) + static_cast<uint64_t>(row) * row_bytes, n, out);
    }
    case DType::kInvalid: break;
  }
  HEARTH_CHECK(false && "a table without dtype");
}

}  // namespace hearth

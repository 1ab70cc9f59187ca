// The scalar path: plain loops in F32, the reference that the SIMD paths are tested against and the way on any x86-64
// CPU. Room: common/kernels. Threads: any; no state.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "common/kernels/portable_exp.h"
#include "common/kernels/tables.h"

namespace hearth {
namespace {

// F8E4M3ToFloat as a table: a call per weight would make this path useless.
struct F8Table {
  float value[256] = {};
  constexpr F8Table() {
    for (uint32_t code = 0; code < 256; ++code) {
      const uint32_t exponent = (code >> 3) & 15;
      const uint32_t mantissa = code & 7;
      float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
      if (exponent != 0) magnitude = std::bit_cast<float>(((exponent + 120) << 23) | (mantissa << 20));
      if ((code & 0x7f) == 0x7f) magnitude = __builtin_nanf("");
      value[code] = (code & 0x80) ? -magnitude : magnitude;
    }
  }
};
constexpr F8Table kF8;

// Element i of a row in the checkpoint's precision. Reads bytes: checkpoints promise no alignment.
template <DType kDType>
float Element(const uint8_t* row, int64_t i) {
  if constexpr (kDType == DType::kF8E4M3) {
    return kF8.value[row[i]];
  } else if constexpr (kDType == DType::kF32) {
    float value;
    std::memcpy(&value, row + 4 * i, sizeof(value));
    return value;
  } else {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, sizeof(bits));
    if constexpr (kDType == DType::kBF16) return ToFloat(bf16{bits});
    return F16ToFloat(bits);
  }
}

const uint8_t* RowData(const WeightView& w, int64_t row) {
  return static_cast<const uint8_t*>(w.data) + DTypeBytes(w.dtype, static_cast<uint64_t>(row * w.row_stride));
}

const float* RowScales(const WeightView& w, int64_t row) { return w.scales + (w.scale_row0 + row) / kScaleBlock * w.scale_stride; }

// Calls f.template operator()<dtype>().
template <class F>
void ForDType(DType dtype, F f) {
  switch (dtype) {
    case DType::kF8E4M3: return f.template operator()<DType::kF8E4M3>();
    case DType::kBF16: return f.template operator()<DType::kBF16>();
    case DType::kF16: return f.template operator()<DType::kF16>();
    case DType::kF32: return f.template operator()<DType::kF32>();
    default: return;
  }
}

void ScalarToBf16(const float* src, bf16* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToBf16(src[i]);
}

void RmsNorm(const float* x, const float* weight, float eps, bf16* out, int64_t n) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = ToBf16(x[i] * inverse * weight[i]);
}

// A token's activations, in one term or in two that are added up.
struct Activations {
  const bf16* high;
  const bf16* low;  // null: none
  float operator[](int64_t c) const { return low == nullptr ? ToFloat(high[c]) : ToFloat(high[c]) + ToFloat(low[c]); }
};

template <DType kDType>
float DotRange(const uint8_t* row, const Activations& x, int64_t begin, int64_t end) {
  float sum = 0.0f;
  for (int64_t c = begin; c < end; ++c) sum += Element<kDType>(row, c) * x[c];
  return sum;
}

template <DType kDType>
float RowDot(const WeightView& w, int64_t row, const Activations& x) {
  const uint8_t* data = RowData(w, row);
  if constexpr (kDType != DType::kF8E4M3) return DotRange<kDType>(data, x, 0, w.cols);
  const float* scales = RowScales(w, row);
  float total = 0.0f;
  for (int64_t begin = 0; begin < w.cols; begin += kScaleBlock) {
    const int64_t end = begin + kScaleBlock < w.cols ? begin + kScaleBlock : w.cols;
    total += DotRange<kDType>(data, x, begin, end) * scales[begin / kScaleBlock];
  }
  return total;
}

// One row of a block format.
float BlockRowDot(const WeightView& w, int64_t row, const Activations& x) {
  const DTypeBlock block = BlockOf(w.dtype);
  const uint8_t* data = RowData(w, row);
  float total = 0.0f;
  DecodedBlock numbers;
  for (int64_t c = 0; c < w.cols; c += block.elements, data += block.bytes) {
    DecodeBlock(w.dtype, data, numbers);
    for (int part = 0; part * numbers.part_columns < numbers.columns; ++part) {
      float sum = 0.0f;
      float x_sum = 0.0f;
      for (int i = part * numbers.part_columns; i < (part + 1) * numbers.part_columns; ++i) {
        sum += static_cast<float>(numbers.q[i]) * x[c + i];
        x_sum += x[c + i];
      }
      total += sum * numbers.scale[part];
      total -= x_sum * numbers.min[part];
    }
  }
  return total;
}

void Linear(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, int terms, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  const auto token = [&](int64_t m) {
    const bf16* high = x + m * terms * ldx;
    return Activations{high, terms > 1 ? high + ldx : nullptr};
  };
  if (IsBlockFormat(w.dtype)) {
    for (int64_t r = row_begin; r < row_end; ++r) {
      for (int64_t m = 0; m < m_count; ++m) y[m * ldy + r] = BlockRowDot(w, r, token(m));
    }
    return;
  }
  ForDType(w.dtype, [&]<DType kDType>() {
    for (int64_t r = row_begin; r < row_end; ++r) {
      for (int64_t m = 0; m < m_count; ++m) y[m * ldy + r] = RowDot<kDType>(w, r, token(m));
    }
  });
}

void Gemm(const WeightView& w, const bf16* x, int64_t ldx, int64_t m_count, float* y, int64_t ldy, int64_t row_begin, int64_t row_end) {
  Linear(w, x, ldx, m_count, 1, y, ldy, row_begin, row_end);
}

void LinearTransposed(const WeightView& w, const float* x, float* y, int64_t col_begin, int64_t col_end) {
  for (int64_t c = col_begin; c < col_end; ++c) y[c] = 0.0f;
  if (IsBlockFormat(w.dtype)) {
    const DTypeBlock block = BlockOf(w.dtype);
    float weights[kBlockColumnsMax];
    for (int64_t r = 0; r < w.rows; ++r) {
      const float xr = x[r];
      for (int64_t at = col_begin / block.elements * block.elements; at < col_end; at += block.elements) {
        DequantizeRow(w.dtype, RowData(w, r) + at / block.elements * block.bytes, block.elements, weights);
        const int64_t end = at + block.elements < col_end ? at + block.elements : col_end;
        for (int64_t c = at < col_begin ? col_begin : at; c < end; ++c) y[c] += xr * weights[c - at];
      }
    }
    return;
  }
  ForDType(w.dtype, [&]<DType kDType>() {
    for (int64_t r = 0; r < w.rows; ++r) {
      const uint8_t* data = RowData(w, r);
      const float xr = x[r];
      for (int64_t c = col_begin; c < col_end; ++c) {
        float weight = Element<kDType>(data, c);
        if constexpr (kDType == DType::kF8E4M3) weight *= RowScales(w, r)[c / kScaleBlock];
        y[c] += xr * weight;
      }
    }
  });
}

void SiluMul(const float* gate, const float* up, bf16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = ToBf16(gate[i] / (1.0f + PortableExp(-gate[i])) * up[i]);
}

void Axpy(float a, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

float MaxFinite(const float* x, int64_t n) {
  float best = x[0];
  float zero = 0.0f;  // becomes NaN at the first x that is not finite
  for (int64_t i = 0; i < n; ++i) {
    best = x[i] > best ? x[i] : best;
    zero += x[i] * 0.0f;
  }
  return best + zero;
}

float ExpSum(const float* x, int64_t n, float top, float factor, float* out) {
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float weight = PortableExp((x[i] - top) * factor);
    if (out != nullptr) out[i] = weight;
    sum += weight;
  }
  return sum;
}

float Widened(bf16 x) { return ToFloat(x); }
float Widened(float x) { return x; }

template <class A, class B>
float Dot(const A* a, const B* b, int64_t n, float sum) {
  for (int64_t i = 0; i < n; ++i) sum += Widened(a[i]) * Widened(b[i]);
  return sum;
}

// Turns `count` scores into exp(score - max), moves the state on and rescales acc [n] to the new max.
void AdvanceSoftmax(float* scores, int64_t count, SoftmaxState* state, float* acc, int64_t n) {
  float max = state->max;
  for (int64_t j = 0; j < count; ++j) max = scores[j] > max ? scores[j] : max;
  if (max == -__builtin_inff()) {  // nothing visible so far
    for (int64_t j = 0; j < count; ++j) scores[j] = 0.0f;
    return;
  }
  const float factor = PortableExp(state->max - max);
  for (int64_t i = 0; i < n; ++i) acc[i] *= factor;
  state->sum *= factor;
  state->max = max;
  for (int64_t j = 0; j < count; ++j) {
    scores[j] = PortableExp(scores[j] - max);
    state->sum += scores[j];
  }
}

template <class T>
void AddValues(const float* p, const T* v, int64_t ldv, int64_t count, float* acc, int64_t n) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t i = 0; i < n; ++i) acc[i] += p[j] * Widened(v[j * ldv + i]);
  }
}

void MlaAbsorbed(const bf16* q_latent, const bf16* q_rope, const bf16* kv, int64_t count, int64_t heads, int64_t rank, int64_t rope, float scale,
                 SoftmaxState* state, float* acc, float* scratch) {
  const int64_t ldkv = rank + rope;
  for (int64_t h = 0; h < heads; ++h) {
    float* scores = scratch + h * 64;
    for (int64_t j = 0; j < count; ++j) {
      const bf16* row = kv + j * ldkv;
      const float latent = Dot(q_latent + h * rank, row, rank, 0.0f);
      scores[j] = scale * Dot(q_rope + h * rope, row + rank, rope, latent);
    }
    AdvanceSoftmax(scores, count, &state[h], acc + h * rank, rank);
    AddValues(scores, kv, ldkv, count, acc + h * rank, rank);
  }
}

void AttendPage(const ExpandedPage& page, const bf16* q, int64_t queries, int64_t seen, SoftmaxState* state, float* acc, int64_t ldacc, float*) {
  for (int64_t i = 0; i < queries; ++i) {
    float weights[kAttendPositions];
    const int64_t count = std::max<int64_t>(0, std::min(page.count, seen + i) - page.skip);
    const bf16* keys = page.keys + page.skip * page.ld;
    const bf16* values = page.values + page.skip * page.ld;
    float* sums = acc + i * ldacc;
    for (int64_t j = 0; j < count; ++j) weights[j] = page.scale * Dot(q + i * page.key_dim, keys + j * page.ld, page.key_dim, 0.0f);
    AdvanceSoftmax(weights, count, &state[i], sums, page.value_dim);
    for (int64_t j = 0; j < count; ++j) {
      const float high = ToFloat(ToBf16(weights[j]));
      const bf16* value = values + j * page.ld;
      if (page.terms == 1) {
        AddValues(&high, value, page.ld, 1, sums, page.value_dim);
        continue;
      }
      const float low = ToFloat(ToBf16(weights[j] - high));
      AddValues(&high, value, page.ld, 1, sums, page.value_dim);
      AddValues(&high, value + page.value_dim, page.ld, 1, sums, page.value_dim);
      AddValues(&low, value, page.ld, 1, sums, page.value_dim);
    }
  }
}

void WidenBf16(const bf16* src, int64_t ld, int64_t low, int64_t rows, int64_t n, float* dst, int64_t ld_dst) {
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* from = src + r * ld;
    for (int64_t i = 0; i < n; ++i) dst[r * ld_dst + i] = low > 0 ? ToFloat(from[i]) + ToFloat(from[low + i]) : ToFloat(from[i]);
  }
}

void WidenF8(const uint8_t* codes, int64_t ld, const float* scales, int64_t rows, int64_t n, float* dst, int64_t ld_dst) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) dst[r * ld_dst + i] = kF8.value[codes[r * ld + i]] * scales[r];
  }
}

template <class K>
void Attend(const float* q, int64_t queries, const K* k, int64_t ldk, const K* v, int64_t ldv, int64_t count, int64_t key_dim, int64_t value_dim,
            float scale, SoftmaxState* state, float* acc, float* scratch, const NextRuns&) {
  for (int64_t h = 0; h < queries; ++h) {
    float* scores = scratch + h * 64;
    for (int64_t j = 0; j < count; ++j) scores[j] = scale * Dot(q + h * key_dim, k + j * ldk, key_dim, 0.0f);
    AdvanceSoftmax(scores, count, &state[h], acc + h * value_dim, value_dim);
    AddValues(scores, v, ldv, count, acc + h * value_dim, value_dim);
  }
}

}  // namespace

constinit const KernelTable kScalarTable = {
    .name = "scalar",
    .to_bf16 = ScalarToBf16,
    .rms_norm = RmsNorm,
    .linear = Linear,
    .gemm = Gemm,
    .linear_transposed = LinearTransposed,
    .silu_mul = SiluMul,
    .axpy = Axpy,
    .max_finite = MaxFinite,
    .exp_sum = ExpSum,
    .mla_absorbed = MlaAbsorbed,
    .attend_page = AttendPage,
    .widen_bf16 = WidenBf16,
    .widen_f8 = WidenF8,
    .attend = Attend<float>,
    .attend_bf16 = Attend<bf16>,
};

}  // namespace hearth
